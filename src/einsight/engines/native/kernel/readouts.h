// What is read from the finished weights of a row, or of a group of six: one function per readout.
// Rows are whole panels of weights. A hidden key's weight is -0: sums don't notice the sign, and comparisons of
// bits tell it from a visible key that weighs nothing.
#pragma once
#include "products.h"
#include "softmax.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

struct Span { int64_t begin, end; };

// The sum over a row of what `term` makes of the weights from a key on.
template <class F> INLINE Real sum_row(Span span, F term) {
  Vec total[4] = {};
  for (int64_t j = span.begin; j < span.end; j += 4 * W)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) total[v] += term(j + v * W);
  return sum_lanes((total[0] + total[1]) + (total[2] + total[3]));
}

inline Real share(const View &rule, const Real *row, Span span) {
  span = {most(span.begin, rule.lo / kPanel * kPanel), least(span.end, round_up(rule.hi, kPanel))};
  return sum_row(span, [&](int64_t j) { return select(sees(rule, j), load(row + j), Vec{}); });
}

inline Real distance(int64_t position, const Real *row, Span span) {
  Vec n = __builtin_convertvector(iota(), Vec);
  return sum_row(span, [&](int64_t j) {
    Vec away = all((Real)(position - j)) - n;
    return load(row + j) * absolute(away);
  });
}

inline Real diagonal(int64_t key, const Real *row, Span span) {
  return span.begin <= key && key < span.end ? row[key] + 0.f : 0.f;
}

// One row of weights, written once. Where rows lie on whole vectors, past the caches.
template <bool aligned> inline void write_row(int64_t keys, const Real *row, Span span, Real *to) {
  auto put = [](Real *at, Vec v) { aligned ? stream(at, v) : store(at, v); };
  auto one = [&](int64_t j) { return span.begin <= j && j < span.end ? row[j] + 0.f : 0.f; };
  int64_t whole = keys / W * W, j = 0;
  for (; j < least(span.begin, whole); j += W) put(to + j, Vec{});
  for (; j < least(span.end, whole); j += W) put(to + j, load(row + j) + Vec{});
  for (; j < whole; j += W) put(to + j, Vec{});
  for (; j < keys; j++) to[j] = one(j);
}

// Puts a number where the least one, on top of the heap, is. The hole goes all the way down to a leaf, and the number
// up from there: this asks nothing that a processor would have to guess.
inline void replace_top(uint64_t *heap, int64_t count, uint64_t number, int64_t at = 0) {
  int64_t top = at;
  for (int64_t child; (child = 2 * at + 1) < count; at = child) {
    child += child + 1 < count && heap[child + 1] < heap[child];
    heap[at] = heap[child];
  }
  for (int64_t parent; at > top && heap[parent = (at - 1) / 2] > number; at = parent) heap[at] = heap[parent];
  heap[at] = number;
}

// The largest weights and their keys. A weight's bits above the complement of its key make one number of both, which
// orders as asked: by weight, NaN before all, then the lowest key first. A heap keeps the k largest, the least on top.
inline void top(int64_t k, const Real *row, Span span, Real *weights, int64_t *indices) {
  if constexpr (kIsDouble) return;  // a weight and its key fill more than 64 bits: not asked for
  auto heap = (uint64_t *)indices;
  int64_t count = 0;
  int32_t least_bits = -1;
  auto order = [&] {
    for (int64_t n = count / 2; n-- > 0;) replace_top(heap, count, heap[n], n);
  };
  for (int64_t j = span.begin; j < span.end; j += W) {
    Int some = as_int(load(row + j));
    for (uint32_t found = lanes(some > least_bits); found; found &= found - 1) {
      int lane = __builtin_ctz(found);
      int32_t weight;
      __builtin_memcpy(&weight, row + j + lane, 4);
      if (weight <= least_bits) continue;
      uint64_t both = (uint64_t)weight << 32 | (uint32_t)~(uint32_t)(j + lane);
      if (count < k) {
        heap[count++] = both;
        if (count < k) continue;
        order();
      } else {
        replace_top(heap, k, both);
      }
      least_bits = heap[0] >> 32;
    }
  }
  if (count < k) order();
  for (int64_t n = count; n-- > 1;) {
    uint64_t smallest = heap[0];
    replace_top(heap, n, heap[n]);
    heap[n] = smallest;
  }
  for (int64_t n = 0; n < k; n++) {
    uint32_t weight = n < count ? heap[n] >> 32 : 0;
    __builtin_memcpy(weights + n, &weight, 4);
    indices[n] = n < count ? (int64_t)(uint32_t)~(uint32_t)heap[n] : -1;
  }
}

// Several rows times a matrix, tile by tile: [rows][keys] . [keys][groups] -> [rows][padded groups].
inline void mass(const Ask &ask, int64_t batch, const Real *row, int64_t rows_stride, int64_t rows, Span span,
                 Real *to) {
  ValuePanels panels(ask.number);
  int64_t padded = round_up(ask.number, kMaxWidth);
  const Real *matrix = ask.matrix + batch * ask.item_stride, ones[kGroup] = {1, 1, 1, 1, 1, 1};
  fill(to, 0, rows * padded, 0.f);
  for (int64_t n = 0; n < panels.count; n++) {
    int64_t column = panels.begin(n) * W, columns = panels.begin(n + 1) - panels.begin(n);
    for (int64_t j = span.begin; j < span.end;) {
      int64_t end = least(span.end, round_up(j + 1, kTile));
      kAddValues[rows - 1][columns - 1](row + j, rows_stride, matrix + j * padded + column, padded, end - j, to + column,
                                        padded, ones);
      j = end;
    }
  }
}

// The same for ids, where a matrix would be mostly zeros.
inline void mass_of_ids(const Ask &ask, int64_t batch, const Real *row, int64_t rows_stride, int64_t rows, Span span,
                        double *to) {
  const int64_t *ids = ask.ids + batch * ask.item_stride;
  for (int64_t n = 0; n < rows * ask.number; n++) to[n] = 0;
  for (int64_t j = span.begin; j < span.end; j++)
    if (ids[j] >= 0)
      for (int64_t r = 0; r < rows; r++) to[r * ask.number + ids[j]] += row[r * rows_stride + j];
}

template <int count, bool ones>
INLINE void add_rows(const Real *const *from, Real *to, Span span) {
  auto term = [&](int n, int64_t j) {
    Vec weight = load(from[n] + j);
    return ones ? select(as_int(weight) < 0, Vec{}, all(1.f)) : weight;
  };
  for (int64_t j = span.begin; j < span.end; j += W) {
    Vec sum = term(0, j);
#pragma GCC unroll 6
    for (int n = 1; n < count; n++) sum += term(n, j);
    store(to + j, load(to + j) + sum);
  }
}

template <bool ones> inline void add_rows(int64_t count, const Real *const *from, Real *to, Span span) {
  switch (count) {
    case 1: return add_rows<1, ones>(from, to, span);
    case 2: return add_rows<2, ones>(from, to, span);
    case 3: return add_rows<3, ones>(from, to, span);
    case 4: return add_rows<4, ones>(from, to, span);
    case 5: return add_rows<5, ones>(from, to, span);
    default: return add_rows<6, ones>(from, to, span);
  }
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
