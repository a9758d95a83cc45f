"""The two products of attention, in which what may not be seen never touches a result or a gradient.

A hidden key has weight 0, and 0 · v is 0 for every finite v; but 0 · NaN and 0 · ∞ are NaN, and such a leak
always shows as a result that isn't finite. So the products are plain matrix products, and only one whose
result isn't finite is done again with selection. Each is the other's derivative, to any order.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

Seen = Bool[Tensor, "n i j"] | None  # None: all are


def inner(a: Float[Tensor, "n i d"], b: Float[Tensor, "n j d"], seen: Seen) -> Float[Tensor, "n i j"]:
    """a bᵀ. The entries that aren't `seen` may hold anything, and get no gradient."""
    return _Inner.apply(a, b, seen)


def weighted(w: Float[Tensor, "n i j"], x: Float[Tensor, "n j e"], seen: Seen) -> Float[Tensor, "n i e"]:
    """w x over the keys that are `seen`, whose weights alone may differ from 0."""
    return _Weighted.apply(w, x, seen)


def select_product(w: Float[Tensor, "n i j"], x: Float[Tensor, "n j e"], seen: Seen) -> Float[Tensor, "n i e"]:
    """`weighted` without derivatives."""
    result = product(w, x)
    if seen is None or all_finite(result):
        return result
    # The sum of the finite terms, then what the others make of it: NaN if any is, or if both infinities meet.
    w = w.where(seen, 0)
    result = product(w, x.where(x.isfinite(), 0))

    def count(terms: Tensor, of: Tensor) -> Tensor:
        return torch.bmm((terms & seen).to(w.dtype), of.to(w.dtype))

    up, down = x == torch.inf, x == -torch.inf
    rises = count(w > 0, up) + count(w < 0, down) > 0
    falls = count(w > 0, down) + count(w < 0, up) > 0
    spoils = count(torch.ones_like(seen), x.isnan()) + count(w == 0, up | down) > 0
    result = result.masked_fill(rises, torch.inf).masked_fill(falls, -torch.inf)
    return result.masked_fill(spoils | (rises & falls), torch.nan)


def product(w: Float[Tensor, "n i j"], x: Float[Tensor, "n j e"]) -> Float[Tensor, "n i e"]:
    """w x. That with a single vector would have other bits where the vector begins elsewhere in memory."""
    return torch.bmm(w, pad(x, (0, 1)))[..., :1].clone() if x.shape[2] == 1 else torch.bmm(w, x)


def all_finite(x: Tensor) -> bool:
    try:
        # One pass. Finite numbers whose sum overflows take the careful way too, which is right for all.
        return bool(x.sum().isfinite())
    except RuntimeError:  # torch.vmap can't branch on a value; the careful way is right for every value
        return False


def _only(x: Tensor, seen: Seen) -> Tensor:
    return x if seen is None else x.where(seen, 0)


def _turned(seen: Seen) -> Bool[Tensor, "n j i"] | None:
    return None if seen is None else seen.mT


class _Inner(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, seen: Tensor | None) -> Tensor:
        return torch.bmm(a, b.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b, seen = ctx.saved_tensors
        grad = _only(grad, seen)
        return (
            _Weighted.apply(grad, b, seen) if ctx.needs_input_grad[0] else None,
            _Weighted.apply(grad.mT, a, _turned(seen)) if ctx.needs_input_grad[1] else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, a_t: Tensor | None, b_t: Tensor | None, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b, seen = ctx.saved_tensors
        terms = [_Inner.apply(*pair, seen) for pair in ((a_t, b), (a, b_t)) if all(t is not None for t in pair)]
        return sum(terms[1:], terms[0])


class _Weighted(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
        return select_product(w, x, seen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        w, x, seen = ctx.saved_tensors
        to_w = None
        if ctx.needs_input_grad[0]:
            to_w = _only(_Inner.apply(grad, x, seen), seen)
            if not all_finite(to_w):
                # What sees a NaN but has no part in the loss shall not spoil what has.
                to_w = _only(_Weighted.apply(grad, x.mT, grad != 0), seen)
        return (
            to_w,
            _Weighted.apply(w.mT, grad, _turned(seen)) if ctx.needs_input_grad[1] else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, w_t: Tensor | None, x_t: Tensor | None, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        w, x, seen = ctx.saved_tensors
        terms = [_Weighted.apply(*pair, seen) for pair in ((w_t, x), (w, x_t)) if all(t is not None for t in pair)]
        return sum(terms[1:], terms[0])
