"""Which engine computes a problem, and why: the one place that knows about speed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from einsight.engines import native, reference, stream, torch_flash, torch_sdpa, triton
from einsight.problem import Problem, is_autocast

ENGINES: dict[str, ModuleType] = {
    "native": native,
    "torch_sdpa": torch_sdpa,
    "torch_flash": torch_flash,
    "triton": triton,
    "stream": stream,
    "reference": reference,
}

# `auto` takes the first that doesn't refuse.
FASTEST_FIRST = ("native", "torch_sdpa", "torch_flash", "triton", "stream", "reference")


def check_name(engine: object) -> None:
    """Refuse what is no engine."""
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"engine must be 'auto' or one of {', '.join(map(repr, ENGINES))}, not {engine!r}")


def choose(problem: Problem, engine: str = "auto") -> tuple[str, dict[str, str]]:
    """The engine's name, and what each engine that was passed over gave as its reason."""
    check_name(engine)
    refusals: dict[str, str] = {}
    for name in FASTEST_FIRST if engine == "auto" else (engine,):
        refusal = ENGINES[name].refuses(problem)
        if refusal is None:
            return name, refusals
        refusals[name] = refusal
    able = [name for name in FASTEST_FIRST if ENGINES[name].refuses(problem) is None]
    raise ValueError(f"engine={engine!r} can't compute this: {refusals[engine]}; {' and '.join(able)} can")


def run(problem: Problem, engine: str = "auto") -> tuple[Tensor | None, tuple[Any, ...]]:
    """The output and the results of the readouts, by the chosen engine."""
    problem = problem.only_needed_rows()
    chosen = ENGINES[choose(problem, engine)[0]]
    if not is_autocast(problem.device.type):
        return chosen.run(problem)
    # The operands were cast as autocast wants; what is computed inside must stay as we say.
    with torch.autocast(problem.device.type, enabled=False):
        return chosen.run(problem)
