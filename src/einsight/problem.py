"""One attention problem: its tensors and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from einsight.biases import Bias
from einsight.coordinates import At, Axis, Run, Sizes, along, as_axis, count, numbers, pick
from einsight.masks import Mask
from einsight.masks.mask import offset_needed, place
from einsight.readouts import Readout, changed
from einsight.room import check_fits
from einsight.values import described, may_look

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Bounds(NamedTuple):
    """The keys each query may see lie in [lo, hi); `exact`: it sees all of those. On the CPU."""

    lo: Int[Tensor, "#b #h i"]
    hi: Int[Tensor, "#b #h i"]
    exact: bool


def _remembered(method: Callable[[Any], Any]) -> Any:
    """A property computed once; functools.cached_property takes a lock, which torch.compile can't trace."""

    def get(self: Problem) -> Any:
        if method.__name__ not in self.memory:
            self.memory[method.__name__] = method(self)
        return self.memory[method.__name__]

    return property(get, doc=method.__doc__)


def accuracy(dtype: torch.dtype) -> torch.dtype:
    """What scores, softmax and readouts of operands in a dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(eq=False)  # frozen would take 4 µs of each call
class Problem:
    """softmax(Q Kᵀ · scale, under the settings) V, and the readouts asked of its weights.

    `given` are the sizes of the tensors as the user gave them, which masks, biases and sinks speak of;
    `batch`, `heads` and `queries` say which of those the tensors here are.
    """

    query: Float[Tensor, "b h i d"]
    key: Float[Tensor, "b g j d"]
    value: Float[Tensor, "b g j e"] | None
    given: Sizes
    batch: Axis
    heads: Axis
    queries: Axis
    offset: int | Int[Tensor, "#all_b"]  # where query 0 stands among the keys
    is_placed: bool  # whether that is known
    scale: float
    mask: Mask | None = None
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    bias: Bias | None = None
    sink: Float[Tensor, " all_h"] | None = None
    dropout: float = 0.0
    readouts: tuple[Readout, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @_remembered
    def sizes(self) -> Sizes:
        b, h, i, d = self.query.shape
        g, j = self.key.shape[1:3]
        return Sizes(b, h, g, i, j, d, 0 if self.value is None else self.value.shape[3])

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        """What the scores, the softmax and the readouts are computed in."""
        return accuracy(self.query.dtype)

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        # A user's function may capture anything.
        return self.score_mod is not None or any(t.requires_grad for t in self.tensors)

    @_remembered
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that gradients may flow into, as far as can be seen."""
        own = (self.query, self.key, self.value, self.sink)
        return (
            *(t for t in own if t is not None),
            *(() if self.bias is None else self.bias.tensors),
            *(t for readout in self.readouts for t in readout.tensors),
        )

    @property
    def is_transformed(self) -> bool:
        """Whether torch.func or forward-mode derivatives are at work: on these tensors, or on what a function of
        the user's captures, which can't be seen."""
        # torch.compile can't look there, and doesn't compile what torch.func transforms from outside.
        if torch.compiler.is_compiling():
            return False
        return maybe_current_level() is not None or forward_ad._current_level >= 0

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each tensor was changed in place: who computes a block again for the backward must find
        what there was in the forward."""
        rules = (self.mask, self.bias, *self.readouts)
        held = (*self.tensors, *(t for rule in rules if rule is not None for t in _held(rule)))
        return tuple(0 if t.is_inference() else t._version for t in held)

    @_remembered
    def positions(self) -> Int[Tensor, "#b i"]:
        """Where each query stands among the keys, on the CPU."""
        return place(
            along(self.offset, 0, self.batch) if isinstance(self.offset, Tensor) else self.offset, self.queries
        )

    @property
    def first(self) -> int | None:
        """Where the first query stands, if that is one number and the others follow it one by one."""
        if isinstance(self.queries, Run) and not isinstance(self.offset, Tensor):
            return self.offset + self.queries.start
        return None

    @_remembered
    def bounds(self) -> Bounds:
        i, j = self.sizes.i, self.sizes.j
        if self.mask is None:
            return Bounds(torch.zeros(1, 1, i, dtype=torch.int64), torch.full((1, 1, i), j), True)
        lo, hi, exact = self.mask.bounds(self.whole)
        lo, hi = per_query(lo, i, j), per_query(hi, i, j)
        if lo.shape != hi.shape:
            lo, hi = torch.broadcast_tensors(lo, hi)
        return Bounds(lo, torch.maximum(lo, hi), exact)

    @property
    def whole(self) -> At:
        """The coordinates of the whole problem, on the CPU."""
        return At(
            self.given, self.batch, self.heads, self.queries, Run(0, self.sizes.j), self.positions, torch.device("cpu")
        )

    @property
    def here(self) -> At:
        """The coordinates of the whole problem, on its own device."""
        b, h, _, i, j, _, _ = self.sizes
        return self.whole if self.device.type == "cpu" else self.at(slice(b), slice(h), slice(i), Run(0, j))

    @_remembered
    def _placed(self) -> Int[Tensor, "#b i"]:
        return self.positions.to(self.device)

    @_remembered
    def placed_bounds(self) -> tuple[Int[Tensor, "#b #h i"], Int[Tensor, "#b #h i"]]:
        """The bounds on the problem's device."""
        return self.bounds.lo.to(self.device), self.bounds.hi.to(self.device)

    def modified(self, scores: Float[Tensor, "b h i j"], at: At) -> Float[Tensor, "b h i j"]:
        """The scores as the user's function changes them."""
        if self.score_mod is None:
            return scores
        made = self.score_mod(scores, at.b, at.h, at.p, at.j)
        expected = f"score_mod(score, b, h, p, j) must return the scores, a float tensor {list(scores.shape)}"
        if not isinstance(made, Tensor) or not made.dtype.is_floating_point:
            raise TypeError(f"{expected}, but returned {made.dtype if isinstance(made, Tensor) else repr(made)}")
        if made.ndim != 4 or any(n not in (1, m) for n, m in zip(made.shape, scores.shape, strict=True)):
            raise ValueError(f"{expected}, but returned {made.dtype} {list(made.shape)}")
        return made.to(scores.dtype).expand(scores.shape)

    def at(self, batch: slice, heads: slice, queries: slice, keys: Run) -> At:
        """The coordinates of a block of this problem."""
        positions = self._placed if len(self._placed) == 1 else self._placed[batch]
        return At(
            self.given,
            self.batch[batch],
            self.heads[heads],
            self.queries[queries],
            keys,
            positions[:, queries],
            self.device,
        )

    def select(self, batch: Axis | None = None, heads: Axis | None = None, queries: Axis | None = None) -> Problem:
        """The same problem for some of its items, heads and queries; rules keep speaking of the whole.

        Key/value heads are kept as they are if whole groups were chosen, else one is taken for each query head.
        """
        query, key, value = self.query, self.key, self.value
        chosen: dict[str, Axis] = {}
        if batch is not None:
            query, key = pick(query, 0, batch), pick(key, 0, batch)
            value = None if value is None else pick(value, 0, batch)
            chosen["batch"] = _compose(self.batch, batch)
        if heads is not None:
            query = pick(query, 1, heads)
            groups = _groups(heads, self.sizes)
            key = pick(key, 1, groups)
            value = None if value is None else pick(value, 1, groups)
            chosen["heads"] = _compose(self.heads, heads)
        if queries is not None:
            query = pick(query, 2, queries)
            chosen["queries"] = _compose(self.queries, queries)
        return replace(self, query=query, key=key, value=value, **chosen)

    def asking(self, readouts: tuple[Readout, ...], value: Tensor | None) -> Problem:
        """The same weights, asked for other readouts and applied to another value."""
        made = replace(self, value=value)
        return replace(made, readouts=tuple(check_readout(r, made) for r in readouts))

    def only_needed_rows(self) -> Problem:
        """Without an output to compute, only the queries that some readout is about need a visit."""
        if self.value is not None or not self.readouts or any(r.queries is None for r in self.readouts):
            return self
        needed = torch.cat([numbers(r.queries) for r in self.readouts if r.queries is not None]).unique()
        if len(needed) == self.sizes.i:
            return self
        axis = as_axis(needed, self.sizes.i, "queries")
        rebased = (
            changed(r, queries=as_axis(torch.searchsorted(needed, numbers(r.queries)), len(needed), "queries"))
            for r in self.readouts
            if r.queries is not None
        )
        return replace(self.select(queries=axis), readouts=tuple(rebased))


