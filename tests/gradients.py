"""Gradients of a random linear function of results, and what the oracle makes of the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import torch
from checks import ORDERS
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
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}


def of_oracle(case: Case, readouts: dict[str, Any], dtype: torch.dtype, order: int, seed: int) -> dict[str, Tensor]:
    operands = {n: getattr(case, n).detach().to(dtype).requires_grad_() for n in ("query", "key", "value")}
    o = oracle.attend(replace(case, **operands), dtype, order)
    found = {n: expected(o) for n, (_, expected) in readouts.items()}
    found = {n: x[0] if isinstance(x, tuple) else x for n, x in found.items()}
    return gradients(loss({"": o["output"], **found}, seed), {**operands, **case.learned})


def low_precision(
    case: Case, readouts: dict[str, Any], dtype: torch.dtype, right: dict[str, Tensor], seed: int
) -> list[dict[str, Tensor]]:
    """The gradients as the formula in a dtype errs, over several losses: a gradient may be a single number, on which
    the formula is right by luck."""
    low = []
    for order in range(ORDERS):
        coarse, exact = (of_oracle(case, readouts, t, order, seed + order) for t in (dtype, torch.float64))
        low.append({n: right[n].double() + (coarse[n].double() - exact[n].double()) for n in right})
    return low
