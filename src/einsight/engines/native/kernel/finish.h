// What becomes of a block of rows once their softmax is known: output, numbers per row, weights and their readouts.
#pragma once
#include "readouts.h"

extern "C" float logf(float);
extern "C" double exp(double);
extern "C" double log(double);
extern "C" double log1p(double);

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

inline void write_output(const Request &a, int64_t at, const Real *row, Real inverse) {
  if (a.dtype == kOwn) {
    Real *to = (Real *)a.output + at;
    int64_t k = 0;
    for (; k + W <= a.e; k += W) store(to + k, load(row + k) * inverse);
    for (; k < a.e; k++) to[k] = row[k] * inverse;
  } else {
    uint16_t *to = (uint16_t *)a.output + at;
    if (a.dtype == Dtype::bfloat16) {
      int64_t k = 0;
      for (; k + W <= a.e; k += W) {
        Half h = to_bfloat16(load(row + k) * inverse);
        __builtin_memcpy(to + k, &h, sizeof h);
      }
      for (; k < a.e; k++) to[k] = to_bfloat16(row[k] * inverse);
    } else {
      for (int64_t k = 0; k < a.e; k++) to[k] = to_float16(row[k] * inverse);
    }
  }
}

// The sum that weights are divided by, relative to the row's reference, and its logarithm.
struct Total { Real sum, inverse; Wide log; };

inline Total total_of(const Request &a, const Rows &rows, Real sum, int64_t r, int64_t head) {
  if (!a.sink) {
    Wide of = !a.lse && !a.entropy ? 0. : kIsDouble ? std::log((Wide)sum) : (Wide)logf(sum);
    return sum == 0.f ? Total{0.f, 0.f, -kInfinity} : Total{sum, 1.f / sum, of};
  }
  // The reference may be the sink itself, rounded: of a large one by more than exp holds. And beside a large sink the
  // keys may weigh next to nothing.
  Wide above = a.sink[head] - (Wide)rows.reference[r] * a.unit(), held = above > 64. ? 64. : above < -64. ? -64. : above;
  Wide sink = a.sink[head] == -kInfinity ? 0. : std::exp(held), total = sum + sink;
  if (total == 0. || rows.reference[r] == -kInfinity) return {0.f, 0.f, -kInfinity};
  return {(Real)total, (Real)(1. / total), sink > sum ? std::log1p(sum / sink) + above : std::log(total)};
}

// lse, and what is lost by rounding it.
inline void write_lse(const Request &a, int64_t row, Wide lse) {
  a.lse[row] = (Real)lse;
  Wide rest = lse - a.lse[row];
  if (a.lse_rest) a.lse_rest[row] = rest - rest == 0. ? (Real)rest : 0.f;
}

// The factor that turns kept exponentials of a step into weights.
inline Real step_factor(const Request &a, const Rows &rows, int64_t r, int64_t step, Real inverse) {
  Real shift = (rows.tile_reference[step * rows.rows_stride + r] - finite_reference(rows, r)) * (a.unit() * kLog2e);
  return exp2_nonpositive(shift) * inverse;
}

// The panels that some row of a group sees.
inline Span hull_of(const Sight &s, int64_t group) {
  return {s.group_lo[group] / kPanel * kPanel, round_up(s.group_hi[group], kPanel)};
}

// Turns a row's kept exponentials into weights, over the panels that its group sees; -0 where a key is hidden.
inline void weigh(const Request &a, const Rows &rows, const Sight &s, int64_t r, Real inverse, Real *row) {
  Span hull = hull_of(s, r / kGroup);
  int64_t lo = s.lo[r], hi = s.hi[r];
  for (int64_t j = lo / kPanel * kPanel; j < hi;) {
    int64_t step = a.step_of(j), end = least(round_up(hi, kPanel), (step + 1) * a.step());
    Real factor = step_factor(a, rows, r, step, inverse);
    if (factor != factor) fill(row, j, end, __builtin_nanf(""));  // whatever sign the NaN had
    else for (int64_t k = j; k < end; k += W) store(row + k, load(row + k) * factor);
    j = end;
  }
  fill(row, hull.begin, hi ? lo : hull.end, -0.f);
  if (hi) fill(row, hi, hull.end, -0.f);
  if (a.is_dense())
    for (int64_t j = lo / kPanel * kPanel; j < hi; j += W)
      store(row + j, select(visible(a, s, r, j), load(row + j), all(-0.f)));
}

// Scores of one row from `key` on, `keys` at most; what the row does not see is filled in at the end.
inline void write_scores(const Request &a, const Sight &s, int64_t r, int64_t key, int64_t keys, int64_t at,
                         const Real *from) {
  Real *to = a.scores + at;
  int64_t j = most(s.lo[r], key), end = least(s.hi[r], key + keys);
  for (; j + W <= end; j += W) store(to + j, load(from + j) * a.unit());
  for (; j < end; j++) to[j] = from[j] * a.unit();
}

