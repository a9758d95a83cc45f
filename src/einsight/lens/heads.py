"""What kind a head is, told from readouts of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import einsight as es
from einsight.lens import words
from einsight.lens.call import Call, evenly
from einsight.lens.table import Table
from einsight.values import described

# How each column is read; all are means over the queries where it can be told, padding left out.
COLUMNS = {
    "entropy": "entropy of the weights, in nats",
    "relative": "that entropy as a share of the largest possible, ln(visible keys)",
    "first": "weight on the first token",
    "previous": "weight on the previous token",
    "itself": "weight on the token itself",
    "induction": "weight on tokens that followed an earlier copy of this one",
    "duplicate": "weight on earlier copies of this token",
    "near": "weight within 32 tokens",
    "special": "weight on special tokens",
    "punctuation": "weight on punctuation",
    "distance": "mean distance looked across, in tokens",
}


class Heads(Table):
    """A table with a row per layer and head; the columns are those of `einsight.lens.heads.COLUMNS`.

    `Lens.heads` makes it; `note` is empty.

    >>> import torch
    >>> from einsight.lens import Lens
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> with Lens(layer) as lens:
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> heads = lens.heads(torch.tensor([7, 8, 7, 8, 9]))
    >>> len(heads), heads.grid("entropy").shape
    (2, torch.Size([1, 2]))
    """


def table(calls: list[Call], tokens: Any, tokenizer: Any = None) -> Heads:
    """The table of some layers' heads; see `Lens.heads`."""
    ids, real = _ids(tokens)
    if tokenizer is not None and not hasattr(tokenizer, "all_special_ids"):
        raise TypeError(f"tokenizer must be a tokenizer of Hugging Face's, not {described(tokenizer)}")
    kinds = None if tokenizer is None else _kinds(ids, tokenizer)
    columns: dict[str, list[Any]] = {"layer": [], "head": []}
    sequences: dict[Any, _Sequence] = {}
    calls = [_without_drafts(call, ids.shape[1]) for call in calls]
    if wrong := [call for call in calls if not _fits(call, ids)]:
        b, _, i, _ = wrong[0].query.shape
        fitting = [call.name for call in calls if _fits(call, ids)]
        raise ValueError(
            f"tokens must be those the model was given: layer {wrong[0].name!r} has {b} sequences "
            f"of {i} queries and {wrong[0].key.shape[2]} keys, but tokens are {list(ids.shape)}"
            + (f"; for the layers over these tokens write layers={words.common(fitting)!r}" if fitting else "")
        )
    for call in calls:
        b, h, i, _ = call.query.shape
        total: dict[str, Tensor] = {}
        count: dict[str, Tensor] = {}
        for item in range(b):
            chosen = _real(real, call, item)
            key = (item, tuple(chosen.tolist()) if len(chosen) < i else i)
            if key not in sequences:
                sequences[key] = _Sequence(ids[item, chosen], None if kinds is None else kinds[item, chosen])
            for name, (values, asked) in sequences[key].ask(call, item, chosen).items():
                told = torch.where(asked, values, 0).sum(-1, dtype=torch.float64)
                total[name] = total.get(name, 0) + told
                count[name] = count.get(name, 0) + asked.expand(values.shape).sum(-1)
        for name in COLUMNS:
            if name in total:
                columns.setdefault(name, []).extend((total[name] / count[name]).tolist())
        columns["layer"] += [call.index] * h
        columns["head"] += list(range(h))
    return Heads(columns)


def came_before(ids: Int[Tensor, " i"]) -> Bool[Tensor, " i"]:
    """Which tokens have an earlier copy."""
    order = torch.sort(ids, stable=True).indices
    ids = ids[order]
    alike = torch.zeros(len(ids), dtype=torch.bool)
    alike[order[1:]] = ids[1:] == ids[:-1]
    return alike


