"""What the report shows of one layer, from readouts of its weights: memory is linear in the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import einsight as es
from einsight.report.readouts import After, At, Coded, Peak, PoolWithout, Seen, Shares, Total, coded, inverse

WHOLE = 512  # up to so many queries and keys every weight is kept
STRONGEST = 9_000_000  # above, so many weights of all heads and queries together
CELLS = 128  # and a picture of so many cells along a side


@dataclass(frozen=True)
class Copies:
    """Each query's token, the token before each key, and which queries' tokens came before."""

    own: Int[Tensor, " i"]
    before: Int[Tensor, " j"]
    asked: Bool[Tensor, " i"]


@dataclass(frozen=True)
class Question:
    """What to ask of every layer of a part: the same for all of them."""

    i: int
    j: int
    offset: int  # where query 0 stands among the keys
    first: int  # the key that is hidden on request: the first that anything sees
    statistics: tuple[str, ...]
    copies: Copies | None  # what is asked for induction
    targets: Int[Tensor, " i"] | None  # what came next the last time, −1 where no phrase repeats
    strongest: int  # how many keys of each query, where not all are kept
    real: Bool[Tensor, " j"]  # the keys that aren't padding
    asks: Bool[Tensor, " i"]  # the queries that aren't

    @property
    def whole(self) -> bool:
        return self.i * self.j <= WHOLE**2

    @property
    def block(self) -> int:
        return -(-max(self.i, self.j) // CELLS)


@dataclass
class Survey:
    """What was found: a number per head for each statistic (and without the first key), and the layer's arrays."""

    statistics: dict[str, list[float]]
    without_first: dict[str, list[float]]
    arrays: dict[str, Tensor]
    gaps: bool = False  # whether a query sees some keys between its first and its last, but not all


