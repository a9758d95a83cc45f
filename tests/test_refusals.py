"""What is refused, and that each refusal names the argument, what was expected, what came, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import operands

import einsight as es
from einsight.engines import native

q, k, v = operands()  # b = 2, h = 6, g = 3, i = 5, j = 7, d = 11, e = 13
W = es.AttentionWeights(q, k)


@pytest.fixture(autouse=True)
def without_a_compiled_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which engines can do what another can't is said in the same words wherever the suite runs."""
    monkeypatch.setattr(native.operations, "kernel", None)


pytestmark = pytest.mark.usefixtures("without_shape_checks")


def attention(*changed: Any, **settings: Any) -> Any:
    given = dict(zip(("query", "key", "value"), (q, k, v), strict=True))
    names = ("query", "key", "value")
    for name in names:
        if name in settings:
            given[name] = settings.pop(name)
    return es.attention(*given.values(), *changed, **settings)


Refusal = tuple[Callable[[], Any], type[Exception], str]
boolean = torch.ones(5, 7, dtype=torch.bool)

REFUSALS: dict[str, Refusal] = {
    # tensors
    "three dimensions": (
        lambda: attention(query=q[0]), ValueError,
        "query must have four dimensions [b, h, i, d], but has 3: [6, 5, 11]; for one head write query.unsqueeze(1), "
        "for one batch item query.unsqueeze(0)",
    ),
    "two dimensions": (
        lambda: attention(key=k[0, 0]), ValueError,
        "key must have four dimensions [b, g, j, d], but has 2: [7, 11]; for one head of one batch item write "
        "key[None, None]",
    ),
    "five dimensions": (
        lambda: attention(value=v[None]), ValueError,
        "value must have four dimensions [b, g, j, e], but has 5: [1, 2, 3, 7, 13]",
    ),
    "no tensor": (lambda: attention(query=[1.0]), TypeError, "query must be a tensor [b, h, i, d], not list"),
    "no value": (
        lambda: attention(value=None), TypeError,
        "value must be a tensor [b, g, j, e], not None; for readouts alone: AttentionWeights(query, key)",
    ),
    "integers": (
        lambda: attention(query=q.long()), TypeError,
        "query must be float16, bfloat16, float32 or float64, not torch.int64; write query.float()",
    ),
    "complex": (lambda: attention(query=q + 0j), TypeError, "query must be float16, bfloat16, float32 or float64, not"),
    "float8": (
        lambda: attention(query=q.to(torch.float8_e4m3fn)), TypeError,
        "query must be float16, bfloat16, float32 or float64, not torch.float8_e4m3fn",
    ),
    "mixed dtypes": (
        lambda: attention(key=k.half()), TypeError,
        "key is torch.float16 but query is torch.float32; they must be alike: key.to(query.dtype)",
    ),
    "mixed dtypes of value": (
        lambda: attention(value=v.double()), TypeError, "value is torch.float64 but query is torch.float32"
    ),
    "mixed devices": (
        lambda: attention(value=v.to("meta")), ValueError,
        "value is on meta but query on cpu; they must be alike: value.to(query.device)",
    ),
    "batch items of key": (
        lambda: attention(key=k[:1]), ValueError,
        "key has 1 batch items but query has 2 (query [2, 6, 5, 11], key [1, 3, 7, 11], value [2, 3, 7, 13])",
    ),
    "batch items of value": (
        lambda: attention(value=v[:1]), ValueError, "value has 1 batch items but query has 2 (query"
    ),
    "key positions": (
        lambda: es.attention(torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 6, 8)), ValueError,
        "value has 6 key positions but key has 5 (query [1, 1, 5, 8], key [1, 1, 5, 8], value [1, 1, 6, 8])",
    ),
    "head dimensions": (
        lambda: attention(key=k[..., :7]), ValueError,
        "key has head dimension 7 but query has 11 (query [2, 6, 5, 11], key [2, 3, 7, 7], value [2, 3, 7, 13])",
    ),
    "no head dimension": (
        lambda: attention(query=q[..., :0], key=k[..., :0]), ValueError,
        "the head dimension of query and key is 0 (query [2, 6, 5, 0]",
    ),
    "heads of value": (lambda: attention(value=v[:, :2]), ValueError, "value has 2 heads but key has 3 (query"),
    "groups": (
        lambda: attention(query=q[:, :5]), ValueError,
        "query has 5 heads, which is not a multiple of key's 3 (query [2, 5, 5, 11], key [2, 3, 7, 11]",
    ),
    "fewer heads than groups": (
        lambda: attention(query=q[:, :2]), ValueError, "query has 2 heads, which is not a multiple of key's 3"
    ),
    "no groups": (
        lambda: attention(key=k[:, :0], value=v[:, :0]), ValueError,
        "query has 6 heads, which is not a multiple of key's 0",
    ),
    # masks
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
        "allow takes a boolean tensor, True where a query may see a key, not a tensor of torch.float32; if it holds 0 "
        "and 1, write tensor.bool()",
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
    "documents of floats": (
        lambda: es.documents(torch.zeros(3)), TypeError,
        "ids must be an int tensor [n] or [b, n], not torch.float32 [3]",
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
        lambda: es.where(boolean), TypeError, "where takes a function fn(b, h, p, j), not"
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
    # offset
    "no offset": (
        lambda: attention(es.causal()), ValueError,
        "offset is needed: the mask asks where the queries stand, and there are 5 queries but 7 keys. offset=2 "
        "(j_len - i_len) if the queries are the last ones, as with a KV cache; offset=0 if query 0 stands at key 0, "
        "as with PyTorch's is_causal",
    ),
    "no offset for a bias": (
        lambda: attention(bias=es.alibi(torch.ones(6))), ValueError,
        "offset is needed: the bias asks where the queries stand",
    ),
    "no offset for score_mod": (
        lambda: attention(score_mod=lambda s, b, h, p, j: s), ValueError, "offset is needed: score_mod asks where"
    ),
    "no offset for a readout": (
        lambda: attention(readouts=es.Distance()), ValueError, "offset is needed: the readout Distance() asks where"
    ),
    "no offset for a share": (
        lambda: attention(readouts=es.Share(es.window(1, 0))), ValueError,
        "offset is needed: the readout Share(mask=window(1, 0)) asks where",
    ),
    "no offset for the operator's readout": (
        lambda: W.diagonal(-1), ValueError, "offset is needed: the readout Diagonal(shift=-1) asks where"
    ),
    "no offset to see a mask": (
        lambda: es.causal().dense(5, 7), ValueError, "offset is needed: the mask asks where the queries stand"
    ),
    "offset of a float": (
        lambda: attention(offset=1.0), TypeError, "offset must be an int or an int tensor [b], not 1.0"
    ),
    "offset of a bool": (
        lambda: attention(offset=True), TypeError, "offset must be an int or an int tensor [b], not True"
    ),
    "offset of floats": (
        lambda: attention(offset=torch.zeros(2)), TypeError,
        "offset must be an int or an int tensor [b], not a tensor of torch.float32",
    ),
    "offset of other items": (
        lambda: attention(offset=torch.zeros(3).long()), ValueError,
        "offset must be an int or an int tensor [b] = [2], not [3]",
    ),
    # numbers
    "softcap 0": (
        lambda: attention(softcap=0), ValueError, "softcap must be positive, not 0.0; for none leave it out"
    ),
    "softcap below 0": (lambda: attention(softcap=-1.5), ValueError, "softcap must be positive, not -1.5"),
    "softcap of text": (lambda: attention(softcap="1"), TypeError, "softcap must be a number, not '1'"),
    "softcap NaN": (lambda: attention(softcap=float("nan")), ValueError, "softcap must be finite, not nan"),
    "dropout 1": (
        lambda: attention(dropout=1), ValueError, "dropout must be a probability in [0, 1), not 1.0"
    ),
    "dropout below 0": (
        lambda: attention(dropout=-0.1), ValueError, "dropout must be a probability in [0, 1), not -0.1"
    ),
    "dropout as a switch": (lambda: attention(dropout=True), TypeError, "dropout must be a number, not True"),
    "scale of a tensor": (
        lambda: attention(scale=torch.tensor(2.0)), TypeError,
        "scale must be a number, not tensor(2.); multiply the query by it",
    ),
    "scale ∞": (lambda: attention(scale=float("inf")), ValueError, "scale must be finite, not inf"),
    # biases, score_mod, sink
    "bias that doesn't broadcast": (
        lambda: attention(bias=torch.zeros(7, 5)), ValueError,
        "bias has shape [7, 5], which does not broadcast to [b, h, i, j] = [2, 6, 5, 7]",
    ),
    "bias of five dimensions": (
        lambda: attention(bias=torch.zeros(1, 1, 1, 5, 7)), ValueError, "bias has shape [1, 1, 1, 5, 7], which does"
    ),
    "boolean bias": (
        lambda: attention(bias=boolean), TypeError,
        "bias must be a float tensor, not torch.bool: a mask goes in as mask=es.allow(tensor) or es.forbid(tensor)",
    ),
    "integer bias": (
        lambda: attention(bias=boolean.long()), TypeError, "bias must be a float tensor, not torch.int64"
    ),
    "mask as bias": (
        lambda: attention(bias=es.causal()), TypeError, "bias must be a float tensor, alibi(…) or relative(…), not"
    ),
    "bias + a number": (
        lambda: es.alibi(torch.ones(6)) + 1, TypeError, "bias must be a float tensor, alibi(…) or relative(…), not 1"
    ),
    "bias on another device": (
        lambda: attention(bias=torch.zeros(5, 7, device="meta")), ValueError,
        "bias is on meta but query on cpu; write bias.to(query.device)",
    ),
    "slopes for other heads": (
        lambda: attention(bias=es.alibi(torch.ones(3)), offset=0), ValueError,
        "alibi has 3 slopes, but query has 6 heads",
    ),
    "slopes of two dimensions": (
        lambda: es.alibi(torch.ones(6, 1)), TypeError,
        "alibi takes a float tensor of one slope per query head [h], not torch.float32 [6, 1]",
    ),
    "slopes of a list": (
        lambda: es.alibi([1.0]), TypeError, "alibi takes a float tensor of one slope per query head [h], not [1.0]"
    ),
    "table for other heads": (
        lambda: attention(bias=es.relative(torch.ones(8, 3)), offset=0), ValueError,
        "relative's table [8, 3] is for 3 heads, but query has 6",
    ),
    "table of one dimension": (
        lambda: es.relative(torch.ones(8)), TypeError,
        "relative takes a float table [n, h] of n buckets for each head, not torch.float32 [8]",
    ),
    "table too small": (
        lambda: es.relative(torch.ones(3, 6)), ValueError, "relative's table needs at least 4 buckets, not 3"
    ),
    "table too small for one direction": (
        lambda: es.relative(torch.ones(1, 6), bidirectional=False), ValueError,
        "relative's table needs at least 2 buckets, not 1",
    ),
    "distance within the exact buckets": (
        lambda: es.relative(torch.ones(32, 6), max_distance=8), ValueError,
        "relative's max_distance must exceed the 8 exact buckets, not 8",
    ),
    "score_mod of a number": (
        lambda: attention(score_mod=3), TypeError, "score_mod must be a function fn(score, b, h, p, j), not 3"
    ),
    "score_mod that gives another shape": (
        lambda: attention(score_mod=lambda s, b, h, p, j: s[..., :2], offset=0), ValueError,
        "score_mod(score, b, h, p, j) must return the scores, a float tensor [2, 6, 5, 7], but returned torch.float32 "
        "[2, 6, 5, 2]",
    ),
    "score_mod that gives nothing": (
        lambda: attention(score_mod=lambda s, b, h, p, j: None, offset=0), TypeError,
        "score_mod(score, b, h, p, j) must return the scores, a float tensor [2, 6, 5, 7], but returned None",
    ),
    "sink of integers": (
        lambda: attention(sink=torch.zeros(6).long()), TypeError,
        "sink must be a float tensor of one score per query head [h], or a number, not a tensor of torch.int64",
    ),
    "sink of another shape": (
        lambda: attention(sink=torch.zeros(3)), ValueError,
        "sink must have shape [h] = [6], one score per query head, not [3]",
    ),
    "sink on another device": (
        lambda: attention(sink=torch.zeros(6, device="meta")), ValueError,
        "sink is on meta but query on cpu; write sink.to(query.device)",
    ),
    "sink of text": (lambda: attention(sink="1"), TypeError, "sink must be a float tensor of one score per query"),
    # engines
    "unknown engine": (
        lambda: attention(engine="cudnn"), ValueError,
        "engine must be 'auto' or one of 'native', 'torch_sdpa', 'torch_flash', 'triton', 'stream', 'reference', "
        "not 'cudnn'",
    ),
    "unknown engine for the operator": (
        lambda: es.AttentionWeights(q, k, engine="cudnn"), ValueError, "engine must be 'auto' or one of"
    ),
    "unknown engine for a plan": (
        lambda: es.plan(q, k, v, engine="cudnn"), ValueError, "engine must be 'auto' or one of"
    ),
    "readouts of an engine without": (
        lambda: attention(readouts=es.Entropy(), engine="torch_sdpa"), ValueError,
        "engine='torch_sdpa' can't compute this: it gives the output alone, no readouts; stream and reference can",
    ),
    "a mask that an engine lacks": (
        lambda: attention(es.window(2, 0), value=k, offset=2, engine="torch_sdpa"), ValueError,
        "engine='torch_sdpa' can't compute this: of masks it has only causal, with query 0 at key 0; stream and",
    ),
    "a bias that an engine lacks": (
        lambda: attention(bias=torch.zeros(7), engine="torch_sdpa"), ValueError, "engine='torch_sdpa' can't compute"
    ),
    "dropout that an engine draws otherwise": (
        lambda: attention(dropout=0.5, engine="torch_sdpa"), ValueError, "its dropout draws other numbers"
    ),
    **{
        f"{name} that an engine lacks": (
            lambda name=name, value=value: attention(**{name: value}, offset=0, engine="torch_sdpa"), ValueError,
            f"engine='torch_sdpa' can't compute this: it has no {name}; stream and reference can",
        )
        for name, value in {"softcap": 2.0, "score_mod": lambda s, b, h, p, j: s, "sink": 0.0}.items()
    },
    # readouts
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
    "queries of a name": (lambda: W.rows("last"), TypeError, "Rows's queries must hold ints, but got 'last'"),
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
    "ids that are true or false": (
        lambda: es.Mass(boolean), TypeError,
        "Mass takes an int tensor of ids [j] or [b, j], or a float matrix [j, n], not torch.bool [5, 7]; the weight "
        "on the keys of a boolean tensor is Share(allow(tensor))",
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
    # the textbook's function
    "attn_mask": (
        lambda: es.scaled_dot_product_attention(q, k, v, attn_mask=boolean), TypeError,
        "this is einsight's scaled_dot_product_attention, not PyTorch's: instead of attn_mask= write mask=, where True "
        "is masked out (mask=~attn_mask); a float mask is attention(…, bias=)",
    ),
    "is_causal": (
        lambda: es.scaled_dot_product_attention(q, k, v, is_causal=True), TypeError,
        "instead of is_causal= write mask=einsight.causal()",
    ),
    "dropout_p": (
        lambda: es.scaled_dot_product_attention(q, k, v, dropout_p=0.1), TypeError,
        "instead of dropout_p= write attention(…, dropout=…, readouts=Weights())",
    ),
    "PyTorch's scale": (
        lambda: es.scaled_dot_product_attention(q, k, v, scale=1.0), TypeError,
        "instead of scale= write attention(…, scale=…, readouts=Weights())",
    ),
    "enable_gqa": (
        lambda: es.scaled_dot_product_attention(q, k, v, enable_gqa=True), TypeError,
        "instead of enable_gqa= write nothing: heads are grouped as the shapes say",
    ),
    "another name": (
        lambda: es.scaled_dot_product_attention(q, k, v, colour=1), TypeError,
        "scaled_dot_product_attention got an unexpected argument 'colour'",
    ),
    "textbook's integer mask": (
        lambda: es.scaled_dot_product_attention(q, k, v, boolean.int()), TypeError,
        "mask must be a boolean tensor, True where masked out, not torch.int32: write mask == 0 or mask != 0, "
        "whichever is masked out",
    ),
    "textbook's float mask": (
        lambda: es.scaled_dot_product_attention(q, k, v, boolean.float()), TypeError,
        "a float mask to be added is attention(…, bias=mask, readouts=Weights())",
    ),
    "textbook's mask that doesn't broadcast": (
        lambda: es.scaled_dot_product_attention(q, k, v, boolean[:, :5]), ValueError,
        "mask has shape [5, 5], which does not broadcast to [b, h, i, j] = [2, 6, 5, 7]",
    ),
    # merge
    "merge of nothing": (
        lambda: es.merge([], []), ValueError, "merge takes as many outputs as lses, at least one; got 0 and 0"
    ),
    "merge of unequal numbers": (
        lambda: es.merge([v], []), ValueError, "merge takes as many outputs as lses, at least one; got 1 and 0"
    ),
    "merge of other shapes": (
        lambda: es.merge([q, q[:, :2]], [q[..., 0], q[:, :2, :, 0]]), ValueError,
        "merge: part 1 has output [2, 2, 5, 11] and lse [2, 2, 5], but the first output [2, 6, 5, 11] asks for "
        "[2, 6, 5, 11] and [2, 6, 5]",
    ),
    "merge of an lse of another shape": (
        lambda: es.merge([q], [q]), ValueError, "merge: part 0 has output [2, 6, 5, 11] and lse [2, 6, 5, 11]"
    ),
    "merge of numbers": (
        lambda: es.merge([1.0], [2.0]), TypeError, "merge takes tensors, but part 0 is float, float"
    ),
    "merge of dtypes": (
        lambda: es.merge([q, q.half()], [q[..., 0], q[..., 0]]), TypeError,
        "merge: part 1 has output torch.float16 and lse torch.float32, but the first has torch.float32 and "
        "torch.float32",
    ),
    # the operator
    "W @ a list": (lambda: W @ [1.0], TypeError, "W @ value takes a value [b, g, j, e], not [1.0]"),
    "W @ three dimensions": (
        lambda: W @ v[0], TypeError, "W @ value takes a value [b, g, j, e], not a tensor [3, 7, 13]"
    ),
    "W @ other keys": (
        lambda: W @ v[:, :, :5], ValueError,
        "W @ value: value has shape [2, 3, 5, 13], but W reads [b, g, j, e] = [2, 3, 7, e], or a value for each of "
        "the 6 query heads",
    ),
    "W @ another dtype": (
        lambda: W @ v.double(), TypeError,
        "W @ value: value is torch.float64, but query torch.float32: value.to(query.dtype)",
    ),
    "W @ another device": (
        lambda: W @ v.to("meta"), ValueError,
        "W @ value: value is on meta, but query on cpu",
    ),
    "W.mT @ a list": (lambda: W.mT @ [1.0], TypeError, "W.mT @ x takes an x [b, h, i, e], not [1.0]"),
    "W.mT @ other queries": (
        lambda: W.mT @ v.repeat(1, 2, 1, 1), ValueError,
        "W.mT @ x: x has shape [2, 6, 7, 13], but W.mT reads [b, h, i, e] = [2, 6, 5, e]",
    ),
    "W.mT @ integers": (
        lambda: W.mT @ q.long(), TypeError, "W.mT @ x: x must be a float tensor, not torch.int64",
    ),
    "W.mT @ another device": (
        lambda: W.mT @ q.to("meta"), ValueError, "W.mT @ x: x is on meta, but query on cpu"
    ),
    "W.sum of the heads": (
        lambda: W.sum(1), ValueError, "W.sum goes over the queries (-2) or the keys (-1), not 1"
    ),
    "select out of range": (
        lambda: W.select(heads=[6]), ValueError, "heads names 6, but there are 6 (0 to 5)"
    ),
    "two lists of indices": (
        lambda: W[[0, 1], [0, 1]], IndexError, "W takes one list or tensor of indices at a time; for several: W.select("
    ),
    "select a float": (
        lambda: W.select(queries=0.5), TypeError,
        "queries must be an int, a slice, a range, a list of ints or an int tensor, not 0.5",
    ),
    "index out of range": (
        lambda: W[0, 6], IndexError, "index 6 is out of range for W's heads, of which there are 6"
    ),
    "index in five dimensions": (
        lambda: W[0, 0, 0, 0, 0], IndexError, "W has four dimensions [b, h, i, j]; it can't be indexed by"
    ),
    "index by None": (lambda: W[None], IndexError, "W has four dimensions [b, h, i, j]; it can't be indexed by"),
    "index by text": (lambda: W["a"], TypeError, "batch must hold ints, but got 'a'"),
    # explain and plan
    "explain with readouts": (
        lambda: es.explain(q, k, v, readouts=es.Entropy()), TypeError, "explain takes no readouts="
    ),
    "explain with an engine": (lambda: es.explain(q, k, v, engine="stream"), TypeError, "explain takes no engine="),
    "explain with dropout": (
        lambda: es.explain(q, k, v, dropout=0.5), ValueError,
        "explain shows the weights that are certain; leave dropout out",
    ),
    "explain without a value": (
        lambda: es.explain(q, k, None), TypeError, "value must be a tensor [b, g, j, e], not None"
    ),
    "plan of an unknown setting": (
        lambda: es.plan(q, k, v, colour=1), TypeError, "unexpected keyword argument 'colour'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("engine", ["reference", "stream", "auto"])
def test_functions_that_give_other_shapes_are_refused_by_every_engine(engine: str) -> None:
    with pytest.raises(ValueError, match=r"where\(fn\): fn\(b, h, p, j\) returned shape \[5, 4\]"):
        attention(es.where(lambda b, h, p, j: boolean[:, :4]), offset=0, engine=engine)
    with pytest.raises(ValueError, match=r"score_mod\(score, b, h, p, j\) must return the scores"):
        attention(score_mod=lambda s, b, h, p, j: s[:, :4], offset=0, engine=engine)


def test_refusals_come_before_any_work() -> None:
    """A readout that doesn't fit is refused although the output could be computed."""
    asked = []
    with pytest.raises(ValueError, match="Rows's queries"):
        attention(score_mod=lambda s, *at: asked.append(s) or s, offset=0, readouts=[es.Entropy(), es.Rows(9)])
    assert not asked
