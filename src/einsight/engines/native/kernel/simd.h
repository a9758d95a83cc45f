// Vectors of floats by compiler extensions: one source for every instruction set.
// Loads and stores go through memcpy: a vector type with reduced alignment costs a factor of ten.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "request.h"

extern "C" double tanh(double);

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

#if defined(__AVX512F__)
#define EINSIGHT_COLUMNS_4 1
constexpr int kBytes = 64, kColumns = 4;  // kColumns: vectors per row of a register tile
#elif defined(__AVX2__)
constexpr int kBytes = 32, kColumns = 2;
#elif defined(__aarch64__)
#define EINSIGHT_COLUMNS_4 1
constexpr int kBytes = 16, kColumns = 4;
#else
constexpr int kBytes = 16, kColumns = 2;
#endif

constexpr bool kIsDouble = sizeof(Real) == 8;
constexpr int W = kBytes / sizeof(Real);
typedef std::conditional_t<kIsDouble, int64_t, int32_t> Whole;
typedef std::make_unsigned_t<Whole> Word;
typedef Real Vec __attribute__((vector_size(kBytes)));
typedef Whole Int __attribute__((vector_size(kBytes)));
typedef Word Bits __attribute__((vector_size(kBytes)));
typedef uint16_t Half __attribute__((vector_size(W * 2)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

#define INLINE inline __attribute__((always_inline))

INLINE Vec load(const Real *from) { Vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(Real *to, Vec v) { __builtin_memcpy(to, &v, sizeof v); }
// A store past the caches, for results nobody reads soon; `to` is aligned to the vector.
INLINE void stream(Real *to, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps((float *)to, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps((float *)to, (__m256)v);
#else
  store(to, v);
#endif
}
INLINE void end_of_stream() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

inline void fill(Real *to, int64_t begin, int64_t end, Real x) {
  for (int64_t k = begin; k < end; k++) to[k] = x;
}

INLINE Vec all(Real x) { return x - Vec{}; }

// a b + c in one rounding where the processor has it. Said outright where the compiler might round the product instead,
// depending on what else uses it.
INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  if constexpr (kIsDouble) return (Vec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  else return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  if constexpr (kIsDouble) return (Vec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  else return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  if constexpr (kIsDouble) return (Vec)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  else return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
INLINE Real multiply_add(Real a, Real b, Real c) { return multiply_add(all(a), all(b), all(c))[0]; }

INLINE Bits bits(Vec v) { return (Bits)v; }
constexpr Word kSign = (Word)1 << (8 * sizeof(Word) - 1);
INLINE Vec absolute(Vec v) { return (Vec)(bits(v) & ~kSign); }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // NaN in a gives b

INLINE Real larger(Real a, Real b) { return a > b ? a : b; }

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
template <class F> INLINE Real fold(Vec v, F combine) {
  if constexpr (W > 8) v = combine(v, swap<8>(v, Lanes{}));
  if constexpr (W > 4) v = combine(v, swap<4>(v, Lanes{}));
  if constexpr (W > 2) v = combine(v, swap<2>(v, Lanes{}));
  v = combine(v, swap<1>(v, Lanes{}));
  return v[0];
}
INLINE Real sum_lanes(Vec v) { return fold(v, [](Vec a, Vec b) { return a + b; }); }
INLINE Real max_lanes(Vec v) { return fold(v, [](Vec a, Vec b) { return larger(a, b); }); }

constexpr Real kLog2e = 1.44269504088896340736, kLn2 = 0.69314718055994530942;
constexpr Real kInfinity = __builtin_inf();
constexpr Real kLargest = kIsDouble ? __DBL_MAX__ : __FLT_MAX__;
using Wide = std::conditional_t<kIsDouble, long double, double>;  // for what a row has one of: sums that nearly cancel
constexpr Real kSmallest = kIsDouble ? -1022 : -126;  // exp2 below this is 0

// 2^f on [-1/2, 1/2] by Horner's rule, highest power first: a fit of degree 6, or for double ln(2)^n / n! up to 13.
constexpr float kExp2[] = {1.5353362e-4f, 1.3398874453e-3f, 9.6184373576e-3f, 5.5503324710e-2f,
                           2.4022647914e-1f, 6.9314720286e-1f, 1.f};
constexpr double kExp2Double[] = {1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10, 7.054911620801123e-09,
                                  1.01780860092397e-07, 1.321548679014431e-06, 1.5252733804059841e-05, 0.0001540353039338161,
                                  0.0013333558146428443, 0.009618129107628477, 0.05550410866482158, 0.24022650695910072,
                                  0.6931471805599453, 1.0};

// 2^(x c) for x c <= 0: exactly 0 below -126 and for -inf, exactly 1 at 0, NaN for NaN; 1 ulp.
// Adding 1.5 * 2^23 (2^52 for double) rounds to an integer and leaves it in the low bits, where the shift finds it. The product is never
// rounded by itself: both its uses are multiply-adds.
INLINE Vec exp2_nonpositive(Vec x, Vec c) {
  constexpr auto &series = *[]() constexpr { if constexpr (kIsDouble) return &kExp2Double; else return &kExp2; }();
  const Vec magic = all(kIsDouble ? 6755399441055744. : 12582912.);
  Vec shifted = multiply_add(x, c, magic);
  Vec f = multiply_add(x, c, magic - shifted);
  Vec p = all(series[0]);
#pragma GCC unroll 16
  for (int n = 1; n < (int)(sizeof(series) / sizeof(Real)); n++) p = p * f + series[n];
  Vec y = (Vec)(bits(p) + (bits(shifted) << (kIsDouble ? 52 : 23)));
  return shifted < magic + kSmallest ? Vec{} : y;
}

INLINE Vec exp2_nonpositive(Vec x) { return exp2_nonpositive(x, all(1.f)); }

INLINE Int as_int(Vec v) { return (Int)v; }
INLINE Int select(Int condition, Int a, Int b) { return condition ? a : b; }

// A bit for each lane of a comparison.
INLINE uint32_t lanes(Int condition) {
#if defined(__AVX512DQ__)
  if constexpr (kIsDouble) return _mm512_movepi64_mask((__m512i)condition);
  else return _mm512_movepi32_mask((__m512i)condition);
#elif defined(__AVX2__)
  if constexpr (kIsDouble) return _mm256_movemask_pd((__m256d)condition);
  else return _mm256_movemask_ps((__m256)condition);
#else
  uint32_t found = 0;
  for (int k = 0; k < W; k++) found |= (uint32_t)(condition[k] & 1) << k;
  return found;
#endif
}
constexpr uint32_t kAllLanes = (1u << W) - 1;

INLINE Real exp2_nonpositive(Real x) { return exp2_nonpositive(all(x))[0]; }

INLINE Vec select(Int condition, Vec a, Vec b) { return condition ? a : b; }

// tanh, 1-2 ulp: an odd polynomial near 0, where 1 - 2/(e^2x + 1) would cancel.
INLINE Vec tanh(Vec x) {
  if constexpr (kIsDouble) {
    for (int k = 0; k < W; k++) x[k] = ::tanh((double)x[k]);
    return x;
  }
  Vec size = absolute(x), z = x * x;
  Vec p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  Vec near = p * z * x + x;
  Vec e = exp2_nonpositive(size * (-2.f * kLog2e));
  Vec far = 1.f - 2.f * e / (1.f + e);
  far = (Vec)(bits(far) | (bits(x) & kSign));
  return size < 0.625f ? near : far;
}

// Two bfloat16 numbers in the place of one float, where the processor multiplies and adds both at once.
#if defined(__AVX512BF16__) && !EINSIGHT_IS_DOUBLE
constexpr bool kHasPairs = true;
INLINE Vec add_pairs(Vec c, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
INLINE Vec to_pairs(Vec first, Vec second) {  // the 32 numbers of both, rounded, in their order
  return (Vec)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
#else
constexpr bool kHasPairs = false;
INLINE Vec add_pairs(Vec c, Vec, Vec) { return c; }
INLINE Vec to_pairs(Vec first, Vec) { return first; }
#endif

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

INLINE Half to_bfloat16(Vec v) {
  Bits u = bits(v), rounded = u + 0x7fff + ((u >> 16) & 1), nan = u | 0x400000;
  return __builtin_convertvector((v != v ? nan : rounded) >> 16, Half);
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
template <> struct Element<Dtype::float64> { typedef double type; };
constexpr Dtype kOwn = kIsDouble ? Dtype::float64 : Dtype::float32;

// W consecutive elements as floats.
template <Dtype dtype> INLINE Vec load_as_float(const typename Element<dtype>::type *from) {
  if constexpr (dtype == kOwn) {
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

// The sums of the lanes of W vectors, as one vector: half of a transposition, adding what it brings together.
INLINE Vec sums_of_lanes(Vec (&v)[W]) {
#pragma GCC unroll 4
  for (int n = W / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < n; k++) v[k] = interleave<0>(v[k], v[k + n], Lanes{}) + interleave<W / 2>(v[k], v[k + n], Lanes{});
  return v[0];
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
