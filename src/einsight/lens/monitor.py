"""A watch on attention while a model trains."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import einsight as es
from einsight.lens import words
from einsight.lens.call import Call, evenly
from einsight.lens.frames import Running
from einsight.lens.layers import Layers
from einsight.lens.watch import Watch, here
from einsight.values import check_flag

QUANTITIES = ("max_score", "entropy", "first_token")


class Alarm(NamedTuple):
    """Something that goes wrong: "logits" of a head, or "entropy" of a layer (head None)."""

    kind: str
    layer: str
    head: int | None
    value: float
    threshold: float

    def __str__(self) -> str:
        if self.kind == "entropy":
            return f"{self.layer}: attention collapses, mean entropy {self.value:.3g} below {self.threshold:g} nats"
        if self.value != self.value:
            return f"{self.layer}, head {self.head}: scores are no numbers"
        return f"{self.layer}, head {self.head}: largest score {self.value:.4g} above {self.threshold:g}"


@dataclass
class _Layer:
    """What was seen of a layer in a step, per head, on its device."""

    module: nn.Module
    max_score: Float[Tensor, " h"]
    entropy: Float[Tensor, " h"]  # a sum over queries, as is the next
    first_token: Float[Tensor, " h"]
    queries: Float[Tensor, " h"]
    capped: bool

    def add(self, other: _Layer) -> None:
        self.max_score = torch.maximum(self.max_score, other.max_score)
        self.entropy = self.entropy + other.entropy
        self.first_token = self.first_token + other.first_token
        self.queries = self.queries + other.queries
        self.capped = self.capped or other.capped

    def of(self, quantity: str) -> Float[Tensor, " h"]:
        found = getattr(self, quantity)
        return found if quantity == "max_score" else found / self.queries  # NaN where no query had a choice


class Monitor:
    """What attention does in training: the largest score, entropy, and weight on the first token of every head.

    Each `with monitor:` is a training step, which may hold several forward and backward passes (gradient accumulation);
    what is recomputed under checkpointing isn't counted again. The model runs as without: outputs and gradients keep
    their bits, and nothing waits for a device until numbers are asked for.

    Arguments:
        model: the module that is trained; wrapped or compiled ones too (`einsight.attention` not in compiled code).
        every: watch every n-th step only; in between nothing is done, and the numbers stay.
        heads: whether `summary` has the numbers of each head as well.

    Raises:
        TypeError, ValueError: an argument isn't of these.
        LookupError: numbers are asked for before a step was seen.

    The largest score is what QK-clip watches (Kimi Team 2025, arXiv:2507.20534), the entropy what collapses (Zhai et
    al. 2023, arXiv:2303.06296).

    >>> import torch
    >>> from einsight.lens import Monitor
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> monitor = Monitor(model)
    >>> with monitor:
    ...     model(torch.randn(3, 5, 8)).sum().backward()
    >>> monitor.max_score()["self_attn"].shape
    torch.Size([2])
    >>> sorted(monitor.summary())[:2]
    ['attention/self_attn/entropy/max', 'attention/self_attn/entropy/mean']
    """

    def __init__(self, model: nn.Module, every: int = 1, heads: bool = False):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, 1 or more, not {every!r}")
        check_flag("heads", heads)
        self.model, self.every, self.heads = model, every, heads
        self.step = 0  # how many steps began
        self._seen = Layers(model)
        self._layers: dict[str, _Layer] = {}
        self._new = False  # whether the step that runs has told nothing yet
        self._used = False  # whether weights were clipped by these numbers already
        self._missed: dict[str, int] = {}
        self._watch: Watch | None = None

    def __enter__(self) -> Monitor:
        if self._watch is not None:
            raise RuntimeError("this monitor is watching a step already: `with monitor:` is one step")
        self.step += 1
        if (self.step - 1) % self.every == 0:
            self._watch, self._new, self._missed = here(), True, {}
            self._watch.open(self, self._watch.lenses)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is None:
            return
        self._watch.close(self, self._watch.lenses)
        self._watch = None
        self._seen.forget()
        if self._new:  # nothing of an earlier step may pass for this one's
            self._layers = {}

    def max_score(self, group: Any = None) -> dict[str, Float[Tensor, " h"]]:
        """The largest score of each head over the micro-batches of the last step watched, by layer, on the device.

        `group`, a process group, takes the maximum over its ranks, by one all-reduce of all layers together; they must
        have run the same layers. Waits for nothing else.
        """
        layers = self._found()
        found = {name: layer.max_score for name, layer in layers.items()}
        if group is None:
            return found
        packed = torch.cat(list(found.values()))
        torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, group=group)
        parts = packed.split([len(scores) for scores in found.values()])
        return dict(zip(found, parts, strict=True))

    def summary(self) -> dict[str, float]:
        """The last step watched as plain numbers, for TensorBoard or W&B.

        "attention/{layer}/{quantity}/{min | mean | max}" over the heads, quantity "max_score", "entropy" (in nats) or
        "first_token"; the latter two are means over queries, leaving out padding and queries that see one key only,
        as each sequence's first does, which have no choice (NaN if there are no others). First tokens are those whose
        own query sees no key before them: of packed documents each one's. With `heads`, ".../head_{n}" as well.
        """
        layers = self._found()
        names, rows = [], []
        for name, layer in layers.items():
            for quantity in QUANTITIES:
                heads = layer.of(quantity)
                rows.append(torch.stack([heads.min(), heads.mean(), heads.max()]))
                names += [f"attention/{name}/{quantity}/{of}" for of in ("min", "mean", "max")]
                if self.heads:
                    rows.append(heads)
                    names += [f"attention/{name}/{quantity}/head_{n}" for n in range(len(heads))]
        # One wait for the device.
        return dict(zip(names, torch.cat([row.cpu().double() for row in rows]).tolist(), strict=True))

    def alarms(self, logits: float = 100.0, entropy: float = 0.05) -> list[Alarm]:
        """What looks like a run that will diverge, in the last step watched.

        Arguments:
            logits: a head's largest score above it, or that is no number, is an alarm. 100 is where QK-clip begins
                (τ of Kimi K2; Kimi Team 2025, arXiv:2507.20534); growth to 10⁴ and more went with divergence in
                Dehghani et al. 2023 (arXiv:2302.05442) and Wortsman et al. 2023 (arXiv:2309.14322).
            entropy: a layer whose mean entropy, in nats, is below it has collapsed (Zhai et al. 2023,
                arXiv:2303.06296, who give no number: 0.05 is what a query with 99 % of its weight on one key has).
        """
        found = []
        for name, layer in self._found().items():
            for head, value in enumerate(layer.max_score.tolist()):
                if not value <= logits:
                    found.append(Alarm("logits", name, head, value, logits))
            mean = float(layer.of("entropy").mean())
            if mean < entropy:  # no number at all is the logits' alarm
                found.append(Alarm("entropy", name, None, mean, entropy))
        return found

    # What the watch tells.

    def _receive(self, call: Call, running: list[Running]) -> None:
        known = self._seen.known(running)
        if not known:
            return
        if 0 in (*call.query.shape[:3], call.key.shape[2]):
            return self._miss("of an empty batch", running)
        if self._new:
            self._layers, self._new, self._used = {}, False, False
        self._seen.begins(known)
        name = self._seen.name(call, known)
        name, _ = self._seen.number(name, call.cross, lambda name: False)
        found = _read(call, known[-1].module)
        if name in self._layers:
            self._layers[name].add(found)
        else:
            self._layers[name] = found

    def _miss(self, reason: str, running: list[Running]) -> None:
        if self._seen.known(running):
            self._missed[reason] = self._missed.get(reason, 0) + 1

    def _found(self) -> dict[str, _Layer]:
        if self._layers:
            return self._layers
        if self._missed:
            raise LookupError(words.missed(self._missed))
        raise LookupError(
            "the monitor saw no step: run forward and backward within `with monitor:`"
            + (f". {words.nothing_seen(self.model)}" if self.step else "")
        )


def _read(call: Call, module: nn.Module) -> _Layer:
    b, h, i, _ = call.query.shape
    g, j = call.key.shape[1:3]
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key, keep = call.query.to(dtype), call.key.to(dtype), call.rule.keep
    count, first = _visible(call)
    share, (largest, entropy, lse) = es.attention(
        query,
        key,
        first.to(dtype)[:, None, :, None].expand(b, g, -1, -1),  # the weight on first tokens rides along as the value
        call.mask,
        offset=call.offset,
        readouts=[es.MaxScore(), es.Entropy(), es.LogSumExp()],
        **call.settings,
    )
    real = lse != -torch.inf
    if keep is not None and not call.cross and i == j:
        real = real & keep[:, None].to(real.device)
        largest = largest.masked_fill(~real, -torch.inf)
    # Without a choice of keys there is nothing to tell; a sink is a choice.
    told = real if "sink" in call.settings else real & (count > 1)

    def total(values: Float[Tensor, "b h i"]) -> Float[Tensor, " h"]:
        return values.where(told, 0).sum((0, 2))

    return _Layer(
        module,
        largest.amax((0, 2)),
        total(entropy),
        total(share.squeeze(-1)),
        told.expand(b, h, i).sum((0, 2)).to(dtype),
        "softcap" in call.settings,
    )


def _visible(call: Call) -> tuple[Int[Tensor, "b _ i"], Bool[Tensor, "b j"]]:
    """How many keys each query may see, and which keys are first tokens.

    A first token is one whose own query sees no key before it: that of the row, or of each packed document. In
    cross-attention it is the first key that isn't padding.
    """
    b, _, i, _ = call.query.shape
    j, rule, device = call.key.shape[2], call.rule, call.key.device
    keep = torch.ones(1, j, dtype=torch.bool, device=device) if rule.keep is None else rule.keep.to(device)
    start = torch.zeros_like(keep).scatter_(1, keep.to(torch.uint8).argmax(1, keepdim=True), True).expand(b, -1)
    if rule.other is None and isinstance(call.offset, int):
        place = call.offset + torch.arange(i, device=device)
        before = F.pad(keep.cumsum(1), (1, 0))
        last = (place + 1).clamp(0, j) if rule.causal else torch.full_like(place, j)
        begin = torch.zeros_like(place) if rule.left is None else (place - rule.left).clamp(0, j)
        return (before[:, last] - before[:, begin])[:, None].expand(b, -1, -1), start
    # Equal scores tell it under any mask; the first of equals is the lowest key.
    lse, (_, lowest) = evenly(call).read([es.LogSumExp(), es.TopK(1)])
    if not call.cross and i == j and call.offset == 0:
        own = torch.arange(i, device=device)
        lowest = torch.where(lowest.squeeze(-1) < 0, j, lowest.squeeze(-1)).amin(1)
        start = lowest == own
    return lse.exp().round().long(), start
