"""First and second derivatives against finite differences, and torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import draw, operands
from engines_under_test import using
from gradients import TrueGradients, floats
from oracle import Case
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import einsight as es
from einsight.engines import native

EXACT = ["reference", "stream", "stream in tiny blocks"]
# PyTorch's own forward derivatives of some operations are written in what it has deprecated.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
every_exact = pytest.mark.parametrize("engine", EXACT)


def leaf(*shape: int, seed: int) -> Tensor:
    return draw(*shape, seed=seed, dtype=torch.float64).requires_grad_()


def small() -> list[Tensor]:
    """b = 1, h = 2, g = 1, i = 3, j = 5, d = 2, e = 1: finite differences ask for each number."""
    return [leaf(1, 2, 3, 2, seed=0), leaf(1, 1, 5, 2, seed=1), leaf(1, 1, 5, 1, seed=2)]


# What each setting learns, and how the argument is made of it.
SETTINGS: dict[str, tuple[Tensor | None, Callable[[Any], dict[str, Any]]]] = {
    "nothing": (None, lambda _: {}),
    "mask": (None, lambda _: {"mask": es.window(2, 0) | es.lengths(1)}),
    "exact mask": (None, lambda _: {"mask": es.causal()}),
    "a row sees nothing": (None, lambda _: {"mask": ~es.pairs([1], slice(None)) & es.causal()}),
    "sink": (leaf(2, seed=3), lambda x: {"sink": x}),
    "sink and empty row": (leaf(2, seed=3), lambda x: {"sink": x, "mask": ~es.pairs([1], slice(None))}),
    "one sink": (leaf(1, seed=3), lambda x: {"sink": x[0]}),
    "softcap": (None, lambda _: {"softcap": 1.5, "scale": 2.0}),
    "bias": (leaf(3, 5, seed=4), lambda x: {"bias": x}),
    "bias that masks": (
        leaf(2, 1, 5, seed=4),
        lambda x: {"bias": x.masked_fill(torch.tensor([0, 1, 0, 0, 1]).bool(), -torch.inf)},
    ),
    "alibi": (leaf(2, seed=5), lambda x: {"bias": es.alibi(x)}),
    "relative": (leaf(4, 2, seed=6), lambda x: {"bias": es.relative(x, max_distance=4)}),
    "sum of biases": (leaf(4, 2, seed=6), lambda x: {"bias": es.relative(x, max_distance=4) + es.alibi(x[0])}),
    "score_mod": (leaf(2, 5, seed=7), lambda x: {"score_mod": lambda s, b, h, p, j: s * x[h, j].cos() + x[h, j]}),
}
READOUTS: dict[str, es.Readout] = {
    "lse": es.LogSumExp(),
    "max": es.MaxScore(),
    "entropy": es.Entropy(),
    "received": es.Received(),
    "mean received": es.Received(queries=[2, 0], mean=True, per_group=True),
    "top": es.TopK(2),
    "share": es.Share(es.window(1, 0)),
    "mass": es.Mass(torch.tensor([0, 1, 1, -1, 0])),
    "rows": es.Rows([2, 0]),
    "diagonal": es.Diagonal(-1),
    "distance": es.Distance(),
    "pool": es.Pool(2),
    "weights": es.Weights(),
    "scores": es.Scores(),
}


def finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0)


def outcome(make: Callable[[Any], dict[str, Any]], engine: str) -> Callable[..., Tensor]:
    """A random linear function of the output and every readout."""

    def run(query: Tensor, key: Tensor, value: Tensor, learned: Tensor | None = None) -> Tensor:
        settings = {"offset": 2, **make(learned)}
        output, seen = es.attention(query, key, value, **settings, readouts=READOUTS, engine=engine)
        results = [output, *(finite(x.weights if isinstance(x, tuple) else x) for x in seen.values())]
        return sum((draw(*x.shape, seed=n, dtype=x.dtype) * x).sum() for n, x in enumerate(results))

    return run


@every_exact
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_and_their_gradients(engine: str, setting: str) -> None:
    learned, make = SETTINGS[setting]
    inputs = [*small(), *([] if learned is None else [learned])]
    with using(engine) as name:
        assert gradcheck(outcome(make, name), inputs, fast_mode=True)
        assert gradgradcheck(outcome(make, name), inputs, fast_mode=True)


@every_exact
def test_gradients_of_a_matrix_of_masses(engine: str) -> None:
    query, key, _ = small()

    def mass(query: Tensor, key: Tensor, matrix: Tensor) -> Tensor:
        return es.AttentionWeights(query, key, es.causal(), offset=2, engine=name).mass(matrix)

    with using(engine) as name:
        inputs = (query, key, leaf(5, 3, seed=8))
        assert gradcheck(mass, inputs, fast_mode=True) and gradgradcheck(mass, inputs, fast_mode=True)


@every_exact
def test_gradients_of_the_operator(engine: str) -> None:
    query, key, _ = small()

    def products(query: Tensor, key: Tensor, value: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        W = es.AttentionWeights(query, key, es.causal(), offset=2, engine=name).select(heads=[1], queries=[2, 0])
        return W @ value, W.mT @ x, W[0, 0, -1]

    with using(engine) as name:
        inputs = (query, key, leaf(1, 1, 5, 1, seed=2), leaf(1, 1, 2, 3, seed=9))
        assert gradcheck(products, inputs, fast_mode=True) and gradgradcheck(products, inputs, fast_mode=True)


@every_exact
def test_gradients_under_dropout(engine: str) -> None:
    def seeded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(3)
        return es.attention(query, key, value, dropout=0.4, engine=name)

    with using(engine) as name:
        assert gradcheck(seeded, small(), fast_mode=True)


@pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "score_mod"])
def test_gradients_of_native(setting: str) -> None:
    """Those of its own kernel; the second are stream's."""
    learned, make = SETTINGS[setting]
    readouts = {name: readout for name, readout in READOUTS.items() if name not in ("top", "scores")}
    inputs = [*small(), *([] if learned is None else [learned])]

    def run(query: Tensor, key: Tensor, value: Tensor, learned: Tensor | None = None) -> Tensor:
        settings = {"offset": 2, **make(learned)}
        output, seen = es.attention(query, key, value, **settings, readouts=readouts, engine="native")
        return sum(
            (draw(*x.shape, seed=n, dtype=x.dtype) * finite(x)).sum() for n, x in enumerate([output, *seen.values()])
        )

    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("engine", [*EXACT, "auto", "auto without native"])
