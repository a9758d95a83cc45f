"""The engine under grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from einsight.engines import triton as face
from einsight.engines.asks import Ask, Kind, result_for
from einsight.engines.derived import by_stream, of_all_heads, plain
from einsight.engines.join import asked_queries
from einsight.engines.products import all_finite
from einsight.engines.triton.backward import Upper, backward
from einsight.engines.triton.forward import Found, Wanted, forward
from einsight.engines.triton.launch import scene
from einsight.engines.triton.lowered import Lowered
from einsight.engines.triton.passes import Second
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Readout


def run(
    problem: Problem, operands: tuple[Tensor, Tensor, Tensor | None], lowered: Lowered
) -> tuple[Any, tuple[Any, ...]]:
    """The output and the results, with gradients to the operands, the sink and alibi's slopes."""
    biases = () if problem.bias is None else problem.bias.tensors
    output, lse, largest, entropy, *parts = _Attention.apply(problem, lowered, *operands, problem.sink, *biases)
    of_scores: dict[type[Readout], Any] = {LogSumExp: lse, MaxScore: largest, Entropy: entropy}
    left, results = iter(parts), []
    for readout, own in zip(problem.readouts, _asks(problem), strict=True):
        if own:
            results.append(result_for(readout, problem, tuple(next(left) for _ in own)))
        else:
            results.append(of_scores[type(readout)])
    return output, tuple(results)


def _asks(problem: Problem) -> list[tuple[Ask, ...]]:
    return [asks for asks in face.asked(problem) if not isinstance(asks, str)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, lowered: Lowered, *leaves: Any) -> tuple[Tensor | None, ...]:
        ctx.problem, ctx.lowered = problem, lowered
        query, key, value = leaves[:3]
        kinds = {type(readout) for readout in problem.readouts}
        wanted = Wanted(LogSumExp in kinds, MaxScore in kinds, Entropy in kinds, MaxScore in kinds, saved=True)
        found = forward(problem, query, key, value, lowered, wanted)
        saved: Any = found.saved
        second = Second(problem, scene(problem, query, key, lowered), saved, query)
        parts, counted = [], []
        for readout, own in zip(problem.readouts, _asks(problem), strict=True):
            for ask in own:
                parts += second.answer(ask, asked_queries(readout))
                if ask.kind is Kind.SEEN:
                    counted.append(parts[-1])
        ctx.save_for_backward(*leaves, found.output, found.entropy, found.argmax, saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*counted)
        return found.output, found.lse, found.largest, found.entropy, *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        problem, wanted = ctx.problem, ctx.needs_input_grad[2:]
        tensors = ctx.saved_tensors
        leaves, (output, entropy, argmax, saved) = tensors[: len(wanted)], tensors[len(wanted) :]
        query, key, value, sink, *biases = leaves
        again = problem, _asks(problem), leaves, wanted, grads[0], grads[1:4], grads[4:]
        if torch.is_grad_enabled():
            return None, None, *by_stream(*again)
        received, queries = _of_received(problem, grads[4:])
        of_output, of_lse, of_largest, of_entropy = map(plain, grads[:4])
        of_output = None if value is None else of_output
        upper = Upper(of_output, of_lse, of_largest, of_entropy, received, queries)
        found = Found(output, entropy=entropy, argmax=argmax, saved=saved)
        made = backward(problem, query, key, value, ctx.lowered, found, upper, (*wanted[:4], any(wanted[4:])))
        # A NaN or ∞ that a query doesn't see has met a weight of 0, or one that it sees is to spoil its own row only.
        if not all(all_finite(x) for x in made if x is not None):
            return None, None, *by_stream(*again)
        return (
            None,
            None,
            made.query,
            made.key,
            made.value,
            None if made.sink is None else of_all_heads(made.sink, problem.heads, sink),
            *(None if made.slopes is None else of_all_heads(made.slopes, problem.heads, bias) for bias in biases),
        )


def _of_received(problem: Problem, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Any]:
    """The gradient of what each key received, over all readouts of it; they are about the same queries."""
    left, total, queries = iter(grads), None, None
    for readout, own in zip(problem.readouts, _asks(problem), strict=True):
        for ask in own:
            grad = next(left)
            if ask.kind is Kind.RECEIVED and grad is not None:
                queries = asked_queries(readout)
                total = grad if total is None else total + grad
    return plain(total), queries
