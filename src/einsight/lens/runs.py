"""Runs of a model that differ in an edit, with a metric of each: no more of it run than has to be, and checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import einsight as es
from einsight.lens.blocks import Blocks, Place, repeated
from einsight.lens.edit import Edit
from einsight.lens.edits import Each

TOKENS = 2048  # how many go through the model at once
FEW = 4  # copies, below which nothing is gained by comparing them with a run alone
WHOLE = 3  # how many places are compared with whole runs; the others with a run through their block

# What a model's own code raises where it is given other than it expects.
FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)

Metric = Callable[[Any], Tensor | float]
Shown = Callable[[list[Any]], Iterable[Any]]  # goes through a list as it is, and shows how far it has come


class Runs:
    """The clean run, and runs that differ from it in an edit.

    Blocks before an edit aren't run again, and several edits go through the model side by side, where this gives what
    a run alone gives. Edits must come from the last place to the first: what skipped blocks have left behind, for
    later blocks or for the metric, is then the clean run's.
    """

    def __init__(self, model: nn.Module, inputs: Any, metric: Metric):
        self.model, self.inputs, self.metric = model, inputs, metric
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.skips, self.together, self.note = True, True, ""
        self.blocks, self._random, self._drew = Blocks(model), _random(self.device), False
        self.output = self.blocks.clean(lambda: self._call(1))
        if not self.blocks.places:
            raise LookupError("no self-attention ran that could be changed; see what Lens(model) says of it")
        self.b = self.blocks.places[0].shape[0]
        self.base = self._measured(self.output)
        self._drew = any(not torch.equal(a, b) for a, b in zip(self._random, _random(self.device), strict=True))
        self._again()
        if self._drew:
            self._alone("it draws random numbers as it runs, in each run the same", skips=False)
        elif not self._splits():
            self._alone("its inputs or its output aren't over sequences alone")

    def of_heads(self, places: list[Place], change: dict[str, Any], shown: Shown) -> list[list[float]]:
        """The metrics with each head of each place changed."""

        def edits(place: Place, heads: Iterable[int]) -> list[Edit]:
            return [Edit(self.model, layers=place.name, heads=head, **change) for head in heads]

        def heads(place: Place, whole: bool) -> list[float]:
            def together(part: range) -> Each:
                return Each(self.model, edits(place, part), self.b)

            return self._measure(place, place.heads, lambda n: edits(place, [n])[0], together, whole)

        return self._of_places(places, heads, shown)

    def of_layers(self, places: list[Place], change: dict[str, Any], shown: Shown) -> list[list[float]]:
        """The metrics with each place changed, in all of its heads."""

        def layer(place: Place, whole: bool) -> list[float]:
            return self._measure(place, 1, lambda n: Edit(self.model, layers=place.name, **change), None, whole)

        return self._of_places(places, layer, shown)

    def of_edges(self, places: list[Place], pairs: list[tuple[int, int]], shown: Shown) -> list[float]:
        """The metrics with each key hidden from its query, in all of the places at once."""
        names, first = [place.name for place in places], min(places, key=lambda place: place.block)
        size = self.copies(first)
        together_pays = size >= FEW

        def edit(some: list[tuple[int, int]]) -> Edit:
            hidden = torch.zeros(len(some), 1, first.shape[2], first.keys, dtype=torch.bool)
            for n, (query, key) in enumerate(some):
                hidden[n, 0, query, key] = True
            mask = es.forbid(hidden.repeat_interleave(self.b, 0).to(self.device))
            return Edit(self.model, layers=names, mask=mask)

        def edges(some: list[tuple[int, int]]) -> list[float]:
            def together(part: range) -> Edit:
                return edit([some[n] for n in part])

            return self._measure(
                first, len(some), lambda n: edit([some[n]]), together if together_pays else None, whole=True
            )

        chunks = [pairs[n : n + size] for n in range(0, len(pairs), size)]
        return [one for found in self._in_turn(chunks, edges, shown) for one in found]

    def _measure(
        self,
        place: Place,
        count: int,
        alone: Callable[[int], Edit],
        together: Callable[[range], Any] | None,
        whole: bool,
    ) -> list[float]:
        """The metrics of some changes at a place, each `alone`, or several `together`.

        One of those together is compared with a run alone: a `whole` one, of all blocks, or through its own block.
        """
        found: list[float] = []
        size = self.copies(place)
        while together is not None and self.together and len(found) < count and min(size, count) > 1:
            part = range(len(found), min(len(found) + size, count))
            values = self._side_by_side(place, part, alone, together(part), whole)
            if values is None:
                break
            found += values
        rest = range(len(found), count)
        if rest and whole and not found:
            self._check_skipping(place, alone(count - 1))
        return found + [self._one(place.block, alone(n)) for n in rest]

    def copies(self, place: Place) -> int:
        return max(1, TOKENS // (self.b * place.shape[2]))

    def _of_places(
        self, places: list[Place], of: Callable[[Place, bool], list[float]], shown: Shown
    ) -> list[list[float]]:
        order = sorted(places, key=lambda place: place.block, reverse=True)
        whole = {order[round(n * (len(order) - 1) / (WHOLE - 1))] for n in range(WHOLE)}
        found = self._in_turn(order, lambda place: of(place, place in whole), shown)
        return [found[order.index(place)] for place in places]

    def _in_turn(self, order: list[Any], of: Callable[[Any], list[float]], shown: Shown) -> list[list[float]]:
        found, skipped = [], []
        for n, one in enumerate(shown(order)):
            skipped += [n] if self.skips else []
            found.append(of(one))
        if not self.skips:  # it turned out that blocks can't be left out
            for n in skipped:
                found[n] = of(order[n])
        return found

    # Runs.

    def _one(self, first: int, edit: Edit) -> float:
        if self.skips and first:
            try:
                return self._alone_from(first, edit)[0]
            except FAILS as error:
                self._alone(f"it fails where earlier blocks are not run again ({_said(error)})", skips=False)
        return self._alone_from(0, edit)[0]

    def _alone_from(self, first: int, edit: Edit) -> tuple[float, Any]:
        with edit:
            output = self.blocks.rest(lambda: self._call(1), first, 1, self.b)
        return self._measured(output), output

    def _side_by_side(
        self, place: Place, part: range, alone: Callable[[int], Edit], edit: Any, whole: bool
    ) -> list[float] | None:
        """The metrics of copies side by side, if a run alone gives the same; None if not."""
        copies = len(part)
        try:
            with edit:
                output = self.blocks.rest(lambda: self._call(copies), place.block, copies, self.b, watched=place.after)
        except (RuntimeError, IndexError) as error:
            return self._alone(f"it does not run over several copies of its inputs ({_said(error)})")
        reached, own = self.blocks.reached, self._measured(self.output)
        leaves, form = tree_flatten(output)
        parts = [tree_unflatten([self._part(t, n) for t in leaves], form) for n in range(copies)]
        found = [self._measured(part) for part in parts]
        if not _alike(own, self.base, 0):
            return self._alone("the metric remembers more of a run than the output it is given")
        n = max(range(copies), key=lambda n: abs(found[n] - self.base))
        if not whole and self._same_block(place, alone(part[n]), reached, n):
            return found
        single, whole_output = self._alone_from(0, alone(part[n]))
        if self._close(found[n], single) and _alike_trees(parts[n], whole_output, 8):
            return found
        self._check_skipping(place, alone(part[n]), single)
        return self._alone(f"copies side by side gave {found[n]:.6g} where one gives {single:.6g}")

    def _check_skipping(self, place: Place, edit: Edit, single: float | None = None) -> None:
        """Find out whether the blocks before an edit may be left out."""
        if self.skips and place.block:
            single = self._alone_from(0, edit)[0] if single is None else single
            found = self._one(place.block, edit)
            if not self._close(found, single):
                said = f"without running earlier blocks again it gives {found:.6g} where a whole run gives {single:.6g}"
                self._alone(said, skips=False)

    def _same_block(self, place: Place, edit: Edit, reached: Any, n: int) -> bool:
        """Whether a copy and a run alone have left a place's block alike, for the next; False also if it isn't seen.

        The run begins a block earlier: what blocks leave behind for the next is seen as well.
        """
        if reached is None:
            return False
        with edit:
            self.blocks.rest(lambda: self._call(1), max(place.block - 1, 0), 1, self.b, place.after, stop=True)
        single = self.blocks.reached
        own, other = (_copy(reached, single, m, self.b) for m in (n, n - 1))
        return _alike_trees(own, single, 1) and not _alike_trees(own, other, 0)

    def _again(self) -> None:
        try:
            again = self._measured(self._call(1))
        except FAILS as error:
            raise ValueError(
                f"the model can't be run twice on the same inputs: {_said(error)}. It keeps something of a run, such "
                "as a cache: give effects a module whose forward begins anew"
            ) from error
        if not self._close(again, self.base):
            raise ValueError(
                f"two runs of the model on the same inputs give the metric {self.base:.6g} and {again:.6g}: it keeps "
                "something of a run, such as a cache, or draws random numbers of its own. Give effects a module whose "
                "forward begins anew"
            )

    def _alone(self, reason: str, skips: bool = True) -> None:
        """Go on one by one; without skipping if that isn't right either."""
        self.together = False
        if self.skips:
            self.skips = skips
            how = "" if skips else ", each from the beginning"
            self.note = f"The model was run one by one{how}: {reason}."

    def _splits(self) -> bool:
        """Whether inputs and output are over sequences, as far as can be seen."""
        inputs = tree_flatten(self.inputs)[0]
        plain = all(t is None or isinstance(t, Tensor | int | float | str) for t in inputs)
        outputs = [t for t in tree_flatten(self.output)[0] if isinstance(t, Tensor)]
        return plain and bool(outputs) and all(t.ndim > 0 and len(t) == self.b for t in outputs)

    def _part(self, leaf: Any, n: int) -> Any:
        return leaf[n * self.b : (n + 1) * self.b] if isinstance(leaf, Tensor) else None

    def _call(self, copies: int) -> Any:
        given = self.inputs
        if copies > 1:
            given = repeated(given, copies, self.b)
        # A cache among the inputs would remember the last run.
        given = tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf), given)
        if self._drew:
            _set_random(self.device, self._random)
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

    def _close(self, found: float, expected: float) -> bool:
        """Alike, to the rounding of products over other numbers of rows."""
        kinds = [t.dtype for t in tree_flatten(self.output)[0] if isinstance(t, Tensor) and t.dtype.is_floating_point]
        eps = max((torch.finfo(kind).eps for kind in kinds), default=0)
        return _alike(found, expected, 1e-3 * abs(expected - self.base) + max(1e-5, 8 * eps) * max(1, abs(self.base)))


