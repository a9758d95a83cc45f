"""Readouts of where the weight falls: received by keys, the strongest, the share of a rule, the mass of groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.nn.functional import pad

from einsight.coordinates import Sizes, along, as_int, is_int, to_four
from einsight.masks import Mask
from einsight.readouts.readout import Block, Chosen, Readout, Shapes, changed
from einsight.values import check_dense, check_flag, described, may_look


class Top(NamedTuple):
    """The strongest keys of each query."""

    weights: Float[Tensor, "b h n k"]
    indices: Int[Tensor, "b h n k"]


class Received(Chosen):
    """How much weight each key receives from the queries: [b, h, j].

    Arguments:
        queries: the queries to count (an int, slice, range, list or int tensor), each once; all by default.
        mean: divide by the number of those queries that may see the key (0 where there is none).
        per_group: add up the heads that share a key/value head: [b, g, j].

    The sum over all queries is H2O's score (Zhang et al. 2023, arXiv:2306.14048), that over the last ones
    SnapKV's (Li et al. 2024, arXiv:2404.14469).

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Received(mean=True))[1]
    tensor([[[0.5208, 0.3611, 0.2917, 0.2500]]])
    """

    adds = True

    def __init__(self, queries: object = None, mean: bool = False, per_group: bool = False):
        super().__init__(queries)
        check_flag("Received's mean", mean)
        check_flag("Received's per_group", per_group)
        self.mean, self.per_group = mean, per_group

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        made = super().check(given, sizes)
        # A sum over a set: a query that is named twice counts once.
        return made if not isinstance(made.queries, Tensor) else changed(made, queries=made.queries.unique())

    def shapes(self, sizes: Sizes) -> Shapes:
        received = (sizes.b, sizes.g if self.per_group else sizes.h, sizes.j)
        return (received, received) if self.mean else (received,)

    def start(self, x: Block) -> tuple[int, ...]:
        return (x.at.keys.start,)

    def block(self, x: Block) -> tuple[Float[Tensor, "b h j"], ...]:
        parts = [x.weights.sum(2)]
        if self.mean:
            parts.append(x.seen.expand(x.at.shape).sum(2).to(x.weights.dtype))
        if self.per_group:
            shared = parts[0].shape[1] // max(x.groups, 1)
            parts = [part.unflatten(1, (x.groups, shared)).sum(2) for part in parts]
        return tuple(parts)

    def join(self, *parts: Float[Tensor, "b h j"]) -> Float[Tensor, "b h j"]:
        return parts[0] / parts[1].clamp(min=1) if self.mean else parts[0]


class TopK(Chosen):
    """The k largest weights of each query and their keys: `weights` and `indices`, each [b, h, i, k].

    Sorted by weight, and of equal weights the lowest index first. Where a query sees fewer than k keys the rest
    has weight 0 and index −1. `queries` chooses the queries (an int, slice, range, list or int tensor); all by default.

    Raises:
        ValueError: k is no positive int.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.TopK(2, queries=[0, 3]))[1]
    Top(weights=tensor([[[[1.0000, 0.0000],
              [0.2500, 0.2500]]]]), indices=tensor([[[[ 0, -1],
              [ 0,  1]]]]))
    """

    def __init__(self, k: int, queries: object = None):
        super().__init__(queries)
        k = as_int(k)  # type: ignore[assignment]
        if not is_int(k) or k < 1:
            raise ValueError(f"TopK's k must be a positive int, not {described(k)}")
        self.k = k

    def shapes(self, sizes: Sizes) -> Shapes:
        top = (sizes.b, sizes.h, sizes.i, self.k)
        return top, top

    def block(self, x: Block) -> tuple[Float[Tensor, "b h i k"], Int[Tensor, "b h i k"]]:
        return strongest(x.weights, ~x.seen.expand(x.at.shape), self.k, x.at.keys.start)

    def join(self, *parts: Tensor) -> Top:
        return Top(*parts)


def strongest(
    weights: Float[Tensor, "b h i j"], hidden: Bool[Tensor, "b h i j"], k: int, start: int = 0
) -> tuple[Float[Tensor, "b h i k"], Int[Tensor, "b h i k"]]:
    """The k largest weights of keys that aren't hidden, and these keys, of which the first is number `start`."""
    # −1 sorts behind every weight, so hidden keys come last, also behind visible ones of weight 0.
    marked = weights.detach().masked_fill(hidden, -1)
    if maybe_current_level() is None:
        index = _largest(marked, k)
    else:  # torch.func can't branch on a value
        index = marked.sort(dim=-1, descending=True, stable=True)[1][..., :k]
    absent = hidden.gather(-1, index)
    weights = weights.gather(-1, index).masked_fill(absent, 0)
    index = (index + start).masked_fill(absent, -1)
    short = (0, k - index.shape[-1])
    return pad(weights, short), pad(index, short, value=-1)


