// The loop nest: a block of query rows passes over its keys once, a tile at a time. docs/native.md draws it.
// Compiled once per instruction set; EINSIGHT_LEVEL names the instance.
#include "finish.h"
#include "gradient.h"

namespace einsight {
namespace EINSIGHT_LEVEL {

static void begin(const Request &a, const Task &task, const Sight &s, Workspace &work, Rows &rows) {
  int64_t query_stride = round_up(a.d, kMaxWidth), padded = ValuePanels(a.e).padded();
  rows.count = task.row_end - task.row_begin;
  for (int64_t r = 0; r < rows.count; r++) {
    pack_row(a, a.query, a.query_stride, task.batch, s.head[r], s.query[r], a.d, a.query_factor(),
             work.query + r * query_stride);
    rows.reference[r] = a.sink ? a.sink[s.head[r]] / a.unit() : -kInfinity;
    rows.largest[r] = -kInfinity;
  }
  fill(rows.sum, 0, rows.count * kMaxWidth, 0.f);
  fill(rows.moment, 0, rows.count * kMaxWidth, 0.f);
  if (a.value) fill(rows.output, 0, rows.count * padded, 0.f);
  if (a.keeps_weights() && rows.weights_stride == 0) {
    rows.origin = least(s.block_lo, a.j) / kPanel * kPanel;
    // The extra 16 keep rows from starting at the same place in a 4 KiB page.
    rows.weights_stride = round_up(most(s.block_hi, rows.origin), kPanel) - rows.origin + 16;
  }
}

// Scores of a tile, panel by panel, so that a panel stays in L1 while all rows use it. Marks in live[group] the panels
// of which some row of the group sees a key; the others are not multiplied.
static void score_tile(const Request &a, const Sight &s, const Rows &rows, const Workspace &work, const Tile &tile,
                       int64_t tile_begin, float *scores, int64_t stride, uint32_t *live) {
  int64_t query_stride = round_up(a.d, kMaxWidth);
  // A long chain of additions loses bits; where the products cost nothing (decoding), chains are kept short.
  int64_t slab = rows.count <= kGroup ? 16 : 64;
  float ignored[kGroup * kMaxWidth] = {};
  fill(work.tile_max, 0, rows.count * kMaxWidth, -kInfinity);
  for (int64_t group = 0; group * kGroup < rows.count; group++) live[group] = 0;
  for (int64_t key = most(tile_begin, s.block_lo / kPanel * kPanel); key < least(tile_begin + kTile, s.block_hi);
       key += kPanel) {
    for (int64_t first = 0, group = 0; first < rows.count; first += kGroup, group++) {
      if (s.group_hi[group] <= key || s.group_lo[group] >= key + kPanel) continue;
      int64_t count = least(kGroup, rows.count - first);
      Shown panel = shown(a, s, first, count, key);
      bool plain = panel.all && !a.adjusted();
      float *to = scores + first * stride + key - tile_begin, *top = work.tile_max + first * kMaxWidth;
      if (!panel.some) {
        for (int64_t r = 0; r < count; r++) fill(to + r * stride, 0, kPanel, -kInfinity);
        continue;
      }
      live[group] |= 1u << (key - tile_begin) / kPanel;
      kScorePanel[count - 1](work.query + first * query_stride, query_stride,
                             tile.keys + (key - tile_begin) * a.d, a.d, slab, to, stride, plain ? top : ignored);
      if (plain) continue;
      for (int64_t r = 0; r < count; r++) adjust(a, s, first + r, key, to + r * stride, top + r * kMaxWidth);
    }
  }
}

// Weights times values for one group of rows. Where a value is NaN or infinite, a zero weight is no protection:
// there each row multiplies just the keys it sees, with the same chain of additions. If single keys are hidden
// between them, it is a copy of the values with zeros in their place.
static void value_tile(const Request &a, const Sight &s, const Rows &rows, const Workspace &work, const Tile &tile,
                       int64_t tile_begin, Span live, int64_t first, const float *weights, int64_t stride,
                       const float *correction) {
  ValuePanels panels(a.e);
  int64_t count = least(kGroup, rows.count - first);
  for (int64_t n = 0; n < panels.count; n++) {
    int64_t begin = panels.begin(n) * W, columns = panels.begin(n + 1) - panels.begin(n), width = columns * W;
    float *to = rows.output + first * panels.padded() + begin;
    bool copied = tile.unsafe && a.is_dense();
    int64_t row = tile.value_row && !copied ? tile.value_row : width;
    const float *values = tile.values + begin * (tile.value_row ? 1 : kTile);
    auto add = [&](int64_t r, int64_t rows_at_once, int64_t lo, int64_t hi) {
      lo = most(lo - tile_begin, 0), hi = most(least(hi - tile_begin, kTile), lo);
      kAddValues[rows_at_once - 1][columns - 1](weights + r * stride + lo, stride,
                                                (copied ? work.values : values) + lo * row, row, hi - lo,
                                                to + r * panels.padded(), panels.padded(), correction + r);
    };
    auto copy_seen = [&](int64_t r) {
      int64_t step = tile.value_row ? tile.value_row : width;
      for (int64_t key = live.begin; key < live.end; key += W) {
        uint32_t seen = lanes(visible(a, s, first + r, key));
        for (int64_t k = 0; k < W; k++)
          for (int64_t v = 0; v < width; v += W) {
            int64_t at = key + k - tile_begin;
            store(work.values + at * width + v, seen >> k & 1 ? load(values + at * step + v) : Vec{});
          }
      }
    };
    if (!tile.unsafe) {
      add(0, count, most(live.begin, s.group_lo[first / kGroup]), least(live.end, s.group_hi[first / kGroup]));
    } else {
      for (int64_t r = 0; r < count; r++) {
        if (a.is_dense()) copy_seen(r);
        add(r, 1, most(s.lo[first + r], live.begin), least(s.hi[first + r], live.end));
      }
    }
  }
}

// The part of a tile that a group of rows has written: whole panels.
inline Span written(const Sight &s, int64_t group, int64_t tile) {
  return {most(s.group_lo[group] / kPanel * kPanel, tile * kTile),
          least(round_up(s.group_hi[group], kPanel), (tile + 1) * kTile)};
}

// The panels between the first and the last that some row of the group sees.
inline Span live_part(const Span &span, int64_t tile, uint32_t live) {
  if (!live) return {span.end, span.end};
  return {tile * kTile + __builtin_ctz(live) * kPanel, tile * kTile + (32 - __builtin_clz(live)) * kPanel};
}

static void attend(const Request &a, const Task &task, Packed &packed, Workspace &work, Rows &rows) {
  Sight s = look(a, task);
  begin(a, task, s, work, rows);
  float exponent = a.unit() * kLog2e;
  for (int64_t t = s.block_lo / kTile; t * kTile < s.block_hi; t++) {
    Tile tile = packed_tile(a, task, packed, t);
    int64_t stride = a.keeps_weights() ? rows.weights_stride : kTile + 16;
    float *scores = a.keeps_weights() ? rows.weights + t * kTile - rows.origin : work.scores;
    uint32_t live[kBlock / kGroup];
    score_tile(a, s, rows, work, tile, t * kTile, scores, stride, live);
    for (int64_t first = 0; first < rows.count; first += kGroup) {
      Span span = written(s, first / kGroup, t);
      if (span.begin >= span.end) continue;
      float correction[kGroup], base[kGroup];
      int64_t count = least(kGroup, rows.count - first);
      for (int64_t n = 0; n < count; n++) {
        int64_t r = first + n;
        float top = max_lanes(load(work.tile_max + r * kMaxWidth));
        for (int64_t k = W; k < kMaxWidth; k += W) top = larger(max_lanes(load(work.tile_max + r * kMaxWidth + k)), top);
        rows.largest[r] = larger(top, rows.largest[r]);
        correction[n] = move_reference(a, rows, r, top, exponent);
        base[n] = finite_reference(rows, r);
        if (a.keeps_weights()) rows.tile_reference[t * rows.rows_stride + r] = base[n];
      }
      Span seen = live_part(span, t, live[first / kGroup]);
      for (int64_t n = 0; n < count; n++) {
        int64_t r = first + n;
        float *row = scores + r * stride - t * kTile;
        if (a.scores) write_scores(a, s, r, t, ((task.batch * a.h + s.head[r]) * a.i + s.query[r]) * a.j, row);
        fill(row, span.begin, seen.begin, 0.f);
        fill(row, seen.end, span.end, 0.f);
        (a.entropy ? exponentials<true> : exponentials<false>)(row + seen.begin, seen.end - seen.begin,
                                                               base[n], exponent, rows.sum + r * kMaxWidth,
                                                               rows.moment + r * kMaxWidth);
      }
      if (a.value && seen.begin < seen.end)
        value_tile(a, s, rows, work, tile, t * kTile, seen, first, scores + first * stride, stride, correction);
    }
  }
}

static double peak(int64_t steps) {
  Vec c[12];
  for (int n = 0; n < 12; n++) c[n] = all((float)n);
  Vec x = all(0.999f), y = all(1e-3f);
  asm volatile("" : "+m"(x), "+m"(y));
  Vec p = x, q = y;
  for (int64_t k = 0; k < steps; k++)
#pragma GCC unroll 12
    for (int n = 0; n < 12; n++) c[n] = c[n] * p + q;
  Vec total = {};
  for (int n = 0; n < 12; n++) total += c[n];
  return sum_lanes(total);
}

#define EINSIGHT_TEXT(x) #x
#define EINSIGHT_NAME(x) EINSIGHT_TEXT(x)
extern const Kernel kernel = {EINSIGHT_NAME(EINSIGHT_LEVEL), W, attend, merge, finish, differentiate, peak};

}  // namespace EINSIGHT_LEVEL
}  // namespace einsight
