"""What the layers ask of their arguments."""

from __future__ import annotations

import math
from numbers import Integral


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


def is_integral(value: object) -> bool:
    """Whether it is an int, NumPy's too; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
