"""Readouts where their definitions leave a choice: ties, ends, empty rows, ranges of queries."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from checks import draw, operands
from engines_under_test import ENGINES, using
from torch import Tensor

import einsight as es


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param) as name:
        yield name


def weights_of(scores: Tensor, mask: es.Mask | None = None, **settings: Any) -> es.AttentionWeights:
    """An operator with these scores [i, j]."""
    i, j = scores.shape
    return es.AttentionWeights(torch.zeros(1, 1, i, 1), torch.zeros(1, 1, j, 1), mask, bias=scores, **settings)


def test_ties_go_to_the_lowest_index(engine: str) -> None:
    top = weights_of(torch.zeros(3, 300), es.causal(), offset=150, engine=engine).topk(5)
    assert (top.indices == torch.arange(5)).all()
    scores = torch.tensor([[0.0, 2, 1, 2, 1, 1, 2], [5, 5, 5, 0, 5, 5, 5]])
    assert weights_of(scores, engine=engine).topk(4).indices[0, 0].tolist() == [[1, 3, 6, 2], [0, 1, 2, 4]]


def test_fewer_keys_than_k(engine: str) -> None:
    top = weights_of(torch.zeros(3, 3), es.causal(), engine=engine).topk(5)
    assert top.indices[0, 0].tolist() == [[0, -1, -1, -1, -1], [0, 1, -1, -1, -1], [0, 1, 2, -1, -1]]
    assert (top.weights[top.indices == -1] == 0).all()
    assert torch.equal(top.weights[0, 0, :, 0], 1 / torch.tensor([1.0, 2, 3]))


def test_a_visible_key_of_weight_0_is_no_hidden_key(engine: str) -> None:
    scores = torch.tensor([[0.0, -1e30, -torch.inf, 0.0]])
    top = weights_of(scores, engine=engine).topk(4)
    assert top.indices.flatten().tolist() == [0, 3, 1, -1] and top.weights.flatten().tolist() == [0.5, 0.5, 0, 0]
    received = weights_of(scores, engine=engine).received(mean=True)
    assert received.flatten().tolist() == [0.5, 0, 0, 0.5]


def test_entropy_at_its_ends(engine: str) -> None:
    n = 700  # keys: many blocks of them
    even, one = torch.zeros(1, n), torch.full((1, n), -1e5).index_fill(1, torch.tensor([3]), 0)
    for scores, right in ((even, torch.log(torch.tensor(float(n)))), (one, torch.tensor(0.0))):
        entropy = weights_of(scores, engine=engine).entropy()
        torch.testing.assert_close(entropy.flatten()[0], right, rtol=torch.finfo(torch.float32).eps * 4, atol=0)


def test_received_counts_the_queries_that_may_see(engine: str) -> None:
    W = weights_of(torch.zeros(5, 5), es.causal() & ~es.pairs(slice(None), [2]), engine=engine)
    weights = W.dense()[0, 0]
    right = weights.sum(0) / torch.tensor([5.0, 4, 1, 2, 1])
    torch.testing.assert_close(W.received(mean=True)[0, 0], right)
    last = W.received(queries=slice(-2, None), mean=True)[0, 0]
    torch.testing.assert_close(last, weights[-2:].sum(0) / torch.tensor([2.0, 2, 1, 2, 1]))
    assert W.received(mean=True)[0, 0, 2] == 0


def test_ways_to_name_queries(engine: str) -> None:
    q, k, _ = operands()
    W = es.AttentionWeights(q, k, engine=engine)
    dense = W.dense()
    for queries, numbers in [
        (3, [3]),
        (-1, [4]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(3, 0, -1), [3, 2, 1]),
        (range(2, 5), [2, 3, 4]),
        (range(4, -1, -2), [4, 2, 0]),
        ([4, 0, 2], [4, 0, 2]),
        ((1, -2), [1, 3]),
        ([], []),
        (slice(9, 12), []),
        (torch.tensor([2, -5]), [2, 0]),
        (torch.tensor(2), [2]),
        (torch.tensor([1, 0], dtype=torch.uint8), [1, 0]),
    ]:
        rows = W.rows(queries)
        assert rows.shape == (2, 6, len(numbers), 7)
        torch.testing.assert_close(rows, dense[:, :, numbers], rtol=0, atol=torch.finfo(torch.float32).eps)


def test_shares_are_questions(engine: str) -> None:
    tokens = torch.tensor([5, 8, 9, 5, 8, 9, 5])
    W = weights_of(draw(7, 7), es.causal(), engine=engine)
    dense = W.dense()[0, 0]
    at = torch.arange(7)
    i, j = at[:, None], at
    for mask, rule in [
        (es.lengths(1), j == 0),
        (es.window(1, -1), j == i - 1),
        (es.window(0, 0), j == i),
        (es.window(2, 2), (i - j).abs() <= 2),
        (es.same(tokens, tokens.roll(1)), tokens[:, None] == tokens.roll(1)),
        (es.documents(tokens), tokens[:, None] == tokens),
        (~es.window(0, 0), j != i),
        (es.allow(j > 3), j > 3),
        (es.where(lambda b, h, p, j: (p + j) % 2 == 0), (i + j) % 2 == 0),
    ]:
        share = W.share(mask)[0, 0]
        torch.testing.assert_close(share, (dense * rule).sum(-1), rtol=0, atol=8 * torch.finfo(torch.float32).eps)


def test_diagonals_and_distance_where_the_queries_stand(engine: str) -> None:
    q, k, _ = operands()
    offset = torch.tensor([2, -3])
    W = es.AttentionWeights(q, k, offset=offset, engine=engine)
    p, shifts = offset[:, None] + torch.arange(5), (-9, -1, 0, 2, 9)
    dense, distance, *diagonals = W.read([es.Weights(), es.Distance(), *map(es.Diagonal, shifts)])
    for shift, diagonal in zip(shifts, diagonals, strict=True):
        key = (p + shift)[:, None, :, None]
        assert torch.equal(diagonal, (dense * (torch.arange(7) == key)).sum(-1))
    away = (p[:, None, :, None] - torch.arange(7)).abs()
    torch.testing.assert_close(distance, (dense * away).sum(-1))


def test_a_pool_is_a_picture(engine: str) -> None:
    picture = weights_of(torch.zeros(5, 7), engine=engine).pool(3)[0, 0]
    torch.testing.assert_close(picture, torch.tensor([[3 / 7, 3 / 7, 1 / 7]] * 2))
    assert weights_of(torch.zeros(5, 7), engine=engine).pool(100).shape == (1, 1, 1, 1)


def test_masses(engine: str) -> None:
    q, k, _ = operands()
    W = es.AttentionWeights(q, k, engine=engine)
    dense = W.dense()
    ids = torch.tensor([[0, 1, 1, -1, 2, 0, 0], [1, 1, 1, 1, 1, 1, -1]])
    one_hot = (ids[:, None, :, None] == torch.arange(3)).float()
    torch.testing.assert_close(W.mass(ids), dense @ one_hot)
    torch.testing.assert_close(W.mass(ids.int(), n=5)[..., :3], dense @ one_hot)
    assert (W.mass(ids, n=5)[..., 3:] == 0).all() and W.mass(torch.full((7,), -1)).shape == (2, 6, 5, 0)
    torch.testing.assert_close(W.mass(one_hot[0, 0].double()), dense @ one_hot[0, 0])


def test_readouts_can_be_used_again(engine: str) -> None:
    readouts = [es.Pool(2), es.Received(queries=[-1, 0]), es.TopK(2, queries=slice(-2, None)), es.Rows([-1])]
    for i, j in ((5, 7), (3, 3), (2, 11)):
        q, k = draw(1, 2, i, 3), draw(1, 2, j, 3)
        dense = es.AttentionWeights(q, k, engine=engine).dense()
        for asked in (readouts, deepcopy(readouts)):
            _, received, top, rows = es.AttentionWeights(q, k, engine=engine).read(asked)
            torch.testing.assert_close(received, dense[:, :, [-1, 0]].sum(2))
            torch.testing.assert_close(rows, dense[:, :, -1:])
            assert top.indices.shape == (1, 2, 2, 2)


def test_names_of_readouts() -> None:
    assert repr(es.TopK(3, queries=[1])) == "TopK(queries=[1], k=3)"
    assert repr(es.Share(es.causal())) == "Share(mask=causal())"
    assert repr(es.Entropy()) == "Entropy()"


def test_a_readout_of_ones_own(engine: str) -> None:
    class Squares(es.Readout):
        def block(self, x: Any) -> Tensor:
            return x.weights.square().sum(-1)

    q, k, v = operands()
    squares, weights = es.attention(q, k, v, readouts=[Squares(), es.Weights()], engine=engine)[1]
    torch.testing.assert_close(squares, weights.square().sum(-1))
