"""`einsight check`: what is right passes, what is spoiled is named."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer")

from einsight import check as checking
from einsight import cli
from einsight.budgets import MANY, Truth, _judged
from einsight.engines import choose, stream

SOME = ("causal", "softcap")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the grid."""
    monkeypatch.setattr(checking, "FEATURES", {name: checking.FEATURES[name] for name in SOME})
    monkeypatch.setattr(checking, "DTYPES", (torch.float32, torch.float64))


def run(*words: str) -> int | None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["einsight", "check", *words])
        cli.main()
    return left.value.code


def spoiled(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """A stream engine whose output under softcap is changed."""
    right = stream.run

    def wrong(problem: Any) -> Any:
        output, results = right(problem)
        return (output if problem.softcap is None else change(output)), results

    monkeypatch.setattr(stream, "run", wrong)


def test_every_engine_is_inside_its_budget(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = " ".join(capsys.readouterr().out.split())
    engines = checking.engines()
    elsewhere = {"torch_flash", "triton"} if checking.operations.kernel else {"torch_flash", "triton", "native"}
    assert {name for name, _ in engines.values()} == set(choose.ENGINES) - elsewhere
    assert all(name in out for name in engines)
    assert "all are inside their budgets" in out
    assert "over budget" not in out


def test_a_spoiled_result_is_named(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled(monkeypatch, lambda output: output + 1e-4)
    assert run() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "over budget: stream, float32, softcap, output: error 0.0001, budget" in out
    assert "over budget: stream, float64, softcap, output" in out
    assert out.count("over budget:") == 2


def test_a_spoiled_gradient_is_named(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: Tensor) -> Tensor:
            return output.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 1.001

    spoiled(monkeypatch, Spoiled.apply)
    assert run() == 1
    assert "over budget: stream, float32, softcap, gradient of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_is_over_any_budget(wrong: float, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    spoiled(monkeypatch, lambda output: output.masked_fill(output == output.max(), wrong))
    out = io.StringIO()
    rows = checking.check(json=True, out=out)
    assert {(row.engine, row.feature) for row in rows if row.ratio > 1} == {("stream", "softcap")}
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["over"] for line in told] == [row.ratio > 1 for row in rows]
    assert [line["error"] for line in told if line["over"]] == [None, None]


def test_a_wrong_key_of_the_strongest_is_found() -> None:
    (trial,) = checking.FEATURES["top-k"](torch.float32)
    truth = Truth(trial)
    found = trial.results(choose.ENGINES["reference"].run, trial.leaves)
    assert all(error <= budget for _, error, budget in truth.judge(found))
    found["top-k keys"] = found["top-k keys"].flip(-1)
    judged = {result: error / budget for result, error, budget in truth.judge(found)}
    assert judged["top-k keys"] > 1 >= judged["top-k"]


def test_what_is_over_the_budget_of_few_orders_is_judged_by_many() -> None:
    (trial,) = checking.FEATURES["rows"](torch.float32)
    truth = Truth(trial)
    rows = truth.right["rows"].detach().float()
    few = truth.judge({"rows": rows})[0].budget
    truth._measure(MANY)
    many = truth.judge({"rows": rows})[0].budget
    assert few < many
    spoiled = rows.flatten().index_add(0, torch.tensor([0]), torch.tensor([(few + many) / 2])).view_as(rows)
    again = Truth(trial)
    with torch.no_grad():  # as a forward is judged
        (judged,) = again.judge({"rows": spoiled})
    assert few < judged.error <= judged.budget == many


def test_every_readout_is_in_the_grid() -> None:
    from einsight import readouts

    asked = {type(readout) for readout in checking._READOUTS.values()}
    every = {kind for kind in vars(readouts).values() if isinstance(kind, type) and issubclass(kind, readouts.Readout)}
    assert {kind for kind in every if not kind.__name__.startswith("_")} - {readouts.Readout} == asked


def test_a_rule_of_ones_own_is_in_the_grid() -> None:
    trial, _ = checking.FEATURES["rule"](torch.float32)
    found = trial.results(choose.ENGINES["stream"].run, trial.leaves)
    assert all(error <= budget for _, error, budget in Truth(trial).judge(found))


def test_another_shape_is_over_any_budget_and_nothing_finite_within() -> None:
    right = torch.ones(3, dtype=torch.float64)
    assert _judged("x", torch.ones(2), right, []) == ("x", torch.inf, 0.0)
    assert _judged("x", right, right - torch.inf, []) == ("x", torch.inf, 0.0)
    assert _judged("x", right - torch.inf, right - torch.inf, []) == ("x", 0.0, 0.0)
