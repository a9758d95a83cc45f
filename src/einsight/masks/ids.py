"""Rules about ids: packed documents, and tokens that are the same."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor

from einsight.coordinates import At, Sizes, along
from einsight.masks.mask import Bound, Mask, check_items, shown
from einsight.values import check_dense, described, is_sure, may_look


class _Same(Mask):
    """Queries see the keys that have their id; without ids of their own, a query's is the one at its position."""

    def __init__(self, query_ids: Integer[Tensor, "#b i"] | None, key_ids: Integer[Tensor, "#b j"], name: str):
        self.query_ids, self.key_ids, self.name = query_ids, key_ids, name
        self.positional = query_ids is None

    def check(self, sizes: Sizes) -> None:
        for what, ids, length in (("queries", self.query_ids, sizes.i), ("keys", self.key_ids, sizes.j)):
            if ids is not None:
                check_items(self.name, len(ids), sizes)
                if ids.shape[1] != length:
                    raise ValueError(f"{self.name} has ids for {ids.shape[1]} {what}, but there are {length}")

    def extent(self) -> tuple[int, int]:
        return max(len(self.key_ids), 1 if self.query_ids is None else len(self.query_ids)), 1

    def ids(self, at: At) -> tuple[Int[Tensor, "#b 1 i 1"], Int[Tensor, "#b 1 1 j"]]:
        keys = at.take(self.key_ids[:, None, None, :])
        if self.query_ids is not None:
            return at.take(self.query_ids[:, None, :, None]), keys
        ids = along(self.key_ids, 0, at.batch).to(at.device)
        p = at.p.flatten(1)
        outside = (p < 0) | (p >= ids.shape[1])
        if may_look(outside) and bool(outside.any()):
            raise ValueError(
                f"{self.name} has ids for the {ids.shape[1]} keys, but a query stands at position "
                f"{int(p[outside][0])}: give query_ids"
            )
        b = torch.broadcast_shapes(ids.shape[:1], p.shape[:1])[0]
        return ids.expand(b, -1).gather(1, p.expand(b, -1))[:, None, :, None], keys

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        query_ids, key_ids = self.ids(at)
        if not may_look(key_ids) or query_ids.numel() == 0 or key_ids.numel() == 0:
            return 0, at.sizes.j, False
        b = max(len(query_ids), len(key_ids))
        found, key_ids = key_ids.flatten(1).unique(return_inverse=True)
        key_ids = key_ids.expand(b, -1)
        j = torch.arange(at.sizes.j).expand(b, -1)
        n = len(found)
        first = torch.full((b, n), at.sizes.j).scatter_reduce_(1, key_ids, j, "amin")
        last = torch.full((b, n), -1).scatter_reduce_(1, key_ids, j, "amax")
        count = torch.zeros(b, n, dtype=torch.int64).scatter_add_(1, key_ids, torch.ones_like(j))
        exact = is_sure(count == (last - first + 1).clamp(min=0))
        query_ids = query_ids.flatten(1).contiguous()
        place = torch.searchsorted(found, query_ids).clamp(max=n - 1)
        known = found[place] == query_ids
        place, known = place.expand(b, -1), known.expand(b, -1)
        lo = torch.where(known, first.gather(1, place), 0)
        hi = torch.where(known, last.gather(1, place) + 1, 0)
        return lo[:, None, :, None], hi[:, None, :, None], exact

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        query_ids, key_ids = self.ids(at)
        return query_ids == key_ids

    def __repr__(self) -> str:
        if self.query_ids is None:
            return f"{self.name}({shown(self.key_ids)})"
        first, second = (self.query_ids, self.key_ids) if self.name == "same" else (self.key_ids, self.query_ids)
        return f"{self.name}({shown(first)}, {shown(second)})"


def _as_ids(name: str, ids: object) -> Integer[Tensor, "b n"]:
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise TypeError(f"{name} must be an int tensor [n] or [b, n], not {described(ids)}")
    check_dense(name, ids)
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

    Raises:
        TypeError, ValueError: both or neither of `ids` and `cu_seqlens`; ids that are no ints; lengths that fall.

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
    """The keys whose id equals the query's: `query_ids` [i] or [b, i], and `key_ids` [j] or [b, j].

    With tokens as ids it asks for repetitions; with the tokens shifted by one it asks for induction: the keys
    that follow an earlier occurrence of the query's token.

    >>> import einsight as es, torch
    >>> print(es.same(torch.tensor([7, 8]), torch.tensor([8, 7, 8])).show(2, 3))
    · ■ ·
    ■ · ■
    """
    return _Same(_as_ids("query_ids", query_ids), _as_ids("key_ids", key_ids), "same")