inline void hide_scores(const Request &a, const Sight &s, int64_t r, Real *to) {
  fill(to, 0, s.lo[r], -kInfinity);
  fill(to, s.hi[r], a.j, -kInfinity);
  if (!a.is_dense()) return;
  for (int64_t j = s.lo[r]; j < s.hi[r]; j += W)
    for (uint32_t hidden = lanes(~visible(a, s, r, j)); hidden; hidden &= hidden - 1)
      if (int64_t k = j + __builtin_ctz(hidden); k < s.hi[r]) to[k] = -kInfinity;
}

// What a row, and then its group, says to every readout.
inline void read_row(const Request &a, const Task &task, const Sight &s, int64_t r, const Real *row) {
  Span span{s.lo[r] / kPanel * kPanel, round_up(s.hi[r], kPanel)};
  for (int64_t n = 0; n < a.ask_count; n++) {
    const Ask &ask = a.asks[n];
    int64_t slot = ask.slot_of(s.query[r]);
    if (slot < 0) continue;
    int64_t at = (task.batch * a.h + s.head[r]) * ask.count + slot;
    auto position = [&] {
      return a.positions[task.batch * a.positions_stride[0] + s.query[r] * a.positions_stride[1]];
    };
    switch (ask.kind) {
      case Kind::share:
        ask.result[at] = share(view_of(ask.rule, task.batch, s.head[r], s.query[r]), row, span);
        break;
      case Kind::distance: ask.result[at] = distance(position(), row, span); break;
      case Kind::diagonal: ask.result[at] = diagonal(position() + ask.number, row, span); break;
      case Kind::top: top(ask.number, row, span, ask.result + at * ask.number, ask.indices + at * ask.number); break;
      case Kind::rows: {
        Real *to = ask.result + at * a.j;
        ((uintptr_t)to % kBytes == 0 ? write_row<true> : write_row<false>)(a.j, row, span, to);
        break;
      }
      default: break;
    }
  }
}

// Adds the rows of a group to sums over queries, those of one head and line together.
inline void add_group(const Request &a, const Task &task, const Sight &s, const Rows &rows, int64_t group,
                      const Ask &ask, const Sums &sums) {
  int64_t first = group * kGroup, end = least(rows.count, first + kGroup), heads = a.heads_per_key();
  Span hull = hull_of(s, group);
  uint32_t done = 0;
  for (int64_t r = first; r < end; r++) {
    if (done >> (r - first) & 1) continue;
    const Real *from[kGroup];
    int64_t count = 0, line = ask.line_of(s.query[r]);
    for (int64_t other = r; other < end; other++) {
      if (s.head[other] != s.head[r] || ask.line_of(s.query[other]) != line) continue;
      done |= 1u << (other - first);
      if (ask.kind == Kind::pool || ask.slot_of(s.query[other]) >= 0)
        from[count++] = rows.weights + other * rows.weights_stride - rows.origin;
    }
    Real *to = sums.of(s.head[r] - task.group * heads, line) - rows.origin;
    if (count) (ask.kind == Kind::seen ? add_rows<true> : add_rows<false>)(count, from, to, hull);
  }
}

inline void read_group(const Request &a, const Task &task, const Sight &s, const Rows &rows, Workspace &work,
                       int64_t group) {
  int64_t first = group * kGroup, count = least(kGroup, rows.count - first);
  const Real *row = rows.weights + first * rows.weights_stride - rows.origin;
  Span hull = hull_of(s, group);
  for (int64_t n = 0; n < a.ask_count; n++) {
    const Ask &ask = a.asks[n];
    if (ask.adds() && hull.begin < hull.end) add_group(a, task, s, rows, group, ask, work.sums[n]);
    if (ask.kind != Kind::mass && ask.kind != Kind::mass_of_ids) continue;
    bool weighted = ask.kind == Kind::mass;
    int64_t padded = round_up(ask.number, kMaxWidth);
    auto exact = (double *)work.mass;
    if (weighted) mass(ask, task.batch, row, rows.weights_stride, count, {hull.begin, least(hull.end, a.j)}, work.mass);
    else mass_of_ids(ask, task.batch, row, rows.weights_stride, count, {hull.begin, least(hull.end, a.j)}, exact);
    for (int64_t r = 0; r < count; r++) {
      int64_t slot = ask.slot_of(s.query[first + r]);
      if (slot < 0) continue;
      Real *to = ask.result + ((task.batch * a.h + s.head[first + r]) * ask.count + slot) * ask.number;
      for (int64_t k = 0; k < ask.number; k++) to[k] = weighted ? work.mass[r * padded + k] : exact[r * ask.number + k];
    }
  }
}

inline void begin_sums(const Request &a, const Sight &s, const Rows &rows, Workspace &work) {
  for (int64_t n = 0; n < a.ask_count; n++) {
    if (!a.asks[n].adds()) continue;
    Sums &sums = work.sums[n];
    sums.line = a.asks[n].line_of(s.query[0]), sums.line_end = a.asks[n].line_of(s.query[rows.count - 1]) + 1;
    for (int64_t head = 0; head < a.heads_per_key(); head++)
      for (int64_t line = sums.line; line < sums.line_end; line++)
        fill(sums.of(head, line), 0, most(round_up(s.block_hi, kPanel) - rows.origin, 0), 0.f);
  }
}

