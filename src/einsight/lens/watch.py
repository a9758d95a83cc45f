"""What one thread sees of attention: a function mode that every call of it goes through.

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
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

import einsight as es
from einsight.lens import compiled, frames, huggingface, multihead
from einsight.lens.call import Call, from_sdpa
from einsight.lens.rules import Rule
from einsight.problem import autocast

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
        self.busy = False  # whether the attention that is running has been seen already
        self.cross = False  # whether a multi-head attention that is running looks at other tokens than its own
        self._thread = threading.get_ident()
        self._entered = False
        self._attached: dict[Lens, bool] = {}

    # Lenses come and go.

    def open(self, lens: Lens) -> None:
        if not self._entered:
            self.__enter__()
            self._entered = True
        self.lenses.append(lens)
        self._attached[lens] = huggingface.attach(lambda *given: here().from_interface(*given))

    def close(self, lens: Lens) -> None:
        self.lenses.remove(lens)
        if self._attached.pop(lens):
            huggingface.detach()
        # Another thread can't take the mode off this one's; it stays, without anyone listening.
        if not self.lenses and threading.get_ident() == self._thread:
            self.__exit__(None, None, None)
            self._entered = False

    # Calls arrive.

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            if args and isinstance(args[0], Tensor) and function.__name__ in compiled.METHODS:
                return getattr(args[0], function.__name__)(*args[1:], **kwargs)
            if function is F.multi_head_attention_forward and not torch.compiler.is_exporting():
                return multihead.traced(*args, **kwargs)
            output = function(*args, **kwargs)
            if function is F.scaled_dot_product_attention and not torch.compiler.is_exporting():
                compiled.report(**compiled.arguments(*args, **kwargs))
            return output
        if self.busy or not self.lenses:
            return function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            caller = sys._getframe(1).f_code
            if caller.co_filename.startswith("<eval_with_key>") and "einsight" in caller.co_names:
                return function(*args, **kwargs)  # a traced graph that reports the call itself
            return self._run(lambda: from_sdpa(*args, **kwargs), function, args, kwargs)
        if function is es.attention:
            return self._run(lambda: _from_attention(*args, **kwargs), function, args, kwargs)
        if function is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return function(*args, **kwargs)

    def from_interface(self, call: Callable[[], Call], function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run an attention function of Hugging Face's."""
        if self.busy or not self.lenses:
            return function(*args, **kwargs)
        self.busy = True
        try:
            return self._run(call, function, args, kwargs)
        finally:
            self.busy = False

    def from_graph(self, call: Callable[[], Call], source: str) -> None:
        """Take note of a call that a compiled graph has made, in the module that `source` names."""
        if self.lenses and not in_backward():
            self._tell(call(), frames.find(source))

    def _run(self, call: Callable[[], Call], function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        # While gradients are computed it is a checkpointed call, computed again.
        if in_backward():
            return output
        if reason := unseen(args, kwargs):
            self._miss(reason)
            return output
        with torch.no_grad():
            self._tell(call())
        return output

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        reason = None if in_backward() else unseen(args, kwargs)
        if reason is not None:
            self._miss(reason)
        if reason is not None or in_backward():
            return F.multi_head_attention_forward(*args, **kwargs)
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

    def _tell(self, call: Call, module: nn.Module | None = None) -> None:
        busy, self.busy = self.busy, True
        running = frames.running()
        if module is not None:
            running.append(frames.Running(module, None))
        try:
            for lens in list(self.lenses):
                lens._receive(replace(call, cross=call.cross or self.cross), running)
        finally:
            self.busy = busy

    def _miss(self, reason: str) -> None:
        running = frames.running()
        for lens in self.lenses:
            lens._miss(reason, running)


def unseen(args: tuple, kwargs: dict) -> str | None:
    """Why a call that runs unharmed can't be looked at; None if it can."""
    if maybe_current_level() is not None:
        return "in a transform of torch.func (vmap, grad, …)"
    if torch._C._get_tracing_state() is not None:
        return "while torch.jit.trace traces"
    if torch.compiler.is_exporting():
        return "while torch.export traces"
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if any(t.is_nested for t in tensors):
        return "of nested tensors (pad them: torch.nested.to_padded_tensor)"
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return "of tensors without numbers (meta or fake)"
    return None


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _from_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **settings: Any) -> Call:
    offset = settings.pop("offset", None)
    if offset is None:
        offset = max(key.shape[2] - query.shape[2], 0)
    query, key, value = autocast(query, key, value)
    kept = {
        name: setting.detach() if isinstance(setting, Tensor) else setting
        for name, setting in settings.items()
        if name not in ("dropout", "readouts", "engine") and setting is not None
    }
    return Call(query.detach(), key.detach(), value.detach(), Rule(other=mask), offset, kept)
