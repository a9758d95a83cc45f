"""Rules about positions and lengths: causal, window, lengths, prefix, padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor

from einsight.coordinates import At, Sizes, as_int, is_int
from einsight.masks.mask import FAR, Bound, Mask, check_items, describe, larger, shown
from einsight.values import check_dense, described, is_sure, may_look


class Window(Mask):
    positional = True

    def __init__(self, left: int | None, right: int | None):
        self.left, self.right = left, right

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        lo, hi = self.ahead()
        return 0 if lo is None else at.p + lo, at.sizes.j if hi is None else at.p + hi, True

    def ahead(self) -> tuple[int | None, int | None]:
        return None if self.left is None else -self.left, None if self.right is None else self.right + 1

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.device)
        if self.left is not None:
            allowed = at.j >= at.p - self.left
        return allowed if self.right is None else allowed & (at.j <= at.p + self.right)

    def __repr__(self) -> str:
        return "causal()" if (self.left, self.right) == (None, 0) else f"window({self.left}, {self.right})"


def causal() -> Mask:
    """Keys up to the query's own position: j ≤ p.

    >>> import einsight as es
    >>> print(es.causal().show(2, 4, offset=2))
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    return Window(None, 0)


def window(left: int | None, right: int | None) -> Mask:
    """Keys from p - left to p + right, both included; None is no limit on that side.

    Hugging Face's `sliding_window=W` is `window(W - 1, 0)`.

    Raises:
        TypeError, ValueError: a `left` or `right` that is neither an int nor None; a window that holds no key.

    >>> import einsight as es
    >>> print(es.window(1, 0).show(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """
    left, right = as_int(left), as_int(right)  # type: ignore[assignment]
    for name, side in (("left", left), ("right", right)):
        if side is not None and not is_int(side):
            raise TypeError(f"window's {name} must be a number of keys or None, not {described(side)}")
    if left is not None and right is not None and left + right < 0:
        raise ValueError(f"window({left}, {right}) holds no key: left + right must be at least 0; None is no limit")
    # What lies beyond every sequence is no limit either, and wouldn't fit beside positions in an int64.
    left, right = (None if side is not None and side >= FAR else side for side in (left, right))
    return Window(left, right)


def _per_item(name: str, values: object) -> int | Int[Tensor, " b"]:
    """One count for all items, or one for each."""
    values = [as_int(n) for n in values] if isinstance(values, list | tuple) else as_int(values)
    if is_int(values):
        if values < 0:
            raise ValueError(f"{name} takes a number of keys, 0 or more, not {values}")
        return min(values, FAR)  # so that it fits beside positions in an int64
    if isinstance(values, Sequence) and not isinstance(values, str):
        counts = [min(n, FAR) for n in values if is_int(n)]
        values = torch.tensor(counts, dtype=torch.int64) if len(counts) == len(values) else values
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} takes an int, a list of ints or an int tensor [b], not {described(values)}")
    if values.dtype.is_floating_point or values.dtype == torch.bool or values.ndim > 1:
        hint = "; for a mask of valid keys [b, j] write padding(keep)" if values.ndim == 2 else ""
        raise TypeError(f"{name} takes an int or an int tensor [b], not {values.dtype} {list(values.shape)}{hint}")
    check_dense(name, values)
    if may_look(values) and bool((values < 0).any()):
        raise ValueError(f"{name} takes numbers of keys, 0 or more, not {values.tolist()}")
    return values.detach().reshape(-1).to(torch.int64).clamp(max=FAR)


class _Lengths(Mask):
    def __init__(self, n: int | Int[Tensor, " b"]):
        self.n = n

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.n, Tensor):
            check_items(describe(self), len(self.n), sizes)

    def extent(self) -> tuple[int, int]:
        return (len(self.n) if isinstance(self.n, Tensor) else 1), 1

    def _n(self, at: At) -> Bound:
        return at.take(self.n[:, None, None, None]) if isinstance(self.n, Tensor) else self.n

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        return 0, self._n(at), True

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return at.j < self._n(at)

    def __repr__(self) -> str:
        return f"{describe(self)}({shown(self.n)})"


def lengths(n: int | Sequence[int] | Integer[Tensor, " b"]) -> Mask:
    """The first n keys of each item: j < n; n is an int, a list of ints or an int tensor [b].

    >>> import einsight as es
    >>> es.lengths([1, 3]).dense(1, 3)[:, 0, 0]
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    return _Lengths(_per_item("lengths", n))


class _Prefix(_Lengths):
    positional = True

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        return 0, larger(at.p + 1, self._n(at)), True

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return (at.j < self._n(at)) | (at.j <= at.p)


def prefix(n: int | Sequence[int] | Integer[Tensor, " b"]) -> Mask:
    """A prefix that all may see, causal after it: j < n or j ≤ p; n is an int, or one per item [b].

    >>> import einsight as es
    >>> print(es.prefix(2).show(3, 3))
    ■ ■ ·
    ■ ■ ·
    ■ ■ ■
    """
    return _Prefix(_per_item("prefix", n))


class Padding(Mask):
    def __init__(self, keep: Bool[Tensor, "b j"]):
        self.keep = keep

    def check(self, sizes: Sizes) -> None:
        b, j = self.keep.shape
        check_items("padding", b, sizes)
        if j != sizes.j:
            raise ValueError(f"padding speaks of {j} keys (keep {[b, j]}), but key has {sizes.j}")

    def extent(self) -> tuple[int, int]:
        return len(self.keep), 1

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        keep = at.take(self.keep[:, None, None, :])
        if keep.shape[-1] == 0:
            return 0, 0, True
        count = keep.sum(-1, keepdim=True)
        first = keep.to(torch.uint8).argmax(-1, keepdim=True)
        last = keep.shape[-1] - keep.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
        hi = torch.where(count > 0, last, first)
        return first, hi, is_sure(hi - first == count)

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return at.take(self.keep[:, None, None, :])

    def __repr__(self) -> str:
        return f"padding({shown(self.keep)})"


def padding(keep: Shaped[Tensor, "b j"]) -> Mask:
    """The keys that are not padding: `keep`, a tokenizer's attention mask [b, j], bool or 0/1, padded left or right.

    Raises:
        TypeError, ValueError: another shape, floats, or other numbers than 0 and 1.

    >>> import einsight as es, torch
    >>> es.padding(torch.tensor([[0, 0, 1]])).dense(1, 3)
    tensor([[False, False,  True]])
    """
    if not isinstance(keep, Tensor):
        raise TypeError(f"padding takes a tensor [b, j], True or 1 where the token is real, not {described(keep)}")
    check_dense("padding's keep", keep)
    if keep.ndim != 2:
        raise ValueError(f"padding takes a tensor [b, j], but keep has {keep.ndim} dimensions {list(keep.shape)}")
    if keep.dtype.is_floating_point or keep.dtype.is_complex:
        raise TypeError(
            f"padding takes bool or 0/1 integers, not {keep.dtype}; if it holds 0. and 1., write keep.bool()"
        )
    if keep.dtype != torch.bool and may_look(keep) and bool(((keep != 0) & (keep != 1)).any()):
        raise ValueError("padding takes bool or 0/1 integers, but keep holds other numbers")
    return Padding(keep.detach().bool())
