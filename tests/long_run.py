"""A long run: drawn problems on every engine of this machine, forward and gradients, beside their budgets.

    python tests/long_run.py [problems] [--seed 0] [--workers 2] [--minutes M] [--only SEED]

Writes the tables of docs/numerics.md, and what is over its budget with the seed of the hundred problems it is among;
`--only` repeats such a hundred. A budget stands on the formula's error in a few orders of summation, which is sometimes
small by luck: what is over it is judged again with many.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hypothesis
import torch
from cases import LENGTHS, cases, readouts_for
from checks import MANY, Truth
from engines_under_test import using
from gradients import TrueGradients, floats, weights_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import Case
from torch import Tensor

import einsight as es
from einsight.engines import choose, native
from einsight.pose import pose

AT_ONCE = 100  # problems of one seed
FEW = 4  # orders of summation, for the first look
# Mostly small; now and then several blocks and tiles of the native engine.
PROBLEMS = cases(lengths=[*LENGTHS[1:] * 3, 0, 29, 101], dims=[1, 2, 5, 8, 17, 64])

Key = tuple[str, str, str, str]  # engine, dtype, feature, result


@dataclass
class Tally:
    """What came out: how often each was judged, its largest error as a share of its budget, and what was over."""

    worst: dict[Key, float] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)  # of each engine
    results: int = 0
    by_luck: int = 0  # over the budget of a few orders of summation, within that of many
    over: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for key, ratio in other.worst.items():
            self.worst[key] = max(ratio, self.worst.get(key, 0.0))
        self.problems.update(other.problems)
        self.results, self.by_luck = self.results + other.results, self.by_luck + other.by_luck
        self.over += other.over


def engines() -> dict[str, tuple[str, AbstractContextManager[Any]]]:
    """Each engine here by the name it is shown with: as it is passed, and within what."""
    levels = enumerate(native.operations.kernel.levels)
    found = {f"native {name}": ("native", native.operations.at_level(level)) for level, name in levels}
    others = {
        "torch_sdpa": "torch_sdpa",
        "stream": "stream",
        "stream in tiny blocks": "stream",
        "reference": "reference",
    }
    return found | {name: (passed, using(name)) for name, passed in others.items()}


class Trial:
    """One problem with its readouts, and the truth about it."""

    def __init__(self, case: Case, readouts: dict[str, Any], seed: int):
        self.case, self.readouts = case, readouts
        self.grads = TrueGradients(case, readouts, seed, FEW)
        with torch.no_grad():
            self.truth = Truth(case, FEW)
        b, h, _, i, j = case.sizes
        self.pairs = b * h * i * j

    def measure(self, orders: int) -> None:
        self.grads.measure(orders)
        with torch.no_grad():
            self.truth.measure(orders)

    def shares(self) -> dict[str, dict[str, float]]:
        """What share of its budget each result and gradient of each engine comes to."""
        found = {}
        for name, (engine, context) in engines().items():
            if name == "stream in tiny blocks" and self.pairs > 150:  # and many more of them
                continue
            with context:
                found[name] = self._forward(engine) | self._backward(engine)
        return found

    def _forward(self, engine: str) -> dict[str, float]:
        operands = {n: getattr(self.case, n).detach() for n in ("query", "key", "value")}
        with torch.no_grad():
            if (results := self._attend(engine, operands)) is None:
                return {}
            bare = (
                es.attention(**operands, engine=engine, **self.case.arguments) if self.readouts else results["output"]
            )
        makers = {"output": lambda o: o["output"], **{n: make for n, (_, make) in self.readouts.items()}}
        found = {}
        for name, got in results.items():
            found[name] = self.truth.share(got, lambda o, of=makers[name]: weights_of(of(o)))
        return found | ({} if torch.equal(results["output"], bare) else {"output without readouts": math.inf})

    def _backward(self, engine: str) -> dict[str, float]:
        operands = {n: getattr(self.case, n).detach().requires_grad_() for n in ("query", "key", "value")}
        if (results := self._attend(engine, operands)) is None:
            return {}
        made = self.grads.of(results, operands)
        if engine == "torch_sdpa":  # where a query sees one key, PyTorch's kernel gives roundings of 0
            made = {name: got for name, got in made.items() if self.grads.right[name].any()}
        return {f"gradient of {name}": self.grads.share(name, got) for name, got in made.items()}

    def _attend(self, engine: str, operands: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Nothing where the engine refuses."""
        asked = {n: r for n, (r, _) in self.readouts.items()}
        problem = pose(*operands.values(), **self.case.arguments, readouts=tuple(asked.values()))
        if choose.ENGINES[engine].refuses(problem) is not None:
            return None
        return floats(*es.attention(**operands, readouts=asked, engine=engine, **self.case.arguments))


