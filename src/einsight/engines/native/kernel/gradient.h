// The gradients of a part of the query rows of one key head. docs/native.md draws the loop nest.
//
// With w the weights and g = dL/dw (through the output, the readouts of weights and the entropy), the gradient of a
// score is w (g - sum_k w_k g_k + dlse), and the largest score's own. The weights are made again from the scores and
// the lse: w = exp(score - base) exp(base - lse).
#pragma once
#include "products.h"
#include "scene.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

// A product's B without the rows that a row of A may not see: a zero weight is no protection from NaN and infinity.
// With the same zeros in the same places of the chain, the bits are those of the plain product.
template <class Seen>
const Real *cleaned(const Real *from, int64_t stride, int64_t rows, int64_t width, Real *to, Seen seen) {
  for (int64_t n = 0; n < rows; n++)
    for (int64_t k = 0; k < width; k += W) store(to + n * width + k, seen(n) ? load(from + n * stride + k) : Vec{});
  return to;
}

// to += A . B for up to six rows of A; B in panels of columns, `panel_rows` rows each, or plain rows where that is 0.
template <class Seen>
void add_product(bool turned, int64_t rows, const Real *a, int64_t a_stride, const Real *b, int64_t panel_rows,
                 int64_t b_stride, int64_t first, int64_t last, int64_t width, Real *to, int64_t to_stride,
                 Real *clean, Seen seen) {
  constexpr Real ones[kGroup] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
  ValuePanels panels(width);
  for (int64_t n = 0; n < panels.count; n++) {
    int64_t begin = panels.begin(n) * W, columns = panels.begin(n + 1) - panels.begin(n);
    int64_t stride = panel_rows ? columns * W : b_stride;
    const Real *from = b + begin * (panel_rows ? panel_rows : 1) + first * stride;
    auto product = turned ? kAddTurned : kAddValues;
    if (!clean) {
      product[rows - 1][columns - 1](a, a_stride, from, stride, last - first, to + begin, to_stride, ones);
    } else {
      for (int64_t r = 0; r < rows; r++)
        product[0][columns - 1](a + (turned ? r : r * a_stride), a_stride,
                                cleaned(from, stride, last - first, columns * W, clean,
                                        [&](int64_t m) { return seen(r, first + m); }),
                                columns * W, last - first, to + r * to_stride + begin, to_stride, ones);
    }
  }
}

// g of a group of rows on a panel, as far as it comes through the output: rows of its gradient times values.
inline void values_grad(Scene &c, int64_t block, int64_t first, int64_t count, const Real *values, bool unsafe,
                        Real *to) {
  Real ignored[kGroup * kMaxWidth] = {};
  const Real *rows = c.space.output_grad + (c.begin[block] + first) * c.value_stride;
  if (!unsafe) {
    kScorePanel[count - 1](rows, c.value_stride, values, c.a.e, kSlab, to, kStride, ignored);
    return;
  }
  for (int64_t r = 0; r < count; r++) {  // a value has no part in the loss where the gradient is zero
    const Real *row = rows + r * c.value_stride;
    auto clean = cleaned(values, kPanel, c.a.e, kPanel, c.space.clean, [&](int64_t k) { return row[k] != 0.f; });
    kScorePanel[0](row, c.value_stride, clean, c.a.e, kSlab, to + r * kStride, kStride, ignored);
  }
}

// Scores of a group of rows on a panel as the softmax saw them, and what the softcap's chain rule asks for.
inline void scores_of(Scene &c, int64_t block, int64_t first, int64_t count, int64_t key, bool all_seen,
                      const Real *keys, Real *to, Real *chain) {
  const Request &a = c.a;
  const Sight &s = c.sight[block];
  Real ignored[kGroup * kMaxWidth] = {};
  const Real *queries = (a.pairs ? c.space.query_pairs : c.space.query) + (c.begin[block] + first) * c.query_stride;
  if (!a.tiles)
    (a.pairs ? kScorePairs : kScorePanel)[count - 1](queries, c.query_stride, keys, a.depth(), a.slab(), to, kStride, ignored);
  if (all_seen && !a.adjusted()) return;
  for (int64_t r = 0; r < count; r++) {
    for (int64_t k = 0; a.softcap > 0 && k < kPanel; k += W) {
      Vec t = tanh(load(to + r * kStride + k) * (a.scale / a.softcap));
      store(chain + r * kStride + k, 1.f - t * t);
    }
    adjust(a, s, first + r, key, to + r * kStride, ignored);
  }
}

INLINE Vec load_up_to(const Real *from, int64_t n) {
  return n >= W ? load(from) : load_some<kOwn>(from, 1, most(n, 0));
}

