// The forward where products are of tiles. They take so little time that numbers had better not leave the first cache:
// a strip of 16 rows goes all the way from scores to output on one panel of keys, then on the next.
#pragma once
#include "finish.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

#if defined(__AMX_BF16__) && !EINSIGHT_IS_DOUBLE
constexpr int64_t kNear = 3 * kStrip;        // rows that pass over a tile together: their outputs stay close
constexpr int64_t kStripPairs = kPanel / 2;  // a row of weights, two at a time

// What a strip is on its way from scores to output.
struct Strip {
  int64_t key, first, count;
  Real *scores;
  uint32_t moved;            // a bit for each row whose reference moved
  Real correction[kStrip];   // of these
  bool plain;
};

// The largest of each vector's lanes.
INLINE Vec largest_of_lanes(Vec (&v)[W]) {
#pragma GCC unroll 4
  for (int n = W / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < n; k++)
      v[k] = larger(interleave<0>(v[k], v[k + n], Lanes{}), interleave<W / 2>(v[k], v[k + n], Lanes{}));
  return v[0];
}

template <bool with_moment, bool kept> struct Strips {
  const Request &a;
  const Task &task;
  const Sight &s;
  Workspace &work;
  Rows &rows;
  Tile tile;
  int64_t tile_begin, stride, query_stride, padded;
  Real exponent;

  // What the exponentials of a panel are relative to, by row.
  Real *reference(int64_t key) { return rows.tile_reference + key / kPanel * rows.rows_stride; }

  // Sets out to multiply. False if no row sees a key of the panel.
  bool begin(int64_t key, int64_t first, Real *scratch, Strip &strip) {
    if (s.group_hi[first / kStrip] <= key || s.group_lo[first / kStrip] >= key + kPanel) return false;
    int64_t count = least(kStrip, rows.count - first);
    Shown seen = shown(a, s, first, count, key);
    strip.key = key, strip.first = first, strip.count = count;
    strip.scores = kept ? rows.weights + first * stride + key - rows.origin : scratch;
    strip.plain = seen.all && !a.adjusted();
    if (seen.some) {
      const Real *keys = tile.keys + (key - tile_begin) * a.depth();
      multiply_tiles(work.query + first * query_stride, query_stride, keys, kPanel, a.depth(), strip.scores, stride);
      return true;
    }
    for (int64_t n = 0; kept && n < count; n++) {
      fill(strip.scores + n * stride, 0, kPanel, 0.f);
      reference(key)[first + n] = finite_reference(rows, first + n);
    }
    return false;
  }

  // The scores as the softmax sees them, and the largest of each row.
  void look(Strip &strip) {
    const int64_t first = strip.first, count = strip.count, stride = this->stride;
    Real *scores = strip.scores;
    Vec v[W];
    if (strip.plain) {
#pragma GCC unroll 16
      for (int n = 0; n < W; n++) {
        v[n] = all(-kInfinity);
#pragma GCC unroll 4
        for (int column = 0; column < kPanel; column += W) v[n] = larger(load(scores + n * stride + column), v[n]);
      }
    } else {
      for (int n = 0; n < W; n++) {
        Real top[kMaxWidth];
        store(top, all(-kInfinity));
        if (n < count) adjust(a, s, first + n, strip.key, scores + n * stride, top);
        v[n] = load(top);
      }
    }
    for (int64_t n = 0; a.scores && n < count; n++) {
      int64_t row = (task.batch * a.h + s.head[first + n]) * a.i + s.query[first + n];
      write_scores(a, s, first + n, strip.key, kPanel, row * a.j, scores + n * stride - strip.key);
    }
    Vec top = largest_of_lanes(v);
    store(rows.largest + first, larger(top, load(rows.largest + first)));
    strip.moved = lanes(top > load(rows.reference + first)) & ((1u << count) - 1);
    for (uint32_t left = strip.moved; left; left &= left - 1) {
      int n = __builtin_ctz(left);
      strip.correction[n] = move_reference(a, rows, first + n, top[n], exponent);
    }
  }

  // Scores to weights, and sets out to multiply these with the values.
  void weigh(const Strip &strip) {
    const int64_t first = strip.first, count = strip.count, stride = this->stride;
    Real *scores = strip.scores, *pairs = work.pairs, *sum = rows.sum + first * kMaxWidth;
    Real *moment = rows.moment + first * kMaxWidth, base[kStrip], unit = exponent;
    for (int64_t n = 0; n < count; n++) {
      base[n] = finite_reference(rows, first + n);
      if (kept) reference(strip.key)[first + n] = base[n];
    }
    for (int64_t n = 0; n < count; n++)
      exponentials<with_moment, kept, true>(scores + n * stride, kPanel, base[n], unit, sum + n * kMaxWidth,
                                            moment + n * kMaxWidth, pairs + n * kStripPairs);
    if (a.value && !tile.unsafe) each_panel(strip, [&](const Real *values, int64_t width, int64_t begin) {
      multiply(0, values, width, begin);
    });
  }

  // Calls use(values of the panel from the strip's key on, width, first column).
  template <class F> void each_panel(const Strip &strip, F use) {
    ValuePanels panels(a.e);
    for (int64_t p = 0; p < panels.count; p++) {
      int64_t begin = panels.begin(p) * W, width = panels.begin(p + 1) * W - begin;
      use(tile.values + begin * a.tile_steps() + (strip.key - tile_begin) / 2 * width, width, begin);
    }
  }

  void multiply(int64_t n, const Real *values, int64_t width, int64_t begin) {
    multiply_tiles(work.pairs + n * kStripPairs, kStripPairs, values, width, kStripPairs, work.products + begin,
                   padded);
  }

  // Adds what the values gave to the output. Values that are NaN or infinite somewhere are multiplied here, as in
  // value_tile: a copy for each row.
  void end(const Strip &strip) {
    if (!a.value) return;
    const int64_t padded = this->padded;
    for (int64_t n = 0; n < strip.count; n++) {
      if (tile.unsafe) each_panel(strip, [&](const Real *values, int64_t width, int64_t begin) {
        copy_seen(a, s, strip.first + n, {strip.key, strip.key + kPanel}, strip.key, values, width, width, work.values);
        multiply(n, work.values, width, begin);
      });
      const Real *from = work.products + (tile.unsafe ? 0 : n * padded);
      Real *to = rows.output + (strip.first + n) * padded;
      if (strip.moved >> n & 1) {
        Vec correction = all(strip.correction[n]);
        for (int64_t k = 0; k < padded; k += W) store(to + k, load(to + k) * correction + load(from + k));
      } else {
#pragma GCC unroll 4
        for (int64_t k = 0; k < padded; k += W) store(to + k, load(to + k) + load(from + k));
      }
    }
  }
};

