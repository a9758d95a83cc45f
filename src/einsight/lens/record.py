"""One layer in one pass: its calls, joined along the queries as a generation adds them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import einsight as es
from einsight.lens.call import Call
from einsight.lens.rules import Rule, joined, recognise
from einsight.lens.store import Store


class Piece(NamedTuple):
    """What one call adds: how many queries, standing where among all keys, under which rule about which keys."""

    rule: Rule
    i: int
    offset: Any  # among all keys of the pass
    keys: int  # how many keys there were then; the rule speaks of the last `width` of them
    width: int
    bias: Any


class Match(NamedTuple):
    """How a call goes on from what is kept: after how many keys, of which it brings how many along.

    `rows` is the order that beams take first; where the keys end before those kept do, `again` says that it starts
    where an earlier call did, or before: it is another branch, and what is kept stays.
    """

    keys: int
    before: int | None
    rows: Tensor | None = None
    again: bool = False


class Growing:
    """A tensor [b, n, i, d] that grows along i, with room to spare so that n steps copy it log n times."""

    def __init__(self, tensor: Tensor):
        self.buffer, self.length = tensor, tensor.shape[2]

    def get(self) -> Tensor:
        return self.buffer[:, :, : self.length]

    def append(self, more: Tensor) -> None:
        length = self.length + more.shape[2]
        if length > self.buffer.shape[2]:
            b, n, _, d = self.buffer.shape
            room = self.buffer.new_empty(b, n, max(length, self.length * 3 // 2), d)
            room[:, :, : self.length] = self.get()
            self.buffer = room
        self.buffer[:, :, self.length : length] = more
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        self.buffer = self.get()[rows]

    def until(self, length: int) -> Growing:
        """A copy of the beginning: who holds the whole may go on looking at it."""
        return Growing(self.buffer[:, :, :length].clone())


class Record:
    """The calls of one layer in one pass."""

    def __init__(self, call: Call, keep_on: Any, store: Store):
        self.keep_on, self.store = keep_on, store
        self.template = replace(call, value=None)
        if _may_be_static(call):
            width, call = _written(call)
        else:
            width = call.key.shape[2]
        self.query = Growing(self._own(call.query))
        self.key = Growing(self._own(call.key))
        self.value = None if call.value is None else Growing(self._own(call.value))
        self.template = replace(call, query=self.query.buffer, key=self.key.buffer, value=None)
        self.pieces = [_piece(call, call.offset, width, width)]
        self._call: Call | None = None

    def match(self, call: Call, in_generation: bool) -> Match | None:
        """Whether a call goes on from this record's calls, and how."""
        if call.query.shape[0] != self.query.buffer.shape[0] or call.key.shape[1] != self.key.buffer.shape[1]:
            return None
        stored = self.key.length
        if call.cross:
            same = in_generation and _equal(call.key, self.key.get().to(call.key.device))
            return Match(stored, None) if same else None
        before = call.offset if isinstance(call.offset, int) else 0
        if not 1 <= before <= stored:
            return None
        last = self.pieces[-1]
        if isinstance(last.offset, int) and last.keys > last.offset + last.i:
            return None  # keys behind its last query that are padding: nothing goes on from there
        old = call.key[:, :1, :before].to(self.key.buffer.device)
        kept = self.key.get()[:, :1]
        if _equal(old, kept[:, :, stored - before :]):
            return Match(stored, before)
        if before < stored and _equal(old, kept[:, :, :before]):  # the cache was cropped, or copied before
            start = self.pieces[0].offset
            return Match(before, before, again=before <= last.offset) if before > start else None
        rows = reordered(old, kept[:, :, stored - before :])
        return None if rows is None else Match(stored, before, rows)

    def go_on(self, call: Call, match: Match) -> Record:
        """The record with one more call: itself, or a copy of its beginning where the call starts before its end."""
        record = self if match.keys == self.key.length else self._until(match.keys)
        if match.rows is not None:
            for grown in record._grown():
                grown.reorder(match.rows)
        if match.before is None:
            record._take(call, call.offset, match.keys, match.keys, None)
        else:
            width, call = _written(call)
            record._take(call, match.keys, match.keys + call.query.shape[2], width, match.before)
        return record

    @property
    def call(self) -> Call:
        """All of it as one call."""
        if self._call is None:
            value = None if self.value is None else self.value.get()
            settings = dict(self.template.settings)
            first = self.pieces[0]
            rule, offset = first.rule, first.offset
            if len(self.pieces) > 1:
                rule, settings["bias"] = self._rule(), self._bias()
                if settings["bias"] is None:
                    del settings["bias"]
            self._call = replace(
                self.template,
                query=self.query.get(),
                key=self.key.get(),
                value=value,
                rule=rule,
                offset=offset,
                settings=settings,
            )
        return self._call

    def _take(self, call: Call, offset: Any, keys: int, width: int, before: int | None) -> None:
        self.query.append(call.query.to(self.query.buffer.device))
        if before is not None:
            new = slice(before, before + call.query.shape[2])
            self.key.append(call.key[:, :, new].to(self.key.buffer.device))
            if self.value is not None and call.value is not None:
                self.value.append(call.value[:, :, new].to(self.value.buffer.device))
        self.pieces.append(_piece(call, offset, keys, width))
        self.template._results = call._results
        self._call = None

    def _rule(self) -> Rule:
        if self.template.cross and all(piece.rule == Rule() for piece in self.pieces):
            return Rule()
        steps = [(_plain(piece), piece.i, piece.offset, piece.keys) for piece in self.pieces]
        if not self.template.cross and (rule := joined(steps, self.key.length)) is not None:
            return rule
        masks = [(piece.rule.mask(), piece) for piece in self.pieces]
        dense = [None if mask is None else _four(_dense(mask, piece)) for mask, piece in masks]
        b, h = (max([1, *(d.shape[n] for d in dense if d is not None)]) for n in (0, 1))
        whole = torch.zeros(b, h, self.query.length, self.key.length, dtype=torch.bool)
        row = 0
        for part, piece in zip(dense, self.pieces, strict=True):
            there = whole[:, :, row : row + piece.i, piece.keys - piece.width : piece.keys]
            there[:] = True if part is None else part
            row += piece.i
        return Rule(other=whole.to(self.key.buffer.device))

    def _bias(self) -> Any:
        first = self.pieces[0].bias
        if isinstance(first, es.Bias) and all(_alike(first, piece.bias) for piece in self.pieces):
            return first
        h = self.query.buffer.shape[1]
        biases = [_written_out(p.bias, p.i, p.width, p.offset - (p.keys - p.width), h) for p in self.pieces]
        if all(bias is None for bias in biases):
            return None
        b, h = (max(bias.shape[n] for bias in biases if bias is not None) for n in (0, 1))
        like = next(bias for bias in biases if bias is not None)
        whole = like.new_zeros(b, h, self.query.length, self.key.length)
        row = 0
        for bias, piece in zip(biases, self.pieces, strict=True):
            if bias is not None:
                whole[:, :, row : row + piece.i, piece.keys - piece.width : piece.keys] = bias
            row += piece.i
        return whole

    def _until(self, count: int) -> Record:
        """The record as it was when there were `count` keys."""
        made = copy(self)
        made.query = self.query.until(count - self.pieces[0].offset)
        made.key = self.key.until(count)
        made.value = None if self.value is None else self.value.until(count)
        made.pieces = [piece for piece in self.pieces if piece.offset < count]
        last = made.pieces[-1]
        if (gone := last.keys - count) > 0:
            mask = last.rule.mask()
            dense = (
                torch.ones(1, 1, last.i, last.width, dtype=torch.bool) if mask is None else _four(_dense(mask, last))
            )
            bias = last.bias[..., : last.i - gone, :-gone] if isinstance(last.bias, Tensor) else last.bias
            rule, _ = recognise(dense[:, :, : last.i - gone, :-gone], last.i - gone, last.width - gone)
            made.pieces[-1] = Piece(rule, last.i - gone, last.offset, count, last.width - gone, bias)
        return made

    def _grown(self) -> list[Growing]:
        return [grown for grown in (self.query, self.key, self.value) if grown is not None]

    def _own(self, tensor: Tensor) -> Tensor:
        # Always a copy: a cache may write into the model's own, and a view would keep all of what it looks into.
        moved = tensor if self.keep_on is None else tensor.to(self.keep_on)
        return self.store.keep(tensor) if moved is tensor else moved


