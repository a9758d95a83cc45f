"""Plans: which engine, why not another, what is visited and held."""

from __future__ import annotations

import pytest
import torch
from checks import draw, operands

import einsight as es
from einsight.engines import native
from einsight.planning import Plan

q, k, v = operands(e=11)


@pytest.fixture(autouse=True)
def without_a_compiled_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned where there was no compiler; tests/engines/test_native_calls.py has the other plans."""
    monkeypatch.setattr(native.operations, "kernel", None)


def others(plan: Plan) -> dict[str, str]:
    """The refusals but for those of the engines that aren't there."""
    return {name: why for name, why in plan.refusals.items() if name not in ("native", "torch_flash", "triton")}


def test_the_output_alone() -> None:
    plan = es.plan(q, k, v)
    assert (plan.engine, others(plan), plan.visits, plan.pairs, plan.holds) == ("torch_sdpa", {}, 420, 420, None)
    assert [line for line in str(plan).splitlines() if "native: it is not compiled" not in line] == [
        "engine  torch_sdpa: the output alone, without a mask or causal from the first key, without other settings",
        "visits  420 pairs of query and key of 420 (100.0%)",
        "holds   what PyTorch's kernel needs beside arguments and results",
    ]
    assert es.plan(q, k, v, es.causal(), offset=0).visits == 12 * (1 + 2 + 3 + 4 + 5)


def test_why_not_another() -> None:
    for reason, settings in {
        "it gives the output alone, no readouts": {"readouts": [es.Entropy()]},
        "of masks it has only causal, with query 0 at key 0": {"mask": es.window(2, 0), "offset": 0},
        "it has no softcap": {"softcap": 2.0},
        "it has no sink": {"sink": 0.0},
        "it has no score_mod": {"score_mod": lambda s, b, h, p, j: s, "offset": 0},
        "a NaN would pass where its bias hides a key by −∞": {"bias": torch.zeros(7)},
        "its dropout draws other numbers than the engines with readouts": {"dropout": 0.5},
    }.items():
        plan = es.plan(q, k, v, **settings)
        assert plan.engine == "stream" and others(plan) == {"torch_sdpa": reason}
        assert f"not     torch_sdpa: {reason}" in str(plan)
    assert others(es.plan(q, k)) == {"torch_sdpa": "it gives the output alone, no readouts"}
    assert others(es.plan(q, k, v[..., :3])) == {"torch_sdpa": "on a CPU it holds the whole matrix when e ≠ d"}
    assert others(es.plan(q[:0], k[:0], v[:0])) == {"torch_sdpa": "a dimension is empty"}


def test_an_engine_by_name() -> None:
    plan = es.plan(q, k, v, engine="reference")
    assert plan.engine == "reference" and plan.refusals == {} and plan.holds == 420 * 13


def test_a_window_visits_what_it_holds() -> None:
    long = draw(1, 2, 4096, 16)
    plan = es.plan(long, long, long, es.window(64, 0), readouts=es.Entropy())
    assert plan.visits < 2 * 4096 * (65 + 128)
    assert es.plan(long, long, long, es.causal(), readouts=es.Entropy()).visits < 0.55 * plan.pairs
    assert plan.holds is not None and plan.holds < 8 * 2**20 + 1


def test_documents_visit_their_own() -> None:
    long = draw(1, 1, 4096, 16)
    lengths = torch.tensor([0, 1024, 2048, 3072, 4096])
    plan = es.plan(long, long, long, es.documents(cu_seqlens=lengths), engine="stream")
    assert plan.visits == 4 * 1024**2


def test_only_the_queries_asked_for_are_visited() -> None:
    assert es.plan(q, k, readouts=[es.Rows([4]), es.TopK(2, queries=-1)]).visits == 2 * 6 * 7
    assert es.plan(q, k, readouts=[es.Rows([4]), es.Entropy()]).visits == 420
    assert es.plan(q, k, v, readouts=[es.Rows([4])]).visits == 420


def test_nothing_to_visit() -> None:
    plan = es.plan(q[:0], k[:0], readouts=es.Entropy())
    assert plan.visits == plan.pairs == 0
    assert "visits  0 pairs of query and key\n" in str(plan)


def test_a_plan_for_every_size_of_memory() -> None:
    long = draw(1, 1, 1, 16).expand(1, 1, 15_000, 16)
    assert "GB beside" in str(es.plan(long, long, long, engine="reference"))
    assert "KB beside" in str(es.plan(q, k, v, engine="stream"))
    assert "MB beside" in str(es.plan(long, long, long, engine="stream"))
