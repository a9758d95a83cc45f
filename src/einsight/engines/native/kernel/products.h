// Both matrix products of attention, from one register tile: up to 6 rows of A times n rows of B.
//   scores: A = query rows [6][d],    B = a key panel [d][64]
//   output: A = weight rows [6][keys], B = a value panel [keys][width]
// The five products of the gradients are the same two, and the second with A turned.
#pragma once
#include "simd.h"

namespace einsight {
namespace EINSIGHT_LEVEL {

// 6 x 4 accumulators (AVX-512, NEON) or 6 x 2 (AVX2) keep both multiply-add pipes full, and leave registers for
// one row of B. Each entry is one chain of multiply-adds in the order of n, whatever the tile's shape: that is why
// the same row gives the same bits in any tile. `turned` reads A by columns, as the gradients of keys and values do.
template <int rows, int columns, bool turned = false>
INLINE void multiply(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t n,
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
      for (int v = 0; v < columns; v++) c[r][v] += x * row[v];
    }
  }
}

// scores[r][0..63] = query rows . keys of a panel; tile_max takes the largest of each lane.
// The sum over d is cut into slabs, each a chain of its own.
template <int rows>
void score_panel(const float *query, int64_t query_stride, const float *keys, int64_t d, int64_t slab, float *scores,
                 int64_t scores_stride, float *tile_max) {
  for (int column = 0; column < kPanel; column += kColumns * W) {
    for (int64_t k = 0; k < d; k += slab) {
      bool last = k + slab >= d;
      Vec c[rows][kColumns] = {};
      multiply<rows, kColumns>(query + k, query_stride, keys + k * kPanel + column, kPanel, last ? d - k : slab, c);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        float *to = scores + r * scores_stride + column;
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

// output = output * correction + weights . values, for one panel of the value dimension.
template <int rows, int columns, bool turned>
void add_values(const float *weights, int64_t weights_stride, const float *values, int64_t values_stride, int64_t keys,
                float *output, int64_t output_stride, const float *correction) {
  Vec c[rows][columns] = {};
  multiply<rows, columns, turned>(weights, weights_stride, values, values_stride, keys, c);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < columns; v++) {
      float *to = output + r * output_stride + v * W;
      store(to, load(to) * correction[r] + c[r][v]);
    }
}

typedef void (*ScorePanel)(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t, float *);
typedef void (*AddValues)(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t, const float *);

constexpr ScorePanel kScorePanel[kGroup] = {score_panel<1>, score_panel<2>, score_panel<3>,
                                            score_panel<4>, score_panel<5>, score_panel<6>};
#if EINSIGHT_COLUMNS_4
#define EINSIGHT_BY_COLUMNS(rows, turned) \
  {add_values<rows, 1, turned>, add_values<rows, 2, turned>, add_values<rows, 3, turned>, add_values<rows, 4, turned>}
#else
#define EINSIGHT_BY_COLUMNS(rows, turned) {add_values<rows, 1, turned>, add_values<rows, 2, turned>}
#endif
#define EINSIGHT_BY_ROWS(turned) \
  {EINSIGHT_BY_COLUMNS(1, turned), EINSIGHT_BY_COLUMNS(2, turned), EINSIGHT_BY_COLUMNS(3, turned), \
   EINSIGHT_BY_COLUMNS(4, turned), EINSIGHT_BY_COLUMNS(5, turned), EINSIGHT_BY_COLUMNS(6, turned)}
constexpr AddValues kAddValues[kGroup][kColumns] = EINSIGHT_BY_ROWS(false);
constexpr AddValues kAddTurned[kGroup][kColumns] = EINSIGHT_BY_ROWS(true);

}  // namespace EINSIGHT_LEVEL
}  // namespace einsight
