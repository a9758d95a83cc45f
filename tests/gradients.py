"""Gradients of a random linear function of results, and what the oracle makes of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import torch
from checks import MANY, ORDERS, check_close, formulas, share
from oracle import Case
from torch import Tensor


def loss(results: dict[str, Tensor], seed: int) -> Tensor:
    """A random linear function of all that is finite in the results."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for name in sorted(results):
        x = results[name]
        factors = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        total = total + (torch.where(x.isfinite(), x, 0).double() * factors).sum()
    return total


def gradients(total: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The graph is kept, for other losses of the same results."""
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}


def floats(output: Tensor, results: dict[str, Any]) -> dict[str, Tensor]:
    """The output, and of each result what has a gradient."""
    return {"output": output, **{n: weights_of(x) for n, x in results.items()}}


def weights_of(result: Any) -> Tensor:
    """Of a top-k the weights, and not their keys."""
    return result[0] if isinstance(result, tuple) else result


class TrueGradients:
    """The right gradients, and these as the formula in the problem's dtype errs, in several orders of summation, each
    with a loss of its own: a gradient may be a single number, on which the formula is right by luck."""

    def __init__(self, case: Case, readouts: dict[str, Any], seed: int, orders: int = ORDERS):
        self.case, self.readouts, self.seed = case, readouts, seed
        for leaf in case.learned.values():
            leaf.requires_grad_()
        case.allowed()  # asked once for all
        self._exact = self._attend(torch.float64, 0)
        self.right = {n: x.double() for n, x in self._exact(seed).items()}
        self.measure(orders)

    def measure(self, orders: int) -> None:
        """The formula's error in so many orders of summation."""
        self.orders = orders
        self.low: list[dict[str, Tensor]] = []
        for order in range(orders):
            fine = self._exact(self.seed + order)
            for dtype, factor in formulas(self.case.query.dtype):
                made = self._attend(dtype, order)(self.seed + order)
                errors = {n: (made[n].double() - fine[n].double()) * factor for n in fine}
                self.low.append({n: self.right[n] + error for n, error in errors.items()})

    def share(self, name: str, got: Tensor) -> float:
        return share(got, self.right[name], [x[name] for x in self.low])

    def of(self, results: dict[str, Tensor], operands: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients on trial, from results of the problem with these operands."""
        return gradients(loss(results, self.seed), {**operands, **self.case.learned})

    def check(self, got: dict[str, Tensor]) -> None:
        if self.orders < MANY and any(self.share(name, x) > 1 for name, x in got.items()):
            self.measure(MANY)
        for name, x in got.items():
            check_close(f"gradient of {name}", x, self.right[name], [low[name] for low in self.low])

    def _attend(self, dtype: torch.dtype, order: int) -> Callable[[int], dict[str, Tensor]]:
        """The gradients by the formula, of any loss."""
        case = self.case
        operands = {n: getattr(case, n).detach().to(dtype).requires_grad_() for n in ("query", "key", "value")}
        found = oracle.attend(replace(case, **operands), dtype, order)
        results = floats(found["output"], {n: expected(found) for n, (_, expected) in self.readouts.items()})
        return lambda seed: gradients(loss(results, seed), {**operands, **case.learned})
