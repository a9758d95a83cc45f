"""What every kernel does: reading rows, and making scores and weights of a tile of queries and keys.

Scores are in units of ln 2, so that a weight is one exp2. What may not be seen has the score −∞ by selection, whatever
the product made of it: 0 · NaN is NaN, so nothing hidden is ever multiplied away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class View(NamedTuple):
    """A tensor [b, h, n, d] in memory: where it begins, and its strides."""

    at: Any
    b: Any
    h: Any
    n: Any
    d: Any


class Rule(NamedTuple):
    """Keys that are seen, or counted. None is no condition."""

    bounds: Any  # int32 [2, #b, #h, i]: the first key of a query, and the one after the last
    bounds_part: Any
    bounds_b: Any
    bounds_h: Any
    seen: View | None  # bytes
    shows: Any  # whether 1 shows a key
    query_ids: Any  # int64 [#b, i]
    query_ids_b: Any
    key_ids: Any  # int64 [#b, j]
    key_ids_b: Any


class Scene(NamedTuple):
    """What scores are made of. None is what a problem doesn't have, and costs nothing then."""

    query: View
    key: View
    i: Any
    j: Any
    d: Any
    h: Any
    shared: Any  # query heads of a key head
    scale: Any
    softcap: Any
    rule: Rule  # which keys are seen
    bias: View | None  # float32
    slopes: Any  # float32 [h]
    positions: Any  # int64 [#b, i]
    positions_b: Any


class Rows(NamedTuple):
    """Some queries: item, head and number of each, whether there is one, its interval of keys, position and id."""

    b: Any
    head: Any
    n: Any
    ok: Any
    lo: Any
    hi: Any
    p: Any
    id: Any


LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def rows_of_group(scene, b, group, block, M: tl.constexpr):
    """A block of the rows that read one key head: (query, head of the group), query first. So the heads of a group read
    their keys once, and a single query of a group of heads fills a block."""
    row = block * M + tl.arange(0, M)
    ok = row < scene.i * scene.shared
    n = row // scene.shared
    head = group * scene.shared + row % scene.shared
    return rows_at(scene, b, head, n, ok)


@triton.jit
def rows_of_head(scene, b, head, chosen, count, block, M: tl.constexpr):
    """A block of the queries of one head: those `chosen`, or all."""
    row = block * M + tl.arange(0, M)
    ok = row < count
    n = row
    if chosen is not None:
        n = tl.load(chosen + row, mask=ok, other=0)
    return rows_at(scene, b, head + tl.zeros_like(row), n, ok)


@triton.jit
def rows_at(scene, b, head, n, ok):
    p = n.to(tl.int64)
    if scene.positions is not None:
        p = tl.load(scene.positions + b * scene.positions_b + n, mask=ok, other=0)
    lo, hi, identity = of_rule(scene.rule, b, head, n, ok)
    return Rows(b, head, n, ok, lo, hi, p, identity)


@triton.jit
def of_rule(rule, b, head, n, ok):
    """A rule's interval and id of each row."""
    at = rule.bounds + b * rule.bounds_b + head * rule.bounds_h + n
    lo = tl.load(at, mask=ok, other=0)
    hi = tl.load(at + rule.bounds_part, mask=ok, other=0)
    identity = n.to(tl.int64)
    if rule.query_ids is not None:
        identity = tl.load(rule.query_ids + b * rule.query_ids_b + n, mask=ok, other=0)
    return lo, hi, identity


@triton.jit
def load(view, b, head, n, ok, column, size, D: tl.constexpr):
    """[n, D]: rows of a tensor from a column on, with 0 where there is nothing."""
    d = column + tl.arange(0, D)
    at = view.at + b * view.b + head.to(tl.int64) * view.h + n.to(tl.int64) * view.n
    return tl.load(at[:, None] + (d * view.d)[None, :], mask=ok[:, None] & (d < size)[None, :], other=0.0)


