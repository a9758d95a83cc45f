// What a part of the gradients' rows is, before and after its tiles: rows copied, sums that a row must know, results.
#pragma once
#include <sched.h>

#include "softmax.h"

extern "C" double exp(double);
extern "C" double expm1(double);

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

constexpr int64_t kStride = kTile + 16;  // of rows of a tile: not a whole page apart

// One number for each row of the part.
struct RowTerms {
  Real *base;     // the largest score, as stored; 0 where the row sees nothing
  Real *inverse;  // exp(base - lse): what exponentials relative to the largest are multiplied by
  Real *mean;     // sum_k w_k g_k
  Real *shift;    // what is added to every g: dlse - mean - dentropy (1 + ln inverse)
  Real *entropy;  // dentropy ln 2
  Real *top;      // how many scores are the largest; then each one's part of dmax
  Real *slope;    // the part of alibi's slope
};

struct Scene {
  const Request &a;
  const Gradient &grad;
  const Part &part;
  GradientSpace &space;
  RowTerms row;
  int64_t query_stride, value_stride, blocks;
  Sight sight[kPart / kBlock];
  int64_t begin[kPart / kBlock + 1];  // of blocks, in rows of the part
  Real exponent;

  Scene(const Request &a, const Gradient &grad, const Part &part, GradientSpace &space)
      : a(a), grad(grad), part(part), space(space),
        row{space.row[0], space.row[1], space.row[2], space.row[3], space.row[4], space.row[5], space.row[6]},
        query_stride(round_up(a.d, kMaxWidth)), value_stride(round_up(a.e, kMaxWidth)), exponent(a.unit() * kLog2e) {
    int64_t rows = part.row_end - part.row_begin;
    blocks = (rows + kBlock - 1) / kBlock;
    int64_t block = round_up((rows + blocks - 1) / blocks, kGroup);
    for (int64_t n = 0; n <= blocks; n++) begin[n] = least(n * block, rows);
  }

  int64_t at(int64_t block, int64_t r) const {  // the row's place in [b, h, i]
    const Sight &s = sight[block];
    return (part.batch * a.h + s.head[r]) * a.i + s.query[r];
  }
};

// A row that no gradient reaches has none to give, whatever NaN it sees.
inline bool takes_part(const Scene &c, int64_t at, const Real *output_grad) {
  const Gradient &g = c.grad;
  auto given = [&](const Real *grads) { return grads && grads[at] != 0.f; };
  bool any = g.ask_count > 0 || given(g.lse_grad) || given(g.max_score_grad) || given(g.entropy_grad);
  for (int64_t k = 0; g.output_grad && !any && k < c.a.e; k++) any = output_grad[k] != 0.f;
  return any;
}

constexpr int64_t kSlab = 16;  // steps in one chain of a product whose result is compared with a sum of its like

// lse before its scale.
inline Real unscaled_lse(const Scene &c, int64_t at) {
  return (Real)(((Wide)c.grad.lse[at] + c.grad.lse_rest[at]) / c.a.unit());
}

// Whether one key has all the weight, exactly 1: lse is its score. The row sees no other, or none that weighs anything.
inline bool is_one_hot(const Scene &c, int64_t at) {
  return unscaled_lse(c, at) * c.a.unit() == c.grad.max_score[at];
}

// output . output_grad of one row. What has no gradient has no part in it, NaN or not. Exact, unless one key has all the
// weight: there it is that key's g, by the same chains, so that the gradient of its score is exactly 0.
inline Real product_with_grad(const Scene &c, const Sight &s, int64_t r, int64_t at, const Real *output_grad) {
  Real *output = c.space.clean;
  pack_row(c.a, c.grad.output, c.grad.output_stride, c.part.batch, s.head[r], s.query[r], c.a.e, 1.f, output);
  Wide exact = 0.;
  Real sum = 0.f;
  for (int64_t slab = 0; slab < c.a.e; slab += kSlab) {
    Real chain = 0.f;
    for (int64_t k = slab; k < least(slab + kSlab, c.a.e); k++) {
      if (output_grad[k] == 0.f) continue;
      exact += (Wide)output_grad[k] * output[k];
      chain = multiply_add(output_grad[k], output[k], chain);
    }
    sum = chain + sum;
  }
  return is_one_hot(c, at) ? sum : (Real)exact;
}

// The largest score before its scale, but for rounding; to the bit where one key has all the weight.
inline Real base_of(const Scene &c, int64_t at) {
  return is_one_hot(c, at) ? unscaled_lse(c, at) : c.grad.max_score[at] / c.a.unit();
}

// ln of what exponentials relative to the row's base are multiplied by. The base is the largest score but for rounding,
// which is why it and not the score stands here.
inline Wide log_inverse(const Scene &c, int64_t n, int64_t at) {
  return (Wide)c.row.base[n] * c.a.unit() - c.grad.lse[at] - c.grad.lse_rest[at];
}

