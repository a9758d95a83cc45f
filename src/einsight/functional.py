"""The functions: attention, the textbook's function, and merge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from einsight.biases import Bias
from einsight.engines import choose
from einsight.masks import Mask, textbook
from einsight.pose import pose
from einsight.problem import ScoreMod
from einsight.readouts import Readout, Weights
from einsight.values import described, may_look

NO_VALUE = "value must be a tensor [b, g, j, e], not None; for readouts alone: AttentionWeights(query, key)"
Asked = Readout | Sequence[Readout] | dict[str, Readout]


def attention(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    bias: Bias | Float[Tensor, ...] | None = None,
    sink: Float[Tensor, " h"] | Float[Tensor, ""] | float | None = None,
    offset: int | Int[Tensor, " b"] | None = None,
    dropout: float = 0.0,
    readouts: Asked | None = None,
    engine: str = "auto",
    **unknown: Any,
) -> Any:
    """softmax(Q Kᵀ / √d) V, and whatever you want to know about the weights, in memory linear in the sequence.

    Order: scale → softcap → score_mod → + bias → mask → softmax (the sink in the denominator) → readouts →
    dropout → · V. (Vaswani et al. 2017, arXiv:1706.03762.)

    Arguments:
        query: [b, h, i, d]; float16, bfloat16, float32 or float64. Computed in float32, float64 in float64.
        key: [b, g, j, d]; query head n reads key head n // (h / g).
        value: [b, g, j, e].
        mask: which keys a query may see, such as `causal()`; None is all. A query that may see nothing gets
            output 0, weights 0, entropy 0, max score −∞ and lse −∞ (or the sink's). What a query may not see
            cannot change its results or gradients, not even NaN or ∞.
        scale: what scores are multiplied by; by default 1 / √d.
        softcap: c · tanh(scores / c) (Gemma 2, arXiv:2408.00118).
        score_mod: fn(score, b, h, p, j) → score, with index tensors that broadcast to the block of scores.
        bias: added to the scores: a float tensor that broadcasts to [b, h, i, j], `alibi(…)`, `relative(…)`.
            −∞ means masked.
        sink: a score per query head [h] (or one number) that takes part in the softmax and has no value
            (gpt-oss, arXiv:2508.10925).
        offset: where query 0 stands among the keys, an int or an int tensor [b]: query i has position
            p = i + offset. 0 if i = j; else it must be given where positions matter.
        dropout: the probability of dropping a weight; always applied. Readouts are of the weights before it.
        readouts: what to know of the weights: a readout, or a list, tuple or dict of them.
        engine: "auto", or one by name; see `plan`.

    Returns:
        The output [b, h, i, e] in the query's dtype; with `readouts`, (output, results), the results in the
        request's shape: a dict gives a dict, a list or tuple a tuple, one readout its result. float32 (float64
        for float64).

    Raises:
        TypeError, ValueError: naming the argument, what was expected, what came, and the way out.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> output, seen = es.attention(q, k, v, es.causal(), readouts={"entropy": es.Entropy(), "received": es.Received()})
    >>> seen["received"]
    tensor([[[2.0833, 1.0833, 0.5833, 0.2500]]])
    """
    refuse_unknown("attention", unknown, *_OPERANDS, "readouts", "engine")
    settings: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "score_mod": score_mod,
        "bias": bias,
        "sink": sink,
        "offset": offset,
        "dropout": dropout,
    }
    if has_torch_function((query, key, value)):  # somebody looks on, such as einsight.lens
        given = (query, key, value)
        return handle_torch_function(attention, given, *given, mask, readouts=readouts, engine=engine, **settings)
    if value is None:
        raise TypeError(NO_VALUE)
    asked, pack = unpack(() if readouts is None else readouts)
    problem = pose(query, key, value, mask, readouts=asked, **settings)
    output, results = choose.run(problem, engine)
    return output if readouts is None else (output, pack(results))


def scaled_dot_product_attention(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"],
    mask: Mask | Bool[Tensor, ...] | None = None,
    **unknown: Any,
) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i j"]]:
    """The textbook function: the output and the dense weights, True in the mask is masked out.

    Arguments:
        query: [b, h, i, d].
        key: [b, g, j, d]; query head n reads key head n // (h / g).
        value: [b, g, j, e].
        mask: boolean, broadcasts to [b, h, i, j], True = may not be seen; or one of our masks. None hides nothing.

    Returns:
        The output [b, h, i, e] in the query's dtype and the weights [b, h, i, j] in float32 (float64 for float64);
        differentiable through both. (Vaswani et al. 2017, arXiv:1706.03762.)

    Raises:
        TypeError, ValueError: PyTorch's other arguments, since its mask means the opposite, each with the call to
            write; a mask that isn't boolean; shapes that don't fit.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 3, 2)
    >>> mask = torch.triu(torch.ones(3, 3), diagonal=1).bool()
    >>> output, weights = es.scaled_dot_product_attention(q, k, v, mask=mask)
    >>> weights[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    refuse_arguments(
        "scaled_dot_product_attention",
        unknown,
        _OPERANDS,
        attn_mask="mask=, where True is masked out (mask=~attn_mask); a float mask is attention(…, bias=)",
        is_causal="mask=einsight.causal()",
        dropout_p="attention(…, dropout=…, readouts=Weights())",
        scale="attention(…, scale=…, readouts=Weights())",
        enable_gqa="nothing: heads are grouped as the shapes say",
    )
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        _warn_of_inversion(mask)
        mask = textbook(mask)
    elif isinstance(mask, Tensor):
        raise TypeError(
            f"mask must be a boolean tensor, True where masked out, not {mask.dtype}: write mask == 0 or mask != 0, "
            "whichever is masked out; a float mask to be added is attention(…, bias=mask, readouts=Weights())"
        )
    return attention(query, key, value, mask, readouts=Weights())


_OPERANDS = ("query", "key", "value", "mask")
SETTINGS = ("scale", "softcap", "score_mod", "bias", "sink", "offset", "dropout")


def refuse_unknown(function: str, given: dict[str, Any], *others: str) -> None:
    """Refuse what is no setting of `attention`; PyTorch's names with the way to say it here. `others` are what the
    function takes beside the settings."""
    refuse_arguments(
        function,
        {name: x for name, x in given.items() if name not in SETTINGS},
        (*others, *SETTINGS),
        attn_mask="mask=einsight.allow(attn_mask), or bias=attn_mask if it is a float mask",
        is_causal="mask=einsight.causal() (with offset=0 if there are fewer queries than keys)",
        dropout_p="dropout=",
        enable_gqa="nothing: heads are grouped as the shapes say",
    )


def refuse_arguments(function: str, unknown: dict[str, Any], known: tuple[str, ...], **ways: str) -> None:
    """Arguments of PyTorch's function, each with the way to say it here; of others the nearest that there is."""
    for name in unknown:
        if name not in ways:
            near = get_close_matches(name, known, 1)
            raise TypeError(
                f"{function} takes no {name}="
                + (f"; did you mean {near[0]}=?" if near else f"; its arguments are {', '.join(known)}")
            )
        raise TypeError(f"this is einsight's {function}, not PyTorch's: instead of {name}= write {ways[name]}")


def _warn_of_inversion(mask: Bool[Tensor, ...]) -> None:
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return
    square = mask.flatten(0, -3)[0] if mask.ndim > 2 and mask.numel() else mask
    if square.ndim == 2 and may_look(square) and bool(square.diagonal().all()) and not bool(square.triu(1).any()):
        warnings.warn(
            "mask hides each query's own key and shows the future: it looks like a tril mask in which True means "
            "may be seen. Here True means masked out; write mask=~mask, or mask=einsight.causal()",
            stacklevel=3,
        )


def unpack(readouts: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The readouts of a request in a row, and a function that gives their results the request's shape."""
    if isinstance(readouts, dict):
        names = list(readouts)
        return tuple(readouts.values()), lambda results: dict(zip(names, results, strict=True))
    if isinstance(readouts, Sequence) and not isinstance(readouts, str):
        return tuple(readouts), tuple
    return (readouts,), lambda results: results[0]


def merge(
    outputs: Sequence[Float[Tensor, "b h i e"]], lses: Sequence[Float[Tensor, "b h i"]]
) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i"]]:
    """Join results over disjoint sets of keys: the output and lse as if the keys had been one set.

    `outputs` [b, h, i, e] and `lses` [b, h, i] (`LogSumExp()`) are of the same queries; a sink must be in one
    of the parts only. A part in which a query sees nothing (lse −∞) doesn't touch it. Differentiable; the
    output has the parts' dtype. (Flash-decoding; Dao et al. 2023.)

    Raises:
        TypeError, ValueError: no parts, or parts of different shapes or dtypes.

    >>> import einsight as es, torch
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
    >>> parts = [es.attention(q, k[:, :, s], v[:, :, s], readouts=es.LogSumExp()) for s in (slice(2), slice(2, 6))]
    >>> output, lse = es.merge(*zip(*parts))
    >>> torch.allclose(output, es.attention(q, k, v), atol=1e-6)
    True
    """
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, Iterable) or (isinstance(parts, Tensor) and parts.ndim == 0):
            raise TypeError(f"merge's {name} must be a list of tensors, one for each part, not {described(parts)}")
    outputs, lses = list(outputs), list(lses)
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"merge takes as many outputs as lses, at least one; got {len(outputs)} and {len(lses)}")
    for n, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if not isinstance(output, Tensor) or not isinstance(lse, Tensor):
            what = output if not isinstance(output, Tensor) else lse
            raise TypeError(f"merge takes tensors, but of part {n} one is {described(what)}")
        if output.ndim != 4:
            way = "; a single tensor goes in as [output]" if output.ndim == 3 else ""
            raise ValueError(f"merge takes outputs [b, h, i, e], but that of part {n} is {list(output.shape)}{way}")
        if not output.dtype.is_floating_point or not lse.dtype.is_floating_point:
            raise TypeError(f"merge takes float tensors, but part {n} has output {output.dtype} and lse {lse.dtype}")
        if output.device != outputs[0].device or lse.device != outputs[0].device:
            raise ValueError(
                f"merge: part {n} has its output on {output.device} and its lse on {lse.device}, but the first output "
                f"is on {outputs[0].device}; they must be alike"
            )
        if output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            raise ValueError(
                f"merge: part {n} has output {list(output.shape)} and lse {list(lse.shape)}, but the first output "
                f"{list(outputs[0].shape)} asks for {list(outputs[0].shape)} and {list(outputs[0].shape[:-1])}"
            )
        if output.dtype != outputs[0].dtype or lse.dtype != lses[0].dtype:
            raise TypeError(
                f"merge: part {n} has output {output.dtype} and lse {lse.dtype}, but the first has "
                f"{outputs[0].dtype} and {lses[0].dtype}"
            )
    stacked = torch.stack(lses)
    largest = stacked.amax(0).detach()
    largest = largest.masked_fill(largest.isinf(), 0)
    parts = torch.exp(stacked - largest)
    total = parts.sum(0)
    nothing = total == 0
    share = parts / total.masked_fill(nothing, 1)
    # An output of a part without a share is selected away, not multiplied by 0.
    terms = ((s * o.to(s.dtype)).where(s != 0, 0) for s, o in zip(share.unsqueeze(-1), outputs, strict=True))
    lse = (largest + torch.log(total.masked_fill(nothing, 1))).masked_fill(nothing, -torch.inf)
    return sum(terms, torch.zeros_like(outputs[0], dtype=share.dtype)).to(outputs[0].dtype), lse
