"""The benchmark runs, and says what it should; how fast anything is is no matter of a test."""

from __future__ import annotations

import gc
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import einsight as es
from einsight import bench as benchmark


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_matmul", lambda: 100.0)
    monkeypatch.setattr(benchmark, "_peak", lambda: 200.0)
    real = benchmark.cases
    monkeypatch.setattr(benchmark, "cases", lambda flex: (case for case in real(flex) if case.group == "tiny"))


def test_table(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    rows = benchmark.bench(seconds=0.0, flex=False)
    assert [row.way for row in rows] == ["SDPA", "einsight"]
    assert rows[0].ratio == 1.0
    printed = capsys.readouterr()
    assert "tiny" in printed.out and "einsight" in printed.out
    assert "tiny" in printed.err


def test_json(quick: None) -> None:
    out = io.StringIO()
    benchmark.bench(seconds=0.0, flex=False, json=True, out=out)
    facts, *rows = map(json.loads, out.getvalue().splitlines())
    assert facts["peak_gflops"] == 200.0
    assert [row["way"] for row in rows] == ["SDPA", "einsight"]
    assert all(row["seconds"] > 0 for row in rows)


def test_what_a_compiler_refuses_is_said(quick: None) -> None:
    def refused() -> None:
        raise RuntimeError("no compiler\nand more")

    case = benchmark.Case("forward", "x", {"SDPA": lambda: None, "flex_attention": refused}, useful=1.0)
    rows = benchmark._measure(case, 0.0, None, 1.0)
    assert rows[1].why_not == "RuntimeError: no compiler"
    assert "no compiler" in benchmark._line(rows[1])


def test_only_an_uncompiled_rival_may_fail() -> None:
    def refused() -> None:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        benchmark._measure(benchmark.Case("forward", "x", {"SDPA": refused}), 0.0, None, 1.0)


def test_some_groups_and_the_mean_of_their_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = benchmark.Case("forward", "x", {"SDPA": lambda: None, "einsight": lambda: None})
    monkeypatch.setattr(benchmark, "_matmul", lambda: 100.0)
    monkeypatch.setattr(benchmark, "_peak", lambda: None)
    monkeypatch.setattr(benchmark, "cases", lambda flex: iter([case, replace(case, group="tiny"), case]))
    rows = benchmark.bench(["forward"], seconds=0.0)
    assert [row.group for row in rows] == ["forward"] * 4
    ratios = [row.ratio for row in rows if row.way == "einsight"]
    said = f"geometric mean of the ratios {math.sqrt(math.prod(ratios)):.2f}, smallest {min(ratios):.2f}"
    printed = capsys.readouterr().out
    assert f"forward: {said}\n" in printed and "multiply-adds alone unknown" in printed


def test_every_group_has_a_case_and_two_have_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_flex", lambda *given: lambda: None)
    cases = [(case.group, "flex_attention" in case.ways) for case in benchmark.cases(flex=True)]
    assert tuple(dict.fromkeys(group for group, _ in cases)) == benchmark.GROUPS
    assert [group for group, flex in cases if flex] == ["forward", "window"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_ways_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = benchmark._tensors((1, 2, 128, 16))
    future = torch.ones(128, 128, dtype=torch.bool).triu(1)
    want, weights = es.scaled_dot_product_attention(q, k, v, future)
    output, dense = benchmark._five_lines(q, k, v, future)
    assert_close(output, want)
    assert_close(dense, weights)
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    assert_close(benchmark._flex(q, k, v, lambda b, h, i, j: i >= j)(), want)
    step = benchmark._step(lambda *operands: es.attention(*operands, es.causal()), q, k, v)
    theirs = benchmark._step(lambda *operands: benchmark._five_lines(*operands, future)[0], q, k, v)
    for ours, other in zip(step(), theirs(), strict=True):
        assert_close(ours, other)


def test_what_the_machine_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert benchmark._matmul(64) > 0
    kernel = benchmark.native.operations.kernel
    assert kernel is None or benchmark._peak() > 0
    monkeypatch.setattr(benchmark.native.operations, "kernel", None)
    assert benchmark._peak() is None


def test_memory_is_counted_where_linux_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what is freed meanwhile would hide as much
    found = benchmark._memory(lambda: torch.ones(1 << 26))
    assert found is None if sys.platform != "linux" else found > 1 << 27
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert benchmark._memory(lambda: None) is None
