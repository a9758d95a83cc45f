"""One layer in one pass: its calls, joined along the queries as a generation adds them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import einsight as es
from einsight.lens.call import Call
from einsight.lens.rules import Rule, Steps, joined, plain, recognise, repeated
from einsight.lens.store import Store


class Piece(NamedTuple):
    """What calls that have one rule, and one bias, add."""

    steps: Steps
    bias: Any


class Match(NamedTuple):
    """How a call goes on from a pass: after how many keys of it.

    `rows` is the order that beams take first; `again`: it starts where an earlier call did, or before, so that it is
    another branch, and what is kept stays.
    """

    keys: int
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
    """The calls of one layer in one pass; the first query stands at `start` in the text."""

    def __init__(self, call: Call, start: int, keep_on: Any, store: Store):
        self.start, self.keep_on, self.store = start, keep_on, store
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
        self.last = start  # where the last call's first query stands
        self._call: Call | None = None

    def goes_on(self, call: Call) -> Match | None:
        """How a call goes on, if what it finds in its cache are the last of these keys."""
        before = self._before(call)
        if before and _equal(self._cached(call, before), self.key.get()[:, :1, self.key.length - before :]):
            return Match(self.key.length)
        return None

    def goes_back(self, call: Call) -> Match | None:
        """The same if they are earlier ones (the cache was cropped, or copied before), or in another order of beams."""
        before, stored = self._before(call), self.key.length
        if not before:
            return None
        old, kept = self._cached(call, before), self.key.get()[:, :1]
        alike = (kept[:, 0, before - 1 : stored - 1] == old[:, 0, -1:]).all(-1).all(0)
        for end in reversed((alike.nonzero().flatten() + before).tolist()):
            if end > self.start and _equal(old, kept[:, :, end - before : end]):
                return Match(end, again=end <= self.last)
        rows = reordered(old, kept[:, :, stored - before :])
        return None if rows is None else Match(stored, rows)

    def looks_on(self, call: Call) -> bool:
        """Whether a call of cross-attention looks at the same keys."""
        alike = call.query.shape[0] == self.query.buffer.shape[0] and call.key.shape[1] == self.key.buffer.shape[1]
        return alike and _equal(call.key, self.key.get().to(call.key.device))

    def go_on(self, call: Call, match: Match) -> Record:
        """The record with one more call: itself, or a copy of its beginning where the call starts before its end."""
        record = self if match.keys == self.start + self.query.length else self._until(match.keys)
        if match.rows is not None:
            record._reorder(match.rows)
        record._take(call, match.keys)
        return record

    def _before(self, call: Call) -> int:
        """How many keys a call finds in its cache, if they can be some of these."""
        if call.query.shape[0] != self.query.buffer.shape[0] or call.key.shape[1] != self.key.buffer.shape[1]:
            return 0
        before, steps = call.offset if isinstance(call.offset, int) else 0, self.pieces[-1].steps
        if isinstance(steps.offset, int) and steps.keys > steps.offset + steps.i:
            return 0  # keys behind its last query that are padding: nothing goes on from there
        return before if 1 <= before <= self.key.length else 0

    def _cached(self, call: Call, before: int) -> Tensor:
        return call.key[:, :1, :before].to(self.key.buffer.device)

    @property
    def call(self) -> Call:
        """All of it as one call."""
        if self._call is None:
            value = None if self.value is None else self.value.get()
            settings = dict(self.template.settings)
            first = self.pieces[0].steps
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
                _until=self._without_drafts,
            )
        return self._call

    def _without_drafts(self, count: int) -> Call | None:
        """The first `count` queries, if those after them can be a draft that the last call tried."""
        place = self.start + count
        is_draft = self.start < self.last < place < self.start + self.query.length  # which no first call is
        return self._until(place).call if is_draft else None

    def _take(self, call: Call, place: int) -> None:
        """Add a call whose first query stands at `place` in the text."""
        if self.template.cross:
            piece = _piece(call, call.offset, self.key.length, self.key.length)
        else:
            before = call.offset
            width, call = _written(call)
            piece = _piece(call, place, place + call.query.shape[2], width)
            new = slice(before, before + call.query.shape[2])
            self.key.append(call.key[:, :, new].to(self.key.buffer.device))
            if self.value is not None and call.value is not None:
                self.value.append(call.value[:, :, new].to(self.value.buffer.device))
        self.query.append(call.query.to(self.query.buffer.device))
        one = self._one(self.pieces[-1], piece)
        self.pieces[len(self.pieces) - (one is not None) :] = [piece if one is None else one]
        self.last = place
        self.template._results = call._results
        self._call = None

    def _one(self, first: Piece, then: Piece) -> Piece | None:
        """Two pieces as one, so that what a generation keeps grows with its tokens."""
        if isinstance(then.bias, Tensor) or not _alike(first.bias, then.bias):
            return None
        steps = self._joined(first.steps, then.steps)
        return None if steps is None else Piece(steps, first.bias)

    def _joined(self, first: Steps, then: Steps) -> Steps | None:
        return repeated(first, then) if self.template.cross else joined(plain(first), plain(then))

    def _rule(self) -> Rule:
        steps: Steps | None = self.pieces[0].steps
        for piece in self.pieces[1:]:
            steps = None if steps is None else self._joined(steps, piece.steps)
        if steps is not None:
            return steps.rule
        dense = [_seen(piece.steps) for piece in self.pieces]
        b, h = (max([1, *(d.shape[n] for d in dense if d is not None)]) for n in (0, 1))
        whole = torch.zeros(b, h, self.query.length, self.key.length, dtype=torch.bool)
        for part, there in zip(dense, self._places(whole), strict=True):
            there[:] = True if part is None else part
        return Rule(other=whole.to(self.key.buffer.device))

    def _bias(self) -> Any:
        first = self.pieces[0].bias
        if isinstance(first, es.Bias) and all(_alike(first, piece.bias) for piece in self.pieces):
            return first
        h = self.query.buffer.shape[1]
        biases = [_written_out(bias, s.i, s.width, s.offset - (s.keys - s.width), h) for s, bias in self.pieces]
        if all(bias is None for bias in biases):
            return None
        b, h = (max(bias.shape[n] for bias in biases if bias is not None) for n in (0, 1))
        like = next(bias for bias in biases if bias is not None)
        whole = like.new_zeros(b, h, self.query.length, self.key.length)
        for bias, there in zip(biases, self._places(whole), strict=True):
            if bias is not None:
                there[:] = bias
        return whole

    def _places(self, whole: Tensor) -> Iterator[Tensor]:
        """The part of a matrix that each piece speaks of."""
        row = 0
        for steps, _ in self.pieces:
            yield whole[:, :, row : row + steps.i, steps.keys - steps.width : steps.keys]
            row += steps.i

    def _until(self, place: int) -> Record:
        """The record as it was before there was a query at `place` in the text."""
        made, left = copy(self), place - self.start
        made._call = None
        made.query = self.query.until(left)
        if not self.template.cross:
            made.key = self.key.until(self.key.length - (self.query.length - left))
            made.value = None if self.value is None else self.value.until(made.key.length)
        made.pieces = []
        for piece in self.pieces:
            if left > 0:
                made.pieces.append(_shorter(piece, min(left, piece.steps.i), self.template.cross))
            left -= piece.steps.i
        return made

    def _reorder(self, rows: Tensor) -> None:
        self.query.reorder(rows)
        if not self.template.cross:  # whose items keep their keys
            self.key.reorder(rows)
            if self.value is not None:
                self.value.reorder(rows)
            self.pieces = [_in_order(piece, rows) for piece in self.pieces]

    def _own(self, tensor: Tensor) -> Tensor:
        # Always a copy: a cache may write into the model's own, and a view would keep all of what it looks into.
        moved = tensor if self.keep_on is None else tensor.to(self.keep_on)
        return self.store.keep(tensor) if moved is tensor else moved


def _piece(call: Call, offset: Any, keys: int, width: int) -> Piece:
    i, bias = call.query.shape[2], call.settings.get("bias")
    if isinstance(bias, es.Bias) and not _is_rule(bias):
        bias = _written_out(bias, i, width, call.offset, call.query.shape[1])
    rule = call.rule
    steps = Steps(rule, i, offset, keys, width)
    if call.cross and i == 1 and rule.causal and (seen := _seen(steps)) is not None:
        # The last key that isn't padding was taken for the query's own.
        steps = steps._replace(rule=Rule(keep=seen[:, 0, 0]))
    return Piece(steps, bias)


def _shorter(piece: Piece, i: int, cross: bool) -> Piece:
    """The first queries of a piece, and the keys that there were then."""
    steps, bias = piece
    gone = 0 if cross else steps.i - i
    if i == steps.i:
        return piece
    width, keep, other = steps.width - gone, steps.rule.keep, _seen(steps) if steps.rule.other is not None else None
    rule = replace(steps.rule, keep=None if keep is None else keep[:, :width])
    if other is not None:
        rule, _ = recognise(other[:, :, :i, :width], i, width)
    if isinstance(bias, Tensor):
        bias = bias[..., :i, :width]
    return Piece(Steps(rule, i, steps.offset, steps.keys - gone, width), bias)


def _in_order(piece: Piece, rows: Tensor) -> Piece:
    def ordered(tensor: Any) -> Any:
        is_each = isinstance(tensor, Tensor) and tensor.ndim > 1 and len(tensor) == len(rows)
        return tensor[rows.to(tensor.device)] if is_each else tensor

    rule = piece.steps.rule
    rule = replace(rule, keep=ordered(rule.keep), other=ordered(rule.other))
    return Piece(piece.steps._replace(rule=rule), ordered(piece.bias))


def _seen(steps: Steps) -> Tensor | None:
    """Which keys are visible, as a matrix; None if all are."""
    mask = steps.rule.mask()
    if mask is None:
        return None
    return _four(mask.dense(steps.i, steps.width, offset=steps.offset - (steps.keys - steps.width)))


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


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.ndim)]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and ((a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b))


def reordered(new: Tensor, old: Tensor) -> Tensor | None:
    """Which row of `old` each row of `new` is, as a beam search leaves them; None if some is none of them."""
    count = len(new)
    alike = (new[:, None, :, -1] == old[None, :, :, -1]).flatten(2).all(-1).tolist()
    same = [{m for m in range(count) if alike[n][m] and torch.equal(new[n], old[m])} for n in range(count)]
    # Rows may be alike that aren't the same: they stay in place, or else among the beams of one text, side by side.
    for size in (size for size in range(1, count + 1) if count % size == 0):
        near = [(n, *range(n // size * size, n // size * size + size)) for n in range(count)]
        rows = [next((m for m in near[n] if m in same[n]), None) for n in range(count)]
        if None not in rows:
            return torch.tensor(rows, device=old.device)
    return None
