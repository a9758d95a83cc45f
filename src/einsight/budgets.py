"""How far results may lie from the truth: twice (the error of the formula in that dtype + one rounding of the result).

The truth is the reference in float64. The formula's error is measured on the spot: the reference computed in the
problem's dtype throughout, several times over, with the head dimension in another order and for another loss. A few
orders are now and then right by luck, so what is over is judged again by many. The truth about float64 is float64
itself: its error shows in other orders of summation, or as 2⁻²⁹ of float32's, and three times that is allowed, since
two results may err.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from einsight.engines import reference
from einsight.pose import pose
from einsight.problem import Problem
from einsight.readouts import Readout, Weights

ORDERS, MANY = 8, 64


class Judged(NamedTuple):
    """The largest error of a result, and its budget."""

    result: str
    error: float
    budget: float


Leaves = dict[str, Tensor]
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """One call: its tensors that gradients flow into (query, key, value and what the settings learn), the settings
    made of these, and readouts."""

    leaves: Leaves
    settings: Callable[[Leaves], dict[str, Any]]
    readouts: dict[str, Readout]

    def pose(self, leaves: Leaves) -> Problem:
        operands = leaves["query"], leaves["key"], leaves["value"]
        return pose(*operands, **self.settings(leaves), readouts=tuple(self.readouts.values()))

    def results(self, run: Callable[[Problem], Any], leaves: Leaves) -> Found:
        """The output and each readout's floats; the keys of top-k as "… keys"."""
        output, seen = run(self.pose(leaves))
        found = {"output": output}
        for name, result in zip(self.readouts, seen, strict=True):
            found[name] = result[0] if isinstance(result, tuple) else result
            if isinstance(result, tuple):
                found[f"{name} keys"] = result[1]
        return found

    def as_leaves(self, dtype: torch.dtype | None = None) -> Leaves:
        """Copies to derive by; in a dtype, or each in its own."""
        return {name: leaf.detach().to(dtype or leaf.dtype).requires_grad_() for name, leaf in self.leaves.items()}


class Truth:
    """A trial's results and gradients in float64, and the budgets of errors against them."""

    def __init__(self, trial: Trial):
        self.trial, self.leaves = trial, trial.as_leaves(torch.float64)
        dense = Trial(trial.leaves, trial.settings, trial.readouts | {"all weights": Weights()})
        self.right = dense.results(reference.run, self.leaves)
        self.weights = self.right.pop("all weights").detach()
        self.grads = gradients(self.right, self.leaves, 0)
        self._measure(ORDERS)

    @torch.enable_grad()
    def _measure(self, orders: int) -> None:
        """How far the formula is from the truth, in so many orders of summation."""
        self._orders = orders
        self._low: list[Found] = []
        self._low_grads: list[Found] = []
        for order in range(orders):
            exact = gradients(self.right, self.leaves, order)
            for dtype, factor in _formulas(self.trial.leaves["query"].dtype):
                leaves = self.trial.as_leaves(dtype)
                low = self.trial.results(lambda problem: reference.run(_throughout(problem)), _turned(leaves, order))
                made = gradients(low, leaves, order)
                self._low.append({n: (x.detach().double() - self.right[n]) * factor for n, x in low.items()})
                self._low_grads.append({n: (made[n].double() - exact[n]) * factor for n in made})

    def judge(self, found: Found) -> list[Judged]:
        return self._twice(lambda: [self._of_result(name, found) for name in found])

    def judge_gradients(self, found: Found) -> list[Judged]:
        return self._twice(
            lambda: [
                _judged(f"gradient of {name}", got, self.grads[name], [x[name] for x in self._low_grads])
                for name, got in found.items()
            ]
        )

    def _twice(self, judge: Callable[[], list[Judged]]) -> list[Judged]:
        judged = judge()
        if self._orders < MANY and any(x.error > x.budget for x in judged):
            self._measure(MANY)
            judged = judge()
        return judged

    def _of_result(self, name: str, found: Found) -> Judged:
        of, got = name.removesuffix(" keys"), found[name]
        if of != name:  # rounding may swap neighbours: each key is judged by the weight that it has
            got = self.weights.gather(-1, got.clamp(min=0)).where(got >= 0, 0).to(found[of].dtype)
        return _judged(name, got, self.right[of], [x[of] for x in self._low])


def _formulas(dtype: torch.dtype) -> list[tuple[torch.dtype, float]]:
    """The dtypes in which the formula's error is measured, and what it counts for there."""
    return [(torch.float32, 2.0**-29), (torch.float64, 1.0)] if dtype == torch.float64 else [(dtype, 1.0)]


def _judged(name: str, got: Tensor, right: Tensor, errors: list[Tensor]) -> Judged:
    """An error is infinite where other numbers are finite than should be."""
    got, right, dtype = got.detach().double(), right.detach(), got.dtype
    finite = right.isfinite()
    if got.shape != right.shape or not torch.equal(got[~finite].nan_to_num(7), right[~finite].nan_to_num(7)):
        return Judged(name, torch.inf, 0.0)
    if not bool(finite.any()):
        return Judged(name, 0.0, 0.0)
    error = (got - right)[finite].abs().max().item()
    formula = max(x[finite].abs().max().item() for x in errors)
    rounding = torch.finfo(dtype).eps * right[finite].abs().max().item()
    budget = (3 if dtype == torch.float64 else 2) * formula + 2 * rounding
    return Judged(name, torch.inf if math.isnan(error) else error, budget)


def gradients(results: Found, leaves: Leaves, seed: int) -> Found:
    """Of a random linear function of all that is finite in the results."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        if x.dtype.is_floating_point:
            factors = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            total = total + (torch.where(x.isfinite(), x, 0).double() * factors).sum()
    made = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), made, strict=True)}


class _Throughout(Problem):
    """A problem computed in its own dtype, where ours are in float32 at least."""

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype


def _throughout(problem: Problem) -> Problem:
    return _Throughout(**{field.name: getattr(problem, field.name) for field in fields(problem) if field.init})


def _turned(leaves: Leaves, order: int) -> Leaves:
    """The head dimension in another order, which changes nothing but the rounding."""
    dims = torch.randperm(leaves["query"].shape[3], generator=torch.Generator().manual_seed(order))
    return leaves | {name: leaves[name][..., dims] for name in ("query", "key")}
