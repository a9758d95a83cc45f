"""What is refused of masks."""

from __future__ import annotations

import pytest
import torch
from refusals.given import Refusal, attention, boolean, check

import einsight as es

REFUSALS: dict[str, Refusal] = {
    "boolean mask": (
        lambda: attention(boolean), TypeError,
        "mask is a boolean tensor [5, 7], which may mean either of two things: write mask=es.allow(mask) if True is "
        "a key that may be seen, mask=es.forbid(mask) if True is one that may not",
    ),
    "integer mask": (
        lambda: attention(boolean.long()), TypeError,
        "mask is a tensor of torch.int64 [5, 7], which may mean either of two things: write "
        "mask=es.allow(mask.bool()) if True is a key that may be seen, mask=es.forbid(mask.bool())",
    ),
    "float mask": (
        lambda: attention(boolean.float()), TypeError,
        "mask is a float tensor [5, 7]; what is added to the scores: pass it as bias=",
    ),
    "function as mask": (
        lambda: attention(min), TypeError,
        "mask must be one of einsight's masks, such as es.causal(), not <built-in function min>; for a rule of your "
        "own write es.where(fn)",
    ),
    "uncalled mask": (lambda: attention(es.causal), TypeError, "mask must be one of einsight's masks"),
    "name as mask": (lambda: attention("causal"), TypeError, "such as es.causal(), not 'causal'"),
    "mask that doesn't broadcast": (
        lambda: attention(es.allow(boolean[:, :3])), ValueError,
        "allow(tensor) has shape [5, 3], which does not broadcast to [b, h, i, j] = [2, 6, 5, 7]",
    ),
    "mask inside others that doesn't broadcast": (
        lambda: attention(~(es.lengths(3) | es.forbid(boolean[:3]))), ValueError,
        "forbid(tensor) has shape [3, 7], which does not broadcast to [b, h, i, j] = [2, 6, 5, 7]",
    ),
    "mask of five dimensions": (
        lambda: es.allow(torch.ones(1, 1, 1, 1, 1).bool()), ValueError,
        "allow(tensor) has 5 dimensions, more than [b, h, i, j]",
    ),
    "allow of numbers": (
        lambda: es.allow(torch.ones(2, 2)), TypeError,
        "allow takes a boolean tensor, True where a query may see a key, not a tensor of torch.float32 [2, 2]; if it "
        "holds 0 and 1, write tensor.bool()",
    ),
    "forbid of a list": (
        lambda: es.forbid([True]), TypeError,
        "forbid takes a boolean tensor, True where a query may not see a key, not [True]",
    ),
    "window of a float": (
        lambda: es.window(1.5, 0), TypeError, "window's left must be a number of keys or None, not 1.5"
    ),
    "window of a bool": (
        lambda: es.window(1, True), TypeError, "window's right must be a number of keys or None, not True"
    ),
    "empty window": (
        lambda: es.window(1, -2), ValueError, "window(1, -2) holds no key: left + right must be at least 0"
    ),
    "lengths of floats": (
        lambda: es.lengths(torch.ones(2)), TypeError,
        "lengths takes an int or an int tensor [b], not torch.float32 [2]",
    ),
    "lengths of a padding mask": (
        lambda: es.lengths(boolean), TypeError, "; for a mask of valid keys [b, j] write padding(keep)"
    ),
    "lengths of text": (
        lambda: es.lengths("3"), TypeError, "lengths takes an int, a list of ints or an int tensor [b], not '3'"
    ),
    "lengths of other items": (
        lambda: attention(es.lengths([1, 2, 3])), ValueError, "lengths speaks of 3 batch items, but there are 2"
    ),
    "prefix of other items": (
        lambda: attention(es.prefix([1, 2, 3]), offset=2), ValueError,
        "prefix speaks of 3 batch items, but there are 2",
    ),
    "prefix of a float": (
        lambda: es.prefix(2.0), TypeError, "prefix takes an int, a list of ints or an int tensor [b], not 2.0"
    ),
    "padding of one dimension": (
        lambda: es.padding(boolean[0]), ValueError,
        "padding takes a tensor [b, j], but keep has 1 dimensions [7]",
    ),
    "padding of floats": (
        lambda: es.padding(torch.ones(2, 7)), TypeError,
        "padding takes bool or 0/1 integers, not torch.float32; if it holds 0. and 1., write keep.bool()",
    ),
    "padding of token ids": (
        lambda: es.padding(torch.tensor([[0, 2]])), ValueError,
        "padding takes bool or 0/1 integers, but keep holds other numbers",
    ),
    "padding of a list": (
        lambda: es.padding([[0, 1]]), TypeError,
        "padding takes a tensor [b, j], True or 1 where the token is real, not [[0, 1]]",
    ),
    "padding of other keys": (
        lambda: attention(es.padding(torch.ones(2, 5).bool())), ValueError,
        "padding speaks of 5 keys (keep [2, 5]), but key has 7",
    ),
    "padding of other items": (
        lambda: attention(es.padding(torch.ones(3, 7).bool())), ValueError,
        "padding speaks of 3 batch items, but there are 2",
    ),
    "documents of nothing": (lambda: es.documents(), TypeError, "documents takes either ids or cu_seqlens"),
    "documents of both": (
        lambda: es.documents(torch.zeros(3).long(), cu_seqlens=torch.tensor([0, 3])), TypeError,
        "documents takes either ids or cu_seqlens",
    ),
    "mask without numbers": (
        lambda: es.allow(boolean.to("meta")), TypeError,
        "allow must be a dense tensor that holds numbers, but it is on the meta device",
    ),
    "sparse padding": (
        lambda: es.padding(boolean.to_sparse()), TypeError,
        "padding's keep must be a dense tensor that holds numbers, but it is sparse",
    ),
    "nested ids": (
        lambda: es.documents(torch.nested.nested_tensor([torch.arange(2)], layout=torch.jagged)), TypeError,
        "ids must be a dense tensor that holds numbers, but it is nested",
    ),
    "NumPy's mask": (
        lambda: es.allow(boolean.numpy()), TypeError, "not a NumPy array [5, 7]; write torch.from_numpy(array)"
    ),
    "a long list as mask": (lambda: es.allow([True] * 999), TypeError, "True, True, …"),
    "pairs of None": (
        lambda: es.pairs(None, 0), TypeError, "pairs' queries must be an int, a slice, a range, a list of ints or an"
    ),
    "pairs of NumPy's": (
        lambda: es.pairs(0, boolean.numpy()), TypeError, "not a NumPy array [5, 7]; write torch.from_numpy(array)"
    ),
    "a slice of floats": (
        lambda: es.pairs(slice(0.5, 2), 0), TypeError, "pairs' queries must be a slice of ints, not slice(0.5, 2, None)"
    ),
    "a slice without a step": (lambda: es.pairs(slice(0, 2, 0), 0), TypeError, "must be a slice of ints"),
    "lengths below 0": (lambda: es.lengths(-1), ValueError, "lengths takes a number of keys, 0 or more, not -1"),
    "one of lengths below 0": (
        lambda: es.lengths([3, -1]), ValueError, "lengths takes numbers of keys, 0 or more, not [3, -1]"
    ),
    "prefix below 0": (lambda: es.prefix(-2), ValueError, "prefix takes a number of keys, 0 or more, not -2"),
    "fewer queries than none": (lambda: es.causal().show(-1, 3), ValueError, "i must be a number, 0 or more, not -1"),
    "half a key": (lambda: es.causal().dense(2, 2.5), ValueError, "j must be a number, 0 or more, not 2.5"),
    "a mask beyond all memory": (
        lambda: es.causal().dense(2_000_000, 2_000_000), ValueError,
        "the mask of 2000000 × 2000000 as a tensor would take 4,000 GB, and this machine has",
    ),
    "documents of floats": (
        lambda: es.documents(torch.zeros(3)), TypeError,
        "ids must be an int tensor [n] or [b, n], not a tensor of torch.float32 [3]",
    ),
    "documents of other keys": (
        lambda: attention(es.documents(torch.zeros(5).long(), torch.zeros(5).long())), ValueError,
        "documents has ids for 5 keys, but there are 7",
    ),
    "documents of other queries": (
        lambda: attention(es.documents(torch.zeros(7).long(), torch.zeros(7).long())), ValueError,
        "documents has ids for 7 queries, but there are 5",
    ),
    "documents of other items": (
        lambda: attention(es.documents(torch.zeros(3, 7).long(), torch.zeros(5).long())), ValueError,
        "documents speaks of 3 batch items, but there are 2",
    ),
    "documents without the queries' own": (
        lambda: attention(es.documents(torch.zeros(7).long()), offset=3), ValueError,
        "documents has ids for the 7 keys, but a query stands at position 7: give query_ids",
    ),
    "cu_seqlens that start late": (
        lambda: es.documents(cu_seqlens=torch.tensor([2, 5])), ValueError,
        "cu_seqlens must be one row that starts at 0 and never falls, not [2, 5]",
    ),
    "cu_seqlens that fall": (
        lambda: es.documents(cu_seqlens=torch.tensor([0, 5, 3])), ValueError,
        "cu_seqlens must be one row that starts at 0 and never falls, not [0, 5, 3]",
    ),
    "cu_seqlens in rows": (
        lambda: es.documents(cu_seqlens=torch.tensor([[0, 5], [0, 3]])), ValueError,
        "cu_seqlens must be one row that starts at 0 and never falls",
    ),
    "cu_seqlens of floats": (
        lambda: es.documents(cu_seqlens=torch.tensor([0.0, 5.0])), TypeError, "cu_seqlens must be an int tensor"
    ),
    "same of text": (
        lambda: es.same("ab", "ab"), TypeError, "query_ids must be an int tensor [n] or [b, n], not 'ab'"
    ),
    "same of other keys": (
        lambda: attention(es.same(torch.zeros(5).long(), torch.zeros(5).long())), ValueError,
        "same has ids for 5 keys, but there are 7",
    ),
    "pairs out of range": (
        lambda: attention(es.pairs(5, [0])), ValueError, "pairs' queries names 5, but there are 5 (0 to 4)"
    ),
    "pairs of floats": (
        lambda: attention(es.pairs([0.5], [1])), TypeError, "pairs' queries must hold ints, but got [0.5]"
    ),
    "where of a tensor": (
        lambda: es.where(boolean), TypeError,
        "where's fn must be a function, not a tensor of torch.bool [5, 7]; for a tensor write allow or forbid",
    ),
    "a number as function": (lambda: es.where(3), TypeError, "where's fn must be a function fn(b, h, p, j), not 3"),
    "function of three": (
        lambda: es.where(lambda b, h, p: p), TypeError,
        "where's fn must be a function fn(b, h, p, j), but takes (b, h, p): too many positional arguments",
    ),
    "where that gives numbers": (
        lambda: attention(es.where(lambda b, h, p, j: p - j), offset=0), TypeError,
        "where(fn): fn(b, h, p, j) must return a boolean tensor, but returned a tensor of torch.int64",
    ),
    "where that gives another shape": (
        lambda: attention(es.where(lambda b, h, p, j: boolean[:, :4]), offset=0, engine="reference"), ValueError,
        "where(fn): fn(b, h, p, j) returned shape [5, 4], which does not broadcast to the block [2, 6, 5, 7]",
    ),
    "masks with `and`": (
        lambda: es.causal() and es.lengths(3), TypeError,
        "a mask has no truth value; combine masks with & | ~ instead of and, or, not",
    ),
    "a mask & a tensor": (
        lambda: es.causal() & boolean, TypeError,
        "a mask & a tensor of torch.bool: say what True means, es.allow(tensor) or es.forbid(tensor)",
    ),
    "a mask | a number": (lambda: es.causal() | 3, TypeError, "a mask | 3: both sides must be masks"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check(REFUSALS[name])


@pytest.mark.parametrize("engine", ["reference", "stream", "auto"])
def test_functions_that_give_other_shapes_are_refused_by_every_engine(engine: str) -> None:
    with pytest.raises(ValueError, match=r"where\(fn\): fn\(b, h, p, j\) returned shape \[5, 4\]"):
        attention(es.where(lambda b, h, p, j: boolean[:, :4]), offset=0, engine=engine)
    with pytest.raises(ValueError, match=r"score_mod\(score, b, h, p, j\) must return the scores"):
        attention(score_mod=lambda s, b, h, p, j: s[:, :4], offset=0, engine=engine)
