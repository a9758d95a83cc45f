"""PyTorch's own kernel, for the output alone, where it keeps our conventions or can be made to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from einsight.engines import stream
from einsight.problem import Problem


def refuses(problem: Problem) -> str | None:
    if problem.value is None or problem.readouts:
        return "it gives the output alone, no readouts"
    return refuses_settings(problem)


def refuses_settings(problem: Problem) -> str | None:
    """What PyTorch's kernels don't have, or have otherwise."""
    for name in ("softcap", "score_mod", "bias", "sink"):
        if getattr(problem, name) is not None:
            return f"it has no {name}" if name != "bias" else "a NaN would pass where its bias hides a key by −∞"
    if problem.dropout:
        return "its dropout draws other numbers than the engines with readouts"
    if 0 in problem.sizes:
        return "a dimension is empty"
    if problem.device.type == "cpu" and problem.sizes.d != problem.sizes.e:
        return "on a CPU it holds the whole matrix when e ≠ d"
    if problem.is_transformed:
        return "its derivatives are not for torch.func or forward mode"
    if is_causal(problem) is None:
        return "of masks it has only causal, with query 0 at key 0"
    return None


def makes(problem: Problem) -> str:
    return "the output alone, without a mask or causal from the first key, without other settings"


def visits(problem: Problem) -> int:
    lo, hi, _ = problem.bounds
    each = (hi - lo).sum(-1)
    return int(each.expand(problem.sizes.b, problem.sizes.h).sum())


def holds(problem: Problem) -> None:
    """Only PyTorch knows."""


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"], tuple[Any, ...]]:
    if problem.needs_grad:
        return _Differentiable.apply(problem, problem.query, problem.key, problem.value), ()
    value: Any = problem.value  # there is one: `refuses` saw to it
    return _careful(problem, _kernel(problem, problem.query, problem.key, value)), ()


def is_causal(problem: Problem) -> bool | None:
    """Whether the mask is causal from the first key (True), hides nothing (False), or is another (None)."""
    if problem.mask is None:
        return False
    lo, hi, exact = problem.bounds
    j = problem.sizes.j
    if not exact or bool((lo > 0).any()):
        return None
    if bool((hi == j).all()):
        return False
    return True if bool((hi == torch.arange(1, problem.sizes.i + 1).clamp(max=j)).all()) else None


def _kernel(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "b h i e"]:
    return scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=bool(is_causal(problem)),
        scale=problem.scale,
        enable_gqa=problem.sizes.g != problem.sizes.h,
    )


def _careful(problem: Problem, output: Float[Tensor, "b h i e"]) -> Float[Tensor, "b h i e"]:
    """The kernel's output, mended where it breaks our conventions: it multiplies hidden values by a zero weight,
    so that a NaN among them spreads, and on CPUs it makes zeros of a query that is NaN itself."""
    if bool(_sound(output).all()) or problem.value is None:
        return output
    unsound = ~problem.value.isfinite()
    if bool(unsound.any()):
        # Queries that don't see these values get the very bits that they get when all is finite.
        output = _kernel(problem, problem.query, problem.key, problem.value.masked_fill(unsound, 0))
    right = _sound(output) & ~_meets(problem, unsound.any(-1))
    if bool(right.all()):
        return output
    mended: Any = stream.run(problem)[0]
    return output.where(right.unsqueeze(-1), mended)


def _sound(output: Float[Tensor, "b h i e"]) -> Bool[Tensor, "b h i"]:
    """Queries whose output is finite and not all 0, in one look at it."""
    largest = torch.linalg.vector_norm(output, torch.inf, -1)
    return (largest > 0) & (largest < torch.inf)


def _meets(problem: Problem, unsound: Bool[Tensor, "b g j"]) -> Bool[Tensor, "b h i"]:
    """The queries that see one of these keys: all, or under a causal mask those from the first such key on."""
    _, h, g, i, j, _, _ = problem.sizes
    met = unsound.cummax(-1).values.repeat_interleave(h // g, 1)
    last = torch.arange(i, device=met.device).clamp(max=j - 1) if is_causal(problem) else torch.full((i,), j - 1)
    return met[..., last]


class _Differentiable(torch.autograd.Function):
    """The kernel with its own backward; where a gradient isn't finite, or is to be derived again, `stream` gives it."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.problem = problem
        ctx.save_for_backward(query, key, value)
        ctx.inputs = [t.detach().requires_grad_(t.requires_grad) for t in (query, key, value)]
        with torch.enable_grad():
            ctx.output = _kernel(problem, *ctx.inputs)
        output = ctx.output.detach()
        ctx.sound = bool(_sound(output).all())
        return output if ctx.sound else _careful(problem, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        again = torch.is_grad_enabled()
        # When derived again, the derivative ends at names of its own: one input may have been computed from another.
        inputs = [t.view_as(t) for t in ctx.saved_tensors] if again else ctx.inputs
        wanted = [t for t in inputs if t.requires_grad]
        grads: tuple[Tensor, ...] = ()
        if ctx.sound and not again:
            grads = torch.autograd.grad(ctx.output, wanted, grad, retain_graph=True)
        if not grads or not all(bool(g.isfinite().all()) for g in grads):
            query, key, value = inputs
            with torch.enable_grad():
                output: Any = stream.run(replace(ctx.problem, query=query, key=key, value=value))[0]
            grads = torch.autograd.grad(output, wanted, grad, create_graph=again)
        found = iter(grads)
        return None, *(next(found) if t.requires_grad else None for t in inputs)
