"""What the open edits do to one call of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

import einsight as es
from einsight.lens.call import Call
from einsight.lens.faces import dense
from einsight.lens.frames import Running

if TYPE_CHECKING:
    from einsight.lens.edit import Edit


@dataclass
class Change:
    """A call as it was given and with its weights edited, for which heads, and what is done to the output."""

    given: Call
    call: Call
    heads: list[int] = field(default_factory=list)
    outputs: list[Callable[[Call, Tensor], Tensor]] = field(default_factory=list)

    def attend(self, own: Float[Tensor, "b h i e"]) -> Float[Tensor, "b h i e"]:
        """The model's own output, with that of the edited weights for the heads that have them."""
        if not self.heads:
            return own
        call, heads = self.call, torch.tensor(self.heads, device=own.device)
        weights = es.AttentionWeights(
            call.query, call.key, call.mask, offset=call.offset, dropout=call.dropout, **call.settings
        )
        if call.value is None:
            raise RuntimeError(f"the layer {call.name!r} told no values to compute an edited output from")
        value = per_head(call.value, own.shape[1])[:, heads]
        made = (weights.select(heads=self.heads) @ value).to(own.dtype)
        return made if len(self.heads) == own.shape[1] else own.index_copy(1, heads, made)

    def weigh(self, weights: Float[Tensor, "b h i j"]) -> Float[Tensor, "b h i j"]:
        """The same for a model that computes its weights."""
        return dense(weights, self.call, self.heads) if self.heads else weights

    def finish(self, output: Float[Tensor, "b h i e"]) -> Float[Tensor, "b h i e"]:
        """The output, as the edits of outputs leave it."""
        for edit in self.outputs:
            output = edit(self.given, output)
        return output


def edited(call: Call, edits: list[Edit], running: list[Running], again: bool) -> Change | None:
    """What the edits make of a call; None if it isn't touched. `again`: it is recomputed for the backward."""
    change = Change(call, call)
    heads: set[int] = set()
    for edit in edits:
        site = edit._site(call, running, again)
        if site is None:
            continue
        change.call, reweighed = edit._reweigh(change.call, site)
        heads.update(reweighed)
        change.outputs += edit._outputs(site)
    change.heads = sorted(heads)
    return change if change.heads or change.outputs else None


def per_head(tensor: Float[Tensor, "b g j d"], h: int) -> Float[Tensor, "b h j d"]:
    """A key or value head for each of the query heads."""
    return tensor if tensor.shape[1] == h else tensor.repeat_interleave(h // tensor.shape[1], 1)
