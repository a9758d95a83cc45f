"""The native engine against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from engines.native_cases import (
    DTYPES,
    LEVELS,
    READOUTS,
    SETTINGS,
    SIZES,
    at_level,
    attend,
    check,
    error,
    judged_by,
    make,
    settings_of,
)

import einsight as es
from einsight.engines import native
from einsight.pose import pose

pytestmark = pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")


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


def test_values_without_dimensions() -> None:
    tensors = make((2, 3, 3, 5, 7, 11, 0))
    got, want = attend(*tensors), attend(*tensors, engine="reference")
    for name in want:
        torch.testing.assert_close(got[name], want[name])


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