// The part of g that comes through one readout of the weights, for the keys from `key` on.
INLINE Vec ask_grad(const Scene &c, const Ask &ask, int64_t head, int64_t query, int64_t key) {
  int64_t slot = ask.slot_of(query), head_at = c.part.batch * c.a.h + head, at = head_at * ask.count + slot;
  int64_t left = c.a.j - key, end = least(left, W), p = 0;
  if (!ask.result || slot < 0) return Vec{};
  if (c.a.positions) p = c.a.positions[c.part.batch * c.a.positions_stride[0] + query * c.a.positions_stride[1]];
  Vec x = Vec{};
  switch (ask.kind) {
    case Kind::received: return load_up_to(ask.result + head_at * c.a.j + key, left);
    case Kind::rows: return load_up_to(ask.result + at * c.a.j + key, left);
    case Kind::share: return select(sees(view_of(ask.rule, c.part.batch, head, query), key), all(ask.result[at]), Vec{});
    case Kind::diagonal:
      if (int64_t k = p + ask.number - key; k >= 0 && k < W) x[k] = ask.result[at];
      return x;
    case Kind::distance: {
      Vec distance = (Real)(p - key) - __builtin_convertvector(iota(), Vec);
      return absolute(distance) * ask.result[at];
    }
    case Kind::mass_of_ids:
      for (int64_t k = 0; k < end; k++) {
        int64_t id = ask.ids[c.part.batch * ask.item_stride + key + k];
        x[k] = id < 0 ? 0.f : ask.result[at * ask.number + id];
      }
      return x;
    case Kind::mass: {
      const Real *row = ask.matrix + c.part.batch * ask.item_stride + key * round_up(ask.number, kMaxWidth);
      for (int64_t k = 0; k < end; k++, row += round_up(ask.number, kMaxWidth))
        for (int64_t n = 0; n < ask.number; n++) x[k] += row[n] * ask.result[at * ask.number + n];
      return x;
    }
    case Kind::pool: {
      int64_t cells = (c.a.j + ask.number - 1) / ask.number, lines = (c.a.i + ask.number - 1) / ask.number;
      const Real *row = ask.result + (head_at * lines + query / ask.number) * cells;
      for (int64_t k = 0; k < end; k++) x[k] = row[(key + k) / ask.number];
      return x;
    }
    case Kind::top:
      for (int64_t n = 0; n < ask.number; n++) {
        int64_t k = ask.indices[at * ask.number + n] - key;
        if (k >= 0 && k < W) x[k] += ask.result[at * ask.number + n];
      }
      return x;
    default: return x;
  }
}

INLINE Vec asks_grad(const Scene &c, int64_t head, int64_t query, int64_t key) {
  Vec x = Vec{};
  for (int64_t n = 0; n < c.grad.ask_count; n++) x += ask_grad(c, c.grad.asks[n], head, query, key);
  return x;
}

// Adds what a row must know before its gradients: the mean of g, and how many scores are the largest.
inline void look_at(Scene &c, int64_t block, int64_t r, int64_t key, const Real *scores, const Real *grads) {
  const Sight &s = c.sight[block];
  int64_t n = c.begin[block] + r, at = c.at(block, r);
  Vec mean = Vec{}, ties = Vec{};
  for (int64_t k = 0; k < kPanel; k += W) {
    Vec score = load(scores + k), g = c.grad.output_grad ? load(grads + k) : Vec{};
    Vec weight = exp2_nonpositive(score - c.row.base[n], all(c.exponent)) * c.row.inverse[n];
    g += asks_grad(c, s.head[r], s.query[r], key + k);
    mean += select(score == all(-kInfinity), Vec{}, weight * g);
    ties += select(score * c.a.unit() == all(c.grad.max_score[at]), all(1.f), Vec{});
  }
  c.row.mean[n] += sum_lanes(mean);
  c.row.top[n] += sum_lanes(ties);
}

INLINE void add_up_to(Real *to, Vec x, int64_t n) {
  if (n >= W) return store(to, load(to) + x);
  for (int64_t k = 0; k < n; k++) to[k] += x[k];
}

inline Real *bias_row(const Scene &c, const Sight &s, int64_t r) {
  const int64_t *stride = c.grad.bias_grad_stride;
  return c.grad.bias_grad + c.part.batch * stride[0] + s.head[r] * stride[1] + s.query[r] * c.a.j;
}

