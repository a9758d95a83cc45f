"""The Triton engine under its interpreter; tests/engines/test_triton.py runs this file in a process of its own, since
the interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from cases import cases
from checks import ORDERS, check_close, draw, drawing
from gradients import TrueGradients, floats
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case
from torch import Tensor
from torch.utils._pytree import tree_leaves

import einsight as es
from einsight.engines import torch_flash, triton
from einsight.engines.triton import running, trust
from einsight.pose import pose

READOUTS: dict[str, tuple[es.Readout, Any]] = {
    "lse": (es.LogSumExp(), lambda o: o["lse"]),
    "max": (es.MaxScore(), lambda o: oracle.max_score(o["scores"])),
    "entropy": (es.Entropy(), lambda o: oracle.entropy(o["weights"])),
    "received": (es.Received(), lambda o: o["weights"].sum(2)),
    "mean": (es.Received(mean=True), lambda o: o["weights"].sum(2) / o["visible"].sum(2).clamp(min=1)),
}


def without_what_it_refuses(case: Case) -> Case:
    """It has no score_mod, and of biases the gradient of alibi alone."""
    arguments = {n: x for n, x in case.arguments.items() if n not in ("score_mod", "bias")}
    learned = {n: x for n, x in case.learned.items() if n in ("sink", "slopes")}
    bias = None
    if "slopes" in learned:
        slopes, away = learned["slopes"], (case.positions()[:, None, :, None] - torch.arange(case.sizes[4])).abs()
        arguments["bias"] = es.alibi(slopes)
        bias = lambda dtype: -slopes.to(dtype)[:, None, None] * away  # noqa: E731
    return replace(case, arguments=arguments, learned=learned, bias=bias, score_mod=None)


@drawing(6)
@given(case=cases(dtypes=[torch.float32, torch.bfloat16]), data=st.data(), seed=st.integers(0, 1000))
def test_gradients(case: Case, data: Any, seed: int) -> None:
    case = without_what_it_refuses(case)
    names = data.draw(st.lists(st.sampled_from(sorted(READOUTS)), unique=True))
    readouts = {n: READOUTS[n] for n in names}
    truth = TrueGradients(case, readouts, seed)
    operands = {n: getattr(case, n).detach().requires_grad_() for n in ("query", "key", "value")}
    asked = {n: r for n, (r, _) in readouts.items()}
    output, seen = es.attention(*operands.values(), readouts=asked, engine="triton", **case.arguments)
    truth.check(truth.of(floats(output, seen), operands))


# More than one tile of 16 rows and 16 keys in each direction, groups of heads, e ≠ d, and dimensions up to 256.
SIZES = {"tiles": (1, 4, 2, 37, 41, 17, 19), "decode": (2, 6, 2, 1, 53, 24, 8), "deep": (1, 1, 1, 3, 19, 256, 200)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, dtype: torch.dtype) -> None:
    b, h, g, i, j, d, e = SIZES[size]
    case = Case(
        draw(b, h, i, d, dtype=dtype), draw(b, g, j, d, seed=1, dtype=dtype), draw(b, g, j, e, seed=2, dtype=dtype)
    )
    case.offset = j - i
    case.predicate = lambda b, h, i, p, j: j <= p
    asked = {n: r for n, (r, _) in READOUTS.items()}
    output, seen = es.attention(
        case.query, case.key, case.value, es.causal(), offset=j - i, readouts=asked, engine="triton"
    )
    right, low = oracle.attend(case), [oracle.attend(case, dtype, order) for order in range(ORDERS)]
    check_close("output", output, right["output"], [o["output"] for o in low])
    for n, (_, expected) in READOUTS.items():
        check_close(n, seen[n], expected(right), [expected(o) for o in low])


def test_a_readout_changes_no_bit_of_the_output() -> None:
    q, k, v = draw(1, 4, 19, 5), draw(1, 2, 23, 5, seed=1), draw(1, 2, 23, 7, seed=2)
    alone = es.attention(q, k, v, es.window(7, 2), offset=3, engine="triton")
    for readout in (es.Entropy(), es.Share(es.window(1, 0)), es.Received(), es.Distance(), es.MaxScore()):
        output, _ = es.attention(q, k, v, es.window(7, 2), offset=3, readouts=readout, engine="triton")
        assert torch.equal(alone, output), readout


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_changes_no_bit(spoilt: float) -> None:
    q, k, v = draw(1, 2, 19, 5), draw(1, 1, 19, 5, seed=1), draw(1, 1, 19, 7, seed=2)
    asked = [es.Entropy(), es.MaxScore(), es.Rows([3, 9]), es.Pool(4)]
    before = es.attention(q, k, v, es.causal(), readouts=asked, engine="triton")
    k[:, :, 11] = v[:, :, 12] = spoilt
    after = es.attention(q, k, v, es.causal(), readouts=asked, engine="triton")
    assert torch.equal(before[0][:, :, :11], after[0][:, :, :11])
    for x, y in zip(before[1][:2], after[1][:2], strict=True):
        assert torch.equal(x[:, :, :11], y[:, :, :11])
    assert torch.equal(before[1][2], after[1][2])
    right = es.attention(q, k, v, es.causal(), engine="reference")
    got = after[0]
    assert torch.equal(got.isnan(), right.isnan()) and torch.equal(got.isposinf(), right.isposinf())


def test_a_value_that_is_infinite_is_seen_as_such() -> None:
    q, k, v = draw(1, 1, 19, 5), draw(1, 1, 19, 5, seed=1), draw(1, 1, 19, 7, seed=2)
    v[0, 0, 4, 0], v[0, 0, 7, 0], v[0, 0, 5, 1], v[0, 0, 6, 2] = torch.inf, -torch.inf, -torch.inf, torch.nan
    got, right = (es.attention(q, k, v, es.causal(), engine=engine) for engine in ("triton", "reference"))
    torch.testing.assert_close(got, right, equal_nan=True)


def test_gradients_where_a_hidden_value_is_nan() -> None:
    leaves = [draw(1, 1, 5, 3, seed=n).requires_grad_() for n in range(3)]
    with torch.no_grad():
        leaves[2][0, 0, 4] = torch.nan
    output = es.attention(*leaves, es.causal(), engine="triton")
    found = torch.autograd.grad(output[:, :, :4].sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in found)


def test_second_derivatives() -> None:
    q, k, v = (draw(1, 1, 3, 2, seed=n).requires_grad_() for n in range(3))
    first = []
    for engine in ("triton", "reference"):
        output, entropy = es.attention(q, k, v, es.causal(), readouts=es.Entropy(), engine=engine)
        (grad,) = torch.autograd.grad(output.sum() + entropy.square().sum(), q, create_graph=True)
        first.append(torch.autograd.grad(grad.square().sum(), (q, k, v), allow_unused=True))
    for x, y in zip(*first, strict=True):
        torch.testing.assert_close(x, y)


def test_the_strongest_are_looked_for_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from einsight.engines.triton import passes

    q, k = draw(1, 2, 9, 5), draw(1, 2, 11, 5, seed=1)
    whole = es.AttentionWeights(q, k, engine="triton").topk(3)
    monkeypatch.setattr(passes, "AT_ONCE", 50)
    parts = es.AttentionWeights(q, k, engine="triton").topk(3)
    assert torch.equal(whole.weights, parts.weights) and torch.equal(whole.indices, parts.indices)


def test_more_shares_than_the_forward_sums() -> None:
    q, k = draw(1, 2, 5, 3), draw(1, 2, 7, 3, seed=1)
    W = es.AttentionWeights(q, k, offset=2, engine="triton")
    asked = [es.Share(es.window(n, 0)) for n in range(9)] + [es.Diagonal(-n) for n in range(3)]
    away = torch.arange(5)[:, None] + 2 - torch.arange(7)
    for n, share in enumerate(W.read(asked)):
        on = (away >= 0) & (away <= n) if n < 9 else away == n - 9
        torch.testing.assert_close(share, (W.dense() * on).sum(-1))


@pytest.mark.parametrize(
    "others", [(), (es.LogSumExp(),), (es.Entropy(), es.MaxScore()), (es.Diagonal(-1),), (es.Weights(),)]
)
def test_scores_with_and_without_weights(others: tuple[es.Readout, ...]) -> None:
    """Scores are made without what the first pass saves for weights, which may not be there."""
    q, k, v = draw(2, 4, 19, 5), draw(2, 2, 23, 5, seed=1), draw(2, 2, 23, 7, seed=2)
    asked = (es.Scores(), *others)
    (_, got), (_, right) = (
        es.attention(q, k, v, es.causal(), offset=3, readouts=asked, engine=engine)
        for engine in ("triton", "reference")
    )
    for x, y in zip(got, right, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("readout", [es.Rows([]), es.Received([]), es.Received([], mean=True), es.TopK(2, queries=[])])
def test_readouts_of_no_queries(readout: es.Readout) -> None:
    q, k, v = draw(2, 4, 19, 5), draw(2, 2, 23, 5, seed=1), draw(2, 2, 23, 7, seed=2)
    (_, got), (_, right) = (
        es.attention(q, k, v, es.causal(), offset=3, readouts=readout, engine=engine)
        for engine in ("triton", "reference")
    )
    for x, y in zip(tree_leaves(got), tree_leaves(right), strict=True):
        assert x.shape == y.shape and torch.equal(x.float(), y.float())


def test_output_by_flash() -> None:
    q, k, v = (draw(1, 2, 19, 8, seed=n, dtype=torch.bfloat16) for n in range(3))
    asked = [es.Received(), es.Rows([-1]), es.LogSumExp()]
    for mask in (None, es.causal()):
        assert torch_flash.refuses(pose(q, k, v, mask, readouts=tuple(asked))) is None
        output, seen = es.attention(q, k, v, mask, readouts=asked, engine="torch_flash")
        right = es.attention(q.double(), k.double(), v.double(), mask, readouts=asked, engine="reference")
        eps = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(output.double(), right[0], rtol=0, atol=2 * eps * v.abs().max().item())
        for x, y in zip(seen, right[1], strict=True):
            # PyTorch's kernel for CPUs, which stands for its flash kernel here, has rougher exponentials.
            torch.testing.assert_close(x.double(), y, rtol=eps / 64, atol=eps / 64)
    plan = es.plan(q, k, v, readouts=es.Received([3, 4]), engine="torch_flash")
    assert "engine  torch_flash: output: torch flash; readouts: triton, 2 of 19 rows" in str(plan)
    v[0, 0, 18] = torch.nan  # which every query but the last doesn't see
    output, _ = es.attention(q, k, v, es.causal(), readouts=asked, engine="torch_flash")
    assert bool(output[:, :, :18].isfinite().all()) and bool(output[0, 0, 18].isnan().all())


def test_what_it_holds() -> None:
    """Two int32 ends of each query's interval; two float32 of each row where weights are made."""
    q, k, v = (draw(2, 3, 5, 8, seed=n) for n in range(3))
    for readout, right in ((es.Entropy(), 8 * 5), (es.Received(), 8 * 5 + 8 * 2 * 3 * 5)):
        plan = es.plan(q, k, v, es.causal(), readouts=readout, engine="triton")
        assert plan.holds == right and f"about {right} bytes beside" in str(plan)


