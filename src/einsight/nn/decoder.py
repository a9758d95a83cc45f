"""A decoder: embedding → blocks → norm → logits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

import einsight as es
from einsight.nn import checkpoint
from einsight.nn.attention import MultiHeadAttention
from einsight.nn.block import Activation, Norm, TransformerBlock, make_norm
from einsight.nn.cache import KVCache
from einsight.nn.checks import count, head_size, is_integral, one_of, positive
from einsight.nn.generation import generate
from einsight.nn.positions import LearnedPositions, Llama3Scaling, RotaryEmbedding, SinusoidalPositions
from einsight.problem import is_autocast
from einsight.values import may_look

Positions = Literal["rotary", "learned", "sinusoidal"]


@dataclass(frozen=True)
class DecoderConfig:
    """What a `Decoder` is made of; the defaults are those of the Llama family.

    Arguments:
        vocab_size: how many tokens there are.
        embed_dim: m, the size of a token's vector.
        num_layers: how many blocks.
        num_heads: h.
        hidden_dim: the feed-forward layers' width.
        max_length: the longest sequence, which matters for learned positions alone.
        num_kv_heads: g, `num_heads` by default.
        head_dim: d, `embed_dim / num_heads` by default.
        positions: "rotary", "learned" or "sinusoidal".
        rotary_base, rotary_scaling: see `RotaryEmbedding`.
        window: n lets a token see itself and the n - 1 before it; None is all before it.
        proj_bias, qk_norm, softcap, sink, dropout: see `MultiHeadAttention`.
        norm, norm_eps, activation, mlp_bias: see `TransformerBlock`.
        tied: whether the logits are products with the embedding's own vectors.

    Raises:
        ValueError: a size that is no positive int, or a kind that isn't known.

    >>> import einsight as es
    >>> print(es.nn.DecoderConfig(vocab_size=11, embed_dim=12, num_layers=2, num_heads=3, hidden_dim=32, window=4))
    DecoderConfig(vocab_size=11, embed_dim=12, num_layers=2, num_heads=3, hidden_dim=32, window=4)
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    max_length: int = 2048
    num_kv_heads: int | None = None
    head_dim: int | None = None
    positions: Positions = "rotary"
    rotary_base: float = 10000.0
    rotary_scaling: Llama3Scaling | None = None
    window: int | None = None
    proj_bias: bool | Literal["qkv"] = False
    qk_norm: float | None = None
    softcap: float | None = None
    sink: bool = False
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "swiglu"
    mlp_bias: bool = False
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "hidden_dim", "max_length"):
            count(name, getattr(self, name))
        if self.window is not None and (not is_integral(self.window) or self.window < 1):
            raise ValueError(f"window must be at least 1 (a token sees itself), or None, not {self.window!r}")
        head_size(self.embed_dim, self.num_heads, self.head_dim)
        positive("norm_eps", self.norm_eps)
        one_of("positions", self.positions, get_args(Positions))

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"DecoderConfig({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