def test_operands_computed_from_one_another(engine: str, with_bias: bool) -> None:
    """Their paths count once, also where the gradient is to be derived again."""

    def run(x: Tensor, table: Tensor) -> Tensor:
        bias = table + es.alibi(table[0, :2]) if with_bias else None
        return es.attention(x, 2 * x, x.cos(), bias=bias, engine=name).cos()

    with using(engine) as name:
        inputs = leaf(1, 2, 3, 2, seed=0), leaf(3, 3, seed=1).requires_grad_(with_bias)
        assert gradcheck(run, inputs, fast_mode=True)
        assert gradgradcheck(run, inputs, fast_mode=True)


def test_gradients_of_torch_sdpa() -> None:
    """PyTorch's kernel has first derivatives only: the second are stream's."""
    operands = leaf(1, 2, 3, 5, seed=0), leaf(1, 2, 3, 5, seed=1), leaf(1, 2, 3, 5, seed=2)
    for mask in (None, es.causal()):

        def run(query: Tensor, key: Tensor, value: Tensor, mask: es.Mask | None = mask) -> Tensor:
            return es.attention(query, key, value, mask, engine="torch_sdpa")

        assert gradcheck(run, operands, fast_mode=True)
        assert gradgradcheck(run, operands, fast_mode=True)


@every_exact
def test_operands_changed_before_the_backward_are_noticed(engine: str) -> None:
    query, key, value = (x * 1 for x in small())
    bias, seen = leaf(5, seed=4) * 1, torch.ones(3, 5, dtype=torch.bool)
    with using(engine) as name:
        for changed in (query, key, value, bias, seen):
            output = es.attention(query, key, value, es.allow(seen), bias=bias, engine=name)
            right = torch.autograd.grad(output.sum(), (query, key, value, bias), retain_graph=True)
            with torch.no_grad():
                changed.logical_not_() if changed is seen else changed.mul_(2)
            try:
                got = torch.autograd.grad(output.sum(), (query, key, value, bias))
            except RuntimeError as error:
                assert "inplace" in str(error)
            else:
                assert all(map(torch.equal, got, right))  # where no derivative needs what was changed