// Products take long to arrive: those of one strip are under way while another's exponentials are computed.
template <bool with_moment, bool kept>
void attend_strips(const Request &a, const Task &task, const Sight &s, Packed &packed, Workspace &work, Rows &rows) {
  Strips<with_moment, kept> strips{a, task, s, work, rows, {}, 0, kept ? rows.weights_stride : kPanel,
                                   round_up(a.d, kMaxWidth), ValuePanels(a.e).padded(), a.unit() * kLog2e};
  begin_tiles();
  for (int64_t t = s.block_lo / kTile; t * kTile < s.block_hi; t++) {
    strips.tile = packed_tile(a, task, packed, t), strips.tile_begin = t * kTile;
    int64_t begin = most(t * kTile, s.block_lo / kPanel * kPanel), end = least((t + 1) * kTile, s.block_hi), n = 0;
    Strip both[2], *before = nullptr;
    for (int64_t near = 0; near < rows.count; near += kNear)
      for (int64_t key = begin; key < end; key += kPanel)
        for (int64_t first = near; first < least(near + kNear, rows.count); first += kStrip) {
          Strip *now = both + n % 2;
          if (!strips.begin(key, first, work.scores + n % 2 * kStrip * kPanel, *now)) continue;
          if (before) strips.weigh(*before);
          strips.look(*now);
          if (before) strips.end(*before);
          before = now, n++;
        }
    if (before) strips.weigh(*before), strips.end(*before);
  }
  end_tiles();
}

inline void attend_by_tiles(const Request &a, const Task &task, const Sight &s, Packed &packed, Workspace &work,
                            Rows &rows) {
  auto attend = a.entropy ? a.keeps_weights() ? attend_strips<true, true> : attend_strips<true, false>
                          : a.keeps_weights() ? attend_strips<false, true> : attend_strips<false, false>;
  attend(a, task, s, packed, work, rows);
}
#else
inline void attend_by_tiles(const Request &, const Task &, const Sight &, Packed &, Workspace &, Rows &) {}
#endif

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
