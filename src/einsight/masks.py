"""Masks: rules that say which keys a query may see.

A rule knows two things of itself. `bounds` gives one interval of keys per query, which is all that a fast
engine has to know of nearly every mask in use; `allowed` answers for single pairs, where the interval is only
a hull. Rules combine with `&` (both), `|` (either) and `~` (not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor

from einsight.coordinates import At, Sizes, along, as_axis, as_int, broadcasts, numbers, to_four

Bound = int | Tensor  # an int, or an int64 tensor that broadcasts to [b, h, i, 1]


class Mask:
    """Which keys j a query i, standing at position p, may see."""

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

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _as_operand(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, _as_operand(other, "|"))

    def __invert__(self) -> Mask:
        return _Not(self)

    def __repr__(self) -> str:
        return f"{_describe(self)}(…)"

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
        if b is None:
            b = max(items, offset.numel() if isinstance(offset, Tensor) else 1)
        sizes = Sizes(b, heads if h is None else h, 1, i, j, 1, 1)
        positions = place_queries(offset, sizes, needed_by="the mask" if self.positional else None)
        self.check(sizes)
        at = At(sizes, range(b), range(sizes.h), range(i), range(j), positions, torch.device("cpu"))
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


def _describe(mask: Mask) -> str:
    return type(mask).__name__.strip("_").lower()


def _shown(value: object) -> str:
    return f"tensor{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _as_operand(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        raise TypeError(
            f"a mask {sign} a tensor of {other.dtype}: say what True means, es.allow(tensor) or es.forbid(tensor)"
        )
    raise TypeError(f"a mask {sign} {other!r}: both sides must be masks")


def offset_needed(by: str, sizes: Sizes) -> str:
    """What to say to someone who left the offset out."""
    return (
        f"offset is needed: {by} asks where the queries stand, and there are {sizes.i} queries but "
        f"{sizes.j} keys. offset={sizes.j - sizes.i} (j_len - i_len) if the queries are the last ones, as "
        "with a KV cache; offset=0 if query 0 stands at key 0, as with PyTorch's is_causal"
    )


def place_queries(offset: object, sizes: Sizes, needed_by: str | None) -> Int[Tensor, "#b i"]:
    """Where each query stands among the keys: p = i + offset, on the CPU."""
    if offset is None:
        if needed_by is not None and sizes.i != sizes.j:
            raise ValueError(offset_needed(needed_by, sizes))
        offset = 0
    if isinstance(offset, Tensor):
        if offset.dtype.is_floating_point or offset.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise TypeError(f"offset must be an int or an int tensor [b], not a tensor of {offset.dtype}")
        if offset.ndim > 1 or offset.numel() not in (1, sizes.b):
            raise ValueError(f"offset must be an int or an int tensor [b] = [{sizes.b}], not {list(offset.shape)}")
        start = offset.detach().reshape(-1, 1).to("cpu", torch.int64)
        return start + torch.arange(sizes.i)
    offset = as_int(offset)
    if isinstance(offset, int) and abs(offset) >= _FAR:
        raise ValueError(f"offset must lie within ±2⁴⁰, not be {offset}")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset must be an int or an int tensor [b], not {offset!r}")
    return torch.arange(offset, offset + sizes.i)[None]


def _larger(a: Bound, b: Bound) -> Bound:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def _smaller(a: Bound, b: Bound) -> Bound:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


_FAR = 2**40  # positions; no sequence is as long


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
        return _larger(lo, other_lo), _smaller(hi, other_hi), exact and other_exact

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return self.left.allowed(at) & self.right.allowed(at)

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
        return hull_lo, hull_hi, exact and other_exact and bool(touch.all())

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return self.left.allowed(at) | self.right.allowed(at)


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

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


class _Window(Mask):
    positional = True

    def __init__(self, left: int | None, right: int | None):
        self.left, self.right = left, right

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        lo = 0 if self.left is None else at.p - self.left
        hi = at.sizes.j if self.right is None else at.p + (self.right + 1)
        return lo, hi, True

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
    return _Window(None, 0)


def window(left: int | None, right: int | None) -> Mask:
    """Keys from p - left to p + right, both included; None is no limit on that side.

    Hugging Face's `sliding_window=W` is `window(W - 1, 0)`.

    >>> import einsight as es
    >>> print(es.window(1, 0).show(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """
    left, right = as_int(left), as_int(right)  # type: ignore[assignment]
    for name, side in (("left", left), ("right", right)):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window's {name} must be a number of keys or None, not {side!r}")
    if left is not None and right is not None and left + right < 0:
        raise ValueError(f"window({left}, {right}) holds no key: left + right must be at least 0; None is no limit")
    # What lies beyond every sequence is no limit either, and wouldn't fit beside positions in an int64.
    left, right = (None if side is not None and side >= _FAR else side for side in (left, right))
    return _Window(left, right)


def _per_item(name: str, values: object) -> int | Int[Tensor, " b"]:
    """One count for all items, or one for each."""
    values = [as_int(n) for n in values] if isinstance(values, list | tuple) else as_int(values)
    if isinstance(values, int) and not isinstance(values, bool):
        return values
    if isinstance(values, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in values):
        values = torch.tensor(values, dtype=torch.int64)
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} takes an int, a list of ints or an int tensor [b], not {values!r}")
    if values.dtype.is_floating_point or values.dtype == torch.bool or values.ndim > 1:
        hint = "; for a mask of valid keys [b, j] write padding(keep)" if values.ndim == 2 else ""
        raise TypeError(f"{name} takes an int or an int tensor [b], not {values.dtype} {list(values.shape)}{hint}")
    return values.detach().reshape(-1).to(torch.int64)


def _check_items(name: str, count: int, sizes: Sizes) -> None:
    if count not in (1, sizes.b):
        raise ValueError(f"{name} speaks of {count} batch items, but there are {sizes.b}")


class _Lengths(Mask):
    def __init__(self, n: int | Int[Tensor, " b"]):
        self.n = n

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.n, Tensor):
            _check_items(_describe(self), len(self.n), sizes)

    def extent(self) -> tuple[int, int]:
        return (len(self.n) if isinstance(self.n, Tensor) else 1), 1

    def _n(self, at: At) -> Bound:
        return at.take(self.n[:, None, None, None]) if isinstance(self.n, Tensor) else self.n

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        return 0, self._n(at), True

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return at.j < self._n(at)

    def __repr__(self) -> str:
        return f"{_describe(self)}({_shown(self.n)})"


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
        return 0, _larger(at.p + 1, self._n(at)), True

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return (at.j < self._n(at)) | (at.j <= at.p)


def prefix(n: int | Sequence[int] | Integer[Tensor, " b"]) -> Mask:
    """A prefix that all may see, causal after it: j < n or j ≤ p; n is an int or one per item.

    >>> import einsight as es
    >>> print(es.prefix(2).show(3, 3))
    ■ ■ ·
    ■ ■ ·
    ■ ■ ■
    """
    return _Prefix(_per_item("prefix", n))


class _Padding(Mask):
    def __init__(self, keep: Bool[Tensor, "b j"]):
        self.keep = keep

    def check(self, sizes: Sizes) -> None:
        b, j = self.keep.shape
        _check_items("padding", b, sizes)
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
        return first, hi, bool((hi - first == count).all())

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return at.take(self.keep[:, None, None, :])

    def __repr__(self) -> str:
        return f"padding({_shown(self.keep)})"


def padding(keep: Shaped[Tensor, "b j"]) -> Mask:
    """The keys that are not padding: a tokenizer's attention mask [b, j], bool or 0/1, padded left or right.

    >>> import einsight as es, torch
    >>> es.padding(torch.tensor([[0, 0, 1]])).dense(1, 3)
    tensor([[False, False,  True]])
    """
    if not isinstance(keep, Tensor):
        raise TypeError(f"padding takes a tensor [b, j], True or 1 where the token is real, not {keep!r}")
    if keep.ndim != 2:
        raise ValueError(f"padding takes a tensor [b, j], but keep has {keep.ndim} dimensions {list(keep.shape)}")
    if keep.dtype.is_floating_point or keep.dtype.is_complex:
        raise TypeError(
            f"padding takes bool or 0/1 integers, not {keep.dtype}; if it holds 0. and 1., write keep.bool()"
        )
    if keep.dtype != torch.bool and bool(((keep != 0) & (keep != 1)).any()):
        raise ValueError("padding takes bool or 0/1 integers, but keep holds other numbers")
    return _Padding(keep.detach().bool())


class _Same(Mask):
    """Queries see the keys that have their id; without ids of their own, a query's is the one at its position."""

    def __init__(self, query_ids: Integer[Tensor, "#b i"] | None, key_ids: Integer[Tensor, "#b j"], name: str):
        self.query_ids, self.key_ids, self.name = query_ids, key_ids, name
        self.positional = query_ids is None

    def check(self, sizes: Sizes) -> None:
        for what, ids, length in (("queries", self.query_ids, sizes.i), ("keys", self.key_ids, sizes.j)):
            if ids is not None:
                _check_items(self.name, len(ids), sizes)
                if ids.shape[1] != length:
                    raise ValueError(f"{self.name} has ids for {ids.shape[1]} {what}, but there are {length}")

    def extent(self) -> tuple[int, int]:
        return max(len(self.key_ids), 1 if self.query_ids is None else len(self.query_ids)), 1

    def _ids(self, at: At) -> tuple[Int[Tensor, "#b 1 i 1"], Int[Tensor, "#b 1 1 j"]]:
        keys = at.take(self.key_ids[:, None, None, :])
        if self.query_ids is not None:
            return at.take(self.query_ids[:, None, :, None]), keys
        ids = along(self.key_ids, 0, at.batch).to(at.device)
        p = at.p.flatten(1)
        outside = (p < 0) | (p >= ids.shape[1])
        if bool(outside.any()):
            raise ValueError(
                f"{self.name} has ids for the {ids.shape[1]} keys, but a query stands at position "
                f"{int(p[outside][0])}: give query_ids"
            )
        b = torch.broadcast_shapes(ids.shape[:1], p.shape[:1])[0]
        return ids.expand(b, -1).gather(1, p.expand(b, -1))[:, None, :, None], keys

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        query_ids, key_ids = self._ids(at)
        if query_ids.numel() == 0 or key_ids.numel() == 0:
            return 0, at.sizes.j, False
        b = max(len(query_ids), len(key_ids))
        found, key_ids = key_ids.flatten(1).unique(return_inverse=True)
        key_ids = key_ids.expand(b, -1)
        j = torch.arange(at.sizes.j).expand(b, -1)
        n = len(found)
        first = torch.full((b, n), at.sizes.j).scatter_reduce_(1, key_ids, j, "amin")
        last = torch.full((b, n), -1).scatter_reduce_(1, key_ids, j, "amax")
        count = torch.zeros(b, n, dtype=torch.int64).scatter_add_(1, key_ids, torch.ones_like(j))
        exact = bool((count == (last - first + 1).clamp(min=0)).all())
        query_ids = query_ids.flatten(1).contiguous()
        place = torch.searchsorted(found, query_ids).clamp(max=n - 1)
        known = found[place] == query_ids
        place, known = place.expand(b, -1), known.expand(b, -1)
        lo = torch.where(known, first.gather(1, place), 0)
        hi = torch.where(known, last.gather(1, place) + 1, 0)
        return lo[:, None, :, None], hi[:, None, :, None], exact

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        query_ids, key_ids = self._ids(at)
        return query_ids == key_ids

    def __repr__(self) -> str:
        if self.query_ids is None:
            return f"{self.name}({_shown(self.key_ids)})"
        first, second = (self.query_ids, self.key_ids) if self.name == "same" else (self.key_ids, self.query_ids)
        return f"{self.name}({_shown(first)}, {_shown(second)})"


def _as_ids(name: str, ids: object) -> Integer[Tensor, "b n"]:
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.dtype.is_floating_point or ids.dtype.is_complex:
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise TypeError(f"{name} must be an int tensor [n] or [b, n], not {what}")
    ids = ids.detach().to(torch.int64)
    return ids[None] if ids.ndim == 1 else ids


def documents(
    ids: Shaped[Tensor, ...] | None = None,
    query_ids: Shaped[Tensor, ...] | None = None,
    *,
    cu_seqlens: Integer[Tensor, " n"] | None = None,
) -> Mask:
    """Packed sequences: a query sees the keys of its own document.

    `ids` gives each key's document, [j] or [b, j]; `query_ids` each query's ([i] or [b, i]; by default the id
    at the query's position). Or `cu_seqlens`, the cumulative lengths [0, n₁, n₁+n₂, …] of variable-length
    kernels, for one packed row. Combine with `causal()` for packed language modelling.

    >>> import einsight as es, torch
    >>> print(es.documents(torch.tensor([0, 0, 1])).show(3, 3))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    if (ids is None) == (cu_seqlens is None):
        raise TypeError("documents takes either ids or cu_seqlens")
    if cu_seqlens is not None:
        edges = _as_ids("cu_seqlens", cu_seqlens)[0].cpu()
        steps = edges.diff()
        if cu_seqlens.ndim != 1 or edges.numel() == 0 or int(edges[0]) != 0 or bool((steps < 0).any()):
            raise ValueError(f"cu_seqlens must be one row that starts at 0 and never falls, not {cu_seqlens.tolist()}")
        ids = torch.arange(len(steps)).repeat_interleave(steps).to(cu_seqlens.device)
    return _Same(None if query_ids is None else _as_ids("query_ids", query_ids), _as_ids("ids", ids), "documents")


def same(query_ids: Shaped[Tensor, ...], key_ids: Shaped[Tensor, ...]) -> Mask:
    """The keys whose id equals the query's: [i] or [b, i], and [j] or [b, j].

    With tokens as ids it asks for repetitions; with the tokens shifted by one it asks for induction: the keys
    that follow an earlier occurrence of the query's token.

    >>> import einsight as es, torch
    >>> print(es.same(torch.tensor([7, 8]), torch.tensor([8, 7, 8])).show(2, 3))
    · ■ ·
    ■ · ■
    """
    return _Same(_as_ids("query_ids", query_ids), _as_ids("key_ids", key_ids), "same")


class _Pairs(Mask):
    def __init__(self, queries: object, keys: object):
        self.queries, self.keys = queries, keys

    def check(self, sizes: Sizes) -> None:
        as_axis(self.queries, sizes.i, "pairs' queries")
        as_axis(self.keys, sizes.j, "pairs' keys")

    def _named(self, at: At) -> tuple[Bool[Tensor, "1 1 i 1"], Tensor]:
        queries = numbers(as_axis(self.queries, at.sizes.i, "pairs' queries"), at.device)
        keys = numbers(as_axis(self.keys, at.sizes.j, "pairs' keys"), at.device)
        return torch.isin(at.i, queries), keys

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        named, keys = self._named(at)
        if keys.numel() == 0:
            return 0, 0, True
        lo, hi = int(keys.min()), int(keys.max()) + 1
        return named * lo, named * hi, keys.unique().numel() == hi - lo

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        named, keys = self._named(at)
        return named & torch.isin(at.j, keys)

    def __repr__(self) -> str:
        return f"pairs({_shown(self.queries)}, {_shown(self.keys)})"


def pairs(queries: object, keys: object) -> Mask:
    """The pairs of the named queries and keys: ints, slices, ranges, lists or int tensors; negative from the end.

    `~pairs(…)` cuts exactly these edges (attention knockout; Geva et al. 2023, arXiv:2304.14767).

    >>> import einsight as es
    >>> print((~es.pairs(queries=[-1], keys=slice(0, 2))).show(2, 3))
    ■ ■ ■
    · · ■
    """
    return _Pairs(queries, keys)


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
        return lo, hi, bool((hi - lo == count).all())

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        named = at.take(self.tensor)
        return named if self.shows else ~named

    def __repr__(self) -> str:
        return f"{'allow' if self.shows else 'forbid'}(tensor{self.shape})"


def textbook(mask: Bool[Tensor, ...]) -> Mask:
    """`forbid(mask)`, for a mask that the user knows as `mask`."""
    return _Dense(mask, "mask", shows=False)


def _dense(name: str, tensor: object, true_means: str) -> Mask:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        what = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
        hint = "; if it holds 0 and 1, write tensor.bool()" if isinstance(tensor, Tensor) else ""
        raise TypeError(f"{name} takes a boolean tensor, True where {true_means}, not {what}{hint}")
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
            what = f"a tensor of {seen.dtype}" if isinstance(seen, Tensor) else repr(seen)
            raise TypeError(f"where(fn): fn(b, h, p, j) must return a boolean tensor, but returned {what}")
        if seen.ndim > 4 or any(n not in (1, m) for n, m in zip(to_four(seen).shape, at.shape, strict=True)):
            raise ValueError(
                f"where(fn): fn(b, h, p, j) returned shape {list(seen.shape)}, which does not broadcast to the block "
                f"{list(at.shape)} it was asked about; build it from the index tensors it is given"
            )
        return to_four(seen)


def where(fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """Any rule: fn(b, h, p, j) is given int64 index tensors that broadcast to a block, and returns booleans.

    >>> import einsight as es
    >>> print(es.where(lambda b, h, p, j: (p - j) % 2 == 0).show(3, 3))
    ■ · ■
    · ■ ·
    ■ · ■
    """
    if not callable(fn):
        raise TypeError(f"where takes a function fn(b, h, p, j), not {fn!r}; for a tensor write allow or forbid")
    return _Where(fn)
