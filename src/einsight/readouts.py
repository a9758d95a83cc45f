"""Readouts: what one may want to know of the weights, each computed from a block of them and joined.

An engine hands every readout the weights of a block of queries, exact and normalised, with the scores, the
lse and the coordinates; the readout returns its piece of the result. Pieces lie side by side, or are added
up where they meet. A readout of one's own is a subclass with `block`, and with `shapes`, `start` and `adds`
where its result isn't one number per query.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.nn.functional import pad

from einsight.coordinates import At, Axis, Sizes, along, as_axis, as_int, numbers, to_four
from einsight.masks import Mask
from einsight.masks.mask import shown


class Top(NamedTuple):
    """The strongest keys of each query."""

    weights: Float[Tensor, "b h n k"]
    indices: Int[Tensor, "b h n k"]


@dataclass(frozen=True)
class Block:
    """The weights of a block of queries over a range of keys outside which they see nothing.

    `item`, `head` and `row` are its first ones, counted as in the result; `groups` is the number of key/value
    heads that the block's heads share; `shift` what was taken from the scores before exp, `log_sum`
    the logarithm of the sum then, so that lse = shift + log_sum; `max` −∞ where a query sees nothing.
    """

    at: At
    item: int
    head: int
    row: int
    groups: int
    weights: Float[Tensor, "b h i j"]
    scores: Float[Tensor, "b h i j"]
    max: Float[Tensor, "b h i"]
    shift: Float[Tensor, "b h i"]
    log_sum: Float[Tensor, "b h i"]
    lse: Float[Tensor, "b h i"]
    seen: Bool[Tensor, "#b #h #i #j"]

    def rows(self, chosen: Int[Tensor, " n"], row: int) -> Block:
        """The part of the block that is about some of its queries."""

        def some(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape[2] != self.weights.shape[2] else tensor.index_select(2, chosen)

        queries = numbers(self.at.queries)[chosen.cpu()]
        return replace(
            self,
            at=replace(self.at, queries=queries, positions=self.at.positions[:, chosen]),
            row=row,
            weights=some(self.weights),
            scores=some(self.scores),
            max=some(self.max),
            shift=some(self.shift),
            log_sum=some(self.log_sum),
            lse=some(self.lse),
            seen=some(self.seen),
        )


Shapes = tuple[tuple[int, ...], ...]


class Readout:
    """Something to be known of the weights, computed beside the output.

    One's own is a subclass with `block`, which is given the weights of a block of queries and gives its piece of the
    result, [b, h, i] for one number per query; other shapes say so in `shapes`, `start` and `adds`.

    >>> import einsight as es, torch
    >>> class Simpson(es.Readout):
    ...     def block(self, x):
    ...         return 1 - x.weights.square().sum(-1)
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=Simpson())[1]
    tensor([[[0.0000, 0.5000, 0.6667, 0.7500]]])
    """

    queries: Axis | None = None  # the queries it is about; None is all
    positional: bool = False  # whether it asks where the queries stand among the keys
    reads_scores: ClassVar[bool] = False  # whether `block` looks at the scores
    adds: ClassVar[bool] = False  # whether pieces that meet are added up
    fill: ClassVar[float] = 0.0  # what stands where no block came
    tensors: tuple[Tensor, ...] = ()  # what gradients may flow into, beside the problem's own

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        """The readout made ready for a problem, or a refusal of one that it doesn't fit.

        `sizes` are the problem's; `given` those of the tensors it was selected from, which rules speak of.
        """
        return self

    def shapes(self, sizes: Sizes) -> Shapes:
        """The shape of each part of the result; `sizes.i` counts the queries that the readout is about."""
        return ((sizes.b, sizes.h, sizes.i),)

    def start(self, x: Block) -> tuple[int, ...]:
        """Where a block's piece begins in the result's dimensions after batch and heads."""
        return (x.row,)

    def block(self, x: Block) -> Tensor | tuple[Tensor, ...]:
        """The piece of the result that a block holds: a tensor for each part."""
        raise NotImplementedError

    def join(self, *parts: Tensor) -> Any:
        """The whole result, from its parts."""
        return parts[0]

    def __repr__(self) -> str:
        own = {n: x for n, x in vars(self).items() if not n.startswith("_") and n not in ("positional", "tensors")}
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in own.items())})"


def changed(readout: Readout, **changes: object) -> Readout:
    """A copy of a readout with some attributes changed."""
    made = copy(readout)
    vars(made).update(changes)
    return made


class _Chosen(Readout):
    """A readout that may be about some of the queries only."""

    def __init__(self, queries: object = None):
        self.queries = queries  # type: ignore[assignment]

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        if self.queries is None:
            return self
        return changed(self, queries=as_axis(self.queries, sizes.i, f"{type(self).__name__}'s queries"))


class LogSumExp(Readout):
    """The natural logarithm of each query's sum of exp(scores), the sink's included: [b, h, i].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.LogSumExp())[1]
    tensor([[[0.0000, 0.6931, 1.0986, 1.3863]]])
    """

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return x.lse


class MaxScore(Readout):
    """Each query's largest score, as the softmax saw it, without the sink: [b, h, i]; −∞ where it sees nothing.

    It is what QK-clip watches (Kimi Team 2025, arXiv:2507.20534).

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.MaxScore())[1]
    tensor([[[0., 0., 0., 0.]]])
    """

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return x.max


class Entropy(Readout):
    """−Σ w ln w over the keys, in nats: [b, h, i]; 0 where a query sees nothing.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Entropy())[1]
    tensor([[[0.0000, 0.6931, 1.0986, 1.3863]]])
    """

    reads_scores = True

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        # −ln w = log_sum − (score − shift), both terms ≥ 0 but for the sink: nothing cancels. A key so far
        # below that it weighs nothing is held at a finite depth, or its −∞ would meet the weight 0.
        depth = (x.scores - x.shift.unsqueeze(-1)).clamp_min_(-1e4)
        # In place where no derivative needs the factors: a block takes megabytes.
        lost = depth * x.weights if depth.requires_grad or x.weights.requires_grad else depth.mul_(x.weights)
        return x.weights.sum(-1) * x.log_sum - lost.sum(-1)


class Received(_Chosen):
    """How much weight each key receives from the queries: [b, h, j].

    Arguments:
        queries: the queries to count (an int, slice, range, list or int tensor); all by default.
        mean: divide by the number of those queries that may see the key (0 where there is none).
        per_group: add up the heads that share a key/value head: [b, g, j].

    The sum over all queries is H2O's score (Zhang et al. 2023, arXiv:2306.14048), that over the last ones
    SnapKV's (Li et al. 2024, arXiv:2404.14469).

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Received(mean=True))[1]
    tensor([[[0.5208, 0.3611, 0.2917, 0.2500]]])
    """

    adds = True

    def __init__(self, queries: object = None, mean: bool = False, per_group: bool = False):
        super().__init__(queries)
        self.mean, self.per_group = mean, per_group

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        made = super().check(given, sizes)
        # A sum over a set: a query that is named twice counts once.
        return made if not isinstance(made.queries, Tensor) else changed(made, queries=made.queries.unique())

    def shapes(self, sizes: Sizes) -> Shapes:
        received = (sizes.b, sizes.g if self.per_group else sizes.h, sizes.j)
        return (received, received) if self.mean else (received,)

    def start(self, x: Block) -> tuple[int, ...]:
        return (x.at.keys.start,)

    def block(self, x: Block) -> tuple[Float[Tensor, "b h j"], ...]:
        parts = [x.weights.sum(2)]
        if self.mean:
            parts.append(x.seen.expand(x.at.shape).sum(2).to(x.weights.dtype))
        if self.per_group:
            parts = [reduce(part, "b (g n) j -> b g j", "sum", g=x.groups) for part in parts]
        return tuple(parts)

    def join(self, *parts: Float[Tensor, "b h j"]) -> Float[Tensor, "b h j"]:
        return parts[0] / parts[1].clamp(min=1) if self.mean else parts[0]


class TopK(_Chosen):
    """The k largest weights of each query and their keys: `weights` and `indices`, each [b, h, i, k].

    Sorted by weight, and of equal weights the lowest index first. Where a query sees fewer than k keys the rest
    has weight 0 and index −1. `queries` chooses the queries (an int, slice, range, list or int tensor); all by default.

    Raises:
        ValueError: k is no positive int.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.TopK(2, queries=[0, 3]))[1]
    Top(weights=tensor([[[[1.0000, 0.0000],
              [0.2500, 0.2500]]]]), indices=tensor([[[[ 0, -1],
              [ 0,  1]]]]))
    """

    def __init__(self, k: int, queries: object = None):
        super().__init__(queries)
        k = as_int(k)  # type: ignore[assignment]
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"TopK's k must be a positive int, not {k!r}")
        self.k = k

    def shapes(self, sizes: Sizes) -> Shapes:
        top = (sizes.b, sizes.h, sizes.i, self.k)
        return top, top

    def block(self, x: Block) -> tuple[Float[Tensor, "b h i k"], Int[Tensor, "b h i k"]]:
        return strongest(x.weights, ~x.seen.expand(x.at.shape), self.k, x.at.keys.start)

    def join(self, *parts: Tensor) -> Top:
        return Top(*parts)


def strongest(
    weights: Float[Tensor, "b h i j"], hidden: Bool[Tensor, "b h i j"], k: int, start: int = 0
) -> tuple[Float[Tensor, "b h i k"], Int[Tensor, "b h i k"]]:
    """The k largest weights of keys that aren't hidden, and these keys, of which the first is number `start`."""
    # −1 sorts behind every weight, so hidden keys come last, also behind visible ones of weight 0.
    marked = weights.detach().masked_fill(hidden, -1)
    if maybe_current_level() is None:
        index = _largest(marked, k)
    else:  # torch.func can't branch on a value
        index = marked.sort(dim=-1, descending=True, stable=True)[1][..., :k]
    absent = hidden.gather(-1, index)
    weights = weights.gather(-1, index).masked_fill(absent, 0)
    index = (index + start).masked_fill(absent, -1)
    short = (0, k - index.shape[-1])
    return pad(weights, short), pad(index, short, value=-1)


