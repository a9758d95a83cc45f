// Copies of the inputs in the order the products read them, in float32.
// Each is made once and read by every query block; reading strided tensors in place would miss the caches.
#pragma once
#include "simd.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

// How the value dimension is cut into register tiles: as equal as whole vectors allow.
struct ValuePanels {
  int64_t vectors, count;
  explicit ValuePanels(int64_t e) : vectors((e + W - 1) / W), count((vectors + kColumns - 1) / kColumns) {}
  int64_t begin(int64_t panel) const { return vectors * panel / count; }  // in vectors
  int64_t padded() const { return vectors * W; }
};

constexpr int64_t kAhead = 16;  // keys between what is packed and what is asked of memory

// Calls f with the dtype as a constant.
template <class F> INLINE auto by_dtype(Dtype dtype, F f) {
  if constexpr (kIsDouble) return f(Element<Dtype::float64>{});
  if (dtype == Dtype::float32) return f(Element<Dtype::float32>{});
  if (dtype == Dtype::bfloat16) return f(Element<Dtype::bfloat16>{});
  return f(Element<Dtype::float16>{});
}
template <Dtype dtype> constexpr Dtype dtype_of(Element<dtype>) { return dtype; }

// One row, times a factor, followed by zeros up to whole vectors. Says whether some element is NaN or infinite.
template <Dtype dtype>
bool pack_row(const typename Element<dtype>::type *from, int64_t stride, int64_t width, Real factor, Real *to) {
  Vec spoiled = Vec{};  // x - x is 0 unless x is NaN or infinite
  for (int64_t k = 0; k < width; k += W) {
    bool whole = stride == 1 && k + W <= width;
    Vec v = whole ? load_as_float<dtype>(from + k) : load_some<dtype>(from + k * stride, stride, least(W, width - k));
    spoiled += v - v;
    store(to + k, v * factor);
  }
  return !(sum_lanes(spoiled) == 0.f);
}

// Row (batch, head, n) of a tensor in the inputs' dtype.
inline bool pack_row(const Request &a, const void *data, const int64_t (&stride)[4], int64_t batch, int64_t head,
                     int64_t n, int64_t width, Real factor, Real *to) {
  return by_dtype(a.dtype, [&](auto element) {
    typedef decltype(element) E;
    auto from = (const typename E::type *)data + batch * stride[0] + head * stride[1] + n * stride[2];
    return pack_row<dtype_of(E{})>(from, stride[3], width, factor, to);
  });
}

// The rows of one key head: element (n, k) is data[n * row + k * stride].
struct Source {
  const void *data;
  int64_t row, stride, rows, width;
  int64_t steps;  // of a panel: the width, and zeros behind it
};

inline const void *element(const Request &a, const void *data, int64_t n) {
  return (const char *)data + n * (a.dtype == kOwn ? sizeof(Real) : 2);
}

inline Source keys_of(const Request &a, int64_t batch, int64_t group) {
  return {element(a, a.key, batch * a.key_stride[0] + group * a.key_stride[1]), a.key_stride[2], a.key_stride[3],
          a.j, a.d, a.d};
}

inline Source queries_of(const Request &a, int64_t batch, int64_t head) {
  return {element(a, a.query, batch * a.query_stride[0] + head * a.query_stride[1]), a.query_stride[2],
          a.query_stride[3], a.i, a.d, a.d};
}

inline Source values_of(const Request &a, int64_t batch, int64_t group) {
  return {element(a, a.value, batch * a.value_stride[0] + group * a.value_stride[1]), a.value_stride[2],
          a.value_stride[3], a.j, a.e, a.e};
}

// The same rows, two bfloat16 numbers in the place of one float.
inline Source in_pairs(const Request &a, const Source &s) {
  return {s.data, s.row / 2, 1, s.rows, s.width / 2, a.depth()};
}

// One row of pairs; the sign of a negative factor goes into both numbers.
inline void pack_row_of_pairs(const Source &source, int64_t n, bool negative, Real *to) {
  auto from = (const uint32_t *)source.data + n * source.row;
  for (int64_t k = 0; k < source.width; k++) {
    uint32_t pair;
    __builtin_memcpy(&pair, from + k, 4);
    pair ^= negative ? 0x80008000u : 0u;
    __builtin_memcpy(to + k, &pair, 4);
  }
  fill(to, source.width, source.steps, 0.f);
}

