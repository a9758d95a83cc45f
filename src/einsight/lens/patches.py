"""Changes to a call's weights and outputs, for some of its heads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import einsight as es
from einsight.biases import Bias, as_bias
from einsight.coordinates import At, Run, Sizes
from einsight.lens.call import Call
from einsight.lens.changes import per_head
from einsight.lens.record import reordered, written
from einsight.lens.rules import Rule, of_mask
from einsight.masks.mask import Bound, Mask, larger

ALIKE = ("softcap", "score_mod")  # what heads of one call can't differ in


class _Only(Bias):
    """A bias for some of the heads."""

    def __init__(self, bias: Bias, heads: list[int]):
        self.bias, self.heads = bias, torch.tensor(heads)
        self.positional, self.tensors = bias.positional, bias.tensors

    def check(self, sizes: Sizes) -> None:
        self.bias.check(sizes)

    def block(self, at: At, dtype: torch.dtype) -> Float[Tensor, "#b #h #i #j"]:
        added = self.bias.block(at, dtype)
        return added.where(torch.isin(at.h, self.heads.to(at.device)), 0)


class _Later(Mask):
    """A mask over a whole text, for the keys that are left of it."""

    def __init__(self, mask: Mask, gone: int):
        self.mask, self.gone, self.positional = mask, gone, mask.positional

    def check(self, sizes: Sizes) -> None:
        self.mask.check(sizes._replace(j=sizes.j + self.gone))

    def extent(self) -> tuple[int, int]:
        return self.mask.extent()

    def bounds(self, at: At) -> tuple[Bound, Bound, bool]:
        lo, hi, exact = self.mask.bounds(self._in_text(at))
        return larger(lo - self.gone, 0), larger(hi - self.gone, 0), exact

    def allowed(self, at: At) -> Bool[Tensor, "#b #h #i #j"]:
        return self.mask.allowed(self._in_text(at))

    def _in_text(self, at: At) -> At:
        keys = Run(at.keys.start + self.gone, at.keys.stop + self.gone)
        sizes = at.sizes._replace(j=at.sizes.j + self.gone)
        return replace(at, sizes=sizes, keys=keys, positions=at.positions + self.gone)


def moved(key: Float[Tensor, "b 1 j d"], last: Float[Tensor, "b 1 n d"]) -> int | None:
    """How many of the last step's keys are no longer before this step's; None if these don't go on from them."""
    n, j = last.shape[2], key.shape[2]
    if j > n or key.shape[0] != last.shape[0] or key.device != last.device:
        return None
    # The rest was dropped by a window, before them, or cropped, behind them.
    ends = (last[:, 0, j - 1 :] == key[:, 0, -1:]).all(-1).all(0).nonzero().flatten().tolist()
    for first in reversed(ends):
        if torch.equal(key, last[:, :, first : first + j]):
            return first
    return next((k for k in (n - j, 0) if reordered(key, last[:, :, k : k + j]) is not None), None)


def hide(call: Call, mask: es.Mask, heads: list[int], gone: int | None = 0) -> Call:
    """The mask, which speaks of the text, joined to the call's own."""
    call = written(call)
    if gone is None:
        _refuse_unknown("mask", call)
    mask = _for(_Later(mask, gone) if gone else mask, heads, call)
    own = call.mask
    return replace(call, rule=Rule(other=mask if own is None else own & mask))


def steer(call: Call, bias: Bias | Tensor, heads: list[int], gone: int | None = 0) -> Call:
    """The bias, which speaks of the text, added to the scores."""
    call = written(call)
    if isinstance(bias, Tensor) and bias.ndim and bias.shape[-1] > 1:
        if gone is None:
            _refuse_unknown("bias", call)
        bias = bias[..., gone:]
    return replace(call, settings={**call.settings, "bias": _plus(call.settings.get("bias"), bias, heads, call)})


