// From scores to exponentials, a row at a time, with the running maximum and the running sums.
#pragma once
#include "pack.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

// What one query may see by a rule, within [lo, hi).
struct View {
  int64_t lo, hi;
  const uint8_t *seen;
  int64_t stride;
  bool shows;
  const int64_t *ids;
  int64_t id;
};

inline View view_of(const Rule &rule, int64_t batch, int64_t head, int64_t query) {
  View v{};
  v.lo = rule.lo[batch * rule.lo_stride[0] + head * rule.lo_stride[1] + query * rule.lo_stride[2]];
  v.hi = rule.hi[batch * rule.hi_stride[0] + head * rule.hi_stride[1] + query * rule.hi_stride[2]];
  if (rule.seen) {
    v.seen = rule.seen + batch * rule.seen_stride[0] + head * rule.seen_stride[1] + query * rule.seen_stride[2];
    v.stride = rule.seen_stride[3], v.shows = rule.shows;
  }
  if (rule.key_ids) {
    v.ids = rule.key_ids + batch * rule.key_ids_stride[0];
    v.id = rule.query_ids[batch * rule.query_ids_stride[0] + query * rule.query_ids_stride[1]];
  }
  return v;
}

// Which of the keys from `key` on it may see. Nothing is read outside of [lo, hi).
INLINE Int sees(const View &v, int64_t key) {
  Int n = iota() + (int32_t)key;
  Int visible = (n >= (int32_t)v.lo) & (n < (int32_t)v.hi);
  if (!v.seen && !v.ids) return visible;
  int64_t begin = most(v.lo - key, 0), end = least(v.hi - key, W);
  if (v.seen) {
    Bytes some = {};
    if (begin <= 0 && end >= W && v.stride == 1) __builtin_memcpy(&some, v.seen + key, sizeof some);
    else for (int64_t k = begin; k < end; k++) some[k] = v.seen[(key + k) * v.stride];
    Int shown = __builtin_convertvector(some, Int) != 0;
    visible &= v.shows ? shown : ~shown;
  }
  if (v.ids) {
    Int alike = {};
    if (begin <= 0 && end >= W)
      for (int k = 0; k < W; k++) alike[k] = v.ids[key + k] == v.id ? -1 : 0;
    else
      for (int64_t k = begin; k < end; k++) alike[k] = v.ids[key + k] == v.id ? -1 : 0;
    visible &= alike;
  }
  return visible;
}

// Brings lo and hi to the first and behind the last key that the rule shows between them.
inline void tighten(View &v) {
  if (!v.seen && !v.ids) return;
  for (bool found = false; v.lo < v.hi && !found;) {
    int64_t key = most(v.lo, v.hi - W);
    uint32_t seen = lanes(sees(v, key));
    found = seen, v.hi = found ? key + 32 - __builtin_clz(seen) : key;
  }
  for (bool found = false; v.lo < v.hi && !found;) {
    uint32_t seen = lanes(sees(v, v.lo));
    found = seen, v.lo += found ? __builtin_ctz(seen) : W;
  }
}

// What the rows of a block are and may see. lo = hi = 0 where a row sees nothing.
struct Sight {
  int64_t query[kBlock], head[kBlock], lo[kBlock], hi[kBlock];
  View view[kBlock];
  const Real *bias[kBlock];
  Real slope[kBlock], position[kBlock];
  // Of each group of six rows: the hull of what they see, and the keys that all of them see.
  int64_t group_lo[kBlock / kGroup], group_hi[kBlock / kGroup];
  int64_t common_lo[kBlock / kGroup], common_hi[kBlock / kGroup];
  int64_t block_lo, block_hi;
};

// What groups and the block see, from what the rows see.
inline void narrow(Sight &s, int64_t rows, int64_t key_begin, int64_t key_end) {
  s.block_lo = key_end, s.block_hi = key_begin;
  for (int64_t r = 0; r < rows; r++) {
    int64_t lo = s.lo[r], hi = s.hi[r], group = r / kGroup, &group_lo = s.group_lo[group], &group_hi = s.group_hi[group];
    if (r % kGroup == 0) group_lo = group_hi = 0, s.common_lo[group] = key_begin, s.common_hi[group] = key_end;
    s.common_lo[group] = most(s.common_lo[group], lo), s.common_hi[group] = least(s.common_hi[group], hi);
    if (lo < hi) {
      group_lo = group_hi ? least(group_lo, lo) : lo;
      group_hi = most(group_hi, hi);
      s.block_lo = least(s.block_lo, lo), s.block_hi = most(s.block_hi, hi);
    }
  }
}

