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

Axis = range | Tensor  # the original numbers along one dimension: a range of step 1, or indices


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
    if isinstance(axis, range):
        return torch.arange(axis.start, axis.stop, device=device)
    return axis.to(device)


def along(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """The part of a tensor at an axis' numbers; a dimension of size 1 stands for every number."""
    if tensor.shape[dim] == 1:
        return tensor
    if isinstance(axis, range):
        return tensor if len(axis) == tensor.shape[dim] else tensor.narrow(dim, axis.start, len(axis))
    return tensor.index_select(dim, axis.to(tensor.device))


def as_int(n: object) -> object:
    """NumPy's integers and int tensors without dimensions as ints; anything else as it is."""
    is_number = n.ndim == 0 and not n.dtype.is_floating_point if isinstance(n, Tensor) else hasattr(n, "__index__")
    return operator.index(n) if is_number and not isinstance(n, bool) else n  # type: ignore[arg-type]


def as_axis(chosen: object, size: int, what: str) -> Axis:
    """Numbers chosen by the user (an int, a slice, a range, a list or an int tensor; negative ones count from
    the end) as an axis; refuses what is out of range or not an integer."""
    if isinstance(chosen, slice):
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
        return chosen if chosen else range(0)  # without a look at a tensor, which torch.compile could not take
    if isinstance(chosen, Tensor):
        index = chosen.detach().cpu()
    elif all(isinstance(n, int) and not isinstance(n, bool) for n in chosen):
        index = torch.tensor(list(chosen), dtype=torch.int64)
    else:
        raise TypeError(f"{what} must hold ints, but got {chosen!r}")
    if index.dtype.is_floating_point or index.dtype in (torch.bool, torch.complex64) or index.ndim > 1:
        raise TypeError(
            f"{what} must be a one-dimensional int tensor, not {index.dtype} {list(index.shape)}"
            + ("; write mask.nonzero().flatten()" if index.dtype == torch.bool else "")
        )
    index = index.reshape(-1).to(torch.int64)
    outside = index[(index < -size) | (index >= size)]
    if outside.numel():
        raise ValueError(f"{what} names {outside[0].item()}, but there are {size} (0 to {size - 1})")
    index = torch.where(index < 0, index + size, index)
    if index.numel() == 0:
        return range(0)
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == index.numel() and torch.equal(index, torch.arange(first, last + 1)):
        return range(first, last + 1)
    return index


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
    keys: range
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
