"""One attention problem: its tensors and settings, checked once, with errors a person can act on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from einsight.biases import Bias, as_bias
from einsight.coordinates import At, Axis, Sizes, along, as_axis, numbers, to_four
from einsight.masks import Mask
from einsight.masks.mask import check_offset, offset_needed, place
from einsight.readouts import Readout, changed

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
        return place(self.offset if isinstance(self.offset, int) else along(self.offset, 0, self.batch), self.queries)

    @property
    def first(self) -> int | None:
        """Where the first query stands, if that is one number and the others follow it one by one."""
        if isinstance(self.offset, int) and isinstance(self.queries, range):
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
            self.given, self.batch, self.heads, self.queries, range(self.sizes.j), self.positions, torch.device("cpu")
        )

    @property
    def here(self) -> At:
        """The coordinates of the whole problem, on its own device."""
        b, h, _, i, j, _, _ = self.sizes
        return self.whole if self.device.type == "cpu" else self.at(slice(b), slice(h), slice(i), range(j))

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
        if made.ndim > 4 or any(n not in (1, m) for n, m in zip(to_four(made).shape, scores.shape, strict=True)):
            raise ValueError(f"{expected}, but returned {made.dtype} {list(made.shape)}")
        return made.to(scores.dtype).expand(scores.shape)

    def at(self, batch: slice, heads: slice, queries: slice, keys: range) -> At:
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
            query, key = _pick(query, 0, batch), _pick(key, 0, batch)
            value = None if value is None else _pick(value, 0, batch)
            chosen["batch"] = _compose(self.batch, batch)
        if heads is not None:
            query = _pick(query, 1, heads)
            group = numbers(heads) // max(self.sizes.h // max(self.sizes.g, 1), 1)
            whole, counts = group.unique_consecutive(return_counts=True)
            is_whole = len(whole.unique()) == len(whole) and bool((counts == self.sizes.h // self.sizes.g).all())
            groups = as_axis(whole, self.sizes.g, "groups") if is_whole else group
            key = _pick(key, 1, groups)
            value = None if value is None else _pick(value, 1, groups)
            chosen["heads"] = _compose(self.heads, heads)
        if queries is not None:
            query = _pick(query, 2, queries)
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


def _pick(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """Like `along`, but here a size of 1 is one thing to choose, not all."""
    if isinstance(axis, range):
        return tensor.narrow(dim, axis.start, len(axis))
    return tensor.index_select(dim, axis.to(tensor.device))


def _compose(outer: Axis, inner: Axis) -> Axis:
    if isinstance(outer, range) and isinstance(inner, range):
        return outer[inner.start : inner.stop]
    return numbers(outer)[numbers(inner)]


def per_query(bound: int | Tensor, i: int, j: int) -> Int[Tensor, "#b #h i"]:
    """A bound of a mask as numbers of keys, 0 to j."""
    if isinstance(bound, Tensor):
        bound = bound.clamp(0, j).view(1, 1, 1) if bound.ndim == 0 else bound.clamp(0, j).squeeze(-1)
        return bound if bound.shape[-1] == i else bound.expand(*bound.shape[:-1], i)
    return torch.full((1, 1, i), min(max(bound, 0), j))


def pose(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    scale: Any = None,
    softcap: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    offset: Any = None,
    dropout: Any = 0.0,
    readouts: tuple[Any, ...] = (),
) -> Problem:
    """Check the arguments of an attention call and make a problem of them. `value=None` asks for no output."""
    query, key, value = autocast(query, key, value)
    given = _check_tensors(query, key, value)
    if mask is not None and not isinstance(mask, Mask):
        _refuse_mask(mask)
    bias = None if bias is None else as_bias(bias)
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function fn(score, b, h, p, j), not {score_mod!r}")
    problem = Problem(
        query,
        key,
        value,
        given,
        range(given.b),
        range(given.h),
        range(given.i),
        check_offset(offset, given, _positional(mask, bias, score_mod)),
        offset is not None or given.i == given.j,
        _number("scale", scale) if scale is not None else 1 / math.sqrt(given.d),
        mask,
        None if softcap is None else _softcap(softcap),
        score_mod,  # type: ignore[arg-type]
        bias,
        None if sink is None else _sink(sink, query, given),
        _dropout(dropout),
    )
    if mask is not None:
        mask.check(given)
    if bias is not None:
        for tensor in bias.tensors:
            if tensor.device != query.device:
                raise ValueError(f"bias is on {tensor.device} but query on {query.device}; write bias.to(query.device)")
        bias.check(given)
    return replace(problem, readouts=tuple(check_readout(r, problem) for r in readouts)) if readouts else problem


def check_is_readout(readout: Any) -> None:
    if isinstance(readout, type) and issubclass(readout, Readout):
        raise TypeError(f"a readout must be an instance: write {readout.__name__}(…) instead of {readout.__name__}")
    if not isinstance(readout, Readout):
        raise TypeError(f"a readout must be one of einsight's, such as Entropy(), not {readout!r}")


def check_readout(readout: Any, problem: Problem) -> Readout:
    """The readout made ready for the problem, or a refusal."""
    check_is_readout(readout)
    if readout.positional and not problem.is_placed:
        raise ValueError(offset_needed(f"the readout {readout!r}", problem.given))
    sizes = problem.sizes
    split = sizes.g == sizes.h and problem.given.g != problem.given.h
    if split and getattr(readout, "per_group", False):
        raise ValueError(f"{readout!r} needs whole groups of heads, but the heads selected split them")
    return readout.check(problem.given, sizes)


def _positional(mask: Mask | None, bias: Bias | None, score_mod: object) -> str | None:
    """What asks where the queries stand among the keys, if anything does."""
    if mask is not None and mask.positional:
        return "the mask"
    if bias is not None and bias.positional:
        return "the bias"
    return None if score_mod is None else "score_mod"


def is_autocast(device_type: str) -> bool:
    """Whether autocast is at work on a kind of device."""
    # The first question is a tenth of the time of the others.
    return (
        torch._C._is_any_autocast_enabled()
        and device_type != "meta"
        and torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
    )


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The operands as autocast would have them for scaled_dot_product_attention."""
    kind = next((t.device.type for t in tensors if isinstance(t, Tensor)), "meta")
    if not is_autocast(kind):
        return tensors
    narrow = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(narrow) if isinstance(t, Tensor) and t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t
        for t in tensors
    )


