"""Rules about single pairs: named ones, boolean tensors, and any function of the indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from einsight.coordinates import At, Choice, Run, Sizes, as_axis, as_chosen, broadcasts, numbers, to_four
from einsight.masks.mask import Bound, Mask, shown
from einsight.values import check_dense, check_takes, described, is_sure, may_look


class _Pairs(Mask):
    def __init__(self, queries: Choice, keys: Choice):
        self.queries, self.keys = queries, keys

    def check(self, sizes: Sizes) -> None:
        as_axis(self.queries, sizes.i, "pairs' queries")
        as_axis(self.keys, sizes.j, "pairs' keys")

    def _named(self, at: At) -> tuple[Bool[Tensor, "1 1 i 1"], Tensor]:
        queries = numbers(as_axis(self.queries, at.sizes.i, "pairs' queries"), at.device)
        keys = numbers(as_axis(self.keys, at.sizes.j, "pairs' keys"), at.device)
        return torch.isin(at.i, queries), keys

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        named, _ = self._named(at)
        keys = as_axis(self.keys, at.sizes.j, "pairs' keys")
        if isinstance(keys, Run):
            return named * keys.start, named * keys.stop, True
        if not may_look(keys):
            return 0, at.sizes.j, False
        lo, hi = int(keys.min()), int(keys.max()) + 1
        return named * lo, named * hi, keys.unique().numel() == hi - lo

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        named, keys = self._named(at)
        return named & torch.isin(at.j, keys)

    def __repr__(self) -> str:
        return f"pairs({shown(self.queries)}, {shown(self.keys)})"


def pairs(queries: object, keys: object) -> Mask:
    """The pairs of the named queries and keys: ints, slices, ranges, lists or int tensors; negative from the end.

    `~pairs(…)` cuts exactly these edges (attention knockout; Geva et al. 2023, arXiv:2304.14767).

    >>> import einsight as es
    >>> print((~es.pairs(queries=[-1], keys=slice(0, 2))).show(2, 3))
    ■ ■ ■
    · · ■
    """
    return _Pairs(as_chosen(queries, "pairs' queries"), as_chosen(keys, "pairs' keys"))


class _Dense(Mask):
    def __init__(self, tensor: Bool[Tensor, ...], name: str, shows: bool):
        if tensor.ndim > 4:
            raise ValueError(f"{name} has {tensor.ndim} dimensions, more than [b, h, i, j]")
        self.tensor, self.name, self.shows, self.shape = to_four(tensor), name, shows, list(tensor.shape)

    def check(self, sizes: Sizes) -> None:
        if not broadcasts(self.shape, sizes):
            raise ValueError(
                f"{self.name} has shape {self.shape}, which does not broadcast to "
                f"[b, h, i, j] = {[sizes.b, sizes.h, sizes.i, sizes.j]}"
            )

    def extent(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        # A causal mask, a window, or padding in the form of a tensor is one interval for each query as well.
        seen, j = self.allowed(at), at.sizes.j
        if seen.shape[-1] != j or seen.numel() == 0:
            return 0, j, False
        count = seen.sum(-1, keepdim=True)
        lo = seen.to(torch.uint8).argmax(-1, keepdim=True)
        last = j - seen.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
        hi = torch.where(count > 0, last, lo)
        return lo, hi, is_sure(hi - lo == count)

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        named = at.take(self.tensor)
        return named if self.shows else ~named

    def given(self, at: At) -> tuple[Bool[Tensor, "#b #h #i #j"], bool] | None:
        return at.take(self.tensor), self.shows

    def __repr__(self) -> str:
        return f"{'allow' if self.shows else 'forbid'}(tensor{self.shape})"


def textbook(mask: Bool[Tensor, ...]) -> Mask:
    """`forbid(mask)`, for a mask that the user knows as `mask`."""
    return _Dense(mask, "mask", shows=False)


def _dense(name: str, tensor: object, true_means: str) -> Mask:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        hint = "; if it holds 0 and 1, write tensor.bool()" if isinstance(tensor, Tensor) else ""
        raise TypeError(f"{name} takes a boolean tensor, True where {true_means}, not {described(tensor)}{hint}")
    check_dense(name, tensor)
    return _Dense(tensor, f"{name}(tensor)", shows=name == "allow")


def allow(tensor: Bool[Tensor, ...]) -> Mask:
    """A boolean tensor, True where the query may see the key; it broadcasts to [b, h, i, j].

    >>> import einsight as es, torch
    >>> print(es.allow(torch.tensor([[True, False]])).show(2, 2))
    ■ ·
    ■ ·
    """
    return _dense("allow", tensor, "a query may see a key")


def forbid(tensor: Bool[Tensor, ...]) -> Mask:
    """A boolean tensor, True where the query may not see the key; it broadcasts to [b, h, i, j].

    >>> import einsight as es, torch
    >>> print(es.forbid(torch.ones(3, 3).triu(1).bool()).show(3, 3))
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    """
    return _dense("forbid", tensor, "a query may not see a key")


class _Where(Mask):
    positional = True

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]):
        self.fn = fn

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        seen = self.fn(at.b, at.h, at.p, at.j)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            raise TypeError(f"where(fn): fn(b, h, p, j) must return a boolean tensor, but returned {described(seen)}")
        if seen.ndim > 4 or any(n not in (1, m) for n, m in zip(to_four(seen).shape, at.shape, strict=True)):
            raise ValueError(
                f"where(fn): fn(b, h, p, j) returned shape {list(seen.shape)}, which does not broadcast to the block "
                f"{list(at.shape)} it was asked about; build it from the index tensors it is given"
            )
        return to_four(seen)


def where(fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """Any rule: fn(b, h, p, j) is given int64 index tensors that broadcast to a block [b, h, i, j], and
    returns booleans.

    Raises:
        TypeError: what isn't a function; or, when it is asked, a function that doesn't return booleans.

    >>> import einsight as es
    >>> print(es.where(lambda b, h, p, j: (p - j) % 2 == 0).show(3, 3))
    ■ · ■
    · ■ ·
    ■ · ■
    """
    if isinstance(fn, Tensor):
        raise TypeError(f"where's fn must be a function, not {described(fn)}; for a tensor write allow or forbid")
    check_takes("where's fn", fn, "b, h, p, j")
    return _Where(fn)
