"""What the report asks of the weights beside Einsight's own readouts."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

import einsight as es
from einsight.coordinates import Sizes, numbers
from einsight.readouts import Block, Readout, Shapes

# A weight w is stored as 1 + 254 w^¾, rounded, in a byte; 0 is a key that may not be seen. √w would be finer where
# weights are small, where most of them are: 24 MB for what now takes 15 (docs/decisions.md).
STEPS, POWER = 254, 0.75


def coded(weights: Float[Tensor, ...]) -> Shaped[Tensor, ...]:
    """Weights in one byte each."""
    root = weights.clamp(0, 1).sqrt_()
    return root.mul_(root.sqrt()).mul_(STEPS).add_(1.5).to(torch.uint8)  # w^½ w^¼: much faster than pow


class Coded(Readout):
    """Every weight in a byte, 0 where masked: [b, h, i, j]."""

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i, sizes.j),)

    def start(self, x: Block) -> tuple[int, ...]:
        return x.row, x.at.keys.start

    def block(self, x: Block) -> Shaped[Tensor, "b h i j"]:
        return coded(x.weights).mul_(x.seen)


class Seen(Readout):
    """The first key that each query may see, one more than the last, and how many: [b, h, i, 3]."""

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i, 3),)

    def block(self, x: Block) -> Int[Tensor, "b h i 3"]:
        seen = x.seen.expand(*x.seen.shape[:2], *x.at.shape[2:])
        if seen.shape[3] == 0:
            return torch.zeros(*x.at.shape[:3], 3, dtype=torch.int64, device=seen.device)
        bits, start = seen.to(torch.uint8), x.at.keys.start
        count = seen.sum(-1)
        first, last = bits.argmax(-1) + start, start + seen.shape[3] - bits.flip(-1).argmax(-1)
        found = torch.stack([first, last, count], -1).where((count > 0).unsqueeze(-1), 0)
        return found.expand(*x.at.shape[:3], 3)


class Total(Readout):
    """The sum of each query's weights: [b, h, i]."""

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return x.weights.sum(-1)


class At(Readout):
    """The weight on one key for each query, given by its number, 0 where that is −1: [b, h, i]."""

    def __init__(self, keys: Int[Tensor, " i"]):
        self.keys = keys

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        b, h, i, j = x.weights.shape
        if j == 0:
            return x.weights.sum(-1)
        key = self.keys[numbers(x.at.queries)].to(x.weights.device) - x.at.keys.start
        inside = (key >= 0) & (key < j)
        return x.weights.gather(-1, key.clamp(0, j - 1).expand(b, h, i).unsqueeze(-1)).squeeze(-1).where(inside, 0)


class After(Readout):
    """The weight on the keys that followed earlier copies of each query's token: [b, h, i].

    `Share(same(own, before) & window(None, 0))`, of few pairs, so that it costs next to nothing.
    """

    def __init__(self, own: Int[Tensor, " i"], before: Int[Tensor, " j"]):
        self.own, self.before = own, before

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        device, (b, h, i, j) = x.weights.device, x.weights.shape
        queries, start = numbers(x.at.queries), x.at.keys.start
        place = queries + len(self.before) - len(self.own)
        own, before = self.own[queries].to(device), self.before[start : start + j].to(device)
        keys = torch.arange(j, device=device) + start
        row, key = ((own[:, None] == before) & (keys <= place.to(device)[:, None])).nonzero(as_tuple=True)
        found = x.weights.new_zeros(b, h, i)
        return found.index_add_(-1, row, x.weights[..., row, key])


class Peak(Readout):
    """The largest weight of each query, and the largest beside one key's: [b, h, i] each."""

    def __init__(self, but: int):
        self.but = but

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i),) * 2

    def block(self, x: Block) -> tuple[Float[Tensor, "b h i"], Float[Tensor, "b h i"]]:
        if x.weights.shape[3] == 0:
            return x.weights.sum(-1), x.weights.sum(-1)
        but = self.but - x.at.keys.start
        parts = [x.weights[..., :but], x.weights[..., but + 1 :]] if but >= 0 else [x.weights]
        best = [part.amax(-1) for part in parts if part.shape[3]]
        beside = torch.stack(best).amax(0) if best else torch.zeros_like(x.max)
        return x.weights.amax(-1), beside

    def join(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return parts


class Shares(Readout):
    """What each key receives on average from the queries that may see it and are `asked`, as the weights are and
    without one key: [b, h, j] each. Without it, the rest of a row is divided by what the key left of it."""

    adds = True

    def __init__(self, but: int, asked: Bool[Tensor, " i"]):
        self.but, self.asked = but, asked

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.j),) * 3

    def start(self, x: Block) -> tuple[int, ...]:
        return (x.at.keys.start,)

    def block(self, x: Block) -> tuple[Float[Tensor, "b h j"], ...]:
        but = self.but - x.at.keys.start
        inside = 0 <= but < x.weights.shape[3]
        asked = self.asked[numbers(x.at.queries)].to(x.weights.device)
        counted = x.weights if bool(asked.all()) else x.weights * asked[:, None]
        left = 1 - x.weights[..., but] if inside else torch.ones_like(x.max)
        without = torch.einsum("bhij,bhi->bhj", counted, inverse(left))
        if inside:
            without[..., but] = 0
        seen = (x.seen & asked[:, None]).expand(*x.seen.shape[:2], *x.at.shape[2:]).sum(2).to(x.weights.dtype)
        return counted.sum(2), without, seen.expand(*x.at.shape[:2], -1)

    def join(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return parts[0] / parts[2].clamp(min=1), parts[1] / parts[2].clamp(min=1)


class PoolWithout(es.Pool):
    """`Pool` of the weights without one key, the rest of a row divided by what it left: [b, h, m, n]."""

    def __init__(self, block: int, but: int):
        super().__init__(block)
        self.but = but

    def block(self, x: Block) -> Float[Tensor, "b h m n"]:
        but = self.but - x.at.keys.start
        if not 0 <= but < x.weights.shape[3]:
            return super().block(x)
        scaled = x.weights * inverse(1 - x.weights[..., but]).unsqueeze(-1)
        scaled[..., but] = 0
        return super().block(replace(x, weights=scaled))


def inverse(left: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """1 / left, and 0 where so little is left (0.4 %) that scaling it up would show rounding."""
    return torch.where(left > 0.004, 1 / left, 0)
