"""Whether what is asked can fit into memory at all: said before anything is computed."""

from __future__ import annotations

import os

import torch

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


def check_fits(what: str, size: int, device: torch.device, way_out: str) -> None:
    """Refuse what by itself is larger than all memory."""
    comparison = too_large(size, device)
    if comparison is not None:
        raise ValueError(f"{what} would take {comparison}. {way_out}")