// Scores to weights, and g to the gradient of the product of query and key, both in place.
inline void differentiate_row(Scene &c, int64_t block, int64_t r, int64_t key, Real *weights, Real *grads,
                              const Real *chain) {
  const Sight &s = c.sight[block];
  int64_t n = c.begin[block] + r, at = c.at(block, r);
  Real slope = 0.f, top = c.grad.max_score[at];
  for (int64_t k = 0; k < kPanel; k += W) {
    Vec score = load(weights + k), g = c.grad.output_grad ? load(grads + k) : Vec{};
    Int hidden = score == all(-kInfinity);
    Vec x = score - c.row.base[n];
    Vec weight = select(hidden, Vec{}, exp2_nonpositive(x, all(c.exponent)) * c.row.inverse[n]);
    if (c.grad.ask_count > 0) g += asks_grad(c, s.head[r], s.query[r], key + k);
    if (c.grad.entropy_grad) g -= larger(x * c.exponent, all(kSmallest)) * c.row.entropy[n];
    Vec to_score = weight * (g + c.row.shift[n]);
    if (c.grad.max_score_grad) to_score += select(score * c.a.unit() == all(top), all(c.row.top[n]), Vec{});
    to_score = select(hidden, Vec{}, to_score);
    if (c.a.slopes && c.grad.slopes_grad) {
      Vec distance = s.position[r] - (Real)(key + k) - __builtin_convertvector(iota(), Vec);
      slope -= sum_lanes(to_score * absolute(distance));
    }
    if (c.grad.bias_grad) add_up_to(bias_row(c, s, r) + key + k, to_score, c.a.j - key - k);
    if (c.a.softcap > 0) to_score = select(hidden, Vec{}, to_score * load(chain + k));
    store(weights + k, weight);
    store(grads + k, to_score);
  }
  c.row.slope[n] += slope;
}

// The rows of a block that see some of a panel: whole groups.
struct Range { int64_t first, last; };
inline Range rows_that_see(const Sight &s, int64_t count, int64_t key) {
  Range range{count, 0};
  for (int64_t first = 0; first < count; first += kGroup) {
    if (s.group_hi[first / kGroup] <= key || s.group_lo[first / kGroup] >= key + kPanel) continue;
    range = {least(range.first, first), least(first + kGroup, count)};
  }
  return range;
}

struct Unsafe { bool keys, values; };

inline Unsafe pack(Scene &c, int64_t tile, bool look) {
  const Request &a = c.a;
  Unsafe unsafe{};
  by_dtype(a.dtype, [&](auto element) {
    constexpr Dtype dtype = dtype_of(decltype(element){});
    Source keys = keys_of(a, c.part.batch, c.part.group);
    if (a.pairs) pack_panels<Dtype::float32>(in_pairs(a, keys), tile * kTile, c.space.keys);
    else pack_panels<dtype>(keys, tile * kTile, c.space.keys);
    if (c.grad.query_grad && !look) unsafe.keys = pack_rows<dtype>(keys, tile * kTile, c.space.key_rows);
    if (!c.grad.output_grad) return;
    Source values = values_of(a, c.part.batch, c.part.group);
    pack_panels<dtype>(values, tile * kTile, c.space.values);
    unsafe.values = any_not_finite(c.space.values, round_up(least(kTile, a.j - tile * kTile), kPanel) / kPanel * a.e, kPanel, kPanel);
  });
  return unsafe;
}

