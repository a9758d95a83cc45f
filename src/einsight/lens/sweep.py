"""What follows from a change: a metric with each head, layer or edge edited in turn."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from einsight.coordinates import as_axis, numbers
from einsight.lens.blocks import Place
from einsight.lens.layers import Layers, checked, chosen
from einsight.lens.lens import Lens
from einsight.lens.runs import Metric, Runs
from einsight.lens.table import Table
from einsight.values import described


def effects(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    over: str = "heads",
    *,
    layers: int | str | Collection[int | str] | None = None,
    output: Any = None,
    weights: Lens | None = None,
    queries: Any = None,
    keys: Any = None,
    progress: bool = True,
) -> Table:
    """How much a metric changes when each head, layer or edge is changed in turn: a table with a row for each.

    Blocks before the change are not run again, and several changes go through the model side by side, where that
    gives the same numbers: each layer is compared with a run of one change alone. Where it doesn't, they go one by one,
    and the table's `note` says so.

    Arguments:
        model: in eval mode. No gradients are computed.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments of the model.
        metric: a function of the model's output that gives one number, such as a logit difference or a loss.
        over: "heads": each head of each self-attention layer; "layers": all heads of each layer; "edges": each pair of
            a query and a key, which is hidden from it in all layers at once.
        layers: as for `Edit`, numbers among the self-attention layers (negative ones from the end) or names of modules,
            cross-attention by its own name; all self-attention layers by default.
        output: what a head puts out instead, as for `Edit`; 0 by default.
        weights: a `Lens` on another run, under whose weights each head is put instead (for heads and layers).
        queries, keys: for edges, positions as an int, slice, range, list or int tensor: the last query and all keys by
            default. Keys that come after a query are left out if the model is causal.
        progress: show a bar on a terminal, if rich is installed.

    Returns:
        The table with columns `layer`, `name` and `head`, `layer` and `name`, or `query` and `key`; `change`, the
        metric's less that of the clean run; and `metric`. `layer` and `name` are those of `Lens` and `Edit`. For heads
        `.grid("change")` is a tensor [layer, head]. `note` says so where changes had to go one by one.

    Raises:
        ValueError, TypeError: an argument isn't of these; the model is in training mode, or gives other numbers when it
            is run again; the metric isn't a number.
        LookupError: no self-attention ran.

    >>> import torch
    >>> from einsight.lens import effects
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> table = effects(model, torch.randn(1, 5, 8), lambda output: output[0, -1, 0])
    >>> len(table), table.columns
    (6, ('layer', 'name', 'head', 'change', 'metric'))
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
    if not callable(metric):
        raise TypeError(f"metric must be a function of the model's output that gives a number, not {described(metric)}")
    if model.training:
        raise ValueError("model is in training mode, where dropout would be taken for effects: model.eval()")
    change = {"weights": weights} if weights is not None else {"output": 0 if output is None else output}
    with torch.no_grad():
        runs = Runs(model, inputs, metric)
        places = _chosen(runs.blocks.places, layers, model)

        def shown(steps: list[Any]) -> Iterator[Any]:
            return _shown(steps, progress)

        if over == "edges":
            pairs = _pairs(places, -1 if queries is None else queries, slice(None) if keys is None else keys)
            columns: dict[str, list[Any]] = {"query": [q for q, _ in pairs], "key": [k for _, k in pairs]}
            metrics = runs.of_edges(places, pairs, shown)
        else:
            found = runs.of_heads(places, change, shown) if over == "heads" else runs.of_layers(places, change, shown)
            rows = [(place, n) for place, those in zip(places, found, strict=True) for n in range(len(those))]
            columns = {"layer": [place.number for place, _ in rows], "name": [place.name for place, _ in rows]}
            columns |= {"head": [n for _, n in rows]} if over == "heads" else {}
            metrics = [one for those in found for one in those]
    return Table({**columns, "change": [one - runs.base for one in metrics], "metric": metrics}, runs.note)


def _chosen(places: list[Place], layers: Any, model: nn.Module) -> list[Place]:
    """The places that are chosen, in the order in which they are named; by default those of self-attention."""
    own = [place for place in places if not place.cross]
    named = checked(layers, Layers(model))
    if named is None:
        if not own:
            names = ", ".join(place.name for place in places)
            raise LookupError(f"no self-attention ran, but cross-attention did: name it with layers=, of {names}")
        return own
    made: list[Place] = []
    missing = []
    for layer in named:
        number = layer + len(own) if isinstance(layer, int) and layer < 0 else layer
        found = [place for place in places if chosen((number,), place.name, place.number, place.cross)]
        missing += [] if found else [layer]
        made += [place for place in found if place not in made]
    if missing:
        raise ValueError(
            f"layers names {missing}, but the model ran {len(own)} self-attention layers: "
            + ", ".join(f"{place.number} {place.name}" for place in own)
            + "".join(f"; cross-attention {place.name}" for place in places if place.cross)
        )
    return made


def _pairs(places: list[Place], queries: Any, keys: Any) -> list[tuple[int, int]]:
    sizes = {(place.shape[2], place.keys) for place in places}
    if len(sizes) > 1:
        raise ValueError(
            f"edges are between the same tokens in all layers, but layers have {sorted(sizes)} queries and keys: "
            "choose some with layers="
        )
    i, j = sizes.pop()
    causal = all(place.causal for place in places)
    return [
        (query, key)
        for query in numbers(as_axis(queries, i, "queries")).tolist()
        for key in numbers(as_axis(keys, j, "keys")).tolist()
        if key <= query or not causal
    ]


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
