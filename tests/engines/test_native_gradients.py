"""The native engine's gradients against the oracle's, and their promises about bits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from checks import draw
from engines.native_gradient_cases import READOUTS, SETTINGS, SIZES, attend, check, leaves, make, more_readouts
from gradients import gradients
from torch import Tensor
from torch.testing import assert_close

import einsight as es
from einsight.engines import native
from einsight.pose import pose

pytestmark = pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")

LEVELS = native.operations.kernel.levels if native.operations.kernel else []


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_setting(sizes: str, settings: str) -> None:
    check(make(SIZES[sizes], settings), READOUTS)
    check(make(SIZES[sizes], settings), {})


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("sizes", ["small", "parts", "tiles"])
def test_every_readout(sizes: str, readout: str) -> None:
    check(make(SIZES[sizes], "sink"), {readout: READOUTS[readout]})
    check(make(SIZES[sizes], "causal"), {readout: READOUTS[readout]})


@pytest.mark.parametrize("sizes", ["small", "blocks", "parts"])
def test_readouts_of_weights(sizes: str) -> None:
    readouts = more_readouts(SIZES[sizes])
    for name, readout in readouts.items():
        check(make(SIZES[sizes], "causal"), {name: readout})
    check(make(SIZES[sizes], "sink"), readouts)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", ["blocks", "tiles", "deep"])
def test_every_instruction_set_and_dtype(
    sizes: str, dtype: torch.dtype, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.operations, "_level", level)
    for settings in ("causal", "alibi", "softcap"):
        check(make(SIZES[sizes], settings, dtype), READOUTS)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", ["blocks", "deep"])
def test_where_one_key_is_seen_its_score_has_no_gradient(
    sizes: str, dtype: torch.dtype, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weight is 1 whatever the score is: what rounding leaves would be all there is."""
    monkeypatch.setattr(native.operations, "_level", level)
    case = make(SIZES[sizes], "scale", dtype)
    case.arguments |= {"mask": es.window(0, 0), "offset": 0}
    readouts = {} if dtype == torch.float64 else more_readouts(SIZES[sizes])
    for asked in ({}, {"entropy": READOUTS["entropy"]}, *({name: x} for name, x in readouts.items())):
        operands = {n: getattr(case, n).detach().requires_grad_() for n in ("query", "key", "value")}
        results = attend(case, asked, **operands)
        total = sum(x.double().cos().sum() for x in results.values())
        found = gradients(total, operands)
        assert not found["query"].any() and not found["key"].any(), asked
        assert found["value"].any()


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_large_scores_in_double_precision(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lse of a row is as large as its scores, and its rounding would be in all its weights."""
    monkeypatch.setattr(native.operations, "_level", level)
    case = make(SIZES["blocks"], "causal", torch.float64)
    case.scale = case.arguments["scale"] = 9.0
    check(case, READOUTS)


def test_equal_scores_share_the_gradient_of_the_largest() -> None:
    key = torch.ones(1, 1, 5, 3, requires_grad=True)
    _, largest = es.attention(torch.ones(1, 1, 2, 3), key, key.detach(), readouts=es.MaxScore(), engine="native")
    largest.sum().backward()
    assert_close(key.grad, torch.full_like(key, 2 / 5 / 3**0.5))


def test_received_of_chosen_queries() -> None:
    case = make(SIZES["blocks"], "causal")
    chosen = [3, 100, 17]

    def of_weights(o: dict[str, Tensor]) -> Tensor:
        return o["weights"][:, :, chosen].sum(2)

    check(case, {"received": (es.Received(chosen), of_weights)})


@pytest.mark.parametrize("settings", ["causal", "window", "sink"])
@pytest.mark.parametrize("sizes", ["blocks", "tiles", "parts", "decode"])
def test_bits(sizes: str, settings: str) -> None:
    """The same for any number of threads, and for a batch item alone."""
    case = make(SIZES[sizes], settings)
    threads = torch.get_num_threads()

    def work(items: slice = slice(None)) -> dict[str, Tensor]:
        operands = {n: t[items].detach().requires_grad_() for n, t in leaves(case).items()}
        results = attend(case, READOUTS, **operands)
        total = sum((x.where(x.isfinite(), 0).double().cos()).sum() for x in results.values())
        return gradients(total, operands)

    want = work()
    for n in (2, 5):
        torch.set_num_threads(n)
        got = work()
        torch.set_num_threads(threads)
        assert all(torch.equal(got[name], want[name]) for name in want), n
    for item in range(len(case.query)):
        alone = work(slice(item, item + 1))
        assert all(torch.equal(alone[name], want[name][item : item + 1]) for name in want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("settings", ["causal", "window"])
@pytest.mark.parametrize("sizes", ["blocks", "tiles", "parts"])
def test_what_may_not_be_seen_changes_no_bit(sizes: str, settings: str, bad: float) -> None:
    """A spoiled key and value, whose own queries are left out of the loss, and a spoiled query."""
    case = make(SIZES[sizes], settings)
    j = SIZES[sizes][4]
    where = j // 2
    sees = case.allowed()[0, 0, :, where]

    def work(spoil: bool) -> dict[str, Tensor]:
        operands = leaves(case)
        if spoil:
            operands = {n: t.detach().clone() for n, t in operands.items()}
            operands["key"][:, :, where] = operands["value"][:, :, where] = bad
            operands["query"][:, :, sees] = bad
            operands = {n: t.requires_grad_() for n, t in operands.items()}
        results = attend(case, {"lse": READOUTS["lse"], "entropy": READOUTS["entropy"]}, **operands)
        total = sum(x[:, :, ~sees].double().cos().sum() for x in results.values())
        return gradients(total, operands)

    want, got = work(False), work(True)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert all(x.isfinite().all() for x in got.values())


def test_a_query_that_sees_what_is_spoiled() -> None:
    """NaN is where it belongs, and nowhere else."""
    case = make(SIZES["blocks"], "window")
    operands = leaves(case)
    spoiled = {n: t.detach().clone() for n, t in operands.items()}
    spoiled["value"][:, :, 70] = torch.nan
    spoiled = {n: t.requires_grad_() for n, t in spoiled.items()}
    sees = case.allowed()[0, 0, :, 70]
    near = case.allowed()[0, 0][sees].any(0)
    for name, gradient in gradients(attend(case, {}, **spoiled)["output"].sum(), spoiled).items():
        hit = sees if name == "query" else near
        assert gradient[:, :, ~hit].isfinite().all()
        if name != "value":
            assert gradient[:, :, hit].isnan().any()


@pytest.mark.parametrize("wanted", ["query", "key", "value"])
def test_only_what_is_wanted(wanted: str) -> None:
    case = make(SIZES["blocks"], "causal")
    operands = leaves(case)
    want = gradients(attend(case, READOUTS, **operands)["output"].cos().sum(), operands)[wanted]
    operands = {n: t.detach().requires_grad_(n == wanted) for n, t in operands.items()}
    got = gradients(attend(case, READOUTS, **operands)["output"].cos().sum(), {wanted: operands[wanted]})[wanted]
    assert torch.equal(got, want)


def test_a_loss_of_readouts_alone() -> None:
    """The values have no part in it."""
    case = make(SIZES["blocks"], "causal")
    operands = leaves(case)
    total = sum(x.cos().sum() for n, x in attend(case, READOUTS, **operands).items() if n != "output")
    found = torch.autograd.grad(total, tuple(operands.values()), allow_unused=True)
    assert found[2] is None
    want = torch.autograd.grad(
        sum(
            x.cos().sum()
            for x in es.attention(
                **operands, readouts=[r for r, _ in READOUTS.values()], engine="reference", **case.arguments
            )[1]
        ),
        (operands["query"], operands["key"]),
    )
    for got, right in zip(found, want, strict=False):
        assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_readouts_without_an_output() -> None:
    case = make(SIZES["tiles"], "causal")
    operands = leaves(case)
    want = gradients(attend(case, READOUTS, **operands)["entropy"].cos().sum(), operands)
    W = es.AttentionWeights(operands["query"], operands["key"], es.causal(), offset=case.offset, engine="native")
    got = gradients(W.entropy().cos().sum(), operands)
    assert torch.equal(got["query"], want["query"])
    assert torch.equal(got["key"], want["key"])


def test_second_derivatives() -> None:
    case = make(SIZES["small"], "sink")
    sink = case.sink.requires_grad_()

    def twice(engine: str) -> tuple[Tensor, ...]:
        operands = leaves(case)
        asked = [r for r, _ in READOUTS.values()]
        output, seen = es.attention(**operands, mask=es.causal(), sink=sink, readouts=asked, offset=-2, engine=engine)
        total = output.cos().sum() + sum(x.where(x.isfinite(), 0).cos().sum() for x in seen)
        first = torch.autograd.grad(total, (*operands.values(), sink), create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in first), (*operands.values(), sink))

    for got, want in zip(twice("native"), twice("reference"), strict=True):
        assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_change_before_the_backward_is_refused() -> None:
    operands = leaves(make(SIZES["small"], "all"))
    query = operands["query"] * 1
    output = es.attention(query, operands["key"], operands["value"], engine="native")
    query.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_compiled() -> None:
    """No graph break, forward and backward, and the same bits; in a process without the checks of shapes."""
    script = """
import torch, einsight as es

sink, slopes = torch.randn(3), torch.rand(3)
for settings in ({"mask": es.causal()}, {"mask": es.causal(), "sink": sink}, {"bias": es.alibi(slopes)}):
    def step(query, key, value):
        readouts = {"entropy": es.Entropy(), "received": es.Received(slice(-7, None))}
        output, seen = es.attention(query, key, value, readouts=readouts, engine="native", offset=6, **settings)
        return output.cos(), seen["entropy"], seen["received"].cos()

    def run(step):
        torch.manual_seed(0)
        learned = [t.requires_grad_() for t in (sink, slopes)]
        operands = [torch.randn(2, 3, n, 17, requires_grad=True) for n in (131, 137, 137)]
        results = step(*operands)
        total = sum(x.sum() for x in results)
        grads = torch.autograd.grad(total, (*operands, *learned), allow_unused=True)
        return [*results, *(g for g in grads if g is not None)]

    got, want = run(torch.compile(step, fullgraph=True, backend="aot_eager")), run(step)
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want))
print("alike")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "alike\n", done.stderr