def _largest(x: Float[Tensor, "b h i j"], k: int) -> Int[Tensor, "b h i k"]:
    """Where the k largest of each row are, of equal ones the first."""
    # One more than asked for shows whether a tie reaches across the end.
    found, index = x.topk(min(k + 1, x.shape[-1]), dim=-1)
    tied = ((found[..., 1:] == found[..., :-1]) & (found[..., 1:] >= 0)).any(-1)
    if bool(tied.any()):
        # torch.topk leaves the order of equal numbers open; a stable sort doesn't.
        index[tied] = x[tied].sort(dim=-1, descending=True, stable=True)[1][..., : index.shape[-1]]
    return index[..., :k]


class Share(Readout):
    """The weight that falls on the keys a rule allows: [b, h, i].

    Any mask is a question: the first token `lengths(1)`, the previous one `window(1, -1)`, itself
    `window(0, 0)`, within 32 `window(32, 32)`, induction `same(tokens, tokens.roll(1))`.

    Raises:
        TypeError: what isn't one of our masks.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Share(es.lengths(1)))[1]
    tensor([[[1.0000, 0.5000, 0.3333, 0.2500]]])
    """

    def __init__(self, mask: Mask):
        if not isinstance(mask, Mask):
            what = "a tensor: write es.allow(tensor)" if isinstance(mask, Tensor) else repr(mask)
            raise TypeError(f"Share takes a mask, such as es.window(32, 0), not {what}")
        self.mask = mask
        self.positional = mask.positional

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        self.mask.check(given)
        return self

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return x.weights.where(self.mask.allowed(x.at), 0).sum(-1)


