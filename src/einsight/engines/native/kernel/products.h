// Both matrix products of attention, from one register tile: up to 6 rows of A times n rows of B.
//   scores: A = query rows [6][d],    B = a key panel [d][64]
//   output: A = weight rows [6][keys], B = a value panel [keys][width]
// The five products of the gradients are the same two, and the second with A turned.
#pragma once
#include "pack.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

// 6 x 4 accumulators (AVX-512, NEON) or 6 x 2 (AVX2) keep both multiply-add pipes full, and leave registers for
// one row of B. Each entry is one chain of multiply-adds in the order of n, whatever the tile's shape: that is why
// the same row gives the same bits in any tile. `turned` reads A by columns, as the gradients of keys and values do;
// `pairs` takes two bfloat16 steps for one.
template <int rows, int columns, bool turned, bool pairs>
INLINE void multiply(const Real *a, int64_t a_stride, const Real *b, int64_t b_stride, int64_t n,
                     Vec (&c)[rows][columns]) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < n; k++) {
    Vec row[columns];
#pragma GCC unroll 4
    for (int v = 0; v < columns; v++) row[v] = load(b + k * b_stride + v * W);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      Vec x = all(turned ? a[k * a_stride + r] : a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < columns; v++) c[r][v] = pairs ? add_pairs(c[r][v], x, row[v]) : c[r][v] + x * row[v];
    }
  }
}

// scores[r][0..63] = query rows . keys of a panel; tile_max takes the largest of each lane.
// The sum over d is cut into slabs, each a chain of its own.
template <int rows, bool pairs>
void score_panel(const Real *query, int64_t query_stride, const Real *keys, int64_t d, int64_t slab, Real *scores,
                 int64_t scores_stride, Real *tile_max) {
  for (int column = 0; column < kPanel; column += kColumns * W) {
    for (int64_t k = 0; k < d; k += slab) {
      bool last = k + slab >= d;
      Vec c[rows][kColumns] = {};
      multiply<rows, kColumns, false, pairs>(query + k, query_stride, keys + k * kPanel + column, kPanel, last ? d - k : slab, c);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        Real *to = scores + r * scores_stride + column;
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; v++) {
          if (k > 0) c[r][v] += load(to + v * W);
          store(to + v * W, c[r][v]);
        }
        if (last) {
          Vec top = load(tile_max + r * kMaxWidth);
#pragma GCC unroll 4
          for (int v = 0; v < kColumns; v++) top = larger(c[r][v], top);
          store(tile_max + r * kMaxWidth, top);
        }
      }
    }
  }
}

// The same for a few rows, from keys as they lie in memory. Rows beyond the last key repeat it; nobody sees them.
template <Dtype dtype, bool side_by_side>
void score_rows(const Real *query, int64_t query_stride, int64_t rows, const Source &keys, int64_t key, Real *scores,
                int64_t scores_stride, Real *tile_max) {
  typedef typename Element<dtype>::type E;
  constexpr int together = W < 8 ? W : 8;  // addresses enough for the registers
  // Each row asks memory for its share of the keys to come: all of them at once would wait for each other.
  int64_t share = (keys.width + rows - 1) / rows;
  for (int column = 0; column < kPanel; column += W) {
    const E *row[W];
    for (int n = 0; n < W; n++) row[n] = (const E *)keys.data + least(key + column + n, keys.rows - 1) * keys.row;
    for (int64_t r = 0; r < rows; r++) {
      Vec c[W] = {};
      int64_t ask = r * share, asked = ask + share;
#pragma GCC unroll 2
      for (int first = 0; first < W; first += together)
        for (int64_t k = 0; k < keys.width; k += W) {
          Vec x = load(query + r * query_stride + k);
          if (k >= ask && k < asked)
#pragma GCC unroll 8
            for (int n = first; n < first + together; n++) __builtin_prefetch(row[n] + 2 * kAhead * keys.row + k);
#pragma GCC unroll 8
          for (int n = first; n < first + together; n++) {
            c[n] += x * (side_by_side ? load_as_float<dtype>(row[n] + k)
                                      : load_some<dtype>(row[n] + k * keys.stride, keys.stride, W));
          }
        }
      Vec found = sums_of_lanes(c);
      store(scores + r * scores_stride + column, found);
      store(tile_max + r * kMaxWidth, larger(found, load(tile_max + r * kMaxWidth)));
    }
  }
}

// output = output * correction + weights . values, for one panel of the value dimension.
template <int rows, int columns, bool turned, bool pairs>
void add_values(const Real *weights, int64_t weights_stride, const Real *values, int64_t values_stride, int64_t keys,
                Real *output, int64_t output_stride, const Real *correction) {
  Vec c[rows][columns] = {};
  multiply<rows, columns, turned, pairs>(weights, weights_stride, values, values_stride, keys, c);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < columns; v++) {
      Real *to = output + r * output_stride + v * W;
      store(to, load(to) * correction[r] + c[r][v]);
    }
}

