"""The functions: attention over dtypes, layouts and modes, the textbook's function, merge."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import Truth, draw, operands
from engines_under_test import ENGINES, using
from oracle import Case
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import einsight as es
from einsight import formula

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param) as name:
        yield name


def causal_case(*tensors: Tensor) -> Case:
    return Case(
        *tensors, arguments={"mask": es.causal(), "offset": 2}, predicate=lambda b, h, i, p, j: j <= p, offset=2
    )


# Results have the shape of the request.


def test_results_have_the_shape_of_the_request(engine: str) -> None:
    q, k, v = operands()
    assert isinstance(es.attention(q, k, v, engine=engine), Tensor)
    output, one = es.attention(q, k, v, readouts=es.Entropy(), engine=engine)
    assert output.shape == (2, 6, 5, 13) and one.shape == (2, 6, 5)
    _, named = es.attention(q, k, v, readouts={"e": es.Entropy(), "t": es.TopK(3)}, engine=engine)
    assert list(named) == ["e", "t"] and named["t"].indices.shape == (2, 6, 5, 3)
    for several in ([es.Entropy(), es.Received()], (es.Entropy(), es.Received())):
        _, found = es.attention(q, k, v, readouts=several, engine=engine)
        assert type(found) is tuple and [x.shape for x in found] == [(2, 6, 5), (2, 6, 7)]
    assert es.attention(q, k, v, readouts=[], engine=engine)[1] == ()
    assert es.attention(q, k, v, readouts={}, engine=engine)[1] == {}


# Dtypes, layouts, modes.


@every_dtype
def test_dtypes(engine: str, dtype: torch.dtype) -> None:
    q, k, v = operands(dtype=dtype)
    output, (weights, lse, top) = es.attention(
        q, k, v, es.causal(), offset=2, readouts=[es.Weights(), es.LogSumExp(), es.TopK(2)], engine=engine
    )
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    assert output.dtype == dtype and {weights.dtype, lse.dtype, top.weights.dtype} == {inside}
    assert top.indices.dtype == torch.int64
    truth = Truth(causal_case(q, k, v))
    truth.check("output", output, lambda o: o["output"])
    truth.check("weights", weights, lambda o: o["weights"])
    truth.check("lse", lse, lambda o: o["lse"])


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers, laid out otherwise."""
    b, h, n, d = x.shape
    wide = torch.full((b, h, 2 * n + 1, 3 * d), torch.nan, dtype=x.dtype)
    wide[:, :, 1::2, ::3] = x
    return {
        "heads last": x.transpose(1, 2).contiguous().transpose(1, 2),
        "features first": x.mT.contiguous().mT,
        "every other": wide[:, :, 1::2, ::3],
        "a view that requires grad": (x.flatten().requires_grad_() * 1).view(x.shape),
        "a leaf that requires grad": x.clone().requires_grad_(),
    }


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_layouts(engine: str, layout: str) -> None:
    plain = operands()
    truth = Truth(causal_case(*plain))
    laid_out = [layouts(x.clone())[layout] for x in plain]
    output, received = es.attention(*laid_out, es.causal(), offset=2, readouts=es.Received(), engine=engine)
    truth.check("output", output, lambda o: o["output"])
    truth.check("received", received, lambda o: o["weights"].sum(2))
    assert output.requires_grad == ("grad" in layout)
    if "grad" in layout:
        output.sum().backward()


def test_expanded_operands(engine: str) -> None:
    """Stride 0, forward and backward."""
    small = draw(1, 1, 7, 11, seed=0).requires_grad_(), draw(1, 1, 1, 11, seed=1).requires_grad_()
    query, key = small[0].expand(2, 6, 7, 11), small[1].expand(2, 3, 5, 11)
    value = draw(2, 3, 5, 13, seed=2)
    output, weights = es.attention(query, key, value, readouts=es.Weights(), engine=engine)
    Truth(Case(query.detach(), key.detach(), value)).check("weights", weights, lambda o: o["weights"])
    output.sum().backward()
    assert small[0].grad is not None and small[0].grad.shape == (1, 1, 7, 11)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("learning", [False, True])
def test_modes(engine: str, mode: Any, learning: bool) -> None:
    q, k, v = (x.requires_grad_(learning) for x in operands())
    with mode():
        output, (lse, _) = es.attention(
            q, k, v, es.causal(), offset=2, readouts=[es.LogSumExp(), es.Received()], engine=engine
        )
        inside = es.AttentionWeights(q * 1, k * 1, es.causal(), offset=2, engine=engine)
        assert inside.entropy().shape == (2, 6, 5)
    assert not output.requires_grad and not lse.requires_grad
    Truth(causal_case(q.detach(), k.detach(), v.detach())).check("output", output, lambda o: o["output"])


