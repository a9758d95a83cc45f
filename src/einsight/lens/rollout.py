"""Attention rollout, by products of operators."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from einsight.coordinates import as_axis, numbers
from einsight.lens import words
from einsight.lens.call import Call


def rollout(calls: list[Call], query: Any) -> Float[Tensor, "b n j"]:
    """See `Lens.rollout`."""
    b, _, i, _ = calls[0].query.shape
    if any(call.query.shape[2] != i or call.key.shape[2] != i for call in calls):
        alike: dict[tuple[int, int], list[str]] = {}
        for call in calls:
            alike.setdefault((call.query.shape[2], call.key.shape[2]), []).append(call.name)
        raise ValueError(
            "rollout needs layers that all map the same tokens onto themselves, but (queries, keys) are "
            + ", ".join(f"{sizes} with layers={words.common(names)!r}" for sizes, names in alike.items())
        )
    chosen = numbers(as_axis(query, i, "query"))
    eye = torch.eye(i, dtype=calls[0].weights.dtype, device=calls[0].query.device)
    rows = eye[chosen.to(eye.device)].expand(b, -1, -1)
    for call in reversed(calls):
        h = call.query.shape[1]
        spread = call.weights.mT @ rows.mT[:, None].expand(b, h, i, rows.shape[1])
        rows = (rows + spread.mean(1).mT) / 2
        # What a sink took, or a query that sees nothing, is shared out again.
        rows = rows / rows.sum(-1, keepdim=True)
    return rows
