"""Running only the part of a model that an edit reaches: what ran before it is remembered from the clean run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from einsight.lens.call import Call
from einsight.lens.frames import Running
from einsight.lens.layers import Layers
from einsight.lens.watch import here


class Place(NamedTuple):
    """A self-attention layer as it ran: its name and number, its heads, and how many blocks had begun before it."""

    name: str
    number: int
    heads: int
    block: int
    shape: torch.Size


class Blocks:
    """The blocks of a model, the outermost modules in its lists, in the order in which they ran."""

    def __init__(self, model: nn.Module):
        self.model, self.blocks = model, _outermost(model)
        self.results: list[Any] = []  # of each block that ran
        self.places: list[Place] = []
        self.causal = True  # whether no query of them sees a later key
        self._seen = Layers(model)
        self._began = 0

    def clean(self, run: Callable[[], Any]) -> Any:
        """Run the model as it is, and remember what its blocks gave."""

        def block(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            self._began += 1
            result = forward(*args, **kwargs)
            self.results.append(tree_map_only(Tensor, torch.clone, result))
            return result

        watch = here()
        with self._through(block):
            watch.open(self, watch.lenses)
            try:
                output = run()
            finally:
                watch.close(self, watch.lenses)
                self._seen.forget()
        # A module that is used again is told from itself by how often it ran before: nothing may be left out.
        again = {place.name.split(" (")[0] for place in self.places if place.name.endswith(")")}
        self.places = [p._replace(block=0) if p.name.split(" (")[0] in again else p for p in self.places]
        return output

    def rest(self, run: Callable[[], Any], first: int, copies: int, b: int) -> Any:
        """Run the model from its `first` block on, for some copies of its inputs side by side."""
        ran = 0

        def block(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            nonlocal ran
            ran += 1
            if ran <= first:
                return repeated(self.results[ran - 1], copies, b)
            return forward(*args, **kwargs)

        with self._through(block):
            return run()

    @contextmanager
    def _through(self, block: Callable[..., Any]) -> Iterator[None]:
        """Let every block's forward go through a function."""
        own = [vars(module).get("forward") for module in self.blocks]
        for module in self.blocks:
            forward = module.forward
            module.forward = lambda *args, forward=forward, **kwargs: block(forward, args, kwargs)
        try:
            yield
        finally:
            for module, forward in zip(self.blocks, own, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    # What the watch tells.

    def _receive(self, call: Call, running: list[Running]) -> None:
        known = self._seen.known(running)
        if not known:
            return
        self._seen.begins(known)
        name, index = self._seen.number(self._seen.name(known), call.cross, lambda name: False)
        if not call.cross:
            self.causal = self.causal and call.rule.causal
            # The layer's own block has begun as well, if it is in one.
            inside = any(module.module in self.blocks for module in known)
            self.places.append(Place(name, index, call.query.shape[1], self._began - inside, call.query.shape))

    def _miss(self, reason: str, running: list[Running]) -> None:
        if self._seen.known(running):
            raise RuntimeError(f"effects can't be told of calls of attention {reason}")


def repeated(tree: Any, copies: int, b: int) -> Any:
    """Tensors over b sequences as over several copies of them, one copy after the other."""

    def repeat(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != b:
            return tensor.clone()
        return tensor.repeat(copies, *[1] * (tensor.ndim - 1))

    return tree_map_only(Tensor, repeat, tree)


def _outermost(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                if child not in found:
                    found.append(child)
            else:
                visit(child)

    visit(model)
    return found
