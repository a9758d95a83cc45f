"""How results are checked: within budgets that the oracle gives, on problems that hypothesis draws."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import oracle
import torch
from hypothesis import HealthCheck, Phase, settings
from oracle import Case
from torch import Tensor

ORDERS = 8  # orders of summation in which the formula's own error is taken
MANY = 64  # and where a result is over that budget: now and then a few orders are right by luck


def drawing(examples: int) -> settings:
    """Hypothesis' settings. No shrinking: a failing problem is small already, and shrinking one takes minutes."""
    return settings(
        deadline=None,
        max_examples=int(os.environ.get("EXAMPLES", examples)),
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )


def formulas(dtype: torch.dtype) -> list[tuple[torch.dtype, float]]:
    """The dtypes in which the formula's error is measured for the budget, and what it counts for there. The truth
    about float64 is float64 itself: its error shows in other orders of summation, or as 2⁻²⁹ of float32's."""
    return [(torch.float32, 2.0**-29), (torch.float64, 1.0)] if dtype == torch.float64 else [(dtype, 1.0)]


def share(got: Tensor, right: Tensor, low: list[Tensor], more: float = 0.0) -> float:
    """The error as a share of its budget, to which `more` is added; ∞ where the shape is another, or a number is finite
    that shouldn't be, or the other way round."""
    unreal = ~right.isfinite()
    if got.shape != right.shape or not torch.equal(got.double()[unreal].nan_to_num(7), right[unreal].nan_to_num(7)):
        return math.inf
    error = (got.detach().double() - right)[~unreal].abs().max().item() if (~unreal).any() else 0.0
    budget = oracle.budget(right, low, got.dtype) + more
    if error == 0:
        return 0.0
    return math.inf if math.isnan(error) or budget == 0 else error / budget


def check_close(name: str, got: Tensor, right: Tensor, low: list[Tensor], more: float = 0.0) -> None:
    """`more` is added to the budget."""
    found = share(got, right, low, more)
    assert found <= 1, f"{name}: {found:.3g} of its budget"


class Truth:
    """What the oracle says of a problem, and how far the formula itself is from it in the problem's dtype."""

    def __init__(self, case: Case, orders: int = ORDERS):
        self.case, self.right = case, oracle.attend(case)
        self.measure(orders)

    def measure(self, orders: int) -> None:
        """The formula's error in so many orders of summation."""
        self.orders = orders
        self.low = [
            (oracle.attend(self.case, dtype, order), factor)
            for dtype, factor in formulas(self.case.query.dtype)
            for order in range(orders)
        ]

    def low_of(self, of: Callable[[dict[str, Tensor]], Tensor]) -> list[Tensor]:
        """As the formula errs."""
        right = of(self.right)
        return [right + (of(o).double() - right) * factor for o, factor in self.low]

    def share(self, got: Tensor, of: Callable[[dict[str, Tensor]], Tensor], more: float = 0.0) -> float:
        """`got` is what `of` makes of the oracle's output, weights, scores, visible, lse."""
        return share(got, of(self.right), self.low_of(of), more)

    def check(self, name: str, got: Tensor, of: Callable[[dict[str, Tensor]], Tensor], more: float = 0.0) -> None:
        if self.orders < MANY and self.share(got, of, more) > 1:
            self.measure(MANY)
        check_close(name, got, of(self.right), self.low_of(of), more)

    def budget(self, of: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype) -> float:
        return oracle.budget(of(self.right), self.low_of(of), dtype)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for every dtype but for the rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(
    b: int = 2, h: int = 6, g: int = 3, i: int = 5, j: int = 7, d: int = 11, e: int = 13, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in which no two dimensions are alike, but for b · g = h."""
    return tuple(
        draw(*shape, seed=seed, **options) for seed, shape in enumerate([(b, h, i, d), (b, g, j, d), (b, g, j, e)])
    )  # type: ignore[return-value]
