"""The kernel's two operations, forward and backward, on tensors alone; for torch.compile each is one opaque op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from einsight.coordinates import Sizes, is_int
from einsight.engines.asks import Ask, Kind, blank
from einsight.engines.rules import Rule
from einsight.problem import accuracy

try:
    kernel: Any = import_module("einsight.engines.native._native")
except ImportError:
    kernel = None


_level = 0


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Within it calls run on one of `kernel.levels`, the instruction sets of this processor; the first is the best."""
    global _level
    before, _level = _level, level
    try:
        yield
    finally:
        _level = before


def _kernel(query: Tensor) -> Any:
    return kernel.wide if query.dtype == torch.float64 else kernel


class Settings(NamedTuple):
    """What scores and weights are made with, and the readouts of weights. `softcap` 0 is none."""

    scale: float
    softcap: float
    sink: Float[Tensor, " h"] | None
    slopes: Float[Tensor, " h"] | None
    bias: Float[Tensor, "#b #h #i #j"] | None
    positions: Int[Tensor, "#b i"] | None
    rule: Rule
    asks: list[Ask]


class Asked(NamedTuple):
    """Which results beside the readouts of weights the kernel is to write."""

    lse: bool = False
    max_score: bool = False
    entropy: bool = False
    scores: bool = False
    lse_rest: bool = False  # what rounding took from lse, which the gradients make the weights from


class Results(NamedTuple):
    """What the forward writes, or gradients of it; None for what wasn't asked."""

    output: Tensor | None  # [b, h, i, e]
    lse: Tensor | None  # [b, h, i]
    max_score: Tensor | None  # [b, h, i]
    entropy: Tensor | None  # [b, h, i]
    scores: Tensor | None  # [b, h, i, j]
    lse_rest: Tensor | None  # [b, h, i]
    parts: list[Tensor | None]  # of each readout of weights in turn


class Gradients(NamedTuple):
    """What the backward writes, in float32 or float64; empty tensors for what isn't wanted."""

    query: Tensor  # [b, h, i, d]
    key: Tensor  # [b, g, j, d]
    value: Tensor  # [b, g, j, e]
    sink: Tensor  # [b, h, i]: each query's part
    slopes: Tensor  # [b, h, i]: each query's part
    bias: Tensor  # [#b, #h, i, j]


def forward(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    settings: Settings,
    asked: Asked,
) -> Results:
    """The output and the results asked for."""
    if _is_watched(query, key, value):
        made = torch.ops.einsight.native_forward(query, key, value, *settings[:6], *_flat(settings), *asked)
        found = [x if flag else None for x, flag in zip(made, (value is not None, *asked), strict=False)]
        parts = made[len(found) :]
    else:
        found, parts = _forward(query, key, value, settings, asked)
    output, lse, max_score, entropy, scores, lse_rest = found
    return Results(output, lse, max_score, entropy, scores, lse_rest, list(parts))


def backward(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    settings: Settings,
    found: Results,
    upper: Results,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients `wanted`, from the forward's results and the gradients of these; `upper.parts` holds one for each
    readout of weights, `found.parts` the keys of the strongest ones."""
    of_scores = found.output, found.lse, found.max_score, found.entropy, found.lse_rest
    given = *of_scores, *upper[:4], upper.parts, found.parts, *wanted
    if _is_watched(query, key, value):
        made = torch.ops.einsight.native_backward(query, key, value, *settings[:6], *_flat(settings), *given)
    else:
        made = _backward(query, key, value, settings, *given)
    return Gradients(*made)


_PLAIN = getattr(Tensor, "__torch_dispatch__", None)


def _is_watched(*operands: Tensor | None) -> bool:
    """Whether something between PyTorch and its kernels looks on: it has to see an operation, and its tensors may hold
    no numbers for a kernel to read."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    kinds = {type(x) for x in operands} - {Tensor, type(None)}
    return any(getattr(kind, "__torch_dispatch__", None) is not _PLAIN for kind in kinds)


def _flat(settings: Settings) -> tuple[list[int], list[Tensor | None]]:
    """The mask and the readouts as an operation takes them: numbers, and tensors that may be absent."""
    whole = [settings.rule, *(ask.rule for ask in settings.asks)]
    numbers: list[int] = []
    tensors: list[Tensor | None] = []
    for rule in whole:
        lo, hi, seen, shows, query_ids, key_ids = rule or Rule()
        for bound in (lo, hi):
            numbers += [int(is_int(bound)), bound if is_int(bound) else 0]
        numbers.append(int(shows))
        tensors += [bound if isinstance(bound, Tensor) else None for bound in (lo, hi)]
        tensors += [seen, query_ids, key_ids]
    for ask in settings.asks:
        numbers += [int(ask.kind), ask.rows, ask.number]
        tensors += [ask.slot, ask.member]
    return numbers, tensors


def _settings(*flat: Any) -> Settings:
    scale, softcap, sink, slopes, bias, positions, numbers, tensors = flat
    n = len(numbers) // 8  # five for each rule, the mask's first, and three for each readout
    rules = []
    for k in range(n + 1):
        is_lo, lo, is_hi, hi, shows = numbers[5 * k : 5 * k + 5]
        first, last, seen, query_ids, key_ids = tensors[5 * k : 5 * k + 5]
        rules.append(Rule(lo if is_lo else first, hi if is_hi else last, seen, bool(shows), query_ids, key_ids))
    numbers, tensors = numbers[5 * (n + 1) :], tensors[5 * (n + 1) :]
    asks = []
    for k in range(n):
        kind, rows, number = numbers[3 * k : 3 * k + 3]
        rule = rules[k + 1] if kind == Kind.SHARE else None
        asks.append(Ask(Kind(kind), rows, number, tensors[2 * k], rule, tensors[2 * k + 1]))  # type: ignore[arg-type]
    return Settings(scale, softcap, sink, slopes, bias, positions, rules[0], asks)


def _forward(
    query: Tensor, key: Tensor, value: Tensor | None, settings: Settings, asked: Asked
) -> tuple[list[Tensor | None], list[Tensor]]:
    own, parts = _results(query, key, value, asked, settings.asks)
    query, key = _in_pairs(query), _in_pairs(key)
    lines = [_line(ask, *part) for ask, part in zip(settings.asks, parts, strict=True)]
    _kernel(query).forward(query, key, value, *settings[:7], *own, lines, torch.get_num_threads(), _level)
    return own, [tensor for part in parts for tensor in part]


def _in_pairs(tensor: Float[Tensor, "b n i d"]) -> Float[Tensor, "b n i d"]:
    """Copied where bfloat16 numbers lie in memory so that two can't be read as one: else the kernel multiplies them one
    by one, and the bits of the results would depend on strides."""
    if tensor.dtype != torch.bfloat16 or tensor.shape[3] % 2:
        return tensor
    *apart, stride = tensor.stride()
    odd = any(step % 2 for step, n in zip(apart, tensor.shape, strict=False) if n > 1)
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        if stride != 1 or odd or tensor.storage_offset() % 2
        else tensor
    )


