"""What engines and the functions beside attention refuse."""

from __future__ import annotations

import pytest
import torch
from refusals.given import Refusal, W, attention, boolean, check, elsewhere, k, q, v

import einsight as es

REFUSALS: dict[str, Refusal] = {
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
    # the textbook's function
    "attn_mask": (
        lambda: es.scaled_dot_product_attention(q, k, v, attn_mask=boolean), TypeError,
        "this is einsight's scaled_dot_product_attention, not PyTorch's: instead of attn_mask= write mask=, where True "
        "is masked out (mask=~attn_mask); a float mask is attention(…, bias=)",
    ),
    "plan": (
        lambda: es.plan(q, k, v, dropout_p=0.5), TypeError,
        "this is einsight's plan, not PyTorch's: instead of dropout_p= write dropout=",
    ),
    "explain": (
        lambda: es.explain(q, k, v, is_causal=True), TypeError,
        "this is einsight's explain, not PyTorch's: instead of is_causal= write mask=einsight.causal()",
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
        "scaled_dot_product_attention takes no colour=; its arguments are query, key, value, mask",
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
        lambda: es.merge([1.0], [2.0]), TypeError, "merge takes tensors, but of part 0 one is 1.0"
    ),
    "merge of None": (
        lambda: es.merge(None, None), TypeError, "merge's outputs must be a list of tensors, one for each part, not"
    ),
    "merge of a result without its list": (
        lambda: es.merge(q, q[..., 0]), ValueError,
        "merge takes outputs [b, h, i, e], but that of part 0 is [6, 5, 11]; a single tensor goes in as [output]",
    ),
    "merge of a number": (lambda: es.merge([q], 0.5), TypeError, "merge's lses must be a list of tensors"),
    "merge of integers": (
        lambda: es.merge([q.long()], [q[..., 0]]), TypeError,
        "merge takes float tensors, but part 0 has output torch.int64 and lse torch.float32",
    ),
    "merge across devices": (
        lambda: es.merge([q, elsewhere(2, 6, 5, 11)], [q[..., 0], q[..., 0]]), ValueError,
        "merge: part 1 has its output on cuda:0 and its lse on cpu, but the first output is on cpu; they must be alike",
    ),
    "merge of dtypes": (
        lambda: es.merge([q, q.half()], [q[..., 0], q[..., 0]]), TypeError,
        "merge: part 1 has output torch.float16 and lse torch.float32, but the first has torch.float32 and "
        "torch.float32",
    ),
    # the operator
    "W @ a list": (lambda: W @ [1.0], TypeError, "W @ value takes a value [b, g, j, e], not [1.0]"),
    "W @ three dimensions": (
        lambda: W @ v[0], TypeError, "W @ value takes a value [b, g, j, e], not a tensor of torch.float32 [3, 7, 13]"
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
        lambda: W @ elsewhere(2, 3, 7, 13), ValueError,
        "W @ value: value is on cuda:0, but query on cpu",
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
        lambda: W.mT @ elsewhere(2, 6, 5, 11), ValueError, "W.mT @ x: x is on cuda:0, but query on cpu"
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
    "index by text": (lambda: W["a"], TypeError, "batch must be an int, a slice, a range, a list of ints or an int"),
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
        lambda: es.plan(q, k, v, colour=1), TypeError,
        "plan takes no colour=; its arguments are query, key, value, mask, readouts, engine, scale, softcap, "
        "score_mod, bias, sink, offset, dropout",
    ),
    # names that are nearly right
    "attention's scal": (lambda: attention(scal=1.0), TypeError, "attention takes no scal=; did you mean scale=?"),
    "attention's readout": (
        lambda: attention(readout=es.Entropy()), TypeError, "attention takes no readout=; did you mean readouts=?"
    ),
    "PyTorch's name for AttentionWeights": (
        lambda: es.AttentionWeights(q, k, is_causal=True), TypeError,
        "this is einsight's AttentionWeights, not PyTorch's: instead of is_causal= write mask=einsight.causal()",
    ),
    "AttentionWeights' readouts": (
        lambda: es.AttentionWeights(q, k, readouts=es.Entropy()), TypeError, "AttentionWeights takes no readouts="
    ),
    "explain's sinks": (lambda: es.explain(q, k, v, sinks=1.0), TypeError, "explain takes no sinks=; did you mean"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check(REFUSALS[name])
