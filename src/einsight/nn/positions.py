"""Where a token stands: rotary, learned and sinusoidal positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

Offset = int | Tensor  # where token 0 stands: one for all items, or an int tensor [b]


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches rotary positions to a longer context (Llama Team 2024, arXiv:2407.21783).

    Pairs that turn less than `low_freq_factor` times in `original_length` tokens are slowed down by `factor`,
    those that turn more than `high_freq_factor` times are left alone, and between the two it is blended.

    >>> import einsight as es, torch
    >>> es.nn.Llama3Scaling()(torch.tensor([1.0, 1e-3, 1e-5]))
    tensor([1.0000e+00, 2.1361e-04, 1.2500e-06])
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __call__(self, frequencies: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        turns = self.original_length * frequencies / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies


class RotaryEmbedding(nn.Module):
    """Turns pairs of a head's dimensions by angles that grow with the token's position, so that the product of a
    query and a key depends on how far apart they stand (RoPE; Su et al. 2021, arXiv:2104.09864).

    Arguments:
        dim: how many of a head's dimensions are turned, the first ones; even. The rest passes unchanged.
        base: pair n turns by position · base^(-2n / dim).
        interleaved: dimensions 2n and 2n + 1 are a pair (the paper, GPT-J); by default n and n + dim/2 are
            (GPT-NeoX, Llama as Hugging Face stores it).
        scaling: a change to the frequencies, such as `Llama3Scaling()`.

    Angles are computed in float32, as published models had them in training.

    Raises:
        ValueError: a `dim` that is odd or less than 2.

    >>> import einsight as es, torch
    >>> rotary = es.nn.RotaryEmbedding(2)
    >>> rotary(torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2))[0, 0]
    tensor([[ 1.0000,  0.0000],
            [ 0.5403,  0.8415],
            [-0.4161,  0.9093]])
    """

    def __init__(
        self, dim: int, *, base: float = 10000.0, interleaved: bool = False, scaling: Llama3Scaling | None = None
    ):
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2 or dim % 2:
            raise ValueError(
                f"RotaryEmbedding turns pairs of dimensions: dim must be even and at least 2, not {dim!r}; for an odd "
                "head_dim turn fewer of its dimensions, RotaryEmbedding(head_dim - 1)"
            )
        self.dim, self.base, self.interleaved, self.scaling = dim, base, interleaved, scaling
        # No buffer: casting the model to half precision must not cast the angles.
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Float[Tensor, "b h i d"], offset: Offset = 0) -> Float[Tensor, "b h i d"]:
        """The queries or keys x, turned; token 0 stands at `offset` (an int, or an int tensor [b]).

        Raises ValueError if d is smaller than `dim`, or a position is negative.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"RotaryEmbedding({self.dim}) turns {self.dim} dimensions of each head, but x {list(x.shape)} has "
                f"heads of {x.shape[-1]}"
            )
        cos, sin = self._angles(offset, x.shape[2], x.device)
        turned, rest = x[..., : self.dim], x[..., self.dim :]
        if self.interleaved:
            one, two = turned[..., ::2], turned[..., 1::2]
        else:
            one, two = turned.chunk(2, dim=-1)
        pairs = one * cos - two * sin, two * cos + one * sin
        joined = torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)
        joined = joined.to(x.dtype)
        return torch.cat([joined, rest], -1) if rest.shape[-1] else joined

    def _angles(self, offset: Offset, i: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [b | 1, 1, i, dim / 2]."""
        first, last = (offset, offset) if isinstance(offset, int) else _range(offset)
        if first < 0:
            raise ValueError(f"RotaryEmbedding: a token stands at position {first}; positions start at 0")
        if self._table is None or len(self._table[0]) < last + i or self._table[0].device != device:
            self._table = self._computed(max(1024, 1 << (last + i - 1).bit_length()), device)
        if isinstance(offset, int):
            return self._table[0][offset : offset + i], self._table[1][offset : offset + i]
        positions = offset.to(device).reshape(-1, 1) + torch.arange(i, device=device)
        return self._table[0][positions].unsqueeze(1), self._table[1][positions].unsqueeze(1)

    def _computed(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # Without inference mode, whose tensors could not be used in training later.
        with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            exponents = torch.arange(0, self.dim, 2, device=device).float() / self.dim
            frequencies = 1 / self.base**exponents
            if self.scaling is not None:
                frequencies = self.scaling(frequencies)
            angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
            return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        extra = ", interleaved=True" if self.interleaved else ""
        return f"{self.dim}, base={self.base:g}{extra}" + (f", scaling={self.scaling}" if self.scaling else "")


def _range(offset: Int[Tensor, " b"]) -> tuple[int, int]:
    return (int(offset.min()), int(offset.max())) if offset.numel() else (0, 0)


class LearnedPositions(nn.Module):
    """A learned vector for each position, added to the token's (GPT-2).

    Arguments:
        length: how many positions there are.
        embed_dim: m, the size of each vector.

    >>> import einsight as es, torch
    >>> es.nn.LearnedPositions(10, 4)(3).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, length: int, embed_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, embed_dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, i: int, offset: Offset = 0) -> Float[Tensor, "#b i m"]:
        """The vectors of i tokens, the first at `offset`. Raises ValueError beyond the last position."""
        last = (offset if isinstance(offset, int) else _range(offset)[1]) + i
        if last > len(self.weight):
            raise ValueError(
                f"a token stands at position {last - 1}, but LearnedPositions has {len(self.weight)} positions (0 to "
                f"{len(self.weight) - 1}); shorten the sequence"
            )
        return self.weight[_positions(i, offset, self.weight.device)]


class SinusoidalPositions(nn.Module):
    """Sines and cosines of a token's position, interleaved, added to the token's vector (Vaswani et al. 2017,
    arXiv:1706.03762): dimensions 2n and 2n + 1 are sin and cos of position · 10000^(-2n / embed_dim).

    Raises:
        ValueError: an `embed_dim` that is odd.

    >>> import einsight as es
    >>> es.nn.SinusoidalPositions(4)(2)
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    _like: Tensor

    def __init__(self, embed_dim: int):
        super().__init__()
        if embed_dim % 2:
            raise ValueError(f"SinusoidalPositions come in pairs: embed_dim must be even, not {embed_dim}")
        self.embed_dim = embed_dim
        self.register_buffer("_like", torch.empty(0), persistent=False)  # the model's device and dtype

    def forward(self, i: int, offset: Offset = 0) -> Float[Tensor, "#b i m"]:
        """The vectors of i tokens, the first at `offset`."""
        positions = _positions(i, offset, self._like.device).unsqueeze(-1)
        angles = positions / 10000 ** (torch.arange(0, self.embed_dim, 2, device=positions.device) / self.embed_dim)
        pairs = torch.stack([angles.sin(), angles.cos()], -1)
        return rearrange(pairs, "b i n two -> b i (n two)").to(self._like.dtype)


def _positions(i: int, offset: Offset, device: torch.device) -> Int[Tensor, "#b i"]:
    offset = torch.tensor([offset], device=device) if isinstance(offset, int) else offset.to(device)
    return offset.reshape(-1, 1) + torch.arange(i, device=device)
