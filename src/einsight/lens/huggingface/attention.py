"""The attention function that Hugging Face's models call under the name "einsight"."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import einsight as es
from einsight.lens.huggingface.handed import HandedMask, written_out

# Arguments of other implementations that change the weights, and what we would have to know to follow them.
_REFUSED = {
    "indices": "which keys each query was chosen to see (sparse attention of DeepSeek V3.2's kind)",
    "block_indices": "which blocks of keys each query was chosen to see",
    "cache": "the pages of continuous batching's cache",
}


def attention(
    module: nn.Module,
    query: Float[Tensor, "_ h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"],
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "b i h e"], Float[Tensor, "b h i j"] | None]:
    """(output [b, i, h, e], weights [b, h, i, j] if the model was asked for `output_attentions`, else None)."""
    for name, what in _REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} hands {name}= to its attention function, {what}, which "
                'attn_implementation="einsight" does not follow; use model.set_attn_implementation("eager")'
            )
    sink = s_aux if s_aux is not None else others.get("sinks", getattr(module, "sinks", None))
    mask, offset, bias = mask_of(module, query, key, attention_mask, is_causal)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if query.shape[0] == 1 < key.shape[0]:  # learned queries, the same for every item
        query = query.expand(key.shape[0], -1, -1, -1)
    settings: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "bias": bias,
        "sink": sink,
        "offset": offset,
        "dropout": dropout,
    }
    if not _wants_weights(others):
        return es.attention(query, key, value, mask, **settings).transpose(1, 2).contiguous(), None
    output, weights = es.attention(query, key, value, mask, **settings, readouts=es.Weights())
    return output.transpose(1, 2).contiguous(), weights.to(query.dtype)


def mask_of(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> tuple[es.Mask | None, int | None, Tensor | None]:
    """The mask as a rule, where query 0 stands, and what is to be added to the scores."""
    i, j = query.shape[2], key.shape[2]
    if isinstance(mask, HandedMask):
        if mask.shape[2:] == (i, j):
            return mask.rule, mask.offset, None
        mask = written_out(mask)  # one row for all queries, or a shape that `attention` will refuse
    if mask is None:
        # A causal model always hands a mask, so this one made none: as with "sdpa", query 0 stands at key 0.
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return (es.causal() if causal and i > 1 else None), 0, None
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.dtype.is_floating_point):
        what = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(
            f"attention_mask must be [b, j] (1 for real tokens), or [b, 1, i, j]: bool, True where a query may see a "
            f"key, or float, added to the scores; {type(module).__name__} handed {what}"
        )
    if mask.dtype == torch.bool:
        return es.allow(mask), None, None
    return None, None, mask


def _wants_weights(others: dict[str, Any]) -> bool:
    """Whether the model was called with `output_attentions=True`: some pass it on, most collect by hooks."""
    if others.get("output_attentions"):
        return True
    collected = _collector().get()
    return collected is not None and any("attentions" in name for name in collected)


def _collector() -> Any:
    from transformers.utils import output_capturing

    return output_capturing._active_collector
