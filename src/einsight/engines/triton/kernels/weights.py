"""The second pass: exact weights of finished rows, from what the forward saved of each, in whatever way they are read.

Each kernel makes the weights of tiles again and visits only the queries it is asked about.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from einsight.engines.triton.kernels.scene import (
    LOG2E,
    allowed,
    load,
    load_key_tile,
    of_rule,
    reach,
    rows_at,
    rows_of_head,
    scores,
    weights,
)


class Saved(NamedTuple):
    """What the forward saved of each row, float32 [2, b, h, i]; and the queries asked about."""

    at: Any  # None where only scores are read
    part: Any  # b · h · i
    chosen: Any  # int32 [count]; None is all
    count: Any


@triton.jit
def query_tile(scene, saved, b, head, block, M: tl.constexpr, D: tl.constexpr):
    """The rows of a block, their queries, and what the forward saved of them."""
    rows = rows_of_head(scene, b, head, saved.chosen, saved.count, block, M)
    q, reference, inverse = of_rows(scene, saved, rows, D)
    return rows, q, reference, inverse


@triton.jit
def of_rows(scene, saved, rows, D: tl.constexpr):
    q = load(scene.query, rows.b, rows.head, rows.n, rows.ok, 0, scene.d, D)
    at = (rows.b * scene.h + rows.head) * scene.i + rows.n
    reference = tl.load(saved.at + at, mask=rows.ok, other=0.0)
    inverse = tl.load(saved.at + saved.part + at, mask=rows.ok, other=0.0)
    return q, reference, inverse


@triton.jit
def write_rows(
    scene, saved, to, blocks, key_blocks, hidden,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of weights, or of scores, [b, h, count, j], with `hidden` where nothing may be seen. A program is a tile."""
    program = tl.program_id(0)
    tile = program % key_blocks
    block = program // key_blocks % blocks
    head = program // key_blocks // blocks % scene.h
    b = (program // key_blocks // blocks // scene.h).to(tl.int64)
    n, k = load_key_tile(scene, b, head // scene.shared, tile * N, True, D, N)
    if SCORES:
        rows = rows_of_head(scene, b, head, saved.chosen, saved.count, block, M)
        q = load(scene.query, b, rows.head, rows.n, rows.ok, 0, scene.d, D)
        made, _ = scores(scene, rows, q, k, n, 1.0, True, PRECISION)
    else:
        rows, q, reference, inverse = query_tile(scene, saved, b, head, block, M, D)
        s, _ = scores(scene, rows, q, k, n, LOG2E, True, PRECISION)
        made = tl.where(s == float("-inf"), hidden, weights(s, reference, inverse))
    row = block * M + tl.arange(0, M)
    at = ((b * scene.h + head) * saved.count + row) * scene.j
    tl.store(to + at[:, None] + n[None, :], made, mask=rows.ok[:, None] & (n < scene.j)[None, :])


@triton.jit
def receive(
    scene, saved, first, last, range_b, received, seen, blocks,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each key receives from the chosen queries: [b, h, j]; and how many of them see it. A program is a tile of
    keys, which goes over the blocks of queries that may see it, in order: no atomics, and the same bits each time."""
    program = tl.program_id(0)
    tile = program % blocks
    head = program // blocks % scene.h
    b = (program // blocks // scene.h).to(tl.int64)
    n, k = load_key_tile(scene, b, head // scene.shared, tile * N, True, D, N)
    total = tl.zeros([N], tl.float32)
    count = tl.zeros([N], tl.float32)
    begin = tl.load(first + b * range_b + tile) // M
    end = tl.cdiv(tl.load(last + b * range_b + tile), M)
    for block in range(begin, end):
        rows, q, reference, inverse = query_tile(scene, saved, b, head, block, M, D)
        s, _ = scores(scene, rows, q, k, n, LOG2E, True, PRECISION)
        visible = (s != float("-inf")) & rows.ok[:, None]
        total += tl.sum(tl.where(visible, weights(s, reference, inverse), 0.0), 0)
        if seen is not None:
            count += tl.sum(visible.to(tl.float32), 0)
    at = (b * scene.h + head) * scene.j + n
    tl.store(received + at, total, mask=n < scene.j)
    if seen is not None:
        tl.store(seen + at, count, mask=n < scene.j)


@triton.jit
def share(
    scene, saved, rule, to, blocks,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weight of each chosen query on the keys that a rule counts: [b, h, count]."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    head = program // blocks % scene.h
    b = (program // blocks // scene.h).to(tl.int64)
    rows, q, reference, inverse = query_tile(scene, saved, b, head, block, M, D)
    total = tl.zeros([M], tl.float32)
    lo, hi, identity = of_rule(rule, b, rows.head, rows.n, rows.ok)
    start, stop, _left, _right = reach(rows, False, N)
    for place in range(start, stop, N):
        n, k = load_key_tile(scene, b, head // scene.shared, place, True, D, N)
        s, _ = scores(scene, rows, q, k, n, LOG2E, True, PRECISION)
        counted = allowed(scene, rule, rows, lo, hi, identity, n)
        total += tl.sum(tl.where(counted, weights(s, reference, inverse), 0.0), 1)
    row = block * M + tl.arange(0, M)
    tl.store(to + (b * scene.h + head) * saved.count + row, total, mask=rows.ok)


@triton.jit
def mass(
    scene, saved, member, member_b, groups, to, blocks, chunks,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, G: tl.constexpr, IDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weight of each chosen query on each group of keys: [b, h, count, groups]; a program makes G of the groups.
    `member` is each key's id [#b, j] (IDS), or how much it counts for each group, float32 [#b, j, groups]."""
    program = tl.program_id(0)
    chunk = program % chunks
    block = program // chunks % blocks
    head = program // chunks // blocks % scene.h
    b = (program // chunks // blocks // scene.h).to(tl.int64)
    rows, q, reference, inverse = query_tile(scene, saved, b, head, block, M, D)
    group = chunk * G + tl.arange(0, G)
    total = tl.zeros([M, G], tl.float32)
    start, stop, _left, _right = reach(rows, False, N)
    for place in range(start, stop, N):
        n, k = load_key_tile(scene, b, head // scene.shared, place, True, D, N)
        s, _ = scores(scene, rows, q, k, n, LOG2E, True, PRECISION)
        weight = weights(s, reference, inverse)
        if IDS:
            ids = tl.load(member + b * member_b + n, mask=n < scene.j, other=-1)
            counts = (ids[:, None] == group[None, :]).to(tl.float32)
        else:
            at = member + b * member_b + n[:, None].to(tl.int64) * groups + group[None, :]
            counts = tl.load(at, mask=(n < scene.j)[:, None] & (group < groups)[None, :], other=0.0)
        # Three products in tf32 are as good as one in float32: weights are not rounded to half precision here.
        total = tl.dot(weight, counts, total, input_precision="ieee" if PRECISION == "ieee" else "tf32x3")
    row = block * M + tl.arange(0, M)
    at = ((b * scene.h + head) * saved.count + row) * groups
    tl.store(to + at[:, None] + group[None, :], total, mask=rows.ok[:, None] & (group < groups)[None, :])


@triton.jit
def pool(
    scene, saved, to, size, lines, columns,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of weights over `size` queries and `size` keys: [b, h, lines, columns]. A program is one of them."""
    program = tl.program_id(0)
    column = program % columns
    line = program // columns % lines
    head = program // columns // lines % scene.h
    b = (program // columns // lines // scene.h).to(tl.int64)
    total = tl.zeros([M], tl.float32)
    for below in range(0, size, M):
        row = line * size + below + tl.arange(0, M)
        ok = (row < scene.i) & (row < (line + 1) * size)
        rows = rows_at(scene, b, head + tl.zeros_like(row), row, ok)
        q, reference, inverse = of_rows(scene, saved, rows, D)
        start, stop, _left, _right = reach(rows, False, 1)
        for place in range(tl.maximum(column * size, start // N * N), tl.minimum((column + 1) * size, stop), N):
            n, k = load_key_tile(scene, b, head // scene.shared, place, True, D, N)
            s, _ = scores(scene, rows, q, k, n, LOG2E, True, PRECISION)
            ours = ok[:, None] & ((n >= column * size) & (n < (column + 1) * size))[None, :]
            total += tl.sum(tl.where(ours, weights(s, reference, inverse), 0.0), 1)
    tl.store(to + ((b * scene.h + head) * lines + line) * columns + column, tl.sum(total, 0))
