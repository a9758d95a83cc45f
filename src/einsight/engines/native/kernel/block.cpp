// The loop nest: a block of query rows passes over its keys once, a tile at a time. docs/native.md draws it.
// Compiled once per instruction set; EINSIGHT_LEVEL names the instance.
#include "finish.h"
#include "gradient.h"
#include "tiles.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

// The block's queries where they are, if they lie as a copy of them would.
static const Real *queries_in_place(const Request &a, const Task &task) {
  bool alike = a.dtype == kOwn && !a.pairs && a.heads_per_key() == 1 && a.query_factor() == 1.f;
  bool dense = a.query_stride[3] == 1 && a.query_stride[2] == round_up(a.d, kMaxWidth);
  if (!alike || !dense) return nullptr;
  return (const Real *)queries_of(a, task.batch, task.group).data + task.row_begin * a.query_stride[2];
}

static void copy_queries(const Request &a, const Task &task, const Sight &s, int64_t count, Real *to) {
  for (int64_t r = 0; r < count; r++, to += round_up(a.d, kMaxWidth))
    if (a.pairs)
      pack_row_of_pairs(in_pairs(a, queries_of(a, task.batch, s.head[r])), s.query[r], a.query_factor() < 0, to);
    else
      pack_row(a, a.query, a.query_stride, task.batch, s.head[r], s.query[r], a.d, a.query_factor(), to);
}

// A score before its scale; a finite one stays finite.
static Real unscaled(const Request &a, Real score) {
  Real made = score / a.unit();
  return made - made == 0.f || score - score != 0.f ? made : score > 0.f ? kLargest : -kLargest;
}

