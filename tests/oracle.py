"""The oracle: whole matrices in float64, written apart from the package, and budgets for errors against it.

Nothing here calls einsight. Masks are predicates over single indices; readouts are taken from dense weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Predicate = Callable[[int, int, int, int, int], bool]  # (b, h, i, p, j)


@dataclass
class Case:
    """An attention problem: tensors, dense settings for the oracle, and the arguments that say the same to einsight."""

    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    predicate: Predicate | None = None
    scale: float | None = None
    softcap: float | None = None
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    bias: Callable[[torch.dtype], Tensor] | None = None
    sink: Tensor | None = None
    offset: int | list[int] = 0
    learned: dict[str, Tensor] = field(default_factory=dict)  # bias tensors, slopes, tables and sinks
    _allowed: Tensor | None = field(default=None)  # asked once, kept by copies

    def __repr__(self) -> str:
        shapes = [list(t.shape) for t in (self.query, self.key, self.value)]
        return f"Case({self.query.dtype}, {shapes}, offset={self.offset}, {self.arguments})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every tensor

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        b, h, i, _ = self.query.shape
        return b, h, self.key.shape[1], i, self.key.shape[2]

    @property
    def accuracy(self) -> torch.dtype:
        """What readouts come in."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def positions(self) -> Tensor:
        """[b, i]"""
        b, _, _, i, _ = self.sizes
        offset = [self.offset] * b if isinstance(self.offset, int) else self.offset
        return torch.tensor(offset, dtype=torch.int64)[:, None] + torch.arange(i)

    def allowed(self) -> Tensor:
        if self._allowed is None:
            self._allowed = self._ask_every_pair()
        return self._allowed

    def _ask_every_pair(self) -> Tensor:
        b, h, _, i, j = self.sizes
        allowed = torch.ones(b, h, i, j, dtype=torch.bool)
        if self.predicate is not None:
            p = self.positions().tolist()
            for at in itertools.product(range(b), range(h), range(i), range(j)):
                allowed[at] = self.predicate(at[0], at[1], at[2], p[at[0]][at[2]], at[3])
        return allowed


def attend(case: Case, dtype: torch.dtype = torch.float64, order: int = 0) -> dict[str, Tensor]:
    """Output, weights, scores, lse and what is visible, by the formula in a dtype.

    `order` > 0 shuffles keys and the head dimension inside, which changes nothing but the rounding.
    """
    b, h, g, i, j = case.sizes
    shuffle = torch.Generator().manual_seed(order)
    keys = torch.randperm(j, generator=shuffle) if order else torch.arange(j)
    dims = torch.randperm(case.query.shape[3], generator=shuffle) if order else torch.arange(case.query.shape[3])
    back = keys.argsort()

    query = case.query.to(dtype)[..., dims]
    key = case.key.to(dtype)[:, :, keys][..., dims].repeat_interleave(h // g if g else 1, 1)
    value = case.value.to(dtype)[:, :, keys].repeat_interleave(h // g if g else 1, 1)
    scores = query @ key.mT * (case.query.shape[3] ** -0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.score_mod is not None:
        at = torch.arange(b)[:, None, None, None], torch.arange(h)[:, None, None]
        scores = case.score_mod(scores, *at, case.positions()[:, None, :, None], keys).to(dtype)
    visible = case.allowed()[..., keys]
    if case.bias is not None:
        bias = case.bias(dtype).expand(b, h, i, j)[..., keys]
        visible = visible & (bias != -torch.inf)
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    joined = scores
    if case.sink is not None:
        joined = torch.cat([scores, case.sink.to(dtype)[None, :, None, None].expand(b, h, i, 1)], -1)
    empty = (joined == -torch.inf).all(-1, keepdim=True)
    weights = joined.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)[..., :j]
    weights = weights.masked_fill(~visible, 0)
    lse = joined.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return {
        "output": weights @ value,
        "weights": weights[..., back],
        "scores": scores[..., back],
        "visible": visible[..., back],
        "lse": lse,
    }


def entropy(weights: Tensor) -> Tensor:
    return -torch.where(weights > 0, weights * torch.where(weights > 0, weights, 1).log(), 0).sum(-1)


def max_score(scores: Tensor) -> Tensor:
    return scores.amax(-1) if scores.shape[-1] else scores.sum(-1) - torch.inf


def topk(weights: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """By sorting whole rows, of equal weights the first key before the others."""
    found, index = weights.masked_fill(~visible, -1).sort(dim=-1, descending=True, stable=True)
    index = index.masked_fill(found < 0, -1)
    found = found.clamp(min=0)
    more = max(k - weights.shape[-1], 0)
    return pad(found[..., :k], (0, more)), pad(index[..., :k], (0, more), value=-1)


def pool(weights: Tensor, block: int) -> Tensor:
    b, h, i, j = weights.shape
    rows = [weights[:, :, r : r + block].mean(2) for r in range(0, i, block)]
    rows = torch.stack(rows, 2) if rows else weights.new_zeros(b, h, 0, j)
    columns = [rows[..., c : c + block].sum(-1) for c in range(0, j, block)]
    return torch.stack(columns, -1) if columns else rows.new_zeros(*rows.shape[:3], 0)


def budget(reference: Tensor, low: list[Tensor], result_dtype: torch.dtype) -> float:
    """Twice the formula's own error in a dtype, over several orders of summation, plus one rounding of the result.

    In float64 the oracle errs itself as much as the formula does, so that two results may lie three such errors apart.
    """
    if reference.numel() == 0:
        return 0.0
    finite = reference.isfinite()
    size = reference[finite].abs().max().item() if finite.any() else 0.0
    error = max((x.double() - reference)[finite].abs().max().item() if finite.any() else 0.0 for x in low)
    rounding = torch.finfo(result_dtype).eps * size
    return (3 if result_dtype == torch.float64 else 2) * error + 2 * rounding
