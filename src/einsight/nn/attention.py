"""The attention layer: project, split the heads, rotate, attend, join, project."""

from __future__ import annotations

from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

import einsight as es
from einsight.functional import refuse_arguments
from einsight.nn.cache import KVCache
from einsight.nn.checks import count, head_size, positive
from einsight.nn.positions import RotaryEmbedding
from einsight.problem import is_autocast
from einsight.values import described

_SETTINGS = (
    "embed_dim", "num_heads", "num_kv_heads", "head_dim", "proj_bias", "rotary", "qk_norm", "mask", "softcap", "sink",
    "dropout",
)  # fmt: skip


class MultiHeadAttention(nn.Module):
    """Multi-head attention: join(Attention(x W_q, c W_k, c W_v)) W_o, with x attending to itself or to a context c
    (Vaswani et al. 2017, arXiv:1706.03762).

    Arguments:
        embed_dim: m, the size of the vectors that come in and go out.
        num_heads: h.
        num_kv_heads: g, how many heads the keys and values have; query head n reads key head n // (h / g).
            All by default (grouped-query attention: Ainslie et al. 2023, arXiv:2305.13245).
        head_dim: d; embed_dim / num_heads by default.
        proj_bias: whether the projections add a bias: True, False, or "qkv" for all but the last (Qwen2).
        rotary: a `RotaryEmbedding`, applied to queries and keys; layers may share one.
        qk_norm: the epsilon of an RMSNorm over each head's queries and keys, before they are rotated (Henry et
            al. 2020, arXiv:2010.04245; Qwen3); None is no norm.
        mask: which keys a query may see, such as `einsight.causal()`; None is all.
        softcap: see `einsight.attention`.
        sink: whether each head learns a score that takes part in the softmax and has no value.
        dropout: the probability of dropping a weight in training.

    Raises:
        ValueError, TypeError: sizes that don't divide, odd heads to be rotated, or what isn't a mask.

    >>> import einsight as es, torch
    >>> layer = es.nn.MultiHeadAttention(12, 3, mask=es.causal())
    >>> output, entropy = layer(torch.randn(2, 5, 12), readouts=es.Entropy())
    >>> output.shape, entropy.shape
    (torch.Size([2, 5, 12]), torch.Size([2, 3, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        proj_bias: bool | Literal["qkv"] = False,
        rotary: RotaryEmbedding | None = None,
        qk_norm: float | None = None,
        mask: es.Mask | None = None,
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
        **unknown: Any,
    ):
        super().__init__()
        refuse_arguments(
            "MultiHeadAttention",
            unknown,
            _SETTINGS,
            bias="proj_bias=",
            batch_first="nothing: x is [b, length, embed_dim]",
            kdim="MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(…, kdim=…))",
        )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            count(name, size)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, not {num_heads} and {num_kv_heads}")
        head_dim = head_size(embed_dim, num_heads, head_dim)
        count("head_dim", head_dim)
        if not isinstance(proj_bias, bool) and proj_bias != "qkv":
            raise ValueError(f"proj_bias must be True, False or 'qkv', not {proj_bias!r}")
        if qk_norm is not None:
            positive("qk_norm (the epsilon of the norm, such as 1e-6)", qk_norm)
        if softcap is not None:
            positive("softcap", softcap)
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise TypeError(f"rotary must be a RotaryEmbedding, such as RotaryEmbedding({head_dim}), not {rotary!r}")
        if rotary is not None and rotary.dim > head_dim:
            odd = "; RotaryEmbedding needs an even number of them" if head_dim % 2 else ""
            raise ValueError(
                f"rotary turns {rotary.dim} dimensions, but heads have {head_dim} (embed_dim={embed_dim}, "
                f"num_heads={num_heads}): RotaryEmbedding({head_dim - head_dim % 2}){odd}"
            )
        if mask is not None and not isinstance(mask, es.Mask):
            raise TypeError(f"mask must be one of einsight's masks, such as es.causal(), not {type(mask).__name__}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability in [0, 1), not {dropout!r}")
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.rotary, self.mask, self.softcap, self.dropout = rotary, mask, softcap, dropout
        self.query = nn.Linear(embed_dim, num_heads * head_dim, bias=bool(proj_bias))
        self.key = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bool(proj_bias))
        self.value = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bool(proj_bias))
        self.out = nn.Linear(num_heads * head_dim, embed_dim, bias=proj_bias is True)
        self.query_norm = None if qk_norm is None else nn.RMSNorm(head_dim, qk_norm)
        self.key_norm = None if qk_norm is None else nn.RMSNorm(head_dim, qk_norm)
        self.sink = nn.Parameter(torch.zeros(num_heads)) if sink else None

    def forward(
        self,
        x: Float[Tensor, "b i m"],
        context: Float[Tensor, "b j c"] | None = None,
        *,
        mask: es.Mask | None = None,
        bias: es.Bias | Float[Tensor, ...] | None = None,
        cache: KVCache | None = None,
        offset: int | Int[Tensor, " b"] | None = None,
        readouts: Any = None,
        **unknown: Any,
    ) -> Any:
        """Attend from x to itself, or to a context.

        Arguments:
            x: [b, i, m].
            context: what the keys and values are made of, [b, j, m]; x itself by default.
            mask: joined with the layer's own: a query sees what both allow.
            bias: added to the scores, see `einsight.attention`.
            cache: earlier keys and values, to which x's are appended. Masks, biases and readouts then speak of all
                keys in the cache, and the queries are the last ones.
            offset: where x's first token stands among the context's keys, for a mask or a bias that asks for it, see
                `einsight.attention`. Without a context that is known.
            readouts: what to know of the weights, as `einsight.attention` takes it.

        Returns:
            The output [b, i, m]; with `readouts`, (output, results).

        Raises:
            ValueError: shapes that don't fit, a full cache, a cache or rotary positions together with a context, an
                offset without one.
        """
        refuse_arguments(
            "MultiHeadAttention",
            unknown,
            ("x", "context", "mask", "bias", "cache", "offset", "readouts"),
            key_padding_mask="mask=~einsight.padding(key_padding_mask)",
            attn_mask="mask=einsight.forbid(attn_mask), or bias=attn_mask if it is a float mask",
            is_causal="mask=einsight.causal()",
            need_weights="readouts=einsight.Weights()",
        )
        self._check(x, context, cache, offset)
        source = x if context is None else context
        query = rearrange(self.query(x), "b i (h d) -> b h i d", h=self.num_heads)
        key = rearrange(self.key(source), "b j (g d) -> b g j d", g=self.num_kv_heads)
        value = rearrange(self.value(source), "b j (g d) -> b g j d", g=self.num_kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            # Autocast leaves norms as they are, and PyTorch's fused ones want one dtype.
            kind = self.query_norm.weight.dtype
            query, key = self.query_norm(query.to(kind)), self.key_norm(key.to(kind))
        place = 0 if cache is None else cache.offset
        if self.rotary is not None:
            query, key = self.rotary(query, place), self.rotary(key, place)
        mask = _both(self.mask, mask)
        if cache is not None:
            key, value = cache.append(key, value)
            if not isinstance(place, int) and not _sees_nothing_later(mask):
                mask = _both(mask, es.lengths(cache.lengths))
        attended = es.attention(
            query,
            key,
            value,
            mask,
            softcap=self.softcap,
            bias=bias,
            sink=self.sink,
            offset=place if context is None else offset,
            dropout=self.dropout if self.training else 0.0,
            readouts=readouts,
        )
        output, seen = (attended, None) if readouts is None else attended
        output = self.out(rearrange(output, "b h i d -> b i (h d)"))
        return output if readouts is None else (output, seen)

    def _check(self, x: Any, context: Any, cache: KVCache | None, offset: Any) -> None:
        cast = isinstance(x, Tensor) and is_autocast(x.device.type)
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, not {described(cache)}")
        for name, tensor, size in (("x", x, self.embed_dim), ("context", context, self.key.in_features)):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor [b, length, {size}], not {type(tensor).__name__}")
            if tensor.ndim != 3 or tensor.shape[-1] != size:
                way = f"; for one sequence write {name}.unsqueeze(0)" if tensor.ndim == 2 else ""
                raise ValueError(f"{name} must have shape [b, length, {size}], but has {list(tensor.shape)}{way}")
            weight = getattr(self.query, "weight", tensor)
            kind = weight.dtype if isinstance(weight, Tensor) else tensor.dtype
            if not tensor.is_floating_point() or (kind.is_floating_point and tensor.dtype != kind and not cast):
                raise TypeError(
                    f"{name} is {tensor.dtype}, but the layer's weights are {kind}: write {name}.to({kind}), or "
                    f"layer.to({name}.dtype)"
                )
        if context is None:
            if self.key.in_features != self.embed_dim:
                raise ValueError(f"this layer attends to a context [b, length, {self.key.in_features}]: give context=")
            if offset is not None:
                raise ValueError(
                    "offset says where x stands in a context; without one x stands where its cache ends, or at 0"
                )
            return
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context has {context.shape[0]} batch items but x has {x.shape[0]}")
        for name, there in (("rotary", self.rotary), ("cache", cache)):
            if there is not None:
                raise ValueError(
                    f"{name} counts the positions of one sequence, but x attends to a context, which is another: use a "
                    f"layer without {name}, or leave context out"
                )

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention) -> MultiHeadAttention:
        """PyTorch's layer as one of ours, with copies of its parameters: the same numbers, but never its NaN.

        Inputs are [b, length, m] whatever `batch_first` was. PyTorch's averaged weights are
        `layer(x, readouts=es.Weights())[1].mean(1)`; here they are the weights before dropout. A
        `key_padding_mask` is `mask=~es.padding(key_padding_mask)`, a boolean `attn_mask` `mask=es.forbid(attn_mask)`,
        a float one `bias=attn_mask`.

        Raises ValueError for `add_bias_kv`, `add_zero_attn` and keys and values of different sizes.

        >>> import einsight as es, torch
        >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        >>> x = torch.randn(2, 5, 12)
        >>> output, weights = es.nn.MultiHeadAttention.from_torch(theirs)(x, readouts=es.Weights())
        >>> right, averaged = theirs(x, x, x)
        >>> torch.allclose(output, right, atol=1e-6), torch.allclose(weights.mean(1), averaged, atol=1e-6)
        (True, True)
        """
        if not isinstance(layer, nn.MultiheadAttention):
            raise TypeError(f"from_torch takes a torch.nn.MultiheadAttention, not {type(layer).__name__}")
        if layer.bias_k is not None or layer.bias_v is not None:
            raise ValueError("from_torch: add_bias_kv=True adds a learned key and value, which this layer doesn't have")
        if layer.add_zero_attn:
            raise ValueError(
                "from_torch: add_zero_attn=True adds a key and a value of zeros; a sink of 0 does the same to the "
                "output: MultiHeadAttention(…, sink=True)"
            )
        if layer.kdim != layer.vdim:
            raise ValueError(
                f"from_torch: keys and values come from one context here, but kdim is {layer.kdim} and vdim "
                f"{layer.vdim}"
            )
        made = cls(layer.embed_dim, layer.num_heads, proj_bias=layer.in_proj_bias is not None, dropout=layer.dropout)
        weights = (
            (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
            if layer.in_proj_weight is None
            else layer.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        for linear, weight, bias in zip((made.query, made.key, made.value), weights, biases, strict=True):
            _copy(linear, weight, bias)
        _copy(made.out, layer.out_proj.weight, layer.out_proj.bias)
        return made.train(layer.training)

    def extra_repr(self) -> str:
        groups = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{groups}, head_dim={self.head_dim}"


def _both(one: es.Mask | None, other: es.Mask | None) -> es.Mask | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _sees_nothing_later(mask: es.Mask | None) -> bool:
    """Whether no query may see a key behind its own position, whatever else it may see."""
    ahead = () if mask is None else (factor.ahead() for factor in mask.factors())
    return any(end is not None and end[1] is not None and end[1] <= 1 for end in ahead)


def _copy(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
