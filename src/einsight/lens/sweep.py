"""What follows from a change: a metric with each head, layer or edge edited in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import einsight as es
from einsight.coordinates import as_axis, numbers
from einsight.lens.blocks import Blocks, Place, repeated
from einsight.lens.edit import Edit
from einsight.lens.edits import Each
from einsight.lens.lens import Lens
from einsight.lens.table import Table

TOKENS = 2048  # how many go through the model at once

Metric = Callable[[Any], Tensor | float]


def effects(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    over: str = "heads",
    *,
    layers: Collection[int] | None = None,
    output: Any = None,
    weights: Lens | None = None,
    queries: Any = None,
    keys: Any = None,
    progress: bool = True,
) -> Table:
    """How much a metric changes when each head, layer or edge is changed in turn: a table with a row for each.

    Blocks before the change are not run again, and several changes go through the model side by side where that
    gives the same numbers (which is tried out; else one by one).

    Arguments:
        model: in eval mode. No gradients are computed.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments of the model.
        metric: a function of the model's output that gives one number, such as a logit difference or a loss.
        over: "heads": each head of each self-attention layer; "layers": all heads of each layer; "edges": each pair of
            a query and a key, which is hidden from it in all layers at once.
        layers: self-attention layers by number; all by default.
        output: what a head puts out instead, as for `Edit`; 0 by default.
        weights: a `Lens` on another run, under whose weights each head is put instead (for heads and layers).
        queries, keys: for edges, positions as an int, slice, range, list or int tensor: the last query and all keys by
            default. Keys that come after a query are left out if the model is causal.
        progress: show a bar on a terminal, if rich is installed.

    Returns:
        The table with columns `layer` and `head`, `layer`, or `query` and `key`; `change`, the metric's less that of
        the clean run; and `metric`. For heads `.grid("change")` is a tensor [layer, head].

    Raises:
        ValueError, TypeError: an argument isn't of these; the model is in training mode; the metric isn't a number.
        LookupError: no self-attention ran.

    >>> import torch
    >>> from einsight.lens import effects
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> table = effects(model, torch.randn(1, 5, 8), lambda output: output[0, -1, 0])
    >>> len(table), table.columns
    (6, ('layer', 'head', 'change', 'metric'))
    """
    if over not in ("heads", "layers", "edges"):
        raise ValueError(f'over must be "heads", "layers" or "edges", not {over!r}')
    if over == "edges" and (output is not None or weights is not None):
        raise ValueError('over="edges" hides keys: output= and weights= are for heads and layers')
    if over != "edges" and (queries is not None or keys is not None):
        raise ValueError(f'queries= and keys= choose edges: over="edges", not over={over!r}')
    if output is not None and weights is not None:
        raise ValueError("output= and weights= are two ways to change a head: give one of them")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if model.training:
        raise ValueError("model is in training mode, where dropout would be taken for effects: model.eval()")
    change = {"weights": weights} if weights is not None else {"output": 0 if output is None else output}
    with torch.no_grad():
        run = _Run(model, inputs, metric)
        places = _chosen(run.blocks.places, layers)
        if over == "edges":
            return run.edges(
                places, -1 if queries is None else queries, slice(None) if keys is None else keys, progress
            )
        return run.heads(places, change, progress) if over == "heads" else run.layers(places, change, progress)


class _Run:
    """The clean run, and runs that differ in something."""

    def __init__(self, model: nn.Module, inputs: Any, metric: Metric):
        self.model, self.inputs, self.metric = model, inputs, metric
        self.blocks = Blocks(model)
        self.output = self.blocks.clean(lambda: self._call(1))
        if not self.blocks.places:
            raise LookupError("no self-attention ran that could be changed; see what Lens(model) says of it")
        self.base = self._measured(self.output)
        self.b = self.blocks.places[0].shape[0]

    def heads(self, places: list[Place], change: dict[str, Any], progress: bool) -> Table:
        columns: dict[str, list] = {"layer": [], "head": [], "change": [], "metric": []}
        tried = self._together(places[-1], change)
        for place in _shown(places, progress):
            heads = list(range(place.heads))
            columns["layer"] += [place.number] * place.heads
            columns["head"] += heads
            of_this = tried if place is places[-1] else None
            columns["metric"] += of_this or self._of_heads(place, change, heads, tried is not None)
        return self._table(columns)

    def layers(self, places: list[Place], change: dict[str, Any], progress: bool) -> Table:
        columns: dict[str, list] = {"layer": [], "change": [], "metric": []}
        for place in _shown(places, progress):
            columns["layer"].append(place.number)
            columns["metric"].append(self._one(place.block, Edit(self.model, layers=place.name, **change)))
        return self._table(columns)

    def edges(self, places: list[Place], queries: Any, keys: Any, progress: bool) -> Table:
        i = places[0].shape[2]
        if any(place.shape[2] != i for place in places):
            raise ValueError(
                f"edges are between the same tokens in all layers, but layers have "
                f"{sorted({place.shape[2] for place in places})} queries: choose with layers="
            )
        pairs = [
            (query, key)
            for query in numbers(as_axis(queries, i, "queries")).tolist()
            for key in numbers(as_axis(keys, i, "keys")).tolist()
            if key <= query or not self.blocks.causal
        ]
        names, first = [place.name for place in places], min(place.block for place in places)
        columns: dict[str, list] = {"query": [q for q, _ in pairs], "key": [k for _, k in pairs]}
        columns |= {"change": [], "metric": []}
        size = self._copies(i) if self._splits() else 1
        for chunk in _shown([pairs[n : n + size] for n in range(0, len(pairs), size)], progress):
            hidden = torch.zeros(len(chunk), 1, i, i, dtype=torch.bool)
            for n, (query, key) in enumerate(chunk):
                hidden[n, 0, query, key] = True
            mask = es.forbid(hidden.repeat_interleave(self.b, 0).to(self._device()))
            edit = Edit(self.model, layers=names, mask=mask)
            columns["metric"] += self._several(first, edit, len(chunk))
        return self._table(columns)

    def _of_heads(self, place: Place, change: dict[str, Any], heads: list[int], together: bool) -> list[float]:
        edits = [Edit(self.model, layers=place.name, heads=head, **change) for head in heads]
        if not together:
            return [self._one(place.block, edit) for edit in edits]
        size, found = self._copies(place.shape[2]), []
        for n in range(0, len(edits), size):
            found += self._several(place.block, Each(self.model, edits[n : n + size], self.b), len(edits[n : n + size]))
        return found

    def _together(self, place: Place, change: dict[str, Any]) -> list[float] | None:
        """A layer's metrics from copies side by side, if a single run gives the same."""
        if not self._splits() or place.heads < 2:
            return None
        found = self._of_heads(place, change, list(range(place.heads)), True)
        largest = max(range(place.heads), key=lambda n: abs(found[n] - self.base))
        alone = self._of_heads(place, change, [largest], False)[0]
        # Far more than rounding and far less than what a metric over the whole batch, such as a loss, is off.
        allowed = 1e-2 * abs(alone - self.base) + 1e-5 * max(1, abs(self.base))
        return found if abs(found[largest] - alone) <= allowed else None

    def _splits(self) -> bool:
        """Whether inputs and output are over sequences, as far as can be seen."""
        inputs = tree_flatten(self.inputs)[0]
        plain = all(t is None or isinstance(t, Tensor | int | float | str) for t in inputs)
        outputs = [t for t in tree_flatten(self.output)[0] if isinstance(t, Tensor)]
        return plain and bool(outputs) and all(t.ndim > 0 and len(t) == self.b for t in outputs)

    def _copies(self, i: int) -> int:
        return max(1, TOKENS // (self.b * i))

    def _one(self, first: int, edit: Edit) -> float:
        with edit:
            return self._measured(self.blocks.rest(lambda: self._call(1), first, 1, self.b))

    def _several(self, first: int, edit: Any, copies: int) -> list[float]:
        with edit:
            output = self.blocks.rest(lambda: self._call(copies), first, copies, self.b)
        leaves, form = tree_flatten(output)
        return [self._measured(tree_unflatten([self._part(t, n) for t in leaves], form)) for n in range(copies)]

    def _part(self, leaf: Any, n: int) -> Any:
        return leaf[n * self.b : (n + 1) * self.b] if isinstance(leaf, Tensor) else None

    def _call(self, copies: int) -> Any:
        given = self.inputs
        if copies > 1:
            given = repeated(given, copies, self.b)
        # A cache among the inputs would remember the last run.
        given = tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf), given)
        if isinstance(given, Mapping):
            return self.model(**given)
        return self.model(*given) if isinstance(given, tuple | list) else self.model(given)

    def _measured(self, output: Any) -> float:
        found = self.metric(output)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise ValueError(f"metric must give one number, not a tensor {list(found.shape)}: take its mean or sum")
        if not isinstance(found, Tensor | float | int):
            raise TypeError(f"metric must give a number, not {found!r}")
        return float(found)

    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _table(self, columns: dict[str, list]) -> Table:
        columns["change"] = [metric - self.base for metric in columns["metric"]]
        return Table(columns)


def _chosen(places: list[Place], layers: Collection[int] | None) -> list[Place]:
    if layers is None:
        return places
    numbered = {place.number: place for place in places}
    missing = [n for n in layers if n not in numbered]
    if missing:
        raise ValueError(f"layers names {missing}, but the model ran {len(places)} self-attention layers")
    return [numbered[n] for n in layers]


def _shown(steps: list[Any], progress: bool) -> Iterator[Any]:
    """The steps, with a bar where there is a terminal that rich can draw on."""
    if not progress:
        yield from steps
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from steps
        return
    console = Console(stderr=True)
    yield from track(steps, "effects", console=console, transient=True, disable=not console.is_terminal)
