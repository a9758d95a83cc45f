// What the rows of a block may see: intervals of keys, and within them bytes, ids and biases of minus infinity.
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
  v.lo = rule.first(batch, head, query), v.hi = rule.last(batch, head, query);
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

// W bytes of 0 or 1, as lanes.
INLINE Int from_bytes(const uint8_t *from) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // there the compiler takes the bytes one by one
  if constexpr (!kIsDouble) return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)) != 0;
#endif
  Bytes some;
  __builtin_memcpy(&some, from, sizeof some);
  return __builtin_convertvector(some, Int) != 0;
}

// Whether the rule on these keys is their bytes alone, one after the other.
INLINE bool is_bytes(const View &v, int64_t key, int64_t count) {
  return v.seen && !v.ids && v.stride == 1 && v.lo <= key && key + count <= v.hi;
}

// Which of the keys from `key` on it may see. Nothing is read outside of [lo, hi).
INLINE Int sees(const View &v, int64_t key) {
  if (is_bytes(v, key, W)) return v.shows ? from_bytes(v.seen + key) : ~from_bytes(v.seen + key);
  Int n = iota() + (int32_t)key;
  Int visible = (n >= (int32_t)v.lo) & (n < (int32_t)v.hi);
  if (!v.seen && !v.ids) return visible;
  int64_t begin = most(v.lo - key, 0), end = least(v.hi - key, W);
  if (v.seen) {
    Bytes some = {};
    for (int64_t k = begin; k < end; k++) some[k] = v.seen[(key + k) * v.stride];
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

constexpr uint64_t kOnes = 0x0101010101010101u;
INLINE uint64_t eight(const uint8_t *from) { uint64_t x; __builtin_memcpy(&x, from, 8); return x; }

// Brings lo and hi to the first and behind the last key that the rule shows between them.
inline void tighten(View &v) {
  if (!v.seen && !v.ids) return;
  if (is_bytes(v, v.lo, 0)) {
    uint64_t hidden = v.shows ? 0 : kOnes;
    auto hides = [&](const uint8_t *from) {
      uint64_t seen = 0;
      for (int n = 0; n < 32; n += 8) seen |= eight(from + n) ^ hidden;
      return seen == 0;
    };
    while (v.hi - v.lo >= 32 && hides(v.seen + v.hi - 32)) v.hi -= 32;
    while (v.hi - v.lo >= 32 && hides(v.seen + v.lo)) v.lo += 32;
  }
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
  // Of each group of rows, six or more: the hull of what they see, and the keys that all of them see.
  int64_t group;
  int64_t group_lo[kBlock / kGroup], group_hi[kBlock / kGroup];
  int64_t common_lo[kBlock / kGroup], common_hi[kBlock / kGroup];
  int64_t block_lo, block_hi;

  // Divided by a constant: by `group` it takes longer than all else that is asked of a row.
  int64_t group_of(int64_t r) const { return group == kGroup ? r / kGroup : r / kStrip; }
};

// What groups and the block see, from what the rows see.
inline void narrow(Sight &s, int64_t rows, int64_t key_begin, int64_t key_end) {
  s.block_lo = key_end, s.block_hi = key_begin;
  for (int64_t r = 0, before = -1; r < rows; r++) {
    int64_t lo = s.lo[r], hi = s.hi[r], group = s.group_of(r);
    int64_t &group_lo = s.group_lo[group], &group_hi = s.group_hi[group];
    if (group != before) group_lo = group_hi = 0, s.common_lo[group] = key_begin, s.common_hi[group] = key_end;
    before = group;
    s.common_lo[group] = most(s.common_lo[group], lo), s.common_hi[group] = least(s.common_hi[group], hi);
    if (lo < hi) {
      group_lo = group_hi ? least(group_lo, lo) : lo;
      group_hi = most(group_hi, hi);
      s.block_lo = least(s.block_lo, lo), s.block_hi = most(s.block_hi, hi);
    }
  }
}

inline Sight look(const Request &a, const Task &task, int64_t group) {
  Sight s;
  s.group = group;
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

// Whether some row sees a key of a panel, and whether all see all of them.
struct Shown { bool some, all; };

INLINE Shown shown(const Request &a, const Sight &s, int64_t r, int64_t key) {
  const View &v = s.view[r];
  if (is_bytes(v, key, kPanel) && !a.bias) {
    uint64_t any = 0, every = kOnes;
    for (int n = 0; n < kPanel; n += 8) {
      uint64_t x = eight(v.seen + key + n);
      any |= x, every &= x;
    }
    return v.shows ? Shown{any != 0, every == kOnes} : Shown{every != kOnes, any == 0};
  }
  uint32_t any = 0, every = kAllLanes;
  for (int column = 0; column < kPanel; column += W) {
    uint32_t found = lanes(visible(a, s, r, key + column));
    any |= found, every &= found;
  }
  return {any != 0, every == kAllLanes};
}

// The same of the rows of a group, on a panel that lies in their hull.
inline Shown shown(const Request &a, const Sight &s, int64_t first, int64_t count, int64_t key) {
  int64_t group = s.group_of(first);
  if (!a.is_dense()) return {true, s.common_lo[group] <= key && s.common_hi[group] >= key + kPanel};
  Shown found{false, true};
  for (int64_t r = first; r < first + count && (!found.some || found.all); r++) {
    Shown row = shown(a, s, r, key);
    found.some |= row.some, found.all &= row.all;
  }
  return found;
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
