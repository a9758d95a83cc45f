"""Which keys a model's mask lets its queries see, found again as a rule.

Models hand over their masks as tensors, nearly always a causal mask, a window, padding, or these together. As a
rule it costs no [i, j] memory, tells where the queries stand among the keys, and joins over the steps of a
generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

import einsight as es
from einsight.masks.positions import Padding, Window


@dataclass(frozen=True)
class Rule:
    """Keys are visible up to the query's position (`causal`), from `left` places before it, where `keep`.

    `other` is the mask itself where it is none of these.
    """

    causal: bool = False
    left: int | None = None
    keep: Bool[Tensor, "b j"] | None = None
    other: Bool[Tensor, ...] | es.Mask | None = None

    def mask(self) -> es.Mask | None:
        """The rule as one of Einsight's masks; None if everything is visible."""
        if self.other is not None:
            return es.allow(self.other) if isinstance(self.other, Tensor) else self.other
        parts = []
        if self.causal:
            parts.append(es.causal() if self.left is None else es.window(self.left, 0))
        if self.keep is not None:
            parts.append(es.padding(self.keep))
        return parts[0] & parts[1] if len(parts) == 2 else parts[0] if parts else None


def recognise(mask: Bool[Tensor, "#b #h #i #j"], i: int, j: int) -> tuple[Rule, int]:
    """The rule behind a boolean mask, True where a query may see a key, and where query 0 stands."""
    everywhere = max(j - i, 0)
    mask = once(mask)
    if mask.shape[1] != 1 or mask.shape[-1] != j or 0 in mask.shape:
        return Rule(other=mask), everywhere
    if mask.shape[2] == 1 and i > 1:
        return Rule(keep=_unless_all(mask[:, 0, 0])), everywhere
    seen = mask[:, 0].expand(-1, i, j)
    keep = seen.any(1)
    if torch.equal(seen, keep[:, None].expand_as(seen)) and i > 1:
        return Rule(keep=_unless_all(keep)), everywhere
    keys = torch.arange(j, dtype=torch.int32, device=mask.device)
    # The last query sees itself; padding can hide that from some batch items, not from all.
    last = torch.where(seen[:, -1], keys, -1).amax()
    offset = int(last) - (i - 1)
    if offset < 0:
        return Rule(other=mask), everywhere
    place = offset + torch.arange(i, dtype=torch.int32, device=mask.device)[:, None]
    first = torch.where(seen, keys, j).amin(-1)
    reach = int((place.squeeze(-1) - first).clamp(min=0).amax())
    # Padding may hide what lies further than the window: only keys that the first positions could see count.
    for left in (None, reach):
        rule = keys <= place if left is None else (keys <= place) & (keys >= place - left)
        # Keys no query's rule reaches (the unwritten end of a static cache) are hidden by causality alone.
        kept = keep | ~rule.any(0)
        if torch.equal(seen, rule & kept[:, None]):
            return Rule(causal=True, left=left, keep=_unless_all(kept)), offset
    return Rule(other=mask), offset


def once(mask: Shaped[Tensor, "b h i j"]) -> Shaped[Tensor, "b _ i j"]:
    """A mask without the copies for each head that `nn.MultiheadAttention` makes."""
    if mask.shape[1] > 1 and (mask.stride(1) == 0 or torch.equal(mask, mask[:, :1].expand_as(mask))):
        return mask[:, :1]
    return mask


def split(mask: Float[Tensor, ...]) -> tuple[Bool[Tensor, ...], Float[Tensor, ...] | None]:
    """An additive mask as what it hides (−∞ or the dtype's lowest number) and what it adds (None: nothing)."""
    visible = mask > torch.finfo(mask.dtype).min
    added = mask.masked_fill(~visible, 0)
    return visible, added if bool(added.any()) else None


class Steps(NamedTuple):
    """Queries that follow one another: how many, standing where among all keys, under which rule.

    There were `keys` keys then, and the rule speaks of the last `width` of them.
    """

    rule: Rule
    i: int
    offset: Any
    keys: int
    width: int


def of_mask(mask: es.Mask | None, i: int, j: int, offset: int | Tensor) -> Rule:
    """One of Einsight's masks, for i queries and j keys, as a rule."""
    causal, left, keep = False, None, None
    for factor in () if mask is None else mask.factors():
        if isinstance(factor, Padding):
            keep = factor.keep if keep is None else keep & factor.keep
            continue
        if not isinstance(factor, Window) or (factor.left is not None and factor.left < 0):
            return Rule(other=mask)
        # After a last query there are no keys to hide from it.
        upto_itself = factor.right == 0 or (factor.right is None and i == 1 and offset == j - 1)
        if not upto_itself:
            return Rule(other=mask)
        causal = True
        left = factor.left if left is None or factor.left is None else min(left, factor.left)
    return Rule(causal, left, None if keep is None else _unless_all(keep))


