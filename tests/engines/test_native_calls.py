"""What the native engine refuses, how a call of it is interrupted, and what others see of one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from engines.native_cases import LEVELS, READOUTS, SIZES, attend, make, of_keys
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import einsight as es
from einsight.engines import choose, native
from einsight.pose import pose

pytestmark = pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")


@pytest.mark.parametrize("sizes", [(0, 2, 1, 3, 5, 7, 11), (2, 2, 2, 0, 5, 7, 11), (2, 2, 1, 3, 0, 7, 11)])
def test_empty_dimensions_are_left_to_others(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="there are no items, heads, queries or keys; stream and reference can"):
        attend(*make(sizes))


def test_a_long_call_can_be_interrupted() -> None:
    """Ctrl-C, in a process of its own: the call would take minutes."""
    script = """
import os, signal, threading, torch, einsight as es
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
torch.set_num_threads(1)
q, k, v = torch.randn(3, 8, 8, 16384, 64)
es.attention(q[:1, :1, :8], k[:1, :1, :8], v[:1, :1, :8], engine="native")
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    es.attention(q, k, v, engine="native")
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr


def test_a_long_backward_can_be_interrupted() -> None:
    """With parts that wait for one another: none may wait for one that is skipped."""
    script = """
import os, signal, threading, torch, einsight as es
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 40000, 64, requires_grad=True) for _ in range(3))
output = es.attention(q, k, v, engine="native").sum()
threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    output.backward()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted\n", done.stderr


@pytest.mark.skipif(LEVELS[:1] != ["amx"], reason="no tiles here")
def test_where_linux_refuses_tiles_a_lower_instruction_set_is_taken() -> None:
    """It does where the stack of a signal handler has no room for their registers."""
    code = """if True:
    import ctypes
    class Stack(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
    memory = ctypes.create_string_buffer(4096)
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
    import torch, einsight as es
    from einsight.engines import native
    assert "amx" not in native.operations.kernel.levels
    ones = torch.ones(1, 1, 9, 4, dtype=torch.bfloat16)
    assert torch.equal(es.attention(ones, ones, ones, engine="native"), ones)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_refusals() -> None:
    query, key, value = make(SIZES["small"])

    def refusal(q: Tensor = query, **settings) -> str | None:
        return native.refuses(pose(q, key.to(q.dtype), value.to(q.dtype), **settings))

    assert refusal() is None
    assert "top-k" in str(refusal(query.double(), readouts=(es.TopK(2),)))
    assert "dense scores" in str(refusal(query.clone().requires_grad_(), readouts=(es.Scores(),)))
    assert "dropout" in str(refusal(dropout=0.1))
    assert "score_mod" in str(refusal(score_mod=lambda s, b, h, p, j: s, offset=0))
    assert refusal(readouts=(es.Received(), es.Received([1]))) is None
    assert refusal(readouts=(es.Received([1]), es.Received([1], mean=True))) is None
    with torch.no_grad():
        assert refusal(query.clone().requires_grad_()) is None
    with FakeTensorMode():
        elsewhere = torch.empty(1, 1, 2, 3, device="cuda")
        said = native.refuses(pose(elsewhere, elsewhere, elsewhere))
    assert said == "it runs on CPUs, and the tensors are on cuda:0; write query.cpu()"


def test_gradients_that_are_left_to_others() -> None:
    many, one = torch.zeros(1, 769, 1, 1), torch.zeros(1, 1, 1, 1)
    learned = torch.zeros(1, requires_grad=True)
    assert "more than 768 heads read one key" in str(native.refuses(pose(many, one, one, bias=learned)))
    long = torch.zeros(1, 1, 8200, 1)
    said = str(native.refuses(pose(long, long, long, bias=torch.zeros(8200, requires_grad=True))))
    assert said == "the gradient of the bias, before it is summed, would take more than 64 MB"
    table = torch.zeros(8, 2, requires_grad=True)
    problem = pose(*(long.expand(1, 2, -1, -1) for _ in range(3)), bias=es.relative(table))
    assert "more than 64 MB" in str(native.refuses(problem))
    with pytest.raises(ValueError, match=r"the native engine can't compute this: .* more than 64 MB"):
        native.run(problem)


def test_what_a_plan_says() -> None:
    query, key, value = make(SIZES["tiles"])
    plan = es.plan(query, key, value, es.window(9, 0), offset=418, readouts=es.Pool(8))
    assert (plan.engine, plan.visits) == ("native", 1 * 4 * 103 * 10)
    matrix = 4 * 4 * 8192 * 8192  # in bytes
    long = torch.zeros(1, 4, 8192, 64)
    for asked in ([], [es.Received()], [es.Pool(64)]):
        held = [es.plan(x, x, x, es.causal(), readouts=asked).holds for x in (long[:, :, :4096], long)]
        assert held[1] <= 2.1 * held[0] < matrix / 4
    assert es.plan(long[:, :, :1], long, long, es.causal(), offset=8191).holds < matrix / 64


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.operations, "kernel", None)
    tensors = make(SIZES["small"])
    assert choose.choose(pose(*tensors))[0] != "native"
    assert "not compiled" in str(es.plan(*tensors))
    with pytest.raises(ValueError, match="C\\+\\+17 compiler"):
        es.attention(*tensors, engine="native")