def test_the_operation_is_well_made() -> None:
    case = make(SIZES["blocks"], "causal")
    b, h, _, i, _, _, e = SIZES["blocks"]
    readouts = tuple(r for r, _ in READOUTS.values())
    problem = pose(case.query, case.key, case.value, es.causal(), offset=case.offset, readouts=readouts)
    settings = native._settings(problem)
    flat = *settings[:6], *native.operations._flat(settings)
    operands = case.query, case.key, case.value
    output, lse, largest, entropy, _, rest, *parts = torch.ops.einsight.native_forward(
        *operands, *flat, True, True, True, False, True
    )
    upper = torch.ones(b, h, i, e), None, None, torch.ones(b, h, i)
    indices = [part for part in parts if part.dtype == torch.int64]
    floats = [part for part in parts if part.dtype == torch.float32]
    kinds = [ask.kind for own in native._asks(problem) for ask in own]
    of_asks = [indices[0] if kind is native.Kind.TOP else None for kind in kinds]
    torch.library.opcheck(
        torch.ops.einsight.native_backward.default,
        (*operands, *flat, output, lse, largest, entropy, rest, *upper, floats, of_asks, *[True] * 3, *[False] * 3),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_score_of_one_key_has_no_gradient(dtype: torch.dtype) -> None:
    """Exactly, also where tensors leave a row one key, or where no other weighs anything beside it."""
    query, key, value = (torch.randn(2, 3, n, d, dtype=dtype) for n, d in ((7, 64), (11, 64), (11, 5)))
    query, key, value = (t.requires_grad_() for t in (query, key, value))
    one = torch.zeros(7, 11, dtype=torch.bool)
    one[torch.arange(7), torch.tensor([0, 3, 10, 5, 5, 9, 1])] = True
    hiding = torch.randn(7, 11, dtype=dtype).masked_fill(~one, -torch.inf).requires_grad_()
    far = torch.randn(7, 11, dtype=dtype).masked_fill(~one, -1e4).requires_grad_()
    for settings in ({"mask": es.allow(one)}, {"bias": hiding}, {"bias": far}):
        leaves = query, key, *(x for x in settings.values() if isinstance(x, Tensor))
        output = es.attention(query, key, value, engine="native", offset=0, scale=-0.7, **settings)
        for gradient in torch.autograd.grad(output.cos().sum(), leaves):
            assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slopes_of_keys_far_away(dtype: torch.dtype) -> None:
    # There the gradients of a row's scores, whose sum is 0, are all multiplied by nearly the same number.
    operands = [draw(2, 4, 61, 16, seed=n).to(dtype) for n in range(3)]
    upper = draw(2, 4, 61, 16, seed=3)

    def slopes_grad(engine: str, *operands: torch.Tensor) -> torch.Tensor:
        slopes = torch.full((4,), 0.1, requires_grad=True)
        output = es.attention(*operands, bias=es.alibi(slopes), offset=1000, engine=engine)
        (grad,) = torch.autograd.grad((output * upper).sum(dtype=torch.float64), slopes)
        return grad

    right = slopes_grad("reference", *(x.double() for x in operands))
    errors = {engine: (slopes_grad(engine, *operands) - right).abs().max() for engine in ("native", "reference")}
    assert errors["native"] <= 2 * errors["reference"]


def test_a_number_for_each_head_is_a_number_for_each_head() -> None:
    q, k, v = (draw(1, 2, 5, 8, seed=n) for n in range(3))
    settings = native._settings(pose(q, k, v))._replace(sink=torch.zeros(1))
    with pytest.raises(ValueError, match="expected a number per head"):
        native.operations.forward(q, k, v, settings, native.Asked())