typedef void (*ScorePanel)(const Real *, int64_t, const Real *, int64_t, int64_t, Real *, int64_t, Real *);
typedef void (*AddValues)(const Real *, int64_t, const Real *, int64_t, int64_t, Real *, int64_t, const Real *);

template <bool pairs>
constexpr ScorePanel kScorePanels[kGroup] = {score_panel<1, pairs>, score_panel<2, pairs>, score_panel<3, pairs>,
                                             score_panel<4, pairs>, score_panel<5, pairs>, score_panel<6, pairs>};
#if EINSIGHT_COLUMNS_4
#define EINSIGHT_BY_COLUMNS(rows)                                                        \
  {add_values<rows, 1, turned, pairs>, add_values<rows, 2, turned, pairs>, \
   add_values<rows, 3, turned, pairs>, add_values<rows, 4, turned, pairs>}
#else
#define EINSIGHT_BY_COLUMNS(rows) {add_values<rows, 1, turned, pairs>, add_values<rows, 2, turned, pairs>}
#endif
template <bool turned, bool pairs>
constexpr AddValues kAdders[kGroup][kColumns] = {EINSIGHT_BY_COLUMNS(1), EINSIGHT_BY_COLUMNS(2), EINSIGHT_BY_COLUMNS(3),
                                                 EINSIGHT_BY_COLUMNS(4), EINSIGHT_BY_COLUMNS(5), EINSIGHT_BY_COLUMNS(6)};

// Where the processor multiplies tiles: c = a . b, of 16 rows of pairs and a panel of them, `steps` a multiple of 16.
// What a row gives depends on no other row, so rows beyond the last may hold anything. One tile is two chains of 16
// steps, whose sum is added to the chain over tiles.
#if defined(__AMX_BF16__) && !EINSIGHT_IS_DOUBLE
constexpr bool kHasTiles = true;

INLINE void begin_tiles() {
  struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {};
  shape.palette = 1;
  for (int n = 0; n < 8; n++) shape.bytes[n] = 64, shape.rows[n] = kStrip;
  asm volatile("" : "+m"(shape));
  _tile_loadconfig(&shape);
}
INLINE void end_tiles() { _tile_release(); }

template <int columns>
INLINE void multiply_tiles(const Real *a, int64_t a_stride, const Real *b, int64_t b_stride, int64_t steps, Real *c,
                           int64_t c_stride) {
  asm volatile("" ::: "memory");  // the loads don't say what they read
  _tile_zero(0);
  if (columns > 1) _tile_zero(1);
  if (columns > 2) _tile_zero(2);
  if (columns > 3) _tile_zero(3);
  for (int64_t k = 0; k < steps; k += kStrip) {
    const Real *row = b + k * b_stride;
    _tile_loadd(4, a + k, a_stride * 4);
    _tile_loadd(5, row, b_stride * 4);
    _tile_dpbf16ps(0, 4, 5);
    if (columns > 1) _tile_loadd(6, row + W, b_stride * 4);
    if (columns > 1) _tile_dpbf16ps(1, 4, 6);
    if (columns > 2) _tile_loadd(7, row + 2 * W, b_stride * 4);
    if (columns > 2) _tile_dpbf16ps(2, 4, 7);
    if (columns > 3) _tile_loadd(5, row + 3 * W, b_stride * 4);
    if (columns > 3) _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, c, c_stride * 4);
  if (columns > 1) _tile_stored(1, c + W, c_stride * 4);
  if (columns > 2) _tile_stored(2, c + 2 * W, c_stride * 4);
  if (columns > 3) _tile_stored(3, c + 3 * W, c_stride * 4);
}

// The same for a panel of up to 64 columns.
inline void multiply_tiles(const Real *a, int64_t a_stride, const Real *b, int64_t width, int64_t steps, Real *c,
                           int64_t c_stride) {
  if (width == W) multiply_tiles<1>(a, a_stride, b, W, steps, c, c_stride);
  else if (width == 2 * W) multiply_tiles<2>(a, a_stride, b, 2 * W, steps, c, c_stride);
  else if (width == 3 * W) multiply_tiles<3>(a, a_stride, b, 3 * W, steps, c, c_stride);
  else multiply_tiles<4>(a, a_stride, b, 4 * W, steps, c, c_stride);
}
#else
constexpr bool kHasTiles = false;
INLINE void begin_tiles() {}
INLINE void end_tiles() {}
inline void multiply_tiles(const Real *, int64_t, const Real *, int64_t, int64_t, Real *, int64_t) {}
#endif

constexpr auto kScorePanel = kScorePanels<false>;
constexpr auto kAddValues = kAdders<false, false>;
constexpr auto kAddTurned = kAdders<true, false>;
// Where there are no pairs these are never called, and are not compiled a second time.
constexpr auto kScorePairs = kScorePanels<kHasPairs>;
constexpr auto kAddPairs = kAdders<false, kHasPairs>;

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
