"""Attention inside `nn.MultiheadAttention`, seen with its own code computing it.

`F.multi_head_attention_forward` hands itself to an active function mode, and the attention inside it would go
unseen. Called again within the mode it would hand itself over for ever; so it runs from a copy whose check says
that nobody is looking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from einsight.lens import compiled
from einsight.lens.call import Call, make
from einsight.lens.frames import unwatched


def _reporting(*args: Any, **kwargs: Any) -> Tensor:
    compiled.report(**compiled.arguments(*args, **kwargs))
    return F.scaled_dot_product_attention(*args, **kwargs)


forward = unwatched(F.multi_head_attention_forward)
traced = unwatched(F.multi_head_attention_forward, scaled_dot_product_attention=_reporting)


class WeightsAsked(TorchFunctionMode):
    """Looks into a multi-head attention that was asked for its weights, and so computes by hand.

    `seen` is given the call when the scores are there, `weigh` the weights [b, h, i, j] after the softmax, and
    `finish` the output [b, h, i, e]; the last two give back what the function goes on with.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        seen: Callable[[Call], None],
        weigh: Callable[[Tensor], Tensor],
        finish: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.apart, self.seen, self.weigh, self.finish = (batch, heads), seen, weigh, finish
        self.step = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.step == 0 and function in (torch.bmm, torch.baddbmm):
            mask, query, key = (None, *args) if function is torch.bmm else args
            self.seen(self._call(mask, query, key.mT))
        elif self.step == 1 and function is F.softmax:
            result = self.weigh(result.unflatten(0, self.apart)).flatten(0, 1)
        elif self.step == 2 and function is torch.bmm:
            result = self.finish(result.unflatten(0, self.apart)).flatten(0, 1)
        else:
            return result
        self.step += 1
        return result

    def _call(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Call:
        if mask is not None:
            mask = mask[None] if len(mask) == 1 else mask.unflatten(0, self.apart)
        # The query comes scaled.
        return make(query.unflatten(0, self.apart), key.unflatten(0, self.apart), None, mask, scale=1.0)


def is_cross(query: Tensor, key: Tensor, *_: Any, **__: Any) -> bool:
    """Whether the shapes say so; else the module's name may.

    That they are different tensors says nothing: both may come from the same tokens, as ln(x) twice, or x + positions.
    """
    return query.shape != key.shape


def asks_weights(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("need_weights", True))


def sizes(query: Tensor, heads: int) -> tuple[int, int]:
    return (1 if query.ndim == 2 else query.shape[1]), heads
