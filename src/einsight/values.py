"""What somebody gave: how to speak of it in an error, and whether its numbers can be looked at."""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch._guards import detect_fake_mode

_LONGEST = 200  # characters of a value's repr


def described(value: object) -> str:
    """A value in a few words: of tensors and arrays the shape, of what is long the beginning."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    shape = getattr(value, "shape", ())
    if shape and hasattr(value, "__array_interface__"):
        return f"a NumPy array {list(shape)}; write torch.from_numpy(array)"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def check_dense(name: str, tensor: Tensor, letters: str = "") -> None:
    """Refuse a tensor whose numbers can't be read one by one."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "on the meta device" if tensor.is_meta else "sparse"
        raise TypeError(f"{name} must be a dense tensor{letters} that holds numbers, but it is {kind}")


def check_takes(name: str, function: object, arguments: str) -> None:
    """Refuse what isn't a function, or one that can't be called with so many arguments."""
    if not callable(function):
        raise TypeError(f"{name} must be a function fn({arguments}), not {described(function)}")
    if torch.compiler.is_compiling():  # which can't look at signatures
        return
    try:
        found = signature(function)
    except ValueError:  # a builtin that doesn't tell
        return
    try:
        found.bind(*arguments.split(", "))
    except TypeError as error:
        raise TypeError(f"{name} must be a function fn({arguments}), but takes {found}: {error}") from None


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {described(value)}")


def is_sure(condition: Tensor) -> bool:
    """Whether all of it is true, as far as may be looked."""
    return may_look(condition) and bool(condition.all())


def may_look(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are there to be looked at: not while torch.compile, torch.export, torch.func or a
    fake mode runs through, nor on the meta device."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) is not Tensor:
        return False
    if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
        return False
    return maybe_current_level() is None
