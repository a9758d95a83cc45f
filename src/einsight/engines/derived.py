"""What the derivatives of compiled engines have in common."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.coordinates import Axis, numbers
from einsight.engines import stream
from einsight.engines.asks import Ask, as_found
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Readout


def plain(grad: Tensor | None) -> Tensor | None:
    """As it is read in memory: in order, and not negated on the way."""
    return None if grad is None else grad.resolve_neg().contiguous()


def of_all_heads(parts: Float[Tensor, "b h i"], heads: Axis, of: Tensor) -> Tensor:
    """The gradient of a tensor of all heads from the parts of the heads here."""
    grad = parts.sum((0, 2), dtype=torch.float64)
    return grad.new_zeros(of.shape[0]).index_add(0, numbers(heads, grad.device), grad).to(of.dtype)


def by_stream(
    problem: Problem,
    asks: list[tuple[Ask, ...]],
    leaves: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    of_output: Tensor | None,
    of_scores: tuple[Tensor | None, ...],
    of_parts: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients `wanted` of `leaves` (query, key, value, sink, and what the bias is made of), by the engine whose
    gradients can be derived again; given those of the output, of lse, largest score and entropy, and of each part of
    the readouts of weights."""
    given: list[tuple[Readout, Tensor | None]] = list(zip((LogSumExp(), MaxScore(), Entropy()), of_scores, strict=True))
    left = iter(of_parts)
    for readout, own in zip(problem.readouts, asks, strict=True):
        mine = [next(left) for ask in own for _ in ask.shapes(problem.sizes)]
        if mine:
            given.append(as_found(readout, problem, mine[0]))
    pairs = [(readout, grad) for readout, grad in given if grad is not None]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Names of their own, at which the derivative ends: one tensor may have been computed from another.
        query, key, value, sink, *biases = own = [None if leaf is None else leaf.view_as(leaf) for leaf in leaves]
        bias = None if problem.bias is None else problem.bias.made_of(tuple(b for b in biases if b is not None))
        asked = tuple(readout for readout, _ in pairs)
        output, found = stream.run(
            replace(problem, query=query, key=key, value=value, sink=sink, bias=bias, readouts=asked)
        )
    results = [result[0] if isinstance(result, tuple) else result for result in found]
    upper = [grad for _, grad in pairs]
    if of_output is not None and output is not None:
        results, upper = [output, *results], [of_output, *upper]
    chosen = [tensor for tensor, want in zip(own, wanted, strict=True) if tensor is not None and want]
    made = iter(torch.autograd.grad(results, chosen, upper, create_graph=again, allow_unused=True))
    return [next(made) if want else None for want in wanted]