def test_what_flash_refuses() -> None:
    q, k, v = (draw(1, 2, 5, 8, seed=n, dtype=torch.bfloat16) for n in range(3))
    for message, changes in {
        "it gives the output together with readouts": {"readouts": ()},
        "the readouts come from our own first pass": {"readouts": (es.Entropy(),)},
        "it has no sink": {"sink": 0.0},
        "for heads of their own, d = e": {"key": k[:, :1], "value": v[:, :1]},
    }.items():
        arguments: dict[str, Any] = {"key": k, "value": v, "readouts": (es.Received(),), **changes}
        assert message in str(torch_flash.refuses(pose(q, **arguments)))
    wide = pose(q.float(), k.float(), v.float(), readouts=(es.Received(),))
    assert "half precision" in str(torch_flash.refuses(wide))


def test_what_is_refused() -> None:
    q, k, v = (draw(1, 2, 5, 3, seed=n) for n in range(3))

    def reason(**changes: Any) -> str | None:
        arguments = {"query": q, "key": k, "value": v, "offset": 0, **changes}
        return triton.refuses(pose(**arguments))

    learned = q.clone().requires_grad_()
    assert reason() is None and reason(query=learned) is None
    for message, changes in {
        "it computes in float32 at most": {"query": q.double(), "key": k.double(), "value": v.double()},
        "at most 256 dimensions": {"value": draw(1, 2, 5, 257)},
        "it can't call score_mod": {"score_mod": lambda s, b, h, p, j: s},
        "it has no dropout": {"dropout": 0.5},
        "there are no items": {"key": k[:, :, :0], "value": v[:, :, :0]},
        "it has no derivative of Share": {"query": learned, "readouts": (es.Share(es.causal()),)},
        "for one choice of queries": {"query": learned, "readouts": (es.Received([1]), es.Received([2]))},
        "of biases it has the derivative of alibi alone": {"bias": torch.zeros(5).requires_grad_()},
    }.items():
        assert message in str(reason(**changes))