// One block of rows on one tile of keys.
inline void differentiate_tile(Scene &c, int64_t block, int64_t tile, Unsafe unsafe, bool look) {
  const Request &a = c.a;
  const Sight &s = c.sight[block];
  GradientSpace &space = c.space;
  int64_t rows = c.begin[block + 1] - c.begin[block], from = tile * kTile, row = c.begin[block];
  int64_t end = least(from + kTile, s.block_hi);
  for (int64_t key = most(from, s.block_lo / kPanel * kPanel); key < end; key += kPanel) {
    Range seeing = rows_that_see(s, rows, key);
    for (int64_t first = seeing.first / kStrip * kStrip; a.tiles && first < seeing.last; first += kStrip)
      multiply_tiles(space.query_pairs + (row + first) * c.query_stride, c.query_stride,
                     space.keys + (key - from) * a.depth(), kPanel, a.depth(),
                     space.weights + first * kStride + key - from, kStride);
    for (int64_t first = seeing.first; first < seeing.last; first += kGroup) {
      int64_t count = least(kGroup, rows - first), at = first * kStride + key - from;
      Real *weights = space.weights + at, *grads = space.scores_grad + at, *chain = space.chain + at;
      bool near = s.group_hi[first / kGroup] > key && s.group_lo[first / kGroup] < key + kPanel;
      Shown panel = near ? shown(a, s, first, count, key) : Shown{false, false};
      if (!panel.some) {
        for (int64_t r = 0; r < count; r++) {
          fill(weights + r * kStride, 0, kPanel, 0.f);
          fill(grads + r * kStride, 0, kPanel, 0.f);
        }
        continue;
      }
      scores_of(c, block, first, count, key, panel.all, space.keys + (key - from) * a.depth(), weights, chain);
      if (c.grad.output_grad)
        values_grad(c, block, first, count, space.values + (key - from) * a.e, unsafe.values, grads);
      if (look) {
        for (int64_t r = 0; r < count; r++) look_at(c, block, first + r, key, weights + r * kStride, grads + r * kStride);
        continue;
      }
      for (int64_t r = 0; r < count; r++)
        differentiate_row(c, block, first + r, key, weights + r * kStride, grads + r * kStride, chain + r * kStride);
    }
  }
  if (look) return;
  auto is_seen = [&](int64_t r, int64_t key) {
    int64_t lane = key % W;
    return lanes(visible(a, s, r, key - lane)) >> lane & 1;
  };
  for (int64_t first = 0; c.grad.query_grad && first < rows; first += kGroup) {
    int64_t group = first / kGroup, lo = most(s.group_lo[group] - from, 0), hi = least(s.group_hi[group] - from, kTile);
    if (lo >= hi) continue;
    add_product(false, least(kGroup, rows - first), space.scores_grad + first * kStride + lo, kStride, space.key_rows,
                kTile, 0, lo, hi, a.d, space.query_grad + (row + first) * c.query_stride, c.query_stride,
                unsafe.keys ? space.clean : nullptr, [&](int64_t r, int64_t j) { return is_seen(first + r, from + j); });
  }
  bool unsafe_rows = false;
  for (int64_t r = 0; r < rows; r++) unsafe_rows |= space.unsafe[row + r];
  for (int64_t key = most(from, s.block_lo / kPanel * kPanel); key < end; key += kPanel) {
    Range seeing = rows_that_see(s, rows, key);
    if (seeing.first >= seeing.last) continue;
    for (int64_t first = key; first < key + kPanel; first += kGroup) {
      int64_t count = least(kGroup, key + kPanel - first), at = seeing.first * kStride + first - from;
      auto seen = [&](int64_t n, int64_t r) { return is_seen(r, first + n); };
      auto add = [&](const Real *factors, const Real *of, int64_t width, int64_t stride, Real *to) {
        add_product(true, count, factors + at, kStride, of + row * stride, 0, stride, seeing.first, seeing.last, width,
                    to + (first - from) * stride, stride, unsafe_rows ? space.clean : nullptr, seen);
      };
      if (c.grad.key_grad) add(space.scores_grad, space.query, a.d, c.query_stride, space.key_grad);
      if (c.grad.value_grad) add(space.weights, space.output_grad, a.e, c.value_stride, space.value_grad);
    }
  }
}

// Adds a tile's part of the gradients of keys or values to the whole.
inline void add_to(Real *whole, const Real *part, int64_t rows, int64_t width, int64_t stride, Real factor) {
  for (int64_t n = 0; n < rows; n++)
    for (int64_t k = 0; k < width; k++) whole[n * width + k] += part[n * stride + k] * factor;
}

inline void differentiate(const Request &a, const Gradient &grad, const Part &part, GradientSpace &space) {
  Scene c{a, grad, part, space};
  if (a.tiles) begin_tiles();
  begin_rows(c);
  auto over_tiles = [&](bool look, auto done) {
    for (int64_t tile = part.tile_begin; tile < part.tile_end; tile++) {
      bool is_seen = false;
      Unsafe unsafe{};
      for (int64_t block = 0; block < c.blocks; block++) {
        const Sight &s = c.sight[block];
        if (s.block_lo >= least(s.block_hi, (tile + 1) * kTile) || s.block_hi <= tile * kTile) continue;
        if (!is_seen) {
          unsafe = pack(c, tile, look);
          if (!look && grad.key_grad) fill(space.key_grad, 0, kTile * c.query_stride, 0.f);
          if (!look && grad.value_grad) fill(space.value_grad, 0, kTile * c.value_stride, 0.f);
        }
        is_seen = true;
        differentiate_tile(c, block, tile, unsafe, look);
      }
      done(tile, is_seen);
    }
  };
  if (grad.looks_first()) over_tiles(true, [](int64_t, bool) {});
  end_look(c);
  Real unit = a.adjusted() ? a.scale : a.unit();  // packed queries carry the rest of the scale
  over_tiles(false, [&](int64_t tile, bool is_seen) {
    while (__atomic_load_n(part.turns + tile, __ATOMIC_ACQUIRE) < part.before[tile]) sched_yield();
    int64_t first = (part.batch * a.g + part.group) * a.j + tile * kTile, rows = least(kTile, a.j - tile * kTile);
    if (is_seen && grad.key_grad) add_to(grad.key_grad + first * a.d, space.key_grad, rows, a.d, c.query_stride, unit);
    if (is_seen && grad.value_grad)
      add_to(grad.value_grad + first * a.e, space.value_grad, rows, a.e, c.value_stride, 1.f);
    __atomic_add_fetch(part.turns + tile, 1, __ATOMIC_RELEASE);
  });
  end_rows(c);
  if (a.tiles) end_tiles();
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
