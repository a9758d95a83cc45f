"""Our C++ kernel for CPUs: the output and the main readouts in one pass over the keys.

`kernel/` is its source; docs/native.md says how it works. Without a compiler the package installs without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from einsight.biases import Alibi
from einsight.coordinates import along, numbers
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Readout, Received, Scores, Weights

try:
    kernel: Any = import_module("einsight.engines.native._native")
except ImportError:
    kernel = None

MAKES = "output, lse, max score, entropy, received, dense weights and scores in one pass, without derivatives"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_READOUTS = (LogSumExp, MaxScore, Entropy, Received, Weights, Scores)


class Asked(NamedTuple):
    """Which results the kernel is to write."""

    lse: bool = False
    max_score: bool = False
    entropy: bool = False
    received: bool = False
    weights: bool = False
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
    if problem.bias is not None and type(problem.bias) is not Alibi:
        return "of biases it has only alibi"
    for readout in problem.readouts:
        if type(readout) not in _READOUTS:
            return f"it does not have the readout {readout!r}"
    if len([None for r in problem.readouts if type(r) is Received]) > 1 and _several_choices(problem.readouts):
        return "it sums up one choice of queries for Received in a call"
    if not problem.bounds.exact:
        return "the mask is not one interval of keys for each query"
    return None


def visits(problem: Problem) -> int:
    lo, hi, _ = problem.bounds
    return int((hi - lo).sum(-1).expand(problem.sizes.b, problem.sizes.h).sum())


def holds(problem: Problem) -> int:
    """Bytes: packed keys and values, and for each thread a block of 96 rows."""
    b, h, g, i, j, d, e = problem.sizes
    threads, keep = torch.get_num_threads(), any(type(r) in (Received, Weights) for r in problem.readouts)
    rows, chunks = h // max(g, 1) * i, -(-j // 1024)
    row = d + e + 80 + (j if keep else 256)
    if rows > 96:
        packed = j * (d + e) * max(1, min(threads + 1, b * g, (48 << 20) // max(4 * j * (d + e), 1)))
        return 4 * (packed + threads * 96 * row)
    return 4 * (threads * 256 * (d + e) + min(b * g, threads) * rows * chunks * row)


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    kinds = [type(readout) for readout in problem.readouts]
    asked = Asked(*(kind in kinds for kind in _READOUTS))
    sink, slopes = problem.sink, problem.bias.slopes if isinstance(problem.bias, Alibi) else None
    forward = torch.ops.einsight.native_forward if torch.compiler.is_compiling() else compute
    output, *found = forward(
        problem.query.resolve_neg(),
        problem.key.resolve_neg(),
        None if problem.value is None else problem.value.resolve_neg(),
        problem.scale,
        problem.softcap or 0.0,
        None if sink is None else along(sink, 0, problem.heads).float().resolve_neg().contiguous(),
        None if slopes is None else along(slopes, 0, problem.heads).float().resolve_neg().contiguous(),
        None if slopes is None else problem.positions,
        problem.bounds.lo,
        problem.bounds.hi,
        _received_from(problem) if asked.received else None,
        *asked,
    )
    if not kinds:
        return (None if problem.value is None else output), ()
    of_kind: dict[type[Readout], Tensor] = dict(
        zip((LogSumExp, MaxScore, Entropy, Received, Weights, Scores), found, strict=True)
    )
    results = tuple(
        _received(problem, readout, of_kind[Received]) if type(readout) is Received else of_kind[type(readout)]
        for readout in problem.readouts
    )
    return (None if problem.value is None else output), results


def compute(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    scale: float,
    softcap: float,
    sink: Float[Tensor, " h"] | None,
    slopes: Float[Tensor, " h"] | None,
    positions: Int[Tensor, "#b i"] | None,
    lo: Int[Tensor, "#b #h i"],
    hi: Int[Tensor, "#b #h i"],
    received_from: Shaped[Tensor, " i"] | None,
    lse: bool,
    max_score: bool,
    entropy: bool,
    received: bool,
    weights: bool,
    scores: bool,
    *,
    level: int = 0,
) -> list[Tensor]:
    """The output and the results asked for; empty tensors in the place of the others.

    `softcap` 0 is none; `received_from` is 1 for the queries that count; `level` chooses among
    `kernel.levels`, the instruction sets of this processor, best first.
    """
    flags = Asked(lse, max_score, entropy, received, weights, scores)
    results = _blank(query, key, value, flags)
    kernel.forward(
        query,
        key,
        value,
        scale,
        softcap,
        sink,
        slopes,
        positions,
        lo,
        hi,
        received_from,
        None if value is None else results[0],
        *(result if flag else None for result, flag in zip(results[1:], flags, strict=True)),
        torch.get_num_threads(),
        level,
    )
    return results


def _blank(query: Tensor, key: Tensor, value: Tensor | None, asked: Asked) -> list[Tensor]:
    b, h, i, j = *query.shape[:3], key.shape[2]
    none = query.new_empty(0)
    row, matrix = (b, h, i), (b, h, i, j)
    made = [none if value is None else query.new_empty(b, h, i, value.shape[3])]
    for shape, flag in zip((row, row, row, (b, h, j), matrix, matrix), asked, strict=True):
        make = torch.zeros if len(shape) == 3 and shape is not row else torch.empty
        made.append(make(shape, dtype=torch.float32, device=query.device) if flag else none)
    return made


def _fake(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    made = _blank(query, key, value, Asked(*rest[-6:]))
    return [made[0], *(torch.empty_like(t, dtype=torch.float32) for t in made[1:])]


# torch.compile sees one opaque operation.
_library = torch.library.Library("einsight", "FRAGMENT")
_library.define(
    "native_forward(Tensor query, Tensor key, Tensor? value, float scale, float softcap, Tensor? sink, "
    "Tensor? slopes, Tensor? positions, Tensor lo, Tensor hi, Tensor? received_from, bool lse, bool max_score, "
    "bool entropy, bool received, bool weights, bool scores) -> Tensor[]"
)
_library.impl("native_forward", lambda *args: _distinct(compute(*args)), "CPU")
torch.library.register_fake("einsight::native_forward", lambda *args: _distinct(_fake(*args)), lib=_library)


def _distinct(results: list[Tensor]) -> list[Tensor]:
    """An operation may not return one tensor twice, so each absent result is an empty one of its own."""
    return [r if r.numel() else torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in results]


def _several_choices(readouts: tuple[Readout, ...]) -> bool:
    chosen = [r.queries for r in readouts if type(r) is Received]
    first = chosen[0]
    return any(
        (queries is None) != (first is None)
        or (queries is not None and first is not None and not torch.equal(numbers(queries), numbers(first)))
        for queries in chosen
    )


def _received_from(problem: Problem) -> Shaped[Tensor, " i"] | None:
    queries = next(r.queries for r in problem.readouts if type(r) is Received)
    if queries is None:
        return None
    counted = torch.zeros(problem.sizes.i, dtype=torch.uint8)
    counted[numbers(queries)] = 1
    return counted


def _received(problem: Problem, readout: Received, sums: Float[Tensor, "b h j"]) -> Float[Tensor, "b n j"]:
    b, h, g, _, j = problem.sizes[:5]
    if readout.per_group:
        sums = sums.view(b, g, h // max(g, 1), j).sum(2)
    if not readout.mean:
        return sums
    lo, hi, _ = problem.bounds
    if readout.queries is not None:
        lo, hi = lo[..., numbers(readout.queries)], hi[..., numbers(readout.queries)]
    # A query counts from its first key on, and no more from its last on.
    steps = torch.zeros(*lo.shape[:2], j + 1)
    steps.scatter_add_(2, lo, torch.ones(lo.shape)).scatter_add_(2, hi, -torch.ones(hi.shape))
    count = steps.cumsum(2)[..., :j].clamp(min=1) if not readout.per_group else steps.cumsum(2)[..., :j]
    if readout.per_group:
        count = count.expand(-1, h, -1).reshape(len(count), g, h // max(g, 1), j).sum(2).clamp(min=1)
    return sums / count
