"""The native operations under grad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.biases import Alibi
from einsight.coordinates import Axis, numbers
from einsight.engines import stream
from einsight.engines.native import operations
from einsight.engines.native.operations import Asked, Results, Settings
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Received, Weights


def forward(problem: Problem, settings: Settings, asked: Asked) -> Results:
    """The operation's results, with gradients to the problem's tensors."""
    slopes = problem.bias.slopes if isinstance(problem.bias, Alibi) else None
    leaves = problem.query, problem.key, problem.value, problem.sink, slopes
    return Results(*_Attention.apply(problem, settings, asked, *leaves))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, settings: Settings, asked: Asked, *leaves: Any
    ) -> tuple[Tensor | None, ...]:
        asked = asked._replace(lse=True, max_score=True, lse_rest=True)
        query, key, value, _, _ = leaves
        found = operations.forward(query, key, value, settings, asked)
        ctx.problem, ctx.settings, ctx.asked = problem, settings, asked
        ctx.save_for_backward(*leaves, *found)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.lse_rest)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        leaves, found = ctx.saved_tensors[:5], Results(*ctx.saved_tensors[5:])
        wanted, asked = ctx.needs_input_grad[3:], ctx.asked
        if torch.is_grad_enabled():
            return None, None, None, *_once_more(ctx.problem, ctx.settings, asked, leaves, wanted, grads)
        query, key, value, sink, slopes = leaves
        found = found._replace(
            output=None if value is None else found.output, entropy=found.entropy if asked.entropy else None
        )
        upper = Results(*(None if grad is None else grad.contiguous() for grad in grads))
        if value is None:
            upper = upper._replace(output=None)
        made = operations.backward(query, key, value, ctx.settings, found, upper, wanted)
        heads = ctx.problem.heads
        return (
            None,
            None,
            None,
            made.query.to(query.dtype) if wanted[0] else None,
            made.key.to(key.dtype) if wanted[1] else None,
            None if value is None or not wanted[2] else made.value.to(value.dtype),
            _of_all_heads(made.sink, heads, sink) if wanted[3] else None,
            _of_all_heads(made.slopes, heads, slopes) if wanted[4] else None,
        )


def _of_all_heads(parts: Float[Tensor, "b h i"], heads: Axis, of: Tensor) -> Tensor:
    """The gradient of a tensor of all heads, or of one number for them all, from the parts of the heads here."""
    grad = parts.sum((0, 2), dtype=torch.float64)
    if of.shape[0] == 1:
        return grad.sum(0, keepdim=True).to(of.dtype)
    return grad.new_zeros(of.shape[0]).index_add(0, numbers(heads), grad).to(of.dtype)


def _once_more(
    problem: Problem,
    settings: Settings,
    asked: Asked,
    leaves: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients made so that they can be differentiated again, by the engine that can."""
    query, key, value, sink, slopes = leaves
    counted = None if settings.received_from is None else settings.received_from.nonzero()[:, 0]
    of_kind = LogSumExp(), MaxScore(), Entropy(), Received(counted), Weights()
    bias = problem.bias if slopes is None else Alibi(slopes)
    with torch.enable_grad():
        again = replace(problem, query=query, key=key, value=value, sink=sink, bias=bias)
        again = again.asking(tuple(r for r, flag in zip(of_kind, asked, strict=False) if flag), value)
        output, found = stream.run(again)
    made = iter(found)
    results = [output, *(next(made) if flag else None for flag in asked[:5])]
    pairs = [(r, g) for r, g in zip(results, grads, strict=False) if r is not None and g is not None]
    chosen = [leaf for leaf, want in zip(leaves, wanted, strict=True) if leaf is not None and want]
    outputs, upper = [r for r, _ in pairs], [g for _, g in pairs]
    gradients = iter(torch.autograd.grad(outputs, chosen, upper, create_graph=True, allow_unused=True))
    return [next(gradients) if want else None for want in wanted]