class Mass(_Chosen):
    """The weight on each group of keys (documents, segments, an image): [b, h, i, n].

    Arguments:
        groups: each key's group, an int tensor [j] or [b, j] of 0 to n - 1, or -1 for none; or a float matrix
            [j, n] of how much of each key's weight counts for each of n groups.
        n: the number of groups; by default one more than the largest id.
        queries: the queries to ask about; all by default.

    Raises:
        TypeError, ValueError: ids that are no ints or lie outside, a matrix of another shape.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Mass(torch.tensor([0, 0, 1, -1]), queries=[3]))[1]
    tensor([[[[0.5000, 0.2500]]]])
    """

    def __init__(self, groups: Shaped[Tensor, ...], n: int | None = None, queries: object = None):
        super().__init__(queries)
        if not isinstance(groups, Tensor) or groups.dtype.is_complex or groups.dtype == torch.bool:
            what = f"{groups.dtype} {list(groups.shape)}" if isinstance(groups, Tensor) else repr(groups)
            way = "; the weight on the keys of a boolean tensor is Share(allow(tensor))" if "bool" in what else ""
            raise TypeError(f"Mass takes an int tensor of ids [j] or [b, j], or a float matrix [j, n], not {what}{way}")
        if n is not None and (isinstance(n, bool) or not isinstance(n, int)):
            raise TypeError(f"Mass' n must be an int, not {n!r}")
        if groups.dtype.is_floating_point:
            if groups.ndim != 2 or n not in (None, groups.shape[1]):
                raise ValueError(f"Mass takes a float matrix [j, n], but groups has shape {list(groups.shape)}, n={n}")
            self.n, self.tensors = groups.shape[1], (groups,)
        else:
            if groups.ndim not in (1, 2):
                raise ValueError(f"Mass takes ids [j] or [b, j], but groups has shape {list(groups.shape)}")
            low, high = (int(groups.min()), int(groups.max())) if groups.numel() else (0, -1)
            self.n = high + 1 if n is None else n
            if low < -1 or high >= self.n:
                raise ValueError(
                    f"Mass' ids must lie between -1 (no group) and n - 1 = {self.n - 1}, but go from {low} to {high}"
                )
        self.groups = groups

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        weighted = self.groups.dtype.is_floating_point
        keys = self.groups.shape[0] if weighted else self.groups.shape[-1]
        if keys != given.j:
            raise ValueError(f"Mass' groups {list(self.groups.shape)} speak of {keys} keys, but key has {given.j}")
        if not weighted and self.groups.ndim == 2 and len(self.groups) not in (1, given.b):
            raise ValueError(f"Mass' groups speak of {len(self.groups)} batch items, but there are {given.b}")
        return super().check(given, sizes)

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i, self.n),)

    def block(self, x: Block) -> Float[Tensor, "b h i n"]:
        if self.groups.dtype.is_floating_point:
            member = along(self.groups, 0, x.at.keys).to(x.at.device).mT
        else:
            ids = x.at.take(to_four(self.groups) if self.groups.ndim == 1 else self.groups[:, None, None])
            member = ids == torch.arange(self.n, device=ids.device)[:, None]
        # The one key of a problem also comes where a block has none.
        return x.weights @ member[..., : x.weights.shape[3]].to(x.weights.dtype).mT


