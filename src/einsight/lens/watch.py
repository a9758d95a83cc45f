"""What one thread sees of attention: a function mode that every call of it goes through.

There is one `Watch` per thread, for good, and every lens and edit open in that thread takes part in it: a function
mode that came and went with each lens would make a compiled model compile again for each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

import einsight as es
from einsight.lens import compiled, faces, frames, huggingface, multihead
from einsight.lens.call import Call
from einsight.lens.changes import Change, edited
from einsight.lens.faces import Face

if TYPE_CHECKING:
    from einsight.lens.edit import Edit
    from einsight.lens.lens import Lens

_threads = threading.local()
_BACKWARDS = {
    function: frames.unwatched(function) for function in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def here() -> Watch:
    """This thread's watch."""
    if not hasattr(_threads, "watch"):
        _threads.watch = Watch()
    return _threads.watch


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lenses: list[Lens] = []
        self.edits: list[Edit] = []
        self.busy = False  # whether the attention that is running has been seen already
        self.cross = False  # whether a multi-head attention that is running looks at other tokens than its own
        self._thread = threading.get_ident()
        self._entered = False
        self._attached: list[bool] = []

    # Lenses and edits come and go.

    def open(self, listener: Any, among: list[Any]) -> None:
        """Let a lens or an edit take part, `among` the watch's lenses or its edits."""
        if not self._entered:
            self.__enter__()
            self._entered = True
        among.append(listener)
        self._attached.append(huggingface.attach(lambda *given: here().from_interface(*given)))

    def close(self, listener: Any, among: list[Any]) -> None:
        among.remove(listener)
        if self._attached.pop():
            huggingface.detach()
        # Another thread can't take the mode off this one's; it stays, without anyone listening.
        if not self._attached and threading.get_ident() == self._thread:
            self.__exit__(None, None, None)
            self._entered = False

    # Calls arrive.

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        if self.busy or not self._attached:
            return function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            caller = sys._getframe(1).f_code
            if caller.co_filename.startswith("<eval_with_key>") and "einsight" in caller.co_names:
                return function(*args, **kwargs)  # a traced graph that reports the call itself
            return self._run(faces.sdpa, function, args, kwargs)
        if function is es.attention:
            return self._run(faces.attention(kwargs.get("readouts")), function, args, kwargs)
        if function is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        if self.edits and function in _BACKWARDS:
            with self:  # what is recomputed there is edited as well
                return _BACKWARDS[function](*args, **kwargs)
        return function(*args, **kwargs)

    def from_interface(
        self, face: Face, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention function of Hugging Face's."""
        if self.busy or not self._attached:
            return function(*args, **kwargs)
        self.busy = True
        try:
            return self._run(face, function, args, kwargs)
        finally:
            self.busy = False

    def from_graph(self, call: Callable[[], Call], source: str) -> None:
        """Take note of a call that a compiled graph has made, in the module that `source` names."""
        if not self._attached:
            return
        module = frames.find(source)
        running = frames.running() + ([] if module is None else [frames.Running(module, None)])
        for edit in self.edits:
            edit._refuse("in compiled code: edit the model before it is compiled", running)
        if not in_backward():
            self._tell(call(), running)

    def _run(self, face: Face, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        # While gradients are computed it is a checkpointed call, computed again: nothing new, but edited again.
        again = in_backward()
        if again and not self.edits:
            return result
        if reason := unseen(args, kwargs):
            self._miss(reason)
            return result
        running = frames.running()
        if self.edits:
            call = self._named(face.read(*args, **kwargs))
            change = edited(call, self.edits, running, again)
            if change is not None:
                output = change.finish(change.attend(face.own(result, call)))
                result = face.put(result, output, change.call, change.heads)
                call = change.call
            if not again:
                self._tell(call, running)
        else:
            with torch.no_grad():
                self._tell(self._named(face.read(*args, **kwargs)), running)
        return result

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        again = in_backward()
        if again and not self.edits:
            return F.multi_head_attention_forward(*args, **kwargs)
        if reason := unseen(args, kwargs):
            self._miss(reason)
            return F.multi_head_attention_forward(*args, **kwargs)
        self.cross = multihead.is_cross(*args)
        try:
            if not multihead.asks_weights(kwargs):
                with self:
                    return multihead.forward(*args, **kwargs)
            return self._weights_asked(again, args, kwargs)
        finally:
            self.cross = False

    def _weights_asked(self, again: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = frames.running()
        change: Change | None = None

        def seen(call: Call) -> None:
            nonlocal change
            call = self._named(call)
            change = edited(call, self.edits, running, again)
            if not again:
                self._tell(call if change is None else change.call, running)

        def weigh(weights: Tensor) -> Tensor:
            return weights if change is None else change.weigh(weights)

        def finish(output: Tensor) -> Tensor:
            return output if change is None else change.finish(output)

        batch, heads = multihead.sizes(args[0], args[4])
        with multihead.WeightsAsked(batch, heads, seen, weigh, finish):
            return multihead.forward(*args, **kwargs)

    def _named(self, call: Call) -> Call:
        return replace(call, cross=call.cross or self.cross)

    def _tell(self, call: Call, running: list[frames.Running]) -> None:
        busy, self.busy = self.busy, True
        try:
            with torch.no_grad():
                for lens in list(self.lenses):
                    lens._receive(replace(call.detached()), running)
        finally:
            self.busy = busy

    def _miss(self, reason: str) -> None:
        running = frames.running()
        for edit in self.edits:
            edit._refuse(reason, running)
        if not in_backward():
            for lens in self.lenses:
                lens._miss(reason, running)


def unseen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
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