class Decoder(nn.Module):
    """A language model: embedding → pre-norm blocks of causal attention → norm → logits.

    >>> import einsight as es, torch
    >>> config = es.nn.DecoderConfig(vocab_size=11, embed_dim=12, num_layers=2, num_heads=3, hidden_dim=32)
    >>> decoder = es.nn.Decoder(config)
    >>> logits, entropies = decoder(torch.tensor([[1, 2, 3, 4, 5]]), readouts=es.Entropy())
    >>> logits.shape, len(entropies), entropies[0].shape
    (torch.Size([1, 5, 11]), 2, torch.Size([1, 3, 5]))

    Raises ValueError, as its layers do, for sizes that don't divide.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise TypeError(f"Decoder takes a DecoderConfig, not {type(config).__name__}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.positions: LearnedPositions | SinusoidalPositions | None = None
        if config.positions == "learned":
            self.positions = LearnedPositions(config.max_length, config.embed_dim)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.embed_dim)
        rotary = None
        if config.positions == "rotary":
            head_dim = config.head_dim or config.embed_dim // config.num_heads
            rotary = RotaryEmbedding(head_dim, base=config.rotary_base, scaling=config.rotary_scaling)
        mask = es.causal() if config.window is None else es.window(config.window - 1, 0)
        self.blocks = nn.ModuleList(_block(config, rotary, mask) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self._initialise()
        self.register_load_state_dict_pre_hook(checkpoint.adapt)

    def _initialise(self) -> None:
        """As GPT-2: normal of 0.02, less for what is added to the residual stream (Radford et al. 2019)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            added = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.config.num_layers) ** 0.5 if added else 0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Int[Tensor, "b i"],
        *,
        mask: es.Mask | None = None,
        cache: Sequence[KVCache] | None = None,
        readouts: Any = None,
    ) -> Any:
        """The logits of the token after each token.

        Arguments:
            tokens: [b, i]. Shorter sequences are padded on the right: no token sees what comes after it.
            mask: joined with the causal one, such as `einsight.documents(ids)` for packed sequences.
            cache: what `cache()` makes: earlier tokens, to which these are appended.
            readouts: what to know of each layer's weights, as `einsight.attention` takes it.

        Returns:
            The logits [b, i, vocab_size]; with `readouts`, (logits, one result for each layer).

        Raises:
            TypeError, ValueError: tokens that aren't ints [b, i] of the vocabulary, a cache that is full or another's.
        """
        x, seen = self.hidden(tokens, mask=mask, cache=cache, readouts=readouts)
        return self.logits(x) if readouts is None else (self.logits(x), seen)

    def hidden(
        self,
        tokens: Int[Tensor, "b i"],
        *,
        mask: es.Mask | None = None,
        cache: Sequence[KVCache] | None = None,
        readouts: Any = None,
    ) -> tuple[Float[Tensor, "b i m"], list[Any]]:
        """What the logits are made of, [b, i, m], and each layer's readouts. Arguments as `forward`'s."""
        self._check(tokens, cache)
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1], 0 if cache is None else cache[0].offset)
        seen = []
        for n, block in enumerate(self.blocks):
            x = block(x, mask=mask, cache=None if cache is None else cache[n], readouts=readouts)
            if readouts is not None:
                x, result = x
                seen.append(result)
        return self.norm(x), seen

    def logits(self, hidden: Float[Tensor, "*b m"]) -> Float[Tensor, "*b v"]:
        """The logits of hidden vectors, [..., vocab_size]."""
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    def cache(self, batch: int, capacity: int) -> list[KVCache]:
        """Empty caches for `batch` sequences of up to `capacity` tokens, one for each layer, in the model's dtype, or
        autocast's where it is at work."""
        like, (heads, size) = self.embedding.weight, self._cached
        kind = like.device.type
        dtype = torch.get_autocast_dtype(kind) if is_autocast(kind) else like.dtype
        return [KVCache(batch, heads, capacity, size, dtype=dtype, device=like.device) for _ in range(len(self.blocks))]

    @property
    def _cached(self) -> tuple[int, int]:
        """How many heads of what size a layer's keys and values have."""
        config = self.config
        return config.num_kv_heads or config.num_heads, config.head_dim or config.embed_dim // config.num_heads

    def generate(
        self,
        tokens: Int[Tensor, "b i"] | Sequence[Sequence[int] | Int[Tensor, ...]],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: int | Sequence[int] | None = None,
    ) -> Int[Tensor, "b n"]:
        """Continue prompts, one token at a time, each drawn from the model's distribution.

        Arguments:
            tokens: prompts of one length [b, i], or a list of prompts of different lengths.
            max_new_tokens: how many tokens to add at most.
            temperature: what logits are divided by; 0 takes the likeliest token.
            top_p: draw only from the likeliest tokens that together have this probability (nucleus sampling;
                Holtzman et al. 2020, arXiv:1904.09751).
            seed: makes the draws repeatable.
            stop: a token that ends a sequence, or several.

        Returns:
            The new tokens [b, n]; a sequence that has ended is filled up with `stop`, of several the
            first.

        Raises:
            ValueError, TypeError: an empty prompt, tokens outside the vocabulary, more of them than there are learned
                positions, settings out of range. Nothing is computed then.

        >>> import einsight as es, torch
        >>> config = es.nn.DecoderConfig(vocab_size=11, embed_dim=12, num_layers=2, num_heads=3, hidden_dim=32)
        >>> es.nn.Decoder(config).generate([[1, 2, 3], [4]], 5, seed=0).shape
        torch.Size([2, 5])
        """
        return generate(self, tokens, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Decoder:
        """A published model from a folder in Hugging Face's format: Llama, SmolLM2, Qwen2, Qwen3, Mistral, GPT-2.

        Arguments:
            folder: holds `config.json` and the weights in `.safetensors` files; pickles are never opened.
            dtype: what the weights are converted to: float32, bfloat16, float16 or float64. They are copied from the
                file, which may change afterwards.

        Returns:
            The decoder in eval mode on the CPU. Where the file holds a head that isn't the embedding, `tied` is False
            whatever `config.json` says, as transformers has it.

        Raises:
            FileNotFoundError: the folder has no configuration or no safetensors.
            ValueError: another family, a feature that this decoder doesn't have, weights that are missing, unknown,
                quantised, named twice or of another shape, a file that is corrupt. Nothing is loaded then.
            TypeError: a dtype that isn't one of those.
            ImportError: safetensors is not installed.
        """
        found, state = checkpoint.read(folder, dtype)
        try:
            with torch.device("meta"):
                model = cls(DecoderConfig(**found))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{folder}/config.json: {error}") from error
        checkpoint.check(state, model, folder)
        model.load_state_dict(state, assign=True)
        return model.eval()

    def _check(self, tokens: Any, cache: Any) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            what = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens must be an int tensor [b, i], not {what}")
        if tokens.ndim != 2:
            way = "; for one sequence write tokens.unsqueeze(0)" if tokens.ndim == 1 else ""
            raise ValueError(f"tokens must have shape [b, i], but have {list(tokens.shape)}{way}")
        # On other devices looking at them would wait for the device.
        if tokens.device.type == "cpu" and tokens.numel() and may_look(tokens):
            low, high = (int(n) for n in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens go from {low} to {high}, but the vocabulary from 0 to {self.config.vocab_size - 1}"
                )
        if cache is not None:
            self._check_cache(tokens, cache)

    def _check_cache(self, tokens: Tensor, cache: Any) -> None:
        """Before any layer writes: none is to keep tokens that a later one has no room for."""
        layers = len(self.blocks)
        if not isinstance(cache, Sequence) or not all(isinstance(layer, KVCache) for layer in cache):
            raise TypeError(f"cache must be a list of KVCaches, one for each layer, as cache() makes it, not {cache!r}")
        if len(cache) != layers or len(set(cache)) != layers:
            raise ValueError(f"cache must hold one KVCache for each of the {layers} layers, not {len(set(cache))}")
        g, d = self._cached
        for n, layer in enumerate(cache):
            layer.check(tokens.shape[0], g, tokens.shape[1], d)
            if layer.lengths != cache[0].lengths:
                raise ValueError(
                    f"the caches must hold the same tokens, but layer 0's hold {cache[0].lengths} and layer {n}'s "
                    f"{layer.lengths} of each item"
                )


def _block(config: DecoderConfig, rotary: RotaryEmbedding | None, mask: es.Mask) -> TransformerBlock:
    attention = MultiHeadAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        proj_bias=config.proj_bias,
        rotary=rotary,
        qk_norm=config.qk_norm,
        mask=mask,
        softcap=config.softcap,
        sink=config.sink,
        dropout=config.dropout,
    )
    return TransformerBlock(
        attention,
        hidden_dim=config.hidden_dim,
        norm=config.norm,
        norm_eps=config.norm_eps,
        activation=config.activation,
        mlp_bias=config.mlp_bias,
    )
