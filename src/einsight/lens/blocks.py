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
    """A layer as it ran: its name and its number among those of its kind, and how many blocks had begun before it."""

    name: str
    number: int
    cross: bool
    block: int
    after: int  # how many had when it had run, and its own
    shape: torch.Size  # of the query
    keys: int
    causal: bool  # whether no query sees a later key

    @property
    def heads(self) -> int:
        return self.shape[1]


class _Reached(Exception):
    """The model has come as far as was asked."""


class Blocks:
    """The blocks of a model, the outermost modules in its lists, in the order in which they ran."""

    def __init__(self, model: nn.Module):
        self.model, self.blocks = model, _outermost(model)
        self.results: list[Any] = []  # of each block that ran
        self.reached: Any = None  # what the block that was watched was given
        self.places: list[Place] = []
        self._seen = Layers(model)
        self._began = 0

    def clean(self, run: Callable[[], Any]) -> Any:
        """Run the model as it is, and remember what its blocks gave."""

        def block(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def rest(
        self, run: Callable[[], Any], first: int, copies: int, b: int, watched: int = -1, stop: bool = False
    ) -> Any:
        """Run the model from its `first` block on, for some copies of its inputs side by side.

        What the block `watched` is given is kept as `reached`; with `stop` nothing is run after that.
        """
        ran, self.reached = 0, None

        def block(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal ran
            ran += 1
            if ran - 1 == watched:
                self.reached = tree_map_only(Tensor, torch.clone, (args, kwargs))
                if stop:
                    raise _Reached
            if ran <= first:
                return repeated(self.results[ran - 1], copies, b)
            return forward(*args, **kwargs)

        with self._through(block):
            try:
                return run()
            except _Reached:
                return None

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
        name = self._seen.name(call, known)
        name, index = self._seen.number(name, call.cross, lambda name: False)
        # The layer's own block has begun as well, if it is in one.
        inside = any(module.module in self.blocks for module in known)
        shape, j = call.query.shape, call.key.shape[2]
        first, causal = self._began - inside, call.rule.causal
        self.places.append(Place(name, index, call.cross, first, self._began, shape, j, causal))

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
