"""The image that stands behind a grid of keys."""

from __future__ import annotations

import base64
import io
import os
from typing import Any, NamedTuple

LONGEST = 900  # pixels; more would not be seen


class Picture(NamedTuple):
    """A PNG in base64, its size in pixels, and how many rows and columns of patches lie on it."""

    data: str
    width: int
    height: int
    rows: int
    columns: int


def picture(image: Any, grid: tuple[int, int]) -> Picture:
    """An image (a path, a PIL image, or an array [rows, columns], [rows, columns, 3] or [3, rows, columns])."""
    drawn = opened(image).convert("RGB")
    drawn.thumbnail((LONGEST, LONGEST))
    stored = io.BytesIO()
    drawn.save(stored, "PNG", optimize=True)
    width, height = drawn.size
    return Picture(base64.b64encode(stored.getvalue()).decode("ascii"), width, height, *grid)


def opened(image: Any) -> Any:
    """An image, however it was given, as Pillow's."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, Image.Image):
        return image
    if isinstance(image, str | os.PathLike):
        try:
            return Image.open(image)
        except UnidentifiedImageError:
            raise ValueError(f"image: {os.fspath(image)} is no image that Pillow can read") from None
        except FileNotFoundError:
            raise FileNotFoundError(f"image: there is no file {os.fspath(image)}") from None
    import numpy as np

    try:
        array: Any = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
        array = array.astype("float64") if array.dtype.kind in "fiub" else array
    except (TypeError, ValueError):
        array = np.empty(0, dtype=object)
    if array.dtype.kind != "f":
        raise TypeError(f"image must be a path, a PIL image or an array of numbers, not {type(image).__name__}")
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,)) or 0 in array.shape:
        raise ValueError(
            f"image must be [rows, columns], [rows, columns, 3] or [3, rows, columns], not {list(array.shape)}"
        )
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("image must hold finite numbers")
    if low < 0 or high > 255:  # normalised for a model: spread over what can be shown
        array = (array - low) / ((high - low) or 1)
        high = 1.0
    return Image.fromarray((array * (255 if high <= 1 else 1)).round().astype("uint8"))