def test_a_device_that_is_off_is_refused_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(problem: Any) -> Any:
        output, results = running.compute(problem)
        return output, tuple(x * 1.01 for x in results)

    monkeypatch.setattr(trust, "trusted", set())
    with pytest.raises(RuntimeError, match=r"the triton engine is wrong on cpu \(lse.*say engine='stream'"):
        trust.check(torch.device("cpu"), off)
    assert trust.trusted == set()
    trust.check(torch.device("cpu"), running.compute)
    assert trust.trusted == {torch.device("cpu")}


def test_the_same_bits_each_time() -> None:
    q, k = draw(1, 4, 37, 5), draw(1, 2, 41, 5, seed=1)
    first, second = (es.AttentionWeights(q, k, engine="triton").received() for _ in range(2))
    assert torch.equal(first, second)


def test_strides_of_any_kind() -> None:
    q = draw(1, 7, 2, 5).transpose(1, 2)
    k, v = draw(1, 2, 10, 9, seed=1)[:, :, ::2, ::2], draw(1, 1, 3, 5, seed=2).mT.expand(1, 2, 5, 3)
    got, right = (es.attention(q, k, v, engine=engine) for engine in ("triton", "reference"))
    torch.testing.assert_close(got, right)
    negated: Tensor = torch._neg_view(q)
    got, right = (es.attention(negated, k, v, engine=engine) for engine in ("triton", "reference"))
    torch.testing.assert_close(got, right)