// One tile of rows to panels [width][64]; rows beyond the end are zeros.
template <Dtype dtype> void pack_panels(const Source &source, int64_t begin, Real *to) {
  auto from = (const typename Element<dtype>::type *)source.data;
  int64_t row = source.row, stride = source.stride;
  int64_t end = round_up(least(source.rows, begin + kTile), kPanel);
  for (int64_t j = begin; j < end; j += W) {
    int64_t count = most(0, least(W, source.rows - j));
    Real *panel = to + (j - begin) / kPanel * kPanel * source.steps + (j - begin) % kPanel;
    for (int64_t k = 0; k < source.steps; k += W) {
      int64_t depth = least(W, source.width - k), steps = least(W, source.steps - k);
      Vec v[W];
      if (stride == 1 && depth == W && count == W) {
#pragma GCC unroll 16
        for (int n = 0; n < W; n++) {
          v[n] = load_as_float<dtype>(from + (j + n) * row + k);
          __builtin_prefetch(from + (j + n + kAhead) * row + k);
        }
      } else {
        for (int n = 0; n < W; n++)
          v[n] = n < count ? load_some<dtype>(from + (j + n) * row + k * stride, stride, depth) : Vec{};
      }
      transpose(v);
      if (steps == W) {
#pragma GCC unroll 16
        for (int n = 0; n < W; n++) store(panel + (k + n) * kPanel, v[n]);
      } else {
        for (int n = 0; n < steps; n++) store(panel + (k + n) * kPanel, v[n]);
      }
    }
  }
}

// One tile of rows to panels [256][columns]. Says whether some element is NaN or infinite.
template <Dtype dtype> bool pack_rows(const Source &source, int64_t begin, Real *to) {
  int64_t row = source.row, stride = source.stride, count = least(kTile, source.rows - begin);
  ValuePanels panels(source.width);
  Vec spoiled = Vec{};
  for (int64_t j = 0; j < count; j++) {
    auto from = (const typename Element<dtype>::type *)source.data + (begin + j) * row;
    for (int64_t n = 0; n < panels.count; n++) {
      int64_t first = panels.begin(n) * W, last = panels.begin(n + 1) * W;
      Real *target = to + first * kTile + j * (last - first) - first;
      for (int64_t k = first; k < last; k += W) {
        bool whole = stride == 1 && k + W <= source.width;
        Vec v = whole ? load_as_float<dtype>(from + k)
                      : load_some<dtype>(from + k * stride, stride, least(W, source.width - k));
        if (whole) __builtin_prefetch(from + kAhead * row + k);
        spoiled += v - v;
        store(target + k, v);
      }
    }
  }
  return !(sum_lanes(spoiled) == 0.f);
}

// One tile of values to panels [128][columns] of pairs: a key's number and the next key's. Panels of keys are whole,
// with zeros beyond the end.
inline bool pack_pairs_of_rows(const Source &source, int64_t begin, Real *to) {
  int64_t row = source.row, stride = source.stride, count = least(kTile, source.rows - begin);
  ValuePanels panels(source.width);
  Vec spoiled = Vec{};
  for (int64_t j = 0; j < round_up(count, kPanel); j += 2) {
    auto from = (const uint16_t *)source.data + (begin + j) * row;
    for (int64_t n = 0; n < panels.count; n++) {
      int64_t first = panels.begin(n) * W, last = panels.begin(n + 1) * W;
      Real *target = to + first * (kTile / 2) + j / 2 * (last - first) - first;
      for (int64_t k = first; k < last; k += W) {
        Vec v[2] = {};
        for (int m = 0; m < least(2, count - j); m++) {
          auto at = from + m * row + k * stride;
          bool whole = stride == 1 && k + W <= source.width;
          v[m] = whole ? load_as_float<Dtype::bfloat16>(at)
                       : load_some<Dtype::bfloat16>(at, stride, least(W, source.width - k));
          if (whole) __builtin_prefetch(at + kAhead * row);
          spoiled += v[m] - v[m];
        }
        store(target + k, (Vec)(bits(v[0]) >> 16 | bits(v[1])));
      }
    }
  }
  return !(sum_lanes(spoiled) == 0.f);
}