class _Sequence:
    """The tokens of one sequence, without its padding, and what is asked of the weights on them."""

    def __init__(self, ids: Int[Tensor, " i"], kinds: Int[Tensor, " i"] | None):
        self.ids, self.kinds, i = ids, kinds, len(ids)
        self.place = torch.arange(i)
        # Copies of a token side by side, in the order in which they came.
        self.order = torch.sort(ids, stable=True).indices
        self.back = self.order.argsort()
        self.copies = es.documents(ids[self.order]) & es.window(None, -1)
        has_copy = came_before(ids)
        self.asked = {
            "first": self.place > 0,
            "previous": self.place > 0,
            "induction": has_copy,
            "duplicate": has_copy,
        }

    def ask(
        self, call: Call, item: int, chosen: Int[Tensor, " i"]
    ) -> dict[str, tuple[Float[Tensor, "h i"], Bool[Tensor, "#h i"] | Bool[Tensor, " i"]]]:
        """Each column's values, and the queries for which it can be told."""
        query, key = call.query[item : item + 1], call.key[item : item + 1]
        if len(chosen) < query.shape[2]:
            query, key = query[:, :, chosen.to(query.device)], key[:, :, chosen.to(key.device)]
        settings, rule = call.settings, call.rule
        if rule.other is None and rule.left is None and not {"bias", "score_mod"} & settings.keys():
            found = self._by_parts(query, key, rule.causal, settings)
            visible = self.place + 1 if rule.causal else torch.full_like(self.place, len(chosen))
        else:
            found, visible = self._directly(call, item, chosen)
        found = {name: values.cpu() for name, values in found.items()}
        found["relative"] = found["entropy"] / visible.clamp(min=2).log()
        everywhere = torch.ones(len(chosen), dtype=torch.bool)
        asked = {**self.asked, "relative": visible > 1}
        return {name: (values, asked.get(name, everywhere)) for name, values in found.items()}

    def _by_parts(
        self, query: Tensor, key: Tensor, causal: bool, settings: dict[str, Any]
    ) -> dict[str, Float[Tensor, "h i"]]:
        """The share of the weights on some keys is exp(their lse − the whole lse), and theirs alone is cheap.

        What is linear in the weights rides along as the value of the one call over all keys.
        """
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key, device = query.to(dtype), key.to(dtype), query.device
        place = self.place.to(device, dtype)
        asked = {"first": place == 0, "place": place, "all": torch.ones_like(place)}
        if self.kinds is not None:
            asked |= {"special": self.kinds.to(device) == 1, "punctuation": self.kinds.to(device) == 2}
        value = torch.stack([column.to(dtype) for column in asked.values()], -1)
        value = value.expand(1, key.shape[1], *value.shape)
        mask = es.causal() if causal else None
        output, (lse, entropy) = es.attention(
            query, key, value, mask, readouts=[es.LogSumExp(), es.Entropy()], **settings
        )
        found = dict(zip(asked, output[0].unbind(-1), strict=True))
        alone = {name: setting for name, setting in settings.items() if name != "sink"}

        found["entropy"] = entropy[0]

        def share(query: Tensor, key: Tensor, mask: es.Mask, lse: Tensor) -> Float[Tensor, "h i"]:
            return (es.AttentionWeights(query, key, mask, **alone).lse() - lse).exp()[0]

        windows = {"near": (32, 0 if causal else 32), "previous": (1, -1), "itself": (0, 0)}
        found |= {name: share(query, key, es.window(*window), lse) for name, window in windows.items()}
        order, back = self.order.to(device), self.back.to(device)
        sorted_query, sorted_lse = query[:, :, order], lse[:, :, order]
        # What followed each key stands in its place.
        for name, keys in (("duplicate", key), ("induction", key.roll(-1, 2))):
            found[name] = share(sorted_query, keys[:, :, order], self.copies, sorted_lse)[:, back]
        far, whole = found.pop("place"), found.pop("all")
        if causal:
            found["distance"] = place * whole - far  # Σ w (p − j)
        else:
            found["distance"] = es.AttentionWeights(query, key, mask, **settings).distance()[0]
        return found

    def _directly(
        self, call: Call, item: int, chosen: Int[Tensor, " i"]
    ) -> tuple[dict[str, Float[Tensor, "h i"]], Int[Tensor, "#h i"]]:
        """The same from readouts of the weights as they are, under any mask and bias."""
        i = call.query.shape[2]
        ids = torch.full((1, i), -1).index_copy(1, chosen, self.ids[None])
        before = torch.full((1, i), -2).index_copy(1, chosen[1:], self.ids[None, :-1])
        earlier = es.window(None, -1)
        columns = {"first": chosen[:1]}
        if self.kinds is not None:
            columns |= {"special": chosen[self.kinds == 1], "punctuation": chosen[self.kinds == 2]}
        member = torch.stack([torch.zeros(i).index_fill(0, keys, 1) for keys in columns.values()], -1)
        weights = call.weights.select(batch=[item], queries=chosen)
        found = weights.read(
            {
                "entropy": es.Entropy(),
                "mass": es.Mass(member.to(call.query.device)),
                "previous": es.Diagonal(-1),
                "itself": es.Diagonal(0),
                "near": es.Share(es.window(32, 32)),
                "duplicate": es.Share(es.same(ids, ids) & earlier),
                "induction": es.Share(es.same(ids, before) & es.window(None, 0)),
                "distance": es.Distance(),
            }
        )
        found |= dict(zip(columns, found.pop("mass").unbind(-1), strict=True))
        return {name: values[0] for name, values in found.items()}, _visible(call, item, chosen)


