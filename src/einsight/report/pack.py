"""A layer's arrays as text for the page: small types, side by side, deflated, in base64."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Deflate's third step is all that such bytes repay: 9 takes five times as long for 4 % less.
LEVEL = 6
# What counts of these is their ratio: right to 0.2 %, and 0 below a millionth of the largest.
LOGARITHMIC = ("received", "received_without_first", "value", "write", "out", "stream")
STEPS, SPAN = 4094, math.log(1e6)


class Packed(NamedTuple):
    """Where the arrays lie, for the page to find them by, and the text."""

    places: dict[str, Any]
    data: str


def packed(arrays: dict[str, Tensor]) -> Packed:
    """Arrays as one deflated stream, in base64, and where in it each of them lies."""
    arrays = dict(arrays)
    places: dict[str, Any] = {}
    if "weights" in arrays:
        arrays["weights"] = _visible(arrays["weights"], arrays["lo"], arrays["hi"])
    for name in LOGARITHMIC:
        if name in arrays:
            arrays[name], places[f"{name}_range"] = _logarithm(arrays[name])
    stored = {name: (array, _width(array)) for name, array in arrays.items()}
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -15)
    pieces, at = [], 0
    # The widest first, so that each begins at a multiple of its width.
    for name, (array, width) in sorted(stored.items(), key=lambda entry: -entry[1][1]):
        places[name] = [at, array.numel(), width]
        at += array.numel() * width
        dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[width]
        pieces.append(deflate.compress(array.to(dtype).contiguous().numpy().astype(f"<u{width}").data))
    pieces.append(deflate.flush())
    places["size"] = at
    return Packed(places, base64.b64encode(b"".join(pieces)).decode("ascii"))


def _visible(weights: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """The bytes between each query's first and last key, of one head and one key after the other: what the queries
    give to a key is more alike than what a query gives to its keys."""
    keys = torch.arange(weights.shape[2])[:, None]
    inside = (keys >= lo) & (keys < hi)
    return weights.mT if bool(inside.all()) else weights.mT[:, inside]


def _width(array: Tensor) -> int:
    if array.dtype == torch.uint8:
        return 1
    return 2 if array.numel() == 0 or int(array.max()) < 1 << 16 else 4


def _logarithm(numbers: Tensor) -> tuple[Tensor, list[float]]:
    """Numbers in twelve bits each: 0, or the logarithm between the smallest and the largest."""
    positive = numbers[numbers > 0]
    if positive.numel() == 0:
        return torch.zeros(numbers.shape, dtype=torch.int32), [0.0, 0.0]
    high = float(positive.max().log())
    low = max(float(positive.min().log()), high - SPAN)
    span = (high - low) or 1.0
    steps = 1 + ((numbers.clamp(min=1e-30).log() - low) / span * STEPS).round()
    return torch.where(steps >= 1, steps, 0).int(), [low, low + span]