static void begin(const Request &a, const Sight &s, Rows &rows) {
  int64_t padded = ValuePanels(a.e).padded();
  for (int64_t r = 0; r < rows.count; r++) {
    rows.reference[r] = a.sink ? unscaled(a, a.sink[s.head[r]]) : -kInfinity;
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
                       const Real *queries, const Source &keys, int64_t tile_begin, Real *scores, int64_t stride,
                       uint32_t *live) {
  int64_t query_stride = round_up(a.d, kMaxWidth);
  Real ignored[kGroup * kMaxWidth] = {};
  fill(work.tile_max, 0, rows.count * kMaxWidth, -kInfinity);
  for (int64_t group = 0; group * kGroup < rows.count; group++) live[group] = 0;
  for (int64_t key = most(tile_begin, s.block_lo / kPanel * kPanel); key < least(tile_begin + kTile, s.block_hi);
       key += kPanel) {
    for (int64_t first = 0, group = 0; first < rows.count; first += kGroup, group++) {
      if (s.group_hi[group] <= key || s.group_lo[group] >= key + kPanel) continue;
      int64_t count = least(kGroup, rows.count - first);
      Shown panel = shown(a, s, first, count, key);
      bool plain = panel.all && !a.adjusted();
      Real *to = scores + first * stride + key - tile_begin, *top = work.tile_max + first * kMaxWidth;
      if (!panel.some) {
        for (int64_t r = 0; r < count; r++) fill(to + r * stride, 0, kPanel, -kInfinity);
        continue;
      }
      live[group] |= 1u << (key - tile_begin) / kPanel;
      const Real *query = queries + first * query_stride;
      if (tile.keys)
        (a.pairs ? kScorePairs : kScorePanel)[count - 1](query, query_stride, tile.keys + (key - tile_begin) * a.depth(),
                                                         a.depth(), a.slab(), to, stride, plain ? top : ignored);
      else
        by_dtype(a.dtype, [&](auto element) {
          constexpr Dtype dtype = dtype_of(decltype(element){});
          (keys.stride == 1 ? score_rows<dtype, true> : score_rows<dtype, false>)(query, query_stride, count, keys, key,
                                                                                  to, stride, plain ? top : ignored);
        });
      if (plain) continue;
      for (int64_t r = 0; r < count; r++) adjust(a, s, first + r, key, to + r * stride, top + r * kMaxWidth);
    }
  }
}

// Weights times values for one group of rows. Where a value is NaN or infinite, a zero weight is no protection:
// there each row multiplies just the keys it sees, with the same chain of additions. If single keys may be hidden
// between them, or beside them in a pair, it is a copy of the values with zeros in their place.
static void value_tile(const Request &a, const Sight &s, const Rows &rows, const Workspace &work, const Tile &tile,
                       int64_t tile_begin, Span live, int64_t first, const Real *weights, int64_t stride,
                       const Real *correction) {
  ValuePanels panels(a.e);
  int64_t count = least(kGroup, rows.count - first), group = first / kGroup, at_once = a.pairs ? 2 : 1;
  int64_t chain = a.value_chain();
  static constexpr Real one[kGroup] = {1, 1, 1, 1, 1, 1};
  bool copied = tile.unsafe && (a.is_dense() || a.pairs);
  for (int64_t n = 0; n < panels.count; n++) {
    int64_t begin = panels.begin(n) * W, columns = panels.begin(n + 1) - panels.begin(n), width = columns * W;
    int64_t step = tile.value_row ? tile.value_row : width;
    const Real *values = tile.values + begin * (tile.value_row ? 1 : a.tile_steps());
    auto add = [&](int64_t r, int64_t rows_at_once, const Real *values, int64_t step, int64_t lo, int64_t hi) {
      lo = most(lo - tile_begin, 0), hi = most(least(hi - tile_begin, kTile), lo);
      lo = lo / at_once, hi = (hi + at_once - 1) / at_once;
      const Real *factor = correction + r;
      do {  // at least once, for the correction
        int64_t end = least(hi, (lo & -chain) + chain);
        (a.pairs ? kAddPairs : kAddValues)[rows_at_once - 1][columns - 1](
            weights + r * stride + lo, stride, values + lo * step, step, end - lo,
            rows.output + (first + r) * panels.padded() + begin, panels.padded(), factor);
        lo = end, factor = one;
      } while (lo < hi);
    };
    int64_t lo = most(live.begin, s.group_lo[group]), hi = least(live.end, s.group_hi[group]);
    if (!tile.unsafe) {
      add(0, count, values, step, lo, hi);
      continue;
    }
    for (int64_t r = 0; r < count; r++) {
      if (copied) copy_seen(a, s, first + r, live, tile_begin, values, step, width, work.values);
      if (copied) add(r, 1, work.values, width, lo, hi);
      else add(r, 1, values, step, most(s.lo[first + r], live.begin), least(s.hi[first + r], live.end));
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
  Sight s = look(a, task, a.group());
  rows.count = task.row_end - task.row_begin;
  const Real *in_place = queries_in_place(a, task), *queries = in_place ? in_place : work.query;
  if (!in_place) copy_queries(a, task, s, rows.count, work.query);
  begin(a, s, rows);
  if (a.tiles) return attend_by_tiles(a, task, s, packed, work, rows);
  Real exponent = a.unit() * kLog2e;
  Source keys = keys_of(a, task.batch, task.group);
  auto exponentials = exponentials_for(a);
  for (int64_t t = s.block_lo / kTile; t * kTile < s.block_hi; t++) {
    Tile tile = packed_tile(a, task, packed, t);
    int64_t stride = a.keeps_weights() ? rows.weights_stride : kTile + 16;
    Real *scores = a.keeps_weights() ? rows.weights + t * kTile - rows.origin : work.scores;
    uint32_t live[kBlock / kGroup];
    score_tile(a, s, rows, work, tile, queries, keys, t * kTile, scores, stride, live);
    for (int64_t first = 0; first < rows.count; first += kGroup) {
      Span span = written(s, first / kGroup, t);
      if (span.begin >= span.end) continue;
      Real correction[kGroup], base[kGroup];
      int64_t count = least(kGroup, rows.count - first);
      Real tops[kGroup];
#pragma GCC unroll 6
      for (int64_t n = 0; n < kGroup; n++) tops[n] = max_of_row(work.tile_max + (first + n) * kMaxWidth);
      for (int64_t n = 0; n < count; n++) {
        int64_t r = first + n;
        rows.largest[r] = larger(tops[n], rows.largest[r]);
        correction[n] = move_reference(a, rows, r, tops[n], exponent);
        base[n] = finite_reference(rows, r);
        if (a.keeps_weights()) rows.tile_reference[t * rows.rows_stride + r] = base[n];
      }
      Span seen = live_part(span, t, live[first / kGroup]);
      for (int64_t n = 0; n < count; n++) {
        int64_t r = first + n;
        Real *row = scores + r * stride - t * kTile;
        Real *pairs = a.pairs ? work.pairs + n * kPairStride + (seen.begin - t * kTile) / 2 : nullptr;
        int64_t at = (task.batch * a.h + s.head[r]) * a.i + s.query[r];
        if (a.scores) write_scores(a, s, r, t * kTile, kTile, at * a.j, row);
        if (span.begin < seen.begin) fill(row, span.begin, seen.begin, 0.f);  // a fill of nothing takes its time too
        if (seen.end < span.end) fill(row, seen.end, span.end, 0.f);
        exponentials(row + seen.begin, seen.end - seen.begin, base[n], exponent, rows.sum + r * kMaxWidth,
                     rows.moment + r * kMaxWidth, pairs);
      }
      if (!a.value || seen.begin >= seen.end) continue;
      const Real *weights = scores + first * stride;
      if (a.pairs) value_tile(a, s, rows, work, tile, t * kTile, seen, first, work.pairs, kPairStride, correction);
      else value_tile(a, s, rows, work, tile, t * kTile, seen, first, weights, stride, correction);
    }
  }
}

static double peak(int64_t steps) {
  Vec c[12];
  for (int n = 0; n < 12; n++) c[n] = all((Real)n);
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
extern const Kernel kernel = {EINSIGHT_NAME(EINSIGHT_LEVEL), W, kHasPairs, kHasTiles, attend, merge, finish,
                              differentiate, peak};

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
