"""The backward on tensors: the launches of its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from einsight.coordinates import pick
from einsight.engines.triton.forward import Found
from einsight.engines.triton.kernels import backward as kernels
from einsight.engines.triton.kernels.scene import View
from einsight.engines.triton.launch import LOG2E, launch, padded, precision, scene, step, tile, view
from einsight.engines.triton.lowered import Lowered
from einsight.engines.triton.passes import Queries, reaching
from einsight.problem import Problem


class Upper(NamedTuple):
    """Gradients of the results; None where there is none."""

    output: Tensor | None
    lse: Tensor | None
    largest: Tensor | None
    entropy: Tensor | None
    received: Tensor | None  # [b, h, j]
    queries: Queries  # that `received` is about


class Made(NamedTuple):
    """Gradients of the operands, and each row's part of those of sink and slope."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    sink: Tensor | None
    slopes: Tensor | None


def backward(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    lowered: Lowered,
    found: Found,
    upper: Upper,
    wanted: tuple[bool, bool, bool, bool, bool],
) -> Made:
    """The gradients `wanted`: of query, key, value, sink, slopes."""
    b, h, g, i, j, d, e = problem.sizes
    saved: Any = found.saved
    sink = None if problem.sink is None else pick(problem.sink.detach(), 0, problem.heads).float().view(1, -1, 1)
    of_sink = None if sink is None else torch.exp2(sink * LOG2E - saved[0]) * saved[1]  # its own weight
    # Σ w g = output · doutput, and for the entropy in closed form. In float32 this cancels too badly, and what the keys
    # received has no such form: then the kernel takes one more look at the keys.
    again = query.dtype == torch.float32 or upper.received is not None
    mean = torch.zeros(b, h, i, device=query.device)
    if not again and upper.output is not None and found.output is not None:
        mean = (upper.output.float() * found.output.float()).sum(-1)
    if not again and upper.entropy is not None:
        whole = (saved[1] > 0).float() if of_sink is None else (1 - of_sink) * (saved[1] > 0)
        mean = mean - upper.entropy * (whole - found.entropy)
    value = None if upper.output is None else value
    kernel_upper = kernels.Upper(
        saved,
        b * h * i,
        None if upper.output is None else view(upper.output),
        upper.lse,
        upper.largest,
        None if upper.largest is None else found.argmax,
        upper.entropy,
        None if upper.received is None else View(upper.received, h * j, j, 0, 1),
        _flags(upper.queries, i, query.device),
        mean,
    )
    arguments = scene(problem, query, key, lowered), None if value is None else view(value), e, kernel_upper
    constants: dict[str, Any] = {"D": padded(d), "E": padded(max(e, 1)), "PRECISION": precision(query.dtype)}
    made = Made(
        torch.empty(b, h, i, d, dtype=query.dtype, device=query.device) if wanted[0] else None,
        torch.empty(b, g, j, d, dtype=query.dtype, device=query.device) if wanted[1] else None,
        torch.empty(b, g, j, e, dtype=query.dtype, device=query.device) if wanted[2] and value is not None else None,
        None,
        torch.empty(b, h, i, device=query.device) if wanted[4] else None,
    )
    size = tile("of queries", query.device, query.dtype, padded(d), padded(max(e, 1)))
    blocks, sizes = -(-i * (h // g) // size.rows), {"M": size.rows, "N": size.keys}
    if again:
        rest = *arguments, blocks, g
        launch(kernels.means_of_rows, blocks * b * g, query.device, size, *rest, **sizes, **constants)
    if made.query is not None or made.slopes is not None:
        rest = *arguments, made.query, made.slopes, blocks, g
        launch(kernels.gradients_of_queries, blocks * b * g, query.device, size, *rest, **sizes, **constants)
    size = tile("of keys", query.device, query.dtype, padded(d), padded(max(e, 1)))
    if made.key is not None or made.value is not None:
        first, last = (t.to(torch.int32).to(query.device) for t in reaching(problem, None, size.keys))
        blocks = -(-j // size.keys)
        rest = *arguments, made.key, made.value, first, last, step(first, 0), blocks, g
        sizes = {"M": size.rows, "N": size.keys}
        launch(kernels.gradients_of_keys, blocks * b * g, query.device, size, *rest, **sizes, **constants)
    if wanted[3] and of_sink is not None:
        of_lse = 0.0 if upper.lse is None else upper.lse
        made = made._replace(sink=torch.where(of_sink > 0, of_sink * (of_lse - mean), 0))
    return made


def _flags(queries: Queries, i: int, device: torch.device) -> Tensor | None:
    if queries is None:
        return None
    flags = torch.zeros(i, dtype=torch.uint8)
    flags[queries] = 1
    return flags.to(device)
