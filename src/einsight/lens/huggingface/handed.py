"""A mask on its way through a Hugging Face model, as a rule instead of numbers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

import einsight as es


class HandedMask(Tensor):
    """An additive mask [b, 1, i, j] that holds its rule and no [i, j] memory.

    Models look at masks, move them and hand them on; that keeps the rule. What else they may do with one (slice it,
    add to it) is done on the mask written out as "eager" has it, which every model knows, so that it is never wrong.
    """

    rule: es.Mask | None
    offset: int

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function in _HANDS_ON:
            given = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                # One number is moved, not [i, j] copies of it.
                moved = function(given.as_strided((), ()), *args[1:], **kwargs)
                if moved.dtype.is_floating_point:
                    return hand(moved.expand(given.shape), given.rule, given.offset)
        args, kwargs = tree_map_only(HandedMask, written_out, (args, kwargs))
        return function(*args, **kwargs)


_LOOKS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "is_meta", "layout", "is_leaf")
    ),
    *(
        getattr(Tensor, name)
        for name in (
            "size",
            "stride",
            "dim",
            "numel",
            "is_floating_point",
            "is_complex",
            "is_contiguous",
            "get_device",
            "__len__",
        )
    ),
}
_HANDS_ON = {Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.detach, Tensor.contiguous, Tensor.clone}


def hand(like: Tensor, rule: es.Mask | None, offset: int) -> HandedMask:
    """The rule (None: everything may be seen) as a mask that models take for a tensor; query 0 stands at `offset`.

    `like` is a number expanded to [b, 1, i, j], of the dtype and on the device wanted.
    """
    mask = like.as_subclass(HandedMask)
    mask.rule, mask.offset = rule, offset
    return mask


def written_out(mask: HandedMask) -> Float[Tensor, "#b #h i j"]:
    """The mask as a plain tensor: 0 where a query may see a key, else the lowest number."""
    b, _, i, j = mask.shape
    with torch._C.DisableTorchFunctionSubclass():
        added = mask.new_zeros(b, 1, i, j).as_subclass(Tensor)
    if mask.rule is None:
        return added
    seen = mask.rule.dense(i, j, offset=mask.offset).to(mask.device)
    return added.masked_fill(~seen, torch.finfo(mask.dtype).min)
