"""Hugging Face's masks as Einsight's rules.

transformers tells a mask function how many queries and keys there are, where they stand, and a function of indices
that says who sees whom. The library's own functions are recognised by their code and become rules that are one
interval of keys per query; any other is kept, and asked for single pairs (`einsight.where`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

import einsight as es
from einsight.lens.huggingface.handed import HandedMask, hand


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> HandedMask | Tensor:
    """What transformers calls instead of its `eager_mask`: the same mask, as a rule.

    It never answers None: a model that gets no mask would have to guess from lengths where its queries stand.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    frame = Frame(batch_size, q_length, kv_length, int(q_offset), kv_offset, use_vmap)
    # transformers' default is causal.
    parts: list[Part] = [Window(None, 0) if mask_function is None else lower(mask_function, frame)]
    if attention_mask is not None:
        parts.append(Padding(_padding(attention_mask, frame)))
    like = torch.zeros((), dtype=dtype, device=device).expand(batch_size, 1, q_length, kv_length)
    return hand(like, _both(parts, frame), frame.offset)


@dataclass(frozen=True)
class Frame:
    """Where a mask stands: its query 0 has number `q_offset`, its key 0 number `kv_offset`, in the whole sequence."""

    b: int
    i: int
    j: int
    q_offset: int
    kv_offset: int
    use_vmap: bool = False

    @property
    def offset(self) -> int:
        """Where query 0 stands among the keys."""
        return self.q_offset - self.kv_offset

    def of_queries(self, values: Tensor) -> Tensor:
        """The values of this frame's queries, of values for the whole sequence [b, n]."""
        return values[:, self.q_offset : self.q_offset + self.i]

    def of_keys(self, values: Tensor) -> Tensor:
        return values[:, self.kv_offset : self.kv_offset + self.j]


# What a function of transformers' says. Windows and padding are kept apart until the end, so that what hides nothing
# can be left out: a token that is generated sees all of its cache, and needs no mask.


@dataclass(frozen=True)
class Everything:
    pass


@dataclass(frozen=True)
class Window:
    left: int | None
    right: int | None


@dataclass(frozen=True)
class Padding:
    keep: Bool[Tensor, "b j"]


@dataclass(frozen=True)
class Packed:
    """Documents: each query's and key's."""

    queries: Int[Tensor, "b i"]
    keys: Int[Tensor, "b j"]


@dataclass(frozen=True)
class WithinDocuments:
    """A rule about the positions inside documents, right only beside `Packed`."""

    inner: Part
    function: Callable[..., Tensor]


@dataclass(frozen=True)
class All:
    parts: tuple[Part, ...]


Part = Everything | Window | Padding | Packed | WithinDocuments | All | es.Mask


def lower(function: Callable[..., Tensor], frame: Frame) -> Part:
    """What a function of transformers' says, and if it isn't known, the function itself as a rule."""
    known = _known().get(getattr(function, "__code__", None))
    part = None if known is None else known(frame, **_captured(function))
    return _where(function, frame) if part is None else part


