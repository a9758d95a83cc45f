"""Biases: numbers added to the scores before the mask, from a tensor or from a rule about positions."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.coordinates import At, Sizes, along, broadcasts, is_int, to_four
from einsight.values import check_dense, check_flag, described


class Bias:
    """What is added to the scores; −∞ means masked. Biases add up with `+`.

    One's own is a subclass with `block`, which gives a block's part of [b, h, i, j].

    >>> import einsight as es, torch
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> bias = es.alibi(torch.tensor([0.5])) + torch.tensor([[0.0, 3.0]])
    >>> es.attention(q, q, q, bias=bias, readouts=es.Scores())[1][0, 0]
    tensor([[ 0.0000,  2.5000],
            [-0.5000,  3.0000]])
    """

    positional = False
    tensors: tuple[Tensor, ...] = ()  # what gradients may flow into

    def check(self, sizes: Sizes) -> None:
        """Refuse a problem that the bias' tensors don't fit."""

    def block(self, at: At, dtype: torch.dtype) -> Float[Tensor, "#b #h #i #j"]:
        """The bias of one block, in the dtype that the scores are computed in."""
        raise NotImplementedError

    def terms(self) -> tuple[Bias, ...]:
        """The biases of which this one is the sum."""
        return (self,)

    def made_of(self, tensors: tuple[Tensor, ...]) -> Bias:
        """The same rule with other tensors in the place of `tensors`."""
        raise NotImplementedError

    def __add__(self, other: Bias | Tensor) -> Bias:
        return _Sum(self, as_bias(other))

    __radd__ = __add__


class _Sum(Bias):
    def __init__(self, left: Bias, right: Bias):
        self.left, self.right = left, right
        self.positional = left.positional or right.positional
        self.tensors = left.tensors + right.tensors

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def block(self, at: At, dtype: torch.dtype) -> Float[Tensor, "#b #h #i #j"]:
        return self.left.block(at, dtype) + self.right.block(at, dtype)

    def terms(self) -> tuple[Bias, ...]:
        return self.left.terms() + self.right.terms()

    def made_of(self, tensors: tuple[Tensor, ...]) -> Bias:
        n = len(self.left.tensors)
        return _Sum(self.left.made_of(tensors[:n]), self.right.made_of(tensors[n:]))


class TensorBias(Bias):
    """A float tensor that broadcasts to [b, h, i, j]."""

    def __init__(self, tensor: Float[Tensor, ...]):
        self.tensor = tensor
        self.tensors = (tensor,)

    def made_of(self, tensors: tuple[Tensor, ...]) -> Bias:
        return TensorBias(tensors[0])

    def check(self, sizes: Sizes) -> None:
        if not broadcasts(self.tensor.shape, sizes):
            raise ValueError(
                f"bias has shape {list(self.tensor.shape)}, which does not broadcast to "
                f"[b, h, i, j] = {[sizes.b, sizes.h, sizes.i, sizes.j]}"
            )

    def block(self, at: At, dtype: torch.dtype) -> Float[Tensor, "#b #h #i #j"]:
        return at.take(to_four(self.tensor)).to(dtype)


class Alibi(Bias):
    """A slope per head on the distance |p - j|."""

    positional = True

    def __init__(self, slopes: Float[Tensor, " h"]):
        self.slopes = slopes
        self.tensors = (slopes,)

    def made_of(self, tensors: tuple[Tensor, ...]) -> Bias:
        return Alibi(tensors[0])

    def check(self, sizes: Sizes) -> None:
        if len(self.slopes) != sizes.h:
            raise ValueError(f"alibi has {len(self.slopes)} slopes, but query has {sizes.h} heads")

    def block(self, at: At, dtype: torch.dtype) -> Float[Tensor, "#b h #i #j"]:
        return -at.take(self.slopes[None, :, None, None]).to(dtype) * (at.p - at.j).abs()


def alibi(slopes: Float[Tensor, " h"]) -> Bias:
    """Linear distance penalties, -slopes[h] · |p - j| (ALiBi; Press et al. 2022, arXiv:2108.12409).

    Raises:
        TypeError: what isn't a float tensor [h].

    >>> import einsight as es, torch
    >>> q = torch.zeros(1, 2, 3, 4)
    >>> es.attention(q, q, q, bias=es.alibi(torch.tensor([0.5, 0.25])), readouts=es.Scores())[1][0, 0]
    tensor([[ 0.0000, -0.5000, -1.0000],
            [-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """
    if not isinstance(slopes, Tensor) or slopes.ndim != 1 or not slopes.dtype.is_floating_point:
        raise TypeError(f"alibi takes a float tensor of one slope per query head [h], not {described(slopes)}")
    check_dense("alibi's slopes", slopes)
    return Alibi(slopes)


class _Relative(Bias):
    positional = True

    def __init__(self, table: Float[Tensor, "n h"], bidirectional: bool, max_distance: int):
        self.table, self.bidirectional, self.max_distance = table, bidirectional, max_distance
        self.tensors = (table,)

    def made_of(self, tensors: tuple[Tensor, ...]) -> Bias:
        return _Relative(tensors[0], self.bidirectional, self.max_distance)

    def check(self, sizes: Sizes) -> None:
        if self.table.shape[1] != sizes.h:
            raise ValueError(
                f"relative's table {list(self.table.shape)} is for {self.table.shape[1]} heads, but query has {sizes.h}"
            )

    def block(self, at: At, dtype: torch.dtype) -> Float[Tensor, "#b h i j"]:
        bucket = self._bucket((at.j - at.p)[:, 0])
        table = along(self.table, 1, at.heads) if self.table.shape[1] > 1 else self.table
        return table.to(at.device, dtype)[bucket].movedim(-1, 1)

    def _bucket(self, ahead: Tensor) -> Tensor:
        """The row of the table for keys that stand `ahead` of the query (negative: behind it)."""
        n = self.table.shape[0]
        if self.bidirectional:
            n //= 2
            start, distance = (ahead > 0) * n, ahead.abs()
        else:
            start, distance = 0, (-ahead).clamp(min=0)
        near = n // 2
        ratio = torch.log(distance.clamp(min=1).float() / near) / math.log(self.max_distance / near)
        far = (near + (ratio * (n - near)).to(torch.int64)).clamp(max=n - 1)
        return start + torch.where(distance < near, distance, far)


def relative(table: Float[Tensor, "n h"], *, bidirectional: bool = True, max_distance: int = 128) -> Bias:
    """T5's learned bias by distance: a table of n buckets, exact near by and logarithmic up to `max_distance`.

    `bidirectional` splits the buckets between keys behind and keys ahead (encoders), of an odd number all but the
    last; without it keys ahead share the bucket of distance 0 (decoders). The table is [n, h]. (Raffel et al. 2020,
    arXiv:1910.10683.)

    Raises:
        TypeError, ValueError: what isn't a float table [n, h]; too few buckets, or a `max_distance` that is too small.

    >>> import einsight as es, torch
    >>> q, table = torch.zeros(1, 2, 3, 4), torch.arange(16.).view(8, 2)
    >>> es.attention(q, q, q, bias=es.relative(table), readouts=es.Scores())[1][0, 0]
    tensor([[ 0., 10., 12.],
            [ 2.,  0., 10.],
            [ 4.,  2.,  0.]])
    """
    if not isinstance(table, Tensor) or table.ndim != 2 or not table.dtype.is_floating_point:
        raise TypeError(f"relative takes a float table [n, h] of n buckets for each head, not {described(table)}")
    check_dense("relative's table", table)
    check_flag("relative's bidirectional", bidirectional)
    near = len(table) // (4 if bidirectional else 2)
    if near < 1:
        raise ValueError(f"relative's table needs at least {4 if bidirectional else 2} buckets, not {len(table)}")
    if not is_int(max_distance) or max_distance <= near:
        raise ValueError(
            f"relative's max_distance must be an int that exceeds the {near} exact buckets, not "
            f"{described(max_distance)}"
        )
    return _Relative(table, bidirectional, max_distance)


def as_bias(bias: object) -> Bias:
    """A user's bias as a rule: one of ours, or a float tensor."""
    if isinstance(bias, Bias):
        return bias
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a float tensor, alibi(…) or relative(…), not {described(bias)}")
    if not bias.dtype.is_floating_point:
        hint = ": a mask goes in as mask=es.allow(tensor) or es.forbid(tensor)" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias must be a float tensor, not {bias.dtype}{hint}")
    check_dense("bias", bias)
    return TensorBias(bias)