inline Sight look(const Request &a, const Task &task) {
  Sight s;
  int64_t heads = a.heads_per_key();
  for (int64_t r = 0; r < task.row_end - task.row_begin; r++) {
    int64_t query = (task.row_begin + r) / heads, head = task.group * heads + (task.row_begin + r) % heads;
    View &v = s.view[r] = view_of(a, task.batch, head, query);
    v.lo = most(v.lo, task.key_begin), v.hi = least(v.hi, task.key_end);
    tighten(v);
    if (v.lo >= v.hi) v.lo = v.hi = 0;
    int64_t lo = v.lo, hi = v.hi;
    s.query[r] = query, s.head[r] = head, s.lo[r] = lo, s.hi[r] = hi;
    if (a.bias)
      s.bias[r] = a.bias + task.batch * a.bias_stride[0] + head * a.bias_stride[1] + query * a.bias_stride[2];
    if (a.slopes) {
      s.slope[r] = a.slopes[head];
      s.position[r] = a.positions[task.batch * a.positions_stride[0] + query * a.positions_stride[1]];
    }
  }
  narrow(s, task.row_end - task.row_begin, task.key_begin, task.key_end);
  return s;
}

INLINE Vec bias_of(const Request &a, const Sight &s, int64_t r, int64_t key) {
  int64_t stride = a.bias_stride[3], count = least(a.j - key, W);
  if (stride == 1 && count == W) return load(s.bias[r] + key);
  Vec some = {};
  for (int64_t k = 0; k < count; k++) some[k] = s.bias[r][(key + k) * stride];
  return some;
}

// Which of the keys from `key` on a row sees.
INLINE Int visible(const Request &a, const Sight &s, int64_t r, int64_t key) {
  Int seen = sees(s.view[r], key);
  return a.bias ? seen & (bias_of(a, s, r, key) != -kInfinity) : seen;
}

// Of the rows of a group, whether some see a key of a panel that lies in their hull, and whether all see all of them.
struct Shown { bool some, all; };
inline Shown shown(const Request &a, const Sight &s, int64_t first, int64_t count, int64_t key) {
  int64_t group = first / kGroup;
  if (!a.is_dense()) return {true, s.common_lo[group] <= key && s.common_hi[group] >= key + kPanel};
  uint32_t any = 0, every = kAllLanes;
  for (int64_t r = first; r < first + count && (!any || every == kAllLanes); r++)
    for (int column = 0; column < kPanel; column += W) {
      uint32_t found = lanes(visible(a, s, r, key + column));
      any |= found, every &= found;
    }
  return {any != 0, every == kAllLanes};
}

// The steps between product and softmax, on 64 scores of one row: softcap, alibi, bias, mask. Needed only where a panel
// is not fully visible or the problem asks for more than a scale, so it may read the scores back from memory.
inline void adjust(const Request &a, const Sight &s, int64_t r, int64_t key, Real *scores, Real *tile_max) {
  Vec top = all(-kInfinity);
  for (int column = 0; column < kPanel; column += W) {
    Vec x = load(scores + column);
    if (a.adjusted()) x = x * a.scale;
    if (a.softcap > 0) x = tanh(x / a.softcap) * a.softcap;
    if (a.slopes) {
      Vec distance = s.position[r] - (Real)key - __builtin_convertvector(iota() + column, Vec);
      x -= absolute(distance) * s.slope[r];
    }
    if (a.bias) x += bias_of(a, s, r, key + column);
    x = select(visible(a, s, r, key + column), x, all(-kInfinity));
    store(scores + column, x);
    top = larger(x, top);
  }
  store(tile_max, larger(top, load(tile_max)));
}

// Replaces scores by exp2((scores - reference) * unit); adds them up by lanes. -inf becomes an exact 0, the
// reference itself an exact 1.
template <bool with_moment>
inline void exponentials(Real *scores, int64_t n, Real reference, Real unit, Real *sum, Real *moment) {
  Vec minus = all(reference), total[4] = {}, first[4] = {};
  for (int64_t k = 0; k < n; k += 4 * W) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      Vec x = load(scores + k + v * W) - minus;
      Vec y = exp2_nonpositive(x, all(unit));
      store(scores + k + v * W, y);
      total[v] += y;
      if (with_moment) first[v] += y * larger(x * unit, all(kSmallest));
    }
  }
  store(sum, load(sum) + ((total[0] + total[1]) + (total[2] + total[3])));
  if (with_moment) store(moment, load(moment) + ((first[0] + first[1]) + (first[2] + first[3])));
}

// What exponents are relative to: a row that has seen nothing yet has no score to offer.
inline Real finite_reference(const Rows &rows, int64_t r) {
  return rows.reference[r] == -kInfinity ? 0.f : rows.reference[r];
}

// Moves a row's sums to a new reference, and returns the factor that does the same for its output.
// The moment's exponents are relative to the reference as well; all its terms are <= 0, so nothing cancels.
inline Real move_reference(const Request &a, const Rows &rows, int64_t r, Real score, Real exponent) {
  Real before = rows.reference[r];
  if (!(score > before)) return 1.f;
  rows.reference[r] = score;
  Real shift = (before - score) * exponent, factor = exp2_nonpositive(shift);
  Real *sum = rows.sum + r * kMaxWidth, *moment = rows.moment + r * kMaxWidth;
  for (int k = 0; k < kMaxWidth; k += W) {
    Vec total = load(sum + k) * factor;
    if (a.entropy) store(moment + k, load(moment + k) * factor + total * larger(shift, kSmallest));
    store(sum + k, total);
  }
  return factor;
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
