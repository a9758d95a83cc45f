"""Whole matrices: the formula with our conventions, for any feature and any order of derivative.

In float64 it is what every other engine is measured against. It asks each mask for its single pairs, never for
its bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import dropout

from einsight.coordinates import Run, numbers, pick
from einsight.engines.products import inner, weighted
from einsight.engines.softmax import softmax_of, sums_of, weights_of
from einsight.problem import Problem
from einsight.readouts import Block, Readout
from einsight.room import too_large


def refuses(problem: Problem) -> str | None:
    """What doesn't fit into memory, and nothing else."""
    comparison = too_large(holds(problem), problem.device)
    return None if comparison is None else f"its whole matrices would take {comparison}"


def makes(problem: Problem) -> str:
    return "any result, any derivative, torch.func; memory for the whole matrix"


def visits(problem: Problem) -> int:
    b, h, _, i, j, _, _ = problem.sizes
    return b * h * i * j


def holds(problem: Problem) -> int:
    """Bytes: the scores, their exponentials and the weights, and which pairs may be seen."""
    return visits(problem) * (3 * problem.dtype.itemsize + 1)


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    b, h, g, i, j, _, _ = problem.sizes
    at = problem.at(slice(0, b), slice(0, h), slice(0, i), Run(0, j))
    query, key = problem.query.to(problem.dtype), problem.key.to(problem.dtype)
    bias = None if problem.bias is None else problem.bias.block(at, problem.dtype)

    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=problem.device)
    if problem.mask is not None:
        seen = seen & problem.mask.allowed(at)
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    seen = seen.expand(b, h, i, j)

    scores = _product(inner, query, _per_head(key, h), seen) * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = problem.modified(scores, at)
    if bias is not None:
        scores = scores + bias
    scores = scores.where(seen, -torch.inf)
    seen = scores != -torch.inf

    sink = None if problem.sink is None else pick(problem.sink, 0, problem.heads)
    of = softmax_of(scores, sink)
    weights = weights_of(of, j, seen)
    log_sum, lse = sums_of(of)

    output = None
    if problem.value is not None:
        kept = dropout(weights, problem.dropout) if problem.dropout else weights
        value = _per_head(problem.value.to(problem.dtype), h)
        output = _product(weighted, kept, value, seen).to(problem.query.dtype)
    block = Block(at, 0, 0, 0, g, weights, scores, of.largest, of.shift, log_sum, lse, seen)
    return output, tuple(_read(readout, block) for readout in problem.readouts)


def _per_head(x: Float[Tensor, "b g j d"], h: int) -> Float[Tensor, "b h j d"]:
    return repeat(x, "b g j d -> b (g n) j d", n=h // max(x.shape[1], 1))


def _product(product: Any, a: Tensor, b: Tensor, seen: Bool[Tensor, "b h i j"]) -> Tensor:
    """A product of matrices for each batch item and head."""
    return product(a.flatten(0, 1), b.flatten(0, 1), seen.flatten(0, 1)).unflatten(0, a.shape[:2])


def _read(readout: Readout, block: Block) -> Any:
    if readout.queries is not None:
        block = block.rows(numbers(readout.queries, block.weights.device), 0)
    parts = readout.block(block)
    return readout.join(*(parts if isinstance(parts, tuple) else (parts,)))
