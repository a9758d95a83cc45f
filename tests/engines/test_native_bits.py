"""The native engine's promises about bits."""

from __future__ import annotations

import threading

import pytest
import torch
from engines.native_cases import READOUTS, SIZES, attend, make, of_keys, settings_of

import einsight as es
from einsight.engines import native

pytestmark = pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")


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
