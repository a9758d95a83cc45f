"""The softmax over a block's scores, and their sums, with derivatives of any order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from einsight.values import may_look


class Softmax(NamedTuple):
    """What a softmax is taken of: the scores, and the sink as one more key, which has no value."""

    scores: Float[Tensor, "b h i n"]
    largest: Float[Tensor, "b h i"]  # without the sink; −∞ where a query sees nothing
    shift: Float[Tensor, "b h i"]  # the largest with it, a constant
    nothing: Bool[Tensor, "b h i"]  # queries without anything to divide by


def softmax_of(scores: Float[Tensor, "b h i j"], sink: Float[Tensor, " h"] | None) -> Softmax:
    """`scores` are −∞ where a query may not see a key."""
    largest = scores.amax(-1) if scores.shape[3] else scores.sum(-1) - torch.inf
    shift = largest
    if sink is not None:
        sink = sink.to(scores.dtype).view(1, -1, 1).expand(largest.shape)
        scores, shift = torch.cat([scores, sink.unsqueeze(-1)], -1), torch.maximum(largest, sink)
    nothing = shift == -torch.inf
    if not may_look(nothing) or bool(nothing.any()):
        # All −∞ has a softmax of NaN, which would go into the gradients.
        scores = scores.masked_fill(nothing.unsqueeze(-1), 0)
    return Softmax(scores, largest, shift.detach().masked_fill(nothing, 0), nothing)


def weights_of(of: Softmax, keys: int, seen: Bool[Tensor, "#b #h #i #j"] | None) -> Float[Tensor, "b h i j"]:
    """The weights of the keys. A NaN belongs to those that its query sees."""
    weights = torch.softmax(of.scores, -1)[..., :keys]
    if not may_look(of.nothing) or bool(of.nothing.any()):
        weights = weights.masked_fill(of.nothing.unsqueeze(-1), 0)
    return weights if seen is None else weights.where(seen, 0)


def sums_of(of: Softmax) -> tuple[Float[Tensor, "b h i"], Float[Tensor, "b h i"]]:
    """The logarithms of the sums of exp(score − shift) and of exp(score)."""
    log_sum = torch.logsumexp(of.scores - of.shift.unsqueeze(-1), -1).masked_fill(of.nothing, 0)
    return log_sum, (of.shift + log_sum).masked_fill(of.nothing, -torch.inf)
