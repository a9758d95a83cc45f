"""Readouts: what one may want to know of the weights, each computed from a block of them and joined.

An engine hands every readout the weights of a block of queries, exact and normalised, with the scores, the
lse and the coordinates; the readout returns its piece of the result. Pieces lie side by side, or are added
up where they meet. A readout of one's own is a subclass with `block`, and with `shapes`, `start` and `adds`
where its result isn't one number per query.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from einsight.coordinates import At, Axis, Sizes, as_axis, as_chosen, numbers
from einsight.masks.mask import shown


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


class Chosen(Readout):
    """A readout that may be about some of the queries only."""

    def __init__(self, queries: object = None):
        # As an axis once the problem is known.
        self.queries = None if queries is None else as_chosen(queries, f"{type(self).__name__}'s queries")  # type: ignore[assignment]

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        if self.queries is None:
            return self
        return changed(self, queries=as_axis(self.queries, sizes.i, f"{type(self).__name__}'s queries"))