def _fits(call: Call, ids: Int[Tensor, "b m"]) -> bool:
    b, _, i, _ = call.query.shape
    return i <= ids.shape[1] <= i + 1 and call.key.shape[2] == i and ids.shape[0] == b


def _without_drafts(call: Call, count: int) -> Call:
    """A call for as many tokens, where it has more queries that can be a draft which was refused."""
    shorter = call._until(count) if call._until is not None and count < call.query.shape[2] else None
    return call if shorter is None else shorter


def _real(real: Bool[Tensor, "b m"] | None, call: Call, item: int) -> Int[Tensor, " n"]:
    """The places of an item's tokens that aren't padding."""
    i, keep = call.query.shape[2], call.rule.keep
    if real is not None:
        return real[item, :i].nonzero().flatten().cpu()
    if keep is not None:
        return keep[min(item, len(keep) - 1)].nonzero().flatten().cpu()
    places = torch.arange(i)
    # Under any other mask, what sees nothing is padding.
    return places if call.rule.other is None else places[(_visible(call, item, places) > 0).any(0)]


def _visible(call: Call, item: int, chosen: Int[Tensor, " n"]) -> Int[Tensor, "#h n"]:
    """How many keys each query may see: exp of the lse of equal scores."""
    return evenly(call).select(batch=[item], queries=chosen).lse()[0].exp().round().cpu().long()


def _ids(tokens: Any) -> tuple[Int[Tensor, "b i"], Bool[Tensor, "b i"] | None]:
    real = None
    if isinstance(tokens, Mapping) or hasattr(tokens, "input_ids"):
        real = tokens.get("attention_mask")
        tokens = tokens["input_ids"]
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"tokens must be token ids [b, i] or [i], or a tokenizer's output, not {described(tokens)}"
            + ("; write tokenizer(text)" if isinstance(tokens, str) else "")
        ) from error
    if ids.dtype.is_floating_point or ids.ndim not in (1, 2):
        raise TypeError(
            f"tokens must be token ids [b, i] or [i], or a tokenizer's output, not {ids.dtype} {list(ids.shape)}"
        )
    if real is not None:
        real = torch.as_tensor(real).reshape(-1, ids.shape[-1]).bool()
    return ids.reshape(-1, ids.shape[-1]), real


def _kinds(ids: Int[Tensor, "b i"], tokenizer: Any) -> Int[Tensor, "b i"]:
    """1 for special tokens, 2 for punctuation, else 0."""
    special = set(tokenizer.all_special_ids)
    kind = {}
    for token in set(ids.flatten().tolist()):
        text = tokenizer.decode([token]).strip()
        kind[token] = 1 if token in special else 2 if text and not any(c.isalnum() for c in text) else 0
    return torch.tensor([[kind[token] for token in row] for row in ids.tolist()], device=ids.device)
