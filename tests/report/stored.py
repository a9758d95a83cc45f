"""What a written page holds, read apart from the package."""

import base64
import json
import re
import zlib
from pathlib import Path

import torch


def header(page: Path) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


def arrays(page: Path, part: int, layer: int) -> dict[str, torch.Tensor]:
    """A layer's arrays as they were packed, and its weights as [h, i, j], NaN where masked."""
    about = header(page)["parts"][part]
    places, heads = about["layers"][layer]["index"], about["layers"][layer]["heads"]
    text = re.search(rf'id="layer-{part}-{layer}">([^<]*)<', page.read_text())[1]
    data = zlib.decompress(base64.b64decode(text), -15)
    found = {}
    for name, place in places.items():
        if name == "size" or name.endswith("_range"):
            continue
        at, count, width = place
        dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[width]
        codes = torch.frombuffer(bytearray(data[at : at + count * width]), dtype=dtype).long()
        if (span := places.get(f"{name}_range")) is not None:
            low, high = span
            found[name] = torch.where(codes > 0, torch.exp(low + (codes - 1) / 4094 * (high - low)), 0)
        else:
            found[name] = codes
    if "weights" in found:
        i, j = about["i"], about["j"]
        keys = torch.arange(j)[:, None]
        inside = (keys >= found["lo"]) & (keys < found["hi"])
        whole = torch.zeros(heads, j, i, dtype=torch.long)
        whole[:, inside] = found["weights"].view(heads, -1)
        found["weights"] = decoded(whole.mT)
    return found


def decoded(codes: torch.Tensor) -> torch.Tensor:
    weights = ((codes - 1).clamp(min=0) / 254) ** (4 / 3)
    return weights.masked_fill(codes == 0, torch.nan)


def step(weights: torch.Tensor) -> torch.Tensor:
    """Half of what lies between two neighbouring codes around a weight: what rounding may change."""
    root = weights**0.75
    return ((root + 0.5 / 254) ** (4 / 3) - weights).clamp(min=1e-6)