# torch.func


@pytest.fixture(params=["auto", "reference"])
def whole(request: pytest.FixtureRequest) -> str:
    return request.param


def settings_for_func() -> dict[str, Any]:
    return {"mask": es.causal(), "offset": 2, "bias": draw(3, 5, seed=4, dtype=torch.float64)}


def test_func_grad(whole: str) -> None:
    operands, settings = small(), settings_for_func()

    def loss(*operands: Tensor, engine: str = whole) -> Tensor:
        output, seen = es.attention(*operands, readouts=READOUTS, engine=engine, **settings)
        seen = [finite(x.weights if isinstance(x, tuple) else x) for x in seen.values()]
        return sum((x.square().sum() for x in seen), output.square().sum())

    got = torch.func.grad(loss, argnums=(0, 1, 2))(*[t.detach() for t in operands])
    right = torch.autograd.grad(loss(*operands, engine="reference"), operands)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("readout", READOUTS)
def test_func_vmap(whole: str, readout: str) -> None:
    stacked = [
        torch.stack([draw(*t.shape, seed=s + 10 * n, dtype=t.dtype) for n in range(3)]) for s, t in enumerate(small())
    ]
    settings = settings_for_func()

    def call(*operands: Tensor) -> tuple[Tensor, ...]:
        output, seen = es.attention(*operands, readouts=READOUTS[readout], engine=whole, **settings)
        return output, *(seen if isinstance(seen, tuple) else (seen,))

    got = torch.func.vmap(call)(*stacked)
    for n in range(3):
        for one, other in zip(got, call(*(t[n] for t in stacked)), strict=True):
            torch.testing.assert_close(one[n], other)


@forward_mode
def test_func_jacobians(whole: str) -> None:
    query, key, value = (t.detach() for t in small())
    settings = settings_for_func()

    def call(query: Tensor, engine: str = whole) -> Tensor:
        return es.attention(query, key, value, engine=engine, **settings)

    right = torch.autograd.functional.jacobian(lambda q: call(q, "reference"), query)
    torch.testing.assert_close(torch.func.jacrev(call)(query), right)
    torch.testing.assert_close(torch.func.jacfwd(call)(query), right)
    _, along = torch.func.jvp(call, (query,), (torch.ones_like(query),))
    torch.testing.assert_close(along, right.sum((-4, -3, -2, -1)))


def test_func_of_what_a_function_captures(whole: str) -> None:
    query, key, value = (t.detach() for t in small())

    def loss(x: Tensor, engine: str = whole) -> Tensor:
        output = es.attention(query, key, value, offset=0, score_mod=lambda s, b, h, p, j: s * x, engine=engine)
        return output.square().sum()

    x = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (right,) = torch.autograd.grad(loss(x, "reference"), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), right)
    with pytest.raises(ValueError, match=r"engine='stream' can't compute this: torch\.func .* reference can"):
        torch.func.grad(lambda x: loss(x, "stream"))(x.detach())


def test_func_of_a_mask(whole: str) -> None:
    query, key, value = (t.detach() for t in small())
    masks = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    for make, stacked in (
        (es.allow, masks),
        (lambda keep: es.padding(keep[None]), masks[:, 0]),
        (es.lengths, torch.tensor([[2], [0], [5]])),
        (lambda ids: es.same(ids, torch.tensor([0, 1, 1, 2, 0])), torch.tensor([[0, 1, 1], [2, 2, 0]])),
    ):

        def call(given: Tensor, make: Callable[[Tensor], es.Mask] = make) -> Tensor:
            return es.attention(query, key, value, make(given), engine=whole)

        torch.testing.assert_close(torch.func.vmap(call)(stacked), torch.stack([call(m) for m in stacked]))


def test_what_was_changed_since_the_forward_is_not_computed_again() -> None:
    query = draw(1, 2, 9, 5, seed=0).requires_grad_()
    key = draw(1, 2, 9, 5, seed=1)
    with using("stream in tiny blocks") as engine:
        output = es.attention(query, key, key, engine=engine)
        key.mul_(2)
        said = "modified by an inplace operation .* change a clone of it, or ask for engine='reference'"
        with pytest.raises(RuntimeError, match=said):
            output.sum().backward()