def test_an_installation_without_the_kernel() -> None:
    code = """
import sys
sys.modules["einsight.engines.native._native"] = None
import torch, einsight as es
from einsight.engines import native
q = torch.ones(1, 1, 3, 4)
print(native.operations.kernel, es.plan(q, q, q).engine, bool((es.attention(q, q, q) == 1).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "None torch_sdpa True\n", done.stderr


def test_compile_sees_one_operation() -> None:
    query, key, value = make(SIZES["tiles"])
    problem = pose(query, key, value, offset=0, readouts=tuple((READOUTS | of_keys(103, 521)).values()))
    settings = native._settings(problem)
    arguments = (query, key, value, *settings[:6], *native.operations._flat(settings), True, False, True, False, True)
    torch.library.opcheck(
        torch.ops.einsight.native_forward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_who_looks_on_sees_an_operation() -> None:
    """Tensors without numbers, such as PyTorch's fakes, have no memory that the kernel may read."""
    operands = make(SIZES["groups"])
    readouts = [es.Entropy(), es.Received()]
    right, (entropy, received) = es.attention(*operands, offset=0, readouts=readouts, engine="native")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x).requires_grad_() for x in operands]
        output, seen = es.attention(*fakes, offset=0, readouts=readouts, engine="native")
        (output.sum() + seen[0].sum()).backward()
    assert [x.shape for x in (output, *seen)] == [x.shape for x in (right, entropy, received)]
    assert all(isinstance(x.grad, FakeTensor) and x.grad.shape == x.shape for x in fakes)
    with torch.no_grad():  # also after the mode
        assert isinstance(es.attention(*fakes, offset=0, engine="native"), FakeTensor)
    seen_operations = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen_operations.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        got = es.attention(*operands, offset=0, engine="native")
    assert torch.equal(got, right) and "einsight.native_forward.default" in seen_operations


def test_what_would_be_too_large_as_a_tensor_is_left_to_others() -> None:
    query, key, _ = (torch.zeros(1, 2, 8200, 1) for _ in range(3))
    odd = es.where(lambda b, h, p, j: (p + j) % 2 == 0)
    assert "a tensor of at most 64 MB" in str(native.refuses(pose(query, key, key, odd)))
    assert "a tensor of at most 64 MB" in str(native.refuses(pose(query, key, key, readouts=(es.Share(odd),))))
    assert "more than 64 MB" in str(native.refuses(pose(query, key, key, bias=es.relative(torch.zeros(8, 2)))))
    every_third = es.where(lambda b, h, p, j: j % 3 == 0)  # the same for every query
    assert native.refuses(pose(query, key, key, every_third)) is None
    with pytest.raises(ValueError, match="a tensor of at most 64 MB; stream"):
        es.attention(query[:, :1, :8193], key[:, :1, :8193], key[:, :1, :8193], odd, engine="native")


def test_a_compiled_call_with_every_readout_is_one_graph() -> None:
    """In a process of its own: torch.compile can't look into the suite's checks of shapes."""
    script = """
import torch, einsight as es
q, k, v = torch.randn(3, 1, 4, 131, 16)
ids = torch.arange(131) % 5
seen, bias = torch.rand(131, 131) < 0.5, torch.randn(131, 131)
readouts = (es.LogSumExp(), es.Scores(), es.Diagonal(-1), es.Distance(), es.Pool(7), es.TopK(3), es.Rows(range(3, 5)),
            es.Share(es.window(3, 0)), es.Share(es.same(ids, ids)), es.Received(range(122, 131), mean=True),
            es.Received(per_group=True), es.Mass(ids, n=5), es.Mass(torch.rand(131, 3)))
def call(q, k, v):
    return es.attention(q, k, v, es.causal() & es.allow(seen), bias=bias, offset=0, readouts=readouts)
got, want = (run(q, k, v) for run in (torch.compile(call, backend="eager", fullgraph=True), call))
parts = [[output, *(x for r in found for x in (r if isinstance(r, tuple) else [r]))] for output, found in (got, want)]
print(len(parts[0]), all(map(torch.equal, *parts)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "15 True\n", done.stderr
