"""How far results may lie from the truth: twice (the error of the formula in that dtype + one rounding of the result).

The truth is the reference in float64. The formula's error is measured on the spot: the reference computed in the
problem's dtype throughout, several times over, with the head dimension in another order and for another loss. Float64,
in which the truth errs as much as the formula does, is judged by the formula in float32 (2⁻²⁹ of its error), three
times that: both may err, and the measure is rough.
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

ORDERS = 8


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
        dtype = trial.leaves["query"].dtype
        self.trial, self.leaves = trial, trial.as_leaves(torch.float64)
        coarse, self._finer = (torch.float32, 2.0**-29) if dtype == torch.float64 else (dtype, 1.0)
        dense = Trial(trial.leaves, trial.settings, trial.readouts | {"all weights": Weights()})
        self.right = dense.results(reference.run, self.leaves)
        self.weights = self.right.pop("all weights").detach()
        self.grads = gradients(self.right, self.leaves, 0)
        self._low: list[Found] = []
        self._low_grads: list[Found] = []
        for order in range(ORDERS):
            leaves = trial.as_leaves(coarse)
            low = trial.results(lambda problem: reference.run(_throughout(problem)), _turned(leaves, order))
            self._low.append({name: x.detach() for name, x in low.items()})
            exact, made = gradients(self.right, self.leaves, order), gradients(low, leaves, order)
            self._low_grads.append({n: self.grads[n] + (made[n].double() - exact[n]) for n in made})

    def judge(self, found: Found) -> list[Judged]:
        judged = []
        for name, got in found.items():
            of = name.removesuffix(" keys")
            if of != name:  # rounding may swap neighbours: each key is judged by the weight that it has
                got = self.weights.gather(-1, got.clamp(min=0)).where(got >= 0, 0).to(found[of].dtype)
            judged.append(self._judged(name, got, self.right[of], [x[of] for x in self._low]))
        return judged

    def judge_gradients(self, found: Found) -> list[Judged]:
        return [
            self._judged(f"gradient of {name}", got, self.grads[name], [x[name] for x in self._low_grads])
            for name, got in found.items()
        ]

    def _judged(self, name: str, got: Tensor, right: Tensor, low: list[Tensor]) -> Judged:
        """An error is infinite where other numbers are finite than should be."""
        got, right, dtype = got.detach().double(), right.detach(), got.dtype
        finite = right.isfinite()
        if got.shape != right.shape or not torch.equal(got[~finite].nan_to_num(7), right[~finite].nan_to_num(7)):
            return Judged(name, torch.inf, 0.0)
        if not bool(finite.any()):
            return Judged(name, 0.0, 0.0)
        error = (got - right)[finite].abs().max().item()
        formula = max((x.double() - right)[finite].abs().max().item() for x in low)
        rounding = torch.finfo(dtype).eps * right[finite].abs().max().item()
        budget = 2 * (formula + rounding) if self._finer == 1 else 3 * formula * self._finer + 2 * rounding
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