@forward_mode
@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev", "jvp"])
@pytest.mark.parametrize("engine", ["stream", "torch_sdpa"])
def test_func_is_refused_by_engines_that_work_in_place(engine: str, transform: str) -> None:
    query = draw(1, 2, 3, 5)

    def call(query: Tensor) -> Tensor:
        return es.attention(query, query, query, engine=engine).sum()

    run = {
        "grad": lambda: torch.func.grad(call)(query),
        "vmap": lambda: torch.func.vmap(call)(query[None]),
        "jacrev": lambda: torch.func.jacrev(call)(query),
        "jvp": lambda: torch.func.jvp(call, (query,), (query,)),
    }[transform]
    with pytest.raises(ValueError, match=rf"engine='{engine}' can't compute this: .*torch\.func.*reference can"):
        run()


@forward_mode
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_forward_mode(engine: str) -> None:
    """Dual numbers without torch.func."""
    query, key, value = (t.detach() for t in small())
    forward = torch.autograd.forward_ad

    def call(query: Tensor, engine: str = engine) -> Tensor:
        return es.attention(query, key, value, es.causal(), offset=2, engine=engine)

    right = torch.autograd.functional.jacobian(call, query).sum((-4, -3, -2, -1))
    with forward.dual_level():
        dual = forward.make_dual(query, torch.ones_like(query))
        torch.testing.assert_close(forward.unpack_dual(call(dual)).tangent, right)
        with pytest.raises(ValueError, match=r"engine='stream' can't compute this"):
            call(dual, "stream")


PROBLEMS = {
    # Each has a small weight, which must not be what is left of 1 − (1 − w).
    "101 keys": operands(b=3, h=3, g=1, i=7, j=101, d=1, e=5),
    # Which of them is the largest, and which score, may be two keys.
    "weights that round to equal": (
        torch.tensor([[[[1e-8, 0.0]]]]),
        torch.eye(2)[None, None],
        torch.eye(2)[None, None],
    ),
}
ASKED: dict[str, Any] = {
    "lse": (es.LogSumExp(), lambda found: found["lse"]),
    "entropy": (es.Entropy(), lambda found: -found["weights"].xlogy(found["weights"]).sum(-1)),
}


@pytest.mark.parametrize("engine", [*EXACT, "auto"])
@pytest.mark.parametrize("name", [*ASKED, "sink"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_softmax_leaves_behind_keeps_its_digits(problem: str, name: str, engine: str) -> None:
    query, key, value = (x.clone().requires_grad_() for x in PROBLEMS[problem])
    sink = draw(query.shape[1], seed=4) if name == "sink" else None
    case = Case(query, key, value, {"scale": 0.125, "sink": sink}, scale=0.125, sink=sink)
    readouts = {name: ASKED[name]} if name in ASKED else {}
    truth = TrueGradients(case, readouts, 0)
    leaves = {"query": query, "key": key, "value": value}
    with using(engine) as passed:
        asked = {n: r for n, (r, _) in readouts.items()}
        found = es.attention(**leaves, readouts=asked, engine=passed, **case.arguments)
    truth.check(truth.of(floats(*found), leaves))


@pytest.mark.parametrize("engine", [*EXACT, "auto"])
def test_values_of_no_dimension(engine: str) -> None:
    query, key, value = (draw(1, 1, n, d, seed=n).requires_grad_() for n, d in ((31, 8), (33, 8), (33, 0)))
    with using(engine) as passed:
        output, entropy = es.attention(query, key, value, readouts=es.Entropy(), engine=passed)
        alone = torch.autograd.grad(entropy.sum(), (query, key), retain_graph=True)
        made = torch.autograd.grad(output.sum() + entropy.sum(), (query, key, value))
    assert torch.equal(made[0], alone[0]) and torch.equal(made[1], alone[1]) and made[2].shape == value.shape


@every_exact
def test_a_sink_that_is_a_number_keeps_its_digits(engine: str) -> None:
    query, key, value = small()
    with using(engine) as passed:
        outputs = [
            es.attention(query, key, value, sink=sink, engine=passed)
            for sink in (0.7, torch.tensor(0.7, dtype=torch.float64))
        ]
    assert torch.equal(*outputs)
