"""Our C++ kernel for CPUs: the output and the main readouts in one pass over the keys.

`kernel/` is its source; docs/native.md says how it works. Without a compiler the package installs without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from einsight.coordinates import Sizes, along
from einsight.engines.native.asks import Ask, Kind, asks_for, blank, result_for
from einsight.engines.native.rules import Rule, lower, lower_bias
from einsight.problem import Problem
from einsight.readouts import Diagonal, Distance, Entropy, LogSumExp, MaxScore, Readout, Scores

try:
    kernel: Any = import_module("einsight.engines.native._native")
except ImportError:
    kernel = None

MAKES = "the output and every readout in one pass over the keys, without derivatives"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_SCORES = (LogSumExp, MaxScore, Entropy, Scores)  # what the running softmax leaves behind, or passes by


class Asked(NamedTuple):
    """Which results beside the readouts of finished weights the kernel is to write."""

    lse: bool = False
    max_score: bool = False
    entropy: bool = False
    scores: bool = False


def refuses(problem: Problem) -> str | None:
    if kernel is None:
        return (
            "it is not compiled: install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install), "
            "then pip install --force-reinstall --no-deps --no-binary einsight einsight"
        )
    if problem.is_transformed:  # asked first: what torch.vmap stacks has no bounds
        return "torch.func can't look into it"
    if problem.device.type != "cpu":
        return f"it runs on CPUs, and the tensors are on {problem.device}; write query.cpu()"
    if problem.query.dtype not in _DTYPES:
        return f"it computes in float32, and query is {problem.query.dtype}; write query.float()"
    if 0 in problem.sizes[:5]:
        return "there are no items, heads, queries or keys"
    if problem.score_mod is not None:
        return "it can't call score_mod"
    if problem.needs_grad:
        return "it has no derivatives yet; under torch.no_grad() it runs"
    if problem.dropout:
        return "it has no dropout"
    lowered = (_rule(problem), _bias(problem), *_asked(problem))
    return next((refusal for refusal in lowered if isinstance(refusal, str)), None)


def _rule(problem: Problem) -> Rule | str:
    if "native rule" not in problem.memory:
        problem.memory["native rule"] = _lowered(problem)
    return problem.memory["native rule"]


def _lowered(problem: Problem) -> Rule | str:
    mask, at = problem.mask, problem.whole
    if mask is not None and any(factor.given(at) is not None for factor in mask.factors()):
        return lower(mask, at)  # the kernel finds the ends of a tensor's rows faster than `bounds`
    lo, hi, exact = problem.bounds
    if exact or mask is None:
        return Rule(lo, hi)
    return lower(mask, at, (lo[..., None], hi[..., None]))


def _bias(problem: Problem) -> tuple[Tensor | None, Tensor | None] | str:
    """Alibi's slopes, and what else is added to the scores."""
    if "native bias" not in problem.memory:
        none = None, None
        problem.memory["native bias"] = none if problem.bias is None else lower_bias(problem.bias, problem.whole)
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


def visits(problem: Problem) -> int:
    lo, hi, _ = problem.bounds
    return int((hi - lo).sum(-1).expand(problem.sizes.b, problem.sizes.h).sum())


