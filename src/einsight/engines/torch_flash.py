"""The output and its lse by PyTorch's flash kernel, and readouts of the weights by our second pass from these: where
nothing is asked that only our own first pass can tell."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.coordinates import numbers
from einsight.engines import torch_sdpa, triton
from einsight.engines.asks import Kind
from einsight.engines.products import all_finite
from einsight.problem import Problem
from einsight.readouts import Entropy, MaxScore


def refuses(problem: Problem) -> str | None:
    if not triton.runs_on(problem.device):
        return f"it runs on GPUs, and the tensors are on {problem.device}; write query.cuda()"
    if problem.value is None or not problem.readouts:
        return "it gives the output together with readouts"
    alone = torch_sdpa.refuses_settings(problem)
    if alone is not None:
        return alone
    if problem.query.dtype not in (torch.float16, torch.bfloat16) or not torch.backends.cuda.flash_sdp_enabled():
        return "PyTorch's flash kernel is for half precision, where it is not switched off"
    _, h, g, i, j, d, e = problem.sizes
    if h != g or d != e or d % 8 or d > 256 or (i != j and torch_sdpa.is_causal(problem)):
        return "PyTorch's flash kernel is for heads of their own, d = e, a multiple of 8 up to 256, causal where i = j"
    if problem.needs_grad:
        return "the gradients of its readouts are not those of its output's kernel"
    refusal = triton.refuses(problem)
    if refusal is not None:
        return refusal
    asks = [ask for own in triton.asked(problem) if not isinstance(own, str) for ask in own]
    first = any(type(readout) in (MaxScore, Entropy) for readout in problem.readouts)
    if first or any(ask.kind in (Kind.SHARE, Kind.DIAGONAL, Kind.DISTANCE) for ask in asks):
        return "the readouts come from our own first pass, which gives the output as well"
    return None


def makes(problem: Problem) -> str:
    """What a call is made of."""
    some = [readout.queries for readout in problem.readouts]
    i = problem.sizes.i
    rows = torch.cat([numbers(q) for q in some if q is not None]).unique().numel() if None not in some else i
    return f"output: torch flash; readouts: triton, {rows} of {i} rows"


visits = triton.visits
holds = triton.holds


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    running = import_module("einsight.engines.triton.running")
    query, key, value = running.resolved(problem)
    output, lse = _flash(problem, query, key, value)
    if not all_finite(output):
        return triton.run(problem)  # it multiplies what is hidden by a weight of 0, so that a NaN there spreads
    return output, running.from_lse(problem, lse)


def _flash(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    causal = bool(torch_sdpa.is_causal(problem))
    if query.device.type == "cpu":  # under Triton's interpreter
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, causal, scale=problem.scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output, lse, *_ = kernel(query, key, value, 0.0, causal, False, scale=problem.scale)
    return output, lse[..., : query.shape[2]]
