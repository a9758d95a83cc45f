"""Problems for the native engine's gradients, and what is right for them."""

from __future__ import annotations

from typing import Any

import oracle
import torch
from gradients import TrueGradients, floats
from oracle import Case
from torch import Tensor

import einsight as es

READOUTS: dict[str, tuple[es.Readout, Any]] = {
    "lse": (es.LogSumExp(), lambda o: o["lse"]),
    "max": (es.MaxScore(), lambda o: o["scores"].amax(-1)),
    "entropy": (es.Entropy(), lambda o: oracle.entropy(o["weights"])),
    "received": (es.Received(), lambda o: o["weights"].sum(2)),
    "weights": (es.Weights(), lambda o: o["weights"]),
}


# Readouts of weights for each size, on causal masks: their right results are taken from the oracle's weights.
def more_readouts(sizes: tuple[int, ...]) -> dict[str, tuple[es.Readout, Any]]:
    b, _, g, i, j, _, _ = sizes
    p = torch.arange(i)[:, None] + j - i
    ahead = torch.arange(j) - p
    ids, matrix = torch.arange(b * j).view(b, j) % 37 - 1, torch.rand(j, 5, generator=torch.Generator().manual_seed(2))
    some = [i - 1, 0, i // 2]
    member = (ids[:, None, :, None] == torch.arange(37)).double()

    def per_group(o: dict[str, Tensor]) -> Tensor:
        total, count = (o[n][:, :, some].sum(2).unflatten(1, (g, -1)).sum(2) for n in ("weights", "visible"))
        return total / count.clamp(min=1)

    return {
        "mean received": (es.Received(some, mean=True, per_group=True), per_group),
        "top": (es.TopK(3, some), lambda o: oracle.topk(o["weights"][:, :, some], o["visible"][:, :, some], 3)[0]),
        "share": (es.Share(es.window(2, 0)), lambda o: (o["weights"] * ((ahead <= 0) & (ahead >= -2))).sum(-1)),
        "mass of ids": (es.Mass(ids, 37), lambda o: o["weights"] @ member.to(o["weights"].dtype)),
        "mass": (es.Mass(matrix, queries=some), lambda o: o["weights"][:, :, some] @ matrix.to(o["weights"].dtype)),
        "rows": (es.Rows(some), lambda o: o["weights"][:, :, some]),
        "diagonal": (es.Diagonal(-1), lambda o: (o["weights"] * (ahead == -1)).sum(-1)),
        "distance": (es.Distance(), lambda o: (o["weights"] * ahead.abs()).sum(-1)),
        "pool": (es.Pool(5), lambda o: oracle.pool(o["weights"], 5)),
    }


# b, h, g, i, j, d, e: more than one block of 96 rows, one tile of 256 keys, one part of rows.
SIZES = {
    "small": (2, 3, 3, 7, 5, 13, 11),
    "one key": (1, 2, 1, 3, 1, 5, 7),
    "blocks": (2, 3, 3, 131, 137, 17, 19),
    "tiles": (1, 4, 2, 103, 521, 64, 64),
    "parts": (1, 2, 1, 307, 311, 23, 37),
    "decode": (3, 4, 2, 1, 523, 128, 96),
    "deep": (1, 2, 1, 29, 31, 257, 263),
}
SETTINGS = [
    "all",
    "causal",
    "window",
    "nothing to see",
    "softcap",
    "sink",
    "high sink",
    "alibi",
    "scale",
    "negative",
    "dense",
    "masked bias",
    "bias of items",
    "bias of keys",
    "relative",
    "sum of biases",
]


def make(sizes: tuple[int, ...], settings: str, dtype: torch.dtype = torch.float32) -> Case:
    b, h, g, i, j, d, e = sizes
    random = torch.Generator().manual_seed(0)
    case = Case(*(torch.randn(s, generator=random).to(dtype) for s in ((b, h, i, d), (b, g, j, d), (b, g, j, e))))
    case.offset = case.arguments["offset"] = -3 if settings == "nothing to see" else j - i
    ahead = torch.arange(j) - (torch.arange(i) + case.offset)[:, None]
    allowed = torch.ones(i, j, dtype=torch.bool)
    if settings in ("causal", "softcap", "sink", "alibi"):
        allowed, case.arguments["mask"] = ahead <= 0, es.causal()
    if settings in ("window", "nothing to see"):
        allowed, case.arguments["mask"] = (ahead >= -3) & (ahead <= 2), es.window(3, 2)
    if settings == "softcap":
        case.softcap = case.arguments["softcap"] = 0.7
    if settings.endswith("sink"):
        case.sink = case.learned["sink"] = torch.randn(h, generator=random) + (30 if settings == "high sink" else 0)
        case.arguments["sink"] = case.sink
    if settings == "alibi":
        slopes = case.learned["slopes"] = torch.rand(h, generator=random)
        case.arguments["bias"] = es.alibi(slopes)
        case.bias = lambda dtype: -slopes.to(dtype)[:, None, None] * ahead.abs()
    if settings == "dense":
        allowed = torch.rand(1, h, i, j, generator=random) < 0.4
        allowed[:, :, :, j // 3 : 2 * j // 3] = False
        case.arguments["mask"] = es.allow(allowed)
    shapes = {"masked bias": (h, i, j), "bias of items": (b, 1, i, j), "bias of keys": (h, 1, j)}
    if settings in shapes:
        table = case.learned["table"] = torch.randn(shapes[settings], generator=random)
        if settings == "masked bias":
            table[torch.rand(table.shape, generator=random) < 0.3] = -torch.inf
        case.arguments["bias"], case.bias = table, lambda dtype: table.to(dtype)
    if settings in ("relative", "sum of biases"):
        # As many buckets as there are distances, so that the oracle needs no logarithms.
        buckets = case.learned["buckets"] = torch.randn(4 * (i + j), h, generator=random)
        slopes = case.learned["slopes"] = torch.rand(h, generator=random)
        index = torch.where(ahead > 0, 2 * (i + j), 0) + ahead.abs()
        relative, linear = es.relative(buckets, max_distance=4 * (i + j)), es.alibi(slopes)
        if settings == "relative":
            case.learned.pop("slopes")
        case.arguments["bias"] = relative + linear if "slopes" in case.learned else relative
        steep = 1.0 if "slopes" in case.learned else 0.0
        case.bias = lambda dtype: (
            buckets.to(dtype)[index].movedim(-1, 0) - steep * slopes.to(dtype)[:, None, None] * ahead.abs()
        )
    if settings in ("scale", "negative"):
        case.scale = case.arguments["scale"] = 0.3 if settings == "scale" else -0.05
    case._allowed = allowed.expand(b, h, i, j).clone()
    return case


def attend(case: Case, readouts: dict[str, Any], **tensors: Tensor) -> dict[str, Tensor]:
    given = {n: tensors.get(n, getattr(case, n)) for n in ("query", "key", "value")}
    asked = {n: r for n, (r, _) in readouts.items()}
    output, seen = es.attention(**given, readouts=asked, engine="native", **case.arguments)
    return floats(output, seen)


def check(case: Case, readouts: dict[str, Any], seed: int = 0) -> None:
    truth = TrueGradients(case, readouts, seed)
    operands = {n: getattr(case, n).detach().requires_grad_() for n in ("query", "key", "value")}
    got = truth.of(attend(case, readouts, **operands), operands)
    assert all(got[name].dtype == leaf.dtype for name, leaf in ({**operands, **case.learned}).items())
    truth.check(got)


def leaves(case: Case) -> dict[str, Tensor]:
    return {n: getattr(case, n).clone().requires_grad_() for n in ("query", "key", "value")}