// The logarithm of the sink's weight.
inline Wide sink_log(const Scene &c, int64_t at, int64_t head) {
  return ((Wide)c.a.sink[head] - c.grad.lse[at]) - c.grad.lse_rest[at];
}

inline void begin_row(Scene &c, int64_t block, int64_t r) {
  const Request &a = c.a;
  const Gradient &g = c.grad;
  Sight &s = c.sight[block];
  int64_t n = c.begin[block] + r, at = c.at(block, r);
  Real *query = c.space.query + n * c.query_stride, *output_grad = c.space.output_grad + n * c.value_stride;
  c.space.unsafe[n] = pack_row(a, a.query, a.query_stride, c.part.batch, s.head[r], s.query[r], a.d, a.query_factor(),
                               query);
  if (a.pairs)
    pack_row_of_pairs(in_pairs(a, queries_of(a, c.part.batch, s.head[r])), s.query[r], a.query_factor() < 0,
                      c.space.query_pairs + n * c.query_stride);
  Real mean = 0.f, top = g.max_score[at], entropy = g.entropy_grad ? g.entropy_grad[at] : 0.f;
  bool empty = top == -kInfinity;
  if (g.output_grad) {
    c.space.unsafe[n] |= pack_row(a, g.output_grad, g.output_grad_stride, c.part.batch, s.head[r], s.query[r], a.e, 1.f,
                                  output_grad);
    if (!g.looks_first()) mean = product_with_grad(c, s, r, at, output_grad);
  }
  if (empty || !takes_part(c, at, output_grad)) s.lo[r] = s.hi[r] = s.view[r].lo = s.view[r].hi = 0;
  c.row.base[n] = empty ? 0.f : base_of(c, at);
  c.row.inverse[n] = empty ? 0.f : std::exp(log_inverse(c, n, at));
  c.row.entropy[n] = entropy * kLn2;
  c.row.mean[n] = mean;
  c.row.top[n] = c.row.slope[n] = 0.f;
}

inline void begin_rows(Scene &c) {
  for (int64_t block = 0; block < c.blocks; block++) {
    int64_t first = c.part.row_begin + c.begin[block], last = c.part.row_begin + c.begin[block + 1];
    c.sight[block] = look(c.a, {c.part.batch, c.part.group, first, last, 0, c.a.j}, kGroup);
    for (int64_t r = 0; r < last - first; r++) begin_row(c, block, r);
    narrow(c.sight[block], last - first, 0, c.a.j);
  }
  if (c.grad.query_grad) fill(c.space.query_grad, 0, c.begin[c.blocks] * c.query_stride, 0.f);
}

// All of a row's sums are known.
inline void end_look(Scene &c) {
  const Gradient &g = c.grad;
  for (int64_t block = 0; block < c.blocks; block++) {
    for (int64_t r = 0; r < c.begin[block + 1] - c.begin[block]; r++) {
      int64_t n = c.begin[block] + r, at = c.at(block, r);
      Real shift = -c.row.mean[n];
      if (g.lse_grad) shift += g.lse_grad[at];
      if (g.entropy_grad && g.entropy_grad[at] != 0.f && g.max_score[at] > -kInfinity) {
        Real seen = c.a.sink ? -std::expm1(sink_log(c, at, c.sight[block].head[r])) : 1.f;
        Real mean = g.entropy_grad[at] * (g.entropy[at] - seen);
        shift -= g.entropy_grad[at] * ((g.entropy[at] - seen) + 1.f + (Real)log_inverse(c, n, at));
        c.row.mean[n] += mean;
      }
      c.row.shift[n] = shift;
      if (g.max_score_grad) c.row.top[n] = c.row.top[n] > 0.f ? g.max_score_grad[at] / c.row.top[n] : 0.f;
    }
  }
}

inline void end_rows(Scene &c) {
  const Gradient &g = c.grad;
  for (int64_t block = 0; block < c.blocks; block++) {
    for (int64_t r = 0; r < c.begin[block + 1] - c.begin[block]; r++) {
      int64_t n = c.begin[block] + r, at = c.at(block, r);
      const Real *from = c.space.query_grad + n * c.query_stride;
      for (int64_t k = 0; g.query_grad && k < c.a.d; k++) g.query_grad[at * c.a.d + k] = from[k] * c.a.scale;
      if (g.slopes_grad) g.slopes_grad[at] = c.row.slope[n];
      if (g.sink_grad) {
        Real upper = (g.lse_grad ? g.lse_grad[at] : 0.f) - c.row.mean[n];
        g.sink_grad[at] = upper == 0.f ? 0.f : upper * (Real)std::exp(sink_log(c, at, c.sight[block].head[r]));
      }
    }
  }
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
