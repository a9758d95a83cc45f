"""Kinds of fault that others have had, each as the smallest input that shows it, on every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engines_under_test import ENGINES, using
from torch import Tensor
from torch.testing import assert_close

import einsight as es

inf = float("inf")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param) as name:
        yield name


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(b: int, h: int, i: int, j: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(draw(b, h, n, d, seed=s).requires_grad_() for s, n in enumerate((i, j, j)))


def test_a_query_that_may_see_nothing(engine: str) -> None:  # pytorch#103749
    q, k, v = qkv(1, 2, 6, 10, 8)
    seen = torch.ones(6, 10).tril().bool()
    seen[5] = False
    output, (weights, lse, entropy, largest) = es.attention(
        q, k, v, es.allow(seen), scale=0.125, engine=engine,
        readouts=[es.Weights(), es.LogSumExp(), es.Entropy(), es.MaxScore()],
    )  # fmt: skip
    assert (output[:, :, 5] == 0).all() and (weights[:, :, 5] == 0).all() and (entropy[:, :, 5] == 0).all()
    assert (lse[:, :, 5] == -inf).all() and (largest[:, :, 5] == -inf).all()
    (output.sum() + weights.square().sum() + lse[:, :, :5].sum() + entropy.sum()).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[:, :, 5] == 0).all()


def test_only_a_corner_may_be_seen(engine: str) -> None:  # pytorch#103963
    q, k, v = qkv(1, 1, 8, 8, 8)
    seen = torch.zeros(8, 8, dtype=torch.bool)
    seen[:4, :4] = True
    output, weights = es.attention(q, k, v, es.allow(seen), readouts=es.Weights(), engine=engine)
    assert (output[:, :, 4:] == 0).all() and not output.isnan().any() and not weights.isnan().any()


def test_a_head_that_is_wholly_masked(engine: str) -> None:  # pytorch#160064, #152028, #41508
    q, k, v = qkv(1, 3, 5, 5, 7)
    forbidden = torch.zeros(1, 3, 5, 5, dtype=torch.bool)
    forbidden[:, 2] = True
    output, weights = es.attention(q, k, v, es.forbid(forbidden), readouts=es.Weights(), engine=engine)
    assert (weights[:, 2] == 0).all() and (output[:, 2] == 0).all()
    if engine != "auto":
        assert torch.equal(output, es.attention(q, k, v, es.forbid(forbidden), engine=engine))
    output.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_a_query_of_nan(engine: str) -> None:  # pytorch#141128
    q = torch.full((2, 4, 16, 8), torch.nan)
    k, v = draw(2, 4, 16, 8, seed=1), draw(2, 4, 16, 8, seed=2)
    for mask in (None, es.causal()):
        assert es.attention(q, k, v, mask, engine=engine).isnan().all()


def test_two_masks_together(engine: str) -> None:  # pytorch#187801
    q, k, v = qkv(2, 1, 5, 5, 3)
    keep = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]])
    _, weights = es.attention(q, k, v, es.padding(keep) & es.causal(), readouts=es.Weights(), engine=engine)
    both = keep.bool()[:, None, None] & torch.ones(5, 5).tril().bool()
    assert torch.equal(weights > 0, both.expand_as(weights))


def test_causal_with_fewer_queries_than_keys(engine: str) -> None:  # pytorch#103082, #110144, mlx#2835
    q, k, v = qkv(1, 1, 2, 6, 4)
    for offset, counts in ((0, [1, 2]), (4, [5, 6])):
        _, weights = es.attention(q, k, v, es.causal(), offset=offset, readouts=es.Weights(), engine=engine)
        assert (weights > 0).sum(-1).flatten().tolist() == counts
    with pytest.raises(ValueError, match=r"offset=4 \(j_len - i_len\).*offset=0 if"):
        es.attention(q, k, v, es.causal(), engine=engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lowest", ["finfo.min", -1e9])
def test_float_masks_that_are_added(engine: str, dtype: torch.dtype, lowest: str | float) -> None:
    # transformers#27114, OLMo#323
    q, k, v = (draw(1, 2, 5, 3, seed=s, dtype=dtype) for s in range(3))
    low = torch.finfo(dtype).min if lowest == "finfo.min" else max(lowest, torch.finfo(dtype).min)
    padding = torch.zeros(5, dtype=dtype).masked_fill(torch.tensor([1, 1, 1, 0, 0]).bool(), low)
    future = torch.zeros(5, 5, dtype=dtype).masked_fill(torch.ones(5, 5).triu(1).bool(), low)
    for bias in (padding + future, es.alibi(torch.zeros(2)) + padding + future):
        output, (weights, lse) = es.attention(
            q, k, v, bias=bias, readouts=[es.Weights(), es.LogSumExp()], engine=engine
        )
        assert not output.isnan().any() and not weights.isnan().any() and not lse.isnan().any()
        assert (weights[:, :, 3, 3] > 0.99).all() and (weights[:, :, 4, 4] > 0.01).all()


def test_dropout_and_the_weights_before_it(engine: str) -> None:  # pytorch#42929, #90842
    if engine == "auto":
        pytest.skip("auto is one of the others")
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 64, 2), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 1)
    output, weights = es.attention(q, k, v, dropout=0.2, readouts=es.Weights(), engine=engine)
    assert (weights == 1).all()
    assert set(output.flatten().tolist()) == {0.0, 1.25}


def test_permuted_operands(engine: str) -> None:  # pytorch#181133
    q, k, v = (draw(84, 3, 3, 64, seed=s).permute(0, 2, 1, 3) for s in range(3))
    assert_close(
        es.attention(q, k, v, engine=engine),
        es.attention(q.contiguous(), k.contiguous(), v.contiguous(), engine=engine),
        rtol=0,
        atol=1e-6,
    )


def test_another_scale_on_the_same_shapes(engine: str) -> None:  # pytorch#184122
    q, k, v = qkv(1, 1, 5, 5, 4)
    assert not torch.allclose(es.attention(q, k, v, engine=engine), es.attention(q, k, v, scale=2.0, engine=engine))


def test_an_incoming_gradient_of_other_strides(engine: str) -> None:  # pytorch#133671
    q, k, v = qkv(2, 2, 49, 49, 32)
    gradient = draw(2, 2, 32, 49, seed=9).mT
    for mask in (None, es.causal()):
        found = []
        for incoming in (gradient, gradient.contiguous()):
            output = es.attention(q, k, v, mask, engine=engine)
            found.append(torch.autograd.grad(output, (q, k, v), incoming))
        for one, other in zip(*found, strict=True):
            assert_close(one, other, rtol=0, atol=1e-6)


def test_causal_and_weights_asked_for(engine: str) -> None:  # keras#23038
    q, k, v = qkv(2, 3, 7, 7, 5)
    output, weights = es.attention(q, k, v, es.causal(), readouts=es.Weights(), engine=engine)
    assert (weights.triu(1) == 0).all()
    assert_close(output, es.attention(q, k, v, es.causal(), engine=engine), rtol=0, atol=1e-6)


def test_valid_lengths_per_item(engine: str) -> None:  # jax#23349
    q, k, v = qkv(8, 2, 5, 7, 3)
    lengths = torch.arange(8)
    _, weights = es.attention(q, k, v, es.lengths(lengths), readouts=es.Weights(), engine=engine)
    beyond = torch.arange(7) >= lengths[:, None, None, None]
    assert (weights.masked_select(beyond.expand_as(weights)) == 0).all()
    assert_close(weights.sum(-1), (lengths > 0).float()[:, None, None].expand(8, 2, 5), rtol=0, atol=1e-6)


def test_masks_broadcast(engine: str) -> None:  # jax#28974 and transformer#40
    q, k, v = qkv(2, 3, 5, 7, 3)
    keys = torch.arange(7) < torch.tensor([4, 6])[:, None]
    _, weights = es.attention(q, k, v, es.allow(keys[:, None, None]), readouts=es.Weights(), engine=engine)
    assert torch.equal(weights > 0, keys[:, None, None].expand_as(weights))
    queries = torch.arange(5) < torch.tensor([2, 5])[:, None]
    output, weights = es.attention(q, k, v, es.allow(queries[:, None, :, None]), readouts=es.Weights(), engine=engine)
    assert torch.equal(weights > 0, queries[:, None, :, None].expand_as(weights))
    assert (output[0, :, 2:] == 0).all()


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_masks_that_could_mean_either(dtype: torch.dtype) -> None:
    # LLMs-from-scratch#1061, pytorch#170400, diffusers#14342
    q, k, v = qkv(1, 1, 5, 5, 3)
    with pytest.raises(TypeError, match=r"es\.allow\(mask.*es\.forbid\(mask"):
        es.attention(q, k, v, torch.ones(5, 5, dtype=dtype))


@pytest.mark.parametrize(("b", "i", "j"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_dimensions(engine: str, b: int, i: int, j: int) -> None:  # pytorch#195812, flash-attention#2568
    q, k, v = torch.ones(b, 2, i, 3), torch.ones(b, 2, j, 3), torch.ones(b, 2, j, 5)
    output, (lse, received) = es.attention(q, k, v, readouts=[es.LogSumExp(), es.Received()], engine=engine)
    assert output.shape == (b, 2, i, 5) and (output == (0 if j == 0 else 1)).all()
    assert lse.shape == (b, 2, i) and (j > 0 or (lse == -inf).all())
    assert received.shape == (b, 2, j)


def test_sums_of_half_precision_weights(engine: str) -> None:  # awslabs/keys_values#84
    q, k, v = (draw(1, 4, 257, 16, seed=s, dtype=torch.bfloat16) for s in range(3))
    received = es.attention(q, k, v, es.causal(), readouts=es.Received(), engine=engine)[1]
    right = es.AttentionWeights(q.double(), k.double(), es.causal(), engine="reference").sum(-2)
    assert received.dtype == torch.float32
    assert torch.equal(received.argsort(-1), right.argsort(-1))


# Isolation: pytorch#101967 and its kind.

UNSOUND = [torch.nan, inf, -inf]


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("bad", UNSOUND)
@pytest.mark.parametrize("way", ["causal", "bias", "dense", "window", "sink"])
def test_what_may_not_be_seen_touches_nothing(engine: str, what: str, bad: float, way: str) -> None:
    settings = {
        "causal": {"mask": es.causal()},
        "bias": {"bias": torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -inf)},
        "dense": {"mask": es.forbid(torch.ones(7, 7).triu(1).bool())},
        "window": {"mask": es.window(3, 0)},
        "sink": {"mask": es.causal(), "sink": torch.zeros(4)},
    }[way]
    readouts = [es.LogSumExp(), es.MaxScore(), es.Entropy(), es.TopK(2), es.Distance(), es.Share(es.window(1, 0))]
    operands = {"query": draw(2, 4, 7, 5), "key": draw(2, 2, 7, 5, seed=1), "value": draw(2, 2, 7, 3, seed=2)}
    changed = {n: t.clone() for n, t in operands.items()}
    changed[what][:, :, 5] = bad

    def run(operands: dict[str, Tensor], asked: list[es.Readout]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [t.clone().requires_grad_() for t in operands.values()]
        if asked:
            output, (*seen, received) = es.attention(
                *leaves, readouts=[*asked, es.Received()], engine=engine, **settings
            )
            results = [output, *(t for r in seen for t in (r if isinstance(r, tuple) else (r,)))]
            results = [t[:, :, :5] for t in results]
            results.append(received[..., 6])  # a key that only query 6 sees
        else:
            results = [es.attention(*leaves, engine=engine, **settings)[:, :, :5]]
        loss = sum(t.square().sum() for t in results[:4])
        return [t.detach() for t in results], torch.autograd.grad(loss, leaves)

    for asked in (readouts, []):
        right, right_gradients = run(operands, asked)
        got, got_gradients = run(changed, asked)
        for one, other in zip(got, right, strict=True):
            if other.shape == (2, 4):  # received by key 6 alone: from query 6, which sees what is bad
                continue
            assert torch.equal(one, other)
        assert torch.equal(got_gradients[0][:, :, :5], right_gradients[0][:, :, :5])
        if what == "value":  # the last queries see it, but have no part in the loss
            for one, other in zip(got_gradients[1:], right_gradients[1:], strict=True):
                assert torch.equal(one[:, :, :5], other[:, :, :5])
        with torch.no_grad():
            assert torch.equal(es.attention(*changed.values(), engine=engine, **settings)[:, :, :5],
                               es.attention(*operands.values(), engine=engine, **settings)[:, :, :5])  # fmt: skip


@pytest.mark.parametrize("bad", UNSOUND)
def test_a_bad_query_touches_no_other(engine: str, bad: float) -> None:
    q, k, v = (draw(1, 2, 7, 4, seed=s) for s in range(3))
    spoilt = q.clone()
    spoilt[:, :, 2] = bad
    for asked in ([es.Received(), es.Entropy()], None):
        right = es.attention(q, k, v, es.causal(), readouts=asked, engine=engine)
        got = es.attention(spoilt, k, v, es.causal(), readouts=asked, engine=engine)
        if asked:
            # Keys 3 to 6 are not seen by query 2.
            assert torch.equal(got[1][0][..., 3:], right[1][0][..., 3:])
            got, right = got[0], right[0]
        others = [0, 1, 3, 4, 5, 6]
        assert torch.equal(got[:, :, others], right[:, :, others])
        if bad != bad:
            assert got[:, :, 2].isnan().all()


@pytest.mark.parametrize("bad", UNSOUND)
def test_a_bad_incoming_gradient_stays_with_what_its_query_sees(engine: str, bad: float) -> None:
    leaves = [draw(1, 2, 7, 4, seed=s).requires_grad_() for s in range(3)]
    incoming = draw(1, 2, 7, 4, seed=5)
    spoilt = incoming.clone()
    spoilt[:, :, 2] = bad
    output = es.attention(*leaves, es.causal(), engine=engine)
    right = torch.autograd.grad(output, leaves, incoming, retain_graph=True)
    got = torch.autograd.grad(output, leaves, spoilt)
    others = [0, 1, 3, 4, 5, 6]
    assert_close(got[0][:, :, others], right[0][:, :, others], rtol=0, atol=1e-6)
    for one, other in zip(got[1:], right[1:], strict=True):
        assert_close(one[:, :, 3:], other[:, :, 3:], rtol=0, atol=1e-6)  # keys that query 2 doesn't see


def test_infinities_that_are_seen(engine: str) -> None:
    q, k, v = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 4)
    v[0, 0, 1] = torch.tensor([inf, -inf, inf, torch.nan])
    v[0, 0, 2, 2] = -inf
    output = es.attention(q, k, v, es.causal(), engine=engine)[0, 0]
    right = [[0, 0, 0, 0], [inf, -inf, inf, torch.nan], [inf, -inf, torch.nan, torch.nan]]
    assert_close(output, torch.tensor(right), equal_nan=True)
