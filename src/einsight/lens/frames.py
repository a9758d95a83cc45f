"""Which modules are running, read from the interpreter's stack.

Hooks on modules would have to go into every module, be traced where code is compiled (and compiled again for each
lens), and travel with copies of the model. The stack is right in all of these, and each thread has its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import checkpoint

_CALL = frozenset(("_wrapped_call_impl", "_call_impl"))
_FILE = nn.Module._call_impl.__code__.co_filename
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_STEP = re.compile(r"\.(\w+)|\['(\w+)'\]|\[(\d+)\]")


class Running(NamedTuple):
    """A module whose code is running, and an object that each call of it has its own."""

    module: nn.Module
    call: object


def running() -> list[Running]:
    """The modules that are running in this thread, outermost first."""
    found = []
    for frame in _frames():
        # Compiled code has other code objects, of the same names. Of other frames nothing is asked: Python before
        # 3.13 would keep alive what their variables hold.
        if frame.f_code.co_name in _CALL and frame.f_code.co_filename == _FILE:
            own = frame.f_locals
            found.append(Running(own["self"], own["kwargs"]))
    return found[::-1]


def unwatched(function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """A copy of a function of PyTorch's that believes that nobody is looking, and so doesn't hand itself to a mode."""
    scope = {**function.__globals__, **dict.fromkeys(_CHECKS, lambda *tensors: False), **changes}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def find(source: str) -> nn.Module | None:
    """The module that compiled code names by its source, such as L['self'].layers.0, in the innermost frame with it."""
    if not (start := re.match(r"([LG])\['(\w+)'\]", source)):
        return None
    kind, name = start.groups()
    steps = [next(filter(None, step)) for step in _STEP.findall(source[start.end() :])]
    for frame in _frames():
        code = frame.f_code
        if kind == "L" and name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            scope = frame.f_locals
        elif kind == "G":
            scope = frame.f_globals
        else:
            continue
        root = scope.get(name)
        # A graph runs as a module as well.
        if not isinstance(root, fx.GraphModule) and isinstance(found := _follow(root, steps), nn.Module):
            return found
    return None


def checkpointed() -> bool:
    """Whether what runs is checkpointed, and a backward will compute it again."""
    for frame in _frames():
        if frame.f_code.co_filename == checkpoint.__file__:
            if frame.f_code.co_name == "forward":  # of the reentrant kind, which runs without gradients
                return any(frame.f_locals["ctx"].needs_input_grad)
            if frame.f_code.co_name == "checkpoint":
                return torch.is_grad_enabled()
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _follow(root: Any, steps: list[str]) -> Any:
    for step in steps:
        if isinstance(root, nn.Module):
            root = root._modules.get(step, getattr(root, step, None))
        elif isinstance(root, list | tuple) and step.isdigit() and int(step) < len(root):
            root = root[int(step)]
        elif isinstance(root, dict):
            root = root.get(step)
        else:
            root = getattr(root, step, None)
    return root
