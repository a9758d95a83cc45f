"""A whole call: the first pass, the second where it is asked for, and the results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from einsight.engines import triton as face
from einsight.engines.asks import Ask, Kind, result_for
from einsight.engines.join import asked_queries
from einsight.engines.triton import derivatives, trust
from einsight.engines.triton.forward import MOST_SHARES, Found, Wanted, forward, is_interval
from einsight.engines.triton.launch import LOG2E, scene
from einsight.engines.triton.lowered import Lowered, lowered
from einsight.engines.triton.passes import Second
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Readout, Scores


def run(problem: Problem) -> tuple[Tensor | None, tuple[Any, ...]]:
    trust.check(problem.device, compute)
    return compute(problem)


def compute(problem: Problem) -> tuple[Tensor | None, tuple[Any, ...]]:
    """The same on whatever device, trusted or not."""
    settings = lowered(problem)
    if isinstance(settings, str):
        raise ValueError(f"the triton engine can't compute this: {settings}")
    operands = resolved(problem)
    if problem.needs_grad:
        return derivatives.run(problem, operands, settings)
    wanted = wants(problem)
    found = forward(problem, *operands, settings, wanted)
    return found.output, answers(problem, found, wanted, settings, operands)


def resolved(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as memory holds them: not negated on the way."""
    value = problem.value
    return problem.query.resolve_neg(), problem.key.resolve_neg(), None if value is None else value.resolve_neg()


def wants(problem: Problem) -> Wanted:
    kinds = {type(readout) for readout in problem.readouts}
    shares = [ask for ask in asks(problem) if is_interval(ask)][:MOST_SHARES]
    second = any(ask.kind is not Kind.DISTANCE and not any(ask is s for s in shares) for ask in asks(problem))
    distance = any(ask.kind is Kind.DISTANCE for ask in asks(problem))
    return Wanted(LogSumExp in kinds, MaxScore in kinds, Entropy in kinds, False, second, distance, tuple(shares))


def from_lse(problem: Problem, lse: Tensor) -> tuple[Any, ...]:
    """The results, where the output and its lse have come from elsewhere."""
    settings: Any = lowered(problem)  # `refuses` saw to it
    trust.check(problem.device, compute)
    lse = lse.float().contiguous()
    seen = lse != -torch.inf
    saved = torch.stack([lse.where(seen, 0) * LOG2E, seen.float()])
    found = Found(lse=lse, saved=saved)
    return answers(problem, found, Wanted(lse=True, saved=True), settings, resolved(problem))


def asks(problem: Problem) -> list[Ask]:
    return [ask for own in face.asked(problem) if not isinstance(own, str) for ask in own]


def answers(
    problem: Problem,
    found: Found,
    wanted: Wanted,
    settings: Lowered,
    operands: tuple[Tensor, Tensor, Tensor | None],
) -> tuple[Any, ...]:
    """The result of each readout."""
    query, key, _ = operands
    of_scores: dict[type[Readout], Any] = {LogSumExp: found.lse, MaxScore: found.largest, Entropy: found.entropy}
    second = Second(problem, scene(problem, query, key, settings), found.saved, query)
    results = []
    for readout, own in zip(problem.readouts, face.asked(problem), strict=True):
        if type(readout) in of_scores:
            results.append(of_scores[type(readout)])
        elif type(readout) is Scores:
            results.append(second.rows(None, scores=True))
        else:
            parts: list[Tensor] = []
            for ask in own:
                parts += _answer(ask, readout, found, wanted, second)  # type: ignore[arg-type]
            results.append(result_for(readout, problem, tuple(parts)))
    return tuple(results)


def _answer(ask: Ask, readout: Readout, found: Found, wanted: Wanted, second: Second) -> tuple[Tensor, ...]:
    if ask.kind is Kind.DISTANCE and found.distance is not None:
        return (found.distance,)
    place = next((n for n, share in enumerate(wanted.shares) if share is ask), None)
    if place is not None and found.shares is not None:
        return (found.shares[place],)
    return second.answer(ask, asked_queries(readout))
