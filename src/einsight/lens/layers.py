"""The layers of a model, named by their modules and numbered as they first run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from einsight.coordinates import as_int
from einsight.lens import words
from einsight.lens.call import Call
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

    def name(self, call: Call, known: list[Running], given: str = "") -> str:
        """The name of the layer that makes a call: the one it was given, or that of the innermost module.

        The call learns whether the name is one of cross-attention.
        """
        name = given or (self.names[id(known[-1].module)] if known else "")
        name = name or type(getattr(self.model, "_orig_mod", self.model)).__name__
        call.cross = call.cross or words.says_cross(name)
        return name

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


def checked(layers: Any, seen: Layers) -> tuple[int | str, ...] | None:
    """Layers as a user chose them: numbers among the self-attention layers, or names of modules; None for all."""
    if layers is None:
        return None
    layers = as_int(layers)
    chosen = [layers] if isinstance(layers, int | str) else layers
    if not isinstance(chosen, Collection) or any(
        isinstance(n, bool) or not isinstance(n, int | str) for n in map(as_int, chosen)
    ):
        raise TypeError(f"layers must be numbers or names of modules, not {layers!r}")
    made = tuple(words.clean(n) if isinstance(n, str) else n for n in map(as_int, chosen))
    if not made:
        raise ValueError("layers names none, so that nothing would be edited; None, the default, is all of them")
    names = set(seen.names.values()) | {type(seen.model).__name__}
    for n in made:
        if isinstance(n, str) and n.split(" (")[0] not in names:
            raise KeyError(f"no module is named {n!r} in this {type(seen.model).__name__}")
    return made  # type: ignore[return-value]


def chosen(layers: tuple[int | str, ...], name: str, number: int, cross: bool) -> set[int | str]:
    """Those of the chosen layers that a layer is, or is in. Cross-attention is meant only by its own name."""
    return {
        layer
        for layer in layers
        if (layer == number and not cross)
        or (isinstance(layer, str) and (name == layer or (not cross and name.startswith(f"{layer}."))))
    }