def patch(call: Call, clean: Call, heads: list[int]) -> Call:
    """Another run's weights over this run's values."""
    call = written(call)
    clean = rows(clean, call, "weights=")
    query, key, value = (_like(t, call.query) for t in (clean.query, clean.key, call.value))
    h = call.query.shape[1]
    if len(heads) == h:
        return replace(clean, query=query, key=key, value=value, name=call.name, cross=call.cross, dropout=call.dropout)
    for name in ALIKE:
        theirs, ours = clean.settings.get(name), call.settings.get(name)
        if theirs != ours:
            raise ValueError(f"weights= have {name}={theirs!r}, but layer {call.name!r} has {name}={ours!r}")
    if query.shape[-1] != call.query.shape[-1]:
        raise ValueError(
            f"weights= come from heads of {query.shape[-1]} dimensions, but layer {call.name!r} has "
            f"{call.query.shape[-1]}"
        )
    if _scale(clean) != _scale(call):
        query = query * (_scale(clean) / _scale(call))
    settings, others = dict(call.settings), [n for n in range(h) if n not in heads]
    theirs, ours = clean.settings.get("bias"), call.settings.get("bias")
    if theirs is not None or ours is not None:
        kept = None if ours is None else _plus(None, ours, others, call)
        settings["bias"] = kept if theirs is None else _plus(kept, theirs, heads, call)
    chosen = _chosen(heads, call)
    sinks = [_sink(one, h, call.query) for one in (clean, call)]
    if any(sink is not None for sink in sinks):
        nothing = call.query.new_full((h,), -torch.inf, dtype=torch.float32)
        settings["sink"] = torch.where(chosen.flatten(), *(nothing if sink is None else sink for sink in sinks))
    rule = call.rule
    if not _same(rule, clean.rule):
        parts = [(clean.mask, heads), (call.mask, others)]
        masks = [_for(mask, some, call) for mask, some in parts if mask is not None]
        rule = Rule(other=masks[0] & masks[1] if len(masks) == 2 else masks[0])
    return replace(
        call,
        query=torch.where(chosen, query, call.query),
        key=torch.where(chosen, per_head(key, h), per_head(call.key, h)),
        value=None if value is None else per_head(value, h),
        rule=rule,
        settings=settings,
    )


def rows(clean: Call, call: Call, what: str) -> Call:
    """The part of another run's call that is about the queries and keys of this one."""
    i, j, n, m = call.query.shape[2], call.key.shape[2], clean.query.shape[2], clean.key.shape[2]
    b = call.query.shape[0]
    if clean.query.shape[1] != call.query.shape[1]:
        raise ValueError(
            f"{what} come from {clean.query.shape[1]} heads, but layer {call.name!r} has {call.query.shape[1]}"
        )
    first = None
    if (i, j) == (n, m):
        first = 0
    elif not call.cross and isinstance(call.offset, int) and isinstance(clean.offset, int) and clean.rule.causal:
        first = call.offset - clean.offset
    if first is None or first < 0 or first + i > n or j > m or clean.query.shape[0] not in (1, b):
        raise ValueError(
            f"{what} come from a run of {clean.query.shape[0]} sequences, {n} queries and {m} keys, but layer "
            f"{call.name!r} has {b} sequences, {i} queries and {j} keys"
            + ("" if call.offset == 0 else f", from position {call.offset} on")
            + "; run both over inputs of the same length"
        )
    part, settings = slice(first, first + i), dict(clean.settings)
    bias = settings.get("bias")
    if isinstance(bias, Tensor):
        bias = bias[(None,) * (4 - bias.ndim)]
        settings["bias"] = (bias[:, :, part] if bias.shape[2] == n else bias)[..., :j]
    keep = clean.rule.keep
    rule = clean.rule if keep is None else replace(clean.rule, keep=keep[:, :j])
    value = None if clean.value is None else clean.value[:, :, :j].expand(b, -1, -1, -1)
    return replace(
        clean,
        query=clean.query[:, :, part].expand(b, -1, -1, -1),
        key=clean.key[:, :, :j].expand(b, -1, -1, -1),
        value=value,
        rule=rule,
        offset=call.offset,
        settings=settings,
    )


