"""What the tables of refusals share: operands, a call with some of them changed, and how a refusal is checked.

Each table says of a call which error it raises and what that says: the argument, what was expected, what came, and the
way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import operands
from torch._subclasses.fake_tensor import FakeTensorMode

import einsight as es

q, k, v = operands()  # b = 2, h = 6, g = 3, i = 5, j = 7, d = 11, e = 13
W = es.AttentionWeights(q, k)
boolean = torch.ones(5, 7, dtype=torch.bool)

Refusal = tuple[Callable[[], Any], type[Exception], str]


def attention(*changed: Any, **settings: Any) -> Any:
    given = dict(zip(("query", "key", "value"), (q, k, v), strict=True))
    names = ("query", "key", "value")
    for name in names:
        if name in settings:
            given[name] = settings.pop(name)
    return es.attention(*given.values(), *changed, **settings)


def elsewhere(*shape: int) -> torch.Tensor:
    """A tensor on another device, which this machine needn't have."""
    with FakeTensorMode():
        return torch.zeros(shape, device="cuda")


def check(refusal: Refusal) -> None:
    call, kind, message = refusal
    with pytest.raises(kind, match=re.escape(message)):
        call()