_LETTERS = {"query": "[b, h, i, d]", "key": "[b, g, j, d]", "value": "[b, g, j, e]"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_tensors(query: Any, key: Any, value: Any) -> Sizes:
    named = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor {_LETTERS[name]}, not {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided or (tensor.is_meta and tensor is query):
            kind = "nested" if tensor.is_nested else "on the meta device" if tensor.is_meta else "sparse"
            raise TypeError(f"{name} must be a dense tensor {_LETTERS[name]} that holds numbers, but it is {kind}")
        if tensor.ndim != 4:
            way = {
                3: f"; for one head write {name}.unsqueeze(1), for one batch item {name}.unsqueeze(0)",
                2: f"; for one head of one batch item write {name}[None, None]",
            }.get(tensor.ndim, "")
            raise ValueError(
                f"{name} must have four dimensions {_LETTERS[name]}, but has {tensor.ndim}: {list(tensor.shape)}{way}"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, not {tensor.dtype}; write {name}.float()"
            )
    for name, tensor in named.items():
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} but query is {query.dtype}; they must be alike: {name}.to(query.dtype)"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"{name} is on {tensor.device} but query on {query.device}; they must be alike: {name}.to(query.device)"
            )
    b, h, i, d = query.shape
    items, g, j, head_dim = key.shape
    if items != b:
        raise ValueError(f"key has {items} batch items but query has {b} ({_shapes(named)})")
    if head_dim != d:
        raise ValueError(f"key has head dimension {head_dim} but query has {d} ({_shapes(named)})")
    items, heads, positions, e = (b, g, j, 0) if value is None else value.shape
    if items != b:
        raise ValueError(f"value has {items} batch items but query has {b} ({_shapes(named)})")
    if heads != g:
        raise ValueError(f"value has {heads} heads but key has {g} ({_shapes(named)})")
    if positions != j:
        raise ValueError(f"value has {positions} key positions but key has {j} ({_shapes(named)})")
    if g != h and (g == 0 or h % g != 0):
        raise ValueError(f"query has {h} heads, which is not a multiple of key's {g} ({_shapes(named)})")
    if d == 0:
        raise ValueError(f"the head dimension of query and key is 0 ({_shapes(named)})")
    return Sizes(b, h, g, i, j, d, e)


def _shapes(named: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())


def _refuse_mask(mask: object) -> None:
    if not isinstance(mask, Tensor):
        way = "; for a rule of your own write es.where(fn)" if callable(mask) else ""
        raise TypeError(f"mask must be one of einsight's masks, such as es.causal(), not {mask!r}{way}")
    if mask.dtype.is_floating_point:
        raise TypeError(f"mask is a float tensor {list(mask.shape)}; what is added to the scores: pass it as bias=")
    what = "a boolean tensor" if mask.dtype == torch.bool else f"a tensor of {mask.dtype}"
    cast = "" if mask.dtype == torch.bool else ".bool()"
    raise TypeError(
        f"mask is {what} {list(mask.shape)}, which may mean either of two things: write mask=es.allow(mask{cast}) "
        f"if True is a key that may be seen, mask=es.forbid(mask{cast}) if True is one that may not"
    )


def _number(name: str, value: object) -> float:
    if not isinstance(value, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        way = "; multiply the query by it" if name == "scale" and isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a number, not {value!r}{way}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value!r}")
    return float(value)


def _softcap(softcap: object) -> float:
    softcap = _number("softcap", softcap)
    if softcap <= 0:
        raise ValueError(f"softcap must be positive, not {softcap!r}; for none leave it out")
    return softcap


def _dropout(dropout: object) -> float:
    dropout = _number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability in [0, 1), not {dropout!r}")
    return dropout


def _sink(sink: object, query: Tensor, given: Sizes) -> Float[Tensor, " h"]:
    if isinstance(sink, Real) and not isinstance(sink, bool):
        if not sink < math.inf:
            raise ValueError(f"sink must be a finite score (or −∞ for none), not {sink!r}")
        return torch.full((given.h,), float(sink), device=query.device)
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        what = f"a tensor of {sink.dtype}" if isinstance(sink, Tensor) else repr(sink)
        raise TypeError(f"sink must be a float tensor of one score per query head [h], or a number, not {what}")
    if sink.ndim == 0:  # one learned number for all heads
        sink = sink.expand(given.h)
    if sink.shape != (given.h,):
        raise ValueError(f"sink must have shape [h] = [{given.h}], one score per query head, not {list(sink.shape)}")
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device} but query on {query.device}; write sink.to(query.device)")
    return sink
