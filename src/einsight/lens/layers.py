"""The layers of a model, named by their modules and numbered as they first run."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from einsight.lens import words
from einsight.lens.frames import Running


class Layers:
    """Names and numbers of the layers whose calls are seen; self- and cross-attention count apart."""

    def __init__(self, model: nn.Module):
        self.model = model
        # Of nested wrappers the innermost says a name last.
        self.names = {id(module): words.clean(name) for name, module in model.named_modules()}
        self.order: dict[bool, list[str]] = {False: [], True: []}
        self._forward: object = None
        self._counts: dict[str, int] = {}
        self._loops = False

    def known(self, running: list[Running]) -> list[Running]:
        """Those of the running modules that are the model's, outermost first."""
        return [module for module in running if id(module.module) in self.names]

    def begins(self, known: list[Running]) -> bool:
        """Whether another run of the model has begun since the last call."""
        forward = known[0].call if known else None
        if forward is not None and forward is self._forward:
            return False
        self._forward, self._counts, self._loops = forward, {}, False
        return True

    def name(self, known: list[Running]) -> str:
        """The name of the innermost module."""
        name = self.names[id(known[-1].module)] if known else ""
        return name or type(getattr(self.model, "_orig_mod", self.model)).__name__

    def number(self, name: str, cross: bool, goes_on: Callable[[str], object]) -> tuple[str, int]:
        """The layer that a call in a module belongs to, and its number.

        A module that is used again in one run is another layer each time, as in ALBERT, unless the call `goes_on`
        from one before: the model generates in its forward.
        """
        count = self._counts.get(name, 0)
        if count and (self._loops or not cross):
            for n in range(count):
                if goes_on(words.numbered(name, n)):
                    self._loops = True
                    return self._numbered(words.numbered(name, n), cross)
        self._counts[name] = count + 1
        return self._numbered(words.numbered(name, count), cross)

    def forget(self) -> None:
        """No run is going on any more: keep nothing of it alive."""
        self._forward = None

    def _numbered(self, name: str, cross: bool) -> tuple[str, int]:
        order = self.order[cross]
        if name not in order:
            order.append(name)
        return name, order.index(name)
