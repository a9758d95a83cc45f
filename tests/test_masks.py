"""Masks: as tensors, as pictures, and their bounds."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import a_mask, cases
from checks import draw, drawing
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case
from torch import Tensor

import einsight as es
from einsight.coordinates import At, Run, Sizes
from einsight.pose import pose


def picture(text: str) -> Tensor:
    return torch.tensor([[c == "■" for c in row.split()] for row in text.strip().splitlines()])


DENSE = {
    "causal": (es.causal(), 0, "■ · · · ·\n■ ■ · · ·\n■ ■ ■ · ·"),
    "causal after a cache": (es.causal(), 2, "■ ■ ■ · ·\n■ ■ ■ ■ ·\n■ ■ ■ ■ ■"),
    "causal before the keys": (es.causal(), -1, "· · · · ·\n■ · · · ·\n■ ■ · · ·"),
    "window": (es.window(1, 0), 1, "■ ■ · · ·\n· ■ ■ · ·\n· · ■ ■ ·"),
    "window ahead": (es.window(-1, 2), 0, "· ■ ■ · ·\n· · ■ ■ ·\n· · · ■ ■"),
    "window without limits": (es.window(None, None), 0, "■ ■ ■ ■ ■\n■ ■ ■ ■ ■\n■ ■ ■ ■ ■"),
    "window to the left": (es.window(0, None), 1, "· ■ ■ ■ ■\n· · ■ ■ ■\n· · · ■ ■"),
    "lengths": (es.lengths(2), 0, "■ ■ · · ·\n■ ■ · · ·\n■ ■ · · ·"),
    "lengths of none": (es.lengths(0), 0, "· · · · ·\n· · · · ·\n· · · · ·"),
    "prefix": (es.prefix(2), 1, "■ ■ · · ·\n■ ■ ■ · ·\n■ ■ ■ ■ ·"),
    "padding left": (es.padding(torch.tensor([[0, 0, 1, 1, 1]])), 0, "· · ■ ■ ■\n· · ■ ■ ■\n· · ■ ■ ■"),
    "padding with holes": (es.padding(torch.tensor([[1, 0, 1, 1, 0]])), 0, "■ · ■ ■ ·\n■ · ■ ■ ·\n■ · ■ ■ ·"),
    "documents": (
        es.documents(torch.tensor([4, 4, 9, 9, 9])) & es.causal(), 1, "■ ■ · · ·\n· · ■ · ·\n· · ■ ■ ·",
    ),
    "documents of lengths": (
        es.documents(cu_seqlens=torch.tensor([0, 2, 2, 5])), 1, "■ ■ · · ·\n· · ■ ■ ■\n· · ■ ■ ■",
    ),
    "documents of the queries": (
        es.documents(torch.tensor([1, 2, 1, 3, 1]), torch.tensor([1, 0, 3])), 0, "■ · ■ · ■\n· · · · ·\n· · · ■ ·",
    ),
    "same": (es.same(torch.tensor([7, 8, 9]), torch.tensor([8, 7, 8, 7, 7])), 0, "· ■ · ■ ■\n■ · ■ · ·\n· · · · ·"),
    "pairs": (es.pairs([0, -1], slice(1, 3)), 0, "· ■ ■ · ·\n· · · · ·\n· ■ ■ · ·"),
    "pairs that are cut": (~es.pairs(1, [0, 4]), 0, "■ ■ ■ ■ ■\n· ■ ■ ■ ·\n■ ■ ■ ■ ■"),
    "allow": (es.allow(torch.tensor([[True], [False], [True]])), 0, "■ ■ ■ ■ ■\n· · · · ·\n■ ■ ■ ■ ■"),
    "forbid": (es.forbid(torch.tensor([True, False, False, True, True])), 0, "· ■ ■ · ·\n· ■ ■ · ·\n· ■ ■ · ·"),
    "where": (es.where(lambda b, h, p, j: (p + j) % 2 == 0), 1, "· ■ · ■ ·\n■ · ■ · ■\n· ■ · ■ ·"),
    "all of it": (
        (es.window(1, 0) | es.lengths(1)) & ~es.pairs([2], [0]), 1, "■ ■ · · ·\n■ ■ ■ · ·\n· · ■ ■ ·",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense_and_shown(name: str) -> None:
    mask, offset, shown = DENSE[name]
    assert torch.equal(mask.dense(3, 5, offset=offset), picture(shown))
    assert mask.show(3, 5, offset=offset) == shown


@pytest.mark.parametrize("name", DENSE)
def test_copies_say_the_same(name: str) -> None:
    mask, offset, shown = DENSE[name]
    assert deepcopy(mask).show(3, 5, offset=offset) == shown


def test_dense_of_items_and_heads() -> None:
    lengths = es.lengths(torch.tensor([1, 3]))
    assert lengths.dense(2, 3).shape == (2, 1, 2, 3)
    assert lengths.show(1, 3) == "b = 0, h = 0\n■ · ·\n\nb = 1, h = 0\n■ ■ ■"
    heads = es.allow(torch.ones(5, 1, 3).bool())
    assert heads.dense(2, 3).shape == (1, 5, 2, 3)
    assert (heads & lengths).dense(2, 3).shape == (2, 5, 2, 3)
    offsets = torch.tensor([0, 1])
    assert torch.equal(
        es.causal().dense(1, 3, offset=offsets)[:, 0, 0], torch.tensor([[True, False, False], [True, True, False]])
    )


def test_a_rule_that_differs_between_items_and_heads_is_asked_for_them() -> None:
    rule = es.where(lambda b, h, p, j: (j == h) | (j == b + 2))
    dense = rule.dense(2, 5, b=3, h=2, offset=0)
    assert dense.shape == (3, 2, 2, 5)
    right = torch.arange(5) == torch.arange(2)[:, None, None]
    assert torch.equal(
        dense, (right | (torch.arange(5) == torch.arange(3)[:, None, None, None] + 2)).expand(3, 2, 2, 5)
    )
    assert rule.show(1, 3, h=2, offset=0).startswith("b = 0, h = 0\n■ · ■\n\nb = 0, h = 1\n· ■ ■")
    assert es.causal().dense(2, 2, b=3).shape == (3, 1, 2, 2)
    with pytest.raises(ValueError, match="lengths speaks of 2 batch items, but there are 3"):
        es.lengths([1, 2]).dense(2, 2, b=3)


def test_masks_are_named_as_they_are_made() -> None:
    keep, ids = torch.ones(2, 5).bool(), torch.zeros(5).long()
    mask = (es.causal() & es.window(3, None) | ~es.lengths(4)) & es.allow(keep)
    assert repr(mask) == "(((causal() & window(3, None)) | ~lengths(4)) & allow(tensor[2, 5]))"
    assert repr(es.padding(keep) | es.forbid(keep)) == "(padding(tensor[2, 5]) | forbid(tensor[2, 5]))"
    assert repr(es.prefix([1, 2])) == "prefix(tensor[2])"
    assert repr(es.documents(ids)) == "documents(tensor[1, 5])"
    assert repr(es.documents(ids, ids[:3])) == "documents(tensor[1, 5], tensor[1, 3])"
    assert repr(es.same(ids[:3], ids)) == "same(tensor[1, 3], tensor[1, 5])"
    assert repr(es.pairs([1], slice(2))) == "pairs([1], slice(None, 2, None))"
    assert repr(es.where(lambda b, h, p, j: p > j)) == "where(…)"


def bounds(mask: es.Mask, i: int = 3, j: int = 5, offset: int = 0) -> tuple[Any, Any, bool]:
    q, k = draw(2, 1, i, 3), draw(2, 1, j, 3)
    lo, hi, exact = pose(q, k, None, mask, offset=offset).bounds
    return lo[..., -1].flatten().unique().tolist(), hi[..., -1].flatten().unique().tolist(), exact


@pytest.mark.parametrize(
    ("mask", "lo", "hi", "exact"),
    [
        (es.causal(), 0, 3, True),
        (es.window(1, 1), 1, 4, True),
        (es.window(1, 1) & es.lengths(3), 1, 3, True),
        (es.lengths(9), 0, 5, True),
        (es.lengths(0), 0, 0, True),
        (es.prefix(4), 0, 4, True),
        (es.padding(torch.tensor([[0, 0, 1, 1, 1]])), 2, 5, True),
        (es.padding(torch.tensor([[1, 1, 0, 0, 0]])), 0, 2, True),
        (es.padding(torch.tensor([[0, 1, 0, 1, 0]])), 1, 4, False),
        (es.padding(torch.tensor([[0, 1, 0, 1, 0]])) & es.lengths(2), 1, 2, False),
        (es.documents(cu_seqlens=torch.tensor([0, 2, 5])), 2, 5, True),
        (es.documents(torch.tensor([0, 1, 0, 1, 1])), 0, 3, False),
        (es.pairs(2, [1, 2]), 1, 3, True),
        (es.pairs(2, [1, 3]), 1, 4, False),
        (es.lengths(1) | es.window(0, 0), 0, 3, False),  # a gap between the first key and the query's own
        (es.lengths(2) | es.window(0, 0), 0, 3, True),  # they touch
        (es.lengths(3) | es.window(1, 0), 0, 3, True),  # they overlap
        (es.lengths(0) | es.window(0, 0), 2, 3, True),  # one is empty
        (es.lengths(1) | ~es.lengths(4), 0, 5, False),
        (~es.causal(), 0, 5, False),
        (es.allow(torch.ones(5).bool()), 0, 5, True),
        (es.forbid(torch.tensor([True, False, False, True, True])), 1, 3, True),
        (es.forbid(torch.tensor([True, False, True, False, True])), 1, 4, False),
        (es.where(lambda b, h, p, j: j < p), 0, 5, False),
    ],
    ids=repr,
)
def test_bounds(mask: es.Mask, lo: int, hi: int, exact: bool) -> None:
    assert bounds(mask) == ([lo], [hi], exact)


@drawing(150)
@given(case=cases(lengths=[1, 2, 3, 5, 7, 11]), data=st.data())
def test_bounds_are_a_hull_and_exact_where_they_say_so(case: Case, data: Any) -> None:
    mask, says = a_mask(data.draw, case, depth=3)
    b, h, g, i, j = case.sizes
    sizes = Sizes(b, h, g, i, j, 1, 1)
    case.predicate = says
    rows = data.draw(st.lists(st.integers(0, i - 1), unique=True, min_size=1))
    for queries in (Run(0, i), torch.tensor(rows)):
        picked = list(range(i)) if isinstance(queries, Run) else rows
        positions = case.positions()[:, picked]
        at = At(sizes, Run(0, b), Run(0, h), queries, Run(0, j), positions, torch.device("cpu"))
        right = case.allowed()[:, :, picked]
        assert torch.equal(mask.allowed(at).expand(right.shape), right)
        lo, hi, exact = mask.bounds(at)
        inside = ((at.j >= lo) & (at.j < hi)).expand(right.shape)
        assert not (right & ~inside).any()
        if exact:
            assert torch.equal(right, inside)
        # A part of the keys, as an engine asks for it.
        part = At(sizes, Run(0, b), Run(0, h), queries, Run(j // 2, j), positions, torch.device("cpu"))
        assert torch.equal(mask.allowed(part).expand(b, h, len(picked), j - j // 2), right[..., j // 2 :])


def test_documents_of_lengths_are_documents_of_ids() -> None:
    ids = torch.tensor([0, 0, 0, 2, 2])
    cu_seqlens = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    one, other = es.documents(cu_seqlens=cu_seqlens).dense(5, 5), es.documents(ids).dense(5, 5)
    assert torch.equal(one, other)


def test_an_empty_window_of_documents_after_a_cache() -> None:
    """A query's document is the one at its position among the keys."""
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    dense = (es.documents(ids) & es.causal()).dense(2, 5, offset=3)
    assert dense[:, 0].int().tolist() == [[[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]], [[0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
