"""Joining pieces of a result, as the blocks of an engine give them, to the whole."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from einsight.coordinates import numbers
from einsight.readouts import Readout, Shapes
from einsight.values import is_sure


def asked_queries(readout: Readout) -> Int[Tensor, " n"] | None:
    """The queries that a readout is about, each once and in order; None is all."""
    if readout.queries is None:
        return None
    queries = numbers(readout.queries)
    return queries.unique() if isinstance(readout.queries, Tensor) else queries


def result_of(readout: Readout, parts: tuple[Tensor, ...]) -> Any:
    """The whole result, from parts that hold each of the asked queries once and in order."""
    if isinstance(readout.queries, Tensor) and not readout.adds:
        order = torch.searchsorted(readout.queries.unique(), readout.queries)
        if not is_sure(order == torch.arange(len(order))):
            parts = tuple(part.index_select(2, order.to(part.device)) for part in parts)
    return readout.join(*parts)


class Join:
    """The parts of one result. Pieces come in order: items, then heads, then queries.

    Without gradients each piece is written to its place at once, so that nothing but the result is held. With
    them the pieces are concatenated or added: a write into a part of a tensor would make the backward copy the
    whole tensor once per block.
    """

    def __init__(self, shapes: Shapes, *, adds: bool = False, fill: float = 0.0, grad: bool = False):
        self.shapes, self.adds, self.fill, self.grad = shapes, adds, fill, grad
        self.parts: list[Tensor | dict[tuple[int, int], list[Tensor]]] = []

    def put(self, place: tuple[int, ...], pieces: tuple[Tensor, ...]) -> None:
        """Put a piece of every part where it belongs: (first item, first head, *start in the other dimensions)."""
        if not self.parts:
            self.parts = [{} if self.grad else self._blank(s, p) for s, p in zip(self.shapes, pieces, strict=True)]
        for shape, part, piece in zip(self.shapes, self.parts, pieces, strict=True):
            if isinstance(part, Tensor):
                self._write(part, place, piece)
            else:
                whole_from = 2 if self.adds else 3
                piece = _spread(piece, place, shape, whole_from, self.fill)
                column = part.setdefault((place[0], place[1]), [])
                if self.adds and column:
                    column[0] = column[0] + piece
                else:
                    column.append(piece)

    def whole(self) -> tuple[Tensor, ...]:
        """The parts, joined."""
        return tuple(part if isinstance(part, Tensor) else _concatenate(part) for part in self.parts)

    def _blank(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        make = torch.zeros if self.adds else torch.empty
        return make(shape, dtype=like.dtype, device=like.device)

    def _write(self, part: Tensor, place: tuple[int, ...], piece: Tensor) -> None:
        target = part
        for dim, (start, n) in enumerate(zip(place, piece.shape, strict=False)):
            if not self.adds and dim >= 3:
                # No block comes to the keys outside a row's bounds, so they are filled beside it.
                target.narrow(dim, 0, start).fill_(self.fill)
                target.narrow(dim, start + n, target.shape[dim] - start - n).fill_(self.fill)
            target = target.narrow(dim, start, n)
        target.add_(piece) if self.adds else target.copy_(piece)


def _spread(piece: Tensor, place: tuple[int, ...], shape: tuple[int, ...], first: int, fill: float) -> Tensor:
    """The piece in the middle of `fill`, so that it has its whole length in the dimensions from `first` on."""
    around: list[int] = []
    for dim in reversed(range(first, piece.ndim)):
        start = place[dim] if dim < len(place) else 0
        around += [start, shape[dim] - start - piece.shape[dim]]
    return pad(piece, around, value=fill) if any(around) else piece


def _concatenate(columns: dict[tuple[int, int], list[Tensor]]) -> Tensor:
    """Along the queries, then the heads, then the items."""
    items: dict[int, list[Tensor]] = {}
    for (item, _), pieces in columns.items():
        items.setdefault(item, []).append(_cat(pieces, 2))
    return _cat([_cat(heads, 1) for heads in items.values()], 0)


def _cat(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
