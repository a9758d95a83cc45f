"""The arguments of an attention call, checked and made a problem, with errors a person can act on."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.biases import Bias, as_bias
from einsight.coordinates import Run, Sizes
from einsight.masks import Mask
from einsight.masks.mask import check_offset
from einsight.problem import Problem, accuracy, check_readout, is_autocast
from einsight.values import check_dense, check_takes, described


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
    if score_mod is not None:
        check_takes("score_mod", score_mod, "score, b, h, p, j")
    problem = Problem(
        query,
        key,
        value,
        given,
        Run(0, given.b),
        Run(0, given.h),
        Run(0, given.i),
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


def _positional(mask: Mask | None, bias: Bias | None, score_mod: object) -> str | None:
    """What asks where the queries stand among the keys, if anything does."""
    if mask is not None and mask.positional:
        return "the mask"
    if bias is not None and bias.positional:
        return "the bias"
    return None if score_mod is None else "score_mod"


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
            raise TypeError(f"{name} must be a tensor {_LETTERS[name]}, not {described(tensor)}")
        check_dense(name, tensor, f" {_LETTERS[name]}")
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
                f"{name} must be float16, bfloat16, float32 or float64, not {tensor.dtype}"
                + ("" if tensor.dtype.is_complex else f"; write {name}.float()")
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
        raise ValueError(f"key has {items} batch items but query has {b} ({_shapes(named)}){_repeat('key', items, b)}")
    if head_dim != d:
        raise ValueError(f"key has head dimension {head_dim} but query has {d} ({_shapes(named)})")
    items, heads, positions, e = (b, g, j, 0) if value is None else value.shape
    if items != b:
        raise ValueError(
            f"value has {items} batch items but query has {b} ({_shapes(named)}){_repeat('value', items, b)}"
        )
    if heads != g:
        raise ValueError(f"value has {heads} heads but key has {g} ({_shapes(named)})")
    if positions != j:
        raise ValueError(f"value has {positions} key positions but key has {j} ({_shapes(named)})")
    if g != h and (g == 0 or h % g != 0):
        raise ValueError(f"query has {h} heads, which is not a multiple of key's {g} ({_shapes(named)})")
    if d == 0:
        raise ValueError(f"the head dimension of query and key is 0 ({_shapes(named)})")
    return Sizes(b, h, g, i, j, d, e)


def _repeat(name: str, items: int, b: int) -> str:
    if 1 not in (items, b):
        return ""
    name = name if items == 1 else "query"
    return f"; to use the one item for all write {name}.expand({max(items, b)}, -1, -1, -1)"


def _shapes(named: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())


def _refuse_mask(mask: object) -> None:
    if not isinstance(mask, Tensor):
        way = "; for a rule of your own write es.where(fn)" if callable(mask) else ""
        raise TypeError(f"mask must be one of einsight's masks, such as es.causal(), not {described(mask)}{way}")
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
        raise TypeError(f"{name} must be a number, not {described(value)}{way}")
    number = float(value)
    if not -math.inf < number < math.inf:  # torch.compile can't ask math.isfinite of a number it leaves open
        raise ValueError(f"{name} must be finite, not {value!r}")
    return number


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
        return torch.full((given.h,), float(sink), dtype=accuracy(query.dtype), device=query.device)
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        raise TypeError(
            f"sink must be a float tensor of one score per query head [h], or a number, not {described(sink)}"
        )
    check_dense("sink", sink)
    if sink.ndim == 0:  # one learned number for all heads
        sink = sink.expand(given.h)
    if sink.shape != (given.h,):
        raise ValueError(f"sink must have shape [h] = [{given.h}], one score per query head, not {list(sink.shape)}")
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device} but query on {query.device}; write sink.to(query.device)")
    return sink