// From sums per key to sums per column of the result.
inline void end_sums(const Request &a, const Sight &s, const Rows &rows, Workspace &work) {
  for (int64_t n = 0; n < a.ask_count; n++) {
    if (!a.asks[n].adds()) continue;
    Sums &sums = work.sums[n];
    int64_t cell = a.asks[n].cell(), origin = rows.origin;
    sums.first = origin / cell, sums.last = s.block_lo < s.block_hi ? (s.block_hi - 1) / cell + 1 : sums.first;
    if (cell == 1) continue;
    for (int64_t head = 0; head < a.heads_per_key(); head++)
      for (int64_t line = sums.line; line < sums.line_end; line++) {
        Real *data = sums.of(head, line);
        for (int64_t c = sums.first; c < sums.last; c++) {
          double total = 0;
          for (int64_t j = most(c * cell, origin); j < least((c + 1) * cell, s.block_hi); j++) total += data[j - origin];
          data[c - sums.first] = total;
        }
      }
  }
}

// The values of one panel that a row sees, zeros in the place of the others. `values` has rows of `width`, `step`
// apart, each of one key, or of two.
inline void copy_seen(const Request &a, const Sight &s, int64_t r, Span live, int64_t tile_begin, const Real *values,
                      int64_t step, int64_t width, Real *to) {
  for (int64_t key = live.begin; key < live.end; key += W) {
    uint32_t seen = lanes(visible(a, s, r, key));
    for (int64_t k = 0; k < W; k += a.pairs ? 2 : 1) {
      int64_t n = (key + k - tile_begin) / (a.pairs ? 2 : 1);
      uint32_t first = seen >> k & 1 ? 0xffffu : 0, second = seen >> (k + 1) & 1 ? 0xffff0000u : 0;
      Bits keep = a.pairs ? Bits{} + (first | second) : seen >> k & 1 ? ~Bits{} : Bits{};  // as wide as a number
      for (int64_t v = 0; v < width; v += W)
        store(to + n * width + v, (Vec)(bits(load(values + n * step + v)) & keep));
    }
  }
}

inline void finish(const Request &a, const Task &task, Workspace &work, Rows &rows) {
  Sight s = look(a, task, kGroup);
  Real inverse[kBlock];
  int64_t padded = ValuePanels(a.e).padded(), size = a.dtype == kOwn ? sizeof(Real) : 2;
  auto place = [&](int64_t r) { return ((task.batch * a.i + s.query[r]) * a.h + s.head[r]) * a.e; };
  for (int64_t r = 0; r < rows.count; r++) {
    int64_t row = (task.batch * a.h + s.head[r]) * a.i + s.query[r];
    Real reference = rows.reference[r], sum = sum_lanes(load(rows.sum + r * kMaxWidth));
    Total total = total_of(a, rows, sum, r, s.head[r]);
    inverse[r] = total.inverse;
    if (a.output) {
      // Each row is a page of its own where there are many heads: its lines are asked for some rows ahead.
      if (r + 6 < rows.count)
        for (int64_t k = 0; k < a.e * size; k += 64) __builtin_prefetch((char *)a.output + place(r + 6) * size + k, 1);
      write_output(a, place(r), rows.output + r * padded, total.sum == 0.f ? 1.f : total.inverse);
    }
    if (a.lse) write_lse(a, row, total.sum == 0.f ? -kInfinity : (Wide)reference * a.unit() + total.log);
    // NaN loses every comparison, so it has to be put back into the maximum.
    if (a.max_score) a.max_score[row] = sum != sum && !(rows.largest[r] == kInfinity) ? sum : rows.largest[r] * a.unit();
    if (a.entropy) {
      Real moment = sum_lanes(load(rows.moment + r * kMaxWidth)) * kLn2;
      a.entropy[row] = total.sum == 0.f ? 0.f : (sum * (Real)total.log - moment) * inverse[r];
    }
    if (a.scores) hide_scores(a, s, r, a.scores + row * a.j);
  }
  if (!a.ask_count) return;
  begin_sums(a, s, rows, work);
  for (int64_t group = 0; group * kGroup < rows.count; group++) {
    for (int64_t r = group * kGroup; r < least(rows.count, (group + 1) * kGroup); r++) {
      Real *row = rows.weights + r * rows.weights_stride - rows.origin;
      weigh(a, rows, s, r, inverse[r], row);
      read_row(a, task, s, r, row);
    }
    read_group(a, task, s, rows, work, group);
  }
  end_sums(a, s, rows, work);
  end_of_stream();
}

// Joins the results of two ranges of keys.
inline void merge(const Request &a, Rows &into, const Rows &from) {
  int64_t padded = ValuePanels(a.e).padded();
  Real exponent = a.unit() * kLog2e;
  for (int64_t r = 0; r < into.count; r++) {
    Real mine = move_reference(a, into, r, from.reference[r], exponent);
    Rows other = from;  // brings the other side to the same reference; its scores are all at most this
    Real theirs = move_reference(a, other, r, into.reference[r], exponent);
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
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
