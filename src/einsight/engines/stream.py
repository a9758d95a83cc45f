"""A block of query rows at a time, in torch operations: any feature, any device, linear memory.

A block's scores are computed against just the keys that its bounds allow, so its softmax is exact at once; the
block is handed to every readout, multiplied by the values, and forgotten. Under grad each block is
checkpointed: it is computed again in the backward, which keeps gradients to whatever user functions capture,
and allows second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from einsight.coordinates import At, Run, along, pick
from einsight.engines.join import Join, asked_queries, result_of
from einsight.engines.products import all_finite, inner, product, select_product, weighted
from einsight.engines.softmax import softmax_of, sums_of, weights_of
from einsight.problem import Problem
from einsight.readouts import Block, Readout

# Rows of a block, and how many scores it holds at most: on a CPU the block stays in the cache, on a GPU it is
# large enough to be worth a launch. Measured: docs/decisions.md.
ROWS = 128
SCORES = {"cpu": 2**21}
SCORES_ELSEWHERE = 2**25


def refuses(problem: Problem) -> str | None:
    if problem.is_transformed:
        return "torch.func and forward mode can't transform a computation in blocks"
    return None


def makes(problem: Problem) -> str:
    return "any result, first and second derivatives; memory for a few blocks"


def visits(problem: Problem) -> int:
    return sum(_size(tile) for tile in _tiles(problem))


def holds(problem: Problem) -> int:
    """Bytes: two blocks of scores, and an item's and its heads' keys and values in float32."""
    tiles = list(_tiles(problem))
    most = max(tiles, key=_size)
    keys = (most.batch.stop - most.batch.start) * (most.groups.stop - most.groups.start) * problem.sizes.j
    upcast = 0 if problem.query.dtype == problem.dtype else keys * (problem.sizes.d + problem.sizes.e)
    return (2 * _size(most) + upcast) * problem.dtype.itemsize


def run(problem: Problem) -> tuple[Float[Tensor, "b h i e"] | None, tuple[Any, ...]]:
    sizes, grad = problem.sizes, problem.needs_grad
    tiles = list(_tiles(problem))
    output = Join(((*sizes[:2], sizes.i, sizes.e),), grad=grad)
    answers = [_Answer(readout, problem) for readout in problem.readouts]
    space = None if grad else _Space(problem, tiles)
    versions = problem.versions if grad else ()
    for tile, query, key, value in _with_operands(problem, tiles):
        work = partial(_attend, problem, tile, query, key, value, answers)
        if grad and len(tiles) > 1:
            work = partial(_if_unchanged, problem, versions, work)
            piece, pieces = checkpoint(work, use_reentrant=False, preserve_rng_state=problem.dropout > 0)
        else:
            piece, pieces = work(space)
        if piece is not None:
            output.put((tile.batch.start, tile.heads.start, tile.rows.start), (piece,))
        for answer, found in zip(answers, pieces, strict=True):
            if found is not None:
                answer.join.put(*found)
    return None if problem.value is None else output.whole()[0], tuple(answer.whole() for answer in answers)


def _if_unchanged(problem: Problem, versions: tuple[int, ...], work: Callable[[], _Found]) -> _Found:
    """The block, unless what it is computed from was changed since the forward."""
    if problem.versions != versions:
        raise RuntimeError(
            "a tensor of an attention call has been modified by an inplace operation before the backward, which "
            "computes its blocks again; change a clone of it, or ask for engine='reference'"
        )
    return work()


# The output of a block, and for each readout the place and the parts of its piece.
_Found = tuple[Tensor | None, list[tuple[tuple[int, ...], tuple[Tensor, ...]] | None]]


class _Tile(NamedTuple):
    """A block: items, key/value heads, query heads, queries, the keys that any of its queries may see, and
    the part of those that all of them may (by the bounds)."""

    batch: slice
    groups: slice
    heads: slice
    rows: slice
    keys: Run
    common: Run


def _tiles(problem: Problem) -> Iterator[_Tile]:
    """The blocks, in order of items, heads, queries. Items and heads whose bounds differ are taken one by one."""
    b, h, g, i, j = problem.sizes[:5]
    if 0 in (b, h, i):
        yield _Tile(slice(0, b), slice(0, g), slice(0, h), slice(0, i), Run(0, 0), Run(0, 0))
        return
    lo, hi, exact = problem.bounds
    shared = h // g
    most = SCORES.get(problem.device.type, SCORES_ELSEWHERE)
    rows = min(ROWS, i)
    starts, stops, lefts, rights = _hulls(lo, hi, rows, j, exact)
    width = max(1, int((stops - starts).max()))
    if shared * rows * width > most and rows > 1:
        rows = max(1, most // (shared * width))
        starts, stops, lefts, rights = _hulls(lo, hi, rows, j, exact)
    room = max(1, most // (shared * rows * width))
    groups = 1 if lo.shape[1] > 1 else min(g, room)
    items = 1 if len(lo) > 1 or groups < g else min(b, room // groups)
    edges = [t.tolist() for t in (starts, stops, lefts, rights)]
    for item in range(0, b, items):
        of_item = [edge[item if len(lo) > 1 else 0] for edge in edges]
        for group in range(0, g, groups):
            heads = slice(group * shared, min(group + groups, g) * shared)
            first = heads.start if lo.shape[1] > 1 else 0
            of_heads = [edge[first : first + shared] if len(edge) > 1 else edge for edge in of_item]
            for chunk, row in enumerate(range(0, i, rows)):
                start, stop = min(e[chunk] for e in of_heads[0]), max(e[chunk] for e in of_heads[1])
                left, right = max(e[chunk] for e in of_heads[2]), min(e[chunk] for e in of_heads[3])
                yield _Tile(
                    slice(item, min(item + items, b)),
                    slice(group, min(group + groups, g)),
                    heads,
                    slice(row, min(row + rows, i)),
                    Run(start, max(start, stop)),
                    Run(left, max(left, right)),
                )


def _hulls(lo: Tensor, hi: Tensor, rows: int, j: int, exact: bool) -> tuple[Tensor, ...]:
    """For each `rows` queries: the union [start, stop) of their bounds, and the intersection [left, right)."""
    sees = lo < hi
    lo, hi = lo.where(sees, j), hi.where(sees, 0)
    short = -lo.shape[-1] % rows
    if short:
        lo, hi = (torch.cat([t, t[..., -1:].expand(*t.shape[:2], short)], -1) for t in (lo, hi))
    lo, hi = lo.unflatten(-1, (-1, rows)), hi.unflatten(-1, (-1, rows))
    starts, stops, lefts, rights = lo.amin(-1), hi.amax(-1), lo.amax(-1), hi.amin(-1)
    return (starts, stops, lefts, rights) if exact else (starts, stops, lefts, lefts)


class _Space:
    """Memory for the scores and weights of a block, taken once: blocks of growing width fragment the heap."""

    def __init__(self, problem: Problem, tiles: list[_Tile]):
        size = max(map(_size, tiles))
        self.scores = torch.empty(size, dtype=problem.dtype, device=problem.device)
        keep = any(readout.reads_scores for readout in problem.readouts)
        self.weights = torch.empty_like(self.scores) if keep else self.scores


def _size(tile: _Tile) -> int:
    items, heads, rows = (s.stop - s.start for s in (tile.batch, tile.heads, tile.rows))
    return items * heads * rows * len(tile.keys)


def _with_operands(problem: Problem, tiles: list[_Tile]) -> Iterator[tuple[_Tile, Tensor, Tensor, Tensor | None]]:
    """Each block with its queries and the keys and values of its groups, which the blocks of a group share."""

    def of_groups(x: Float[Tensor, "b g j d"]) -> Float[Tensor, "n j d"]:
        return x[first.batch, first.groups].to(problem.dtype).flatten(0, 1)

    for _, shared in groupby(tiles, lambda tile: (tile.batch, tile.groups)):
        first, *others = shared
        key, value = of_groups(problem.key), None if problem.value is None else of_groups(problem.value)
        lengths = [tile.rows.stop - tile.rows.start for tile in (first, *others)]
        # Split, not sliced: the backward of a slice fills a whole tensor for each block.
        rows = problem.query[first.batch, first.heads].split(lengths, 2)
        for tile, query in zip((first, *others), rows, strict=True):
            yield tile, query, key, value


def _attend(
    problem: Problem,
    tile: _Tile,
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "n j d"],
    value: Float[Tensor, "n j e"] | None,
    answers: list[_Answer],
    space: _Space | None = None,
) -> _Found:
    """The output of one block and what the readouts say of it; without `space`, so that gradients can flow."""
    if torch.compiler.is_compiling():
        space = None  # what is written there, torch.compile mixes up
    at = problem.at(tile.batch, tile.heads, tile.rows, tile.keys)
    shape, groups = at.shape, tile.groups.stop - tile.groups.start
    # The query heads of a group are stacked, so that one product reads their keys once.
    n, flat = len(key), shape[1] // max(groups, 1) * shape[2]
    reach = slice(tile.keys.start, tile.keys.stop)
    query, key = query.to(problem.dtype).reshape(n, flat, query.shape[3]), key[:, reach]
    seen = _seen(problem, tile, at)
    bias = None if problem.bias is None else problem.bias.block(at, problem.dtype)
    if bias is not None:
        seen = (bias != -torch.inf) if seen is None else seen & (bias != -torch.inf)

    def per_group(seen: Bool[Tensor, "#b #h #i #j"]) -> Bool[Tensor, "n m j"]:
        return seen.expand(shape).reshape(n, flat, shape[3])

    if space is None:
        scores = inner(query * problem.scale, key, None if seen is None else per_group(seen))
    else:
        room = space.scores[: n * flat * shape[3]].view(n, flat, shape[3])
        scores = torch.baddbmm(room, query, key.mT, beta=0, alpha=problem.scale, out=room)
    scores = scores.view(shape)
    if problem.softcap is not None:
        scores = torch.tanh(scores / problem.softcap) * problem.softcap
    scores = problem.modified(scores, at)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        # What score_mod returns may be the user's own tensor.
        in_place = space is not None and problem.score_mod is None
        scores = _hide(scores, seen, tile, in_place=in_place, everywhere=bias is not None)
    if bias is not None or problem.score_mod is not None:
        seen = scores.detach() != -torch.inf

    weights, found = _softmax(problem, scores, seen, tile, space)
    output = None
    if value is not None:
        kept = (dropout(weights, problem.dropout) if problem.dropout else weights).view(n, flat, shape[3])
        value = value[:, reach]
        if space is None:
            output = weighted(kept, value, None if seen is None else per_group(seen))
        else:
            output = product(kept, value)
            if seen is not None and not all_finite(output):
                output = select_product(kept, value, per_group(seen))
        output = output.view(*shape[:3], value.shape[2]).to(problem.query.dtype)
    if not answers or found is None:
        return output, []
    if seen is None:
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=problem.device)
    first = (tile.batch.start, tile.heads.start, tile.rows.start)
    block = Block(at, *first, groups, weights, scores, *found, seen)
    return output, [answer.ask(block, tile) for answer in answers]


def _seen(problem: Problem, tile: _Tile, at: At) -> Bool[Tensor, "#b #h #i #j"] | None:
    """Which keys of the block its queries may see; None if all of them see all."""
    if problem.bounds.exact and (tile.keys == tile.common or not tile.keys):
        return None if tile.keys else torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=at.device)
    batch, heads = (Run(s.start, s.stop) for s in (tile.batch, tile.heads))
    lo, hi = (along(along(t, 0, batch), 1, heads)[:, :, tile.rows, None] for t in problem.placed_bounds)
    seen = (at.j >= lo) & (at.j < hi)
    if not problem.bounds.exact and problem.mask is not None:
        seen = seen & problem.mask.allowed(at)
    return seen


def _hide(scores: Tensor, seen: Tensor, tile: _Tile, *, in_place: bool, everywhere: bool) -> Float[Tensor, "b h i j"]:
    if not in_place or everywhere:
        return scores.masked_fill(~seen, -torch.inf)
    # All queries see the common keys, so only those before and after need a look.
    for keys in (
        slice(0, tile.common.start - tile.keys.start),
        slice(max(tile.common.stop, tile.common.start) - tile.keys.start, None),
    ):
        scores[..., keys].masked_fill_(~(seen[..., keys] if seen.shape[3] > 1 else seen), -torch.inf)
    return scores


def _softmax(
    problem: Problem, scores: Float[Tensor, "b h i j"], seen: Tensor | None, tile: _Tile, space: _Space | None
) -> tuple[Float[Tensor, "b h i j"], tuple[Tensor, Tensor, Tensor, Tensor] | None]:
    """The weights, and (largest score, shift, logarithm of the sum of exp(score − shift), lse)."""
    if torch.compiler.is_compiling():
        space = None
    sink = None if problem.sink is None else pick(problem.sink, 0, problem.heads[tile.heads])
    if space is None:
        of = softmax_of(scores, sink)
        spoilt = seen is not None and not bool((of.shift < torch.inf).all())
        weights = weights_of(of, scores.shape[3], seen if spoilt else None)
        return weights, (of.largest, of.shift, *sums_of(of)) if problem.readouts else None
    # In place the softmax writes over the scores, so this comes first.
    largest = scores.amax(-1) if scores.shape[3] else scores.sum(-1) - torch.inf
    weights = torch.softmax(scores, -1, out=space.weights[: scores.numel()].view(scores.shape))
    nothing = largest == -torch.inf
    if bool(nothing.any()):
        weights = weights.masked_fill(nothing.unsqueeze(-1), 0)
    shift = largest.masked_fill(nothing, 0)
    # The largest weight is 1 / Σ exp(score − largest): one look at the weights, and no second exp.
    total = weights.amax(-1) if scores.shape[3] else torch.zeros_like(largest)
    log_sum = -torch.log(total.masked_fill(nothing, 1))
    if sink is not None:
        # As a key's score of +∞, which softmax makes NaN.
        sink = sink.to(problem.dtype).masked_fill(sink == torch.inf, torch.nan).view(1, -1, 1).expand(shift.shape)
        with_sink = torch.logaddexp(log_sum, sink - shift).masked_fill(nothing, 0)
        weights = weights * torch.exp(log_sum - with_sink).unsqueeze(-1)
        log_sum, shift = with_sink, torch.where(nothing, sink, shift)
        nothing = shift == -torch.inf
        shift = shift.masked_fill(nothing, 0)
    lse = (shift + log_sum).masked_fill(nothing, -torch.inf)
    if seen is not None and not bool((lse < torch.inf).all()):
        weights = weights.masked_fill(~seen, 0)  # a NaN belongs to the keys that its query sees
    return weights, (largest, shift, log_sum, lse)


class _Answer:
    """What one readout finds, block by block."""

    def __init__(self, readout: Readout, problem: Problem):
        self.readout, sizes = readout, problem.sizes
        self.queries = asked_queries(readout)
        sizes = sizes if self.queries is None else sizes._replace(i=len(self.queries))
        self.join = Join(readout.shapes(sizes), adds=readout.adds, fill=readout.fill, grad=problem.needs_grad)

    def ask(self, block: Block, tile: _Tile) -> tuple[tuple[int, ...], tuple[Tensor, ...]] | None:
        """The place and the parts of the block's piece; None if the readout isn't about any of its queries."""
        if self.queries is not None:
            first, last = torch.searchsorted(self.queries, torch.tensor([tile.rows.start, tile.rows.stop])).tolist()
            if first == last and len(self.queries):
                return None
            chosen = self.queries[first:last] - tile.rows.start
            block = block.rows(chosen.to(block.weights.device), first)
        parts = self.readout.block(block)
        parts = parts if isinstance(parts, tuple) else (parts,)
        # The piece may be about heads or about groups of them.
        head = block.head * parts[0].shape[1] // max(block.weights.shape[1], 1)
        return (block.item, head, *self.readout.start(block)), parts

    def whole(self) -> Any:
        return result_of(self.readout, self.join.whole())
