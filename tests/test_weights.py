"""AttentionWeights: products, readouts by their short names, indexing, selection."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from checks import draw, operands
from torch.testing import assert_close

import einsight as es

q, k, v = operands()
W = es.AttentionWeights(q, k, es.causal(), offset=2)
dense = W.dense()


def test_what_it_says_of_itself() -> None:
    assert W.shape == (2, 6, 5, 7) and W.mT.shape == (2, 6, 7, 5)
    assert W.dtype == torch.float32 and W.device == torch.device("cpu")
    assert es.AttentionWeights(q.double(), k.double()).dtype == torch.float64
    assert repr(W) == "AttentionWeights(b=2, h=6, i=5, j=7)" and repr(W.mT) == repr(W) + ".mT"
    assert W.mT.mT is W


ids = torch.tensor([0, 1, 1, 0, 2, -1, 1])
SHORT: dict[str, tuple[Any, Any]] = {
    "entropy": (lambda W: W.entropy(), es.Entropy()),
    "lse": (lambda W: W.lse(), es.LogSumExp()),
    "max_score": (lambda W: W.max_score(), es.MaxScore()),
    "received": (lambda W: W.received([3, 1], mean=True, per_group=True), es.Received([3, 1], True, True)),
    "topk": (lambda W: W.topk(3, queries=-1), es.TopK(3, queries=-1)),
    "share": (lambda W: W.share(es.window(1, 0)), es.Share(es.window(1, 0))),
    "mass": (lambda W: W.mass(ids, 4, queries=[0]), es.Mass(ids, 4, queries=[0])),
    "rows": (lambda W: W.rows(slice(1, 4)), es.Rows(slice(1, 4))),
    "diagonal": (lambda W: W.diagonal(-1), es.Diagonal(-1)),
    "distance": (lambda W: W.distance(), es.Distance()),
    "pool": (lambda W: W.pool(3), es.Pool(3)),
    "scores": (lambda W: W.scores(), es.Scores()),
    "dense": (lambda W: W.dense(), es.Weights()),
    "sum": (lambda W: W.sum(-2), es.Received()),
    "sum by a positive number": (lambda W: W.sum(2), es.Received()),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_names(name: str) -> None:
    short, readout = SHORT[name]
    got, right = short(W), W.read(readout)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, right)), strict=True):
        assert torch.equal(one, other)


def test_row_sums_are_1_but_for_a_sink_and_empty_rows() -> None:
    torch.testing.assert_close(W.sum(-1), torch.ones(2, 6, 5), rtol=0, atol=7 * torch.finfo(torch.float32).eps)
    assert torch.equal(W.sum(3), W.sum(-1))
    with_sink = es.AttentionWeights(q, k, ~es.pairs([1], slice(None)), sink=0.5)
    sums = with_sink.sum(-1)
    assert (sums[:, :, 1] == 0).all() and ((sums[:, :, 0] > 0) & (sums[:, :, 0] < 1)).all()
    assert (with_sink.lse()[:, :, 1] == 0.5).all()


INDICES: list[Any] = [
    (0, 3, -1),
    (0, 3, -1, 2),
    (1,),
    (slice(None), 3),
    (-1, -2, -3),
    (..., 2),
    (0, ..., 2),
    (0, ...),
    (...,),
    (slice(None), slice(1, 5, 2), slice(None), slice(2, 4)),
    (0, [5, 1]),
    (slice(None), torch.tensor([4, 0, 2])),
    (slice(None), slice(None), range(1, 3)),
    (slice(0, 0),),
    (0, 3, slice(None), [6, 0]),
    (0, 3, slice(None), torch.tensor([True, False, True, False, False, False, True])),
    (torch.tensor(1), torch.tensor(3)),
    (np.int64(1), np.int32(-2)),
    (0, [np.int64(4), np.int64(1)]),
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_indexing_is_that_of_the_dense_weights(index: tuple[Any, ...]) -> None:
    expected = dense[tuple(list(n) if isinstance(n, range) else n for n in index)]
    for given in (index, index[0] if len(index) == 1 else index):
        got = W[given]
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=torch.finfo(torch.float32).eps)


def test_indexing_computes_no_more_than_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from einsight.engines import choose

    computed = []

    def run(problem: Any, engine: str) -> Any:
        computed.append(problem.sizes[:4])
        return original(problem, engine)

    original = choose.run
    monkeypatch.setattr(choose, "run", run)
    assert W[0, 3, -1].shape == (7,) and W[1, 2:4].shape == (2, 5, 7)
    assert computed == [(1, 1, 1, 1), (1, 2, 1, 5)]


def test_selection_keeps_whole_groups() -> None:
    assert W.select(heads=[2, 3])._problem.sizes.g == 1
    assert W.select(heads=[4, 5, 0, 1])._problem.sizes.g == 2
    assert W.select(heads=[1, 2])._problem.sizes.g == 2  # split: a key head for each
    whole, split = W.select(heads=slice(2, 6)), W.select(heads=[0, 2])
    torch.testing.assert_close(whole @ v[:, 1:], (W @ v)[:, 2:])
    torch.testing.assert_close(split @ v[:, :2], (W @ v)[:, [0, 2]])
    right = dense[:, 2:].sum(2).unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(whole.received(per_group=True), right)


@pytest.mark.parametrize("nothing", ["batch", "heads", "queries"])
@pytest.mark.parametrize("engine", ["auto", "reference", "stream"])
def test_a_selection_of_nothing(nothing: str, engine: str) -> None:
    none = es.AttentionWeights(q, k, es.causal(), offset=2, engine=engine).select(**{nothing: []})
    shape = [0 if name == nothing else n for name, n in zip(("batch", "heads", "queries"), (2, 6, 5), strict=True)]
    lse, received, rows = none.read([es.LogSumExp(), es.Received(), es.Weights()])
    assert list(lse.shape) == shape and list(rows.shape) == [*shape, 7]
    assert list(received.shape) == [*shape[:2], 7] and (received == 0).all()


def test_settings_speak_of_the_whole() -> None:
    """A selection of a selection, under settings per item, head and position."""
    settings = {
        "bias": es.alibi(draw(6, seed=5).abs()) + draw(2, 6, 5, 7, seed=6),
        "sink": draw(6, seed=7),
        "offset": torch.tensor([2, -1]),
        "score_mod": lambda s, b, h, p, j: s + 0.1 * (h + 1) * b - 0.01 * (p - j),
        "softcap": 3.0,
    }
    mask = (es.causal() | es.lengths([1, 3])) & es.allow(torch.rand(2, 6, 5, 7) > 0.2)
    whole = es.AttentionWeights(q, k, mask, **settings)
    part = whole.select(heads=[5, 0, 3], queries=[4, 2, 0]).select(batch=1, heads=slice(1, None), queries=[2, 0])
    right = whole.dense()[1:][:, [0, 3]][:, :, [0, 4]]
    torch.testing.assert_close(part.dense(), right, rtol=0, atol=4 * torch.finfo(torch.float32).eps)


def test_results_follow_the_operands_gradients() -> None:
    query = q.clone().requires_grad_()
    assert es.AttentionWeights(query, k).entropy().requires_grad
    assert not W.entropy().requires_grad
    (gradient,) = torch.autograd.grad(es.AttentionWeights(query, k)[1, 4, 2, 3], query)
    assert (gradient[0] == 0).all() and (gradient[1, 4, 2] != 0).any() and (gradient[1, 4, [0, 1, 3, 4]] == 0).all()


def test_a_copy_computes_the_same() -> None:
    assert torch.equal(deepcopy(W).dense(), dense)


@pytest.mark.parametrize(("h", "g"), [(4, 2), (6, 3), (6, 6), (6, 1), (9, 3)])
@pytest.mark.parametrize(
    "chosen", [[0], [1, 0], [0, 1], [0, 0, 1], [0, 1, 2, 3], [3, 2, 1, 0], slice(0, 3), slice(None)]
)
def test_values_of_selected_heads_are_never_taken_for_others(h: int, g: int, chosen: list[int] | slice) -> None:
    q, k, v = draw(2, h, 6, 8, seed=1), draw(2, g, 6, 8, seed=2), draw(2, g, 6, 5, seed=3)
    W = es.AttentionWeights(q, k, es.causal())
    heads, of_heads = torch.arange(h)[chosen], v.repeat_interleave(h // g, 1)
    right = (W @ v)[:, heads]
    for value in (v, of_heads, of_heads[:, heads]):
        try:
            assert_close(W.select(heads=chosen) @ value, right)
        except ValueError as error:
            assert len(heads) in (g, h) and heads.tolist() != list(range(h)) and "(W @ value)[:, heads]" in str(error)
