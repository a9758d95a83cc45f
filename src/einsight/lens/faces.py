"""How each function of attention takes its arguments and gives its results: read as a `Call`, and written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from einsight.lens.call import Call, from_attention, from_sdpa


class Face(NamedTuple):
    """`read` makes a call of the arguments; `own` takes the output [b, h, i, e] out of a result, `put` puts one in.

    `put` is given the result, the output, the call as it was edited, and the heads whose weights changed.
    """

    read: Callable[..., Call]
    own: Callable[[Any, Call], Float[Tensor, "b h i e"]]
    put: Callable[[Any, Tensor, Call, list[int]], Any]


def _own(result: Tensor, call: Call) -> Tensor:
    return result.reshape(*call.query.shape[:3], result.shape[-1])


def _put(result: Tensor, output: Tensor, call: Call, heads: list[int]) -> Tensor:
    return output.reshape(result.shape).to(result.dtype)


sdpa = Face(from_sdpa, _own, _put)


def attention(readouts: Any) -> Face:
    """`einsight.attention`, which may have been asked for readouts."""
    if readouts is None:
        return Face(from_attention, _own, _put)

    def put(result: Any, output: Tensor, call: Call, heads: list[int]) -> Any:
        return output.to(result[0].dtype), call.weights.read(readouts) if heads else result[1]

    return Face(from_attention, lambda result, call: result[0], put)


def interface(read: Callable[..., Call]) -> Face:
    """Hugging Face's functions: (output [b, i, h, e], weights [b, h, i, j] or None)."""

    def put(result: Any, output: Tensor, call: Call, heads: list[int]) -> Any:
        weights = result[1]
        if heads and weights is not None:
            weights = dense(weights, call, heads)
        return output.to(result[0].dtype).transpose(1, 2).contiguous(), weights, *result[2:]

    return Face(read, lambda result, call: result[0].transpose(1, 2), put)


def dense(weights: Float[Tensor, "b h i j"], call: Call, heads: list[int]) -> Float[Tensor, "b h i j"]:
    """A model's own weights with those of the edited heads in their place."""
    edited = call.weights.select(heads=heads).dense().to(weights.dtype)
    edited = F.pad(edited, (0, weights.shape[-1] - edited.shape[-1]))  # room in a static cache
    return weights.index_copy(1, torch.tensor(heads, device=weights.device), edited)
