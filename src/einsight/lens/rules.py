"""Which keys a model's mask lets its queries see, found again as a rule.

Models hand over their masks as tensors, nearly always a causal mask, a window, padding, or these together. As a
rule it costs no [i, j] memory, tells where the queries stand among the keys, and joins over the steps of a
generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

import einsight as es


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


def joined(rules: list[tuple[Rule, int, int, int]], j: int) -> Rule | None:
    """One rule for calls that follow one another: (rule, queries, offset, keys it speaks of) of each.

    None where they don't make one.
    """
    plain = [rule for step in rules if (rule := _as_causal(*step)) is not None]
    lefts = {rule.left for rule in plain if rule.left is not None}
    if len(plain) < len(rules) or len(lefts) > 1:
        return None
    left = lefts.pop() if lefts else None
    steps = list(zip(plain, rules, strict=True))
    if any(left is not None and rule.left is None and offset + i - 1 > left for rule, (_, i, offset, _) in steps):
        return None
    hidden = [(rule.keep, keys) for rule, (_, _, _, keys) in steps if rule.keep is not None]
    if not hidden:
        return Rule(causal=True, left=left)
    like, keys = hidden[-1]
    keep = torch.ones(len(like), j, dtype=torch.bool, device=like.device)
    keep[:, keys - like.shape[-1] : keys] = like
    for rule, (_, _, offset, keys) in steps:
        width = keys if rule.keep is None else rule.keep.shape[-1]
        first = keys - width if left is None else max(keys - width, offset - left)
        part = keep[:, first:keys]
        told = torch.ones_like(part) if rule.keep is None else rule.keep[:, first - (keys - width) :]
        if not torch.equal(part, told.expand_as(part)):
            return None  # a key that one step hides and another doesn't is no padding
    return Rule(causal=True, left=left, keep=keep)


def _as_causal(rule: Rule, i: int, offset: int, keys: int) -> Rule | None:
    if rule.other is not None:
        return None
    if not rule.causal and i == 1 and offset == keys - 1:
        return replace(rule, causal=True)  # the last position sees everything: the same as up to itself
    return rule if rule.causal else None


def _unless_all(keep: Bool[Tensor, "b j"]) -> Bool[Tensor, "b j"] | None:
    return None if bool(keep.all()) else keep.clone()
