// From scores to exponentials, a row at a time, with the running maximum and the running sums.
#pragma once
#include "sight.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace EINSIGHT_LEVEL {

// Hides the keys of a panel that their bytes don't show, and takes the largest of the others.
template <bool shows> inline void hide(const uint8_t *seen, Real *scores, Real *tile_max) {
  Vec top = load(tile_max);
  for (int column = 0; column < kPanel; column += W) {
    Int some = from_bytes(seen + column);
    Vec x = select(shows ? some : ~some, load(scores + column), all(-kInfinity));
    store(scores + column, x);
    top = larger(x, top);
  }
  store(tile_max, top);
}

// The same where a row sees an interval.
inline void hide_outside(const View &v, int64_t key, Real *scores, Real *tile_max) {
  Vec top = load(tile_max);
  for (int column = 0; column < kPanel; column += W) {
    Int n = iota() + (int32_t)(key + column);
    Vec x = select((n >= (int32_t)v.lo) & (n < (int32_t)v.hi), load(scores + column), all(-kInfinity));
    store(scores + column, x);
    top = larger(x, top);
  }
  store(tile_max, top);
}

// The steps between product and softmax, on 64 scores of one row: softcap, alibi, bias, mask. Needed only where a panel
// is not fully visible or the problem asks for more than a scale, so it may read the scores back from memory.
inline void adjust(const Request &a, const Sight &s, int64_t r, int64_t key, Real *scores, Real *tile_max) {
  const View &v = s.view[r];
  if (!a.adjusted() && is_bytes(v, key, kPanel))
    return v.shows ? hide<true>(v.seen + key, scores, tile_max) : hide<false>(v.seen + key, scores, tile_max);
  if (!a.adjusted() && a.is_interval()) return hide_outside(v, key, scores, tile_max);
  Vec top = all(-kInfinity);
  for (int column = 0; column < kPanel; column += W) {
    Vec x = load(scores + column);
    if (a.adjusted()) x = x * a.scale;
    if (a.softcap > 0) x = tanh(x / a.softcap) * a.softcap;
    if (a.slopes) {
      Vec distance = s.position[r] - (Real)key - __builtin_convertvector(iota() + column, Vec);
      x -= absolute(distance) * s.slope[r];
    }
    if (a.bias) x += bias_of(a, s, r, key + column);
    x = select(visible(a, s, r, key + column), x, all(-kInfinity));
    store(scores + column, x);
    top = larger(x, top);
  }
  store(tile_max, larger(top, load(tile_max)));
}

// Replaces scores by exp2((scores - reference) * unit); adds them up by lanes. -inf becomes an exact 0, the
// reference itself an exact 1. Where products take pairs they go there as well, and `kept` says whether here too.
template <bool with_moment, bool kept, bool paired>
INLINE void exponentials(Real *scores, int64_t n, Real reference, Real unit, Real *sum, Real *moment, Real *pairs) {
  Vec minus = all(reference), total[4] = {}, first[4] = {};
  for (int64_t k = 0; k < n; k += 4 * W) {
    Vec before;
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      Vec x = load(scores + k + v * W) - minus;
      Vec y = exp2_nonpositive(x, all(unit));
      if (kept) store(scores + k + v * W, y);
      if (paired && v % 2 == 1) store(pairs + (k + (v - 1) * W) / 2, to_pairs(before, y));
      before = y;
      total[v] += y;
      if (with_moment) first[v] += y * larger(x * unit, all(kSmallest));
    }
  }
  store(sum, load(sum) + ((total[0] + total[1]) + (total[2] + total[3])));
  if (with_moment) store(moment, load(moment) + ((first[0] + first[1]) + (first[2] + first[3])));
}

// The largest of a row's maxima by lanes.
INLINE Real max_of_row(const Real *tile_max) {
  Vec top = load(tile_max);
  for (int64_t k = W; k < kMaxWidth; k += W) top = larger(load(tile_max + k), top);
  return max_lanes(top);
}

typedef void (*Exponentials)(Real *, int64_t, Real, Real, Real *, Real *, Real *);
template <bool with_moment>
constexpr Exponentials kExponentials[3] = {exponentials<with_moment, true, false>,
                                           exponentials<with_moment, !kHasPairs, kHasPairs>,
                                           exponentials<with_moment, true, kHasPairs>};

inline Exponentials exponentials_for(const Request &a) {
  int into = !a.pairs ? 0 : a.keeps_weights() ? 2 : 1;
  return (a.entropy ? kExponentials<true> : kExponentials<false>)[into];
}

// What exponents are relative to: a row that has seen nothing yet has no score to offer.
inline Real finite_reference(const Rows &rows, int64_t r) {
  return rows.reference[r] == -kInfinity ? 0.f : rows.reference[r];
}

// Moves a row's sums to a new reference, and returns the factor that does the same for its output.
// The moment's exponents are relative to the reference as well; all its terms are <= 0, so nothing cancels.
inline Real move_reference(const Request &a, const Rows &rows, int64_t r, Real score, Real exponent) {
  Real before = rows.reference[r];
  if (!(score > before)) return 1.f;
  rows.reference[r] = score;
  Real shift = (before - score) * exponent, factor = exp2_nonpositive(shift);
  Real *sum = rows.sum + r * kMaxWidth, *moment = rows.moment + r * kMaxWidth;
  for (int k = 0; k < kMaxWidth; k += W) {
    Vec total = load(sum + k) * factor;
    if (a.entropy) store(moment + k, load(moment + k) * factor + total * larger(shift, kSmallest));
    store(sum + k, total);
  }
  return factor;
}

}  // namespace EINSIGHT_LEVEL
}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
