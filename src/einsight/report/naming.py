"""Which texts and which patches the queries and the keys of a report's parts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from einsight.coordinates import as_int
from einsight.report.source import Part
from einsight.report.text import Piece, readable, texts, unpadded


@dataclass
class Named:
    """A part with what its queries and keys are called. One text's keys are its queries too."""

    part: Part
    name: str
    queries: list[Piece]
    keys: list[Piece]
    spelled: bool  # whether the queries are tokens that the user gave
    patches: int | None = None  # the key where the image's patches begin
    tokens: list[str] | None = None  # the keys' tokens as they were given
    real: Bool[Tensor, " j"] | None = None  # which of them are no padding, where a tokenizer's output says so


def named(parts: Sequence[Part], tokens: Any, key_tokens: Any, item: int, grid: tuple[int, int] | None) -> list[Named]:
    """Give every part its tokens; refuse tokens that fit none."""
    given = None if tokens is None else texts(tokens, "tokens", item)
    others = None if key_tokens is None else texts(key_tokens, "key_tokens", item)
    used: set[str] = set()
    made = [_one(part, parts, given, others, used, grid) for part in parts]
    for one in made:
        for source, list_ in ((tokens, given), (key_tokens, others)):
            if one.tokens is not None and list_ is not None and list_[: len(one.tokens)] == one.tokens:
                one.real = unpadded(source, item, one.part.j)
                break
    if grid is not None and all(one.patches is None for one in made):
        raise ValueError(
            f"the {grid[0] * grid[1]} patches of the image stand nowhere among the tokens: neither last, behind at "
            "most one other, nor as a run of that many equal ones; name them all alike, such as '<image>'"
        )
    for what, list_ in (("tokens", given), ("key_tokens", others)):
        if list_ is not None and what not in used:
            raise ValueError(f"{what} are {len(list_)}, but {_sizes(parts)}")
    return made


def _one(
    part: Part,
    parts: Sequence[Part],
    tokens: list[str] | None,
    key_tokens: list[str] | None,
    used: set[str],
    grid: tuple[int, int] | None,
) -> Named:
    queries = keys = None
    if part.cross:
        # The last token that was generated was never a query, nor are it and its like keys of another text.
        if tokens is not None and len(tokens) in (part.i, part.i + 1):
            queries = tokens[: part.i]
            used.add("tokens")
        if key_tokens is not None and len(key_tokens) == part.j:
            keys = key_tokens
            used.add("key_tokens")
    else:
        order = [("tokens", tokens), ("key_tokens", key_tokens)]
        for what, given in order[:: -1 if part.encoder and any(p.cross for p in parts) else 1]:
            if given is not None and len(given) in (part.j, part.j + 1):
                keys = given[: part.j]
                used.add(what)
                break
    spelled = (queries if part.cross else keys) is not None
    shown = _numbered(part.j) if keys is None else readable(keys)
    patches = None if grid is None else _patches(keys, part.j, grid)
    if patches is not None and grid is not None and keys is None:
        count = grid[0] * grid[1]
        extra = part.j - count
        shown = [Piece("class" if n == 0 else f"extra {n}") for n in range(extra)]
        shown += [Piece(f"patch {n // grid[1]},{n % grid[1]}") for n in range(count)]
    if part.cross:
        return Named(
            part, "", _numbered(part.i) if queries is None else readable(queries), shown, spelled, patches, keys
        )
    return Named(part, "", shown, shown, spelled, patches, keys)


def titles(made: Sequence[Named]) -> None:
    """Name the parts, so that one can choose among them."""
    several = len(made) > 1
    own = [one for one in made if not one.part.cross]
    for one in made:
        if one.part.cross:
            one.name = "cross-attention"
        elif any(other.part.cross for other in made) and len(own) == 2:
            one.name = "encoder" if one.part.encoder else "decoder"
        else:
            one.name = f"{one.part.j} keys" if several else "attention"


def chosen_grid(grid: Any, image: Any, parts: Sequence[Part]) -> tuple[int, int] | None:
    """The grid of patches as (rows, columns): what was given, or a square that fits the keys."""
    if grid is None:
        if image is None:
            return None
        for part in parts:
            for extra in (0, 1):
                side = isqrt(max(part.j - extra, 0))
                if side > 1 and side * side + extra == part.j:
                    return side, side
        raise ValueError(
            f"image needs grid=(rows, columns), the patches along its sides: {_sizes(parts)}, which is no square"
        )
    pair = [as_int(n) for n in grid] if isinstance(grid, Sequence) and not isinstance(grid, str) else []
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ValueError(f"grid must be (rows, columns), the patches along the image's sides, not {grid!r}")
    rows, columns = int(pair[0]), int(pair[1])  # type: ignore[call-overload]
    if all(part.j < rows * columns for part in parts):
        raise ValueError(f"grid={rows} × {columns} has {rows * columns} patches, but {_sizes(parts)}")
    return rows, columns


def _patches(keys: list[str] | None, j: int, grid: tuple[int, int]) -> int | None:
    """Where a part's patches begin: at a run of as many equal tokens (`<image>`), or last, behind a class token."""
    count = grid[0] * grid[1]
    if keys is None:
        return j - count if j >= count else None
    start = 0
    for n in range(1, len(keys) + 1):
        if n == len(keys) or keys[n] != keys[start]:
            if n - start == count:
                return start
            start = n
    return j - count if 0 <= j - count <= 1 else None


def _numbered(count: int) -> list[Piece]:
    return [Piece(str(n)) for n in range(count)]


def _sizes(parts: Sequence[Part]) -> str:
    said = [f"{part.i} queries and {part.j} keys" + (" of cross-attention" if part.cross else "") for part in parts]
    return "the source has " + "; ".join(said)