def strongest(heads: int, i: int) -> int:
    """How many keys of each query to keep."""
    return min(32, max(4, STRONGEST // max(heads * i, 1)))


def survey(weights: es.AttentionWeights, asked: Question) -> Survey:
    """Ask a layer's weights [1, h, i, j] for everything at once."""
    constant = torch.full((asked.i,), asked.first)
    readouts: dict[str, Any] = {
        "seen": Seen(),
        "shares": Shares(asked.first, asked.asks),
        "entropy": es.Entropy(),
        "first": At(constant),
        "total": Total(),
        "peak": Peak(asked.first),
    }
    positional = {"previous": es.Diagonal(-1), "next": es.Diagonal(1), "itself": es.Diagonal(0)}
    positional |= {"distance": es.Distance()}
    readouts |= {name: readout for name, readout in positional.items() if name in asked.statistics}
    if asked.copies is not None:
        readouts["induction"] = After(asked.copies.own, asked.copies.before)
    if asked.whole:
        readouts["weights"] = Coded()
    else:
        readouts |= {"top": es.TopK(asked.strongest), "pool": es.Pool(asked.block)}
        readouts["pool_without_first"] = PoolWithout(asked.block, asked.first)
    found = weights.read(readouts)
    found = {name: _item(result) for name, result in found.items()}
    if not bool(torch.isfinite(found["total"]).all()):
        raise ValueError("the weights hold NaN: so do the queries or keys that they are made of")
    asks = asked.asks.to(found["total"].device)
    # Whatever rows of padding hold, they are nobody's.
    seen = found.pop("seen") * asks[:, None]
    lo, hi = _hull(seen)
    statistics, without = _statistics(found, seen[..., 2].amax(0), asked)
    arrays = {"lo": lo.int(), "hi": hi.int()}
    arrays["received"], arrays["received_without_first"] = found["shares"]
    if asked.whole:
        arrays["weights"] = found["weights"] * asks[:, None]
    else:
        arrays |= _summary(found, lo, hi, asked)
    gaps = bool((seen[..., 2] != (hi - lo)).any())
    return Survey(statistics, without, {name: array.cpu() for name, array in arrays.items()}, gaps=gaps)


def _item(result: Any) -> Any:
    return result[0] if isinstance(result, Tensor) else tuple(part[0] for part in result)


def _hull(seen: Int[Tensor, "h i 3"]) -> tuple[Int[Tensor, " i"], Int[Tensor, " i"]]:
    """The keys [lo, hi) outside which no head sees anything."""
    there = seen[..., 2] > 0
    far = 1 << 40
    lo = torch.where(there, seen[..., 0], far).amin(0)
    return torch.where(there.any(0), lo, 0), seen[..., 1].amax(0)


def _last(real: Bool[Tensor, " j"]) -> int:
    return int(real.nonzero().max()) if bool(real.any()) else -1


def _statistics(
    found: dict[str, Any], count: Int[Tensor, " i"], asked: Question
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Means over the queries for which a statistic can be told; of those that the lens' table has, over the same."""
    there = count > 0
    place = torch.arange(asked.i, device=count.device) + asked.offset
    told = {name: there for name in asked.statistics}
    told["first"] = told["previous"] = there & (place != asked.first)
    told["next"] = there & (place < _last(asked.real))
    told["strongest"] = there & (count > 1)
    if asked.copies is not None:
        told["induction"] = there & asked.copies.asked.to(count.device)
    total, first, entropy = found["total"], found["first"], found["entropy"]
    left = inverse(1 - first)
    rest = (total - first).clamp(min=0) * left
    plain = {name: found[name] for name in asked.statistics if name in found} | {"strongest": found["peak"][0]}
    without = {name: value * left for name, value in plain.items()}
    lost = torch.where(first > 0, first * first.clamp(min=1e-30).log(), 0)  # the first key's part of −entropy
    without["entropy"] = ((entropy + lost) * left - rest * left.clamp(min=1).log()).clamp(min=0)
    without["first"] = torch.zeros_like(first)
    without["strongest"] = found["peak"][1] * left
    for name, shift in (("previous", -1), ("itself", 0), ("next", 1)):
        if name in plain:
            without[name] = without[name] * (place + shift != asked.first)
    if "distance" in plain:
        without["distance"] = ((plain["distance"] - first * (place - asked.first).abs()) * left).clamp(min=0)

    def mean(values: Float[Tensor, "h i"], chosen: Tensor) -> list[float]:
        return (values[:, chosen].double().mean(-1) if bool(chosen.any()) else values.new_zeros(len(values))).tolist()

    # Without the first key who sees no other has nothing left.
    return (
        {name: mean(plain[name], told[name]) for name in asked.statistics},
        {name: mean(without[name], told[name] & (count > 1)) for name in asked.statistics},
    )


def _summary(found: dict[str, Any], lo: Tensor, hi: Tensor, asked: Question) -> dict[str, Tensor]:
    """A long layer's arrays: each query's strongest keys, what they cover, and a picture of pooled cells."""
    weights, keys = found["top"]
    place = torch.arange(asked.i, device=keys.device)[None, :, None] + asked.offset
    # A cell is masked where none of its queries sees any of its keys.
    size, (m, n) = asked.block, found["pool"].shape[1:]
    start = torch.arange(n, device=lo.device) * size
    short = (0, m * size - asked.i)
    low = torch.nn.functional.pad(lo, short, value=1 << 40).unflatten(0, (m, size))
    high = torch.nn.functional.pad(hi, short).unflatten(0, (m, size))
    seen = ((low[..., None] < start + size) & (high[..., None] > start) & (low < high)[..., None]).any(1)
    # What rounds to 0 is no strong key, and costs as much as one.
    codes = torch.where(keys < 0, 0, coded(weights))
    codes = (torch.where(codes > 1, codes, 0) * asked.asks.to(codes.device)[:, None]).transpose(1, 2)
    return {
        # One rank after the other, and as a distance: neighbours are alike, which is what deflate lives on.
        "keys": torch.where(codes > 0, ((place - keys) % asked.j).transpose(1, 2), 0).int(),
        "top": codes.to(torch.uint8),
        "covered": (weights.sum(-1) * 255).round().clamp(max=255).to(torch.uint8),
        "pool": coded(found["pool"]) * seen,
        "pool_without_first": coded(found["pool_without_first"]) * seen,
    }


def lengths(
    weights: es.AttentionWeights,
    value: Float[Tensor, "g j e"],
    matrix: Float[Tensor, "h m e"] | None,
    stream: Float[Tensor, "i m"] | None,
) -> dict[str, Tensor]:
    """How long what a layer moves is: its values [h, j], and through its output matrix what they write [h, j] and
    what its heads write [h, i]; and how long the residual stream is [i]."""
    h = weights.shape[1]
    output = (weights @ value[None])[0].float()
    value = value.float()
    of_head = torch.arange(h, device=value.device) // (h // len(value))
    arrays = {"value": value.norm(dim=-1)[of_head]}
    if matrix is None:
        arrays["out"] = output.norm(dim=-1)
        return arrays
    # ‖W v‖² = vᵀ (Wᵀ W) v, and Wᵀ W is small.
    gram = torch.einsum("hmd,hme->hde", matrix.float(), matrix.float())

    def written(x: Float[Tensor, "h n e"]) -> Float[Tensor, "h n"]:
        return ((x @ gram) * x).sum(-1).clamp(min=0).sqrt()

    arrays["write"], arrays["out"] = written(value[of_head]), written(output)
    if stream is not None:
        arrays["stream"] = stream.float().norm(dim=-1)
    return arrays
