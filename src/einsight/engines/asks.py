"""Readouts of finished weights as the compiled engines are asked for them: a few numbers and tensors for each."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from einsight.coordinates import Sizes, along
from einsight.engines.join import asked_queries, result_of
from einsight.engines.rules import Rule, lower
from einsight.problem import Problem
from einsight.readouts import Diagonal, Distance, Mass, Pool, Readout, Received, Rows, Share, TopK, Weights, changed

_FEW = 32  # groups up to which ids are multiplied as a matrix of 0 and 1


class Kind(IntEnum):
    """In the order of the kernel's."""

    RECEIVED = 0  # sums of weights over queries, one for each key
    SEEN = 1  # how many queries see each key
    POOL = 2
    ROWS = 3
    TOP = 4
    SHARE = 5
    MASS_OF_IDS = 6
    MASS = 7
    DIAGONAL = 8
    DISTANCE = 9


class Ask(NamedTuple):
    """`number`: TOP's k, MASS' groups, DIAGONAL's shift, POOL's block; `slot`: the row of the result that each query
    fills, −1 for none, in a result of `rows` rows; `member`: ids [#b, j], or weights [#b, j, n] with n a multiple of
    16."""

    kind: Kind
    rows: int
    number: int = 0
    slot: Int[Tensor, " i"] | None = None
    rule: Rule | None = None
    member: Tensor | None = None

    @property
    def adds(self) -> bool:
        """Whether blocks of queries add to one result."""
        return self.kind <= Kind.POOL

    def shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """Of the parts of the result."""
        b, h, _, i, j, _, _ = sizes
        row = (b, h, self.rows)
        if self.kind in (Kind.RECEIVED, Kind.SEEN):
            return ((b, h, j),)
        if self.kind is Kind.POOL:
            return ((b, h, -(-i // self.number), -(-j // self.number)),)
        if self.kind is Kind.ROWS:
            return ((*row, j),)
        if self.kind is Kind.TOP:
            return (*row, self.number), (*row, self.number)
        return ((*row, self.number),) if self.kind in (Kind.MASS, Kind.MASS_OF_IDS) else (row,)


def blank(ask: Ask, sizes: Sizes, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """Memory for the result."""
    first, *others = ask.shapes(sizes)
    made = (torch.zeros if ask.adds else torch.empty)(first, dtype=dtype, device=device)
    return [made, *(torch.empty(shape, dtype=torch.int64, device=device) for shape in others)]


def asks_for(readout: Readout, problem: Problem) -> tuple[Ask, ...] | str:
    """What a readout asks of the kernel, or why it can't be asked."""
    make = _MAKERS.get(type(readout))
    if make is None:
        return f"it does not have the readout {readout!r}"
    queries, i = asked_queries(readout), problem.sizes.i
    if queries is None:
        return make(readout, problem, i, None)
    slot = torch.full((i,), -1)
    slot[queries] = torch.arange(len(queries))
    return make(readout, problem, len(queries), slot)


def result_for(readout: Readout, problem: Problem, parts: tuple[Tensor, ...]) -> Any:
    """The readout's result from what the kernel found."""
    b, h, g, i, j, _, _ = problem.sizes
    if isinstance(readout, Received) and readout.per_group:
        parts = tuple(part.view(b, g, h // max(g, 1), j).sum(2) for part in parts)
    if isinstance(readout, Pool):
        lines = torch.arange(-(-i // readout.size), device=problem.device) * readout.size
        parts = (parts[0] / (i - lines).clamp(max=readout.size)[:, None],)
    return result_of(readout, parts)


def as_found(readout: Readout, problem: Problem, grad: Tensor | None) -> tuple[Readout, Tensor | None]:
    """A readout whose result is the part that the kernel found, but for a factor, by which the part's gradient is
    multiplied."""
    if isinstance(readout, Received):
        return changed(readout, mean=False, per_group=False), grad
    if isinstance(readout, Pool) and grad is not None:
        i = problem.sizes.i
        lines = torch.arange(0, i, readout.size, device=grad.device)
        return readout, grad * (i - lines).clamp(max=readout.size)[:, None]
    queries = readout.queries
    return (changed(readout, queries=queries.unique()) if isinstance(queries, Tensor) else readout), grad


def _received(readout: Received, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...]:
    kinds = (Kind.RECEIVED, Kind.SEEN) if readout.mean else (Kind.RECEIVED,)
    return tuple(Ask(kind, count, 0, slot) for kind in kinds)


def _rows(readout: Rows, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...]:
    return (Ask(Kind.ROWS, count, 0, slot),)


def _top(readout: TopK, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...] | str:
    if problem.dtype == torch.float64:
        return "its top-k compares weights of float32"
    return (Ask(Kind.TOP, count, readout.k, slot),)


def _share(readout: Share, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...] | str:
    rule = lower(readout.mask, problem.whole, here=problem.here)
    return rule if isinstance(rule, str) else (Ask(Kind.SHARE, count, 0, slot, rule),)


def _mass(readout: Mass, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...]:
    groups, n = readout.groups.detach().to(problem.device), readout.n
    if groups.dtype.is_floating_point:
        return (Ask(Kind.MASS, count, n, slot, member=_padded(groups[None], problem.dtype)),)
    ids = along(groups if groups.ndim == 2 else groups[None], 0, problem.batch).to(torch.int64)
    ids = ids.masked_fill((ids < 0) | (ids >= n), -1).contiguous()  # of a compiled call nobody has looked at them
    if n > _FEW:
        return (Ask(Kind.MASS_OF_IDS, count, n, slot, member=ids),)
    return (Ask(Kind.MASS, count, n, slot, member=_padded(one_hot(ids + 1, n + 1)[..., 1:], problem.dtype)),)


def _padded(member: Tensor, dtype: torch.dtype) -> Float[Tensor, "b j n"]:
    return pad(member.to(dtype), (0, -member.shape[-1] % 16)).contiguous()


def _diagonal(readout: Diagonal, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...]:
    return (Ask(Kind.DIAGONAL, count, readout.shift),)


def _distance(readout: Distance, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...]:
    return (Ask(Kind.DISTANCE, count),)


def _pool(readout: Pool, problem: Problem, count: int, slot: Tensor | None) -> tuple[Ask, ...]:
    return (Ask(Kind.POOL, count, readout.size),)


_MAKERS: dict[type[Readout], Any] = {
    Received: _received,
    Rows: _rows,
    Weights: _rows,
    TopK: _top,
    Share: _share,
    Mass: _mass,
    Diagonal: _diagonal,
    Distance: _distance,
    Pool: _pool,
}
