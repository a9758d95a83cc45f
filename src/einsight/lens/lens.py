"""The lens: every call of attention inside a model, kept or read as it happens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import einsight as es
from einsight.coordinates import as_int, is_int
from einsight.functional import unpack
from einsight.lens import frames, words
from einsight.lens.call import ONLY_RESULTS, Call, ungrouped
from einsight.lens.heads import Heads, table
from einsight.lens.layers import Layers
from einsight.lens.record import Match, Record
from einsight.lens.rollout import rollout
from einsight.lens.rules import Rule, of_mask
from einsight.lens.store import Store
from einsight.lens.watch import Watch, here, in_backward
from einsight.pose import autocast, pose
from einsight.problem import check_is_readout
from einsight.values import check_flag


class Lens:
    """A context in which every call of attention that a model makes is seen.

    The model's own code still computes everything: outputs, gradients and random state are bit for bit what they
    are without the lens. (An exception: PyTorch's fused inference path of `nn.TransformerEncoderLayer` and
    `nn.MultiheadAttention` is off in a lens; what isn't padding agrees to rounding.) Seen are PyTorch's
    `scaled_dot_product_attention`, `einsight.attention`, `nn.MultiheadAttention`, and the attention functions of
    Hugging Face's models; all but `einsight.attention` also in compiled code (the model is compiled once more for
    it). Not seen are other threads, TorchScript, direct calls of `torch.ops.aten`; what can't be looked at, as in
    `torch.func.vmap`, runs as without a lens, which says so when it closes.

    Arguments:
        model: the module to look into.
        readouts: what to read of each call as it happens, as `einsight.attention` takes it. Then only the results
            are kept; without, queries and keys are, and any readout can be asked for afterwards.
        layers: the self-attention layers to look at, by number; all by default.
        values: keep the values as well.
        keep_on: the device to keep things on; by default where they are.
        on_call: a function that is given each `Call` before the layer's attention returns.

    Raises:
        TypeError, ValueError: an argument isn't of these.
        RuntimeError: it is open already.
        LookupError: when it is read, what wasn't seen or kept.

    Example:
        >>> import einsight as es, torch
        >>> from einsight.lens import Lens
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with Lens(model) as lens:
        ...     output = model(torch.randn(1, 5, 16))
        >>> lens[0]
        Call(attention 0 'self_attn': b=1, h=2, i=5, j=5)
        >>> lens[0].weights.entropy().shape
        torch.Size([1, 2, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        readouts: Any = None,
        layers: Container[int] | None = None,
        values: bool = False,
        keep_on: torch.device | str | None = None,
        on_call: Callable[[Call], object] | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if layers is not None and (isinstance(layers, str) or not isinstance(layers, Container)):
            raise TypeError(f"layers must be a range, list or set of layer numbers, not {layers!r}")
        named = list(layers) if isinstance(layers, Collection) else []
        if wrong := [n for n in named if not is_int(as_int(n))]:
            raise TypeError(f"layers must be a range, list or set of layer numbers, but holds {wrong[0]!r}")
        check_flag("values", values)
        if negative := [n for n in named if n < 0]:
            raise ValueError(
                f"layers are numbered from 0, and how many there are is not known before the model runs: not {negative}"
            )
        if on_call is not None and not callable(on_call):
            raise TypeError(f"on_call must be a function of a Call, not {on_call!r}")
        for readout in unpack(() if readouts is None else readouts)[0]:
            check_is_readout(readout)
        if keep_on is not None:
            _check_device(keep_on)
        if values and readouts is not None:
            raise ValueError("values=True keeps values and readouts= keeps only results: leave out one of them")
        self.model = model
        self._readouts, self._layers, self._values = readouts, layers, values
        self._keep_on, self._on_call = keep_on, on_call
        self._records: dict[str, list[Record | Call]] = {}  # by layer, a record (or its results) per pass
        self._seen = Layers(model)
        self._store = Store()
        self._calls = 0
        self._going: tuple[int, Match] | None = None  # how this run's last call of self-attention went on
        self._start = 0  # where its first query stood
        self._missed: dict[str, int] = {}
        self._watch: Watch | None = None

    def __enter__(self) -> Lens:
        if self._watch is not None:
            raise RuntimeError("this lens is open already; for another look at the same run open another Lens(model)")
        self._watch = here()
        self._watch.open(self, self._watch.lenses)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.close(self, self._watch.lenses)  # it may have been opened in another thread
        self._watch = None
        self._seen.forget()
        if kind is None and self._missed:
            warnings.warn(words.missed(self._missed), stacklevel=2)
        elif kind is None and not self._calls:
            warnings.warn(words.nothing_seen(self.model), stacklevel=2)
        elif kind is None and not self._records:
            warnings.warn(self._nothing_kept(), stacklevel=2)

    # Reading.

    @property
    def names(self) -> tuple[str, ...]:
        """The self-attention layers seen, in the order of their numbers."""
        return tuple(self._seen.order[False])

    def __len__(self) -> int:
        return len(self._seen.order[False])

    def __iter__(self) -> Iterator[Call]:
        """The self-attention layers that were kept, each as in `lens[n]`."""
        return (self._last(name) for name in self._seen.order[False] if name in self._records)

    def __getitem__(self, layer: int | str) -> Call:
        """A layer's calls in its last pass, as one `Call`: by number among the self-attention layers, or by name."""
        return self._last(self._find(layer, cross=False))

    def __repr__(self) -> str:
        model = type(getattr(self.model, "_orig_mod", self.model)).__name__
        if not self._calls:
            return f"Lens({model}: nothing seen yet)"
        order = self._seen.order
        counts = [f"{len(order[cross])} {kind}-attention" for cross, kind in ((False, "self"), (True, "cross"))]
        parts = [" and ".join(count for count in counts if count[0] != "0") + " layers"]
        kept = [self._records[name] for name in (*order[False], *order[True]) if name in self._records]
        if kept:
            passes, last = len(kept[-1]), kept[-1][-1]
            parts.append(f"{passes} pass" + ("es" if passes > 1 else ""))
            if isinstance(last, Record):
                b, i, j = len(last.query.buffer), last.query.length, last.key.length
                parts.append(f"the last with b={b}, i={i}, j={j}" if passes > 1 else f"b={b}, i={i}, j={j}")
        return f"Lens({model}: {', '.join(parts)})"

    @property
    def cross(self) -> _Cross:
        """The cross-attention layers, by number: `lens.cross[3]`."""
        return _Cross(self)

    def passes(self, layer: int | str) -> tuple[Call, ...]:
        """A layer's passes: each run of the model over new inputs. The steps of one generation are one pass."""
        return self._passes(self._find(layer, cross=False))

    def clear(self) -> None:
        """Forget everything seen so far, and the numbers of the layers."""
        self._records, self._seen, self._store = {}, Layers(self.model), Store()
        self._calls, self._missed = 0, {}

    def heads(self, tokens: Any, tokenizer: Any = None, layers: str | Collection[int] | None = None) -> Heads:
        """What kind each head of the self-attention layers is: a table with one row per layer and head.

        Arguments:
            tokens: the token ids [b, i] or [i] that the model was given, or the tokenizer's output.
            tokenizer: to know special tokens and punctuation; without, those columns are left out.
            layers: the layers, by number, or as the name of the module that they are in, such as "model.encoder",
                where a model has layers over other tokens as well; all by default.
        """
        return table(self._chosen(layers), tokens, tokenizer)

    def rollout(
        self, query: int | list[int] | slice | Tensor, layers: str | Collection[int] | None = None
    ) -> Float[Tensor, "b n j"]:
        """How much each input token contributes to a query over all layers: attention rollout.

        The product over the layers of ½ (W + 1), W the mean over the heads (Abnar & Zuidema 2020,
        arXiv:2005.00928), for the chosen queries, in linear memory: [b, n, j], each row summing to 1. `layers` as
        for `heads`.
        """
        kept = self._chosen(layers)
        if layers is None and len(kept) < len(self):
            raise LookupError("rollout needs every layer: don't choose layers")
        return rollout(kept, query)

    def record(
        self,
        query: Float[Tensor, "b h i d"],
        key: Float[Tensor, "b g j d"],
        value: Float[Tensor, "b g j e"] | None = None,
        mask: es.Mask | None = None,
        *,
        name: str = "",
        cross: bool = False,
        offset: int | Tensor | None = None,
        **settings: Any,
    ) -> None:
        """Tell the lens of attention that is written by hand, from inside the model's code.

        `mask` and the settings are those of `einsight.attention`; the layer is named `name`, or as its module.
        """
        if in_backward():
            return
        if self._watch is None:
            raise RuntimeError("lens.record is for calls while the lens is open: call it within `with Lens(model)`")
        running = self._seen.known(frames.running())
        if not running and not name:
            raise ValueError(
                "lens.record was called outside the model's modules, whose names a layer is called by: give it a name="
            )
        query, key, value = autocast(query.detach(), key.detach(), None if value is None else value.detach())
        settings = {n: s.detach() if isinstance(s, Tensor) else s for n, s in settings.items()}
        # Refused here, where the mistake is, and not when the weights are read.
        es.AttentionWeights(query, key, mask, offset=offset, **settings)
        if value is not None:
            pose(query, key, value)
        key, value = ungrouped(key, value, query.shape[1])
        if offset is None:
            offset = max(key.shape[2] - query.shape[2], 0)
        rule = of_mask(mask, query.shape[2], key.shape[2], offset)
        call = Call(query, key, value, rule, offset, settings, cross=cross)
        with torch.no_grad():
            self._see(call, running, name)
        for edit in self._watch.edits:
            edit._recorded(replace(call), frames.running(), name)

    # Seeing.

    def _receive(self, call: Call, running: list[frames.Running]) -> None:
        if known := self._seen.known(running):  # else it is another model's
            self._see(call, known)

    def _miss(self, reason: str, running: list[frames.Running]) -> None:
        if self._seen.known(running):
            self._missed[reason] = self._missed.get(reason, 0) + 1

    def _see(self, call: Call, running: list[frames.Running], name: str = "") -> None:
        self._calls += 1
        if self._seen.begins(running):
            self._going, self._start = None, 0
        name = self._seen.name(call, running, name)
        call.name, call.index = self._seen.number(name, call.cross, lambda name: self._match(name, call))
        call.module = running[-1].module if running else None
        found = self._match(call.name, call)
        if not call.cross:
            self._going, self._start = found, call.offset if isinstance(call.offset, int) else 0
        if self._layers is not None and call.index not in self._layers:
            return
        if not self._values and self._on_call is None:
            call.value = None
        if self._readouts is not None:
            call._results = call.weights.read(self._readouts)
        if self._on_call is not None:
            self._on_call(call)
        self._keep(replace(call, value=call.value if self._values else None), found)

    def _match(self, name: str, call: Call) -> tuple[int, Match] | None:
        """Which pass of a layer, counted from its last, a call goes on from, and how."""
        passes = self._records.get(name, [])
        if call.cross:  # as the decoder's own text does
            if self._going is None or self._going[0] >= len(passes):
                return None
            record = passes[-1 - self._going[0]]
            return self._going if isinstance(record, Record) and record.looks_on(call) else None
        for how in (Record.goes_on, Record.goes_back):
            for back, record in enumerate(reversed(passes)):
                match = how(record, call) if isinstance(record, Record) else None
                if match is not None:
                    return back, match
        return None

    def _keep(self, call: Call, found: tuple[int, Match] | None) -> None:
        passes = self._records.setdefault(call.name, [])
        if self._readouts is not None:
            b, h, _, d = call.query.shape
            none = replace(call, query=call.query.new_empty(b, h, 0, d), value=None, settings={}, rule=Rule())
            none._read = True
            none.key = call.key.new_empty(*call.key.shape[:2], 0, d)
            passes.append(none)
            return
        # What is kept can be used anywhere, also if the model runs in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if found is None:
                passes.append(Record(call, self._start, self._keep_on, self._store))
                return
            back, match = found
            record = passes[-1 - back] if match.again else passes.pop(-1 - back)
            passes.append(record.go_on(call, match))  # type: ignore[union-attr]

    def _find(self, layer: int | str, cross: bool) -> str:
        if not self._calls:
            raise LookupError(words.nothing_seen(self.model))
        if isinstance(layer, str):
            name = words.clean(layer)
            kept = [[one for one in self._seen.order[kind] if one in self._records] for kind in (False, True)]
            if name in kept[cross]:
                return name
            if name in kept[not cross]:
                raise KeyError(
                    f"{layer!r} is " + ("self-attention: lens[…]" if cross else "cross-attention: lens.cross[…]")
                )
            kind = "cross-attention" if cross else "self-attention"
            raise KeyError(f"no {kind} layer {layer!r} was kept; there are {', '.join(kept[cross]) or 'none'}")
        layer = as_int(layer)  # type: ignore[assignment]
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise TypeError(f"a layer is chosen by its number or name, one at a time, not {layer!r}")
        order, kind = self._seen.order[cross], "cross-attention" if cross else "self-attention"
        if not -len(order) <= layer < len(order):
            raise IndexError(f"layer {layer} is out of range: the lens saw {len(order)} {kind} layers")
        if order[layer] not in self._records:
            raise LookupError(f"layer {layer} was not kept: the lens was opened with layers={self._layers!r}")
        return order[layer]

    def _passes(self, name: str) -> tuple[Call, ...]:
        return tuple(_call(record) for record in self._records[name])

    def _last(self, name: str) -> Call:
        return _call(self._records[name][-1])

    def _chosen(self, layers: str | Collection[int] | None) -> list[Call]:
        """The self-attention layers named, as kept."""
        if self._readouts is not None or not any(True for _ in self):
            raise LookupError(self._nothing_kept())
        if layers is None:
            return list(self)
        if isinstance(layers, str):
            prefix = words.clean(layers)
            found = [call for call in self if call.name == prefix or call.name.startswith(f"{prefix}.")]
            if not found:
                raise KeyError(f"no self-attention layer is in {layers!r}; there are {', '.join(self.names)}")
            return found
        if not isinstance(layers, Collection):
            raise TypeError(f"layers must be numbers or the name of the module that they are in, not {layers!r}")
        if not layers:
            raise ValueError("layers names none; None, the default, is all of them")
        return [self[layer] for layer in layers]

    def _nothing_kept(self) -> str:
        if not self._calls:
            return words.nothing_seen(self.model)
        if self._readouts is not None and self._records:
            return ONLY_RESULTS
        return f"no self-attention layer was kept: layers={self._layers!r}, and {len(self)} were seen, numbered from 0"


class _Cross:
    """The cross-attention layers of a lens."""

    def __init__(self, lens: Lens):
        self._lens = lens

    def __len__(self) -> int:
        return len(self._lens._seen.order[True])

    def __getitem__(self, layer: int | str) -> Call:
        return self._lens._last(self._lens._find(layer, cross=True))

    def __iter__(self) -> Iterator[Call]:
        return (self._lens._last(name) for name in self.names if name in self._lens._records)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._lens._seen.order[True])

    def passes(self, layer: int | str) -> tuple[Call, ...]:
        return self._lens._passes(self._lens._find(layer, cross=True))


def _call(record: Record | Call) -> Call:
    return record.call if isinstance(record, Record) else record


def _check_device(device: torch.device | str) -> None:
    try:
        is_meta = torch.empty(0, device=device).is_meta
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"keep_on must be a device that is there, such as 'cpu', not {device!r}") from error
    if is_meta:
        raise ValueError(
            "keep_on='meta' would keep no numbers: keep_on must be a device that holds them, such as 'cpu'"
        )
