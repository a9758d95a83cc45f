"""Our C++ kernel for CPUs: the output and the main readouts in one pass over the keys.

`kernel/` is its source; docs/native.md says how it works. Without a compiler the package installs without it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from einsight.biases import Alibi
from einsight.coordinates import along, numbers
from einsight.engines.native import derivatives, operations
from einsight.engines.native.operations import Asked, Settings
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Readout, Received, Scores, Weights

MAKES = "output, lse, max score, entropy, received, dense weights and scores in one pass, and their gradients"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_READOUTS = (LogSumExp, MaxScore, Entropy, Received, Weights, Scores)


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
    if problem.query.dtype not in _DTYPES:
        return f"it computes in float32, and query is {problem.query.dtype}; write query.float()"
    if 0 in problem.sizes[:5]:
        return "there are no items, heads, queries or keys"
    if problem.score_mod is not None:
        return "it can't call score_mod"
    if problem.dropout:
        return "it has no dropout"
    if problem.bias is not None and type(problem.bias) is not Alibi:
        return "of biases it has only alibi"
    for readout in problem.readouts:
        if type(readout) not in _READOUTS:
            return f"it does not have the readout {readout!r}"
        if type(readout) is Scores and problem.needs_grad:
            return "it has no derivative of dense scores; under torch.no_grad() it runs"
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
    settings = _settings(problem, asked)
    if problem.needs_grad:
        found = derivatives.forward(problem, settings, asked)
    else:
        value = None if problem.value is None else problem.value.resolve_neg()
        found = operations.forward(problem.query.resolve_neg(), problem.key.resolve_neg(), value, settings, asked)
    output = None if problem.value is None else found.output
    of_kind: dict[type[Readout], Any] = dict(zip(_READOUTS, found[1:], strict=False))
    return output, tuple(
        _received(problem, readout, of_kind[Received]) if type(readout) is Received else of_kind[type(readout)]
        for readout in problem.readouts
    )


def _settings(problem: Problem, asked: Asked) -> Settings:
    def of_heads(tensor: Float[Tensor, " all_h"] | None) -> Float[Tensor, " h"] | None:
        return None if tensor is None else along(tensor.detach(), 0, problem.heads).float().resolve_neg().contiguous()

    slopes = problem.bias.slopes if isinstance(problem.bias, Alibi) else None
    return Settings(
        problem.scale,
        problem.softcap or 0.0,
        of_heads(problem.sink),
        of_heads(slopes),
        None if slopes is None else problem.positions,
        problem.bounds.lo,
        problem.bounds.hi,
        _received_from(problem) if asked.received else None,
    )


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
