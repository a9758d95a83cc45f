"""The backward: the weights once more, and from them the gradients; by blocks of rows for the queries, by tiles of keys
for keys and values. Each number is written by one program: no atomics, and the same bits each time.

With w the weights and g = dL/dw, the gradient of a score is w (g − Σ w g + dlse), and the largest score's own. g is
doutput · value, what the key's `received` adds, and −dentropy (1 + ln w).
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
    load_pairs,
    load_tile,
    reach,
    rows_of_group,
    scores,
    weights,
)


class Upper(NamedTuple):
    """Gradients of the results; None where there is none. Numbers per row are float32 [b, h, i]."""

    saved: Any  # of the forward, [2, b, h, i]
    part: Any  # b · h · i
    output: View | None
    lse: Any
    largest: Any
    argmax: Any  # int32: which key's score is the largest
    entropy: Any
    received: View | None  # [b, h, 1, j]
    counts: Any  # bytes [i]: which queries `received` is about; None is all
    mean: Any  # Σ w g of each row


class Block(NamedTuple):
    """A block of rows, and what is known of each."""

    rows: Any
    q: Any
    upper: Any  # gradients of their outputs [M, E]
    reference: Any
    inverse: Any
    at: Any


@triton.jit
def block_of(scene, upper, e, b, group, block, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    rows = rows_of_group(scene, b, group, block, M)
    q = load(scene.query, b, rows.head, rows.n, rows.ok, 0, scene.d, D)
    of_output = q
    if upper.output is not None:
        of_output = load(upper.output, b, rows.head, rows.n, rows.ok, 0, e, E)
    at = (b * scene.h + rows.head) * scene.i + rows.n
    reference = tl.load(upper.saved + at, mask=rows.ok, other=0.0)
    inverse = tl.load(upper.saved + upper.part + at, mask=rows.ok, other=0.0)
    return Block(rows, q, of_output, reference, inverse, at)


@triton.jit
def tile(scene, upper, x, n, k, v, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Of a tile: the weights, their gradients, the softcap's factor, and where nothing is seen."""
    s, chain = scores(scene, x.rows, x.q, k, n, LOG2E, MASKED, PRECISION)
    hidden = (s == float("-inf")) | (x.rows.ok[:, None] == 0)
    weight = tl.where(hidden, 0.0, weights(s, x.reference, x.inverse))
    g = tl.zeros_like(s)
    if upper.output is not None:
        g = tl.dot(x.upper, tl.trans(v), input_precision=PRECISION)
    if upper.received is not None:
        added = load_pairs(scene, upper.received, x.rows, n)
        if upper.counts is not None:
            counts = tl.load(upper.counts + x.rows.n, mask=x.rows.ok, other=0) != 0
            added = tl.where(counts[:, None], added, 0.0)
        g += added
    if upper.entropy is not None:
        of_entropy = tl.load(upper.entropy + x.at, mask=x.rows.ok, other=0.0)
        # A key so far below that it weighs nothing is held at a finite depth, or its −∞ would meet the weight 0.
        depth = (s - x.reference[:, None]) * LN2 + tl.log(x.inverse)[:, None]
        g -= of_entropy[:, None] * (1 + tl.maximum(depth, -1e4))
    return weight, g, chain, hidden


@triton.jit
def of_scores(upper, x, n, weight, g, hidden, mean):
    """The gradients of the scores."""
    inner = g - mean[:, None]
    if upper.lse is not None:
        inner += tl.load(upper.lse + x.at, mask=x.rows.ok, other=0.0)[:, None]
    made = weight * inner
    if upper.largest is not None:
        place = tl.load(upper.argmax + x.at, mask=x.rows.ok, other=-1)
        own = tl.load(upper.largest + x.at, mask=x.rows.ok, other=0.0)
        made += tl.where(n[None, :] == place[:, None], own[:, None], 0.0)
    return tl.where(hidden, 0.0, made)


