"""Several edits side by side: each in sequences of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from einsight.lens import patches
from einsight.lens.call import Call
from einsight.lens.changes import per_head
from einsight.lens.edit import Edit, Site
from einsight.lens.frames import Running
from einsight.lens.watch import here


class Each:
    """Edits of outputs or patterns, the first in the first b sequences of a batch, the second in the next b, …"""

    def __init__(self, model: nn.Module, edits: list[Edit], b: int):
        self.model, self.edits, self.b, self._met = model, edits, b, False

    def __enter__(self) -> Each:
        watch = here()
        watch.open(self, watch.edits)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        watch = here()
        watch.close(self, watch.edits)
        if kind is None and not self._met:
            raise LookupError("nothing was edited: the layer did not run")

    # What the watch asks.

    def _site(self, call: Call, running: list[Running], again: bool) -> list[Site] | None:
        sites = [edit._site(call, running, again) for edit in self.edits]
        found = [site for site in sites if site is not None]
        self._met = self._met or bool(found)
        return found or None

    def _reweigh(self, call: Call, sites: list[Site]) -> tuple[Call, list[int]]:
        return call, []

    def _outputs(self, sites: list[Site]) -> list[Callable[[Call, Tensor], Tensor]]:
        def replaced(call: Call, own: Float[Tensor, "b h i e"]) -> Float[Tensor, "b h i e"]:
            parts = []
            for edit, site, one, output in zip(self.edits, sites, self._parts(call), own.split(self.b), strict=True):
                parts.append(self._patched(edit, site, one, output))
            return torch.cat(parts)

        return [replaced]

    def _refuse(self, reason: str, running: list[Running]) -> None:
        self.edits[0]._refuse(reason, running)

    def _patched(self, edit: Edit, site: Site, call: Call, own: Tensor) -> Tensor:
        if edit._weights is None:
            return edit._replaced(site, call, own)
        if call.value is None:
            raise ValueError(f"layer {site.name!r} tells no values: call nn.MultiheadAttention with need_weights=False")
        clean = patches.rows(edit._clean(edit._weights, site, "weights="), call, "weights=")
        value = per_head(call.value, own.shape[1])[:, site.heads].to(clean.query.dtype)
        heads = torch.tensor(site.heads, device=own.device)
        return own.index_copy(1, heads, (clean.weights.select(heads=site.heads) @ value).to(own.dtype))

    def _parts(self, call: Call) -> list[Call]:
        """The call in each edit's sequences. A mask that isn't padding has no say in an output."""
        parts = []
        for n in range(len(self.edits)):
            part = slice(n * self.b, (n + 1) * self.b)
            keep = call.rule.keep
            rule = call.rule if keep is None or len(keep) == 1 else replace(call.rule, keep=keep[part])
            query, key, value = (None if t is None else t[part] for t in (call.query, call.key, call.value))
            parts.append(replace(call, query=query, key=key, value=value, rule=rule))
        return parts
