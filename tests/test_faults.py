"""What befalls a library in use: strange memory, extremes, other processes, pickles, more than there is room for."""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import Truth, operands
from engines_under_test import ENGINES, using
from oracle import Case
from torch import Tensor

import einsight as es
from einsight import nn

NEVER = 1 << 20  # queries and keys whose weights no machine holds


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param) as name:
        yield name


def read_only(tensor: Tensor) -> Tensor:
    array = tensor.numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it could write
        return torch.from_numpy(array)


def overlapping(tensor: Tensor) -> Tensor:
    """Rows that share most of their numbers."""
    flat = tensor.flatten()
    return flat.as_strided(tensor.shape, (0, 3, 2, 1))


def backwards(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 3).contiguous().transpose(1, 3)


@pytest.mark.parametrize("memory", [read_only, overlapping, backwards])
def test_strange_memory(engine: str, memory: Any) -> None:
    q, k, v = (memory(x) for x in operands())
    output, weights = es.attention(q, k, v, readouts=es.Weights(), engine=engine)
    truth = Truth(Case(q, k, v))
    truth.check("output", output, lambda o: o["output"])
    truth.check("weights", weights, lambda o: o["weights"])


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e18, 1e19])
def test_extremes(engine: str, scale: float) -> None:
    """Denormal values, scores at the ends of float32."""
    q, k, v = operands()
    if scale < 1:
        v = v * scale
    else:
        q, k = q.sign() * scale / 4, k.sign() * scale / 4
    output, entropy = es.attention(q, k, v, readouts=es.Entropy(), engine=engine)
    truth = Truth(Case(q, k, v))
    truth.check("output", output, lambda o: o["output"])
    assert entropy.isfinite().all()


def test_ends_of_half_precision(engine: str) -> None:
    largest = torch.finfo(torch.float16).max
    q, k, v = (x.half() for x in operands())
    k, v = k.sign() * largest, v.sign() * largest
    output, (top, lse) = es.attention(q, k, v, readouts=[es.MaxScore(), es.LogSumExp()], engine=engine)
    assert output.abs().max() <= largest
    assert top.isfinite().all() and top.abs().max() > largest and lse.isfinite().all()


def work(queue: Any) -> None:
    q, k, v = (torch.ones(1, 2, 131, 16) * n for n in (1, 2, 3))
    output, entropy = es.attention(q, k, v, es.causal(), readouts=es.Entropy())
    queue.put((output.sum().item(), entropy.sum().item()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of a fork beside threads
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_other_processes_after_use(start: str) -> None:
    context = multiprocessing.get_context(start)
    queue: Any = context.Queue()
    work(queue)
    here = queue.get(timeout=60)
    process = context.Process(target=work, args=(queue,))
    process.start()
    there = queue.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0 and there == here


def test_pickles() -> None:
    layer = nn.MultiHeadAttention(24, 3, mask=es.window(5, 0) & es.padding(torch.ones(2, 7).bool()), sink=True)
    copied = pickle.loads(pickle.dumps(layer))
    x = torch.randn(2, 7, 24)
    assert torch.equal(copied(x), layer(x))
    mask, readout = pickle.loads(pickle.dumps((es.causal() | es.pairs([1], [3]), es.TopK(2, queries=[1, 2]))))
    assert mask.show(5, 5) == (es.causal() | es.pairs([1], [3])).show(5, 5)
    assert repr(readout) == repr(es.TopK(2, queries=[1, 2]))


@pytest.mark.parametrize(
    "readout", [es.Weights(), es.Scores(), es.Rows(range(NEVER)), es.Pool(1), es.TopK(NEVER)], ids=lambda r: repr(r)[:9]
)
def test_what_never_fits_is_refused_before_any_work(readout: es.Readout) -> None:
    q = torch.zeros(1, 4, NEVER, 1)
    with pytest.raises(ValueError, match=r"would take [\d,]+ GB, and this machine has [\d,]+ GB. Rows"):
        es.attention(q, q, q, readouts=readout)


def test_whole_matrices_that_never_fit() -> None:
    q = torch.zeros(1, 4, NEVER, 1)
    with pytest.raises(ValueError, match=r"its whole matrices would take [\d,]+ GB.*; native and .*stream can"):
        es.attention(q, q, q, engine="reference")
    with pytest.raises(ValueError, match="the result of Weights"):
        es.AttentionWeights(q, q).dense()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_pytorchs_kernel_is_mended_where_hidden_values_are_no_numbers(bad: float) -> None:
    q, k, v = operands(e=11)
    clean = es.attention(q, k, v, es.causal(), offset=0, engine="torch_sdpa")
    for key, spoiled in ((6, 5), (3, 3)):  # the last keys are seen by no query
        value = v.clone()
        value[:, :, key] = bad
        output = es.attention(q, k, value, es.causal(), offset=0, engine="torch_sdpa")
        assert torch.equal(output[:, :, :spoiled], clean[:, :, :spoiled])
        assert not output[:, :, spoiled:].isfinite().any()