class Rows(_Chosen):
    """The weights of the queries one cares about: [b, h, n, j].

    `queries` are an int, slice, range, list or int tensor; negative ones count from the end.

    Raises:
        TypeError: None; for all rows ask for `Weights()`.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Rows([1, -1]))[1]
    tensor([[[[0.5000, 0.5000, 0.0000, 0.0000],
              [0.2500, 0.2500, 0.2500, 0.2500]]]])
    """

    def __init__(self, queries: object):
        if queries is None:
            raise TypeError("Rows takes the queries to read; for all of them ask for Weights()")
        super().__init__(queries)

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i, sizes.j),)

    def start(self, x: Block) -> tuple[int, ...]:
        return x.row, x.at.keys.start

    def block(self, x: Block) -> Float[Tensor, "b h i j"]:
        return x.weights


class Diagonal(Readout):
    """The weight on the key `shift` places from the query's own position, p + shift: [b, h, i]; 0 where there is none.

    -1 is the previous token, 0 the token itself.

    Raises:
        TypeError: a shift that is no int.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Diagonal(-1))[1]
    tensor([[[0.0000, 0.5000, 0.3333, 0.2500]]])
    """

    positional = True

    def __init__(self, shift: int = 0):
        shift = as_int(shift)  # type: ignore[assignment]
        if isinstance(shift, bool) or not isinstance(shift, int):
            raise TypeError(f"Diagonal's shift must be an int, not {shift!r}")
        self.shift = shift

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        b, h, i, j = x.weights.shape
        if j == 0:
            return x.weights.sum(-1)
        key = (x.at.p + (self.shift - x.at.keys.start)).expand(b, h, i, 1)
        inside = (key >= 0) & (key < j)
        return x.weights.gather(-1, key.clamp(0, j - 1)).where(inside, 0).squeeze(-1)


