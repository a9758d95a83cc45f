"""What a report can be made of: a lens, the weights of one layer, dense weights, Hugging Face's attentions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

import einsight as es
from einsight.coordinates import as_int, is_int
from einsight.lens import Call, Lens

# What models call the linear layer that heads write through.
_OUTPUTS = ("o_proj", "out_proj", "out", "c_proj", "dense", "wo", "o", "proj", "to_out.0", "output", "output.dense")

_EAGER = (
    'Hugging Face\'s models give their attentions only when they are loaded with attn_implementation="eager" and '
    "called with output_attentions=True; a Lens around the call sees them in any case"
)


@dataclass
class Layer:
    """A layer of attention, of one batch item. `weights` makes them when they are needed: [1, h, i, j]."""

    number: int
    name: str
    heads: int
    i: int
    j: int
    weights: Callable[[], es.AttentionWeights]
    value: Float[Tensor, "g j e"] | None = None
    matrix: Float[Tensor, "h m e"] | None = None
    stream: Float[Tensor, "i m"] | None = None
    keep: Bool[Tensor, " j"] | None = None  # the keys that the model's own mask tells from padding


@dataclass
class Part:
    """Layers with the same queries and keys."""

    i: int
    j: int
    cross: bool  # the keys are another text than the queries
    offset: int
    encoder: bool
    layers: list[Layer] = field(default_factory=list)


def parts(
    source: Any,
    *,
    one_text: Callable[[int, int], bool],
    item: int | None,
    hidden_states: Sequence[Tensor] | None,
) -> list[Part]:
    """The parts of whatever a report can be made of. A lens knows cross-attention by itself; of others `one_text` says
    whether that many queries and keys are of the same text."""
    if isinstance(source, Lens):
        return _of_lens(source, item, hidden_states)
    if isinstance(source, es.AttentionWeights):
        layers = [_narrowed(source, item)]
    elif isinstance(source, Tensor):
        layers = [_of_dense(source, "source", item)]
    elif isinstance(source, Sequence) and not isinstance(source, str):
        _check_given(source)
        if isinstance(source[0], Sequence):
            layers = _of_steps(source, item)
        else:
            layers = [_of_dense(tensor, f"attentions[{n}]", item) for n, tensor in enumerate(source)]
    else:
        hint = f": {_EAGER}" if source is None else ""
        raise TypeError(
            "source must be a Lens, an AttentionWeights, dense weights [b, h, i, j] or a tuple of them, as Hugging "
            f"Face's attentions; not {type(source).__name__}{hint}"
        )
    return _grouped(layers, one_text)


def _of_lens(lens: Lens, item: int | None, hidden_states: Sequence[Tensor] | None) -> list[Part]:
    calls = [*lens, *_cross(lens)]
    if not calls:
        lens[0]  # says what it saw, and what to do
    found: dict[Any, Part] = {}
    for call in calls:
        i, j = call.query.shape[2], call.key.shape[2]
        weights = call.weights  # a lens that kept only results says so here
        n = _item(len(call.query), item)
        encoder = not call.cross and "encoder" in call.name and "decoder" not in call.name
        offset = call.offset if isinstance(call.offset, int) else int(call.offset[n])
        part = found.setdefault((call.cross, encoder, i, j), Part(i, j, call.cross, offset, encoder))
        part.layers.append(_of_call(call, weights, n, lens.model))
    if hidden_states is not None:
        _streams(list(found.values()), hidden_states, len(lens), item)
    return list(found.values())


def _cross(lens: Lens) -> list[Call]:
    found = []
    for n in range(len(lens.cross)):
        try:
            found.append(lens.cross[n])
        except LookupError:
            continue  # a layer that was not chosen
    return found


def _of_call(call: Call, weights: es.AttentionWeights, n: int, model: nn.Module) -> Layer:
    value, matrix = None, None
    if call.value is not None:
        value = call.value[n]
        matrix = _output_matrix(call, model, weights.shape[1], value.shape[-1])
    _, h, i, j = weights.shape
    keep = call.rule.keep
    if keep is not None:
        keep = keep[min(n, len(keep) - 1)].cpu()
    return Layer(call.index, call.name, h, i, j, lambda: weights.select(batch=[n]), value, matrix, keep=keep)


def _output_matrix(call: Call, model: nn.Module, h: int, e: int) -> Float[Tensor, "h m e"] | None:
    """What each head's output goes through, where the module's names say it."""
    modules = dict(model.named_modules())
    name = re.sub(r" \(\d+\)$", "", call.name)
    around = [call.module, modules.get(name), modules.get(name.rpartition(".")[0])]
    for module in around:
        for path in _OUTPUTS:
            linear = module
            for step in path.split("."):
                linear = getattr(linear, "_modules", {}).get(step)
            weight = getattr(linear, "weight", None)
            if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.dtype.is_floating_point:
                continue
            if type(linear).__name__ == "Conv1D":  # GPT-2's, with the input first
                weight = weight.mT
            if weight.shape[1] == h * e:
                return weight.detach().unflatten(1, (h, e)).transpose(0, 1)
    return None


def _streams(parts: list[Part], hidden_states: Sequence[Tensor], count: int, item: int | None) -> None:
    """The residual stream that each layer of a decoder joins: what came into it."""
    fits = [part for part in parts if not part.cross and not part.encoder]
    shapes = {tuple(states.shape) if isinstance(states, Tensor) else None for states in hidden_states}
    shape = shapes.pop() if len(shapes) == 1 else None
    fits = [part for part in fits if shape is not None and len(shape) == 3 and shape[1] == part.i]
    if not fits or len(hidden_states) not in (count, count + 1):
        raise ValueError(
            "hidden_states must be a tensor [b, i, m] for each layer and one after the last, as "
            f"output_hidden_states=True gives them; there are {len(hidden_states)}, of shape "
            f"{None if shape is None else list(shape)}, and {count} self-attention layers with "
            f"{', '.join(f'i={part.i}' for part in parts if not part.cross)}"
        )
    for part in fits:
        for layer in part.layers:
            states = hidden_states[layer.number]
            layer.stream = states[_item(len(states), item)].detach()


def _narrowed(weights: es.AttentionWeights, item: int | None) -> Layer:
    n = _item(weights.shape[0], item)
    _, h, i, j = weights.shape
    return Layer(0, "", h, i, j, lambda: weights.select(batch=[n]))


def _check_given(attentions: Sequence[Any]) -> None:
    """A tuple of layers, or for each step of a generation one: none may be missing."""
    kind = type(attentions).__name__
    if not len(attentions):
        raise ValueError(f"source is an empty {kind}; expected a tensor [b, h, i, j] for each layer. {_EAGER}")
    for n, one in enumerate(attentions):
        if one is None:
            raise TypeError(f"attentions[{n}] must be weights [b, h, i, j], not None. {_EAGER}")
        if isinstance(one, Sequence) and (not len(one) or any(layer is None for layer in one)):
            what = "holds None" if len(one) else f"is an empty {type(one).__name__}"
            raise ValueError(f"attentions[{n}] {what}; expected a tensor [b, h, i, j] for each layer. {_EAGER}")


def _of_dense(tensor: Any, name: str, item: int | None) -> Layer:
    """Dense weights as an operator: with ln w for a bias, softmax gives w back."""
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point or not 2 <= tensor.ndim <= 4:
        what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be weights [b, h, i, j], [h, i, j] or [i, j], not {what}")
    dense = tensor.detach()[(None,) * (4 - tensor.ndim)]
    if 0 in dense.shape:
        raise ValueError(f"{name} is empty: {list(tensor.shape)}")
    n = _item(len(dense), item)
    _check_weights(dense[n], name)
    _, h, i, j = dense.shape

    def weights() -> es.AttentionWeights:
        chosen = dense[n : n + 1].float()
        # What no head looks at is taken for masked; another 0 is a weight too small for its dtype.
        masked = (chosen == 0).all(1, keepdim=True)
        bias = chosen.log().clamp(min=-1e4).masked_fill(masked, -torch.inf)
        nothing = chosen.new_zeros(1, h, 1, 1)
        keys = nothing.expand(1, h, j, 1)
        return es.AttentionWeights(nothing.expand(1, h, i, 1), keys, bias=bias)

    return Layer(0, "", h, i, j, weights)


def _check_weights(dense: Float[Tensor, "h i j"], name: str) -> None:
    least, most = (float(end) for end in dense.aminmax())
    if least != least:
        raise ValueError(f"{name} must hold weights, but holds NaN at {_where(dense.isnan())}")
    if least < 0:
        raise ValueError(
            f"{name} must hold weights, which are 0 or more, but holds {least:.3g} at {_where(dense == least)}. "
            "Scores before the softmax become weights by scores.softmax(-1)"
        )
    sums = dense.sum(-1, dtype=torch.float32)
    slack = 1e-3 if dense.dtype in (torch.float32, torch.float64) else 2e-2  # a sum of rounded weights
    if most == torch.inf or not bool(((sums - 1).abs() < slack).logical_or(sums == 0).all()):
        raise ValueError(
            f"{name} must hold weights: rows that sum to 1, or to 0 where nothing may be seen; the sums here go "
            f"from {float(sums.min()):.3g} to {float(sums.max()):.3g}. For weights after dropout or beside a sink, "
            "give the Lens or the AttentionWeights"
        )


def _where(found: Bool[Tensor, "h i j"]) -> str:
    head, query, key = found.nonzero()[0].tolist()
    return f"head {head}, query {query}, key {key}"


def _of_steps(steps: Sequence[Sequence[Tensor]], item: int | None) -> list[Layer]:
    """`generate`'s attentions, a tuple of layers for each step, joined along the queries."""
    for n, step in enumerate(steps):
        if not isinstance(step, Sequence) or len(step) != len(steps[0]):
            what = str(len(step)) if isinstance(step, Sequence) else type(step).__name__
            raise ValueError(f"attentions[{n}] must hold as many layers as attentions[0], {len(steps[0])}, not {what}")
        for layer, tensor in enumerate(step):
            if not isinstance(tensor, Tensor) or tensor.ndim != 4:
                what = str(list(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"attentions[{n}][{layer}] must be weights [b, h, i, j], not {what}")
    layers = []
    j = steps[-1][0].shape[-1]
    for n in range(len(steps[0])):
        rows = [torch.nn.functional.pad(step[n], (0, j - step[n].shape[-1])) for step in steps]
        layers.append(_of_dense(torch.cat(rows, 2), f"attentions[…][{n}]", item))
    return layers


def _grouped(layers: list[Layer], one_text: Callable[[int, int], bool]) -> list[Part]:
    found: dict[tuple[int, int], Part] = {}
    for n, layer in enumerate(layers):
        layer.number, i, j = n, layer.i, layer.j
        part = found.setdefault((i, j), Part(i, j, not one_text(i, j), max(j - i, 0), False))
        part.layers.append(layer)
    return list(found.values())


def _item(b: int, item: int | None) -> int:
    if item is None:
        if b > 1:
            raise ValueError(f"source holds {b} sequences: choose the one to report on with item=0 to {b - 1}")
        return 0
    chosen = as_int(item)
    if not is_int(chosen):
        raise TypeError(f"item must be the number of a sequence, not {item!r}")
    if not -b <= chosen < b:
        raise ValueError(f"item={chosen} is out of range: source holds {b} sequence{'s' * (b != 1)}")
    return chosen % b
