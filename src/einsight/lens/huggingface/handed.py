"""A mask on its way through a Hugging Face model, as a rule instead of numbers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._pytree import tree_map_only

import einsight as es


class HandedMask(Tensor):
    """A boolean mask [b, 1, i, j], True where a query may see a key, that holds its rule and no [i, j] memory.

    Models look at masks, move them and hand them on; that keeps the rule. What else they may do with one (slice it,
    add to it) is done on the mask written out, so that it is never wrong.
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
            with torch._C.DisableTorchFunctionSubclass():
                moved = function(*args, **kwargs)
            given = args[0]
            if moved.dtype == torch.bool and moved.shape == given.shape:
                return _wrap(moved, given.rule, given.offset)
        args, kwargs = tree_map_only(HandedMask, written_out, (args, kwargs))
        return function(*args, **kwargs)


_LOOKS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "is_meta", "layout", "is_leaf")
    ),
    *(
        getattr(Tensor, name)
        for name in ("size", "stride", "dim", "numel", "is_floating_point", "is_complex", "get_device", "__len__")
    ),
}
_HANDS_ON = {Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.detach, Tensor.bool}


def hand(rule: es.Mask | None, offset: int, b: int, i: int, j: int, device: torch.device | str) -> HandedMask:
    """The rule (None: everything may be seen) as a mask that models take for a tensor; query 0 stands at `offset`."""
    return _wrap(torch.ones((), dtype=torch.bool, device=device).expand(b, 1, i, j), rule, offset)


def _wrap(shape: Tensor, rule: es.Mask | None, offset: int) -> HandedMask:
    mask = shape.as_subclass(HandedMask)
    mask.rule, mask.offset = rule, offset
    return mask


def written_out(
    mask: HandedMask,
) -> Bool[
    Tensor,
    (
        b  # h i j
    ),
]:
    """The mask as a plain tensor."""
    b, _, i, j = mask.shape
    if mask.rule is None:
        return torch.ones(b, 1, i, j, dtype=torch.bool, device=mask.device)
    dense = mask.rule.dense(i, j, offset=mask.offset).to(mask.device)
    return dense.expand(b, -1 if dense.ndim == 4 else 1, i, j)
