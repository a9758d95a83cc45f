// What becomes of a block of rows once their softmax is known: output and readouts.
#pragma once
#include "softmax.h"

extern "C" float logf(float);
extern "C" double exp(double);
extern "C" double log(double);
extern "C" double log1p(double);

namespace einsight {
namespace EINSIGHT_LEVEL {

inline void write_output(const Request &a, int64_t at, const float *row, float total) {
  if (a.dtype == Dtype::float32) {
    float *to = (float *)a.output + at;
    int64_t k = 0;
    for (; k + W <= a.e; k += W) store(to + k, load(row + k) / total);
    for (; k < a.e; k++) to[k] = row[k] / total;
  } else {
    uint16_t *to = (uint16_t *)a.output + at;
    if (a.dtype == Dtype::bfloat16)
      for (int64_t k = 0; k < a.e; k++) to[k] = to_bfloat16(row[k] / total);
    else
      for (int64_t k = 0; k < a.e; k++) to[k] = to_float16(row[k] / total);
  }
}

// The sum that weights are divided by, relative to the row's reference, and its logarithm.
struct Total { float sum, inverse; double log; };

inline Total total_of(const Request &a, const Rows &rows, float sum, int64_t r, int64_t head) {
  if (!a.sink) return sum == 0.f ? Total{0.f, 0.f, -kInfinity} : Total{sum, 1.f / sum, logf(sum)};
  // The reference may be the sink itself, rounded; and beside a large sink the keys may weigh next to nothing.
  double above = a.sink[head] - (double)rows.reference[r] * a.unit(), sink = exp(above), total = sum + sink;
  if (total == 0. || rows.reference[r] == -kInfinity) return {0.f, 0.f, -kInfinity};
  return {(float)total, (float)(1. / total), sink > sum ? log1p(sum / sink) + above : log(total)};
}

// lse, and what is lost by rounding it.
inline void write_lse(const Request &a, int64_t row, double lse) {
  a.lse[row] = (float)lse;
  double rest = lse - a.lse[row];
  if (a.lse_rest) a.lse_rest[row] = rest - rest == 0. ? (float)rest : 0.f;
}

// The factor that turns kept exponentials of a tile into weights.
inline float tile_factor(const Request &a, const Rows &rows, int64_t r, int64_t tile, float inverse) {
  float shift = (rows.tile_reference[tile * rows.rows_stride + r] - finite_reference(rows, r)) * (a.unit() * kLog2e);
  return exp2_nonpositive(shift) * inverse;
}

template <int count>
INLINE void add_rows(const float *const *from, const float *factor, float *to, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += W) {
    Vec sum = load(from[0] + j) * factor[0];
#pragma GCC unroll 6
    for (int n = 1; n < count; n++) sum += load(from[n] + j) * factor[n];
    store(to + j, load(to + j) + sum);
  }
}

// One row of weights, written once. Where rows lie on whole vectors, past the caches.
template <bool aligned>
inline void write_row(const Request &a, const Rows &rows, const Sight &s, int64_t r, float *to, float inverse) {
  const float *from = rows.weights + r * rows.weights_stride - rows.origin;
  auto put = [](float *at, Vec v) { aligned ? stream(at, v) : store(at, v); };
  int64_t j = 0, lo = s.lo[r], hi = s.hi[r];
  if (aligned)
    for (; j + W <= lo; j += W) put(to + j, Vec{});
  for (; j < lo; j++) to[j] = 0.f;
  for (int64_t tile = lo / kTile; tile * kTile < hi; tile++) {
    float factor = tile_factor(a, rows, r, tile, inverse);
    int64_t end = least(hi, (tile + 1) * kTile);
    for (; j < end && j % W; j++) to[j] = from[j] * factor;
    for (; j + W <= end; j += W) put(to + j, load(from + j) * factor);
    for (; j < end; j++) to[j] = from[j] * factor;
  }
  for (; j < a.j && j % W; j++) to[j] = 0.f;
  for (; j + W <= a.j; j += W) put(to + j, Vec{});
  for (; j < a.j; j++) to[j] = 0.f;
}

inline void write_weights(const Request &a, const Rows &rows, const Sight &s, int64_t r, int64_t at, float inverse) {
  float *to = a.weights + at;
  bool aligned = (uintptr_t)to % (W * 4) == 0;
  (aligned ? write_row<true> : write_row<false>)(a, rows, s, r, to, inverse);
}

// Scores of one row's tile; what the row does not see is filled in at the end.
inline void write_scores(const Request &a, const Sight &s, int64_t r, int64_t tile, int64_t at, const float *from) {
  float *to = a.scores + at;
  int64_t j = most(s.lo[r], tile * kTile), end = least(s.hi[r], (tile + 1) * kTile);
  for (; j + W <= end; j += W) store(to + j, load(from + j) * a.unit());
  for (; j < end; j++) to[j] = from[j] * a.unit();
}

// Adds the weights of a group's rows of one head to sums over queries.
inline void add_received(const Request &a, const Rows &rows, const Sight &s, int64_t group, int64_t head,
                         const float *inverse, float *received) {
  int64_t chosen[kGroup], count = 0;
  for (int64_t r = group * kGroup; r < least(rows.count, (group + 1) * kGroup); r++)
    if (s.head[r] == head && s.hi[r] > 0 && (!a.received_from || a.received_from[s.query[r]])) chosen[count++] = r;
  if (!count) return;
  for (int64_t tile = s.group_lo[group] / kTile; tile * kTile < s.group_hi[group]; tile++) {
    const float *from[kGroup];
    float factor[kGroup];
    int64_t lo[kGroup], hi[kGroup];
    bool alike = true;  // the rows span the same panels, and no NaN could reach a key that its row does not see
    for (int64_t n = 0; n < count; n++) {
      int64_t r = chosen[n];
      lo[n] = most(s.lo[r], tile * kTile), hi[n] = least(s.hi[r], (tile + 1) * kTile);
      from[n] = rows.weights + r * rows.weights_stride - rows.origin;
      factor[n] = lo[n] < hi[n] ? tile_factor(a, rows, r, tile, inverse[r]) : 0.f;
      alike = alike && lo[n] < hi[n] && lo[n] / kPanel == lo[0] / kPanel &&
              round_up(hi[n], kPanel) == round_up(hi[0], kPanel) && factor[n] - factor[n] == 0.f;
    }
    if (alike && count == kGroup) {
      add_rows<kGroup>(from, factor, received, lo[0] / kPanel * kPanel, round_up(hi[0], kPanel));
    } else {
      for (int64_t n = 0; n < count; n++) {
        if (alike) add_rows<1>(from + n, factor + n, received, lo[n] / kPanel * kPanel, round_up(hi[n], kPanel));
        else for (int64_t j = lo[n]; j < hi[n]; j++) received[j] += from[n][j] * factor[n];
      }
    }
  }
}

inline void finish(const Request &a, const Task &task, Workspace &work, Rows &rows, int64_t *first, int64_t *last) {
  Sight s = look(a, task);
  float inverse[kBlock];
  int64_t padded = ValuePanels(a.e).padded();
  for (int64_t r = 0; r < rows.count; r++) {
    int64_t row = (task.batch * a.h + s.head[r]) * a.i + s.query[r];
    float reference = rows.reference[r], sum = sum_lanes(load(rows.sum + r * kMaxWidth));
    Total total = total_of(a, rows, sum, r, s.head[r]);
    inverse[r] = total.inverse;
    if (a.output) write_output(a, row * a.e, rows.output + r * padded, total.sum == 0.f ? 1.f : total.sum);
    if (a.lse) write_lse(a, row, total.sum == 0.f ? -kInfinity : (double)reference * a.unit() + total.log);
    // NaN loses every comparison, so it has to be put back into the maximum.
    if (a.max_score) a.max_score[row] = sum != sum && !(rows.largest[r] == kInfinity) ? sum : rows.largest[r] * a.unit();
    if (a.entropy) {
      float moment = sum_lanes(load(rows.moment + r * kMaxWidth)) * kLn2;
      a.entropy[row] = total.sum == 0.f ? 0.f : (sum * (float)total.log - moment) * inverse[r];
    }
    if (a.weights) write_weights(a, rows, s, r, row * a.j, inverse[r]);
    if (a.scores) {
      fill(a.scores + row * a.j, 0, s.lo[r], -kInfinity);
      fill(a.scores + row * a.j, s.hi[r], a.j, -kInfinity);
    }
  }
  if (a.weights) end_of_stream();
  if (!a.received) return;
  int64_t heads = a.heads_per_key(), stride = round_up(a.j, kPanel);
  *first = s.block_lo / kPanel * kPanel;
  *last = s.block_lo < s.block_hi ? s.block_hi : *first;
  for (int64_t head = 0; head < heads; head++) {
    float *sums = work.received + head * stride;
    fill(sums, 0, round_up(*last, kPanel) - *first, 0.f);
    for (int64_t group = 0; group * kGroup < rows.count; group++)
      add_received(a, rows, s, group, task.group * heads + head, inverse, sums - *first);
  }
}

// Joins the results of two ranges of keys.
inline void merge(const Request &a, Rows &into, const Rows &from) {
  int64_t padded = ValuePanels(a.e).padded();
  float exponent = a.unit() * kLog2e;
  for (int64_t r = 0; r < into.count; r++) {
    float mine = move_reference(a, into, r, from.reference[r], exponent);
    Rows other = from;  // brings the other side to the same reference; its scores are all at most this
    float theirs = move_reference(a, other, r, into.reference[r], exponent);
    into.largest[r] = larger(from.largest[r], into.largest[r]);
    for (int64_t k = 0; k < kMaxWidth; k += W) {
      int64_t at = r * kMaxWidth + k;
      store(into.sum + at, load(into.sum + at) + load(from.sum + at));
      if (a.entropy) store(into.moment + at, load(into.moment + at) + load(from.moment + at));
    }
    for (int64_t k = 0; a.output && k < padded; k += W) {
      int64_t at = r * padded + k;
      store(into.output + at, load(into.output + at) * mine + load(from.output + at) * theirs);
    }
  }
}

}  // namespace EINSIGHT_LEVEL
}  // namespace einsight
