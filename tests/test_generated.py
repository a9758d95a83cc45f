"""Whole generated problems, on every engine, against the float64 oracle inside the error budget."""

from __future__ import annotations

import os
from typing import Any

import oracle
import pytest
import torch
from cases import cases, readouts_for
from engines_under_test import ENGINES, using
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import Case
from torch import Tensor

import einsight as es

ORDERS = 4  # orders of summation in which the formula's own error is taken

# No shrinking: a failing problem is small already, and shrinking one takes minutes.
relaxed = settings(
    deadline=None,
    max_examples=int(os.environ.get("EXAMPLES", 120)),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)


def coarser(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """The dtype whose error is measured for the budget, and its distance: float64's is 2⁻²⁹ of float32's."""
    return (torch.float32, 2.0**-29) if dtype == torch.float64 else (dtype, 1.0)


def check_close(name: str, got: Tensor, right: Tensor, low: list[Tensor], finer: float) -> None:
    assert got.shape == right.shape, name
    unreal = ~right.isfinite()
    assert torch.equal(got.double()[unreal].nan_to_num(7), right[unreal].nan_to_num(7)), name
    allowed = oracle.budget(right, low, got.dtype, finer)
    error = (got.double() - right)[~unreal].abs().max().item() if (~unreal).any() else 0.0
    assert error <= allowed, f"{name}: error {error:.3g} over budget {allowed:.3g}"


def check_top(got: Any, o: dict[str, Tensor], right: tuple[Tensor, Tensor], low: list[Any], finer: float) -> None:
    """Rounding may swap neighbours, so the weights are compared, and each index by the weight it stands for."""
    check_close("top weights", got.weights, right[0], [x[0] for x in low], finer)
    assert torch.equal(got.indices == -1, right[1] == -1)


@pytest.mark.parametrize("engine", ENGINES)
@relaxed
@given(case=cases(), data=st.data())
def test_forward(engine: str, case: Case, data: Any) -> None:
    readouts = readouts_for(case, data.draw)
    with using(engine) as name:
        call = {**case.arguments, "engine": name}
        output, seen = es.attention(
            case.query, case.key, case.value, readouts={n: r for n, (r, _) in readouts.items()}, **call
        )
        if name != "auto":
            assert torch.equal(output, es.attention(case.query, case.key, case.value, **call)), "a readout changed a bit"
    dtype, finer = coarser(case.query.dtype)
    right = oracle.attend(case)
    low = [oracle.attend(case, dtype, order) for order in range(ORDERS)]
    check_close("output", output, right["output"], [o["output"] for o in low], finer)
    assert output.dtype == case.query.dtype
    for n, (_, expected) in readouts.items():
        if n.startswith("top"):
            check_top(seen[n], right, expected(right), [expected(o) for o in low], finer)
        else:
            assert seen[n].dtype == (torch.float64 if case.query.dtype == torch.float64 else torch.float32)
            check_close(n, seen[n], expected(right), [expected(o) for o in low], finer)