// Keys too, unless `keys` is null.
inline void pack_tile(const Request &a, int64_t batch, int64_t group, int64_t tile, Real *keys, Real *values,
                      uint8_t *unsafe) {
  if (a.pairs) {
    pack_panels<Dtype::float32>(in_pairs(a, keys_of(a, batch, group)), tile * kTile, keys);
    *unsafe = a.value && pack_pairs_of_rows(values_of(a, batch, group), tile * kTile, values);
    return;
  }
  by_dtype(a.dtype, [&](auto element) {
    constexpr Dtype dtype = dtype_of(decltype(element){});
    if (keys) pack_panels<dtype>(keys_of(a, batch, group), tile * kTile, keys);
    *unsafe = a.value && pack_rows<dtype>(values_of(a, batch, group), tile * kTile, values);
  });
}

// A tile of keys and values. A value panel that begins at column c starts at values + c * steps, its rows apart by its
// width; in place it starts at values + c, its rows apart by value_row. No packed keys: they too are read in place.
struct Tile {
  const Real *keys, *values;
  int64_t value_row;
  bool unsafe;
};

// Keys that only a few rows read are not worth a transposition. Under grad they are packed as they will be in the
// backward, which finds the largest score by its bits.
inline bool keys_in_place(const Request &a, const Packed &packed) {
  return !packed.state && a.rows() <= kGroup && a.d % W == 0 && !a.pairs && !a.lse_rest;
}

// Values that only one block of rows reads are not worth a copy, unless rows lie so far apart that they would meet
// in the same few lines of the cache. One row that stands for all, or is the only one, is copied: 0 tells a packed tile.
inline bool values_in_place(const Request &a, const Packed &packed) {
  return !packed.state && a.dtype == kOwn && a.value_stride[3] == 1 && a.e % W == 0 && a.value_stride[2] > 0 &&
         a.value_stride[2] <= 2 * a.e;
}

inline bool any_not_finite(const Real *from, int64_t count, int64_t width, int64_t row) {
  Vec spoiled = Vec{};
  for (int64_t j = 0; j < count; j++)
    for (int64_t k = 0; k < width; k += W) {
      Vec v = load(from + j * row + k);
      __builtin_prefetch(from + (j + kAhead) * row + k);
      spoiled += v - v;
    }
  return !(sum_lanes(spoiled) == 0.f);
}

INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The packed tile, packing it if no thread has yet.
inline Tile packed_tile(const Request &a, const Task &task, Packed &packed, int64_t tile) {
  int64_t position = packed.state ? tile : 0;
  Real *keys = keys_in_place(a, packed) ? nullptr : packed.keys + position * kTile * a.depth();
  Real *values = packed.values + position * a.tile_steps() * ValuePanels(a.e).padded();
  uint8_t *unsafe = packed.unsafe + position;
  if (values_in_place(a, packed)) {
    if (keys) pack_panels<kOwn>(keys_of(a, task.batch, task.group), tile * kTile, keys);
    int64_t at = task.batch * a.value_stride[0] + task.group * a.value_stride[1] + tile * kTile * a.value_stride[2];
    auto in_place = (const Real *)a.value + at;
    bool spoiled = a.value && any_not_finite(in_place, least(kTile, a.j - tile * kTile), a.e, a.value_stride[2]);
    return {keys, in_place, a.value_stride[2], spoiled};
  }
  if (!packed.state) {
    pack_tile(a, task.batch, task.group, tile, keys, values, unsafe);
  } else if (__atomic_load_n(packed.state + tile, __ATOMIC_ACQUIRE) != 2) {
    int32_t raw = 0;
    if (__atomic_compare_exchange_n(packed.state + tile, &raw, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
      pack_tile(a, task.batch, task.group, tile, keys, values, unsafe);
      __atomic_store_n(packed.state + tile, 2, __ATOMIC_RELEASE);
    } else {
      while (__atomic_load_n(packed.state + tile, __ATOMIC_ACQUIRE) != 2) pause();
    }
  }
  return {keys, values, 0, *unsafe != 0};
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
