"""Where a block lies in the [b, h, i, j] space of an attention problem.

Masks, biases and readouts are rules about batch items, heads, queries and keys. An engine looks at one
block of that space at a time; `At` gives a rule the block's coordinates, always in the numbers of the
tensors as they were given, so that a rule stays right when heads or queries were selected.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, TypeGuard

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from einsight.values import check_dense, described


@dataclass
class Run:
    """The numbers from `start` up to `stop`. A range would do, but in one no size stays open for torch.compile."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> Run:
        stop = count(self) if part.stop is None else min(part.stop, count(self))
        return Run(self.start + (part.start or 0), self.start + stop)


Axis = Run | Tensor  # the original numbers along one dimension: one after the other, or any
Choice = Run | int | slice | range | list[int] | Tensor  # what a user names numbers by


class Sizes(NamedTuple):
    """How long each dimension of a problem is."""

    b: int
    h: int
    g: int
    i: int
    j: int
    d: int
    e: int


def count(axis: Axis) -> int:
    """How many numbers are along an axis. Of a size that torch.export leaves open, `len` would make a number."""
    return axis.stop - axis.start if isinstance(axis, Run) else axis.shape[0]


def numbers(axis: Axis, device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
    """The numbers along an axis, as a tensor."""
    if isinstance(axis, Run):
        return torch.arange(axis.start, axis.stop, device=device)
    return axis.to(device)


def along(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """The part of a tensor at an axis' numbers; a dimension of size 1 stands for every number."""
    whole = isinstance(axis, Run) and count(axis) == tensor.shape[dim]
    return tensor if whole or tensor.shape[dim] == 1 else pick(tensor, dim, axis)


def pick(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """Like `along`, but a size of 1 is one thing to choose, as often as it is named."""
    if isinstance(axis, Run):
        return tensor.narrow(dim, axis.start, count(axis))
    return tensor.index_select(dim, axis.to(tensor.device))


def as_int(n: object) -> object:
    """NumPy's integers and int tensors without dimensions as ints; anything else as it is."""
    if isinstance(n, int | torch.SymInt):  # a size that torch.compile leaves open, which it can't ask for more
        return n
    is_number = n.ndim == 0 and not n.dtype.is_floating_point if isinstance(n, Tensor) else isinstance(n, Integral)
    return operator.index(n) if is_number else n  # type: ignore[arg-type]


def as_chosen(chosen: object, what: str) -> Choice:
    """Numbers chosen by the user: an int, a slice, a range, a list or an int tensor. Refuses what holds no ints."""
    if isinstance(chosen, Run | range):
        return chosen
    if isinstance(chosen, slice):
        ends = [as_int(n) for n in (chosen.start, chosen.stop, chosen.step)]
        if not all(n is None or is_int(n) for n in ends) or ends[2] == 0:
            raise TypeError(f"{what} must be a slice of ints, not {chosen!r}")
        return slice(*ends)
    if isinstance(chosen, list | tuple):
        named = [n for n in map(as_int, chosen) if is_int(n)]
        if len(named) < len(chosen):
            raise TypeError(f"{what} must hold ints, but got {described(chosen)}")
        return named
    chosen = as_int(chosen)
    if is_int(chosen):
        return chosen
    if not isinstance(chosen, Tensor):
        raise TypeError(
            f"{what} must be an int, a slice, a range, a list of ints or an int tensor, not {described(chosen)}"
        )
    check_dense(what, chosen)
    if chosen.dtype.is_floating_point or chosen.dtype.is_complex or chosen.dtype == torch.bool or chosen.ndim > 1:
        raise TypeError(
            f"{what} must be a one-dimensional int tensor, not {chosen.dtype} {list(chosen.shape)}"
            + ("; write mask.nonzero().flatten()" if chosen.dtype == torch.bool else "")
        )
    return chosen


def is_int(n: object) -> TypeGuard[int]:
    """Whether it is an int, or a size that torch.export leaves open; True is none."""
    return isinstance(n, int | torch.SymInt) and not isinstance(n, bool)


def as_axis(chosen: object, size: int, what: str) -> Axis:
    """Numbers chosen by the user as an axis; negative ones count from the end. Refuses what is out of range."""
    chosen = as_chosen(chosen, what)
    if isinstance(chosen, Run):
        return chosen
    if isinstance(chosen, slice):
        if chosen.step in (None, 1):
            start, stop = _end(chosen.start, 0, size), _end(chosen.stop, size, size)
            return Run(start, stop) if start < stop else Run(0, 0)
        chosen = range(size)[chosen]
    if isinstance(chosen, range) and chosen.step == 1 and 0 <= chosen.start <= chosen.stop <= size:
        return Run(chosen.start, chosen.stop) if chosen else Run(0, 0)
    if isinstance(chosen, Tensor):
        chosen = chosen.detach().reshape(-1).tolist()
    return _axis_of(list(chosen) if isinstance(chosen, list | range) else [chosen], size, what)


def _end(n: int | None, default: int, size: int) -> int:
    """Where a slice begins or ends. `range(size)[…]` would fix a size that torch.compile leaves open."""
    if n is None:
        return default
    n = n + size if n < 0 else n
    return 0 if n < 0 else min(n, size)


def _axis_of(chosen: list[int], size: int, what: str) -> Axis:
    """Numbers as an axis, without a look at a tensor, which torch.compile could not take."""
    for n in chosen:
        if not -size <= n < size:
            raise ValueError(f"{what} names {n}, but there are {size} (0 to {size - 1})")
    chosen = [n + size if n < 0 else n for n in chosen]
    if not chosen:
        return Run(0, 0)
    first = chosen[0]
    if all(n == first + k for k, n in enumerate(chosen)):
        return Run(first, first + len(chosen))
    return torch.tensor(chosen)


@dataclass(frozen=True)
class At:
    """The coordinates of a block: its items, heads, queries and keys, and where the queries stand.

    `b`, `h`, `i`, `p`, `j` are int64 tensors shaped [b,1,1,1], [1,h,1,1], [1,1,i,1], [b|1,1,i,1], [1,1,1,j],
    so that arithmetic on them broadcasts to the block's [b, h, i, j].
    """

    sizes: Sizes
    batch: Axis
    heads: Axis
    queries: Axis
    keys: Run
    positions: Int[Tensor, "#b i"]
    device: torch.device

    @property
    def b(self) -> Int[Tensor, "b 1 1 1"]:
        return numbers(self.batch, self.device).view(-1, 1, 1, 1)

    @property
    def h(self) -> Int[Tensor, "1 h 1 1"]:
        return numbers(self.heads, self.device).view(1, -1, 1, 1)

    @property
    def i(self) -> Int[Tensor, "1 1 i 1"]:
        return numbers(self.queries, self.device).view(1, 1, -1, 1)

    @property
    def p(self) -> Int[Tensor, "#b 1 i 1"]:
        b, i = self.positions.shape
        return self.positions.view(b, 1, i, 1)

    @property
    def j(self) -> Int[Tensor, "1 1 1 j"]:
        return numbers(self.keys, self.device).view(1, 1, 1, -1)

    def take(self, tensor: Shaped[Tensor, "_ _ _ _"]) -> Shaped[Tensor, "#b #h #i #j"]:
        """The block of a tensor that broadcasts to the whole [b, h, i, j]."""
        for dim, axis in enumerate((self.batch, self.heads, self.queries, self.keys)):
            tensor = along(tensor, dim, axis)
        return tensor.to(self.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return count(self.batch), count(self.heads), count(self.queries), count(self.keys)


def broadcasts(shape: Sequence[int], sizes: Sizes) -> bool:
    """Whether a tensor of this shape broadcasts to [b, h, i, j]."""
    full = (sizes.b, sizes.h, sizes.i, sizes.j)
    return len(shape) <= 4 and all(n in (1, full[dim]) for dim, n in enumerate(shape, 4 - len(shape)))


def to_four(tensor: Shaped[Tensor, ...]) -> Shaped[Tensor, "b h i j"]:
    """The tensor with dimensions of size 1 put in front until there are four."""
    return tensor[(None,) * (4 - tensor.ndim)]
