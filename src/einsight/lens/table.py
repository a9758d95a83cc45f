"""A small table of what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Table:
    """Named columns of numbers, or names, in rows. `note` is what is to be said of how they were found."""

    def __init__(self, columns: dict[str, list[Any]], note: str = ""):
        self._columns, self.note = columns, note

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows, each a dict."""
        names = self._columns
        return (dict(zip(names, row, strict=True)) for row in zip(*names.values(), strict=True))

    def __getitem__(self, column: str) -> list[Any]:
        if column not in self._columns:
            raise KeyError(f"no column {column!r}; there are {', '.join(self._columns)}")
        return self._columns[column]

    def sort(self, by: str, descending: bool = True) -> Table:
        """The rows in the order of a column, largest first; what can't be told comes last."""
        key = self[by]
        told = [n for n in range(len(self)) if key[n] == key[n]]
        order = sorted(told, key=lambda n: key[n], reverse=descending)
        return self._take(order + [n for n in range(len(self)) if key[n] != key[n]])

    def top(self, n: int) -> Table:
        """The first n rows."""
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"top takes how many rows, 0 or more, not {n!r}")
        return self._take(range(min(n, len(self))))

    def grid(self, column: str) -> Float[Tensor, "layer head"]:
        """A column as a tensor in float32 with a row per layer number, NaN where there is no such layer or head."""
        layers, heads = self["layer"], self["head"]
        if len(set(zip(layers, heads, strict=True))) < len(layers):
            raise ValueError(
                "self- and cross-attention have the same numbers, so that the rows make no grid: choose "
                "one kind with layers="
            )
        made = torch.full((int(max(layers)) + 1, int(max(heads)) + 1), torch.nan)
        for layer, head, value in zip(layers, heads, self[column], strict=True):
            made[int(layer), int(head)] = value
        return made

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns, as lists."""
        return {name: list(column) for name, column in self._columns.items()}

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas; to_dict() needs nothing") from error
        return pandas.DataFrame(self.to_dict())

    def __rich__(self) -> Any:
        from rich.table import Table

        made = Table(box=None, header_style="bold", pad_edge=False, caption=self.note or None)
        for name in self._columns:
            made.add_column(name, justify="right")
        for row in zip(*self._columns.values(), strict=True):
            made.add_row(*(_written(value) for value in row))
        return made

    def __repr__(self) -> str:
        rows = [self.columns, *([_written(v) for v in row] for row in zip(*self._columns.values(), strict=True))]
        if len(rows) > 21:
            rows = [*rows[:21], ["…"] * len(self._columns)]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self._columns))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, self.note] if self.note else lines)

    def _take(self, rows: Any) -> Table:
        rows = list(rows)
        return type(self)({name: [column[n] for n in rows] for name, column in self._columns.items()}, self.note)


def _written(value: int | float | str) -> str:
    return str(value) if isinstance(value, int | str) else "–" if value != value else f"{value:.3f}"
