"""The kernel's two operations, forward and backward, on tensors alone; for torch.compile each is one opaque op."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

try:
    kernel: Any = import_module("einsight.engines.native._native")
except ImportError:
    kernel = None


class Settings(NamedTuple):
    """What the scores and the softmax are made with. `softcap` 0 is none; in `received_from` 1 stands for the queries
    that count."""

    scale: float
    softcap: float
    sink: Float[Tensor, " h"] | None
    slopes: Float[Tensor, " h"] | None
    positions: Int[Tensor, "#b i"] | None
    lo: Int[Tensor, "#b #h i"]
    hi: Int[Tensor, "#b #h i"]
    received_from: Shaped[Tensor, " i"] | None


class Asked(NamedTuple):
    """Which results the kernel is to write."""

    lse: bool = False
    max_score: bool = False
    entropy: bool = False
    received: bool = False
    weights: bool = False
    scores: bool = False
    lse_rest: bool = False  # what rounding took from lse, which the gradients make the weights from


class Results(NamedTuple):
    """What the forward writes, or gradients of it. What wasn't asked is an empty tensor, what isn't there None."""

    output: Tensor | None  # [b, h, i, e]
    lse: Tensor | None  # [b, h, i]
    max_score: Tensor | None  # [b, h, i]
    entropy: Tensor | None  # [b, h, i]
    received: Tensor | None  # [b, h, j]
    weights: Tensor | None  # [b, h, i, j]
    scores: Tensor | None  # [b, h, i, j]
    lse_rest: Tensor | None  # [b, h, i]


class Gradients(NamedTuple):
    """What the backward writes, in float32; empty tensors for what isn't wanted."""

    query: Tensor  # [b, h, i, d]
    key: Tensor  # [b, g, j, d]
    value: Tensor  # [b, g, j, e]
    sink: Tensor  # [b, h, i]: each query's part
    slopes: Tensor  # [b, h, i]: each query's part


def forward(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    settings: Settings,
    asked: Asked,
) -> Results:
    """The output and the results asked for."""
    run = torch.ops.einsight.native_forward if torch.compiler.is_compiling() else _forward
    return Results(*run(query, key, value, *settings, *asked))


def backward(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    settings: Settings,
    found: Results,
    grads: Results,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients `wanted` of query, key, value, sink and slopes, from those of the results."""
    run = torch.ops.einsight.native_backward if torch.compiler.is_compiling() else _backward
    return Gradients(*run(query, key, value, *settings, *found[:4], found.lse_rest, *grads[:6], *wanted))


def _forward(
    query: Tensor, key: Tensor, value: Tensor | None, *rest: Any, threads: int | None = None, level: int = 0
) -> list[Tensor]:
    """`level` chooses among `kernel.levels`, the instruction sets of this processor, best first."""
    settings, asked = rest[:8], Asked(*rest[8:])
    results = _results(query, key, value, asked)
    given = [result if flag else None for result, flag in zip(results, (value is not None, *asked), strict=True)]
    kernel.forward(query, key, value, *settings, *given, threads or torch.get_num_threads(), level)
    return results


def _results(query: Tensor, key: Tensor, value: Tensor | None, asked: Asked) -> list[Tensor]:
    b, h, i, j = *query.shape[:3], key.shape[2]

    def make(blank: Any, asked: bool, *shape: int) -> Tensor:
        return blank(shape if asked else 0, dtype=torch.float32, device=query.device)

    return [
        query.new_empty(0 if value is None else (b, h, i, value.shape[3])),
        make(torch.empty, asked.lse, b, h, i),
        make(torch.empty, asked.max_score, b, h, i),
        make(torch.empty, asked.entropy, b, h, i),
        make(torch.zeros, asked.received, b, h, j),
        make(torch.empty, asked.weights, b, h, i, j),
        make(torch.empty, asked.scores, b, h, i, j),
        make(torch.empty, asked.lse_rest, b, h, i),
    ]


def _backward(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any, level: int = 0) -> list[Tensor]:
    settings, found, grads, wanted = rest[:8], rest[8:13], rest[13:19], rest[19:]
    made = _gradients(query, key, value, *wanted)
    lines = [gradient if gradient.numel() else None for gradient in made]
    lines[3:] = lines[4], lines[3]
    kernel.backward(query, key, value, *settings, *found, *grads, *lines, torch.get_num_threads(), level)
    return made


def _gradients(query: Tensor, key: Tensor, value: Tensor | None, *wanted: bool) -> list[Tensor]:
    of_value = key.new_empty(0) if value is None else value
    shapes = query.shape, key.shape, of_value.shape, query.shape[:3], query.shape[:3]
    return [
        torch.zeros(shape if want else (0,), dtype=torch.float32, device=query.device)
        for shape, want in zip(shapes, wanted, strict=True)
    ]


library = torch.library.Library("einsight", "FRAGMENT")
_PROBLEM = (
    "Tensor query, Tensor key, Tensor? value, float scale, float softcap, Tensor? sink, Tensor? slopes, "
    "Tensor? positions, Tensor lo, Tensor hi, Tensor? received_from"
)
library.define(
    f"native_forward({_PROBLEM}, bool lse, bool max_score, bool entropy, bool received, bool weights, bool scores, "
    "bool lse_rest) -> Tensor[]"
)
library.define(
    f"native_backward({_PROBLEM}, Tensor? output, Tensor lse, Tensor max_score, Tensor? entropy, Tensor lse_rest, "
    "Tensor? of_output, Tensor? of_lse, Tensor? of_max_score, Tensor? of_entropy, Tensor? of_received, "
    "Tensor? of_weights, bool query_wanted, bool key_wanted, bool value_wanted, "
    "bool sink_wanted, bool slopes_wanted) -> Tensor[]"
)
library.impl("native_forward", _forward, "CPU")
library.impl("native_backward", _backward, "CPU")


def _fake_forward(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    return _results(query, key, value, Asked(*rest[8:]))


def _fake_backward(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    return _gradients(query, key, value, *rest[19:])


torch.library.register_fake("einsight::native_forward", _fake_forward, lib=library)
torch.library.register_fake("einsight::native_backward", _fake_backward, lib=library)
