"""Laws that hold of every attention problem, on generated ones, over every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from cases import a_mask, cases, readouts_for
from checks import Truth, drawing
from engines_under_test import ENGINES, using
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case
from torch import Tensor
from torch.nn.functional import pad

import einsight as es

some = drawing(25)
every_engine = pytest.mark.parametrize("engine", ENGINES)
FLOATS = [torch.float32, torch.float64]


def weights_of(case: Case, engine: str, **changes: Any) -> es.AttentionWeights:
    settings = {**case.arguments, **changes}
    return es.AttentionWeights(case.query, case.key, settings.pop("mask", None), engine=engine, **settings)


def as_tensors(case: Case) -> dict[str, Any]:
    """The arguments with mask and bias as dense tensors."""
    b, h, _, i, j = case.sizes
    dense = {**case.arguments, "mask": es.allow(case.allowed())}
    if case.bias is not None:
        dense["bias"] = case.bias(case.accuracy).expand(b, h, i, j)
    return dense


def numbers(*shape: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def an_order(draw: Any, size: int) -> list[int]:
    """Some of the numbers below `size`, in any order."""
    return draw(st.lists(st.integers(0, size - 1), unique=True, min_size=1)) if size else []


@every_engine
@some
@given(case=cases())
def test_what_keys_receive_is_what_queries_give(engine: str, case: Case) -> None:
    truth = Truth(case)
    with using(engine) as name:
        W = weights_of(case, name)
        truth.check("received", W.sum(-2).sum(), lambda o: o["weights"].sum())
        truth.check("given", W.sum(-1).sum(), lambda o: o["weights"].sum())


@every_engine
@some
@given(case=cases())
def test_entropy_from_lse_and_scores(engine: str, case: Case) -> None:
    truth = Truth(case)
    with using(engine) as name:
        entropy, lse, scores, weights = weights_of(case, name).read(
            [es.Entropy(), es.LogSumExp(), es.Scores(), es.Weights()]
        )
    truth.check("entropy", entropy, lambda o: oracle.entropy(o["weights"]))

    def law(o: dict[str, Tensor]) -> Tensor:
        nothing = (o["weights"] == 0).all(-1)  # or −∞ · 0
        along = o["weights"].sum(-1) * o["lse"].masked_fill(nothing, 0)
        return along - (o["weights"] * o["scores"].where(o["weights"] > 0, 0)).sum(-1)

    truth.check("by the law", law({"weights": weights, "lse": lse, "scores": scores}), law)


@every_engine
@some
@given(case=cases(), data=st.data())
def test_permuted_keys_permute_the_weights(engine: str, case: Case, data: Any) -> None:
    j = case.sizes[4]
    order = torch.tensor(data.draw(st.permutations(range(j))), dtype=torch.int64)
    settings = as_tensors(case)
    settings["mask"] = es.allow(case.allowed()[..., order])
    if case.bias is not None:
        settings["bias"] = settings["bias"][..., order]
    if case.score_mod is not None:
        settings["score_mod"] = lambda s, b, h, p, key: case.score_mod(s, b, h, p, order[key])
    truth = Truth(case)
    with using(engine) as name:
        output, weights = es.attention(
            case.query, case.key[:, :, order], case.value[:, :, order], readouts=es.Weights(), engine=name, **settings
        )
    truth.check("output", output, lambda o: o["output"])
    truth.check("weights", weights, lambda o: o["weights"][..., order])


@every_engine
@some
@given(case=cases(dtypes=FLOATS), data=st.data())
def test_two_sets_of_keys_merged_are_the_whole(engine: str, case: Case, data: Any) -> None:
    j = case.sizes[4]
    cut = data.draw(st.integers(0, j))
    settings, seen, results, more, more_lse = as_tensors(case), case.allowed(), [], 0.0, 0.0
    bias, score_mod = case.bias, case.score_mod
    for first, last, with_sink in ((0, cut, True), (cut, j, False)):
        part = replace(
            case,
            key=case.key[:, :, first:last],
            value=case.value[:, :, first:last],
            predicate=lambda b, h, i, p, key, first=first: bool(seen[b, h, i, key + first]),
            bias=bias and (lambda t, first=first, last=last: bias(t).expand(seen.shape)[..., first:last]),
            score_mod=score_mod and (lambda s, b, h, p, key, first=first: score_mod(s, b, h, p, key + first)),
            sink=case.sink if with_sink else None,
        )
        arguments = {**settings, "mask": es.allow(seen[..., first:last]), "score_mod": part.score_mod}
        if bias is not None:
            arguments["bias"] = settings["bias"][..., first:last]
        if not with_sink:
            arguments.pop("sink", None)
        with using(engine) as name:
            results.append(
                es.attention(part.query, part.key, part.value, readouts=es.LogSumExp(), engine=name, **arguments)
            )
        truth = Truth(part)
        lse = truth.budget(lambda o: o["lse"], results[-1][1].dtype)
        largest = truth.right["output"].abs().max().item() if truth.right["output"].numel() else 0.0
        # The parts' errors come in with their shares, and the shares' own with the parts.
        more += truth.budget(lambda o: o["output"], results[-1][0].dtype) + lse * largest
        more_lse += lse
    output, lse = es.merge(*zip(*results, strict=True))
    truth = Truth(case)
    truth.check("output", output, lambda o: o["output"], more)
    truth.check("lse", lse, lambda o: o["lse"], more_lse)


@every_engine
@some
@given(case=cases())
def test_grouped_heads_are_repeated_heads(engine: str, case: Case) -> None:
    _, h, g, _, _ = case.sizes
    truth = Truth(case)
    with using(engine) as name:
        for key, value in (
            (case.key, case.value),
            (case.key.repeat_interleave(h // g, 1), case.value.repeat_interleave(h // g, 1)),
        ):
            output, weights = es.attention(case.query, key, value, readouts=es.Weights(), engine=name, **case.arguments)
            truth.check("output", output, lambda o: o["output"])
            truth.check("weights", weights, lambda o: o["weights"])


@every_engine
@some
@given(case=cases(), data=st.data())
def test_masks_combine_as_their_tensors_do(engine: str, case: Case, data: Any) -> None:
    left, says_left = a_mask(data.draw, case)
    right, says_right = a_mask(data.draw, case)
    this, that = (replace(case, predicate=says).allowed() for says in (says_left, says_right))
    rule, tensor = data.draw(
        st.sampled_from(
            [(left & right, this & that), (left | right, this | that), (~left, ~this), (left & ~right, this & ~that)]
        )
    )
    truth = Truth(replace(case, predicate=lambda b, h, i, p, j: bool(tensor[b, h, i, j])))
    with using(engine) as name:
        for mask in (rule, es.allow(tensor), es.forbid(~tensor)):
            output, (weights, mean) = es.attention(
                case.query, case.key, case.value, readouts=[es.Weights(), es.Received(mean=True)],
                engine=name, **{**case.arguments, "mask": mask},
            )  # fmt: skip
            truth.check("output", output, lambda o: o["output"])
            truth.check("weights", weights, lambda o: o["weights"])
            truth.check("mean", mean, lambda o: o["weights"].sum(2) / o["visible"].sum(2).clamp(min=1))


@every_engine
@some
@given(case=cases(), data=st.data())
def test_a_share_and_its_complement_are_all_of_it(engine: str, case: Case, data: Any) -> None:
    rule, says = a_mask(data.draw, case)
    inside = replace(case, predicate=says).allowed()
    truth = Truth(case)
    with using(engine) as name:
        share, rest = weights_of(case, name).read([es.Share(rule), es.Share(~rule)])
    truth.check("share", share, lambda o: (o["weights"] * inside).sum(-1))
    truth.check("rest", rest, lambda o: (o["weights"] * ~inside).sum(-1))
    truth.check("both", share + rest, lambda o: o["weights"].sum(-1))


@every_engine
@some
@given(case=cases(), data=st.data(), dropout=st.sampled_from([0.0, 0.3]), grad=st.booleans())
def test_a_readout_changes_no_bit_of_the_output(engine: str, case: Case, data: Any, dropout: float, grad: bool) -> None:
    if engine in ("auto", "triton") and not dropout:
        return  # it may take an engine for the output alone; tests/engines/interpreted.py asks triton
    readouts = {name: readout for name, (readout, _) in readouts_for(case, data.draw).items()}
    query, key, value = (t.detach().requires_grad_(grad) for t in (case.query, case.key, case.value))
    outputs = []
    with using(engine) as name:
        for asked in (None, readouts, [es.LogSumExp()]):
            torch.manual_seed(7)
            found = es.attention(query, key, value, dropout=dropout, readouts=asked, engine=name, **case.arguments)
            outputs.append(found if asked is None else found[0])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@every_engine
@some
@given(case=cases(), data=st.data())
def test_readouts_are_of_the_weights_before_dropout(engine: str, case: Case, data: Any) -> None:
    readouts = {name: readout for name, (readout, _) in readouts_for(case, data.draw).items()}
    operands = case.query, case.key, case.value
    with using(engine) as name:
        settings = {**case.arguments, "readouts": readouts}
        chosen = es.plan(*operands, dropout=0.3, engine=name, **settings).engine  # not every engine has dropout
        found = [es.attention(*operands, dropout=dropout, engine=chosen, **settings)[1] for dropout in (0.0, 0.3)]
    for n in readouts:
        assert all(map(torch.equal, *map(tensors, (f[n] for f in found)))), n


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@every_engine
@some
@given(case=cases())
def test_the_weights_times_the_values_are_attention(engine: str, case: Case) -> None:
    _, h, g, _, _ = case.sizes
    truth = Truth(case)
    with using(engine) as name:
        W = weights_of(case, name)
        output = es.attention(case.query, case.key, case.value, engine=name, **case.arguments)
        assert torch.equal(W @ case.value, output)
        truth.check("W @ per head", W @ case.value.repeat_interleave(h // g, 1), lambda o: o["output"])


@every_engine
@some
@given(case=cases(), e=st.sampled_from([0, 1, 3]))
def test_the_transposed_product(engine: str, case: Case, e: int) -> None:
    b, h, _, i, _ = case.sizes
    x = numbers(b, h, i, e, dtype=case.accuracy).requires_grad_()
    truth = Truth(case)
    with using(engine) as name:
        W = weights_of(case, name)
        there = W.mT @ x
        truth.check("W.mT @ x", there, lambda o: o["weights"].mT @ x.detach().to(o["weights"].dtype))
        incoming = numbers(*there.shape, dtype=there.dtype)
        (back,) = torch.autograd.grad(there, x, incoming)
        truth.check("its gradient", back, lambda o: o["weights"] @ incoming.to(o["weights"].dtype))
        if case.query.dtype == case.accuracy:
            truth.check("W @ v", W @ incoming, lambda o: o["weights"] @ incoming.to(o["weights"].dtype))


@every_engine
@some
@given(case=cases(), data=st.data())
def test_a_selection_is_a_slice_of_the_whole(engine: str, case: Case, data: Any) -> None:
    b, h, g, i, j = case.sizes
    batch, heads, queries = (an_order(data.draw, n) if data.draw(st.booleans()) else None for n in (b, h, i))
    again = an_order(data.draw, i if queries is None else len(queries))
    taken = [list(range(n)) if s is None else s for s, n in ((batch, b), (heads, h), (queries, i))]

    def picked(x: Tensor) -> Tensor:
        return x[taken[0]][:, taken[1]][:, :, taken[2]]

    readouts = [es.Weights(), es.LogSumExp(), es.Received(), es.Distance(), es.Share(es.window(1, 2)), es.Diagonal(-1)]
    away = (case.positions()[:, None, :, None] - torch.arange(j)).expand(b, h, i, j)
    truth = Truth(case)
    with using(engine) as name:
        W = weights_of(case, name).select(batch=batch, heads=heads, queries=queries)
        assert W.shape == (*map(len, taken), j)
        weights, lse, received, distance, share, before = W.read(readouts)
        truth.check("weights", weights, lambda o: picked(o["weights"]))
        truth.check("lse", lse, lambda o: picked(o["lse"]))
        truth.check("received", received, lambda o: picked(o["weights"]).sum(2))
        truth.check("distance", distance, lambda o: picked(o["weights"] * away.abs()).sum(-1))
        truth.check("share", share, lambda o: picked(o["weights"] * ((away <= 1) & (away >= -2))).sum(-1))
        truth.check("before", before, lambda o: picked(o["weights"] * (away == 1)).sum(-1))
        value = case.value.repeat_interleave(h // g, 1)[taken[0]][:, taken[1]]
        if heads is not None and len(heads) in (g, h):  # it may be the whole's: then that is asked, and selected after
            whole = weights_of(case, name).select(batch=batch, queries=queries)
            output = (whole @ case.value[taken[0]])[:, heads]
        else:
            output = W @ value
        truth.check("output", output, lambda o: picked(o["output"]))
        x = numbers(*picked(truth.right["lse"]).shape, 3, dtype=case.accuracy)
        truth.check("W.mT @ x", W.mT @ x, lambda o: picked(o["weights"]).mT @ x.to(o["weights"].dtype))
        twice = W.select(queries=again)
        truth.check("selected twice", twice.dense(), lambda o: picked(o["weights"])[:, :, again])


@every_engine
@some
@given(case=cases(), data=st.data())
def test_readouts_of_some_queries(engine: str, case: Case, data: Any) -> None:
    i, j = case.sizes[3:]
    order = an_order(data.draw, i)
    queries = [n - i if data.draw(st.booleans()) else n for n in order]
    rule = torch.arange(j) % 3
    readouts: list[es.Readout] = [
        es.Rows(queries),
        es.TopK(j + 1, queries=queries),
        es.Mass(rule, 3, queries=torch.tensor(queries, dtype=torch.int32)),
        es.Received(queries=queries),
    ]
    truth = Truth(case)

    def chosen(o: dict[str, Tensor]) -> Tensor:
        return o["weights"][:, :, order]

    with using(engine) as name:
        for asked in (readouts, [*readouts, es.Entropy()]):  # alone, only these queries are visited
            rows, top, mass, received = weights_of(case, name).read(asked)[:4]
            truth.check("rows", rows, chosen)
            truth.check("top", top.weights, lambda o: pad(chosen(o).sort(-1, descending=True)[0], (0, 1)))
            truth.check("mass", mass, lambda o: chosen(o) @ (rule[:, None] == torch.arange(3)).to(o["weights"].dtype))
            truth.check("received", received, lambda o: chosen(o).sum(2))


@every_engine
@some
@given(case=cases(dtypes=FLOATS))
def test_a_mask_with_exact_bounds_is_its_tensor(engine: str, case: Case) -> None:
    truth = Truth(case)
    with using(engine) as name:
        for mask in (case.arguments.get("mask"), es.allow(case.allowed())):
            output, scores = es.attention(
                case.query, case.key, case.value, readouts=es.Scores(), engine=name,
                **{**case.arguments, "mask": mask},
            )  # fmt: skip
            truth.check("output", output, lambda o: o["output"])
            truth.check("scores", scores, lambda o: o["scores"])
