"""The forward: one pass over the keys with a running softmax.

For a block of rows it keeps the largest score, the sum of exponentials, and whatever else is asked, all in units of the
largest score so far: when that grows, all of them shrink by the same factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from einsight.engines.triton.kernels.scene import (
    LN2,
    LOG2E,
    View,
    edge,
    load,
    load_key_tile,
    load_tile,
    reach,
    rows_of_group,
    scores,
)


class Asked(NamedTuple):
    """Where the results go; None is not asked. Numbers per row are float32 [b, h, i]."""

    output: View | None
    lse: Any
    largest: Any
    entropy: Any
    argmax: Any  # int32: the key of the largest score
    # What the weights are made from afterwards: exp2(score − reference) · inverse. float32 [2, b, h, i].
    saved: Any
    part: Any  # b · h · i
    # The weight in intervals of keys, int32 [shares, 2, b, h, i] to float32 [shares, b, h, i]
    intervals: Any
    shares: Any
    distance: Any


class State(NamedTuple):
    """Of each row: output, largest score, Σ e, Σ e (s − largest), Σ e over each interval, Σ e |p − j|, where the
    largest is; and what NaN and ∞ among the values make of its output, in bits."""

    output: Any
    top: Any
    total: Any
    moment: Any
    shares: Any
    distance: Any
    argmax: Any
    spoilt: Any


@triton.jit
def tile(
    scene, value, e, column, asked, rows, q, group, first, x,
    D: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SHARES: tl.constexpr, S: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, MEND: tl.constexpr,
):  # fmt: skip
    """The state after one more tile of keys."""
    n, k = load_key_tile(scene, rows.b, group, first, MASKED, D, N)
    s, _ = scores(scene, rows, q, k, n, LOG2E, MASKED, PRECISION)
    tile_top = tl.max(s, 1)
    top = tl.maximum(x.top, tile_top)
    # Where nothing was seen yet −∞ − (−∞) would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(x.top - shift)
    weight = tl.exp2(s - shift[:, None])
    if MASKED:
        weight = tl.where(s == float("-inf"), 0.0, weight)
    total = x.total * shrink + tl.sum(weight, 1)
    moment = x.moment
    if asked.entropy is not None:
        # All terms have one sign; the shift of those before is that of their sum.
        fallen = tl.where(x.top == float("-inf"), 0.0, x.top - shift)
        depth = tl.where(s == float("-inf"), 0.0, weight * (s - shift[:, None]))
        moment = shrink * (x.moment + x.total * fallen) + tl.sum(depth, 1)
    argmax = x.argmax
    if asked.argmax is not None:
        place = tl.min(tl.where(s == tile_top[:, None], n[None, :], 2147483647), 1)
        argmax = tl.where(tile_top > x.top, place, x.argmax)
    distance = x.distance
    if asked.distance is not None:
        away = tl.abs(rows.p[:, None] - n[None, :]).to(tl.float32)
        distance = x.distance * shrink + tl.sum(weight * away, 1)
    shares = x.shares
    if SHARES > 0:
        shares = x.shares * shrink[:, None]
        row = (rows.b * scene.h + rows.head) * scene.i + rows.n
        for number in tl.static_range(SHARES):
            lo = tl.load(asked.intervals + row + (2 * number) * asked.part, mask=rows.ok, other=0)
            hi = tl.load(asked.intervals + row + (2 * number + 1) * asked.part, mask=rows.ok, other=0)
            inside = (n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None])
            found = tl.sum(tl.where(inside, weight, 0.0), 1)
            shares = tl.where((tl.arange(0, S) == number)[None, :], shares + found[:, None], shares)
    output = x.output
    spoilt = x.spoilt
    if value is not None:
        v = load_tile(value, rows.b, group, first, scene.j, column, e, MASKED, E, N)
        if MEND:
            # The very sums of finite values; and of the others whether a row weighs them, or sees them at least. Counts
            # of a tile are exact, also those of ∞ and −∞ in one number.
            wide = v.to(tl.float32)
            up = wide == float("inf")
            down = wide == float("-inf")
            some = ((s != float("-inf")) & (weight > 0)).to(tl.float32).to(v.dtype)
            seen = (s != float("-inf")).to(tl.float32).to(v.dtype)
            ends = tl.dot(
                some, (tl.where(up, 1.0, 0.0) + tl.where(down, 128.0, 0.0)).to(v.dtype), input_precision="tf32"
            )
            odd = tl.dot(seen, ((wide - wide) != 0).to(tl.float32).to(v.dtype), input_precision="tf32")
            falls = tl.floor(ends / 128)
            rises = ends - 128 * falls
            spoilt = spoilt | (rises > 0).to(tl.int32) | ((falls > 0).to(tl.int32) * 2)
            spoilt = spoilt | ((odd > rises + falls).to(tl.int32) * 4)
            v = tl.where((wide - wide) != 0, 0.0, wide).to(v.dtype)
        output = x.output * shrink[:, None]
        output = tl.dot(weight.to(v.dtype), v, output, input_precision=PRECISION)
    return State(output, top, total, moment, shares, distance, argmax, spoilt)


@triton.jit
def attend(
    scene, value, e, asked, sink, blocks, groups, chunks,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SHARES: tl.constexpr, S: tl.constexpr,
    PRECISION: tl.constexpr, MEND: tl.constexpr,
):  # fmt: skip
    """A program is a block of M rows of one key head. With MEND it is run after the others, for E columns of the
    output: where these aren't finite it makes them again, with what isn't seen selected away, not multiplied by 0."""
    program = tl.program_id(0) // chunks
    column = tl.program_id(0) % chunks * E
    # The last rows see the most keys under a causal mask: they go first, so that no long program starts late.
    block = blocks - 1 - program % blocks
    b = (program // blocks // groups).to(tl.int64)
    group = program // blocks % groups
    rows = rows_of_group(scene, b, group, block, M)
    if MEND:
        made = load(asked.output, b, rows.head, rows.n, rows.ok, column, e, E).to(tl.float32)
        if tl.max(tl.max(((made - made) != 0).to(tl.int32), 1), 0) == 0:
            return
    q = load(scene.query, b, rows.head, rows.n, rows.ok, 0, scene.d, D)
    number = tl.zeros([M], tl.float32)
    output = number
    spoilt = number
    if value is not None:
        output = tl.zeros([M, E], tl.float32)
        if MEND:
            spoilt = tl.zeros([M, E], tl.int32)
    x = State(
        output, number + float("-inf"), number, number, tl.zeros([M, S], tl.float32), number,
        tl.zeros([M], tl.int32), spoilt,
    )  # fmt: skip
    EXACT: tl.constexpr = scene.rule.seen is None and scene.rule.key_ids is None
    start, stop, left, right = reach(rows, EXACT, N)
    for first in range(left, right, N):
        x = tile(
            scene, value, e, column, asked, rows, q, group, first, x, D, E, N, SHARES, S, False, PRECISION, MEND
        )  # fmt: skip
    for t in range(0, (left - start) // N + tl.cdiv(tl.maximum(stop - right, 0), N)):
        first = edge(t, start, left, right, N)
        x = tile(
            scene, value, e, column, asked, rows, q, group, first, x, D, E, N, SHARES, S, True, PRECISION, MEND
        )  # fmt: skip
    finish(scene, value, e, column, asked, sink, rows, x, E, SHARES, S, MEND)


@triton.jit
def finish(
    scene, value, e, column, asked, sink, rows, x,
    E: tl.constexpr, SHARES: tl.constexpr, S: tl.constexpr, MEND: tl.constexpr,
):  # fmt: skip
    """Rows whose keys have all come: the sink, the division, and the results."""
    at = (rows.b * scene.h + rows.head) * scene.i + rows.n
    top = x.top
    if sink is not None:
        top = tl.maximum(top, tl.load(sink + rows.head, mask=rows.ok, other=0.0) * LOG2E)
    shift = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(x.top - shift)
    fallen = tl.where(x.top == float("-inf"), 0.0, x.top - shift)
    keys = x.total * shrink
    total = keys
    if sink is not None:
        total += tl.exp2(tl.load(sink + rows.head, mask=rows.ok, other=0.0) * LOG2E - shift)
    inverse = tl.where(total == 0, 0.0, 1 / total)
    if value is not None:
        output = x.output * (shrink * inverse)[:, None]
        if MEND:
            output = tl.where((x.spoilt & 1) != 0, float("inf"), output)
            output = tl.where((x.spoilt & 2) != 0, float("-inf"), output)
            output = tl.where(x.spoilt >= 3, float("nan"), output)
            # A row whose scores are NaN is NaN.
            output = tl.where((total != total)[:, None], float("nan"), output)
        column = column + tl.arange(0, E)
        to = asked.output.at + rows.b * asked.output.b + rows.head.to(tl.int64) * asked.output.h
        to = (to + rows.n.to(tl.int64) * asked.output.n)[:, None] + (column * asked.output.d)[None, :]
        ok = rows.ok[:, None] & (column < e)[None, :]
        tl.store(to, output.to(asked.output.at.dtype.element_ty), mask=ok)
    if not MEND:
        if asked.lse is not None:
            lse = tl.where(total == 0, float("-inf"), (shift + tl.log2(total)) * LN2)
            tl.store(asked.lse + at, lse, mask=rows.ok)
        if asked.largest is not None:
            # tl.max passes over NaN.
            spoiled = (x.total != x.total) & (x.top < float("inf"))
            tl.store(asked.largest + at, tl.where(spoiled, float("nan"), x.top * LN2), mask=rows.ok)
        if asked.entropy is not None:
            moment = shrink * (x.moment + x.total * fallen)
            entropy = (keys * tl.log2(tl.where(total == 0, 1.0, total)) - moment) * inverse * LN2
            tl.store(asked.entropy + at, entropy, mask=rows.ok)
        if asked.argmax is not None:
            tl.store(asked.argmax + at, x.argmax, mask=rows.ok)
        if asked.saved is not None:
            tl.store(asked.saved + at, shift, mask=rows.ok)
            tl.store(asked.saved + asked.part + at, inverse, mask=rows.ok)
        if asked.distance is not None:
            tl.store(asked.distance + at, x.distance * shrink * inverse, mask=rows.ok)
        if SHARES > 0:
            shares = x.shares * (shrink * inverse)[:, None]
            to = asked.shares + tl.arange(0, S)[None, :].to(tl.int64) * asked.part + at[:, None]
            tl.store(to, shares, mask=rows.ok[:, None] & (tl.arange(0, S) < SHARES)[None, :])
