"""The benchmark runs, and says what it should; how fast anything is is no matter of a test."""

from __future__ import annotations

import io
import json

import pytest

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
