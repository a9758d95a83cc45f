// Vectors of floats by compiler extensions: one source for every instruction set.
// Loads and stores go through memcpy: a vector type with reduced alignment costs a factor of ten.
#pragma once
#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "request.h"

namespace einsight {
namespace EINSIGHT_LEVEL {

#if defined(__AVX512F__)
#define EINSIGHT_COLUMNS_4 1
constexpr int W = 16, kColumns = 4;  // kColumns: vectors per row of a register tile
#elif defined(__AVX2__)
constexpr int W = 8, kColumns = 2;
#elif defined(__aarch64__)
#define EINSIGHT_COLUMNS_4 1
constexpr int W = 4, kColumns = 4;
#else
constexpr int W = 4, kColumns = 2;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Int __attribute__((vector_size(W * 4)));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));
typedef uint16_t Half __attribute__((vector_size(W * 2)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

#define INLINE inline __attribute__((always_inline))

INLINE Vec load(const float *from) { Vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, Vec v) { __builtin_memcpy(to, &v, sizeof v); }
// A store past the caches, for results nobody reads soon; `to` is aligned to the vector.
INLINE void stream(float *to, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)v);
#else
  store(to, v);
#endif
}
INLINE void end_of_stream() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

inline void fill(float *to, int64_t begin, int64_t end, float x) {
  for (int64_t k = begin; k < end; k++) to[k] = x;
}

// a b + c in one rounding where the processor has it. Said outright where the compiler might round the product instead,
// depending on what else uses it.
INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE Vec all(float x) { return x - Vec{}; }
INLINE Bits bits(Vec v) { return (Bits)v; }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // NaN in a gives b

INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE Int iota() {
  Int v;
  for (int k = 0; k < W; k++) v[k] = k;
  return v;
}

typedef std::make_integer_sequence<int, W> Lanes;

template <int distance, int... k> INLINE Vec swap(Vec v, std::integer_sequence<int, k...>) {
  return __builtin_shufflevector(v, v, (k ^ distance)...);
}

// Folds a vector to one number by combining its halves, then their halves, ...
template <class F> INLINE float fold(Vec v, F combine) {
  if constexpr (W > 8) v = combine(v, swap<8>(v, Lanes{}));
  if constexpr (W > 4) v = combine(v, swap<4>(v, Lanes{}));
  v = combine(v, swap<2>(v, Lanes{}));
  v = combine(v, swap<1>(v, Lanes{}));
  return v[0];
}
INLINE float sum_lanes(Vec v) { return fold(v, [](Vec a, Vec b) { return a + b; }); }
INLINE float max_lanes(Vec v) { return fold(v, [](Vec a, Vec b) { return larger(a, b); }); }

constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
constexpr float kInfinity = __builtin_inff();
constexpr float kSmallest = -126.f;  // exp2 below this is 0

// 2^(x c) for x c <= 0: exactly 0 below -126 and for -inf, exactly 1 at 0, NaN for NaN; 1 ulp.
// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits, where the shift finds it. The product is never
// rounded by itself: both its uses are multiply-adds.
INLINE Vec exp2_nonpositive(Vec x, Vec c) {
  const Vec magic = all(12582912.f);
  Vec shifted = multiply_add(x, c, magic);
  Vec f = multiply_add(x, c, magic - shifted);
  Vec p = all(1.5353362e-4f);
  p = p * f + 1.3398874453e-3f;
  p = p * f + 9.6184373576e-3f;
  p = p * f + 5.5503324710e-2f;
  p = p * f + 2.4022647914e-1f;
  p = p * f + 6.9314720286e-1f;
  p = p * f + 1.f;
  Vec y = (Vec)(bits(p) + (bits(shifted) << 23));
  return shifted < magic + kSmallest ? Vec{} : y;
}

INLINE Vec exp2_nonpositive(Vec x) { return exp2_nonpositive(x, all(1.f)); }

INLINE Int as_int(Vec v) { return (Int)v; }
INLINE Int select(Int condition, Int a, Int b) { return condition ? a : b; }