def _held(rule: Mask | Bias | Readout) -> Iterator[Tensor]:
    """The tensors that a rule is made of."""
    for part in vars(rule).values():
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, Mask | Bias | Readout):
            yield from _held(part)


def _groups(heads: Axis, sizes: Sizes) -> Axis:
    """The key/value heads of some query heads: each once if whole groups were chosen, else one for each head."""
    shared = max(sizes.h // max(sizes.g, 1), 1)
    if isinstance(heads, Run) and heads.start % shared == 0 and heads.stop % shared == 0:
        return Run(heads.start // shared, heads.stop // shared)
    group = numbers(heads) // shared
    if isinstance(heads, Run) or not may_look(group):
        return group
    whole, counts = group.unique_consecutive(return_counts=True)
    is_whole = len(whole.unique()) == len(whole) and bool((counts == shared).all())
    return as_axis(whole, sizes.g, "groups") if is_whole else group


def _compose(outer: Axis, inner: Axis) -> Axis:
    if isinstance(outer, Run) and isinstance(inner, Run):
        return outer[inner.start : inner.stop]
    return numbers(outer)[numbers(inner)]


def per_query(bound: int | Tensor, i: int, j: int) -> Int[Tensor, "#b #h i"]:
    """A bound of a mask as numbers of keys, 0 to j."""
    if isinstance(bound, Tensor):
        bound = bound.clamp(0, j).view(1, 1, 1) if bound.ndim == 0 else bound.clamp(0, j).squeeze(-1)
        return bound if bound.shape[-1] == i else bound.expand(*bound.shape[:-1], i)
    return torch.full((1, 1, i), min(max(bound, 0), j))


def check_is_readout(readout: Any) -> None:
    if isinstance(readout, type) and issubclass(readout, Readout):
        raise TypeError(f"a readout must be an instance: write {readout.__name__}(…) instead of {readout.__name__}")
    if not isinstance(readout, Readout):
        raise TypeError(f"a readout must be one of einsight's, such as Entropy(), not {described(readout)}")


def check_readout(readout: Any, problem: Problem) -> Readout:
    """The readout made ready for the problem, or a refusal."""
    check_is_readout(readout)
    if readout.positional and not problem.is_placed:
        raise ValueError(offset_needed(f"the readout {readout!r}", problem.given))
    sizes = problem.sizes
    split = sizes.g == sizes.h and problem.given.g != problem.given.h
    if split and getattr(readout, "per_group", False):
        raise ValueError(f"{readout!r} needs whole groups of heads, but the heads selected split them")
    ready = readout.check(problem.given, sizes)
    if not torch.compiler.is_compiling():  # where sizes may be unknown
        shapes = ready.shapes(sizes if ready.queries is None else sizes._replace(i=count(ready.queries)))
        size = sum(map(math.prod, shapes)) * problem.dtype.itemsize
        check_fits(f"the result of {ready!r}", size, problem.device, _PARTS)
    return ready


_PARTS = (
    "Rows(queries) gives the queries that matter, TopK(k) each one's strongest keys, Pool(block) a picture of all, "
    "AttentionWeights(…) any part later"
)


def is_autocast(device_type: str) -> bool:
    """Whether autocast is at work on a kind of device."""
    # The first question is a tenth of the time of the others.
    return (
        torch._C._is_any_autocast_enabled()
        and device_type != "meta"
        and torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
    )
