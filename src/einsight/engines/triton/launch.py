"""Launching kernels: how a problem's tensors are handed over, and the sizes of tiles."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from einsight.engines.triton.kernels.scene import LOG2E as _LOG2E
from einsight.engines.triton.kernels.scene import Rule, Scene, View
from einsight.engines.triton.lowered import Lines, Lowered
from einsight.problem import Problem

LOG2E = _LOG2E.value
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter takes the bounds of loops by int(array), which numpy refuses from 2.4 on, multiplies
    the bits of bfloat16 as if they were integers, and has products whose bits depend on a row's place in its tile."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = with_index

    def dot(self: Any, a: Any, b: Any, added: Any, *how: Any) -> Any:
        wide = (self.cast_impl(x, tl.float32).data for x in (a, b))
        return interpreter.TensorHandle(np.einsum("mk,kn->mn", *wide) + added.data, added.dtype.scalar)

    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = dot


if INTERPRETED:
    _mend_interpreter()


class Tile(NamedTuple):
    """Rows and keys of a tile, warps of a program, and tiles that are on their way while one is computed."""

    rows: int
    keys: int
    warps: int
    stages: int


# By kernel, head dimension up to, bytes of a number: none spills. Where nothing is said of mending, it takes the first
# pass' tiles.
TILES: dict[tuple[str, int, int], Tile] = {
    ("attend", 64, 2): Tile(128, 64, 8, 3),
    ("attend", 128, 2): Tile(128, 32, 8, 3),
    ("attend", 256, 2): Tile(64, 16, 8, 2),
    ("attend", 64, 4): Tile(32, 32, 8, 1),
    ("attend", 128, 4): Tile(32, 16, 8, 1),
    ("attend", 256, 4): Tile(16, 16, 8, 1),
    ("mend", 256, 4): Tile(16, 16, 8, 2),
    ("weights", 64, 2): Tile(64, 64, 4, 3),
    ("weights", 128, 2): Tile(64, 64, 4, 3),
    ("weights", 256, 2): Tile(64, 64, 8, 2),
    ("weights", 64, 4): Tile(32, 32, 4, 2),
    ("weights", 128, 4): Tile(32, 32, 4, 2),
    ("weights", 256, 4): Tile(16, 32, 4, 1),
    ("of queries", 64, 2): Tile(64, 32, 8, 2),
    ("of queries", 128, 2): Tile(64, 32, 8, 2),
    ("of queries", 256, 2): Tile(32, 32, 8, 1),
    ("of queries", 64, 4): Tile(32, 32, 8, 1),
    ("of queries", 128, 4): Tile(32, 16, 8, 1),
    ("of queries", 256, 4): Tile(16, 16, 8, 1),
    ("of keys", 64, 2): Tile(64, 64, 8, 2),
    ("of keys", 128, 2): Tile(32, 64, 8, 2),
    ("of keys", 256, 2): Tile(32, 64, 8, 1),
    ("of keys", 64, 4): Tile(32, 32, 8, 1),
    ("of keys", 128, 4): Tile(32, 32, 8, 1),
    ("of keys", 256, 4): Tile(16, 16, 8, 1),
}


# What spills with the sizes above on older or newer ones than sm_90.
BEFORE_90: dict[tuple[str, int, int], Tile] = {
    ("attend", 64, 2): Tile(64, 64, 8, 2),
    ("mend", 64, 2): Tile(16, 64, 8, 2),
    ("attend", 256, 2): Tile(32, 16, 8, 2),
    ("of queries", 128, 2): Tile(32, 32, 8, 2),
    ("weights", 256, 2): Tile(32, 64, 8, 2),
    ("of keys", 128, 4): Tile(16, 32, 8, 1),
}
FROM_100: dict[tuple[str, int, int], Tile] = {
    ("attend", 64, 2): Tile(128, 32, 8, 3),
    ("attend", 128, 4): Tile(16, 32, 8, 1),
    ("of queries", 64, 4): Tile(32, 16, 8, 1),
    ("of keys", 64, 2): Tile(32, 64, 8, 2),
    ("of keys", 128, 2): Tile(32, 32, 8, 2),
}


def architecture(device: torch.device) -> int:
    """80 for sm_80, and so on."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tile(kernel: str, device: torch.device, dtype: torch.dtype, *dims: int) -> Tile:
    if INTERPRETED:  # small ones, so that small problems have several
        return Tile(16, 16, 1, 1)
    name = kernel, next(d for d in (64, 128, 256) if max(dims) <= d), dtype.itemsize
    arch = architecture(device)
    others = BEFORE_90 if arch < 90 else FROM_100 if arch >= 100 else {}
    if kernel == "mend" and name not in TILES | others:
        return tile("attend", device, dtype, *dims)
    return others.get(name) or TILES[name]


def padded(dim: int) -> int:
    """A head dimension as tiles hold it: products take powers of two from 16 on."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How numbers of float32 are multiplied: as they are, or rounded to tf32 where the user said so."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def view(tensor: Tensor) -> View:
    return View(tensor, *tensor.stride())


def stretched(tensor: Tensor) -> View:
    """A tensor that broadcasts to [b, h, i, j]."""
    return View(tensor, *(0 if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))


def scene(problem: Problem, query: Tensor, key: Tensor, lowered: Lowered) -> Scene:
    _, h, g, i, j, d, _ = problem.sizes
    return Scene(
        view(query),
        view(key),
        i,
        j,
        d,
        h,
        h // g,
        problem.scale,
        problem.softcap,
        rule(lowered.rule),
        None if lowered.bias is None else stretched(lowered.bias),
        lowered.slopes,
        lowered.positions,
        None if lowered.positions is None else step(lowered.positions, 0),
    )


def rule(lines: Lines) -> Rule:
    """A rule as kernels read it."""
    bounds, seen, shows, query_ids, key_ids = lines
    return Rule(
        bounds,
        bounds.stride(0),
        step(bounds, 1),
        step(bounds, 2),
        None if seen is None else stretched(seen),
        shows,
        query_ids,
        None if query_ids is None else step(query_ids, 0),
        key_ids,
        None if key_ids is None else step(key_ids, 0),
    )


def step(tensor: Tensor, dim: int) -> int:
    return 0 if tensor.shape[dim] == 1 else tensor.stride(dim)


def launch(kernel: Any, programs: int, device: torch.device, size: Tile, *arguments: Any, **constants: Any) -> None:
    if programs:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(programs,)](*arguments, **constants, num_warps=size.warps, num_stages=size.stages)
