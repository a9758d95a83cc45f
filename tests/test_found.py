"""Faults that testers have found here, each as the smallest input that shows it, on every engine."""

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


def test_one_head_named_again_and_again(engine: str) -> None:
    q, k, _ = qkv(1, 1, 3, 5, 4)
    of_sink, of_slopes = (torch.tensor([0.5], requires_grad=True) for _ in range(2))
    for settings, leaf in (({"sink": of_sink}, of_sink), ({"bias": es.alibi(of_slopes), "offset": 0}, of_slopes)):
        W = es.AttentionWeights(q, k, engine=engine, **settings)
        lse, once = W.select(heads=[0, 0, 0]).lse(), W.lse()
        assert torch.equal(lse, once.expand(1, 3, 3))
        (three,), (one,) = torch.autograd.grad(lse.sum(), leaf), torch.autograd.grad(once.sum(), leaf)
        assert_close(three, 3 * one, rtol=4 * torch.finfo(one.dtype).eps, atol=0)  # two roundings, and their sums'


@pytest.mark.parametrize(
    ("offset", "readout"),
    [
        (2**32, es.Diagonal()),
        (-(2**32), es.Share(es.window(3, 0))),
        (2 - 2**32, es.Share(es.causal())),
        (0, es.Diagonal(-(2**32))),
        (0, es.Diagonal(2**70)),
        (torch.tensor([2**32 + 1]), es.Diagonal(-1)),
    ],
)
def test_positions_that_do_not_fit_into_32_bits(engine: str, offset: int | Tensor, readout: es.Readout) -> None:
    q, k, v = qkv(1, 1, 4, 4, 8)
    _, found = es.attention(q, k, v, offset=offset, readouts=readout, engine=engine)
    assert (found == 0).all()
    (found * torch.arange(4.0)).sum().backward()
    assert (q.grad == 0).all() and (k.grad == 0).all()


def test_more_keys_than_there_can_be(engine: str) -> None:
    q, k, v = qkv(1, 1, 4, 4, 8)
    everything = es.attention(q, k, v, readouts=es.Weights(), engine=engine)[1]
    for n in (2**63, 2**70, [2**70], torch.tensor([2**63 - 1])):
        for mask in (es.lengths(n), es.prefix(n)):
            weights = es.attention(q, k, v, mask, readouts=es.Weights(), engine=engine)[1]
            assert torch.equal(weights, everything)
    assert_close(es.attention(q, k, v, readouts=es.Pool(2**70), engine=engine)[1], torch.ones(1, 1, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-8, 0.3, 3.0])
def test_sinks_of_any_size(engine: str, dtype: torch.dtype, scale: float) -> None:
    q, k, v = (draw(1, 1, 4, 8, seed=s, dtype=dtype).requires_grad_() for s in (1, 2, 3))
    asked, eps = [es.LogSumExp(), es.Entropy(), es.Received()], torch.finfo(dtype).eps
    for size in (3.2e9, 1e10, 1e20, 1e30, torch.finfo(dtype).max):
        output, found = es.attention(q, k, v, scale=scale, sink=size, readouts=asked, engine=engine)
        assert (output == 0).all() and (found[0] == size).all() and all((x == 0).all() for x in found[1:])
        (output.sum() + sum(x.sum() for x in found)).backward()
        assert (q.grad == 0).all() and (k.grad == 0).all() and (v.grad == 0).all()
        none = es.attention(q, k, v, scale=scale, sink=-size, readouts=asked, engine=engine)
        plain = es.attention(q, k, v, scale=scale, readouts=asked, engine=engine)
        for one, other in zip((none[0], *none[1]), (plain[0], *plain[1]), strict=True):
            assert_close(one, other, rtol=4 * eps, atol=4 * eps)


def test_no_keys_and_no_sink(engine: str) -> None:
    q, k, v = qkv(1, 1, 2, 2, 4)
    rule, asked = es.allow(torch.tensor([[True], [False]])), [es.Entropy(), es.LogSumExp()]
    for sink in (-inf, torch.tensor([-inf])):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                output, (entropy, lse) = es.attention(q, k, v, rule, sink=sink, readouts=asked, engine=engine)
            assert entropy[0, 0, 1] == 0 and lse[0, 0, 1] == -inf and (output[0, 0, 1] == 0).all()
            assert entropy.isfinite().all() and output.isfinite().all()


def test_hidden_infinities_beside_a_value_of_one_number(engine: str) -> None:
    for seed in range(5):
        q, k, v = draw(2, 2, 17, 16, seed=seed), draw(2, 1, 130, 16, seed=seed + 9), draw(2, 1, 130, 1, seed=seed + 99)
        keep = draw(2, 130, seed=seed) > 0
        spoilt = v.masked_fill(~keep[:, None, :, None], inf)
        found = []
        for value in (v, spoilt):
            leaves = [x.clone().requires_grad_() for x in (q, k, value)]
            output = es.attention(*leaves, es.padding(keep), engine=engine)
            found.append((output, *torch.autograd.grad(output.cos().sum(), leaves)))
        assert all(map(torch.equal, *found))


def test_groups_of_no_heads(engine: str) -> None:
    x = torch.ones(2, 0, 6, 8)
    assert es.attention(x, x, x, readouts=es.Received(per_group=True), engine=engine)[1].shape == (2, 0, 6)


