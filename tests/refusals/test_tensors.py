"""What is refused of query, key, value, offset and the numbers beside them."""

from __future__ import annotations

import pytest
import torch
from refusals.given import Refusal, W, attention, check, elsewhere, k, q, v

import einsight as es

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
    "no tensor": (lambda: attention(query=[1.0]), TypeError, "query must be a tensor [b, h, i, d], not [1.0]"),
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
        lambda: attention(value=elsewhere(2, 3, 7, 13)), ValueError,
        "value is on cuda:0 but query on cpu; they must be alike: value.to(query.device)",
    ),
    "batch items of key": (
        lambda: attention(key=k[:1]), ValueError,
        "key has 1 batch items but query has 2 (query [2, 6, 5, 11], key [1, 3, 7, 11], value [2, 3, 7, 13]); "
        "to use the one item for all write key.expand(2, -1, -1, -1)",
    ),
    "batch items of query": (
        lambda: attention(query=q[:1]), ValueError,
        "to use the one item for all write query.expand(2, -1, -1, -1)",
    ),
    "batch items of value": (
        lambda: attention(value=v[:1]), ValueError,
        "value has 1 batch items but query has 2 (query [2, 6, 5, 11], key [2, 3, 7, 11], value [1, 3, 7, 13]); "
        "to use the one item for all write value.expand(2, -1, -1, -1)",
    ),
    "more than one item": (
        lambda: attention(query=torch.cat([q, q[:1]])), ValueError,
        "key has 2 batch items but query has 3 (query [3, 6, 5, 11], key [2, 3, 7, 11], value [2, 3, 7, 13])",
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
        "scale must be a number, not a tensor of torch.float32 []; multiply the query by it",
    ),
    "scale ∞": (lambda: attention(scale=float("inf")), ValueError, "scale must be finite, not inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check(REFUSALS[name])
