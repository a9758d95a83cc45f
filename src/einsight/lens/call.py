"""One call of attention, as a model made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

import einsight as es
from einsight.lens.rules import Rule, of_mask, once, recognise, split
from einsight.pose import autocast

ONLY_RESULTS = "the lens keeps only results when it is opened with readouts; leave them out to ask afterwards"


@dataclass(eq=False)
class Call:
    """A call of attention: its tensors as [b, h, i, d] and [b, g, j, d], and the settings that shape its weights.

    `query`, `key` and `value` (None unless the lens keeps values) are detached where a lens gives them. `rule` is what
    the model's mask was recognised as, `offset` where query 0 stands among the keys, `dropout` the probability that the
    model applied. `index` counts the model's self-attention layers (for cross-attention, those), `name` is the module's
    name, `results` what the lens' readouts gave.

    >>> import torch
    >>> from einsight.lens import Lens
    >>> layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 6)
    >>> with Lens(layer) as lens:
    ...     _ = layer(x, x, x)
    >>> call = lens[0]
    >>> call.query.shape, call.weights.dense().shape
    (torch.Size([1, 2, 4, 3]), torch.Size([1, 2, 4, 4]))
    """

    query: Float[Tensor, "b h i d"]
    key: Float[Tensor, "b g j d"]
    value: Float[Tensor, "b g j e"] | None
    rule: Rule = field(default_factory=Rule)
    offset: int | Tensor = 0
    settings: dict[str, Any] = field(default_factory=dict)
    cross: bool = False
    name: str = ""
    index: int = -1
    module: nn.Module | None = None
    _results: Any = None
    dropout: float = 0.0
    _read: bool = False  # whether only the results were kept
    _window: int | None = None  # how many keys a cache may keep, where the model tells
    _until: Callable[[int], Call | None] | None = None  # what it was with fewer queries, the last step's left out

    @property
    def results(self) -> Any:
        """What the lens' readouts gave."""
        if self._results is None:
            raise LookupError(
                "there are no results: the lens was opened without readouts=. Ask afterwards, call.weights.read(…), or "
                "open it with Lens(model, readouts=…)"
            )
        return self._results

    @property
    def mask(self) -> es.Mask | None:
        """Which keys the queries may see, as one of Einsight's masks; None if all."""
        return self.rule.mask()

    @property
    def weights(self) -> es.AttentionWeights:
        """The call's weights, as a linear operator that is never materialised."""
        if self._read:
            raise LookupError(ONLY_RESULTS)
        return es.AttentionWeights(self.query, self.key, self.mask, offset=self.offset, **self.settings)

    def detached(self) -> Call:
        """The call without what gradients would flow through."""
        value = None if self.value is None else self.value.detach()
        settings = {name: _detached(setting) for name, setting in self.settings.items()}
        return replace(self, query=self.query.detach(), key=self.key.detach(), value=value, settings=settings)

    def __repr__(self) -> str:
        b, h, i, _ = self.query.shape
        kind = "cross-attention" if self.cross else "attention"
        return f"Call({kind} {self.index} {self.name!r}: b={b}, h={h}, i={i}, j={self.key.shape[2]})"


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **settings: Any,
) -> Call:
    """A call of PyTorch's `scaled_dot_product_attention`, whatever number of dimensions it had."""
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    query, key, value = (_four(t, lead) for t in (query, key, value))
    if attn_mask is not None:
        attn_mask = _four(attn_mask, lead)
    b = max(len(query), len(key), len(value))  # PyTorch lets one item stand for all
    query, key, value = (t if len(t) == b else t.expand(b, -1, -1, -1) for t in (query, key, value))
    return make(query, key, value, attn_mask, is_causal=is_causal, scale=scale, dropout=dropout_p, **settings)


def from_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **settings: Any) -> Call:
    """A call of `einsight.attention`."""
    offset, dropout = settings.pop("offset", None), settings.pop("dropout", 0.0)
    if offset is None:
        offset = max(key.shape[2] - query.shape[2], 0)
    query, key, value = autocast(query, key, value)
    kept = {n: s for n, s in settings.items() if n not in ("readouts", "engine") and s is not None}
    rule = of_mask(mask, query.shape[2], key.shape[2], offset)
    return Call(query, key, value, rule, offset, kept, dropout=dropout)