@triton.jit
def reach(rows, exact: tl.constexpr, N: tl.constexpr):
    """The keys that some of the rows may see, as (start, stop); and those that all of them do, in whole tiles, as
    (left, right), with nothing to ask there."""
    sees = rows.ok & (rows.lo < rows.hi)
    start = tl.min(tl.where(sees, rows.lo, 2147483647), 0)
    stop = tl.max(tl.where(sees, rows.hi, 0), 0)
    start = tl.minimum(start, stop) // N * N
    left = start
    right = start
    if exact:
        last = tl.min(tl.where(rows.ok, rows.hi, 2147483647), 0) // N * N
        first = (tl.max(tl.where(rows.ok, rows.lo, 0), 0) + N - 1) // N * N
        right = tl.where(last > first, last, start)
        left = tl.where(last > first, first, start)
    return start, stop, left, right


@triton.jit
def edge(t, start, left, right, N: tl.constexpr):
    """The first key of the t-th tile beside those that all rows see."""
    before = (left - start) // N
    return tl.where(t < before, start + t * N, right + (t - before) * N)


@triton.jit
def tanh(x):
    """Right to two roundings for small numbers too, where 1 − 2 / (exp(2 x) + 1) would cancel."""
    a = tl.abs(x)
    t = tl.exp2(a * (-2 * LOG2E))
    large = (1 - t) / (1 + t)
    y = x * x
    small = a * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    result = tl.where(a < 0.25, small, large)
    return tl.where(x < 0, -result, result)


@triton.jit
def scores(scene, rows, q, k, n, UNIT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of rows and keys as the softmax sees them, times UNIT; and the chain rule's factor of the softcap."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s = s * (scene.scale * UNIT)
    chain = s
    if scene.softcap is not None:
        bent = tanh(s / (scene.softcap * UNIT))
        chain = 1 - bent * bent
        s = bent * (scene.softcap * UNIT)
    if scene.slopes is not None:
        slope = tl.load(scene.slopes + rows.head, mask=rows.ok, other=0.0)
        away = tl.abs(rows.p[:, None] - n[None, :]).to(tl.float32)
        s = s - (slope * UNIT)[:, None] * away
    if scene.bias is not None:
        bias = load_pairs(scene, scene.bias, rows, n)
        s = tl.where(bias == float("-inf"), float("-inf"), s + bias.to(tl.float32) * UNIT)
    if MASKED:
        s = tl.where(allowed(scene, scene.rule, rows, rows.lo, rows.hi, rows.id, n), s, float("-inf"))
    return s, chain


@triton.jit
def allowed(scene, rule, rows, lo, hi, identity, n):
    """The pairs that a rule allows, of whose rows the interval and the id are known."""
    inside = (n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None])
    if rule.seen is not None:
        inside = inside & ((load_pairs(scene, rule.seen, rows, n) != 0) == (rule.shows != 0))
    if rule.key_ids is not None:
        ids = tl.load(rule.key_ids + rows.b * rule.key_ids_b + n, mask=n < scene.j, other=0)
        inside = inside & (identity[:, None] == ids[None, :])
    return inside


@triton.jit
def load_pairs(scene, view, rows, n):
    at = view.at + rows.b * view.b + rows.head.to(tl.int64) * view.h + rows.n.to(tl.int64) * view.n
    ok = rows.ok[:, None] & (n < scene.j)[None, :]
    return tl.load(at[:, None] + (n.to(tl.int64) * view.d)[None, :], mask=ok, other=0)


@triton.jit
def weights(s, reference, inverse):
    """The weights of finished rows: what was hidden is 0 by selection, also in a row that is NaN."""
    return tl.where(s == float("-inf"), 0.0, tl.exp2(s - reference[:, None]) * inverse[:, None])


@triton.jit
def load_tile(view, b, head, first, count, column, size, MASKED: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """[N, D]: the rows from `first` on of one head, from a column on, with 0 where there is nothing. Only the tile's
    own place is counted in 64 bits: one address for each number would take most of the registers."""
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    start = (
        view.at + b * view.b + tl.cast(head, tl.int64) * view.h + tl.cast(first, tl.int64) * view.n + column * view.d
    )
    at = start + ((n * view.n)[:, None] + (d * view.d)[None, :])
    ok = (d < size - column)[None, :]
    if MASKED:
        ok = ok & (first + n < count)[:, None]
    return tl.load(at, mask=ok, other=0.0)


@triton.jit
def load_key_tile(scene, b, head, first, MASKED: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """Which keys, and the keys."""
    n = first + tl.arange(0, N)
    return n, load_tile(scene.key, b, head, first, scene.j, 0, scene.d, MASKED, D, N)