def test_operands_made_in_inference_mode(engine: str) -> None:
    with torch.inference_mode():
        q, k, v = operands()
    slopes = torch.ones(6, requires_grad=True)
    output = es.attention(q, k, v, es.allow(torch.ones(5, 7).bool()), offset=2, engine=engine)
    assert output.shape == (2, 6, 5, 13)
    plain = operands()
    es.attention(*plain, bias=es.alibi(slopes), offset=2, engine=engine).sum().backward()
    assert slopes.grad is not None and slopes.grad.isfinite().all()


def test_nothing_is_written_into_arguments(engine: str) -> None:
    tensors = [*operands(), draw(5, 7, seed=4), torch.rand(5, 7) > 0.3, draw(6, seed=5), draw(2, 6, 5, 7, seed=6)]
    q, k, v, bias, seen, sink, scores = tensors
    before = [t.clone() for t in tensors]
    for more in ({"bias": bias}, {"score_mod": lambda s, b, h, p, j: scores}, {"sink": sink, "softcap": 2.0}):
        if engine != "reference" and "score_mod" in more:
            more = {"score_mod": lambda s, b, h, p, j: scores[b, h, p, j]}
        es.attention(q, k, v, es.allow(seen), offset=0, readouts=[es.Entropy(), es.TopK(2)], engine=engine, **more)
    assert all(map(torch.equal, tensors, before))


def test_a_score_mod_may_return_a_tensor_of_its_own() -> None:
    q, k, v = operands()
    scores = draw(2, 6, 5, 7, seed=6)
    kept = scores.clone()
    with torch.no_grad():
        _, weights = es.attention(
            q, k, v, es.causal(), offset=2, score_mod=lambda *_: scores, readouts=es.Weights(), engine="stream"
        )
    assert torch.equal(scores, kept)
    seen = torch.ones(5, 7).tril(2).bool()
    torch.testing.assert_close(weights, scores.masked_fill(~seen, -torch.inf).softmax(-1))


def test_a_score_mod_may_broadcast_and_promote(engine: str) -> None:
    q, k, v = operands()
    away = torch.linspace(0, 1, 20, dtype=torch.float64)
    output, scores = es.attention(
        q, k, v, offset=2, score_mod=lambda s, b, h, p, j: -away[(p - j).abs()], readouts=es.Scores(), engine=engine
    )
    assert scores.dtype == torch.float32 and output.dtype == torch.float32
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    assert torch.equal(scores, -away[distance].float().expand(2, 6, 5, 7))