def make(
    query: Float[Tensor, "b h i d"],
    key: Float[Tensor, "b g j d"],
    value: Float[Tensor, "b g j e"] | None,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    offset: int | None = None,
    dropout: float = 0.0,
) -> Call:
    """A call from tensors as models give them: a boolean mask's True may be seen, a float one is added."""
    query, key, value = autocast(query, key, value)
    query = query.expand(key.shape[0], -1, -1, -1) if len(query) == 1 else query  # the same for every item
    i = query.shape[2]
    if is_causal and key.shape[2] > i:  # the first i keys are all that it can see
        key = key[:, :, :i]
        value = None if value is None else value[:, :, :i]
    key, value = ungrouped(key, value, query.shape[1])
    j = key.shape[2]
    rule, place = (Rule(causal=True), 0) if is_causal else (Rule(), max(j - i, 0))
    if mask is not None:
        visible = mask
        if mask.dtype != torch.bool:
            visible, added = split(mask[..., :j])
            if added is not None:
                added = once(added)
                bias = added if bias is None else bias + added
        rule, place = recognised(mask, visible[..., :j], i, j)
    settings = {
        "scale": scale,
        "softcap": softcap,
        "bias": bias,
        "sink": sink,
    }
    settings = {name: setting for name, setting in settings.items() if setting is not None}
    return Call(query, key, value, rule, place if offset is None else offset, settings, dropout=dropout)


def evenly(call: Call) -> es.AttentionWeights:
    """The weights of equal scores under a call's mask, from which can be told what is visible: the lse is ln(how many
    keys). One head stands for all where heads can't differ, which is where the mask is a rule."""
    heads = slice(1) if call.rule.other is None else slice(None)
    query, key = torch.zeros_like(call.query[:, heads, :, :1]), torch.zeros_like(call.key[:, heads, :, :1])
    return es.AttentionWeights(query, key, call.mask, offset=call.offset)


def _detached(setting: Any) -> Any:
    return setting.detach() if isinstance(setting, Tensor) else setting


_last: list[Any] = []  # the last mask tensor recognised: the layers of a model share one


def recognised(mask: Tensor, visible: Bool[Tensor, "#b #h #i #j"], i: int, j: int) -> tuple[Rule, int]:
    # An inference tensor has no version: only a copy tells whether it was written to.
    version = None if mask.is_inference() else mask._version
    signature = (mask.data_ptr(), tuple(mask.shape), mask.stride(), version, i, j)
    if _last and _last[0] is mask and _last[1] == signature and (version is not None or torch.equal(mask, _last[3])):
        return _last[2]
    rule, place = recognise(visible, i, j)
    if isinstance(rule.other, Tensor) and visible.dtype == mask.dtype:
        rule = replace(rule, other=_copy(rule.other))  # the model may write into its own
    _last[:] = [mask, signature, (rule, place), None if version is not None else mask.clone()]
    return rule, place


def _copy(mask: Tensor) -> Tensor:
    """A copy without what is repeated over batch and heads."""
    for dim in (0, 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.clone()


def ungrouped(key: Tensor, value: Tensor | None, h: int) -> tuple[Tensor, Tensor | None]:
    """The key/value heads that a model repeated for its query heads, once each."""
    g, times = key.shape[1], 1
    if g == h and h > 1 and key.numel():
        # Heads that were repeated are equal to the last bit; the first difference comes early when they weren't.
        first = key[:1, :, :1]
        while times < h and torch.equal(first[:, :1], first[:, times : times + 1]):
            times += 1
        while times > 1 and (
            h % times or not _repeats(key, times) or (value is not None and not _repeats(value, times))
        ):
            times -= 1
    if times == 1:
        return key, value
    return key[:, ::times], None if value is None else value[:, ::times]


def _repeats(tensor: Tensor, times: int) -> bool:
    heads = tensor.unflatten(1, (-1, times))
    return all(torch.equal(heads[:, :, 0], heads[:, :, n]) for n in range(1, times))


def _four(tensor: Tensor, lead: torch.Size) -> Tensor:
    """[..., h, i, d] as [b, h, i, d]: what lies before the heads becomes the batch."""
    tensor = tensor[(None,) * (4 - tensor.ndim)] if tensor.ndim < 4 else tensor
    if len(lead) <= 1:
        return tensor
    return tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4)
