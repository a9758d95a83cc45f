"""A small problem, computed here and by `stream`, before a device is trusted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from einsight.engines import stream
from einsight.masks import causal
from einsight.pose import pose
from einsight.readouts import Entropy, LogSumExp, MaxScore, Received, Rows

trusted: set[torch.device] = set()
READOUTS = {"lse": LogSumExp(), "max": MaxScore(), "entropy": Entropy(), "received": Received(), "rows": Rows([3])}


def check(device: torch.device, compute: Any) -> None:
    """The first use of a device: refuse it loudly if the kernels are off there."""
    if device in trusted:
        return
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, 16, generator=generator).to(device, torch.float16)
        for heads, n in ((4, 37), (2, 41), (2, 41))
    )
    with torch.no_grad():
        right: Any
        problem = pose(query, key, value, causal(), offset=4, readouts=tuple(READOUTS.values()))
        (output, found), (right, expected) = compute(problem), stream.run(problem)
    names = ["output", *READOUTS]
    wrong = [n for n, x, y in zip(names, (output, *found), (right, *expected), strict=True) if not _alike(x, y)]
    if wrong:
        raise RuntimeError(
            f"the triton engine is wrong on {device} ({', '.join(wrong)} of a small problem): please report it with "
            "the GPU, its driver and Triton's version; until then say engine='stream'"
        )
    trusted.add(device)


def _alike(x: Tensor, right: Tensor) -> bool:
    """Within eight roundings of the largest number: of float16 in the output; in readouts, of sums of 41 in float32."""
    eps = torch.finfo(right.dtype).eps * (8 if right.dtype == torch.float16 else 64)
    return bool(((x - right).abs() <= eps * right.abs().max().clamp(min=1)).all())
