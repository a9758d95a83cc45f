"""The second pass on tensors: whatever is read of exact weights, from the queries that it is about."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from einsight.engines.asks import Ask, Kind
from einsight.engines.triton.forward import rule_of
from einsight.engines.triton.kernels import weights as kernels
from einsight.engines.triton.launch import launch, padded, precision, rule, step, tile
from einsight.engines.triton.lowered import lines
from einsight.problem import Problem
from einsight.readouts import strongest

AT_ONCE = 1 << 26  # weights of rows that are held while the strongest are looked for

Queries = Int[Tensor, " n"] | None  # None is all


class Second:
    """The second pass over one problem: its scene, and what the forward saved, which scores don't need."""

    def __init__(self, problem: Problem, scene: Any, saved: Tensor | None, query: Tensor):
        self.problem, self.scene, self.saved = problem, scene, saved
        self.device = query.device
        self.size = tile("weights", query.device, query.dtype, padded(problem.sizes.d))
        self.constants = {
            "M": self.size.rows,
            "N": self.size.keys,
            "D": padded(problem.sizes.d),
            "PRECISION": precision(query.dtype),
        }

    def answer(self, ask: Ask, queries: Queries) -> tuple[Tensor, ...]:
        """The parts of a readout's result."""
        if ask.kind in (Kind.RECEIVED, Kind.SEEN):
            received, seen = self.received(queries, seen=ask.kind is Kind.SEEN)
            return (seen if ask.kind is Kind.SEEN else received,)
        if ask.kind is Kind.ROWS:
            return (self.rows(queries),)
        if ask.kind is Kind.TOP:
            return self.top(queries, ask.number)
        if ask.kind is Kind.POOL:
            return (self.pool(ask.number),)
        if ask.kind in (Kind.MASS, Kind.MASS_OF_IDS):
            return (self.mass(ask, queries),)
        return (self.share(ask),)

    def received(self, queries: Queries, seen: bool) -> tuple[Tensor, Any]:
        b, h, _, _, j = self.problem.sizes[:5]
        received = self._empty(b, h, j)
        counts = self._empty(b, h, j) if seen else None
        first, last = (t.to(torch.int32).to(self.device) for t in reaching(self.problem, queries, self.size.keys))
        tiles = -(-j // self.size.keys)
        self._launch(
            kernels.receive, tiles * b * h, self._saved(queries), first, last, step(first, 0), received, counts, tiles
        )
        return received, counts

    def rows(self, queries: Queries, hidden: float = 0.0, scores: bool = False) -> Tensor:
        b, h, _, i, j = self.problem.sizes[:5]
        count = i if queries is None else len(queries)
        to = self._empty(b, h, count, j)
        blocks, tiles = -(-count // self.size.rows), -(-j // self.size.keys)
        saved = self._saved(queries)
        self._launch(kernels.write_rows, b * h * blocks * tiles, saved, to, blocks, tiles, hidden, SCORES=scores)
        return to

    def top(self, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
        """A few rows at a time, for memory's sake."""
        b, h, _, i, j = self.problem.sizes[:5]
        asked = torch.arange(i) if queries is None else queries
        weights = self._empty(b, h, len(asked), k)
        indices = torch.empty(b, h, len(asked), k, dtype=torch.int64, device=self.device)
        some = max(1, AT_ONCE // max(b * h * j, 1))
        for start in range(0, len(asked), some):
            # −1 sorts behind every weight, so hidden keys come last, also behind visible ones of weight 0.
            marked = self.rows(asked[start : start + some], hidden=-1.0)
            part = slice(start, start + some)
            weights[:, :, part], indices[:, :, part] = strongest(marked, marked < 0, k)
        return weights, indices

    def share(self, ask: Ask) -> Tensor:
        b, h, _, i = self.problem.sizes[:4]
        to = self._empty(b, h, i)
        counted = rule(lines(rule_of(ask, self.problem), i, self.problem.sizes.j, self.device))
        blocks = -(-i // self.size.rows)
        self._launch(kernels.share, blocks * b * h, self._saved(None), counted, to, blocks)
        return to

    def mass(self, ask: Ask, queries: Queries) -> Tensor:
        b, h, _, i = self.problem.sizes[:4]
        count = i if queries is None else len(queries)
        member: Any = ask.member
        ids = ask.kind is Kind.MASS_OF_IDS
        n = ask.number if ids else member.shape[2]
        to = self._empty(b, h, count, n)
        blocks, chunks = -(-count // self.size.rows), -(-n // 32)
        arguments = self._saved(queries), member, step(member, 0), n, to, blocks, chunks
        self._launch(kernels.mass, b * h * blocks * chunks, *arguments, G=32, IDS=ids)
        return to[..., : ask.number]

    def pool(self, size: int) -> Tensor:
        b, h, _, i, j = self.problem.sizes[:5]
        lines_, columns = -(-i // size), -(-j // size)
        to = self._empty(b, h, lines_, columns)
        self._launch(kernels.pool, b * h * lines_ * columns, self._saved(None), to, size, lines_, columns)
        return to

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        launch(kernel, programs, self.device, self.size, self.scene, *arguments, **self.constants, **constants)

    def _saved(self, queries: Queries) -> Any:
        b, h, _, i = self.problem.sizes[:4]
        chosen = None if queries is None else queries.to(torch.int32).to(self.device)
        return kernels.Saved(self.saved, b * h * i, chosen, i if queries is None else len(queries))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def reaching(problem: Problem, queries: Queries, keys: int) -> tuple[Int[Tensor, "#b t"], Int[Tensor, "#b t"]]:
    """For each tile of `keys` keys, by any head: the first of the `queries` that may see some of it, and the one after
    the last, counted among these queries."""
    lo, hi, _ = problem.bounds
    if queries is not None:
        lo, hi = lo[..., queries], hi[..., queries]
    lo, hi = torch.broadcast_tensors(lo, hi)
    tiles, n = -(-problem.sizes.j // keys), lo.shape[-1]
    if n == 0 or tiles == 0:
        return torch.zeros(1, tiles, dtype=torch.int64), torch.zeros(1, tiles, dtype=torch.int64)
    sees = lo < hi
    # A query reaches the tiles from its first key's to its last key's.
    begin = torch.where(sees, lo // keys, tiles).amin(1)
    end = torch.where(sees, (hi - 1) // keys, -1).amax(1)
    first = torch.full((len(begin), tiles), n)
    last = torch.zeros(len(begin), tiles, dtype=torch.int64)
    # In blocks of queries, so that nothing here is as large as queries times keys.
    rows, tile_numbers = 64, torch.arange(tiles)
    for start in range(0, n, rows):
        lowest = begin[:, start : start + rows].amin(-1, keepdim=True)
        highest = end[:, start : start + rows].amax(-1, keepdim=True)
        reached = (tile_numbers >= lowest) & (tile_numbers <= highest)
        first = torch.where(reached & (first == n), start, first)
        last = torch.where(reached, min(start + rows, n), last)
    return torch.minimum(first, last), last
