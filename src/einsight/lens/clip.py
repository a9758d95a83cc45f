"""QK-clip: hold attention's scores down while a model trains."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from einsight.lens.monitor import Monitor
from einsight.nn import MultiHeadAttention


class _Projections(NamedTuple):
    """What makes a layer's queries and keys: weights and biases, a row for each dimension of each head."""

    query: tuple[Tensor, ...]
    key: tuple[Tensor, ...]
    head_dim: int


@torch.no_grad()
def qk_clip(model: nn.Module, monitor: Monitor, tau: float = 100.0, group: Any = None) -> dict[str, Tensor]:
    """Shrink the query and key projections of each head whose largest score exceeded τ, so that it would have been τ.

    For after each optimizer step. With γ = min(1, τ / largest score) of a head, its query and key weights are scaled
    by √γ each; where query heads share a key head, the query's alone by γ, as the rule has it for the part of the keys
    that heads share (QK-Clip; Kimi Team 2025, arXiv:2507.20534). Works in place, and waits for no device.

    Arguments:
        model: holds `einsight.nn.MultiHeadAttention`, `nn.MultiheadAttention`, or attention of Hugging Face's Llama
            family (`q_proj`, `k_proj`).
        monitor: a `Monitor` on it, after a step.
        tau: the largest score allowed.
        group: a process group over whose ranks the largest scores are taken.

    Returns:
        γ [h] by layer; 1 where nothing was changed. The numbers of a watched step are used once: called again before
        the monitor watches another one (`every` > 1), it changes nothing.

    Raises:
        ValueError: a layer has other projections, or norms or a softcap behind them, so that its scores don't follow
            its weights. Nothing is changed then.
        LookupError: the monitor saw no step.

    >>> import einsight as es, torch
    >>> from einsight.lens import Monitor, qk_clip
    >>> layer, x = es.nn.MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
    >>> layer.query.weight.data *= 1000
    >>> monitor = Monitor(layer)
    >>> with monitor:
    ...     _ = layer(x)
    >>> _ = qk_clip(layer, monitor)
    >>> with monitor:
    ...     _ = layer(x)
    >>> bool((monitor.max_score()["MultiHeadAttention"] <= 100.01).all())
    True
    """
    if not isinstance(model, nn.Module) or not isinstance(monitor, Monitor):
        raise TypeError(
            f"qk_clip takes the model and its Monitor, qk_clip(model, monitor), not {type(model).__name__} and "
            f"{type(monitor).__name__}"
        )
    if not isinstance(tau, int | float) or isinstance(tau, bool) or not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, the largest score allowed, not {tau!r}")
    ours = {id(module) for module in model.modules()}
    scores: dict[nn.Module, Tensor] = {}
    names: dict[nn.Module, str] = {}
    found = monitor.max_score(group)
    for name, layer in monitor._found().items():
        if id(layer.module) in ours:
            names.setdefault(layer.module, name)
            largest = found[name]
            before = scores.get(layer.module)  # a module may have run several times
            scores[layer.module] = largest if before is None else torch.maximum(before, largest)
    if not scores:
        raise ValueError("the monitor watches another model: qk_clip(model, Monitor(model))")
    told = [(module, _projections(module, names[module])) for module in scores]
    if capped := [name for name, layer in monitor._found().items() if layer.capped]:
        raise ValueError(f"{capped[0]!r} caps its scores by tanh: they stay below the cap without QK-clip")
    shrunk = {}
    used, monitor._used = monitor._used, True
    for module, projections in told:
        gamma = torch.where(scores[module] > tau, tau / scores[module], 1.0)
        if used:
            shrunk[names[module]] = torch.ones_like(gamma)
            continue
        h = len(gamma)
        shared = len(projections.key[0]) // projections.head_dim != h
        _scale(projections.query, gamma if shared else gamma.sqrt())
        if not shared:
            _scale(projections.key, gamma.sqrt())
        shrunk[names[module]] = gamma
    return shrunk


def _projections(module: nn.Module, name: str) -> _Projections:
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return _of_torch(module)
    names = ("query", "key") if isinstance(module, MultiHeadAttention) else ("q_proj", "k_proj")
    query, key, head_dim = (getattr(module, n, None) for n in (*names, "head_dim"))
    if not isinstance(query, nn.Linear) or not isinstance(key, nn.Linear) or not isinstance(head_dim, int):
        raise ValueError(
            f"{name!r} is of {kind}: qk_clip knows einsight.nn.MultiHeadAttention, nn.MultiheadAttention and Hugging "
            "Face's Llama family, whose attention has linear q_proj and k_proj and head_dim"
        )
    if any("norm" in child for child, _ in module.named_children()):
        raise ValueError(f"{name!r} is of {kind}, which norms queries and keys: its scores don't follow the weights")
    return _Projections(_rows(query.weight, query.bias), _rows(key.weight, key.bias), head_dim)


def _of_torch(module: nn.MultiheadAttention) -> _Projections:
    """PyTorch keeps the three projections in one tensor if they are alike, and their biases always."""
    m, bias = module.embed_dim, module.in_proj_bias
    if module.in_proj_weight is None:
        query, key = module.q_proj_weight, module.k_proj_weight
    else:
        query, key = module.in_proj_weight[:m], module.in_proj_weight[m : 2 * m]
    query_bias, key_bias = (None, None) if bias is None else (bias[:m], bias[m : 2 * m])
    return _Projections(_rows(query, query_bias), _rows(key, key_bias), module.head_dim)


def _rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    return (weight,) if bias is None else (weight, bias)


def _scale(weights: tuple[Tensor, ...], by: Float[Tensor, " h"]) -> None:
    for weight in weights:
        rows = by.to(weight.device, weight.dtype).repeat_interleave(len(weight) // len(by))
        weight.mul_(rows.view(-1, *[1] * (weight.ndim - 1)))
