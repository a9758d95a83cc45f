"""Kernels in Triton, for GPUs: the output and every readout. docs/gpu.md says how they work and what bounds them.

One pass over the keys makes the output and what the running softmax leaves behind; a second one makes the weights of
the queries that a readout is about again, and reads them.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.engines.asks import Ask, asks_for
from einsight.engines.join import asked_queries
from einsight.engines.triton.lowered import learns_more_than_slopes, lowered
from einsight.problem import Problem
from einsight.readouts import Entropy, LogSumExp, MaxScore, Received, Scores

OF_SCORES = (LogSumExp, MaxScore, Entropy, Scores)
_DERIVED = (LogSumExp, MaxScore, Entropy, Received)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEEPEST = 256


def refuses(problem: Problem) -> str | None:
    if problem.is_transformed:  # asked first: what torch.vmap stacks has no bounds
        return "torch.func can't look into it"
    if not runs_on(problem.device):
        return f"it runs on GPUs, and the tensors are on {problem.device}; write query.cuda()"
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if torch.compiler.is_compiling():
        return "torch.compile can't look into its launches"
    if problem.query.dtype not in _DTYPES:
        return f"it computes in float32 at most, and query is {problem.query.dtype}"
    if 0 in problem.sizes[:5]:
        return "there are no items, heads, queries or keys"
    if max(problem.sizes.d, problem.sizes.e) > _DEEPEST:
        return f"its heads have at most {_DEEPEST} dimensions"
    if problem.score_mod is not None:
        return "it can't call score_mod"
    if problem.dropout:
        return "it has no dropout"
    if problem.needs_grad and (refusal := _refuses_derivative(problem)):
        return refusal
    settings = lowered(problem)
    if isinstance(settings, str):
        return settings
    return next((refusal for refusal in asked(problem) if isinstance(refusal, str)), None)


def runs_on(device: torch.device) -> bool:
    """Whether it is a GPU, or Triton's interpreter stands for one."""
    return device.type == ("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def _refuses_derivative(problem: Problem) -> str | None:
    other = next((readout for readout in problem.readouts if type(readout) not in _DERIVED), None)
    if other is not None:
        return f"it has no derivative of {type(other).__name__}; under torch.no_grad() it runs"
    about = [asked_queries(readout) for readout in problem.readouts if type(readout) is Received]
    if any(not _alike(queries, about[0]) for queries in about[1:]):
        return "it has the derivative of Received for one choice of queries in a call"
    if learns_more_than_slopes(problem):
        return "of biases it has the derivative of alibi alone"
    return None


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def asked(problem: Problem) -> list[tuple[Ask, ...] | str]:
    """What each readout asks of finished weights, or why it can't."""
    if "triton asks" not in problem.memory:
        problem.memory["triton asks"] = [
            () if type(readout) in OF_SCORES else asks_for(readout, problem) for readout in problem.readouts
        ]
    return problem.memory["triton asks"]


def makes(problem: Problem) -> str:
    return "the output and every readout; memory linear in the sequence"


def visits(problem: Problem) -> int:
    lo, hi, _ = problem.bounds
    return int((hi - lo).sum(-1).expand(problem.sizes.b, problem.sizes.h).sum())


def holds(problem: Problem) -> int:
    """Bytes: two numbers for each row, intervals, and rows of weights while the strongest are looked for."""
    b, h, _, i, j, _, _ = problem.sizes
    asks = [ask for own in asked(problem) if not isinstance(own, str) for ask in own]
    second = problem.needs_grad or any(ask.kind.name not in ("DIAGONAL", "DISTANCE") for ask in asks)
    top = any(ask.kind.name == "TOP" for ask in asks)
    return 8 * i + 8 * b * h * i * second + 8 * min(b * h * i * j, max(1 << 26, b * h * j)) * top


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    return import_module("einsight.engines.triton.running").run(problem)
