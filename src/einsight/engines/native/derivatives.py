"""The native operations under grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from einsight.biases import Alibi, TensorBias
from einsight.coordinates import Run, count, to_four
from einsight.engines.asks import Ask, Kind
from einsight.engines.derived import by_stream, of_all_heads, plain
from einsight.engines.native import operations
from einsight.engines.native.operations import Asked, Results, Settings
from einsight.engines.rules import LIMIT, lower_bias
from einsight.problem import Problem
from einsight.readouts import Scores

_Biases = tuple[Tensor | None, Tensor | None] | str


def refuses(problem: Problem) -> str | None:
    """What it can't derive."""
    if any(type(readout) is Scores for readout in problem.readouts):
        return "it has no derivative of dense scores; under torch.no_grad() it runs"
    if any(tensor.requires_grad for readout in problem.readouts for tensor in readout.tensors):
        return "it has no derivative with respect to what a readout is made of"
    if not _learns_bias(problem) or type(problem.bias) is Alibi:
        return None
    if torch.compiler.is_compiling() and not _is_tensor(problem):
        return "torch.compile can't look into the derivative of what its bias is made of"
    if problem.sizes.h > 768 * problem.sizes.g:  # the kernel's kPart: else a part has no whole query
        return "it has no derivative of a bias where more than 768 heads read one key"
    return None


def _learns_bias(problem: Problem) -> bool:
    return problem.bias is not None and any(tensor.requires_grad for tensor in problem.bias.tensors)


def _is_tensor(problem: Problem) -> bool:
    """Whether the bias is one tensor, and all of it takes part."""
    b, h, _, i, *_ = problem.given
    chosen = zip((problem.batch, problem.heads, problem.queries), (b, h, i), strict=True)
    return type(problem.bias) is TensorBias and all(isinstance(axis, Run) and count(axis) == n for axis, n in chosen)


def learned(problem: Problem, lowered: _Biases) -> _Biases:
    """The lowered bias as its gradient is computed: for each query and key by itself."""
    if isinstance(lowered, str):
        return lowered
    slopes, given = lowered
    if given is None or not given.requires_grad:
        return lowered
    bias = given.expand(-1, -1, problem.sizes.i, problem.sizes.j)
    if bias.numel() > given.numel() and bias.numel() * 4 > LIMIT:
        return f"the gradient of the bias, before it is summed, would take more than {LIMIT >> 20} MB"
    return slopes, bias


def forward(
    problem: Problem,
    operands: tuple[Tensor, Tensor, Tensor | None],
    settings: Settings,
    asked: Asked,
    asks: list[tuple[Ask, ...]],
) -> Results:
    """The operation's results, with gradients to the operands (query, key, value) and the problem's other tensors."""
    biases = () if problem.bias is None else problem.bias.tensors
    leaves = *operands, problem.sink, *biases
    output, lse, max_score, entropy, scores, lse_rest, *parts = _Attention.apply(
        problem, settings, asked, asks, *leaves
    )
    return Results(output, lse, max_score, entropy, scores, lse_rest, parts)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, settings: Settings, asked: Asked, asks: list[tuple[Ask, ...]], *leaves: Any
    ) -> tuple[Tensor | None, ...]:
        ctx.problem, ctx.asks, ctx.entropy = problem, asks, asked.entropy
        ctx.learned = [t is not None and t.requires_grad for t in settings[3:5]]
        slopes, bias = (None if t is None else t.detach() for t in settings[3:5])
        ctx.settings = settings = settings._replace(slopes=slopes, bias=bias)
        asked = asked._replace(lse=True, max_score=True, lse_rest=True)
        found = operations.forward(leaves[0], leaves[1], leaves[2], settings, asked)
        integers = [part for part in found.parts if part is not None and not part.dtype.is_floating_point]
        ctx.save_for_backward(*leaves, *found[:4], found.lse_rest, *integers)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.lse_rest, *integers)
        # A None among the outputs would shift the gradients under torch.compile.
        return *(leaves[0].new_empty(0) if x is None else x for x in found[:6]), *found.parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        problem, wanted = ctx.problem, ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors  # asked once: under checkpointing a second time is refused
        leaves, found = saved[: len(wanted)], saved[len(wanted) :]
        if torch.is_grad_enabled():
            made = by_stream(problem, ctx.asks, leaves, wanted, grads[0], grads[1:4], grads[6:])
            return None, None, None, None, *made
        query, key, value, sink, *_ = leaves
        output, lse, max_score, entropy, lse_rest, *integers = found
        upper, indices = _of_asks(ctx.asks, grads[6:], integers)
        of_output, of_lse, of_max, of_entropy = (plain(g) for g in grads[:4])
        of_value = wanted[2] and of_output is not None
        if value is None or value.numel() == 0:
            output = of_output = None
        made = operations.backward(
            query,
            key,
            value,
            ctx.settings,
            Results(output, lse, max_score, entropy if ctx.entropy else None, None, lse_rest, indices),
            Results(of_output, of_lse, of_max, of_entropy, None, None, upper),
            (*wanted[:2], of_value, wanted[3], *ctx.learned),
        )
        return (
            None,
            None,
            None,
            None,
            made.query.to(query.dtype) if wanted[0] else None,
            made.key.to(key.dtype) if wanted[1] else None,
            made.value.to(value.dtype) if value is not None and of_value else None,
            of_all_heads(made.sink, problem.heads, sink) if wanted[3] else None,
            *_of_biases(problem, leaves[4:], wanted[4:], made),
        )


def _of_asks(
    asks: list[tuple[Ask, ...]], grads: tuple[Tensor | None, ...], integers: list[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """For each readout of weights the gradient of its floats, and its integers."""
    left, whole = iter(grads), iter(integers)
    upper: list[Tensor | None] = []
    indices: list[Tensor | None] = []
    for ask in (ask for own in asks for ask in own):
        grad = next(left)
        upper.append(plain(grad))
        indices.append(next(whole) if ask.kind is Kind.TOP else None)
        if ask.kind is Kind.TOP:
            next(left)
    return upper, indices


def _of_biases(
    problem: Problem,
    leaves: tuple[Tensor, ...],
    wanted: tuple[bool, ...],
    made: operations.Gradients,
) -> list[Tensor | None]:
    """The gradients of what the bias is made of."""
    if problem.bias is None or not any(wanted):
        return [None for _ in wanted]
    if type(problem.bias) is Alibi:
        return [of_all_heads(made.slopes, problem.heads, leaves[0])]
    if _is_tensor(problem):
        (leaf,) = leaves
        return [made.bias.sum_to_size(to_four(leaf).shape).view(leaf.shape).to(leaf.dtype)]
    # From the tensors themselves: one of them may have been computed from another.
    own = tuple(leaf.detach().requires_grad_(want) for leaf, want in zip(leaves, wanted, strict=True))
    with torch.enable_grad():
        lowered: Any = learned(problem, lower_bias(problem.bias.made_of(own), problem.whole, problem.dtype))
    slopes, bias = lowered
    of_slopes = None if slopes is None else made.slopes.sum((0, 2), dtype=torch.float64).to(slopes.dtype)
    pairs = [(x, g) for x, g in ((slopes, of_slopes), (bias, made.bias)) if x is not None and x.requires_grad]
    chosen = [tensor for tensor in own if tensor.requires_grad]
    found = iter(torch.autograd.grad([x for x, _ in pairs], chosen, [g for _, g in pairs], allow_unused=True))
    return [next(found) if want else None for want in wanted]