// A bit for each lane of a comparison.
INLINE uint32_t lanes(Int condition) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)condition);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)condition);
#else
  uint32_t found = 0;
  for (int k = 0; k < W; k++) found |= (uint32_t)(condition[k] & 1) << k;
  return found;
#endif
}
constexpr uint32_t kAllLanes = (1u << W) - 1;

INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(all(x))[0]; }

INLINE Vec select(Int condition, Vec a, Vec b) { return condition ? a : b; }

// tanh, 1-2 ulp: an odd polynomial near 0, where 1 - 2/(e^2x + 1) would cancel.
INLINE Vec tanh(Vec x) {
  Vec size = (Vec)(bits(x) & 0x7fffffffu), z = x * x;
  Vec p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  Vec near = p * z * x + x;
  Vec e = exp2_nonpositive(size * (-2.f * kLog2e));
  Vec far = 1.f - 2.f * e / (1.f + e);
  far = (Vec)(bits(far) | (bits(x) & 0x80000000u));
  return size < 0.625f ? near : far;
}

INLINE Vec from_bfloat16(Half h) { return (Vec)(__builtin_convertvector(h, Bits) << 16); }

INLINE Vec from_float16(Half h) {
  Bits u = __builtin_convertvector(h, Bits);
  // The exponent is moved by a multiplication, so that subnormal numbers come out right as well.
  Vec v = (Vec)((u & 0x7fffu) << 13) * 0x1p112f;
  Bits special = (u & 0x7c00u) == 0x7c00u;
  Bits out = (bits(v) | (special & 0x7f800000u)) | ((u & 0x8000u) << 16);
  return (Vec)out;
}

INLINE uint16_t to_bfloat16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  if (x != x) return (u >> 16) | 0x40;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

INLINE uint16_t to_float16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  uint16_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00;
  if (u >= 0x477ff000u) return sign | 0x7c00;  // rounds to 65536 or more
  if (u < 0x38800000u) {                       // subnormal: let an addition do the rounding
    float size;
    __builtin_memcpy(&size, &u, 4);
    size += 0.5f;
    __builtin_memcpy(&u, &size, 4);
    return sign | (u - 0x3f000000u);
  }
  return sign | ((u - 0x38000000u + 0xfff + ((u >> 13) & 1)) >> 13);
}

INLINE float to_float(float x) { return x; }

template <Dtype dtype> struct Element { typedef uint16_t type; };
template <> struct Element<Dtype::float32> { typedef float type; };

// W consecutive elements as floats.
template <Dtype dtype> INLINE Vec load_as_float(const typename Element<dtype>::type *from) {
  if constexpr (dtype == Dtype::float32) {
    return load(from);
  } else {
    Half h;
    __builtin_memcpy(&h, from, sizeof h);
    return dtype == Dtype::bfloat16 ? from_bfloat16(h) : from_float16(h);
  }
}

// The first n < W elements, `stride` apart, zeros after them.
template <Dtype dtype>
INLINE Vec load_some(const typename Element<dtype>::type *from, int64_t stride, int64_t n) {
  typename Element<dtype>::type buffer[W] = {};
  for (int64_t k = 0; k < n; k++) buffer[k] = from[k * stride];
  return load_as_float<dtype>(buffer);
}

template <int from, int... k> INLINE Vec interleave(Vec a, Vec b, std::integer_sequence<int, k...>) {
  return __builtin_shufflevector(a, b, (from + k / 2 + k % 2 * W)...);
}

// Transposes W vectors of W floats by log2(W) rounds of interleaving the halves.
INLINE void transpose(Vec (&v)[W]) {
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
    Vec out[W];
#pragma GCC unroll 8
    for (int k = 0; k < W / 2; k++) {
      out[2 * k] = interleave<0>(v[k], v[k + W / 2], Lanes{});
      out[2 * k + 1] = interleave<W / 2>(v[k], v[k + W / 2], Lanes{});
    }
#pragma GCC unroll 16
    for (int k = 0; k < W; k++) v[k] = out[k];
  }
}

}  // namespace EINSIGHT_LEVEL
}  // namespace einsight
