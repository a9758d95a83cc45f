"""Whole generated problems, on every engine, against the float64 oracle inside the error budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import cases, readouts_for
from checks import Truth, drawing
from engines_under_test import ENGINES, using
from gradients import TrueGradients, floats
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case

import einsight as es

relaxed = drawing(120)


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
    truth = Truth(case)
    truth.check("output", output, lambda o: o["output"])
    assert output.dtype == case.query.dtype
    for n, (_, expected) in readouts.items():
        if n.startswith("top"):  # rounding may swap neighbours, so the weights are compared
            truth.check(n, seen[n].weights, lambda o, of=expected: of(o)[0])
            assert torch.equal(seen[n].indices == -1, expected(truth.right)[1] == -1)
        else:
            assert seen[n].dtype == (torch.float64 if case.query.dtype == torch.float64 else torch.float32)
            truth.check(n, seen[n], expected)


@pytest.mark.parametrize("engine", ENGINES)
@relaxed
@given(case=cases(dtypes=[torch.float32, torch.float64, torch.bfloat16]), data=st.data(), seed=st.integers(0, 1000))
def test_gradients(engine: str, case: Case, data: Any, seed: int) -> None:
    readouts = readouts_for(case, data.draw)
    if case.bias is not None and case.query.dtype == torch.bfloat16:
        readouts.pop("scores", None)  # their coarse gradient in a bias that broadcasts measures the sum, not us
    truth = TrueGradients(case, readouts, seed)
    operands = {n: getattr(case, n).detach().requires_grad_() for n in ("query", "key", "value")}
    with using(engine) as name:
        output, seen = es.attention(
            *operands.values(), readouts={n: r for n, (r, _) in readouts.items()}, engine=name, **case.arguments
        )
        truth.check(truth.of(floats(output, seen), operands))
