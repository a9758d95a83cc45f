"""Attention inside `nn.MultiheadAttention`, seen with its own code computing it.

`F.multi_head_attention_forward` hands itself to an active function mode, and the attention inside it would go
unseen. Called again within the mode it would hand itself over for ever; so it runs from a copy whose check says
that nobody is looking.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from einsight.lens import compiled
from einsight.lens.call import Call, make


def _unwatched(function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    scope = {**function.__globals__, "has_torch_function": lambda tensors: False, **changes}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _reporting(*args: Any, **kwargs: Any) -> Tensor:
    compiled.report(**compiled.arguments(*args, **kwargs))
    return F.scaled_dot_product_attention(*args, **kwargs)


forward = _unwatched(F.multi_head_attention_forward)
traced = _unwatched(F.multi_head_attention_forward, scaled_dot_product_attention=_reporting)


class WeightsAsked(TorchFunctionMode):
    """Catches the scores' product of a multi-head attention that was asked for its weights, and so computes by hand."""

    def __init__(self, batch: int, heads: int, report: Callable[[Call], None]):
        super().__init__()
        self.batch, self.heads, self.report = batch, heads, report
        self.waits = True

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.waits and function in (torch.bmm, torch.baddbmm):
            self.waits = False
            mask, query, key = (None, *args) if function is torch.bmm else args
            self.report(self._call(mask, query, key.mT))
        return function(*args, **(kwargs or {}))

    def _call(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Call:
        apart = (self.batch, self.heads)
        if mask is not None:
            mask = mask[None] if len(mask) == 1 else mask.unflatten(0, apart)
        # The query comes scaled.
        return make(query.unflatten(0, apart), key.unflatten(0, apart), None, mask, scale=1.0)


def is_cross(query: Tensor, key: Tensor, *_: Any, **__: Any) -> bool:
    """Whether the shapes say so; else the module's name may.

    That they are different tensors says nothing: both may come from the same tokens, as ln(x) twice, or x + positions.
    """
    return query.shape != key.shape


def asks_weights(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("need_weights", True))


def sizes(query: Tensor, heads: int) -> tuple[int, int]:
    return (1 if query.ndim == 2 else query.shape[1]), heads
