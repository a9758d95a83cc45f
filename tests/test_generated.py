"""Whole generated problems, on every engine, against the float64 oracle inside the error budget."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from cases import cases, readouts_for
from checks import ORDERS, check_close, coarser, drawing
from engines_under_test import ENGINES, using
from gradients import gradients, loss, low_precision, of_oracle
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case
from torch import Tensor

import einsight as es

relaxed = drawing(120)


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
            assert torch.equal(output, es.attention(case.query, case.key, case.value, **call)), (
                "a readout changed a bit"
            )
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


@pytest.mark.parametrize("engine", ENGINES)
@relaxed
@given(case=cases(dtypes=[torch.float32, torch.float64, torch.bfloat16]), data=st.data(), seed=st.integers(0, 1000))
def test_gradients(engine: str, case: Case, data: Any, seed: int) -> None:
    readouts = readouts_for(case, data.draw)
    if case.bias is not None and case.query.dtype == torch.bfloat16:
        readouts.pop("scores", None)  # their coarse gradient in a bias that broadcasts measures the sum, not us
    for leaf in case.learned.values():
        leaf.requires_grad_()
    operands = {n: getattr(case, n).detach().requires_grad_() for n in ("query", "key", "value")}
    with using(engine) as name:
        output, seen = es.attention(
            *operands.values(), readouts={n: r for n, (r, _) in readouts.items()}, engine=name, **case.arguments
        )
        results = {n: x[0] if isinstance(x, tuple) else x for n, x in seen.items()}
        got = gradients(loss({"": output, **results}, seed), {**operands, **case.learned})
    dtype, finer = coarser(case.query.dtype)
    right = of_oracle(case, readouts, torch.float64, 0, seed)
    low = low_precision(case, readouts, dtype, right, seed)
    for n, gradient in got.items():
        assert gradient.isfinite().all(), n
        check_close(f"gradient of {n}", gradient, right[n].double(), [x[n] for x in low], finer)
