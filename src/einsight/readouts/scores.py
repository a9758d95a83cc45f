"""Readouts of the scores and of all weights at once: log of the sum, largest score, entropy."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from einsight.readouts.readout import Block, Readout


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
