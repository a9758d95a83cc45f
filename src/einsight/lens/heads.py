"""What kind a head is, told from readouts of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import einsight as es
from einsight.lens.call import Call

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


class Heads:
    """A table with a row per layer and head; the columns are those of `einsight.lens.heads.COLUMNS`."""

    def __init__(self, columns: dict[str, list]):
        self._columns = columns

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(self._columns["layer"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows, each a dict."""
        names = self._columns
        return (dict(zip(names, row, strict=True)) for row in zip(*names.values(), strict=True))

    def __getitem__(self, column: str) -> list:
        if column not in self._columns:
            raise KeyError(f"no column {column!r}; there are {', '.join(self._columns)}")
        return self._columns[column]

    def sort(self, by: str, descending: bool = True) -> Heads:
        """The rows in the order of a column, largest first; what can't be told comes last."""
        key = self[by]
        told = [n for n in range(len(self)) if key[n] == key[n]]
        order = sorted(told, key=lambda n: -key[n] if descending else key[n])
        return self._take(order + [n for n in range(len(self)) if key[n] != key[n]])

    def top(self, n: int) -> Heads:
        """The first n rows."""
        return self._take(range(min(n, len(self))))

    def grid(self, column: str) -> Float[Tensor, "layer head"]:
        """A column as a tensor with a row per layer, NaN where a layer has fewer heads."""
        layers, heads = self["layer"], self["head"]
        made = torch.full((int(max(layers)) + 1, int(max(heads)) + 1), torch.nan)
        for layer, head, value in zip(layers, heads, self[column], strict=True):
            made[int(layer), int(head)] = value
        return made

    def to_dict(self) -> dict[str, list]:
        """The columns, as lists."""
        return {name: list(column) for name, column in self._columns.items()}

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas; to_dict() needs nothing") from error
        return pandas.DataFrame(self.to_dict())

    def __rich__(self) -> Any:
        from rich.table import Table

        made = Table(box=None, header_style="bold", pad_edge=False)
        for name in self._columns:
            made.add_column(name, justify="right")
        for row in zip(*self._columns.values(), strict=True):
            made.add_row(*(_written(value) for value in row))
        return made

    def __repr__(self) -> str:
        rows = [self.columns, *([_written(v) for v in row] for row in zip(*self._columns.values(), strict=True))]
        if len(rows) > 21:
            rows = [*rows[:21], ["…"] * len(self._columns)]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self._columns))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(lines)

    def _take(self, rows: Any) -> Heads:
        rows = list(rows)
        return Heads({name: [column[n] for n in rows] for name, column in self._columns.items()})


def table(calls: list[Call], tokens: Any, tokenizer: Any = None) -> Heads:
    """The table of some layers' heads; see `Lens.heads`."""
    ids, real = _ids(tokens)
    columns: dict[str, list] = {"layer": [], "head": []}
    questions: dict[Any, _Questions] = {}
    for call in calls:
        i, j = call.query.shape[2], call.key.shape[2]
        if not i <= ids.shape[1] <= i + 1 or j != i or ids.shape[0] != call.query.shape[0]:
            raise ValueError(
                f"tokens must be those the model was given: layer {call.name!r} has {call.query.shape[0]} sequences "
                f"of {i} queries and {j} keys, but tokens are {list(ids.shape)}"
            )
        # Layers that share a mask share everything that doesn't depend on the weights.
        key = (i, id(call.rule.keep), id(call.rule.other), call.rule.causal, call.rule.left)
        if key not in questions:
            questions[key] = _Questions(call, ids[:, :i], None if real is None else real[:, :i], tokenizer)
        for name, values in questions[key].ask(call).items():
            columns.setdefault(name, []).extend(values)
        columns["layer"] += [call.index] * call.query.shape[1]
        columns["head"] += list(range(call.query.shape[1]))
    return Heads(columns)


