"""Attention as it is taught: softmax(Q Kᵀ / √d) V, with the future masked out."""

from __future__ import annotations

from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, einsum


def attention(
    Q: Float[Tensor, "b h i d"],
    K: Float[Tensor, "b h j d"],
    V: Float[Tensor, "b h j e"],
    causal: bool = False,
) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i j"]]:
    """The output and the weights, in five lines (Vaswani et al. 2017, arXiv:1706.03762).

    >>> import torch
    >>> from einsight.formula import attention
    >>> attention(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.eye(3)[None, None], causal=True)[0][0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    scores = einsum("bhid,bhjd->bhij", Q, K) / sqrt(Q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    weights = scores.softmax(dim=-1)
    output = einsum("bhij,bhje->bhie", weights, V)
    return output, weights
