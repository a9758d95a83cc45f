"""Where a block lies in the [b, h, i, j] space of an attention problem.

Masks, biases and readouts are rules about batch items, heads, queries and keys. An engine looks at one
block of that space at a time; `At` gives a rule the block's coordinates, always in the numbers of the
tensors as they were given, so that a rule stays right when heads or queries were selected.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


@dataclass
class Run:
    """The numbers from `start` up to `stop`. A range would do, but in one no size stays open for torch.compile."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> Run:
        stop = len(self) if part.stop is None else min(part.stop, len(self))
        return Run(self.start + (part.start or 0), self.start + stop)


Axis = Run | Tensor  # the original numbers along one dimension: one after the other, or any


class Sizes(NamedTuple):
    """How long each dimension of a problem is."""

    b: int
    h: int
    g: int
    i: int
    j: int
    d: int
    e: int


def numbers(axis: Axis, device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
    """The numbers along an axis, as a tensor."""
    if isinstance(axis, Run):
        return torch.arange(axis.start, axis.stop, device=device)
    return axis.to(device)


def along(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """The part of a tensor at an axis' numbers; a dimension of size 1 stands for every number."""
    if tensor.shape[dim] == 1:
        return tensor
    if isinstance(axis, Run):
        return tensor if len(axis) == tensor.shape[dim] else tensor.narrow(dim, axis.start, len(axis))
    return tensor.index_select(dim, axis.to(tensor.device))


def as_int(n: object) -> object:
    """NumPy's integers and int tensors without dimensions as ints; anything else as it is."""
    if isinstance(n, int):  # a size that torch.compile leaves open too, which it can't ask for more
        return n
    is_number = n.ndim == 0 and not n.dtype.is_floating_point if isinstance(n, Tensor) else hasattr(n, "__index__")
    return operator.index(n) if is_number else n  # type: ignore[arg-type]


def as_axis(chosen: object, size: int, what: str) -> Axis:
    """Numbers chosen by the user (an int, a slice, a range, a list or an int tensor; negative ones count from
    the end) as an axis; refuses what is out of range or not an integer."""
    if isinstance(chosen, Run):
        return chosen
    if isinstance(chosen, slice):
        ends = chosen.start, chosen.stop
        if chosen.step in (None, 1) and all(n is None or isinstance(n, int) for n in ends):
            start, stop = _end(chosen.start, 0, size), _end(chosen.stop, size, size)
            return Run(start, stop) if start < stop else Run(0, 0)
        chosen = range(size)[chosen]
    if isinstance(chosen, list | tuple):
        chosen = [as_int(n) for n in chosen]
    elif not isinstance(chosen, range):
        chosen = as_int(chosen)
    if isinstance(chosen, bool) or not isinstance(chosen, int | range | Sequence | Tensor):
        raise TypeError(f"{what} must be an int, a slice, a range, a list of ints or an int tensor, not {chosen!r}")
    if isinstance(chosen, int):
        chosen = range(chosen, chosen + 1)
    if isinstance(chosen, range) and chosen.step == 1 and 0 <= chosen.start <= chosen.stop <= size:
        return Run(chosen.start, chosen.stop) if chosen else Run(0, 0)
    if not isinstance(chosen, Tensor):
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in chosen):
            raise TypeError(f"{what} must hold ints, but got {chosen!r}")
        return _axis_of(list(chosen), size, what)
    index = chosen.detach().cpu()
    if index.dtype.is_floating_point or index.dtype in (torch.bool, torch.complex64) or index.ndim > 1:
        raise TypeError(
            f"{what} must be a one-dimensional int tensor, not {index.dtype} {list(index.shape)}"
            + ("; write mask.nonzero().flatten()" if index.dtype == torch.bool else "")
        )
    return _axis_of(index.reshape(-1).tolist(), size, what)


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
        return len(self.batch), len(self.heads), len(self.queries), len(self.keys)


def broadcasts(shape: Sequence[int], sizes: Sizes) -> bool:
    """Whether a tensor of this shape broadcasts to [b, h, i, j]."""
    full = (sizes.b, sizes.h, sizes.i, sizes.j)
    return len(shape) <= 4 and all(n in (1, full[dim]) for dim, n in enumerate(shape, 4 - len(shape)))


def to_four(tensor: Shaped[Tensor, ...]) -> Shaped[Tensor, "b h i j"]:
    """The tensor with dimensions of size 1 put in front until there are four."""
    return tensor[(None,) * (4 - tensor.ndim)]
