"""Calls of the native engine over sizes, settings and readouts, and what their results are held to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import einsight as es
from einsight.engines import native

LEVELS = native.operations.kernel.levels if native.operations.kernel else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
READOUTS = {
    "lse": es.LogSumExp(),
    "max": es.MaxScore(),
    "entropy": es.Entropy(),
    "received": es.Received(),
    "mean": es.Received(mean=True),
    "weights": es.Weights(),
    "scores": es.Scores(),
    "diagonal": es.Diagonal(-1),
    "distance": es.Distance(),
    "pool": es.Pool(1),  # so that a line is a query
    "top": es.TopK(5),
    "share": es.Share(es.window(9, 2)),
}

# b, h, g, i, j, d, e: distinct primes where the shape allows; more than one block of 96 rows, more than one tile of
# 256 keys, more than one chunk of 1024, and the tuned head dimensions.
SIZES = {
    "small": (2, 3, 3, 7, 5, 13, 11),
    "one key": (1, 2, 1, 3, 1, 5, 7),
    "blocks": (2, 3, 3, 131, 137, 17, 19),
    "tiles": (1, 4, 2, 103, 521, 64, 64),
    "groups": (2, 6, 2, 67, 307, 37, 53),
    "decode": (5, 8, 2, 1, 2503, 128, 96),
    "chunks": (3, 2, 1, 11, 2053, 23, 5),
    "wide": (1, 2, 2, 101, 107, 96, 128),
    "deep": (1, 2, 1, 29, 31, 257, 263),
    "pairs": (2, 3, 1, 37, 139, 34, 71),
}


def make(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    b, h, g, i, j, d, e = sizes
    random = torch.Generator().manual_seed(seed)
    shapes = ((b, h, i, d), (b, g, j, d), (b, g, j, e))
    query, key, value = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return query, key, value


def settings_of(name: str, sizes: tuple[int, ...]) -> dict:
    b, h, _, i, j, _, _ = sizes
    offset = {"offset": j - i}
    random = torch.Generator().manual_seed(1)
    return {
        "all": {},
        "causal": {"mask": es.causal(), **offset},
        "causal from 0": {"mask": es.causal(), "offset": 0},
        "window": {"mask": es.window(3, 2), **offset},
        "wide window": {"mask": es.window(97, 0), **offset},
        "nothing to see": {"mask": es.window(1, 1), "offset": -3},
        "lengths": {"mask": es.lengths(torch.arange(b) * (j // 2))},
        "documents": {"mask": es.causal() & es.documents(torch.arange(j) // 19, torch.arange(i) // 7), **offset},
        "offsets": {"mask": es.causal(), "offset": torch.arange(b) * 2 - 1},
        "softcap": {"mask": es.causal(), "softcap": 0.7, **offset},
        "high softcap": {"softcap": 50.0},
        "sink": {"mask": es.window(5, 0), "sink": torch.randn(h, generator=random) * 3, **offset},
        "high sink": {"mask": es.window(1, 1), "sink": 300.0, "offset": -3},
        "alibi": {"bias": es.alibi(torch.rand(h, generator=random)), "mask": es.window(11, 3), **offset},
        "given": {"mask": es.allow(torch.rand(b, 1, i, j, generator=random) < 0.4)},
        "tiles": {"mask": es.causal() & es.forbid(_in_blocks(h, i, j, random)), **offset},
        "ids": {"mask": es.same(torch.arange(i) % 5, torch.arange(j) % 7)},
        "rule": {"mask": es.where(lambda b, h, p, j: (p + h + j) % 3 != 0), **offset},
        "bias": {"bias": torch.randn(h, i, j, generator=random)},
        "masking bias": {
            "bias": torch.randn(1, i, j, generator=random).masked_fill(_in_blocks(1, i, j, random), -torch.inf)
        },
        "biases": {
            "bias": es.alibi(torch.rand(h, generator=random)) + torch.randn(j, generator=random).bfloat16(),
            "mask": es.allow(torch.rand(j, generator=random) < 0.7) & es.causal(),
            **offset,
        },
        "scale": {"scale": 3.0},
        "negative scale": {"scale": -0.3},
    }[name]


def _in_blocks(h: int, i: int, j: int, random: torch.Generator) -> Tensor:
    """True for blocks of queries and keys, so that whole tiles are, with some single pairs more."""
    blocks = torch.rand(h, -(-i // 29), -(-j // 83), generator=random) < 0.5
    blocks = blocks.repeat_interleave(29, 1).repeat_interleave(83, 2)[:, :i, :j]
    return blocks | (torch.rand(i, j, generator=random) < 0.1)


SETTINGS = (
    "all",
    "causal",
    "causal from 0",
    "window",
    "wide window",
    "nothing to see",
    "lengths",
    "documents",
    "offsets",
    "softcap",
    "high softcap",
    "sink",
    "high sink",
    "alibi",
    "given",
    "tiles",
    "ids",
    "rule",
    "bias",
    "masking bias",
    "biases",
    "scale",
    "negative scale",
)


def attend(query: Tensor, key: Tensor, value: Tensor, *, engine: str = "native", **settings) -> dict[str, Tensor]:
    settings = {"offset": 0, **settings}
    readouts = READOUTS | of_keys(query.shape[2], key.shape[2])
    if engine == "native" and query.dtype == torch.float64:
        readouts.pop("top")
    output, found = es.attention(query, key, value, readouts=readouts, engine=engine, **settings)
    if "top" in found:
        found["top"], found["indices"] = found["top"]
    return {"output": output, **found}


def of_keys(i: int, j: int) -> dict[str, es.Readout]:
    """Readouts that speak of the single keys."""
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 7, (j,), generator=random)
    return {
        "same": es.Share(es.same(torch.arange(i) % 7, tokens)),
        "shared": es.Share(es.allow(torch.rand(i, j, generator=random) < 0.5)),
        "documents": es.Mass(torch.arange(j) // 19 % 5 - 1),
        "ids": es.Mass(torch.randint(-1, 40, (j,), generator=random), n=40),
        "mass": es.Mass(torch.rand(j, 3, generator=random)),
    }


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    return float((got - want).abs().masked_fill(same, 0).nan_to_num(float("inf")).max()) if got.numel() else 0.0


def judged_by(name: str) -> set[str]:
    """The results whose error in a coarser dtype is the budget: what reads a few weights errs as all weights do."""
    return {name, "weights"} if name in ("share", "diagonal", "top", "mean") else {name}


def check(got: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor, **settings) -> None:
    """Every error is at most twice that of the formula in float32, plus twice one rounding of the result.

    The formula's error is the larger one of this query and its negative: of a single draw it may be small by luck.
    """
    exact, plain = (
        [
            attend(q, key.to(dtype), value.to(dtype), engine="reference", **settings)
            for q in (query.to(dtype), -query.to(dtype))
        ]
        for dtype in (torch.float64, torch.float32)
    )
    for name, result in got.items():
        if name == "indices":  # rounding may swap neighbours
            continue
        want = exact[0][name]
        largest = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 0.0
        rounding = torch.finfo(result.dtype).eps / 2 * largest
        of = judged_by(name)
        allowed = 2 * (max(error(p[n], e[n]) for p, e in zip(plain, exact, strict=True) for n in of) + rounding)
        assert error(result, want) <= allowed, f"{name}: {error(result, want):.3g} > {allowed:.3g}"


def at_level(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    monkeypatch.setattr(native.operations, "_level", level)
