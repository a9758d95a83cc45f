"""Attention of Hugging Face's models, caught where they look up the function that computes it.

There the key heads are not repeated yet, the module is at hand, and their own "eager" code, which no function mode
can tell from other arithmetic, is seen as well.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor, nn

import einsight as es
from einsight.lens.call import Call, make
from einsight.lens.compiled import report
from einsight.lens.faces import Face, interface
from einsight.lens.huggingface.attention import mask_of
from einsight.lens.rules import of_mask

_lock = threading.Lock()
_users = 0
_original: Any = None


def attach(run: Callable[[Face, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> bool:
    """Let `run` run every attention function that a Hugging Face model looks up, until `detach`.

    False if there is nothing to attach to.
    """
    global _users, _original
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not hasattr(modeling, "AttentionInterface"):
        return False
    with _lock:
        _users += 1
        if _users == 1:
            _original = modeling.AttentionInterface.get_interface
            modeling.AttentionInterface.get_interface = _looking_up(_original, run)
    return True


def detach() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            sys.modules["transformers.modeling_utils"].AttentionInterface.get_interface = _original


def _looking_up(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():  # what else is computed in a graph is seen there
            return _reporting(function) if (attn_implementation or "eager") == "eager" else function
        return _watched(function, attn_implementation, run)

    return get_interface


def _watched(function: Callable[..., Any], kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
    reading = _READINGS.get(kind or "eager", _FLASH if "flash" in (kind or "") else None)
    if reading is None:
        return function  # computes through something else that is seen, or isn't

    face = interface(reading)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return run(face, function, args, kwargs)

    return watched


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """An eager attention function that is being compiled."""
    if torch.compiler.is_exporting():
        return function

    def reporting(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = _given(module, *args, **kwargs)
        report(query, key, value, attn_mask=given.pop("mask"), **given)
        return function(module, query, key, value, *args, **kwargs)

    return reporting


def _eager(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Call:
    call = make(query, key, value, **_given(module, *args, **kwargs), dropout=kwargs.get("dropout", 0.0))
    call._window = kwargs.get("sliding_window")
    return call


def _given(
    module: Any, attention_mask: Any = None, scaling: Any = None, *args: Any, position_bias: Any = None, **kwargs: Any
) -> dict[str, Any]:
    return {
        "mask": attention_mask,
        "bias": position_bias,
        "scale": scaling,
        "softcap": kwargs.get("softcap"),
        "sink": kwargs.get("s_aux", getattr(module, "sinks", None)),
    }


def _sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: Any = 0.0,
    scaling: Any = None,
    is_causal: Any = None,
    **kwargs: Any,
) -> Call:
    bias = kwargs.get("position_bias")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = bool(is_causal) and query.shape[2] > 1 and attention_mask is None
    call = make(query, key, value, attention_mask, is_causal=is_causal, bias=bias, scale=scaling, dropout=dropout)
    call._window = kwargs.get("sliding_window")
    return call


def _einsight(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    is_causal: Any = None,
    **kwargs: Any,
) -> Call:
    mask, offset, added = mask_of(module, query, key, attention_mask, is_causal)
    given = _given(module, attention_mask if added is None else added, **kwargs)
    if offset is None:
        call = make(query, key, value, **given, dropout=kwargs.get("dropout", 0.0))
    else:
        if mask is None and attention_mask is None:
            offset = None
        given["mask"] = None
        call = make(query, key, value, **given, offset=offset, dropout=kwargs.get("dropout", 0.0))
        call.rule = of_mask(mask, query.shape[2], key.shape[2], call.offset)
    call._window = kwargs.get("sliding_window")
    return call


def _flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: Any = 0.0,
    scaling: Any = None,
    **kwargs: Any,
) -> Call:
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None:  # which a static cache is longer than
        key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
    i, j = query.shape[2], key.shape[2]
    call = make(
        query,
        key,
        value,
        None,
        scale=scaling,
        softcap=kwargs.get("softcap"),
        sink=kwargs.get("s_aux"),
        offset=j - i,
        dropout=dropout,
    )
    call._window = kwargs.get("sliding_window")
    before = None if call._window is None or j <= call._window else call._window - 1
    parts = [] if before is None and not is_causal else [es.window(before, 0 if is_causal else before)]
    if attention_mask is not None:
        parts.append(es.padding(attention_mask[:, -j:].bool()))
    elif (packed := _packed(len(query), i, j, **kwargs)) is not None:
        parts.append(packed)
    call.rule = of_mask(reduce(and_, parts) if parts else None, i, j, j - i)
    return call


def _packed(
    b: int, i: int, j: int, position_ids: Any = None, cu_seq_lens_k: Any = None, **kwargs: Any
) -> es.Mask | None:
    """Sequences one after another in a row, by their lengths, or where positions start again, as transformers tells
    them."""
    if cu_seq_lens_k is not None:
        return es.documents(cu_seqlens=cu_seq_lens_k)
    if b != 1 or i != j or position_ids is None or position_ids.numel() != j:
        return None
    places = position_ids.reshape(-1)
    first = places.min()
    if torch.equal(places, first + torch.arange(j, device=places.device)):
        return None
    return es.documents((places == first).cumsum(0))


_READINGS: dict[str, Callable[..., Call]] = {"eager": _eager, "sdpa": _sdpa, "einsight": _einsight}
_FLASH = _flash
