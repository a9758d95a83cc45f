"""The feed-forward layer, and the block that joins it with attention."""

from __future__ import annotations

from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

import einsight as es
from einsight.nn.attention import MultiHeadAttention
from einsight.nn.cache import KVCache
from einsight.nn.checks import count, one_of
from einsight.values import described

Norm = Literal["rms", "layer"]
Activation = Literal["swiglu", "gelu", "gelu_tanh"]


class FeedForward(nn.Module):
    """A layer for each token alone: down(silu(gate(x)) · up(x)), or down(gelu(up(x))).

    Arguments:
        embed_dim: m, the size of the vectors that come in and go out.
        hidden_dim: how wide it is in between.
        activation: "swiglu" (Shazeer 2020, arXiv:2002.05202), "gelu" (Hendrycks & Gimpel 2016,
            arXiv:1606.08415) or "gelu_tanh", its approximation by tanh (GPT-2).
        bias: whether the projections add a bias.

    Raises:
        ValueError: sizes below 1; another name of an activation.

    >>> import einsight as es, torch
    >>> es.nn.FeedForward(6, 16)(torch.randn(2, 5, 6)).shape
    torch.Size([2, 5, 6])
    """

    def __init__(self, embed_dim: int, hidden_dim: int, activation: Activation = "swiglu", *, bias: bool = False):
        super().__init__()
        count("FeedForward's embed_dim", embed_dim)
        count("FeedForward's hidden_dim", hidden_dim)
        one_of("activation", activation, get_args(Activation))
        self.activation = activation
        self.gate = nn.Linear(embed_dim, hidden_dim, bias=bias) if activation == "swiglu" else None
        self.up = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)) (Xiong et al. 2020,
    arXiv:2002.04745).

    Arguments:
        attention: the attention layer; its `embed_dim` is the block's.
        hidden_dim: the feed-forward layer's width.
        norm: "rms" (Zhang & Sennrich 2019, arXiv:1910.07467) or "layer" (Ba et al. 2016, arXiv:1607.06450).
        norm_eps: what the norms add to the mean square or variance.
        activation: the feed-forward layer's, see `FeedForward`.
        mlp_bias: whether the feed-forward layer's projections add a bias.

    Raises:
        TypeError, ValueError: what isn't an attention layer; sizes, names or numbers that can't be.

    >>> import einsight as es, torch
    >>> block = es.nn.TransformerBlock(es.nn.MultiHeadAttention(12, 3, mask=es.causal()), hidden_dim=32)
    >>> block(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        *,
        hidden_dim: int,
        norm: Norm = "rms",
        norm_eps: float = 1e-5,
        activation: Activation = "swiglu",
        mlp_bias: bool = False,
    ):
        super().__init__()
        if not isinstance(attention, nn.Module) or not hasattr(attention, "embed_dim"):
            raise TypeError(f"attention must be a MultiHeadAttention, not {described(attention)}")
        self.attention_norm = make_norm(norm, attention.embed_dim, norm_eps)
        self.attention = attention
        self.feed_forward_norm = make_norm(norm, attention.embed_dim, norm_eps)
        self.feed_forward = FeedForward(attention.embed_dim, hidden_dim, activation, bias=mlp_bias)

    def forward(
        self,
        x: Float[Tensor, "b i m"],
        *,
        mask: es.Mask | None = None,
        cache: KVCache | None = None,
        readouts: Any = None,
    ) -> Any:
        """The block's output [b, i, m]; with `readouts`, (output, results). See `MultiHeadAttention.forward`."""
        attended = self.attention(self.attention_norm(x), mask=mask, cache=cache, readouts=readouts)
        attended, seen = (attended, None) if readouts is None else attended
        x = x + attended
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x if readouts is None else (x, seen)


def make_norm(norm: Norm, dim: int, eps: float) -> nn.Module:
    """An RMSNorm or a LayerNorm."""
    one_of("norm", norm, get_args(Norm))
    return nn.RMSNorm(dim, eps) if norm == "rms" else nn.LayerNorm(dim, eps)
