"""A model's heads in the terminal: a grid of layers and heads, and the tokens that striking heads connect."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Float
from rich.style import Style
from rich.text import Text
from torch import Tensor

# Viridis, at equal steps.
_COLOURS = [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)]


def grid(values: Float[Tensor, "layer head"], width: int) -> Text:
    """A cell per layer and head, coloured from the smallest to the largest value.

    Numbers are written in the cells where `width` characters have room for them, else a digit of 0 to 9.
    """
    rows = values.tolist()
    known = [value for row in rows for value in row if not math.isnan(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    label = len(str(len(rows) - 1)) + 1
    size = 4 if label + 4 * len(rows[0]) <= width else 1
    picture = Text(" " * label, no_wrap=True)
    for head in range(len(rows[0])):
        picture.append((str(head) if size > 1 else str(head % 10)).rjust(size), "dim")
    for layer, row in enumerate(rows):
        picture.append("\n" + str(layer).rjust(label - 1) + " ", "dim")
        for value in row:
            part = 0.0 if math.isnan(value) or high == low else (value - low) / (high - low)
            written = _short(value).rjust(size) if size > 1 else str(min(int(part * 10), 9))
            picture.append("–".rjust(size) if math.isnan(value) else written, _style(part))
    picture.append(f"\n{' ' * label}from {_short(low).strip()} ", "dim")
    for step in range(12):
        picture.append(" ", _style(step / 11))
    picture.append(f" to {_short(high).strip()}", "dim")
    return picture


def connections(pairs: Sequence[tuple[int, int, float]], tokens: Sequence[str]) -> Text:
    """Which token looks at which, how strongly, and where they stand."""
    line = Text()
    for query, key, weight in pairs:
        line.append("   " if line else "")
        for place, joint in ((query, " → "), (key, " ")):
            line.append(_shown(tokens[place]), "bold")
            line.append(f"@{place}", "dim")
            line.append(joint, "dim")
        line.append(f"{weight:.2f}", "cyan")
    return line


def _style(part: float) -> Style:
    at = min(max(part, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(at), len(_COLOURS) - 2)
    r, g, b = (round(x + (y - x) * (at - low)) for x, y in zip(_COLOURS[low], _COLOURS[low + 1], strict=True))
    bright = 0.3 * r + 0.6 * g + 0.1 * b > 130
    return Style.parse(f"{'black' if bright else 'white'} on #{r:02x}{g:02x}{b:02x}")


def _short(value: float) -> str:
    """At most three characters, and a space before."""
    if math.isnan(value):
        return "–"
    if 0 <= value < 0.995:
        return f"{value:.2f}"[1:]
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}" if value < 999.5 else f"{value / 1000:.0f}k"


def _shown(token: str) -> str:
    shown = token.replace("\n", "↵").replace("\t", "⇥").strip(" ") or "␣"
    return shown if len(shown) <= 16 else shown[:15] + "…"
