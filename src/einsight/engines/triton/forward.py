"""The forward on tensors: which results it writes, and the kernel's launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from einsight.coordinates import pick
from einsight.engines.asks import Ask, Kind
from einsight.engines.rules import Rule
from einsight.engines.triton.kernels import forward as kernels
from einsight.engines.triton.launch import launch, padded, precision, scene, tile, view
from einsight.engines.triton.lowered import Lowered, ends
from einsight.problem import Problem

CHUNK = 16  # columns of the output that are mended together
MOST_SHARES = 8  # intervals whose weight the forward sums; more go into the second pass


class Wanted(NamedTuple):
    """Which results beside the output."""

    lse: bool = False
    largest: bool = False
    entropy: bool = False
    argmax: bool = False
    saved: bool = False
    distance: bool = False
    shares: tuple[Ask, ...] = ()  # of intervals


class Found(NamedTuple):
    """Its results; `saved` is what weights are made from again: exp2(score − saved[0]) · saved[1]."""

    output: Tensor | None = None
    lse: Tensor | None = None
    largest: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    saved: Tensor | None = None
    distance: Tensor | None = None
    shares: Tensor | None = None


def is_interval(ask: Ask) -> bool:
    """Whether what is asked is the weight on one interval of keys for each query."""
    if ask.kind is Kind.SHARE and ask.rule is not None:
        return ask.rule.seen is None and ask.rule.query_ids is None
    return ask.kind is Kind.DIAGONAL


def rule_of(ask: Ask, problem: Problem) -> Rule:
    """The rule of the keys whose weight is asked for; a diagonal's is one key for each query."""
    if ask.rule is not None:
        return ask.rule
    key = (problem.positions + ask.number)[:, None]
    return Rule(key, key + 1)


def forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor | None, lowered: Lowered, wanted: Wanted
) -> Found:
    b, h, g, i, _, d, e = problem.sizes
    device, shares = query.device, len(wanted.shares)

    def numbers(asked: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(*shape, b, h, i, dtype=dtype, device=device) if asked else None

    found = Found(
        None if value is None else query.new_empty(b, h, i, e),
        numbers(wanted.lse),
        numbers(wanted.largest),
        numbers(wanted.entropy),
        numbers(wanted.argmax, dtype=torch.int32),
        numbers(wanted.saved, 2),
        numbers(wanted.distance),
        numbers(shares > 0, shares),
    )
    asked = kernels.Asked(
        None if found.output is None else view(found.output),
        *found[1:6],
        b * h * i,
        _intervals(problem, wanted.shares),
        found.shares,
        found.distance,
    )
    sink = None if problem.sink is None else pick(problem.sink.detach(), 0, problem.heads).float().contiguous()
    size = tile("attend", device, query.dtype, padded(d), padded(max(e, 1)))
    blocks = -(-i * (h // g) // size.rows)
    constants: dict[str, Any] = {
        "M": size.rows,
        "N": size.keys,
        "D": padded(d),
        "E": padded(max(e, 1)),
        "SHARES": shares,
        "S": 1 << max(shares - 1, 0).bit_length(),
        "PRECISION": precision(query.dtype),
    }
    arguments = scene(problem, query, key, lowered), None if value is None else view(value), e, asked, sink
    launch(kernels.attend, blocks * b * g, device, size, *arguments, blocks, g, 1, **constants, MEND=False)
    if value is not None and e:
        chunk = min(constants["E"], CHUNK)
        chunks = -(-e // chunk)
        # Tiles of as many keys, so that sums are made in the same order.
        size = tile("mend", device, query.dtype, constants["D"], constants["E"])._replace(keys=size.keys)
        blocks = -(-i * (h // g) // size.rows)
        constants = constants | {"M": size.rows, "E": chunk, "MEND": True}
        launch(kernels.attend, blocks * b * g * chunks, device, size, *arguments, blocks, g, chunks, **constants)
    return found


def _intervals(problem: Problem, asks: tuple[Ask, ...]) -> Tensor | None:
    if not asks:
        return None
    b, h, _, i = problem.sizes[:4]
    found = [end.expand(b, h, i) for ask in asks for end in ends(rule_of(ask, problem), i, problem.sizes.j)]
    return torch.stack(found).to(torch.int32).to(problem.device)