class _Questions:
    """What is asked of every layer, and how the answers are averaged."""

    def __init__(self, call: Call, ids: Int[Tensor, "b i"], real: Bool[Tensor, "b i"] | None, tokenizer: Any):
        device = call.query.device
        ids = ids.to(device)
        b, i = ids.shape
        keep = call.rule.keep
        if real is None:
            real = torch.ones(b, i, dtype=torch.bool) if keep is None else keep.expand(b, i)
        self.real = real = real.to(device)
        place = torch.arange(i, device=device)
        first = real.int().argmax(1)  # the first real token: padding may be on the left
        before = _shifted(ids, real)
        earlier = es.window(None, -1)
        self.readouts: dict[str, es.Readout] = {
            "entropy": es.Entropy(),
            "first": es.Mass(torch.where(place == first[:, None], 0, -1), 1),
            "previous": es.Diagonal(-1),
            "itself": es.Diagonal(0),
            "induction": es.Share(es.same(ids, before)),
            "duplicate": es.Share(es.same(ids, ids) & earlier),
            "near": es.Share(es.window(32, 32)),
            "distance": es.Distance(),
        }
        follows = place > first[:, None]
        self.asked = {
            "previous": real & follows,
            "first": real & follows,
            "induction": real & _has_match(ids, before, causal=call.rule.causal),
            "duplicate": real & _has_match(ids, torch.where(real, ids, -1), strict=True),
        }
        if tokenizer is not None:
            kinds = _kinds(ids, tokenizer)
            self.readouts["special"] = es.Mass(torch.where(kinds == 1, 0, -1), 1)
            self.readouts["punctuation"] = es.Mass(torch.where(kinds == 2, 0, -1), 1)
        self.visible = _visible(call)

    def ask(self, call: Call) -> dict[str, list]:
        answers = call.weights.read(self.readouts)
        answers = {n: a.squeeze(-1) if a.ndim == 4 else a for n, a in answers.items()}
        most = self.visible.clamp(min=1).log()
        answers["relative"] = answers["entropy"] / most.clamp(min=1e-9)
        found = {}
        for name in COLUMNS:
            if name in answers:
                asked = self.asked.get(name, self.real)[:, None]
                if name == "relative":
                    asked = asked & (self.visible > 1)
                found[name] = _mean(answers[name], asked)
        return found


def _mean(values: Float[Tensor, "b h i"], asked: Bool[Tensor, "b #h i"]) -> list:
    count = asked.expand(values.shape).sum((0, 2))
    return (torch.where(asked, values, 0).sum((0, 2), dtype=torch.float64) / count).tolist()


def _visible(call: Call) -> Float[Tensor, "b 1 i"]:
    """How many keys each query may see: exp of the lse of equal scores."""
    query, key = call.query[:, :1, :, :1] * 0, call.key[:, :1, :, :1] * 0
    same = es.AttentionWeights(query, key, call.mask, offset=call.offset)
    return same.lse().exp().round()


def _ids(tokens: Any) -> tuple[Int[Tensor, "b i"], Bool[Tensor, "b i"] | None]:
    real = None
    if isinstance(tokens, Mapping) or hasattr(tokens, "input_ids"):
        real = tokens.get("attention_mask")
        tokens = tokens["input_ids"]
    ids = torch.as_tensor(tokens)
    if ids.dtype.is_floating_point or ids.ndim not in (1, 2):
        raise TypeError(f"tokens must be token ids [b, i] or [i], or a tokenizer's output, not {ids.dtype} {list(ids.shape)}")
    if real is not None:
        real = torch.as_tensor(real).reshape(-1, ids.shape[-1]).bool()
    return ids.reshape(-1, ids.shape[-1]), real


def _shifted(ids: Int[Tensor, "b i"], real: Bool[Tensor, "b i"]) -> Int[Tensor, "b i"]:
    """The token before each, -1 where there is none."""
    before = ids.roll(1, 1).masked_fill(~real.roll(1, 1), -1)
    before[:, 0] = -1
    return before


def _has_match(
    queries: Int[Tensor, "b i"], keys: Int[Tensor, "b i"], *, causal: bool = True, strict: bool = False
) -> Bool[Tensor, "b i"]:
    """Whether some key (an earlier one) carries the query's id."""
    found = torch.zeros_like(queries, dtype=torch.bool)
    for row in range(len(queries)):
        seen: dict[int, int] = {}
        for n, key in enumerate(keys[row].tolist()):
            seen.setdefault(key, n)
        for n, query in enumerate(queries[row].tolist()):
            at = seen.get(query)
            found[row, n] = at is not None and (not causal or (at < n if strict else at <= n))
    return found


def _kinds(ids: Int[Tensor, "b i"], tokenizer: Any) -> Int[Tensor, "b i"]:
    """1 for special tokens, 2 for punctuation, else 0."""
    special = set(tokenizer.all_special_ids)
    kind = {}
    for token in set(ids.flatten().tolist()):
        text = tokenizer.decode([token]).strip()
        kind[token] = 1 if token in special else 2 if text and not any(c.isalnum() for c in text) else 0
    return torch.tensor([[kind[token] for token in row] for row in ids.tolist()], device=ids.device)


def _written(value: int | float) -> str:
    return str(value) if isinstance(value, int) else "–" if value != value else f"{value:.3f}"