class Distance(Readout):
    """How far away a query looks: Σ w · |p − j|, in positions: [b, h, i].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Distance())[1]
    tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]])
    """

    positional = True

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return (x.weights * (x.at.p - x.at.j).abs()).sum(-1)


class Pool(Readout):
    """A picture of a long sequence: for blocks of queries and keys, the mean over the block's queries of the
    weight on the block's keys: [b, h, ⌈i / block⌉, ⌈j / block⌉].

    Raises:
        ValueError: a block that is no positive int.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Pool(2))[1]
    tensor([[[[1.0000, 0.0000],
              [0.5833, 0.4167]]]])
    """

    adds = True
    _queries = 0  # how many the problem has

    def __init__(self, block: int):
        block = as_int(block)  # type: ignore[assignment]
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"Pool's block must be a positive int, not {block!r}")
        self.size = block

    def __repr__(self) -> str:
        return f"Pool({self.size})"

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        return changed(self, _queries=sizes.i)

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, -(-sizes.i // self.size), -(-sizes.j // self.size)),)

    def start(self, x: Block) -> tuple[int, ...]:
        return x.row // self.size, x.at.keys.start // self.size

    def block(self, x: Block) -> Float[Tensor, "b h m n"]:
        size, (_, _, i, j) = self.size, x.weights.shape
        row, key = x.row % size, x.at.keys.start % size
        tiles = pad(x.weights, (key, -(key + j) % size, row, -(row + i) % size))
        sums = reduce(tiles, "b h (m i) (n j) -> b h m n", "sum", i=size, j=size)
        first = (x.row // size) * size
        count = [min(size, self._queries - first - n * size) for n in range(sums.shape[2])]
        return sums / torch.tensor(count, dtype=sums.dtype, device=sums.device)[:, None]


class Weights(Rows):
    """All of the weights, if you have the memory: [b, h, i, j].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Weights())[1][0, 0]
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000],
            [0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self):
        self.queries = None


class Scores(Weights):
    """All of the scores as the softmax saw them, −∞ where masked: [b, h, i, j].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Scores())[1][0, 0]
    tensor([[0., -inf, -inf, -inf],
            [0., 0., -inf, -inf],
            [0., 0., 0., -inf],
            [0., 0., 0., 0.]])
    """

    reads_scores = True
    fill = -torch.inf

    def block(self, x: Block) -> Float[Tensor, "b h i j"]:
        return x.scores
