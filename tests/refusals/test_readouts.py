"""What is refused of readouts."""

from __future__ import annotations

import pytest
import torch
from refusals.given import Refusal, W, attention, boolean, check

import einsight as es

REFUSALS: dict[str, Refusal] = {
    "a class": (
        lambda: attention(readouts=es.Entropy), TypeError,
        "a readout must be an instance: write Entropy(…) instead of Entropy",
    ),
    "a class in a dict": (
        lambda: attention(readouts={"top": es.TopK}), TypeError,
        "a readout must be an instance: write TopK(…) instead of TopK",
    ),
    "a name": (
        lambda: attention(readouts="entropy"), TypeError,
        "a readout must be one of einsight's, such as Entropy(), not 'entropy'",
    ),
    "a mask as readout": (
        lambda: W.read([es.Entropy(), es.causal()]), TypeError, "a readout must be one of einsight's"
    ),
    "k = 0": (lambda: es.TopK(0), ValueError, "TopK's k must be a positive int, not 0"),
    "k of a float": (lambda: es.TopK(2.0), ValueError, "TopK's k must be a positive int, not 2.0"),
    "block = 0": (lambda: es.Pool(0), ValueError, "Pool's block must be a positive int, not 0"),
    "block of a bool": (lambda: es.Pool(True), ValueError, "Pool's block must be a positive int, not True"),
    "shift of a float": (lambda: es.Diagonal(0.5), TypeError, "Diagonal's shift must be an int, not 0.5"),
    "rows of nothing": (
        lambda: es.Rows(None), TypeError, "Rows takes the queries to read; for all of them ask for Weights()"
    ),
    "queries out of range": (
        lambda: W.rows([0, 5]), ValueError, "Rows's queries names 5, but there are 5 (0 to 4)"
    ),
    "queries out of range from the end": (
        lambda: W.topk(2, queries=-6), ValueError, "TopK's queries names -6, but there are 5 (0 to 4)"
    ),
    "queries of floats": (
        lambda: W.rows([0.0]), TypeError, "Rows's queries must hold ints, but got [0.0]"
    ),
    "queries of a float tensor": (
        lambda: W.rows(torch.zeros(2)), TypeError,
        "Rows's queries must be a one-dimensional int tensor, not torch.float32 [2]",
    ),
    "queries of a boolean tensor": (
        lambda: W.rows(torch.ones(5).bool()), TypeError,
        "Rows's queries must be a one-dimensional int tensor, not torch.bool [5]; write mask.nonzero().flatten()",
    ),
    "queries of a bool": (
        lambda: W.rows(True), TypeError, "Rows's queries must be an int, a slice, a range, a list of ints or an int"
    ),
    "queries of a name": (lambda: W.rows("last"), TypeError, "Rows's queries must be an int, a slice, a range, a list"),
    "ids too high": (
        lambda: es.Mass(torch.tensor([0, 1, 2]), n=2), ValueError,
        "Mass' ids must lie between -1 (no group) and n - 1 = 1, but go from 0 to 2",
    ),
    "ids too low": (
        lambda: es.Mass(torch.tensor([0, -2, 2])), ValueError,
        "Mass' ids must lie between -1 (no group) and n - 1 = 2, but go from -2 to 2",
    ),
    "ids of three dimensions": (
        lambda: es.Mass(torch.zeros(1, 1, 7).long()), ValueError,
        "Mass takes ids [j] or [b, j], but groups has shape [1, 1, 7]",
    ),
    "half a row": (lambda: es.Rows([1.5]), TypeError, "Rows's queries must hold ints, but got [1.5]"),
    "half a query": (lambda: es.Received(queries=1.5), TypeError, "Received's queries must be an int, a slice"),
    "a mean of text": (lambda: es.Received(mean="x"), TypeError, "Received's mean must be True or False, not 'x'"),
    "groups that are a number": (
        lambda: es.Received(per_group=1), TypeError, "Received's per_group must be True or False, not 1"
    ),
    "groups without numbers": (
        lambda: es.Mass(boolean.long().to("meta")), TypeError, "Mass' groups must be a dense tensor that holds numbers"
    ),
    "ids that are true or false": (
        lambda: es.Mass(boolean), TypeError,
        "Mass takes an int tensor of ids [j] or [b, j], or a float matrix [j, n], not a tensor of torch.bool "
        "[5, 7]; the weight on the keys of a boolean tensor is Share(allow(tensor))",
    ),
    "ids of a list": (lambda: es.Mass([0, 1]), TypeError, "Mass takes an int tensor of ids [j] or [b, j], or a float"),
    "n of a float": (
        lambda: es.Mass(torch.tensor([0, 1]), n=2.0), TypeError, "Mass' n must be an int, not 2.0"
    ),
    "a matrix of one dimension": (
        lambda: es.Mass(torch.ones(7)), ValueError, "Mass takes a float matrix [j, n], but groups has shape [7]"
    ),
    "a matrix of another n": (
        lambda: es.Mass(torch.ones(7, 2), n=3), ValueError,
        "Mass takes a float matrix [j, n], but groups has shape [7, 2], n=3",
    ),
    "a matrix for other keys": (
        lambda: W.mass(torch.ones(5, 2)), ValueError, "Mass' groups [5, 2] speak of 5 keys, but key has 7"
    ),
    "ids for other keys": (
        lambda: W.mass(torch.zeros(5).long()), ValueError, "Mass' groups [5] speak of 5 keys, but key has 7"
    ),
    "ids for other items": (
        lambda: W.mass(torch.zeros(3, 7).long()), ValueError, "Mass' groups speak of 3 batch items, but there are 2"
    ),
    "share of a tensor": (
        lambda: es.Share(boolean), TypeError,
        "Share takes a mask, such as es.window(32, 0), not a tensor: write es.allow(tensor)"
    ),
    "share that doesn't broadcast": (
        lambda: W.share(es.allow(boolean[:, :2])), ValueError, "allow(tensor) has shape [5, 2], which does not"
    ),
    "per group of split groups": (
        lambda: W.select(heads=[0, 3]).received(per_group=True), ValueError,
        "Received(queries=None, mean=False, per_group=True) needs whole groups of heads, but the heads selected split",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check(REFUSALS[name])


def test_refusals_come_before_any_work() -> None:
    """A readout that doesn't fit is refused although the output could be computed."""
    asked = []
    with pytest.raises(ValueError, match="Rows's queries"):
        attention(score_mod=lambda s, *at: asked.append(s) or s, offset=0, readouts=[es.Entropy(), es.Rows(9)])
    assert not asked
