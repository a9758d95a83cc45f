"""What the layers ask of their arguments."""

from __future__ import annotations

import math
from numbers import Integral

from torch import Tensor


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a value that is none of those known."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def count(name: str, value: object) -> None:
    """Refuse what isn't an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, not {value!r}")


def positive(name: str, value: object) -> None:
    """Refuse what isn't a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, not {value!r}")


def how_many(who: str, n: object) -> None:
    """Refuse a tensor where the number of its tokens is asked for."""
    if isinstance(n, Tensor):
        raise TypeError(f"{who} takes how many tokens there are, such as {n.shape[-1] if n.ndim else 1}, not a tensor")


def head_size(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    """How large a head is, by default an equal part."""
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}: choose another, or say how "
            f"large a head is, such as head_dim={max(embed_dim // num_heads, 1)}"
        )
    return embed_dim // num_heads if head_dim is None else head_dim


def is_integral(value: object) -> bool:
    """Whether it is an int, NumPy's too; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