def joined(first: Steps, then: Steps) -> Steps | None:
    """Both under one rule that says what theirs say, if there is one: up to oneself, a window, padding."""
    a, b = _causal(first), _causal(then)
    if a is None or b is None or first.width < first.keys or first.keys != then.offset:
        return None
    place, start = then.offset, then.keys - then.width  # of the first query; of the keys that were brought along
    lefts = {rule.left for rule in (a, b) if rule.left is not None}
    left = lefts.pop() if lefts else _window(a, b, place, start)
    if lefts or any(rule.left is None and not _reaches(rule, left, steps) for rule, steps in ((a, first), (b, then))):
        return None
    seen = 0 if left is None else max(place - left, 0)  # the first key in the window of the first query
    if _shows(a.keep, seen, start):
        return None  # which isn't there any more
    seen = max(seen, start)
    if not _agree(_part(a.keep, seen, place), _part(b.keep, seen - start, place - start)):
        return None  # a key that one step hides and another doesn't is no padding
    keep, new = a.keep, _part(b.keep, place - start, then.width)
    if keep is not None or (new is not None and not bool(new.all())):
        like = next(part for part in (keep, new) if part is not None)
        parts = [
            like.new_ones(1, n) if part is None else part.to(like.device)
            for part, n in ((keep, first.keys), (new, then.i))
        ]
        keep = torch.cat([part.expand(max(map(len, parts)), -1) for part in parts], 1)
    return Steps(Rule(True, left, keep), first.i + then.i, first.offset, then.keys, then.keys)


def repeated(first: Steps, then: Steps) -> Steps | None:
    """The same for queries in cross-attention, which see the same keys at every step."""
    a, b = first.rule, then.rule
    if a.other is not None or b.other is not None or a.causal or b.causal or not _agree(a.keep, b.keep):
        return None
    return first._replace(i=first.i + then.i)


def plain(steps: Steps) -> Steps:
    """Steps under a mask of Einsight's that isn't one of the simple ones: perhaps it comes to the same."""
    mask = steps.rule.other
    if not isinstance(mask, es.Mask):
        return steps
    where = steps.i, steps.width, steps.offset - (steps.keys - steps.width)
    known = _PLAIN.setdefault(mask, {})
    if where not in known:
        i, j, offset = where
        dense = mask.dense(i, j, offset=offset)
        known[where] = recognise(dense[(None,) * (4 - dense.ndim)], i, j)[0]
    return steps._replace(rule=known[where])


# The layers of a model share a mask, and ask the same of it; what was found is forgotten with the mask.
_PLAIN: WeakKeyDictionary[es.Mask, dict[tuple[int, int, int], Rule]] = WeakKeyDictionary()


def _causal(steps: Steps) -> Rule | None:
    rule, is_last = steps.rule, steps.offset + steps.i == steps.keys
    if rule.other is not None or not is_last:
        return None
    if not rule.causal and steps.i == 1:
        return replace(rule, causal=True)  # the last position sees everything: the same as up to itself
    return rule if rule.causal else None


def _window(a: Rule, b: Rule, place: int, start: int) -> int | None:
    """How far back the query at `place` sees, where no rule says it.

    The mask of a single query doesn't tell a window from padding, but keys that were seen before have left it.
    """
    if start > 0:
        return place - start
    if b.keep is None:
        return None
    hidden = ~b.keep[:, :place]
    gone = (hidden if a.keep is None else hidden & a.keep).any(0).nonzero()
    return place - 1 - int(gone[-1]) if len(gone) else None


def _reaches(rule: Rule, left: int | None, steps: Steps) -> bool:
    """Whether a rule without a window says the same with one: what its last query would lose is hidden anyway."""
    return left is None or not _shows(rule.keep, 0, steps.width - 1 - left)


Keep = Tensor | None  # [b, n] which keys aren't padding; None: none is


def _shows(keep: Keep, start: int, stop: int) -> bool:
    """Whether some of these keys aren't padding."""
    return start < stop and (keep is None or bool(keep[:, start:stop].any()))


def _part(keep: Keep, start: int, stop: int) -> Keep:
    return None if keep is None else keep[:, start:stop]


def _agree(a: Keep, b: Keep) -> bool:
    if a is not None and b is not None:
        return torch.equal(*torch.broadcast_tensors(a, b.to(a.device)))
    given = b if a is None else a
    return given is None or bool(given.all())


def _unless_all(keep: Bool[Tensor, "b j"]) -> Bool[Tensor, "b j"] | None:
    return None if bool(keep.all()) else keep.clone()
