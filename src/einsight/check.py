"""How exact the engines are on this machine: their errors beside budgets, over a grid. The work of `einsight check`."""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from einsight.biases import alibi
from einsight.budgets import Judged, Leaves, Trial, Truth, gradients
from einsight.engines import choose
from einsight.engines.native import operations
from einsight.look import progress
from einsight.masks import allow, causal, documents, lengths, where, window
from einsight.readouts import (
    Diagonal,
    Distance,
    Entropy,
    LogSumExp,
    Mass,
    MaxScore,
    Pool,
    Readout,
    Received,
    Rows,
    Scores,
    Share,
    TopK,
    Weights,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OF_ROWS: dict[str, Readout] = {
    "lse": LogSumExp(),
    "max score": MaxScore(),
    "entropy": Entropy(),
    "received": Received(),
}
# b, h, g, i, j, d, e: a square, which every engine takes; several blocks and tiles of the native engine, of primes.
SQUARE = (1, 4, 4, 131, 131, 32, 32)
GROUPS = (1, 4, 2, 103, 307, 24, 40)
DECODING = (2, 4, 1, 1, 1531, 64, 48)


@dataclass
class Row:
    """The result of an engine that is nearest to its budget, or furthest over it."""

    engine: str
    dtype: str
    feature: str
    result: str
    error: float
    budget: float
    ratio: float
    results: int  # of how many


def check(*, json: bool = False, out: Any = None) -> list[Row]:
    """Compare every engine with the float64 reference, print a table (or JSON lines) to `out`, and return its rows.

    Arguments:
        json: one JSON object per row in place of the table.
        out: a file to print to; standard output by default. Progress goes to standard error.
    """
    out = sys.stdout if out is None else out
    rows: list[Row] = []
    with progress() as bar:
        task = bar.add_task("", total=len(FEATURES) * len(DTYPES))
        for dtype in DTYPES:
            for feature in FEATURES:
                bar.update(task, description=f"{_short(dtype)} {feature}")
                rows += _compared(feature, dtype)
                bar.advance(task)
    if json:
        for row in rows:
            told = {name: None if x == math.inf else x for name, x in asdict(row).items()}  # JSON has no infinity
            print(json_format.dumps(told | {"over": row.ratio > 1}), file=out)
    else:
        _show(rows, out)
    return rows


# Each native instruction set is shown by itself; what needs a GPU has its own check: benchmarks/gpu.py.
_APART = ("native", "torch_flash", "triton")


def engines() -> dict[str, tuple[str, AbstractContextManager[None]]]:
    """Each engine here by the name it is shown with, the native one for each instruction set."""
    levels = [] if operations.kernel is None else operations.kernel.levels
    found: dict[str, tuple[str, AbstractContextManager[None]]] = {}
    for n, name in enumerate(levels):
        found[f"native {name}"] = "native", operations.at_level(n)
    return found | {name: (name, nullcontext()) for name in choose.FASTEST_FIRST if name not in _APART}


def _compared(feature: str, dtype: torch.dtype) -> Iterator[Row]:
    """The feature's row of each engine that takes it."""
    judged: dict[str, list[Judged]] = {}
    for trial in FEATURES[feature](dtype):
        truth = Truth(trial)
        for shown, (name, level) in engines().items():
            with level:
                judged.setdefault(shown, []).extend(_judged(truth, trial, name))
    for shown, found in judged.items():
        if found:
            worst = max(found, key=_ratio)
            yield Row(shown, _short(dtype), feature, *worst, _ratio(worst), len(found))


def _judged(truth: Truth, trial: Trial, engine: str) -> list[Judged]:
    """What an engine makes of a trial: nothing where it refuses it."""
    run = partial(choose.run, engine=engine)
    with torch.no_grad():
        if choose.ENGINES[engine].refuses(trial.pose(trial.leaves)) is not None:
            return []
        judged = truth.judge(trial.results(run, trial.leaves))
    leaves = trial.as_leaves()
    if choose.ENGINES[engine].refuses(trial.pose(leaves)) is None:
        judged += truth.judge_gradients(gradients(trial.results(run, leaves), leaves, 0))
    return judged


def _ratio(judged: Judged) -> float:
    return 0.0 if judged.error == 0 else judged.error / judged.budget if judged.budget else math.inf


def _random(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trials(
    sizes: tuple[int, ...],
    settings: Callable[[Leaves], dict[str, Any]],
    asked: tuple[dict[str, Readout], ...] = ({}, OF_ROWS),
    learned: Leaves | None = None,
) -> Callable[[torch.dtype], list[Trial]]:
    """A feature in a dtype: the same call for each set of readouts."""
    b, h, g, i, j, d, e = sizes

    def make(dtype: torch.dtype) -> list[Trial]:
        shapes = {"query": (b, h, i, d), "key": (b, g, j, d), "value": (b, g, j, e)}
        leaves = {name: _random(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        leaves |= {name: leaf.to(exact) for name, leaf in (learned or {}).items()}
        return [Trial(leaves, lambda leaves: {"offset": j - i} | settings(leaves), readouts) for readouts in asked]

    return make


def _rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
    return (p + h + j) % 3 != 0


_ID = torch.arange(307) // 50
_READOUTS: dict[str, Readout] = OF_ROWS | {
    "received, mean": Received(slice(-32, None), mean=True, per_group=True),
    "top-k": TopK(5),
    "share": Share(window(9, 0)),
    "mass": Mass(_ID),
    "mass of a matrix": Mass(_random(307, 3).abs()),
    "rows": Rows([0, 51, 102]),
    "diagonal": Diagonal(-1),
    "distance": Distance(),
    "pool": Pool(16),
    "weights": Weights(),
    "scores": Scores(),
}
FEATURES: dict[str, Callable[[torch.dtype], list[Trial]]] = {
    "no mask": _trials(SQUARE, lambda _: {}),
    "causal": _trials(SQUARE, lambda _: {"mask": causal()}),
    "window": _trials(SQUARE, lambda _: {"mask": window(17, 3)}),
    "lengths": _trials(SQUARE, lambda _: {"mask": lengths([101])}),
    "documents": _trials(SQUARE, lambda _: {"mask": causal() & documents(torch.arange(131) // 40)}),
    "boolean mask": _trials(GROUPS, lambda _: {"mask": allow(_random(4, 103, 307) > 0)}),
    "rule": _trials(GROUPS, lambda _: {"mask": where(_rule)}),
    "nothing to see": _trials(SQUARE, lambda _: {"mask": window(1, 1), "offset": -5}),
    "grouped heads": _trials(GROUPS, lambda _: {"mask": causal()}),
    "one query": _trials(DECODING, lambda _: {"mask": causal()}),
    "scale": _trials(SQUARE, lambda _: {"mask": causal(), "scale": 0.5}),
    "softcap": _trials(SQUARE, lambda _: {"mask": causal(), "softcap": 1.5}),
    "sink": _trials(SQUARE, lambda x: {"mask": causal(), "sink": x["sink"]}, learned={"sink": _random(4)}),
    "alibi": _trials(
        SQUARE, lambda x: {"mask": causal(), "bias": alibi(x["slopes"])}, learned={"slopes": _random(4).abs()}
    ),
    "bias": _trials(GROUPS, lambda x: {"bias": x["bias"]}, learned={"bias": _random(4, 103, 307)}),
    **{name: _trials(GROUPS, lambda _: {"mask": causal()}, ({name: asked},)) for name, asked in _READOUTS.items()},
}


def _show(rows: list[Row], out: Any) -> None:
    console = Console(file=out)
    console.print("Largest error / its budget, of the result that is nearest to its budget\n")
    for engine in dict.fromkeys(row.engine for row in rows):
        console.print(_table(engine, [row for row in rows if row.engine == engine]))
    for row in rows:
        if row.ratio > 1:
            console.print(f"over budget: {_said(row)}: error {row.error:.2g}, budget {row.budget:.2g}", style="red")
    console.print(_summary(rows))


def _table(engine: str, rows: list[Row]) -> Table:
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    cells = {(row.feature, row.dtype): _cell(row) for row in rows}
    table = Table(title=engine, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for dtype in dtypes:
        table.add_column(dtype, justify="right", no_wrap=True)
    for feature in dict.fromkeys(row.feature for row in rows):
        table.add_row(feature, *(cells.get((feature, dtype), "") for dtype in dtypes))
    return table


def _cell(row: Row) -> str:
    shown = "/".join(f"{x:.1e}".replace("e-0", "e-") for x in (row.error, row.budget))
    return f"[red]{shown}[/]" if row.ratio > 1 else shown


def _summary(rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: row.ratio)
    count, over = sum(row.results for row in rows), sum(row.ratio > 1 for row in rows)
    shown = len({row.engine for row in rows})
    said = f"{over} of {len(rows)} cells are over budget" if over else "all are inside their budgets"
    return f"{count} results, {shown} engines: {said}; the worst is at {worst.ratio:.2f} of its own: {_said(worst)}"


def _said(row: Row) -> str:
    return f"{row.engine}, {row.dtype}, {row.feature}, {row.result}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
