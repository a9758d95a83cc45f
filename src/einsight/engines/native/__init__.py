"""Our C++ kernel for CPUs: the output, every readout and their gradients.

`kernel/` is its source; docs/native.md says how it works. Without a compiler the package installs without it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.coordinates import pick
from einsight.engines.asks import Ask, Kind, asks_for, result_for
from einsight.engines.native import derivatives, operations
from einsight.engines.native.operations import Asked, Settings
from einsight.engines.rules import Rule, interval, lower, lower_bias
from einsight.problem import Problem
from einsight.readouts import Diagonal, Distance, Entropy, LogSumExp, MaxScore, Readout, Scores

_OF_SCORES = (LogSumExp, MaxScore, Entropy, Scores)  # what the running softmax leaves behind, or passes by


def refuses(problem: Problem) -> str | None:
    if operations.kernel is None:
        return (
            "it is not compiled: install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install), "
            "then pip install --force-reinstall --no-deps --no-binary einsight einsight"
        )
    if problem.is_transformed:  # asked first: what torch.vmap stacks has no bounds
        return "torch.func can't look into it"
    if problem.device.type != "cpu":
        return f"it runs on CPUs, and the tensors are on {problem.device}; write query.cpu()"
    if 0 in problem.sizes[:5]:
        return "there are no items, heads, queries or keys"
    if problem.score_mod is not None:
        return "it can't call score_mod"
    if problem.dropout:
        return "it has no dropout"
    if problem.needs_grad and (refusal := derivatives.refuses(problem)):
        return refusal
    lowered = (_rule(problem), _bias(problem), *_asked(problem))
    return next((refusal for refusal in lowered if isinstance(refusal, str)), None)


def _rule(problem: Problem) -> Rule | str:
    if "native rule" not in problem.memory:
        problem.memory["native rule"] = _lowered(problem)
    return problem.memory["native rule"]


def _lowered(problem: Problem) -> Rule | str:
    mask = problem.mask
    if mask is None:
        return Rule()
    first, ahead = problem.first, mask.ahead()
    if first is not None and ahead is not None:  # no tensors, which take longer than a small problem
        lo, hi = ahead
        return Rule(None if lo is None else first + lo, None if hi is None else first + hi)
    at = problem.whole
    if any(factor.given(at) is not None for factor in mask.factors()):
        return lower(mask, at)  # the kernel finds the ends of a tensor's rows faster than `bounds`
    lo, hi, exact = mask.bounds(at)
    return Rule(*interval(lo, hi, at.sizes.j)) if exact else lower(mask, at, (lo, hi))


def _bias(problem: Problem) -> tuple[Tensor | None, Tensor | None] | str:
    """Alibi's slopes, and what else is added to the scores."""
    if "native bias" not in problem.memory:
        none = None, None
        lowered = none if problem.bias is None else lower_bias(problem.bias, problem.whole, problem.dtype)
        learns = problem.bias is not None and problem.needs_grad
        problem.memory["native bias"] = derivatives.learned(problem, lowered) if learns else lowered
    return problem.memory["native bias"]


def _asked(problem: Problem) -> list[tuple[Ask, ...] | str]:
    """What each readout asks of the kernel beside the results of scores, or why it can't."""
    if "native asks" not in problem.memory:
        problem.memory["native asks"] = [
            () if type(readout) in _OF_SCORES else asks_for(readout, problem) for readout in problem.readouts
        ]
    return problem.memory["native asks"]


def _asks(problem: Problem) -> list[tuple[Ask, ...]]:
    return [asks for asks in _asked(problem) if not isinstance(asks, str)]


def makes(problem: Problem) -> str:
    return "the output and every readout in one pass over the keys, and their gradients"


def visits(problem: Problem) -> int:
    lo, hi, _ = problem.bounds
    return int((hi - lo).sum(-1).expand(problem.sizes.b, problem.sizes.h).sum())


def holds(problem: Problem) -> int:
    """Bytes: packed keys and values, and for each thread a block of 96 rows, with sums over queries."""
    b, h, g, i, j, d, e = problem.sizes
    asks = [ask for asks in _asks(problem) for ask in asks]
    threads, shared = torch.get_num_threads(), h // max(g, 1)
    rows, chunks = shared * i, -(-j // 1024)
    row, size = d + e + 80 + (j if asks else 256), problem.dtype.itemsize
    lines = sum(min(rows, 96) // shared // ask.number + 2 if ask.kind is Kind.POOL else 1 for ask in asks if ask.adds)
    sums = threads * shared * lines * j
    if rows > 96:
        packed = j * (d + e) * max(1, min(threads + 1, b * g, (48 << 20) // max(size * j * (d + e), 1)))
        return size * (packed + threads * 96 * row + sums)
    return size * (threads * 256 * (d + e) + min(b * g, threads) * rows * chunks * row + sums)


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    kinds = {type(readout) for readout in problem.readouts}
    asked = Asked(LogSumExp in kinds, MaxScore in kinds, Entropy in kinds, Scores in kinds)
    settings = _settings(problem)
    value = None if problem.value is None else problem.value.resolve_neg()  # memory holds it with the other sign
    operands = problem.query.resolve_neg(), problem.key.resolve_neg(), value
    if problem.needs_grad:
        found = derivatives.forward(problem, operands, settings, asked, _asks(problem))
    else:
        found = operations.forward(*operands, settings, asked)
    of_scores: dict[type[Readout], Any] = dict(zip(_OF_SCORES, found[1:5], strict=True))
    parts: Any = iter(found.parts)
    results = []
    for readout, own in zip(problem.readouts, _asks(problem), strict=True):
        if type(readout) in _OF_SCORES:
            results.append(of_scores[type(readout)])
        else:
            mine = tuple(next(parts) for ask in own for _ in ask.shapes(problem.sizes))
            results.append(result_for(readout, problem, mine))
    return (None if problem.value is None else found.output), tuple(results)


def _settings(problem: Problem) -> Settings:
    rule, biases = _rule(problem), _bias(problem)
    if isinstance(rule, str) or isinstance(biases, str):
        raise ValueError(f"the native engine can't compute this: {refuses(problem)}")
    slopes, bias = biases
    places = slopes is not None or any(isinstance(readout, Diagonal | Distance) for readout in problem.readouts)
    sink = None if problem.sink is None else pick(problem.sink.detach(), 0, problem.heads)
    return Settings(
        problem.scale,
        problem.softcap or 0.0,
        None if sink is None else sink.to(problem.dtype).resolve_neg().contiguous(),
        slopes,
        bias,
        problem.positions if places else None,
        rule,
        [ask for asks in _asks(problem) for ask in asks],
    )