@triton.jit
def key_and_value(
    scene, value, e, upper, b, group, first, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of keys and of their values; without a gradient of the output these aren't read."""
    n, k = load_key_tile(scene, b, group, first, MASKED, D, N)
    v = k
    if upper.output is not None:
        v = load_tile(value, b, group, first, scene.j, 0, e, MASKED, E, N)
    return n, k, v


@triton.jit
def mean_tile(
    scene, value, e, upper, x, group, first, mean,
    D: tl.constexpr, E: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, k, v = key_and_value(scene, value, e, upper, x.rows.b, group, first, MASKED, D, E, N)
    weight, g, _, hidden = tile(scene, upper, x, n, k, v, MASKED, PRECISION)
    return mean + tl.sum(tl.where(hidden, 0.0, weight * g), 1)


@triton.jit
def query_tile(
    scene, value, e, upper, x, group, first, mean, of_query, of_slope, SLOPES: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, k, v = key_and_value(scene, value, e, upper, x.rows.b, group, first, MASKED, D, E, N)
    weight, g, chain, hidden = tile(scene, upper, x, n, k, v, MASKED, PRECISION)
    made = of_scores(upper, x, n, weight, g, hidden, mean)
    if SLOPES:
        away = tl.abs(x.rows.p[:, None] - n[None, :]).to(tl.float32)
        of_slope -= tl.sum(made * away, 1)
    if scene.softcap is not None:
        made = tl.where(hidden, 0.0, made * chain)
    return tl.dot(made.to(k.dtype), k, of_query, input_precision=PRECISION), of_slope


@triton.jit
def means_of_rows(
    scene, value, e, upper, blocks, groups,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ w g of each row, in the very terms that it is then taken from: where one weight is nearly 1, both are nearly
    alike. A program is a block of rows of one key head."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    b = (program // blocks // groups).to(tl.int64)
    group = program // blocks % groups
    x = block_of(scene, upper, e, b, group, block, M, D, E)
    EXACT: tl.constexpr = scene.rule.seen is None and scene.rule.key_ids is None
    start, stop, left, right = reach(x.rows, EXACT, N)
    mean = tl.zeros([M], tl.float32)
    for first in range(left, right, N):
        mean = mean_tile(scene, value, e, upper, x, group, first, mean, D, E, N, False, PRECISION)
    for t in range(0, (left - start) // N + tl.cdiv(tl.maximum(stop - right, 0), N)):
        place = edge(t, start, left, right, N)
        mean = mean_tile(scene, value, e, upper, x, group, place, mean, D, E, N, True, PRECISION)
    tl.store(upper.mean + x.at, mean, mask=x.rows.ok)


@triton.jit
def gradients_of_queries(
    scene, value, e, upper, to, slopes, blocks, groups,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is a block of rows of one key head."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    b = (program // blocks // groups).to(tl.int64)
    group = program // blocks % groups
    x = block_of(scene, upper, e, b, group, block, M, D, E)
    EXACT: tl.constexpr = scene.rule.seen is None and scene.rule.key_ids is None
    SLOPES: tl.constexpr = slopes is not None
    start, stop, left, right = reach(x.rows, EXACT, N)
    edges = (left - start) // N + tl.cdiv(tl.maximum(stop - right, 0), N)
    mean = tl.load(upper.mean + x.at, mask=x.rows.ok, other=0.0)
    made = tl.zeros([M, D], tl.float32)
    of_slope = tl.zeros([M], tl.float32)
    for first in range(left, right, N):
        made, of_slope = query_tile(
            scene, value, e, upper, x, group, first, mean, made, of_slope, SLOPES, D, E, N, False, PRECISION
        )  # fmt: skip
    for t in range(0, edges):
        place = edge(t, start, left, right, N)
        made, of_slope = query_tile(
            scene, value, e, upper, x, group, place, mean, made, of_slope, SLOPES, D, E, N, True, PRECISION
        )  # fmt: skip
    if to is not None:
        column = tl.arange(0, D)
        ok = x.rows.ok[:, None] & (column < scene.d)[None, :]
        made = (made * scene.scale).to(to.dtype.element_ty)
        tl.store(to + x.at[:, None] * scene.d + column[None, :], made, mask=ok)
    if slopes is not None:
        tl.store(slopes + x.at, of_slope, mask=x.rows.ok)


@triton.jit
def gradients_of_keys(
    scene, value, e, upper, to_key, to_value, first, last, range_b, blocks, groups,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is a tile of keys of one key head, which goes over the rows that may see it, in order."""
    program = tl.program_id(0)
    part = program % blocks
    b = (program // blocks // groups).to(tl.int64)
    group = program // blocks % groups
    n, k, v = key_and_value(scene, value, e, upper, b, group, part * N, True, D, E, N)
    of_key = tl.zeros([N, D], tl.float32)
    of_value = of_key
    if upper.output is not None:
        of_value = tl.zeros([N, E], tl.float32)
    begin = tl.load(first + b * range_b + part) * scene.shared // M
    end = tl.cdiv(tl.load(last + b * range_b + part) * scene.shared, M)
    for block in range(begin, end):
        x = block_of(scene, upper, e, b, group, block, M, D, E)
        weight, g, chain, hidden = tile(scene, upper, x, n, k, v, True, PRECISION)
        mean = tl.load(upper.mean + x.at, mask=x.rows.ok, other=0.0)
        made = of_scores(upper, x, n, weight, g, hidden, mean)
        if scene.softcap is not None:
            made = tl.where(hidden, 0.0, made * chain)
        if upper.output is not None:
            of_value = tl.dot(tl.trans(weight.to(v.dtype)), x.upper, of_value, input_precision=PRECISION)
        of_key = tl.dot(tl.trans(made.to(k.dtype)), x.q, of_key, input_precision=PRECISION)
    row = (b * groups + group) * scene.j + n
    ok = (n < scene.j)[:, None]
    if to_key is not None:
        column = tl.arange(0, D)
        made = (of_key * scene.scale).to(to_key.dtype.element_ty)
        tl.store(to_key + row[:, None] * scene.d + column[None, :], made, mask=ok & (column < scene.d)[None, :])
    if to_value is not None:
        column = tl.arange(0, E)
        made = of_value.to(to_value.dtype.element_ty)
        tl.store(to_value + row[:, None] * e + column[None, :], made, mask=ok & (column < e)[None, :])
