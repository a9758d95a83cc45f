"""What one thread sees of attention: a function mode, and the stack of the modules that are running.

There is one `Watch` per thread, for good, and every lens open in that thread listens to it: a function mode that
came and went with each lens would make a compiled model compile again for each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.overrides import TorchFunctionMode

import einsight as es
from einsight.lens import compiled, multihead
from einsight.lens.call import Call, from_sdpa
from einsight.lens.rules import Rule

if TYPE_CHECKING:
    from einsight.lens.lens import Lens

_threads = threading.local()


def here() -> Watch:
    """This thread's watch."""
    if not hasattr(_threads, "watch"):
        _threads.watch = Watch()
    return _threads.watch


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lenses: list[Lens] = []
        self.stack: list[nn.Module] = []  # the modules that are running, outermost first
        self.forward = object()  # stands for one call of the outermost of them
        self.busy = False  # whether the attention that is running has been seen already
        self.cross = False  # whether a multi-head attention that is running looks at other tokens than its own
        self.changed = torch.zeros(())
        self._thread = threading.get_ident()
        self._entered = False
        self._hooked: dict[int, list[Any]] = {}  # model → [how many lenses, handles]

    # Lenses come and go.

    def open(self, lens: Lens) -> None:
        if not self._entered:
            self.__enter__()
            self._entered = True
        self.lenses.append(lens)
        entry = self._hooked.setdefault(id(lens.model), [0, []])
        entry[0] += 1
        if entry[0] == 1:
            for module in _hookable(lens.model):
                entry[1].append(module.register_forward_pre_hook(self._enter_module))
                entry[1].append(module.register_forward_hook(self._leave_module, always_call=True))

    def close(self, lens: Lens) -> None:
        self.lenses.remove(lens)
        entry = self._hooked[id(lens.model)]
        entry[0] -= 1
        if entry[0] == 0:
            for handle in entry[1]:
                handle.remove()
            del self._hooked[id(lens.model)]
        if not self.lenses:
            self.stack.clear()
            # Another thread can't take the mode off this one's; it stays, without anyone listening.
            if threading.get_ident() == self._thread:
                self.__exit__(None, None, None)
                self._entered = False

    # A model that is copied or saved in a lens takes its hooks along: to a watch that doesn't know the copy.

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return self

    def __reduce__(self) -> tuple[Callable[[], Watch], tuple[()]]:
        return here, ()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if self.lenses and threading.get_ident() == self._thread:
            if not self.stack:
                self.forward = object()
            self.stack.append(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            while self.stack and self.stack.pop() is not module:
                pass

    # Calls arrive.

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            if args and isinstance(args[0], Tensor) and function.__name__ in compiled.METHODS:
                return getattr(args[0], function.__name__)(*args[1:], **kwargs)
            output = function(*args, **kwargs)
            if function is F.scaled_dot_product_attention:
                compiled.report(self.changed, args, kwargs)
            return output
        if self.busy or not self.lenses:
            return function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            if "einsight" in sys._getframe(1).f_code.co_names:
                return function(*args, **kwargs)  # a traced graph that reports the call itself
            return self._run(lambda: from_sdpa(*args, **kwargs), function, args, kwargs)
        if function is es.attention:
            return self._run(lambda: _from_attention(*args, **kwargs), function, args, kwargs)
        if function is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return function(*args, **kwargs)

    def from_interface(
        self, module: nn.Module, call: Callable[[], Call], function: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Run an attention function of Hugging Face's."""
        if self.busy or not self.lenses:
            return function(*args, **kwargs)
        self.busy = True
        try:
            return self._run(call, function, args, kwargs, module)
        finally:
            self.busy = False

    def from_graph(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        name: str,
    ) -> None:
        """Take note of a call that a compiled graph has made."""
        if self.lenses and not in_backward():
            self._tell(from_sdpa(query, key, value, mask, is_causal=causal, scale=scale), within=name)

    def _run(
        self, call: Callable[[], Call], function: Callable[..., Any], args: tuple, kwargs: dict, module: Any = None
    ) -> Any:
        output = function(*args, **kwargs)
        # While gradients are computed it is a checkpointed call, computed again.
        if not in_backward():
            with torch.no_grad():
                self._tell(call(), module)
        return output

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return multihead.forward(*args, **kwargs)
        cross = multihead.is_cross(*args)
        if not multihead.asks_weights(kwargs):
            self.cross = cross
            try:
                with self:
                    return multihead.forward(*args, **kwargs)
            finally:
                self.cross = False
        batch, heads = multihead.sizes(args[0], args[4])

        def report(call: Call) -> None:
            with torch.no_grad():
                self._tell(replace(call, cross=cross))

        with multihead.WeightsAsked(batch, heads, report):
            return multihead.forward(*args, **kwargs)

    def _tell(self, call: Call, module: nn.Module | None = None, within: str = "") -> None:
        busy, self.busy = self.busy, True
        try:
            for lens in list(self.lenses):
                lens._receive(
                    replace(call, cross=call.cross or self.cross),
                    [*self.stack, module] if module is not None else self.stack,
                    within,
                )
        finally:
            self.busy = busy


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _from_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **settings: Any) -> Call:
    offset = settings.pop("offset", None)
    if offset is None:
        offset = max(key.shape[2] - query.shape[2], 0)
    kept = {
        name: setting.detach() if isinstance(setting, Tensor) else setting
        for name, setting in settings.items()
        if name not in ("dropout", "readouts", "engine") and setting is not None
    }
    return Call(query.detach(), key.detach(), value.detach(), Rule(other=mask), offset, kept)


def _hookable(model: nn.Module) -> list[nn.Module]:
    """The modules that may call attention, without those whose code is compiled: a hook would compile it again."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        children = list(module.children())
        is_torch_leaf = not children and type(module).__module__.startswith("torch.nn.modules.")
        if id(module) in found or is_torch_leaf:
            return
        if getattr(module, "_compiled_call_impl", None) is not None:
            return
        found[id(module)] = module
        if not isinstance(module, OptimizedModule):
            for child in children:
                visit(child)

    visit(model)
    return list(found.values())