def output_of(clean: Call) -> Float[Tensor, "b h i e"]:
    """What another run's attention put out."""
    if clean.value is None:
        raise ValueError("output= of another run needs its values: Lens(model, values=True)")
    return clean.weights @ clean.value


def mean(output: Float[Tensor, "b h i e"], call: Call, across: bool) -> Float[Tensor, "#b h 1 e"]:
    """The mean over the positions that aren't padding; `across` the sequences as well."""
    keep = call.rule.keep
    i = output.shape[2]
    if keep is None or call.cross or keep.shape[-1] != i:
        real = output.new_ones(output.shape[0], 1, i, 1)
    else:
        real = keep[:, None, :, None].to(output.device, output.dtype).expand(output.shape[0], -1, -1, -1)
    dims = (0, 2) if across else (2,)
    # What stands at padding may be anything, also NaN.
    return (output.where(real > 0, 0)).sum(dims, keepdim=True) / real.sum(dims, keepdim=True).clamp(min=1)


def as_call(weights: es.AttentionWeights) -> Call:
    """Weights that a user made, as a call."""
    problem = weights._problem
    whole = (Run(0, problem.given.b), Run(0, problem.given.h), Run(0, problem.given.i))
    if (problem.batch, problem.heads, problem.queries) != whole:
        raise ValueError("weights= takes whole weights, not some selected of them: choose with heads= and layers=")
    positions = problem.positions[:, 0]
    offset = int(positions) if len(positions) == 1 else positions
    given = {n: getattr(problem, n) for n in ("scale", "softcap", "score_mod", "bias", "sink")}
    settings: dict[str, Any] = {name: setting for name, setting in given.items() if setting is not None}
    rule = of_mask(problem.mask, problem.sizes.i, problem.sizes.j, offset)
    return Call(problem.query, problem.key, None, rule, offset, settings)


def _chosen(heads: list[int], call: Call) -> Tensor:
    h = call.query.shape[1]
    return torch.isin(torch.arange(h), torch.tensor(heads)).view(1, h, 1, 1).to(call.query.device)


def _for(mask: es.Mask, heads: list[int], call: Call) -> es.Mask:
    return mask if len(heads) == call.query.shape[1] else mask | es.allow(~_chosen(heads, call))


def _plus(own: Any, bias: Any, heads: list[int], call: Call) -> Any:
    if not heads:
        return own
    if len(heads) < call.query.shape[1]:
        bias = _Only(as_bias(bias), heads)
    return bias if own is None else as_bias(own) + as_bias(bias)


def _scale(call: Call) -> float:
    scale = call.settings.get("scale")
    return 1 / math.sqrt(call.query.shape[-1]) if scale is None else scale


def _sink(call: Call, h: int, like: Tensor) -> Tensor | None:
    sink = call.settings.get("sink")
    return None if sink is None else torch.as_tensor(sink, device=like.device).float().expand(h)


def _like(tensor: Tensor | None, like: Tensor) -> Any:
    return None if tensor is None else tensor.to(like.device, like.dtype)


def _refuse_unknown(what: str, call: Call) -> NoReturn:
    raise ValueError(
        f"{what}= speaks of positions in the text, but layer {call.name!r} keeps only a window of {call._window} keys "
        "in its cache, and the edit was opened after it began, so that the position of these keys can't be known: open "
        "the edit before the prompt, or use a cache that keeps all keys"
    )


def _same(a: Rule, b: Rule) -> bool:
    if a.other is not None or b.other is not None or (a.keep is None) != (b.keep is None):
        return False
    keep = a.keep is None or b.keep is None or torch.equal(a.keep, b.keep)
    return a.causal == b.causal and a.left == b.left and keep