# Autocast, as PyTorch treats its own function.


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_autocast_as_pytorch_does_it(engine: str, given: torch.dtype) -> None:
    q, k, v = operands(h=3, e=11, dtype=given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = es.attention(q, k, v, readouts=es.Weights(), engine=engine)
        assert es.attention(q, k, v, engine=engine).dtype == torch_sdpa(q, k, v).dtype == output.dtype
        assert (es.AttentionWeights(q, k, engine=engine) @ v).dtype == output.dtype
        dense = es.scaled_dot_product_attention(q, k, v)[1]
    inside = torch.float64 if given == torch.float64 else torch.float32
    assert weights.dtype == dense.dtype == inside
    cast = (q, k, v) if given == torch.float64 else tuple(x.to(torch.bfloat16) for x in (q, k, v))
    truth = Truth(Case(*cast))
    truth.check("output", output, lambda o: o["output"])
    truth.check("weights", weights, lambda o: o["weights"])


def test_autocast_of_mixed_dtypes_and_gradients(engine: str) -> None:
    q, k, v = (x.to(t).requires_grad_() for x, t in zip(operands(), DTYPES, strict=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, received = es.attention(q, k, v, readouts=es.Received(), engine=engine)
        W = es.AttentionWeights(q, k, engine=engine)
    (output.float().sum() + received.sum() + W.entropy().sum()).backward()
    assert [x.grad.dtype for x in (q, k, v)] == DTYPES[:3]


def test_autocast_switched_off_keeps_the_dtype(engine: str) -> None:
    q, k, v = operands()
    with torch.autocast("cpu", enabled=False):
        assert es.attention(q, k, v, engine=engine).dtype == torch.float32


# The textbook's function.


def test_the_textbooks_function_is_the_formula() -> None:
    q, k, v = operands(h=3, i=7)
    future = torch.ones(7, 7).triu(1).bool()
    for mask, causal in ((None, False), (future, True), (es.causal(), True)):
        output, weights = es.scaled_dot_product_attention(q, k, v, mask=mask)
        truth = Truth(Case(q, k, v, predicate=(lambda b, h, i, p, j: j <= p) if causal else None))
        for got in ((output, weights), formula.attention(q, k, v, causal)):
            truth.check("output", got[0], lambda o: o["output"])
            truth.check("weights", got[1], lambda o: o["weights"])


@pytest.mark.parametrize("shape", [(5, 7), (7,), (5, 1), (2, 1, 1, 7), (6, 1, 7), (2, 6, 5, 7), (1, 1), ()])
def test_the_textbooks_mask_broadcasts(shape: tuple[int, ...]) -> None:
    q, k, v = operands()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.6
    whole = mask.expand(2, 6, 5, 7)
    truth = Truth(Case(q, k, v, predicate=lambda b, h, i, p, j: not whole[b, h, i, j]))
    output, weights = es.scaled_dot_product_attention(q, k, v, mask)
    truth.check("output", output, lambda o: o["output"])
    truth.check("weights", weights, lambda o: o["weights"])


@every_dtype
def test_the_textbooks_weights_are_exact(dtype: torch.dtype) -> None:
    output, weights = es.scaled_dot_product_attention(*operands(dtype=dtype))
    assert output.dtype == dtype
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradients_flow_through_both_results() -> None:
    q, k, v = (x.requires_grad_() for x in operands(dtype=torch.float64))
    mask = torch.ones(5, 7).triu(3).bool()
    a, b = draw(2, 6, 5, 13, seed=8, dtype=torch.float64), draw(2, 6, 5, 7, seed=9, dtype=torch.float64)
    output, weights = es.scaled_dot_product_attention(q, k, v, mask)
    got = torch.autograd.grad((output * a).sum() + (weights * b).sum(), (q, k, v))
    key, value = (x.repeat_interleave(2, 1) for x in (k, v))
    right_weights = (q @ key.mT / 11**0.5).masked_fill(mask, -torch.inf).softmax(-1)
    loss = (right_weights @ value * a).sum() + (right_weights * b).sum()
    torch.testing.assert_close(got, torch.autograd.grad(loss, (q, k, v)))


def test_a_mask_with_pytorchs_meaning_is_warned_of() -> None:
    q, k, v = operands(i=7)
    tril = torch.ones(7, 7).tril().bool()
    for mask in (tril, tril[None, None], tril.expand(2, 6, 7, 7), torch.eye(7).bool()):
        with pytest.warns(UserWarning, match=r"write mask=~mask, or mask=einsight\.causal\(\)"):
            es.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(7, 7).triu(1).bool(),
        torch.zeros(7, 7).bool(),
        torch.ones(7).bool(),
        torch.ones(7, 1).bool(),
        torch.ones(7, 7).triu().bool(),
        torch.ones(7, 7).tril(-1).bool(),
        torch.ones(1, 1).bool(),
    ],
)
def test_other_masks_are_not_warned_of(mask: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        es.scaled_dot_product_attention(*operands(i=7), mask)


# merge


def test_merge_of_one_part_is_that_part() -> None:
    q, k, v = operands()
    output, lse = es.attention(q, k, v, readouts=es.LogSumExp())
    merged, merged_lse = es.merge([output], [lse])
    truth = Truth(Case(q, k, v))
    truth.check("output", merged, lambda o: o["output"])
    truth.check("lse", merged_lse, lambda o: o["lse"])


def test_a_part_that_sees_nothing_touches_nothing() -> None:
    q, k, v = operands()
    output, lse = es.attention(q, k, v, readouts=es.LogSumExp())
    empty, none = torch.full_like(output, torch.nan), torch.full_like(lse, -torch.inf)
    merged, merged_lse = es.merge([empty, output, empty], [none, lse, none])
    assert torch.equal(merged, output) and torch.equal(merged_lse, lse)
    merged, merged_lse = es.merge([empty, empty], [none, none])
    assert (merged == 0).all() and (merged_lse == -torch.inf).all()


def test_merge_of_far_apart_lses() -> None:
    output = draw(1, 1, 3, 5)
    merged, lse = es.merge([output, -output], [torch.full((1, 1, 3), 1e4), torch.full((1, 1, 3), -1e4)])
    assert torch.equal(merged, output) and (lse == 1e4).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_merge_keeps_the_outputs_dtype(dtype: torch.dtype) -> None:
    q, k, v = operands(dtype=dtype)
    parts = [es.attention(q, k[:, :, s], v[:, :, s], readouts=es.LogSumExp()) for s in (slice(3), slice(3, None))]
    output, lse = es.merge(*zip(*parts, strict=True))
    assert output.dtype == dtype and lse.dtype == torch.float32


def test_gradients_through_a_merge() -> None:
    q, k, v = (x.requires_grad_() for x in operands(b=1, h=2, g=1, d=2, e=3, i=3, j=5, dtype=torch.float64))

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            es.attention(q, k[:, :, s], v[:, :, s], es.causal(), offset=2 - s.start, readouts=es.LogSumExp())
            for s in (slice(0, 2), slice(2, 4), slice(4, 5))  # query 0 sees nothing of the last
        ]
        return es.merge(*zip(*parts, strict=True))

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return es.attention(q, k, v, es.causal(), offset=2, readouts=es.LogSumExp())

    assert torch.autograd.gradcheck(merged, (q, k, v), fast_mode=True)
    got, right = (torch.autograd.grad(sum(x.sin().sum() for x in f(q, k, v)), (q, k, v)) for f in (merged, whole))
    torch.testing.assert_close(got, right)
