"""The native engine against the formula in float64, and its promises about bits."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import einsight as es
from einsight.engines import choose, native
from einsight.pose import pose

pytestmark = pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")

LEVELS = native.operations.kernel.levels if native.operations.kernel else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
READOUTS = {
    "lse": es.LogSumExp(),
    "max": es.MaxScore(),
    "entropy": es.Entropy(),
    "received": es.Received(),
    "mean": es.Received(mean=True),
    "weights": es.Weights(),
    "scores": es.Scores(),
    "diagonal": es.Diagonal(-1),
    "distance": es.Distance(),
    "pool": es.Pool(1),  # so that a line is a query
    "top": es.TopK(5),
    "share": es.Share(es.window(9, 2)),
}

# b, h, g, i, j, d, e: distinct primes where the shape allows; more than one block of 96 rows, more than one tile of
# 256 keys, more than one chunk of 1024, and the tuned head dimensions.
SIZES = {
    "small": (2, 3, 3, 7, 5, 13, 11),
    "one key": (1, 2, 1, 3, 1, 5, 7),
    "blocks": (2, 3, 3, 131, 137, 17, 19),
    "tiles": (1, 4, 2, 103, 521, 64, 64),
    "groups": (2, 6, 2, 67, 307, 37, 53),
    "decode": (5, 8, 2, 1, 2503, 128, 96),
    "chunks": (3, 2, 1, 11, 2053, 23, 5),
    "wide": (1, 2, 2, 101, 107, 96, 128),
    "deep": (1, 2, 1, 29, 31, 257, 263),
    "pairs": (2, 3, 1, 37, 139, 34, 71),
}


def make(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    b, h, g, i, j, d, e = sizes
    random = torch.Generator().manual_seed(seed)
    shapes = ((b, h, i, d), (b, g, j, d), (b, g, j, e))
    query, key, value = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return query, key, value


def settings_of(name: str, sizes: tuple[int, ...]) -> dict:
    b, h, _, i, j, _, _ = sizes
    offset = {"offset": j - i}
    random = torch.Generator().manual_seed(1)
    return {
        "all": {},
        "causal": {"mask": es.causal(), **offset},
        "causal from 0": {"mask": es.causal(), "offset": 0},
        "window": {"mask": es.window(3, 2), **offset},
        "wide window": {"mask": es.window(97, 0), **offset},
        "nothing to see": {"mask": es.window(1, 1), "offset": -3},
        "lengths": {"mask": es.lengths(torch.arange(b) * (j // 2))},
        "documents": {"mask": es.causal() & es.documents(torch.arange(j) // 19, torch.arange(i) // 7), **offset},
        "offsets": {"mask": es.causal(), "offset": torch.arange(b) * 2 - 1},
        "softcap": {"mask": es.causal(), "softcap": 0.7, **offset},
        "high softcap": {"softcap": 50.0},
        "sink": {"mask": es.window(5, 0), "sink": torch.randn(h, generator=random) * 3, **offset},
        "high sink": {"mask": es.window(1, 1), "sink": 300.0, "offset": -3},
        "alibi": {"bias": es.alibi(torch.rand(h, generator=random)), "mask": es.window(11, 3), **offset},
        "given": {"mask": es.allow(torch.rand(b, 1, i, j, generator=random) < 0.4)},
        "tiles": {"mask": es.causal() & es.forbid(_in_blocks(h, i, j, random)), **offset},
        "ids": {"mask": es.same(torch.arange(i) % 5, torch.arange(j) % 7)},
        "rule": {"mask": es.where(lambda b, h, p, j: (p + h + j) % 3 != 0), **offset},
        "bias": {"bias": torch.randn(h, i, j, generator=random)},
        "masking bias": {
            "bias": torch.randn(1, i, j, generator=random).masked_fill(_in_blocks(1, i, j, random), -torch.inf)
        },
        "biases": {
            "bias": es.alibi(torch.rand(h, generator=random)) + torch.randn(j, generator=random).bfloat16(),
            "mask": es.allow(torch.rand(j, generator=random) < 0.7) & es.causal(),
            **offset,
        },
        "scale": {"scale": 3.0},
        "negative scale": {"scale": -0.3},
    }[name]


def _in_blocks(h: int, i: int, j: int, random: torch.Generator) -> Tensor:
    """True for blocks of queries and keys, so that whole tiles are, with some single pairs more."""
    blocks = torch.rand(h, -(-i // 29), -(-j // 83), generator=random) < 0.5
    blocks = blocks.repeat_interleave(29, 1).repeat_interleave(83, 2)[:, :i, :j]
    return blocks | (torch.rand(i, j, generator=random) < 0.1)


SETTINGS = (
    "all",
    "causal",
    "causal from 0",
    "window",
    "wide window",
    "nothing to see",
    "lengths",
    "documents",
    "offsets",
    "softcap",
    "high softcap",
    "sink",
    "high sink",
    "alibi",
    "given",
    "tiles",
    "ids",
    "rule",
    "bias",
    "masking bias",
    "biases",
    "scale",
    "negative scale",
)


def attend(query: Tensor, key: Tensor, value: Tensor, *, engine: str = "native", **settings) -> dict[str, Tensor]:
    settings = {"offset": 0, **settings}
    readouts = READOUTS | of_keys(query.shape[2], key.shape[2])
    if engine == "native" and query.dtype == torch.float64:
        readouts.pop("top")
    output, found = es.attention(query, key, value, readouts=readouts, engine=engine, **settings)
    if "top" in found:
        found["top"], found["indices"] = found["top"]
    return {"output": output, **found}


def of_keys(i: int, j: int) -> dict[str, es.Readout]:
    """Readouts that speak of the single keys."""
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 7, (j,), generator=random)
    return {
        "same": es.Share(es.same(torch.arange(i) % 7, tokens)),
        "shared": es.Share(es.allow(torch.rand(i, j, generator=random) < 0.5)),
        "documents": es.Mass(torch.arange(j) // 19 % 5 - 1),
        "ids": es.Mass(torch.randint(-1, 40, (j,), generator=random), n=40),
        "mass": es.Mass(torch.rand(j, 3, generator=random)),
    }


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    return float((got - want).abs().masked_fill(same, 0).nan_to_num(float("inf")).max()) if got.numel() else 0.0


def judged_by(name: str) -> set[str]:
    """The results whose error in a coarser dtype is the budget: what reads a few weights errs as all weights do."""
    return {name, "weights"} if name in ("share", "diagonal", "top", "mean") else {name}


def check(got: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor, **settings) -> None:
    """Every error is at most twice that of the formula in float32, plus twice one rounding of the result.

    The formula's error is the larger one of this query and its negative: of a single draw it may be small by luck.
    """
    exact, plain = (
        [
            attend(q, key.to(dtype), value.to(dtype), engine="reference", **settings)
            for q in (query.to(dtype), -query.to(dtype))
        ]
        for dtype in (torch.float64, torch.float32)
    )
    for name, result in got.items():
        if name == "indices":  # rounding may swap neighbours
            continue
        want = exact[0][name]
        largest = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 0.0
        rounding = torch.finfo(result.dtype).eps / 2 * largest
        of = judged_by(name)
        allowed = 2 * (max(error(p[n], e[n]) for p, e in zip(plain, exact, strict=True) for n in of) + rounding)
        assert error(result, want) <= allowed, f"{name}: {error(result, want):.3g} > {allowed:.3g}"


def at_level(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    monkeypatch.setattr(native.operations, "_level", level)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_settings(sizes: str, settings: str) -> None:
    tensors, chosen = make(SIZES[sizes]), settings_of(settings, SIZES[sizes])
    check(attend(*tensors, **chosen), *tensors, **chosen)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_instruction_set_and_dtype(
    sizes: str, dtype: torch.dtype, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_level(monkeypatch, level)
    tensors = make(SIZES[sizes], dtype)
    for name in ("all", "causal", "tiles", "biases", "softcap"):
        chosen = settings_of(name, SIZES[sizes])
        got = attend(*tensors, **chosen)
        assert got["output"].dtype == dtype
        check(got, *tensors, **chosen)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("sizes", SIZES)
def test_double_precision(sizes: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference errs as much as we do there: its distance from float32's results, in float64's last places."""
    at_level(monkeypatch, level)
    tensors = make(SIZES[sizes], torch.float64)
    for name in ("all", "causal", "alibi", "softcap", "sink", "wide window"):
        chosen = settings_of(name, SIZES[sizes])
        got = attend(*tensors, **chosen)
        want = attend(*tensors, engine="reference", **chosen)
        plain = attend(*(t.float() for t in tensors), engine="reference", **chosen)
        for n, result in got.items():
            assert result.dtype == torch.float64
            finite = want[n][want[n].isfinite()]
            largest = float(finite.abs().max()) if finite.numel() else 0.0
            coarse = max(error(plain[m], want[m]) for m in judged_by(n))
            allowed = 3 * 2.0**-29 * coarse + 2 * torch.finfo(torch.float64).eps * largest
            assert error(result, want[n]) <= allowed, f"{name}, {n}: {error(result, want[n]):.3g} > {allowed:.3g}"


