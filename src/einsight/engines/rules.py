"""Masks and biases as the compiled engines read them: intervals of keys, bytes, ids, floats and slopes, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from einsight.biases import Alibi, Bias, TensorBias
from einsight.coordinates import At, count, is_int, pick, to_four
from einsight.masks import Mask
from einsight.masks.mask import Bound, larger, smaller

LIMIT = 64 << 20  # bytes of what is evaluated to a tensor because nothing shorter says it
_AT_ONCE = 1 << 20  # elements evaluated together


class Rule(NamedTuple):
    """Which keys a query may see: those that lie in [lo, hi), that `seen` shows, and whose id is the query's. A bound
    may lie beyond the keys; None is no bound. A number is how far ahead of each query's row the bound lies."""

    lo: Int[Tensor, "#b #h #i"] | int | None = None
    hi: Int[Tensor, "#b #h #i"] | int | None = None
    seen: Bool[Tensor, "#b #h #i #j"] | UInt8[Tensor, "#b #h #i #j"] | None = None
    shows: bool = True
    query_ids: Int[Tensor, "#b i"] | None = None
    key_ids: Int[Tensor, "#b j"] | None = None


def lower(mask: Mask, at: At, hull: tuple[Bound, Bound] | None = None, here: At | None = None) -> Rule | str:
    """The mask as a rule, or why it has none. `hull` is an interval known to hold all that it allows; `here` are the
    same coordinates on the problem's device, where that isn't the CPU."""
    here = at if here is None else here
    lo, hi = (0, at.sizes.j) if hull is None else hull
    ids = given = first = None
    others: list[Mask] = []
    for factor in mask.factors():
        if ids is None and (ids := factor.ids(here)) is not None:
            continue
        if given is None and (given := factor.given(here)) is not None:
            first = factor
            continue
        start, end, exact = factor.bounds(at)
        lo, hi = larger(lo, start), smaller(hi, end)
        if not exact:
            others.append(factor)
    if others:
        made = evaluate(reduce(and_, others if first is None else [first, *others]), here)
        if made is None:
            return f"the mask is neither an interval of keys for each query nor a tensor of at most {LIMIT >> 20} MB"
        given = made, True
    seen, shows = (None, True) if given is None else given
    query_ids, key_ids = (None, None) if ids is None else (ids[0][:, 0, :, 0], ids[1][:, 0, 0].contiguous())
    return Rule(*interval(lo, hi, at.sizes.j), seen, shows, query_ids, key_ids)


def interval(lo: Bound, hi: Bound, j: int) -> tuple[Int[Tensor, "#b #h #i"] | None, Int[Tensor, "#b #h #i"] | None]:
    """A mask's bounds as a rule has them."""
    first = None if is_int(lo) and lo <= 0 else _bound(lo)
    return first, None if is_int(hi) and hi >= j else _bound(hi)


def _bound(bound: Bound) -> Int[Tensor, "#b #h #i"]:
    if isinstance(bound, Tensor):
        return bound.view(1, 1, 1) if bound.ndim == 0 else bound.squeeze(-1)
    return torch.full((1, 1, 1), bound)


def lower_bias(
    bias: Bias, at: At, dtype: torch.dtype
) -> tuple[Float[Tensor, " h"] | None, Float[Tensor, "#b #h #i #j"] | None] | str:
    """The bias as alibi's slopes and a tensor of floats, or why it has none."""
    terms = list(bias.terms())
    linear = next((term for term in terms if isinstance(term, Alibi)), None)
    slopes = None if linear is None else pick(linear.slopes, 0, at.heads).to(dtype).resolve_neg().contiguous()
    others = [term for term in terms if term is not linear]
    if not others:
        return slopes, None
    if len(others) == 1 and isinstance(others[0], TensorBias):
        return slopes, at.take(to_four(others[0].tensor)).to(dtype).resolve_neg()
    made = in_rows(lambda some: reduce(add, (term.block(some, dtype) for term in others)), at, dtype)
    if made is None:
        return f"the bias is neither alibi nor a tensor, and as one it would take more than {LIMIT >> 20} MB"
    return slopes, made


def evaluate(mask: Mask, at: At) -> UInt8[Tensor, "#b #h #i #j"] | None:
    """The mask as bytes, in the shape that it has by itself; None if that is too large."""
    return in_rows(mask.allowed, at, torch.uint8)


def in_rows(rule: Callable[[At], Tensor], at: At, dtype: torch.dtype) -> Shaped[Tensor, "#b #h #i #j"] | None:
    """What a rule says of all pairs, asked of a few queries at a time; None if it is larger than `LIMIT`."""

    def some(start: int, stop: int) -> Shaped[Tensor, "#b #h #i #j"]:
        return rule(replace(at, queries=at.queries[start:stop], positions=at.positions[:, start:stop]))

    i = count(at.queries)
    b, h, rows, j = some(0, min(2, i)).shape
    i = 1 if rows == 1 else i
    if b * h * i * j * dtype.itemsize > LIMIT:
        return None
    if torch.compiler.is_compiling():  # which makes one pass of it, and would count the rows
        return some(0, i).to(dtype).contiguous()
    step = max(2, _AT_ONCE // max(b * h * j, 1))
    made = torch.empty(b, h, i, j, dtype=dtype, device=at.device)
    for start in range(0, i, step):
        made[:, :, start : start + step] = some(start, min(start + step, count(at.queries)))[:, :, :i]
    return made