def _alike(a: float, b: float, allowed: float) -> bool:
    return abs(a - b) <= allowed or a == b or (a != a and b != b)


def _copy(several: Any, single: Any, n: int, b: int) -> Any:
    """One of several copies; what isn't over sequences in a single run is over none."""

    def part(those: Any, one: Any) -> Any:
        over = isinstance(those, Tensor) and isinstance(one, Tensor) and those.shape[:1] != one.shape[:1]
        return those[n * b : (n + 1) * b] if over else those

    leaves, form = tree_flatten(several)
    ones = tree_flatten(single)[0]
    return tree_unflatten(list(map(part, leaves, ones)), form) if len(leaves) == len(ones) else None


def _alike_trees(a: Any, b: Any, far: int) -> bool:
    """Whether tensors are alike, to the rounding of products over other numbers of rows; `far`, how much of it. What
    isn't one, as a cache, is not looked at."""
    first, second = ([leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)] for tree in (a, b))
    return len(first) == len(second) and all(map(partial(_alike_tensors, far=far), first, second))


def _alike_tensors(a: Tensor, b: Tensor, far: int) -> bool:
    if a.shape != b.shape or not b.dtype.is_floating_point or not far:
        return torch.equal(a, b)
    eps = torch.finfo(b.dtype).eps
    rounding = far * (64 if eps < 1e-5 else 4) * eps
    size = float(b[b.isfinite()].abs().float().mean()) if bool(b.isfinite().any()) else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * size, equal_nan=True)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _random(device: torch.device) -> list[Tensor]:
    """The states that random numbers come from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