def _largest(x: Float[Tensor, "b h i j"], k: int) -> Int[Tensor, "b h i k"]:
    """Where the k largest of each row are, of equal ones the first."""
    # One more than asked for shows whether a tie reaches across the end.
    found, index = x.topk(min(k + 1, x.shape[-1]), dim=-1)
    tied = ((found[..., 1:] == found[..., :-1]) & (found[..., 1:] >= 0)).any(-1)
    if bool(tied.any()):
        # torch.topk leaves the order of equal numbers open; a stable sort doesn't.
        index[tied] = x[tied].sort(dim=-1, descending=True, stable=True)[1][..., : index.shape[-1]]
    return index[..., :k]


class Share(Readout):
    """The weight that falls on the keys a rule allows: [b, h, i].

    Any mask is a question: the first token `lengths(1)`, the previous one `window(1, -1)`, itself
    `window(0, 0)`, within 32 `window(32, 32)`, induction `same(tokens, tokens.roll(1))`.

    Raises:
        TypeError: what isn't one of our masks.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Share(es.lengths(1)))[1]
    tensor([[[1.0000, 0.5000, 0.3333, 0.2500]]])
    """

    def __init__(self, mask: Mask):
        if not isinstance(mask, Mask):
            what = "a tensor: write es.allow(tensor)" if isinstance(mask, Tensor) else described(mask)
            raise TypeError(f"Share takes a mask, such as es.window(32, 0), not {what}")
        self.mask = mask
        self.positional = mask.positional

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        self.mask.check(given)
        return self

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return x.weights.where(self.mask.allowed(x.at), 0).sum(-1)


class Mass(Chosen):
    """The weight on each group of keys (documents, segments, an image): [b, h, i, n].

    Arguments:
        groups: each key's group, an int tensor [j] or [b, j] of 0 to n - 1, or -1 for none; or a float matrix
            [j, n] of how much of each key's weight counts for each of n groups.
        n: the number of groups; by default one more than the largest id.
        queries: the queries to ask about; all by default.

    Raises:
        TypeError, ValueError: ids that are no ints or lie outside, a matrix of another shape.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Mass(torch.tensor([0, 0, 1, -1]), queries=[3]))[1]
    tensor([[[[0.5000, 0.2500]]]])
    """

    def __init__(self, groups: Shaped[Tensor, ...], n: int | None = None, queries: object = None):
        super().__init__(queries)
        if not isinstance(groups, Tensor) or groups.dtype.is_complex or groups.dtype == torch.bool:
            what = described(groups)
            way = "; the weight on the keys of a boolean tensor is Share(allow(tensor))" if "torch.bool" in what else ""
            raise TypeError(f"Mass takes an int tensor of ids [j] or [b, j], or a float matrix [j, n], not {what}{way}")
        check_dense("Mass' groups", groups)
        n = as_int(n)  # type: ignore[assignment]
        if n is not None and not is_int(n):
            raise TypeError(f"Mass' n must be an int, not {described(n)}")
        if groups.dtype.is_floating_point:
            if groups.ndim != 2 or n not in (None, groups.shape[1]):
                raise ValueError(f"Mass takes a float matrix [j, n], but groups has shape {list(groups.shape)}, n={n}")
            self.n, self.tensors = groups.shape[1], (groups,)
        else:
            if groups.ndim not in (1, 2):
                raise ValueError(f"Mass takes ids [j] or [b, j], but groups has shape {list(groups.shape)}")
            looks = groups.numel() > 0 and (n is None or may_look(groups))
            low, high = (int(groups.min()), int(groups.max())) if looks else (0, -1)
            self.n = high + 1 if n is None else n
            if low < -1 or high >= self.n:
                raise ValueError(
                    f"Mass' ids must lie between -1 (no group) and n - 1 = {self.n - 1}, but go from {low} to {high}"
                )
        self.groups = groups

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        weighted = self.groups.dtype.is_floating_point
        keys = self.groups.shape[0] if weighted else self.groups.shape[-1]
        if keys != given.j:
            raise ValueError(f"Mass' groups {list(self.groups.shape)} speak of {keys} keys, but key has {given.j}")
        if not weighted and self.groups.ndim == 2 and len(self.groups) not in (1, given.b):
            raise ValueError(f"Mass' groups speak of {len(self.groups)} batch items, but there are {given.b}")
        return super().check(given, sizes)

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i, self.n),)

    def block(self, x: Block) -> Float[Tensor, "b h i n"]:
        if self.groups.dtype.is_floating_point:
            member = along(self.groups, 0, x.at.keys).to(x.at.device).mT
        else:
            ids = x.at.take(to_four(self.groups) if self.groups.ndim == 1 else self.groups[:, None, None])
            member = ids == torch.arange(self.n, device=ids.device)[:, None]
        # The one key of a problem also comes where a block has none.
        return x.weights @ member[..., : x.weights.shape[3]].to(x.weights.dtype).mT