def _piece(call: Call, offset: Any, keys: int, width: int) -> Piece:
    i, bias = call.query.shape[2], call.settings.get("bias")
    if isinstance(bias, es.Bias) and not _is_rule(bias):
        bias = _written_out(bias, i, width, call.offset, call.query.shape[1])
    return Piece(call.rule, i, offset, keys, width, bias)


def _is_rule(bias: es.Bias) -> bool:
    """Whether a bias speaks of positions alone, and so of all steps of a generation."""
    inner = [part for part in vars(bias).values() if isinstance(part, es.Bias)]
    return all(map(_is_rule, inner)) if inner else bias.positional


def _alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, es.Bias):
        return all(_alike(part, vars(b)[name]) for name, part in vars(a).items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def _written_out(bias: Any, i: int, j: int, offset: Any, h: int) -> Tensor | None:
    """A bias as a tensor [b, h, i, j]: the scores where there is nothing else."""
    if isinstance(bias, es.Bias):
        device = bias.tensors[0].device
        query, key = torch.zeros(1, h, i, 1, device=device), torch.zeros(1, h, j, 1, device=device)
        return es.AttentionWeights(query, key, bias=bias, offset=offset).scores()
    return None if bias is None else _four(bias)


def _may_be_static(call: Call) -> bool:
    """Whether what a first call hides behind its last query can be a static cache's room, not padding.

    The mask of a single query doesn't tell, but what wasn't written to yet is zero.
    """
    if call.query.shape[2] > 1 or not isinstance(call.offset, int):
        return True
    return not bool(call.key[:, :, call.offset + 1 :].any())


def _written(call: Call) -> tuple[int, Call]:
    """The call without the keys behind its last query that a static cache holds room for."""
    i, j = call.query.shape[2], call.key.shape[2]
    rule, settings = call.rule, call.settings
    if call.cross or not isinstance(call.offset, int) or not rule.causal or call.offset + i >= j:
        return j, call
    end = call.offset + i
    if rule.keep is not None:
        keep = rule.keep[:, :end]
        rule = replace(rule, keep=None if bool(keep.all()) else keep)
    bias = settings.get("bias")
    if isinstance(bias, Tensor) and bias.shape[-1] == j:
        settings = {**settings, "bias": bias[..., :end]}
    value = None if call.value is None else call.value[:, :, :end]
    return end, replace(call, key=call.key[:, :, :end], value=value, rule=rule, settings=settings)


def written(call: Call) -> Call:
    """The call without a static cache's room."""
    return _written(call)[1]


def _plain(piece: Piece) -> Rule:
    """A rule that was given as one of Einsight's masks, in the form that joins."""
    if not isinstance(piece.rule.other, es.Mask):
        return piece.rule
    return recognise(_four(_dense(piece.rule.other, piece)), piece.i, piece.width)[0]


def _dense(mask: es.Mask, piece: Piece) -> Tensor:
    return mask.dense(piece.i, piece.width, offset=piece.offset - (piece.keys - piece.width))


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.ndim)]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and ((a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b))


def reordered(new: Tensor, old: Tensor) -> Tensor | None:
    """Which row of `old` each row of `new` is, as a beam search leaves them; None if some is none of them."""
    rows = []
    for row in new:
        same = [n for n in range(len(old)) if torch.equal(row, old[n])]
        if not same:
            return None
        # Beams that are still equal: stay in place where possible.
        rows.append(len(rows) if len(rows) in same else same[0])
    return torch.tensor(rows, device=old.device)