def _captured(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


@functools.cache
def _known() -> dict[Any, Callable[..., Part | None]]:
    """transformers' functions by their code: a closure made twice has one code object."""
    from transformers import masking_utils as hf

    ids = torch.zeros(1, 1, dtype=torch.int64)
    made = {
        "causal_mask_function": lambda f: f,
        "bidirectional_mask_function": lambda f: f,
        "sliding_window_overlay": lambda f: f(1),
        "sliding_window_bidirectional_overlay": lambda f: f(1),
        "chunked_overlay": lambda f: f(1, ids[0]),
        "blockwise_overlay": lambda f: f(ids),
        "padding_mask_function": lambda f: f(ids),
        "packed_sequence_mask_function": lambda f: f(ids),
        "remap_positions_for_packed_sequence": lambda f: f(hf.causal_mask_function, ids),
        "add_offsets_to_mask_function": lambda f: f(hf.causal_mask_function, 0, 0),
        "and_masks": lambda f: f(hf.causal_mask_function),
        "or_masks": lambda f: f(hf.causal_mask_function),
    }
    return {make(getattr(hf, name)).__code__: globals()[f"_{name}"] for name, make in made.items() if hasattr(hf, name)}


# Each takes the frame and what the function of this name captured; None if it isn't what it was when this was written.


def _causal_mask_function(frame: Frame) -> Part:
    return Window(None, 0)


def _bidirectional_mask_function(frame: Frame) -> Part:
    return Everything()


def _sliding_window_overlay(frame: Frame, sliding_window: int) -> Part:
    return Window(sliding_window - 1, None)


def _sliding_window_bidirectional_overlay(frame: Frame, sliding_window: int) -> Part:
    return Window(sliding_window, sliding_window)


def _chunked_overlay(frame: Frame, chunk_size: int, left_padding: Int[Tensor, " b"]) -> Part:
    def chunk(start: int, length: int) -> Int[Tensor, "b n"]:
        place = torch.arange(start, start + length, device=left_padding.device)
        return (place - left_padding[:, None]).div(chunk_size, rounding_mode="floor")

    return es.same(chunk(frame.q_offset, frame.i), chunk(frame.kv_offset, frame.j))


def _blockwise_overlay(frame: Frame, block_sequence_ids: Int[Tensor, "b n"]) -> Part | None:
    queries, keys = frame.of_queries(block_sequence_ids), frame.of_keys(block_sequence_ids)
    if queries.shape[1] != frame.i or keys.shape[1] != frame.j:
        return None
    # Negative is no block. Such queries get a number that no key has, and such keys one each: in pieces of one key
    # every block of keys is an interval.
    apart = -2 - torch.arange(frame.j, device=keys.device)
    return es.same(queries.masked_fill(queries < 0, -1), torch.where(keys < 0, apart, keys))


def _padding_mask_function(frame: Frame, padding_mask: Tensor) -> Part:
    return Padding(_padding(padding_mask, frame))


def _packed_sequence_mask_function(frame: Frame, packed_sequence_mask: Int[Tensor, "b n"]) -> Part | None:
    queries, keys = frame.of_queries(packed_sequence_mask), frame.of_keys(packed_sequence_mask)
    fits = queries.shape[1] == frame.i and keys.shape[1] == frame.j
    return Packed(queries, keys) if fits else None


def _remap_positions_for_packed_sequence(
    frame: Frame, mask_function: Callable[..., Tensor], position_ids: Tensor
) -> Part | None:
    inner = lower(mask_function, frame)
    # Within a document positions rise by one, so a rule about differences stays what it is.
    parts = inner.parts if isinstance(inner, All) else (inner,)
    if not all(isinstance(part, Window | Everything) for part in parts):
        return None

    def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_function(b, h, position_ids[b, q], position_ids[b, kv])

    return WithinDocuments(inner, function)


def _add_offsets_to_mask_function(
    frame: Frame, mask_function: Callable[..., Tensor], q_offset: int | Tensor, kv_offset: int
) -> Part | None:
    moved = replace(frame, q_offset=frame.q_offset + int(q_offset), kv_offset=frame.kv_offset + kv_offset)
    # A rule about positions would have to be moved back into this frame.
    return lower(mask_function, moved) if moved.offset == frame.offset else None


def _and_masks(frame: Frame, mask_functions: tuple[Callable[..., Tensor], ...]) -> Part:
    return All(tuple(lower(function, frame) for function in mask_functions))


def _or_masks(frame: Frame, mask_functions: tuple[Callable[..., Tensor], ...]) -> Part:
    rules = [_both([lower(function, frame)], frame) for function in mask_functions]
    hiding = [rule for rule in rules if rule is not None]
    return functools.reduce(operator.or_, hiding) if len(hiding) == len(rules) else Everything()


def _padding(mask: Tensor, frame: Frame) -> Bool[Tensor, "b j"]:
    """Which of the frame's keys are real; keys that the mask doesn't reach to (of a static cache) are not."""
    keep = frame.of_keys(mask.bool())
    missing = frame.j - keep.shape[1]
    return torch.nn.functional.pad(keep, (0, missing)) if missing else keep


def _where(function: Callable[..., Tensor], frame: Frame) -> es.Mask:
    """A function that isn't known. transformers asks it for head 0 alone; `use_vmap` says that it may want scalars."""
    start = frame.kv_offset

    def rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Bool[Tensor, "#b #h #i #j"]:
        head = torch.zeros_like(h[:, :1])
        if not frame.use_vmap:
            return function(b, head, p + start, j + start)
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        each = function
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, None, None, None)):
            each = torch.vmap(each, in_dims=dims, out_dims=0)
        with TransformGetItemToIndex():
            return each(b.flatten(), head.flatten()[0], p.flatten() + start, j.flatten() + start)[:, None]

    return es.where(rule)


def _both(parts: list[Part], frame: Frame) -> es.Mask | None:
    """One rule that says what all the parts say; None if it hides nothing."""
    flat = list(_flat(parts))
    packed = any(isinstance(part, Packed) for part in flat)
    found: list[Part] = []
    for part in flat:
        if isinstance(part, WithinDocuments):
            found += _flat([part.inner]) if packed else [_where(part.function, frame)]
        else:
            found.append(part)
    rules: list[es.Mask] = []
    window = _window([part for part in found if isinstance(part, Window)], frame)
    if window is not None:
        rules.append(es.causal() if window == (None, 0) else es.window(*window))
    # Keys after the last query, hidden by causality, may count as real.
    last = frame.j if window is None or window[1] is None else frame.offset + frame.i + window[1]
    for part in found:
        if isinstance(part, Padding) and not bool(part.keep[:, : max(last, 0)].all()):
            rules.append(es.padding(part.keep))
        elif isinstance(part, Packed):
            rules.append(es.documents(part.keys, part.queries))
        elif isinstance(part, es.Mask):
            rules.append(part)
    return functools.reduce(operator.and_, rules) if rules else None


def _flat(parts: Any) -> Any:
    for part in parts:
        if isinstance(part, All):
            yield from _flat(part.parts)
        else:
            yield part


def _window(windows: list[Window], frame: Frame) -> tuple[int | None, int | None] | None:
    """The narrowest of the windows; None if no query loses a key by it."""
    lefts = [w.left for w in windows if w.left is not None]
    rights = [w.right for w in windows if w.right is not None]
    left, right = min(lefts, default=None), min(rights, default=None)
    if left is not None and frame.offset + frame.i - 1 <= left:
        left = None
    if right is not None and frame.offset + right >= frame.j - 1:
        right = None
    return None if left is None and right is None else (left, right)
