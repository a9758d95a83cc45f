"""Where a token stands: rotary, learned and sinusoidal positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from einsight.nn.checks import count, how_many, positive
from einsight.values import described, may_look

Angles = tuple[Tensor, Tensor]
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

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_length"):
            positive(f"Llama3Scaling's {name}", getattr(self, name))
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling's low_freq_factor must be smaller than high_freq_factor, not {self.low_freq_factor!r} "
                f"and {self.high_freq_factor!r}"
            )

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
        positive("RotaryEmbedding's base", base)
        if scaling is not None and not isinstance(scaling, Llama3Scaling):
            raise TypeError(f"RotaryEmbedding's scaling must be a Llama3Scaling, not {type(scaling).__name__}")
        self.dim, self.base, self.interleaved, self.scaling = dim, base, interleaved, scaling
        # No buffer: casting the model to half precision must not cast the angles.
        self._table: Angles | None = None
        # The layers of a model share one, and ask the same of it in each step.
        self._last: tuple[Any, Angles] | None = None

    def forward(self, x: Float[Tensor, "b h i d"], offset: Offset = 0) -> Float[Tensor, "b h i d"]:
        """The queries or keys x, turned; token 0 stands at `offset` (an int, or an int tensor [b]).

        Raises:
            ValueError: d is smaller than `dim`, a position is negative, an offset has another length than b.
            TypeError: an offset that isn't of ints.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"RotaryEmbedding({self.dim}) turns {self.dim} dimensions of each head, but x {list(x.shape)} has "
                f"heads of {x.shape[-1]}"
            )
        cos, sin = self._angles(offset, x)
        turned = x if x.shape[-1] == self.dim else x[..., : self.dim]
        if self.interleaved:
            other = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            other = turned.roll(self.dim // 2, -1)
        made = torch.addcmul(turned * cos, other, sin).to(x.dtype)
        return made if turned is x else torch.cat([made, x[..., self.dim :]], -1)

    def _angles(self, offset: Offset, x: Float[Tensor, "b h i d"]) -> Angles:
        """What each number and the other of its pair are multiplied by, [#b, 1, i, dim] or [i, dim]."""
        b, _, i, _ = x.shape
        places = read_offset("RotaryEmbedding", offset, b)
        if places is None or not may_look(x):
            return self._of_positions(_positions(i, offset, x.device).unsqueeze(1))
        asked = places, i, x.device
        last = self._last
        if last is None or last[0] != asked:
            # Without inference mode, whose tensors could not be used in training later.
            with torch.inference_mode(False):
                last = self._last = asked, self._from_table(places, i, x.device)
        return last[1]

    def _from_table(self, places: int | tuple[int, ...], i: int, device: torch.device) -> Angles:
        longest = (places if isinstance(places, int) else max(places, default=0)) + i
        table = self._table
        if table is None or len(table[0]) < longest or table[0].device != device:
            length = max(1024, 1 << (longest - 1).bit_length())
            table = self._table = self._of_positions(torch.arange(length, device=device))
        if isinstance(places, int):
            return table[0][places : places + i], table[1][places : places + i]
        positions = _positions(i, torch.tensor(places, dtype=torch.int64), device)
        return table[0][positions].unsqueeze(1), table[1][positions].unsqueeze(1)

    def _of_positions(self, positions: Int[Tensor, "*b i"]) -> Angles:
        exponents = torch.arange(0, self.dim, 2, device=positions.device).float() / self.dim
        frequencies = 1 / self.base**exponents
        if self.scaling is not None:
            frequencies = self.scaling(frequencies)
        angles = positions.float().unsqueeze(-1) * frequencies  # a product of matrices would be rounded by autocast
        cos, sin = angles.cos(), angles.sin()
        if self.interleaved:
            return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def extra_repr(self) -> str:
        extra = ", interleaved=True" if self.interleaved else ""
        return f"{self.dim}, base={self.base:g}{extra}" + (f", scaling={self.scaling}" if self.scaling else "")


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
        count("LearnedPositions' length", length)
        count("LearnedPositions' embed_dim", embed_dim)
        self.weight = nn.Parameter(torch.empty(length, embed_dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, i: int, offset: Offset = 0) -> Float[Tensor, "#b i m"]:
        """The vectors of i tokens, the first at `offset`. Raises ValueError before the first and beyond the last."""
        how_many("LearnedPositions", i)
        places = read_offset("LearnedPositions", offset)
        if places is not None:
            self.check((places if isinstance(places, int) else max(places, default=0)) + i)
        return self.weight[_positions(i, offset, self.weight.device)]

    def check(self, length: int) -> None:
        """Refuse sequences that are longer than there are positions."""
        if length > len(self.weight):
            raise ValueError(
                f"a token stands at position {length - 1}, but LearnedPositions has {len(self.weight)} positions (0 to "
                f"{len(self.weight) - 1}); shorten the sequence"
            )


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
        count("SinusoidalPositions' embed_dim", embed_dim)
        if embed_dim % 2:
            raise ValueError(f"SinusoidalPositions come in pairs: embed_dim must be even, not {embed_dim}")
        self.embed_dim = embed_dim
        self.register_buffer("_like", torch.empty(0), persistent=False)  # the model's device and dtype

    def forward(self, i: int, offset: Offset = 0) -> Float[Tensor, "#b i m"]:
        """The vectors of i tokens, the first at `offset`. Raises ValueError before position 0."""
        how_many("SinusoidalPositions", i)
        read_offset("SinusoidalPositions", offset)
        positions = _positions(i, offset, self._like.device).unsqueeze(-1)
        angles = positions / 10000 ** (torch.arange(0, self.embed_dim, 2, device=positions.device) / self.embed_dim)
        pairs = torch.stack([angles.sin(), angles.cos()], -1)
        return rearrange(pairs, "b i n two -> b i (n two)").to(self._like.dtype)


def read_offset(who: str, offset: Any, b: int | None = None) -> int | tuple[int, ...] | None:
    """Where token 0 of all items, or of each, stands; None where the numbers can't be looked at."""
    if isinstance(offset, Tensor):
        if offset.is_floating_point() or offset.dtype == torch.bool or offset.ndim > 1:
            raise TypeError(
                f"{who}: offset must be an int or an int tensor [b], not {offset.dtype} {list(offset.shape)}"
            )
        if offset.ndim == 1 and b is not None and len(offset) not in (1, b):
            raise ValueError(f"{who}: offset has {len(offset)} places, but there are {b} batch items")
        if not may_look(offset):
            return None
        places = tuple(offset.reshape(-1).tolist())
        first = min(places, default=0)
    elif isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"{who}: offset must be an int or an int tensor [b], not {described(offset)}")
    else:
        first = places = offset
    if first < 0:
        raise ValueError(f"{who}: a token stands at position {first}; positions start at 0")
    return places


def _positions(i: int, offset: Offset, device: torch.device) -> Int[Tensor, "#b i"]:
    offset = torch.tensor([offset], device=device) if isinstance(offset, int) else offset.to(device)
    return offset.reshape(-1, 1) + torch.arange(i, device=device)