def features(case: Case) -> list[str]:
    _, h, g, _, _ = case.sizes
    found = [name for name in ("mask", "softcap", "sink", "score_mod") if name in case.arguments]
    biases = {"slopes": "alibi", "buckets": "relative bias", "table": "bias as a tensor"}
    found += [name for leaf, name in biases.items() if leaf in case.learned]
    found += ["grouped heads"] if h != g else []
    return found or ["none of these"]


def judge(trial: Trial, seed: int, tally: Tally) -> None:
    found = trial.shares()
    over = {(name, result) for name, shares in found.items() for result, share in shares.items() if share > 1}
    if over:
        trial.measure(MANY)
        found = trial.shares()
    case, dtype = trial.case, str(trial.case.query.dtype).removeprefix("torch.")
    for name, shares in found.items():
        tally.problems[name] += bool(shares)
        tally.results += len(shares)
        for result, share in shares.items():
            if share > 1:
                said = f"{share:.3g} of its budget: {name}, {result}, seed {seed}"
                tally.over.append(f"{said}: {case}, {sorted(trial.readouts)}")
            tally.by_luck += share <= 1 and (name, result) in over
            for feature in features(case):
                key = name, dtype, feature, result
                tally.worst[key] = max(share, tally.worst.get(key, 0.0))


def hundred(seed: int, until: float) -> Tally:
    """The problems of one seed; none where the time is over."""
    tally = Tally()
    if time.time() > until:
        return tally

    @hypothesis.seed(seed)
    @settings(
        max_examples=AT_ONCE,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=PROBLEMS, data=st.data(), loss_seed=st.integers(0, 1000), bare=st.booleans())
    def run(case: Case, data: Any, loss_seed: int, bare: bool) -> None:
        # PyTorch's kernel gives the output alone, so half of the problems ask for nothing else.
        readouts = {} if bare else readouts_for(case, data.draw)
        judge(Trial(case, readouts, loss_seed), seed, tally)

    run()
    return tally


def start() -> None:
    torch.set_num_threads(1)


def table(tally: Tally, rows: int, what: str) -> Iterator[str]:
    """The largest share of a budget, by what stands at a place of the key and by dtype."""
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    yield f"| {what} | {' | '.join(dtypes)} |"
    yield "|---" * 5 + "|"
    for name in dict.fromkeys(key[rows] for key in sorted(tally.worst)):
        cells = []
        for dtype in dtypes:
            shares = {key: x for key, x in tally.worst.items() if key[rows] == name and key[1] == dtype}
            top = max(shares, key=lambda key: shares[key], default=None)
            cells.append("" if top is None else f"{shares[top]:.2f} {top[3]}")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="how long to take up new problems")
    parser.add_argument("--only", type=int, metavar="SEED")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + -(-given.problems // AT_ONCE)) if given.only is None else [given.only]
    whole, began = Tally(), time.time()
    with multiprocessing.get_context("spawn").Pool(given.workers, start) as pool:
        task = partial(hundred, until=began + 60 * given.minutes)
        for part in pool.imap_unordered(task, seeds):
            whole.add(part)
            for line in part.over:
                print(line, flush=True)
            said = f"\r{whole.problems['reference']} problems, {time.time() - began:.0f} s"
            print(said, end="", file=sys.stderr, flush=True)
    print(
        f"\n{whole.results} results and gradients, {len(whole.over)} over their budgets; {whole.by_luck} were over one"
    )
    print(f"of {FEW} orders of summation and not over that of {MANY}")
    print("problems that each engine took:", dict(whole.problems), "\n")
    print(*table(whole, 0, "engine"), "", *table(whole, 2, "feature"), sep="\n")


if __name__ == "__main__":
    main()
