"""Biases against their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import draw, operands
from engines_under_test import ENGINES, using
from torch import Tensor

import einsight as es

q, k, v = operands()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param) as name:
        yield name


def scores(bias: Any, engine: str = "reference", **settings: Any) -> Tensor:
    """The scores that a bias alone makes."""
    return es.AttentionWeights(q * 0, k, bias=bias, engine=engine, **settings).scores()


def t5_bucket(ahead: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """T5's own definition (Mesh TensorFlow's transformer_layers.py), for one number."""
    import math

    start, n = 0, -ahead
    if bidirectional:
        buckets //= 2
        start = buckets if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return start + n
    far = exact + int(math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact))
    return start + min(far, buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (5, 7), (4, 3)])
def test_relative_is_t5s(bidirectional: bool, buckets: int, max_distance: int) -> None:
    n = 150
    table = torch.arange(float(buckets))[:, None]
    W = es.AttentionWeights(
        torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1),
        bias=es.relative(table, bidirectional=bidirectional, max_distance=max_distance),
    )  # fmt: skip
    got = W.scores()[0, 0]
    for i, j in [(0, n - 1), (n - 1, 0), *((i, j) for i in range(0, n, 7) for j in range(0, n, 5))]:
        assert got[i, j] == t5_bucket(j - i, bidirectional, buckets, max_distance), (i, j)


def test_alibi(engine: str) -> None:
    slopes = 2.0 ** -torch.arange(1.0, 7)
    offset = torch.tensor([2, -1])
    away = (offset[:, None, None] + torch.arange(5)[:, None] - torch.arange(7)).abs()
    right = -slopes[:, None, None] * away[:, None]
    assert torch.equal(scores(es.alibi(slopes), engine, offset=offset), right)


@pytest.mark.parametrize("shape", [(7,), (5, 1), (1, 7), (6, 1, 1), (2, 1, 1, 7), (2, 6, 5, 7), (), (1, 6, 5, 7)])
def test_tensors_broadcast(engine: str, shape: tuple[int, ...]) -> None:
    bias = draw(*shape, seed=3)
    assert torch.equal(scores(bias, engine), bias.expand(2, 6, 5, 7))


def test_biases_add_up(engine: str) -> None:
    table, slopes, bias = draw(8, 6, seed=4), draw(6, seed=5).abs(), draw(5, 7, seed=6)
    parts = [scores(x, engine, offset=2) for x in (es.relative(table, max_distance=9), es.alibi(slopes), bias)]
    for total in (
        es.relative(table, max_distance=9) + es.alibi(slopes) + bias,
        bias + (es.alibi(slopes) + es.relative(table, max_distance=9)),
    ):
        torch.testing.assert_close(scores(total, engine, offset=2), sum(parts))


def test_masked_in_a_bias_is_masked(engine: str) -> None:
    bias = torch.zeros(7).masked_fill(torch.arange(7) > 3, -torch.inf)
    one, other = (
        es.attention(q, k, v, readouts=[es.Weights(), es.Received(mean=True), es.TopK(5)], engine=engine, **way)
        for way in ({"bias": bias}, {"mask": es.lengths(4)})
    )
    torch.testing.assert_close(one, other)
    assert (one[1][2].indices[..., 4] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_bias_may_have_another_dtype(engine: str, dtype: torch.dtype) -> None:
    bias = draw(5, 7, seed=3, dtype=dtype)
    assert torch.equal(scores(bias, engine), bias.float().expand(2, 6, 5, 7))


def test_gradients_of_a_broadcast_bias(engine: str) -> None:
    bias = draw(6, 1, 7, seed=3).requires_grad_()
    dense = es.attention(q, k, v, bias=bias, readouts=es.Scores(), engine=engine)[1]
    (gradient,) = torch.autograd.grad(dense.sum(), bias)
    assert torch.equal(gradient, torch.full((6, 1, 7), 10.0))
