"""Calls inside `torch.compile`: seen by an operator that the compiler keeps in the graph.

What Python would append to a list while the compiler traces makes it compile again for every length of the list.
An opaque operator that claims to change a tensor is neither looked into nor dropped, and runs when the graph runs.
"""

from __future__ import annotations

import re
from types import FunctionType

import torch
from torch import Tensor

# Methods of Tensor that are written in Python call super(), which the compiler can't follow from within a function
# mode; by their names it knows them.
METHODS = frozenset(name for name, method in vars(Tensor).items() if isinstance(method, FunctionType))

_SCHEMA = (
    "(Tensor(a!) changed, Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
    "str name) -> ()"
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
    name: str,
) -> None:
    from einsight.lens.watch import here

    here().from_graph(query, key, value, mask, is_causal, scale, name)


@seen.register_fake
def _(changed, query, key, value, mask, is_causal, scale, name) -> None:
    return None


def report(changed: Tensor, args: tuple, kwargs: dict) -> None:
    """Put the operator into the graph that is being traced."""
    query, key, value, mask, is_causal, scale = _arguments(*args, **kwargs)
    mask = mask if mask is None else mask.detach()
    seen(changed, query.detach(), key.detach(), value.detach(), mask, is_causal, scale, where())


def _arguments(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return query, key, value, attn_mask, is_causal, scale


@torch._dynamo.assume_constant_result
def where() -> str:
    """The name of the module being traced, within what is compiled; empty where this torch doesn't tell."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    frame = InstructionTranslator.current_tx().output.current_tx  # the innermost function that is traced into
    while frame is not None:
        if stack := getattr(frame, "nn_module_stack", None):
            name = next(reversed(stack.values()))[0]
            # Such as L['self'].layers.0 or L['args'][0].layers.0; containers may be spelt out, ._modules['layers'].
            name = re.sub(r"\._modules\['(\w+)'\]", r".\1", name)
            return re.sub(r"^L\['\w+'\](\[\d+\])*\.?", "", name)
        frame = getattr(frame, "parent", None)
    return ""