def _line(ask: Ask, result: Tensor | None, indices: Tensor | None = None) -> tuple[Any, ...]:
    return int(ask.kind), ask.number, ask.rows, ask.slot, ask.rule, ask.member, result, indices


def _results(
    query: Tensor, key: Tensor, value: Tensor | None, asked: Asked, asks: list[Ask]
) -> tuple[list[Tensor | None], list[list[Tensor]]]:
    b, h, i, d = query.shape
    g, j = key.shape[1:3]

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=accuracy(query.dtype), device=query.device)

    own = [
        # A token's heads lie side by side in memory, as what comes after attention wants them.
        None if value is None else query.new_empty(b, i, h, value.shape[3]).transpose(1, 2),
        make(b, h, i) if asked.lse else None,
        make(b, h, i) if asked.max_score else None,
        make(b, h, i) if asked.entropy else None,
        make(b, h, i, j) if asked.scores else None,
        make(b, h, i) if asked.lse_rest else None,
    ]
    return own, [blank(ask, Sizes(b, h, g, i, j, d, 0), accuracy(query.dtype)) for ask in asks]


def _backward(query: Tensor, key: Tensor, value: Tensor | None, settings: Settings, *rest: Any) -> list[Tensor]:
    found, upper, (upper_parts, indices), wanted = rest[:5], rest[5:9], rest[9:11], rest[11:]
    made = _gradients(query, key, value, settings.bias, *wanted)
    given = [gradient if gradient.numel() else None for gradient in made]
    query, key = _in_pairs(query), _in_pairs(key)
    lines = [_line(*line) for line in zip(settings.asks, upper_parts, indices, strict=True) if line[1] is not None]
    _kernel(query).backward(
        query, key, value, *settings[:7], *found, *upper, lines, *given, torch.get_num_threads(), _level
    )
    return made


def _gradients(query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, *wanted: bool) -> list[Tensor]:
    none = query.new_empty(0)
    shapes = [(none if t is None else t).shape for t in (query, key, value, query[..., 0], query[..., 0], bias)]
    return [
        torch.zeros(shape if want else (0,), dtype=accuracy(query.dtype), device=query.device)
        for shape, want in zip(shapes, wanted, strict=True)
    ]


def _with_blanks(found: list[Tensor | None], parts: list[Tensor], like: Tensor) -> list[Tensor]:
    """An operation returns tensors, and none of them twice."""
    return [*(like.new_empty(0) if x is None else x for x in found), *parts]


def _forward_operation(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    return _with_blanks(*_forward(query, key, value, _settings(*rest[:8]), Asked(*rest[8:])), query)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    own, parts = _results(query, key, value, Asked(*rest[8:]), _settings(*rest[:8]).asks)
    return _with_blanks(own, [tensor for part in parts for tensor in part], query)


def _backward_operation(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    return _backward(query, key, value, _settings(*rest[:8]), *rest[8:])


def _fake_backward(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> list[Tensor]:
    return _gradients(query, key, value, rest[4], *rest[19:])


library = torch.library.Library("einsight", "FRAGMENT")
_PROBLEM = (
    "Tensor query, Tensor key, Tensor? value, float scale, float softcap, Tensor? sink, Tensor? slopes, Tensor? bias, "
    "Tensor? positions, SymInt[] numbers, Tensor?[] tensors"
)
library.define(
    f"native_forward({_PROBLEM}, bool lse, bool max_score, bool entropy, bool scores, bool lse_rest) -> Tensor[]"
)
library.define(
    f"native_backward({_PROBLEM}, Tensor? output, Tensor lse, Tensor max_score, Tensor? entropy, Tensor lse_rest, "
    "Tensor? of_output, Tensor? of_lse, Tensor? of_max_score, Tensor? of_entropy, Tensor?[] of_parts, "
    "Tensor?[] indices, bool query_wanted, bool key_wanted, bool value_wanted, bool sink_wanted, bool slopes_wanted, "
    "bool bias_wanted) -> Tensor[]"
)
library.impl("native_forward", _forward_operation, "CPU")
library.impl("native_backward", _backward_operation, "CPU")
torch.library.register_fake("einsight::native_forward", _fake_forward, lib=library)
torch.library.register_fake("einsight::native_backward", _fake_backward, lib=library)
