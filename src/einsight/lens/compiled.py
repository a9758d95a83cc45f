"""Calls inside `torch.compile`: seen by an operator that the compiler keeps in the graph.

What Python would append to a list while the compiler traces makes it compile again for every length of the list.
An opaque operator that claims to change a tensor is neither looked into nor dropped, and runs when the graph runs.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from einsight.lens.call import from_sdpa
from einsight.pose import autocast

# Methods of Tensor that are written in Python call super(), which the compiler can't follow from within a function
# mode; by their names it knows them.
METHODS = frozenset(name for name, method in vars(Tensor).items() if isinstance(method, FunctionType))

CHANGED = torch.zeros(())  # what the operator claims to change

_SCHEMA = (
    "(Tensor(a!) changed, Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
    "Tensor? bias, float? softcap, Tensor? sink, str source) -> ()"
)


@torch.library.custom_op("einsight::seen", mutates_args=("changed",), schema=_SCHEMA)
def seen(
    changed: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
    source: str,
) -> None:
    from einsight.lens.watch import here

    here().from_graph(
        lambda: from_sdpa(
            query, key, value, mask, is_causal=is_causal, scale=scale, bias=bias, softcap=softcap, sink=sink
        ),
        source,
    )


@seen.register_fake
def _(*given: Any) -> None:
    return None


def report(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> None:
    """Put the operator into the graph that is being traced; what is `given` is named as PyTorch names it."""
    query, key, value = autocast(query.detach(), key.detach(), value.detach())
    mask, bias, sink = (
        None if tensor is None else tensor.detach()
        for tensor in (given.get("attn_mask"), given.get("bias"), given.get("sink"))
    )
    is_causal, scale = given.get("is_causal", False), given.get("scale")
    seen(CHANGED, query, key, value, mask, is_causal, scale, bias, given.get("softcap"), sink, where())


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Those of `scaled_dot_product_attention` that the operator takes, by name."""
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
    }


def where() -> str:
    """The module being traced, as the compiler names it, L['self'].layers.0; empty where this torch doesn't tell."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    frame = InstructionTranslator.current_tx().output.current_tx  # the innermost function that is traced into
    while frame is not None:
        if stack := getattr(frame, "nn_module_stack", None):
            return next(reversed(stack.values()))[0]
        frame = getattr(frame, "parent", None)
    return ""


# What torch.compiler.assume_constant_result does, but for importing the compiler, which takes a second.
where._dynamo_marked_constant = True  # type: ignore[attr-defined]