@pytest.mark.parametrize("spoilt", [inf, torch.nan])
@pytest.mark.parametrize("grad", [False, True])
def test_a_sink_that_is_no_number(engine: str, spoilt: float, grad: bool) -> None:
    q, k, v = qkv(1, 2, 5, 5, 3)
    asked = [es.Weights(), es.LogSumExp(), es.Entropy()]
    sink = torch.tensor([spoilt, 0.5])
    with torch.set_grad_enabled(grad):
        output, (weights, *sums) = es.attention(q, k, v, es.causal(), sink=sink, readouts=asked, engine=engine)
        right = es.attention(q, k, v, es.causal(), sink=0.5, readouts=asked, engine=engine)
    assert output[:, 0].isnan().all() and all(found[:, 0].isnan().all() for found in sums)
    assert weights[0, 0][torch.ones(5, 5).tril().bool()].isnan().all() and (weights[0, 0].triu(1) == 0).all()
    for found, other in zip((output, weights, *sums), (right[0], *right[1]), strict=True):
        assert torch.equal(found[:, 1], other[:, 1])


@pytest.mark.parametrize(("h", "g", "i"), [(1, 1, 97), (8, 2, 30), (1, 1, 96)])
def test_many_queries_and_no_keys(engine: str, h: int, g: int, i: int) -> None:
    q, k, v = torch.ones(1, h, i, 8), torch.ones(1, g, 0, 8), torch.ones(1, g, 0, 3)
    output, (entropy, lse) = es.attention(q, k, v, readouts=[es.Entropy(), es.LogSumExp()], engine=engine)
    assert (output == 0).all() and (entropy == 0).all() and (lse == -inf).all()
    assert es.attention(q, k, v, engine=engine).shape == (1, h, i, 3)


def test_views_with_the_negative_bit(engine: str) -> None:
    numbers = [torch.complex(draw(1, 2, 6, 8, seed=s), draw(1, 2, 6, 8, seed=s + 9)).conj().imag for s in range(3)]
    sink, slopes = (torch.complex(draw(2, seed=s), draw(2, seed=s + 9)).conj().imag for s in (3, 4))
    assert all(t.is_neg() for t in (*numbers, sink, slopes))
    plain = [t.resolve_neg() for t in numbers]
    got = es.attention(*numbers, sink=sink, bias=es.alibi(slopes), engine=engine)
    right = es.attention(*plain, sink=sink.resolve_neg(), bias=es.alibi(slopes.resolve_neg()), engine=engine)
    assert torch.equal(got, right)


def test_windows_beyond_every_sequence(engine: str) -> None:
    q, k, v = qkv(1, 1, 5, 5, 3)
    far = 2**63 - 1
    for window in (es.window(None, far), es.window(far, far), es.window(2**64, None)):
        assert_close(
            es.attention(q, k, v, window, engine=engine), es.attention(q, k, v, engine=engine), rtol=0, atol=1e-6
        )
    with pytest.raises(ValueError, match="offset must be smaller than 2⁴⁰"):
        es.attention(q, k, v, es.causal(), offset=2**63, engine=engine)


def test_scores_that_all_overflow_downwards(engine: str) -> None:
    q, k, v = torch.full((1, 1, 1, 1), 1e30), torch.full((1, 1, 2, 1), -1e30), torch.ones(1, 1, 2, 1)
    for asked in (es.LogSumExp(), None):
        output = es.attention(q, k, v, readouts=asked, engine=engine)
        if asked:
            output, lse = output
            assert (lse == -inf).all()
        assert (output == 0).all()


def test_a_query_named_twice(engine: str) -> None:
    W = es.AttentionWeights(
        draw(2, 2, 5, 3), draw(2, 2, 7, 3, seed=1), engine="auto" if engine == "torch_sdpa" else engine
    )
    dense = W.dense()
    assert_close(W.rows([1, -1, 4, 1]), dense[:, :, [1, 4, 4, 1]], rtol=0, atol=1e-6)
    assert_close(W.received([1, 2, 1]), dense[:, :, [1, 2]].sum(2), rtol=0, atol=1e-6)
    assert_close(W.select(batch=[0, 0], queries=[3, 3]).dense(), dense[[0, 0]][:, :, [3, 3]], rtol=0, atol=1e-6)
    assert not es.pairs([0], [0, 0, 2]).dense(2, 4)[0, 1]
    apart = es.AttentionWeights(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 4, 1), es.pairs([0], [0, 0, 2]))
    assert_close(apart.dense()[0, 0], torch.tensor([[0.5, 0, 0.5, 0], [0, 0, 0, 0]]))


@pytest.mark.usefixtures("without_shape_checks")
def test_pytorchs_arguments_are_answered() -> None:
    q, k, v = qkv(1, 1, 5, 5, 3)
    with pytest.raises(TypeError, match=r"instead of is_causal= write mask=einsight\.causal\(\)"):
        es.attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError, match=r"query must be a dense tensor .* but it is sparse"):
        es.attention(q.detach().to_sparse(), k, v)
    with pytest.raises(TypeError, match=r"query must be a dense tensor .* but it is on the meta device"):
        es.attention(q.to("meta"), k.to("meta"), v.to("meta"))
    with pytest.raises(ValueError, match="sink must be a finite score"):
        es.attention(q, k, v, sink=inf)
