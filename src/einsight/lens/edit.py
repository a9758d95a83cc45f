"""Edits: a model run with some of its attention changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import einsight as es
from einsight.biases import Bias, as_bias
from einsight.coordinates import as_axis, numbers
from einsight.lens import patches, words
from einsight.lens.call import Call
from einsight.lens.frames import Running, checkpointed
from einsight.lens.layers import Layers, checked, chosen
from einsight.lens.lens import Lens
from einsight.lens.watch import Watch, here

_NO_RUN = "{} a lens that keeps only the results of its readouts=: open it without them, Lens(model)"


class Site(NamedTuple):
    """Where an edit applies."""

    name: str
    cross: bool
    heads: list[int]
    gone: int | None = 0  # how many keys of the text the cache has dropped; None where that can't be known


class Edit:
    """A context in which a model runs with the attention of some layers and heads changed.

    What isn't edited is computed by the model's own code, bit for bit as without. Edits that are nested are applied
    from the outermost to the innermost, and a `Lens` inside or outside of them sees the run as it was edited. They hold
    in training, under checkpointing (also for a backward inside the context), and in generation with a cache.

    Arguments:
        model: the module to run.
        layers: the layers to edit: numbers among the self-attention layers, names of modules (of an attention, or of a
            module that holds self-attention layers), or several of either; all self-attention layers by default.
            Cross-attention is edited only where it is named.
        heads: the query heads (an int, a slice, range, list or int tensor); all by default.
        mask: joins the model's own mask: `mask=~es.pairs(queries=[-1], keys=subject)` knocks out edges (Geva et al.
            2023, arXiv:2304.14767).
        bias: added to the scores: a float tensor that broadcasts to [b, h, i, j], `es.alibi(…)` or `es.relative(…)`.
        weights: another run's weights, under which this run's values are put: a `Lens` on it, a `Call`, or
            `AttentionWeights`. They are applied as an operator. In a generation their queries are found by position.
        output: what the heads put out instead, before the output projection: a number such as 0, "mean" over the
            positions (padding left out), ("mean", lens) over all positions of a reference run, a `Lens` with values on
            another run, or a float tensor that broadcasts to [b, h, i, e].

    Raises:
        ValueError, TypeError: an argument isn't of these, or doesn't fit the call that it is to change.
        KeyError: no module has a layer's name.
        LookupError: at the end, a layer that was asked for never ran, or no attention did.
        RuntimeError: a call to be edited can't be: it is compiled, transformed by torch.func, …

    >>> import einsight as es, torch
    >>> from einsight.lens import Edit
    >>> layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 6)
    >>> with Edit(layer, heads=[1], mask=~es.pairs(queries=[-1], keys=[0])):
    ...     _, weights = layer(x, x, x, average_attn_weights=False)
    >>> (weights[0, :, -1, 0] == 0).tolist()
    [False, True]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: int | str | Collection[int | str] | None = None,
        heads: Any = None,
        mask: es.Mask | None = None,
        bias: Bias | Tensor | None = None,
        weights: Lens | Call | es.AttentionWeights | None = None,
        output: Any = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if mask is not None and not isinstance(mask, es.Mask):
            raise TypeError(
                f"mask must be one of einsight's, such as ~es.pairs(queries, keys), not {type(mask).__name__}; "
                "a boolean tensor is es.allow(tensor) or es.forbid(tensor)"
            )
        if bias is not None:
            as_bias(bias)
        if weights is not None and not isinstance(weights, Lens | Call | es.AttentionWeights):
            raise TypeError(
                f"weights must be a Lens on another run, a Call or AttentionWeights, not {type(weights).__name__}"
            )
        if isinstance(weights, Lens) and weights._readouts is not None:
            raise ValueError(_NO_RUN.format("weights= is"))
        if mask is None and bias is None and weights is None and output is None:
            raise ValueError("an Edit changes something: give it mask=, bias=, weights= or output=")
        self.model = model
        self._heads, self._mask, self._bias, self._weights = heads, mask, bias, weights
        self._output = None if output is None else _checked_output(output)
        self._seen = Layers(model)
        self._layers = checked(layers, self._seen)
        if negative := [n for n in self._layers or () if isinstance(n, int) and n < 0]:
            raise ValueError(
                "layers are numbered from 0, and how many there are is not known before the model runs: not "
                f"{', '.join(map(str, negative))}. Look at the model once: layers=len(lens) - 1, or a name"
            )
        self._met: set[int | str] = set()
        self._ends: dict[str, Any] = {}
        self._follows = weights is not None or isinstance(output, Lens)  # another run's rows, by position
        self._kept: dict[str, tuple[Tensor, int | None]] = {}  # a layer's keys, and how many went before them
        self._calls, self._edited = 0, False
        self._again: set[str] = set()  # checkpointed layers that no backward has recomputed yet
        self._watch: Watch | None = None

    def __enter__(self) -> Edit:
        if self._watch is not None:
            raise RuntimeError("this edit is open already; to apply it twice open another Edit")
        self._watch = here()
        self._watch.open(self, self._watch.edits)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.close(self, self._watch.edits)
        self._watch, self._kept = None, {}
        self._seen.forget()
        again, self._again = sorted(self._again), set()
        if kind is not None:
            return
        if again:
            warnings.warn(
                f"edited layers are checkpointed ({', '.join(again)}), and no backward ran within the edit: what it "
                "recomputes outside would not be edited, which gives wrong gradients or PyTorch's CheckpointError. Run "
                "forward and backward within the edit, or the forward under torch.no_grad()",
                stacklevel=2,
            )
        if not self._calls:
            raise LookupError(f"nothing was edited: {words.nothing_seen(self.model)}")
        missing = [layer for layer in self._layers or () if layer not in self._met]
        if missing or not self._edited:
            own, cross = self._seen.order[False], self._seen.order[True]
            raise LookupError(
                "nothing was edited"
                + (f" in layers {missing}: no self-attention of theirs ran" if missing else ": no self-attention ran")
                + ". Self-attention layers that ran: "
                + (", ".join(f"{n} {name}" for n, name in enumerate(own)) or "none")
                + (f"; cross-attention, to be chosen by its name: {', '.join(cross)}" if cross else "")
            )

    # What the watch asks.

    def _site(self, call: Call, running: list[Running], again: bool) -> Site | None:
        known = self._seen.known(running)
        if not known:
            return None
        name = self._seen.name(call, known)
        self._calls += 1
        name, index = self._recomputed(name, call) if again else self._numbered(name, call, known)
        call.name = name
        if not self._is_chosen(name, index, call.cross):
            return None
        self._edited = True
        if again:
            self._again.discard(name)
        elif checkpointed():
            self._again.add(name)
        gone = 0 if again or call.cross else self._gone(name, call)
        if self._follows and gone != 0:
            raise ValueError(
                f"layer {name!r} keeps only a window of keys in its cache, so a step's position, and with it the row "
                "of the other run, can't be told: use a cache that keeps all keys, such as DynamicCache()"
            )
        h = call.query.shape[1]
        heads = range(h) if self._heads is None else numbers(as_axis(self._heads, h, "heads")).tolist()
        if not heads:
            raise ValueError("heads names none, so that nothing would be edited; None, the default, is all of them")
        return Site(name, call.cross, list(heads), gone)

    def _reweigh(self, call: Call, site: Site) -> tuple[Call, list[int]]:
        """The call with its weights changed, and for which heads."""
        before = call
        if self._weights is not None:
            call = patches.patch(call, self._clean(self._weights, site, "weights="), site.heads)
        if self._bias is not None:
            call = patches.steer(call, self._bias, site.heads, site.gone)
        if self._mask is not None:
            call = patches.hide(call, self._mask, site.heads, site.gone)
        return call, [] if call is before else site.heads

    def _outputs(self, site: Site) -> list[Callable[[Call, Tensor], Tensor]]:
        return [] if self._output is None else [partial(self._replaced, site)]

    def _recorded(self, call: Call, running: list[Running], name: str) -> None:
        """A layer is computed by hand, which its code told a lens."""
        known = self._seen.known(running)
        name, index = self._numbered(self._seen.name(call, known, name), call, known)
        if self._is_chosen(name, index, call.cross):
            raise ValueError(
                f"layer {name!r} is computed by hand and only recorded, by lens.record, so that it can't be edited: "
                "compute it by F.scaled_dot_product_attention or einsight.attention, or choose other layers="
            )

    def _refuse(self, reason: str, running: list[Running]) -> None:
        if self._seen.known(running):
            raise RuntimeError(f"an edit can't be applied to a call of attention {reason}")

    def _numbered(self, name: str, call: Call, known: list[Running]) -> tuple[str, int]:
        if self._seen.begins(known):
            self._ends = {}

        def goes_on(name: str) -> bool:
            return isinstance(call.offset, int) and call.offset > 0 and self._ends.get(name) == call.offset

        name, index = self._seen.number(name, call.cross, goes_on)
        if isinstance(call.offset, int):
            self._ends[name] = call.offset + call.query.shape[2]
        return name, index

    def _gone(self, name: str, call: Call) -> int | None:
        """How many keys of the text went before those that a cache still has; None where that can't be known."""
        if not isinstance(call.offset, int) or (self._mask is None and self._bias is None and not self._follows):
            return 0
        key, before = patches.written(call).key[:, :1].detach().clone(), call.offset
        last, gone = self._kept.get(name, (None, 0))
        moved = None if last is None or not before else patches.moved(key[:, :, :before], last)
        if moved is None:  # another text; its steps before this one weren't seen
            gone = None if before and before + 1 == call._window else 0
        elif gone is not None:
            gone += moved
        self._kept[name] = key, gone
        return gone

    def _recomputed(self, name: str, call: Call) -> tuple[str, int]:
        order = self._seen.order[call.cross]
        alike = [n for n in order if n == name or n.startswith(f"{name} (")]
        if len(alike) != 1:
            raise RuntimeError(
                f"{name!r} is recomputed for the backward, and "
                + ("ran before the edit: run forward and backward within it" if not alike else "is several layers: ")
                + ("" if not alike else "an edit can't tell which; run it without checkpointing")
            )
        return alike[0], order.index(alike[0])

    def _is_chosen(self, name: str, index: int, cross: bool) -> bool:
        if self._layers is None:
            return not cross
        found = chosen(self._layers, name, index, cross)
        self._met |= found
        return bool(found)

    def _clean(self, source: Any, site: Site, what: str) -> Call:
        if isinstance(source, es.AttentionWeights):
            return patches.as_call(source)
        if isinstance(source, Call):
            if source._read:
                raise ValueError(_NO_RUN.format(f"{what} is a call of"))
            return source
        try:
            return (source.cross if site.cross else source)[site.name]
        except KeyError as error:
            raise ValueError(f"{what} a lens that kept no layer {site.name!r}: {error.args[0]}") from error

    def _replaced(self, site: Site, call: Call, own: Tensor) -> Tensor:
        """The output with the chosen heads' put in its place."""
        given, heads = self._output, torch.tensor(site.heads, device=own.device)
        if isinstance(given, Real):
            made = own.new_full((), float(given))  # type: ignore[arg-type]
        elif isinstance(given, Lens):
            clean = self._clean(given, site, "output=")
            made = patches.output_of(patches.rows(clean, patches.written(call), "output="))[:, heads]
        elif isinstance(given, Tensor):
            sizes = given.shape[::-1]
            if given.ndim > 4 or any(n not in (1, m) for n, m in zip(sizes, own.shape[::-1], strict=False)):
                raise ValueError(
                    f"output= has shape {list(given.shape)}, which does not broadcast to layer {site.name!r}'s "
                    f"[b, h, i, e] = {list(own.shape)}"
                )
            made = given.expand(own.shape)[:, heads]
        elif isinstance(given, tuple):
            clean = self._clean(given[1], site, "output=")
            made = patches.mean(patches.output_of(clean), clean, across=True)[:, heads]
        else:
            if not call.cross and call.query.shape[2] != patches.written(call).key.shape[2]:
                raise ValueError(
                    'output="mean" is over the positions of one run, but with a cache a step has only its own; '
                    'take the mean of a reference run: output=("mean", lens)'
                )
            made = patches.mean(own, call, across=False)[:, heads]
        made = made.to(own.device, own.dtype).expand(own.shape[0], len(heads), *own.shape[2:])
        return made if len(heads) == own.shape[1] else own.index_copy(1, heads, made)


def _checked_output(output: Any) -> Any:
    is_mean = isinstance(output, tuple) and len(output) == 2 and output[0] == "mean" and isinstance(output[1], Lens)
    lens = output[1] if is_mean else output
    if isinstance(lens, Lens) and not lens._values:
        raise ValueError(
            "output= of another run needs its values: Lens(model, values=True)"
            + (", without readouts=" if lens._readouts is not None else "")
        )
    is_number = isinstance(output, Real) and not isinstance(output, bool)
    is_tensor = isinstance(output, Tensor) and output.dtype.is_floating_point
    if not (is_mean or is_number or is_tensor or isinstance(output, Lens | str)):
        what = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else repr(output)
        raise TypeError(
            'output must be a number, "mean", ("mean", lens), a Lens on another run or a float tensor that '
            f"broadcasts to [b, h, i, e], not {what}"
        )
    if isinstance(output, str) and output != "mean":
        raise ValueError(f'output must be a number, "mean", ("mean", lens), a Lens or a tensor, not {output!r}')
    return output
