"""Whether what is asked can fit into memory at all: said before anything is computed."""

from __future__ import annotations

import math
import os

import torch

from einsight.coordinates import Sizes
from einsight.readouts import Readout

_FITS = 1 << 28  # bytes that are there on any machine


def memory_of(device: torch.device) -> int | None:
    """All the memory there is on a device, in bytes; None where that can't be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def too_large(size: int, device: torch.device) -> str | None:
    """How a number of bytes compares with a device's memory, if there is less of it."""
    if size <= _FITS:
        return None
    memory = memory_of(device)
    if memory is None or size <= memory:
        return None
    return f"{size / 1e9:,.0f} GB, and {'this machine' if device.type == 'cpu' else device} has {memory / 1e9:,.0f} GB"


def check_fits(readout: Readout, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a readout whose result alone is larger than all memory."""
    if torch.compiler.is_compiling():  # there sizes may be unknown
        return
    count = sizes.i if readout.queries is None else len(readout.queries)
    shapes = readout.shapes(sizes._replace(i=count))
    comparison = too_large(sum(math.prod(shape) for shape in shapes) * dtype.itemsize, device)
    if comparison is not None:
        raise ValueError(
            f"the result of {readout!r} would take {comparison}. Rows(queries) gives the queries that matter, "
            "TopK(k) each one's strongest keys, Pool(block) a picture of all, AttentionWeights(…) any part later"
        )
