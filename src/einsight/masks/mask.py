"""Masks: rules that say which keys a query may see.

A rule knows two things of itself. `bounds` gives one interval of keys per query, which is all that a fast
engine has to know of nearly every mask in use; `allowed` answers for single pairs, where the interval is only
a hull. Rules combine with `&` (both), `|` (either) and `~` (not).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from einsight.coordinates import At, Axis, Run, Sizes, as_int, is_int, numbers
from einsight.room import check_fits
from einsight.values import check_dense, described, is_sure, may_look

Bound = int | Tensor  # an int, or an int64 tensor that broadcasts to [b, h, i, 1]


class Mask:
    """Which keys j a query i, standing at position p, may see.

    Rules combine with `&`, `|` and `~`. One's own is a subclass with `allowed`, and with `bounds` if it knows an
    interval of keys for each query.

    >>> import einsight as es
    >>> print((es.causal() & ~es.pairs(queries=[2], keys=[0])).show(3, 3))
    ■ · ·
    ■ ■ ·
    · ■ ■
    """

    positional = False  # whether the rule needs to know where the queries stand among the keys

    def check(self, sizes: Sizes) -> None:
        """Refuse a problem that the rule's tensors don't fit."""

    def extent(self) -> tuple[int, int]:
        """How many batch items and heads the rule's own tensors speak of; 1 where they are all alike."""
        return 1, 1

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        """(lo, hi, exact): the visible keys lie in [lo, hi); exact says that all of those are visible."""
        return 0, at.sizes.j, False

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        """Whether each query of a block may see each of its keys."""
        raise NotImplementedError

    def ahead(self) -> tuple[int | None, int | None] | None:
        """The bounds as numbers of keys ahead of the query's position, None for no bound, if every query has the same
        and they are exact."""
        return None

    # A third way, for engines that compare in place: what a rule is made of.

    def factors(self) -> tuple[Mask, ...]:
        """The rules of which a query may see what all of them allow."""
        return (self,)

    def given(self, at: At) -> tuple[Bool[Tensor, "#b #h #i #j"], bool] | None:
        """The tensor that the rule is, if it is one, and whether True shows a key."""
        return None

    def ids(self, at: At) -> tuple[Int[Tensor, "#b 1 i 1"], Int[Tensor, "#b 1 1 j"]] | None:
        """The queries' and the keys' ids, if the rule says that they be alike."""
        return None

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _as_operand(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, _as_operand(other, "|"))

    def __invert__(self) -> Mask:
        return _Not(self)

    def __repr__(self) -> str:
        return f"{describe(self)}(…)"

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with & | ~ instead of and, or, not")

    def dense(
        self, i: int, j: int, *, b: int | None = None, h: int | None = None, offset: int | Tensor | None = None
    ) -> Bool[Tensor, "*bh i j"]:
        """The mask as a boolean tensor, True where query i may see key j.

        Shaped [i, j], or [b, h, i, j] (h = 1 where heads are alike) when the rule's tensors differ between batch
        items or heads; for a function of b or h (`where`) say how many there are. `offset` says where query 0
        stands among the keys: see `einsight.attention`.

        >>> import einsight as es
        >>> es.causal().dense(2, 3, offset=1)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        items, heads = self.extent()
        for name, n in (("i", i), ("j", j), ("b", 1 if b is None else b), ("h", 1 if h is None else h)):
            if not is_int(n) or n < 0:
                raise ValueError(f"{name} must be a number, 0 or more, not {described(n)}")
        if b is None:
            b = max(items, offset.numel() if isinstance(offset, Tensor) else 1)
        sizes = Sizes(b, heads if h is None else h, 1, i, j, 1, 1)
        start = check_offset(offset, sizes, needed_by="the mask" if self.positional else None)
        self.check(sizes)
        way_out = "Ask for fewer queries or keys; attention itself never holds it"
        check_fits(f"the mask of {i} × {j} as a tensor", b * sizes.h * i * j, torch.device("cpu"), way_out)
        at = At(sizes, Run(0, b), Run(0, sizes.h), Run(0, i), Run(0, j), place(start, Run(0, i)), torch.device("cpu"))
        allowed = self.allowed(at).expand(b, sizes.h, i, j).clone()
        return allowed[0, 0] if allowed.shape[:2] == (1, 1) else allowed

    def show(
        self, i: int, j: int, *, b: int | None = None, h: int | None = None, offset: int | Tensor | None = None
    ) -> str:
        """The mask as a picture in characters: a row per query, ■ where it may see the key, · where not.

        >>> import einsight as es
        >>> print(es.causal().show(3, 3))
        ■ · ·
        ■ ■ ·
        ■ ■ ■
        """
        dense = self.dense(i, j, b=b, h=h, offset=offset)
        if dense.ndim == 2:
            return _picture(dense)
        return "\n\n".join(
            f"b = {n}, h = {m}\n{_picture(dense[n, m])}" for n in range(len(dense)) for m in range(dense.shape[1])
        )


def _picture(dense: Bool[Tensor, "i j"]) -> str:
    return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in dense.tolist())


def describe(mask: Mask) -> str:
    return type(mask).__name__.strip("_").lower()


def shown(value: object) -> str:
    return f"tensor{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _as_operand(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        raise TypeError(
            f"a mask {sign} a tensor of {other.dtype}: say what True means, es.allow(tensor) or es.forbid(tensor)"
        )
    raise TypeError(f"a mask {sign} {described(other)}: both sides must be masks")


def offset_needed(by: str, sizes: Sizes) -> str:
    """What to say to someone who left the offset out."""
    return (
        f"offset is needed: {by} asks where the queries stand, and there are {sizes.i} queries but "
        f"{sizes.j} keys. offset={sizes.j - sizes.i} (j_len - i_len) if the queries are the last ones, as "
        "with a KV cache; offset=0 if query 0 stands at key 0, as with PyTorch's is_causal"
    )


def check_offset(offset: object, sizes: Sizes, needed_by: str | None) -> int | Int[Tensor, "#b"]:
    """Where query 0 stands among the keys, on the CPU."""
    if offset is None:
        if needed_by is not None and sizes.i != sizes.j:
            raise ValueError(offset_needed(needed_by, sizes))
        return 0
    if isinstance(offset, Tensor):
        if offset.dtype.is_floating_point or offset.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise TypeError(f"offset must be an int or an int tensor [b], not a tensor of {offset.dtype}")
        if offset.ndim > 1 or offset.numel() not in (1, sizes.b):
            raise ValueError(f"offset must be an int or an int tensor [b] = [{sizes.b}], not {list(offset.shape)}")
        check_dense("offset", offset)
        starts = offset.detach().reshape(-1).to("cpu", torch.int64, copy=True)  # which the user may change
        if may_look(starts) and bool(((starts <= -FAR) | (starts >= FAR)).any()):
            raise ValueError(f"{_NEAR}, not {starts.tolist()}")
        return starts
    offset = as_int(offset)
    if not is_int(offset):
        raise TypeError(f"offset must be an int or an int tensor [b], not {described(offset)}")
    if abs(offset) >= FAR:
        raise ValueError(f"{_NEAR}, not {offset}")
    return offset


def place(offset: int | Int[Tensor, "#b"], queries: Axis) -> Int[Tensor, "#b i"]:
    """Where each query stands among the keys: p = i + offset, on the CPU."""
    if isinstance(offset, Tensor):
        return offset[:, None] + numbers(queries)
    if isinstance(queries, Run):
        return torch.arange(offset + queries.start, offset + queries.stop)[None]
    return offset + queries[None]


def larger(a: Bound, b: Bound) -> Bound:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def smaller(a: Bound, b: Bound) -> Bound:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


FAR = 2**40  # positions; no sequence is as long
_NEAR = "offset must be smaller than 2⁴⁰ = 1,099,511,627,776, and larger than −2⁴⁰"


class _And(Mask):
    def __init__(self, left: Mask, right: Mask):
        self.left, self.right = left, right
        self.positional = left.positional or right.positional

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def extent(self) -> tuple[int, int]:
        left, right = self.left.extent(), self.right.extent()
        return max(left[0], right[0]), max(left[1], right[1])

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        lo, hi, exact = self.left.bounds(at)
        other_lo, other_hi, other_exact = self.right.bounds(at)
        return larger(lo, other_lo), smaller(hi, other_hi), exact and other_exact

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return self.left.allowed(at) & self.right.allowed(at)

    def factors(self) -> tuple[Mask, ...]:
        return self.left.factors() + self.right.factors()

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


class _Or(_And):
    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        lo, hi, exact = _within(self.left.bounds(at), at.sizes.j)
        other_lo, other_hi, other_exact = _within(self.right.bounds(at), at.sizes.j)
        empty, other_empty = lo >= hi, other_lo >= other_hi
        touch = empty | other_empty | ((lo <= other_hi) & (other_lo <= hi))
        hull_lo = torch.where(empty, other_lo, torch.where(other_empty, lo, torch.minimum(lo, other_lo)))
        hull_hi = torch.where(empty, other_hi, torch.where(other_empty, hi, torch.maximum(hi, other_hi)))
        return hull_lo, hull_hi, exact and other_exact and is_sure(touch)

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return self.left.allowed(at) | self.right.allowed(at)

    def factors(self) -> tuple[Mask, ...]:
        return (self,)


def _within(bounds: tuple[Bound, Bound, bool], j: int) -> tuple[Tensor, Tensor, bool]:
    lo, hi, exact = bounds
    return torch.as_tensor(lo).clamp(0, j), torch.as_tensor(hi).clamp(0, j), exact


class _Not(Mask):
    def __init__(self, mask: Mask):
        self.mask = mask
        self.positional = mask.positional

    def check(self, sizes: Sizes) -> None:
        self.mask.check(sizes)

    def extent(self) -> tuple[int, int]:
        return self.mask.extent()

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return ~self.mask.allowed(at)

    def given(self, at: At) -> tuple[Bool[Tensor, "#b #h #i #j"], bool] | None:
        found = self.mask.given(at)
        return None if found is None else (found[0], not found[1])

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def check_items(name: str, count: int, sizes: Sizes) -> None:
    if count not in (1, sizes.b):
        raise ValueError(f"{name} speaks of {count} batch items, but there are {sizes.b}")