def test_large_scores() -> None:
    query, key, value = make(SIZES["tiles"])
    tensors = (query * 30, key * 30, value)
    check(attend(*tensors), *tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_precision_number_survives(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    value = numbers[numbers.isfinite()].view(1, 1, 1, -1)
    ones = torch.ones(1, 1, 1, 3, dtype=dtype)
    assert torch.equal(es.attention(ones, ones, value, engine="native"), value)


@pytest.mark.parametrize("sizes", SIZES)
def test_strides(sizes: str) -> None:
    query, key, value = make(SIZES[sizes])
    want = attend(query, key, value)
    for order in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        permuted = (
            t.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist()) for t in (query, key, value)
        )
        got = attend(*permuted)
        assert all(torch.equal(got[name], want[name]) for name in want)
    reversed_storage = torch.stack([query, query])[1:].squeeze(0)[:, :, :, :]
    assert torch.equal(attend(reversed_storage, key, value)["output"], want["output"])
    expanded = key[:1].expand(query.shape[0], -1, -1, -1)
    alike = attend(query, expanded, value), attend(query, expanded.contiguous(), value)
    assert all(torch.equal(alike[0][name], alike[1][name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", ["causal", "wide window", "alibi", "sink", "tiles", "masking bias", "rule"])
@pytest.mark.parametrize("sizes", SIZES)
def test_bits(sizes: str, settings: str, dtype: torch.dtype) -> None:
    """The same for 1 and 2 threads, for a batch item alone, and whatever readouts are asked."""
    tensors, chosen = make(SIZES[sizes], dtype), settings_of(settings, SIZES[sizes])
    want = attend(*tensors, **chosen)
    threads = torch.get_num_threads()
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        got = attend(*tensors, **chosen)
        assert all(torch.equal(got[name], want[name]) for name in want), n
    torch.set_num_threads(threads)
    for item in range(len(tensors[0])):
        alone = attend(*(t[item : item + 1] for t in tensors), **chosen)
        assert all(torch.equal(alone[name], want[name][item : item + 1]) for name in want)
    assert torch.equal(es.attention(*tensors, engine="native", **chosen), want["output"])
    for name, readout in (READOUTS | of_keys(tensors[0].shape[2], tensors[1].shape[2])).items():
        output, found = es.attention(*tensors, engine="native", readouts=readout, **{"offset": 0, **chosen})
        assert torch.equal(output, want["output"])
        assert torch.equal(found.weights if name == "top" else found, want[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize(
    "settings", ["causal", "window", "documents", "causal from 0", "given", "tiles", "masking bias"]
)
@pytest.mark.parametrize("sizes", ["blocks", "tiles", "groups", "chunks", "decode", "pairs"])
def test_unseen_keys_change_no_bit(sizes: str, settings: str, bad: float, dtype: torch.dtype) -> None:
    query, key, value = make(SIZES[sizes], dtype)
    chosen = settings_of(settings, SIZES[sizes])
    want = attend(query, key, value, **chosen)
    j = key.shape[2]
    for spoiled in {0, j // 2, j - 1}:
        other_key, other_value = key.clone(), value.clone()
        other_key[:, :, spoiled] = bad
        other_value[:, :, spoiled] = bad
        got = attend(query, other_key, other_value, **chosen)
        sees = want["scores"][..., spoiled] > -torch.inf
        for name in want:
            if name in ("received", "mean"):
                # Of a key, the sum over the queries that do not see the bad one is not asked separately.
                never = ~((want["scores"] > -torch.inf) & sees.unsqueeze(-1)).any(-2)
                assert torch.equal(got[name][never], want[name][never])
            else:
                assert torch.equal(got[name][~sees], want[name][~sees]), name
        if bad != bad:
            assert got["output"][sees].isnan().all()
            assert got["max"][sees].isnan().all()
            seen_weights = got["weights"][sees][want["scores"][sees] > -torch.inf]
            assert seen_weights.isnan().all()
            assert (got["weights"][sees][want["scores"][sees] == -torch.inf] == 0).all()


def test_received_of_chosen_queries() -> None:
    query, key, value = make(SIZES["groups"])
    tensors, chosen = (query, key, value), settings_of("causal", SIZES["groups"])
    for queries in (slice(-5, None), [3, 1, 17], [66], 0):
        for options in ({}, {"mean": True}, {"per_group": True}, {"mean": True, "per_group": True}):
            readout = es.Received(queries, **options)
            _, got = es.attention(*tensors, readouts=readout, engine="native", **chosen)
            _, want = es.attention(*tensors, readouts=readout, engine="reference", **chosen)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # A NaN in a query that is not asked about stays out.
    spoiled = query.clone()
    spoiled[:, :, 2] = torch.nan
    readout = es.Received(slice(3, 9))
    want = es.attention(*tensors, readouts=readout, engine="native", **chosen)[1]
    assert torch.equal(es.attention(spoiled, key, value, readouts=readout, engine="native", **chosen)[1], want)


def test_readouts_alone() -> None:
    query, key, value = make(SIZES["tiles"])
    readouts = {name: readout for name, readout in READOUTS.items() if name != "top"}
    problem = pose(query, key, None, es.causal(), offset=0, readouts=tuple(readouts.values()))
    output, found = native.run(problem)
    want = attend(query, key, value, mask=es.causal(), offset=0)
    assert output is None
    assert all(torch.equal(a, want[name]) for a, name in zip(found, readouts, strict=True))


@pytest.mark.parametrize("sizes", [(0, 2, 1, 3, 5, 7, 11), (2, 2, 2, 0, 5, 7, 11), (2, 2, 1, 3, 0, 7, 11)])
def test_empty_dimensions_are_left_to_others(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="there are no items, heads, queries or keys; stream and reference can"):
        attend(*make(sizes))


def test_values_without_dimensions() -> None:
    tensors = make((2, 3, 3, 5, 7, 11, 0))
    got, want = attend(*tensors), attend(*tensors, engine="reference")
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_several_threads_may_call_at_once() -> None:
    tensors = make(SIZES["tiles"])
    want = attend(*tensors)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            got = attend(*tensors)
            wrong.extend(name for name in want if not torch.equal(got[name], want[name]))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


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


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.operations, "kernel", None)
    tensors = make(SIZES["small"])
    assert choose.choose(pose(*tensors))[0] != "native"
    assert "not compiled" in str(es.plan(*tensors))
    with pytest.raises(ValueError, match="C\\+\\+17 compiler"):
        es.attention(*tensors, engine="native")


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


def test_received_of_a_long_sequence() -> None:
    query, key, value = make((1, 2, 2, 211, 32768, 16, 16))
    _, received = es.attention(query, key, value, readouts=es.Received(), engine="native")
    assert received.shape == (1, 2, 32768)
    torch.testing.assert_close(received.sum(-1), torch.full((1, 2), 211.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("j", [1, 300])
def test_one_row_of_values_may_stand_for_all(j: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_level(monkeypatch, level)
    query, key, value = make((1, 2, 2, 3, j, 8, 128))
    value = value[:, :, :1].expand(value.shape)
    got = es.attention(query, key, value, engine="native", offset=0)
    torch.testing.assert_close(got, value[:, :, :1].expand(got.shape))


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("k", [1, 3, 64, 300])
def test_of_equal_weights_the_lowest_key_is_first(k: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_level(monkeypatch, level)
    i, j = 7, 211
    key = torch.randint(0, 3, (1, 1, j, 1), generator=torch.Generator().manual_seed(0)).float()
    key[0, 0, 5] = 200.0  # beside it others weigh exactly 0, and are still visible
    seen = torch.rand(i, j, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[0], seen[1], seen[2, 100:] = False, True, False
    query = torch.ones(1, 1, i, 1)
    asked = {"top": es.TopK(k), "weights": es.Weights()}
    found = es.attention(query, key, key, es.allow(seen), readouts=asked, engine="native")[1]
    weights, top = found["weights"][0, 0], found["top"]
    for row in range(i):
        best = sorted(seen[row].nonzero().flatten().tolist(), key=lambda n: (-weights[row, n].item(), n))[:k]
        short = k - len(best)
        assert top.indices[0, 0, row].tolist() == best + [-1] * short
        assert torch.equal(top.weights[0, 0, row], torch.cat([weights[row, best], torch.zeros(short)]))


def test_top_of_a_row_of_nan_is_its_first_keys() -> None:
    query, key, value = make((1, 1, 1, 3, 9, 5, 5))
    query[0, 0, 1] = torch.nan
    seen = torch.tensor([False, True, True, False, True, True, False, True, False])
    top = es.attention(query, key, value, es.allow(seen), readouts=es.TopK(4), engine="native")[1]
    assert top.indices[0, 0, 1].tolist() == [1, 2, 4, 5]
    assert top.weights[0, 0, 1].isnan().all() and not top.weights[0, 0, [0, 2]].isnan().any()


def test_several_of_a_kind_in_one_call() -> None:
    query, key, value = make(SIZES["groups"])
    asked = (
        es.Received(),
        es.Received([3, 1]),
        es.Received(slice(-5, None), mean=True, per_group=True),
        es.TopK(2),
        es.TopK(5, [66, 0, 66]),
        es.Share(es.window(3, 0)),
        es.Share(es.lengths(4)),
        es.Rows([5, 2]),
        es.Rows(0),
        es.Pool(10),
        es.Pool(400),
        es.Mass(torch.arange(307) // 100, queries=[4, 4, 1]),
    )
    together = es.attention(query, key, value, es.causal(), readouts=asked, engine="native", offset=240)[1]
    for readout, found in zip(asked, together, strict=True):
        alone = es.attention(query, key, value, es.causal(), readouts=readout, engine="native", offset=240)[1]
        want = es.attention(query, key, value, es.causal(), readouts=readout, engine="reference", offset=240)[1]
        if isinstance(readout, es.TopK):
            assert torch.equal(found.indices, alone.indices) and torch.equal(found.indices, want.indices)
            found, alone, want = found.weights, alone.weights, want.weights
        assert torch.equal(found, alone), readout
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)


def test_dense_masks_by_any_strides() -> None:
    query, key, value = make(SIZES["groups"])
    b, h, _, i, j, _, _ = SIZES["groups"]
    seen = torch.rand(b, h, i, j, generator=torch.Generator().manual_seed(0)) < 0.5
    bias = torch.randn(b, h, i, j, generator=torch.Generator().manual_seed(1))
    want = es.attention(query, key, value, es.allow(seen.contiguous()), bias=bias, engine="native")
    for order in ((3, 2, 1, 0), (0, 1, 3, 2), (2, 0, 3, 1)):
        back = torch.tensor(order).argsort().tolist()
        other, added = (t.permute(order).contiguous().permute(back) for t in (seen, bias))
        got = es.attention(query, key, value, es.forbid(~other), bias=added, engine="native")
        assert torch.equal(got, want)


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