def holds(problem: Problem) -> int:
    """Bytes: packed keys and values, and for each thread a block of 96 rows, with sums over queries."""
    b, h, g, i, j, d, e = problem.sizes
    asks = [ask for asks in _asks(problem) for ask in asks]
    threads, shared = torch.get_num_threads(), h // max(g, 1)
    rows, chunks = shared * i, -(-j // 1024)
    row = d + e + 80 + (j if asks else 256)
    lines = sum(min(rows, 96) // shared // ask.number + 2 if ask.kind is Kind.POOL else 1 for ask in asks if ask.adds)
    sums = threads * shared * lines * j
    if rows > 96:
        packed = j * (d + e) * max(1, min(threads + 1, b * g, (48 << 20) // max(4 * j * (d + e), 1)))
        return 4 * (packed + threads * 96 * row + sums)
    return 4 * (threads * 256 * (d + e) + min(b * g, threads) * rows * chunks * row + sums)


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    kinds = [type(readout) for readout in problem.readouts]
    asked = Asked(*(kind in kinds for kind in _OF_SCORES))
    each = _asks(problem)
    asks = [ask for asks in each for ask in asks]
    rule, biases = _rule(problem), _bias(problem)
    if isinstance(rule, str) or isinstance(biases, str):
        raise ValueError(f"the native engine can't compute this: {refuses(problem)}")
    slopes, bias = biases
    places = slopes is not None or Diagonal in kinds or Distance in kinds
    forward = torch.ops.einsight.native_forward if torch.compiler.is_compiling() else compute
    output, *found = forward(
        problem.query.resolve_neg(),
        problem.key.resolve_neg(),
        None if problem.value is None else problem.value.resolve_neg(),
        problem.scale,
        problem.softcap or 0.0,
        None if problem.sink is None else along(problem.sink, 0, problem.heads).float().resolve_neg().contiguous(),
        slopes,
        bias,
        problem.positions if places else None,
        *asked,
        *_flat(rule, asks),
    )
    of_scores: dict[type[Readout], Tensor] = dict(zip(_OF_SCORES, found, strict=False))
    parts = iter(found[len(asked) :])
    results = []
    for readout, own in zip(problem.readouts, each, strict=True):
        if type(readout) in _OF_SCORES:
            results.append(of_scores[type(readout)])
        else:
            mine = tuple(next(parts) for ask in own for _ in ask.shapes(problem.sizes))
            results.append(result_for(readout, problem, mine))
    return (None if problem.value is None else output), tuple(results)


def _flat(rule: Rule, asks: list[Ask]) -> tuple[list[int], list[Tensor | None]]:
    """The mask and what is asked as an operation takes them: numbers, and tensors that may be absent."""
    whole = [rule, *(ask.rule for ask in asks)]
    numbers = [int(rule is not None and rule.shows) for rule in whole]
    tensors: list[Tensor | None] = []
    for rule_of in whole:
        lo, hi, seen, _, query_ids, key_ids = rule_of or (None,) * 6
        tensors += [lo, hi, seen, query_ids, key_ids]  # type: ignore[list-item]
    for ask in asks:
        numbers += [int(ask.kind), ask.rows, ask.number]
        tensors += [ask.slot, ask.member]
    return numbers, tensors


def _unflat(numbers: list[int], tensors: list[Tensor | None]) -> tuple[tuple[Any, ...], list[Ask]]:
    n = (len(numbers) - 1) // 4  # a number for each rule, the mask's first, and three for each readout
    parts = [tensors[5 * k : 5 * k + 5] for k in range(n + 1)]
    rules = [(*part[:3], bool(shows), *part[3:]) for part, shows in zip(parts, numbers, strict=False)]
    numbers, tensors = numbers[n + 1 :], tensors[5 * (n + 1) :]
    asks = []
    for k in range(n):
        kind, rows, number = numbers[3 * k : 3 * k + 3]
        rule = None if rules[k + 1][0] is None else rules[k + 1]
        asks.append(Ask(Kind(kind), rows, number, tensors[2 * k], rule, tensors[2 * k + 1]))  # type: ignore[arg-type]
    return rules[0], asks


def compute(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    scale: float,
    softcap: float,
    sink: Float[Tensor, " h"] | None,
    slopes: Float[Tensor, " h"] | None,
    bias: Float[Tensor, "#b #h #i #j"] | None,
    positions: Int[Tensor, "#b i"] | None,
    lse: bool,
    max_score: bool,
    entropy: bool,
    scores: bool,
    numbers: list[int],
    tensors: list[Tensor | None],
    *,
    level: int = 0,
) -> list[Tensor]:
    """The output and the results asked for, the parts of each in turn; empty tensors in the place of the output, lse,
    max score, entropy and scores where they are not.

    `softcap` 0 is none; `numbers` and `tensors` hold the mask and what is asked (`_flat`); `level` chooses among
    `kernel.levels`, the instruction sets of this processor, best first.
    """
    flags = Asked(lse, max_score, entropy, scores)
    rule, asks = _unflat(numbers, tensors)
    own, parts = _blank(query, key, value, flags, asks)
    given = [
        (int(ask.kind), ask.number, ask.rows, ask.slot, ask.rule, ask.member, part[0], part[1] if part[1:] else None)
        for ask, part in zip(asks, parts, strict=True)
    ]
    kernel.forward(
        query,
        key,
        value,
        scale,
        softcap,
        sink,
        slopes,
        bias,
        positions,
        rule,
        None if value is None else own[0],
        *(result if flag else None for result, flag in zip(own[1:], flags, strict=True)),
        given,
        torch.get_num_threads(),
        level,
    )
    return [*own, *(tensor for part in parts for tensor in part)]


def _blank(
    query: Tensor, key: Tensor, value: Tensor | None, asked: Asked, asks: list[Ask]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    b, h, i, d = query.shape
    g, j = key.shape[1:3]
    none = query.new_empty(0)
    row = (b, h, i)
    own = [none if value is None else query.new_empty(b, h, i, value.shape[3])]
    for shape, flag in zip((row, row, row, (*row, j)), asked, strict=True):
        own.append(query.new_empty(shape, dtype=torch.float32) if flag else none)
    return own, [blank(ask, Sizes(b, h, g, i, j, d, 0)) for ask in asks]


def _fake(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    *_, lse, max_score, entropy, scores, numbers, tensors = rest
    _, asks = _unflat(numbers, tensors)
    own, parts = _blank(query, key, value, Asked(lse, max_score, entropy, scores), asks)
    return [*own, *(tensor for part in parts for tensor in part)]


# torch.compile sees one opaque operation.
_library = torch.library.Library("einsight", "FRAGMENT")
_library.define(
    "native_forward(Tensor query, Tensor key, Tensor? value, float scale, float softcap, Tensor? sink, "
    "Tensor? slopes, Tensor? bias, Tensor? positions, bool lse, bool max_score, bool entropy, bool scores, "
    "int[] numbers, Tensor?[] tensors) -> Tensor[]"
)
_library.impl("native_forward", lambda *args: _distinct(compute(*args)), "CPU")
torch.library.register_fake("einsight::native_forward", lambda *args: _distinct(_fake(*args)), lib=_library)


def _distinct(results: list[Tensor]) -> list[Tensor]:
    """An operation may not return one tensor twice, so each absent result is an empty one of its own."""
    return [r if r.numel() else torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in results]
