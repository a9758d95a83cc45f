"""The training monitor's numbers against dense weights."""

import contextlib
import inspect
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Monitor

IDS = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(1))


def scores_of(attention):
    q, k = attention.last
    future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
    return (q @ k.mT / 8**0.5).masked_fill(future, -torch.inf)


def expected(scores):
    """From dense scores [n, h, i, j] of all micro-batches."""
    weights = scores.softmax(-1)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    told = slice(1, None)  # the first query sees itself alone
    return scores.amax((0, 2, 3)), entropy[:, :, told].mean((0, 2)), weights[:, :, told, 0].mean((0, 2))


@pytest.mark.parametrize("kind", ["sdpa", "einsight"])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_numbers_over_micro_batches(kind, checkpoint):
    model = GPT(kind, checkpoint).eval()
    monitor, scores = Monitor(model, heads=True), [[], [], []]
    with monitor:
        for micro in IDS.split(1):
            model(micro).square().sum().backward()
            for n, block in enumerate(model.blocks):
                scores[n].append(scores_of(block.attention))
    summary = monitor.summary()
    assert all(type(value) is float for value in summary.values())
    for n, block in enumerate(scores):
        name = f"blocks.{n}.attention"
        for quantity, heads in zip(("max_score", "entropy", "first_token"), expected(torch.cat(block)), strict=True):
            found = [summary[f"attention/{name}/{quantity}/{of}"] for of in ("min", "mean", "max", "head_0", "head_1")]
            dense = torch.stack([heads.min(), heads.mean(), heads.max(), *heads])
            torch.testing.assert_close(torch.tensor(found), dense, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(monitor.max_score()[name], expected(torch.cat(block))[0])
    assert len(summary) == 3 * 3 * 5


def test_nothing_changes():
    model = GPT("sdpa").train()

    def step(context):
        model.zero_grad()
        torch.manual_seed(3)
        with context:
            model(IDS).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    plain, state = step(contextlib.nullcontext())
    seen, state_seen = step(Monitor(model))
    assert torch.equal(state, state_seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_every_other_step():
    model, found = GPT("sdpa"), []
    monitor = Monitor(model, every=2)
    for n in range(4):
        with monitor:
            model(IDS[:, : 4 + n])
        found.append(monitor.summary())
    assert found[0] == found[1] != found[2] == found[3]
    assert monitor.step == 4
    assert all("head_0" not in key for key in found[0])


def test_padding_has_no_part():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    x = torch.randn(2, 5, 6)
    x[0, 3:], x[1, :2] = 1e3, 1e3
    padding = torch.tensor([[False] * 3 + [True] * 2, [True] * 2 + [False] * 3])
    monitor, plain = Monitor(layer), Monitor(layer)
    with monitor:
        layer(x, x, x, key_padding_mask=padding, need_weights=False)
    with plain:
        real = torch.stack([x[0, :3], x[1, 2:]])
        layer(real, real, real, need_weights=False)
    assert monitor.summary() == pytest.approx(plain.summary(), rel=1e-5, abs=1e-5)


def test_grouped_heads_masks_and_low_precision():
    layer = es.nn.MultiHeadAttention(24, 6, num_kv_heads=2, mask=es.window(2, 0), sink=True).bfloat16()
    x = torch.randn(2, 7, 24).bfloat16()
    monitor = Monitor(layer)
    with monitor:
        _, (weights, largest) = layer(x, readouts=[es.Weights(), es.MaxScore()])
    torch.testing.assert_close(monitor.max_score()["MultiHeadAttention"], largest.amax((0, 2)))
    share = monitor.summary()["attention/MultiHeadAttention/first_token/mean"]
    assert share == pytest.approx(float(weights[..., 0].detach().mean()), abs=1e-5)


def test_what_was_not_seen_is_never_reported():
    model = GPT("sdpa")
    monitor = Monitor(model)
    with pytest.raises(LookupError, match=r"the monitor saw no step: run forward and backward within `with monitor:`$"):
        monitor.summary()
    with monitor:
        model(IDS)
        with pytest.raises(RuntimeError, match="watching a step already"):
            monitor.__enter__()
    with monitor:
        pass
    with pytest.raises(LookupError, match="saw no call of attention"):
        monitor.max_score()
    make = inspect.unwrap(Monitor.__init__)
    with pytest.raises(ValueError, match="every must be a number of steps, 1 or more, not 0"):
        Monitor(model, every=0)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
        make(object.__new__(Monitor), "gpt2")


@pytest.mark.parametrize("empty", [torch.zeros(0, 5, 8), torch.zeros(3, 0, 8)])
def test_an_empty_micro_batch_tells_nothing(empty):
    model, x = nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.randn(3, 5, 8)
    monitor, other = Monitor(model), Monitor(model)
    with monitor:
        model(empty)
    with pytest.raises(LookupError, match="which ran as without it: 1 of an empty batch"):
        monitor.summary()
    with monitor:
        model(empty), model(x)
    with other:
        model(x)
    assert monitor.summary() == other.summary()


def numbers(monitor, name):
    summary = monitor.summary()
    return [summary[f"attention/{name}/{quantity}/mean"] for quantity in ("entropy", "first_token")]


def packed(attend, documents):
    """A layer over documents side by side, and what each says alone."""

    class Layer(nn.Module):
        def forward(self, x, ids=None):
            return attend(x, ids)

    model, x, found = Layer(), 3 * torch.randn(2, 2, len(documents), 8), []
    whole = Monitor(model)
    with whole:
        model(x, documents)
    for n in documents.unique():
        part, alone = x[:, :, documents == n], Monitor(model)
        with alone:
            model(part)
        choices = part.shape[2] - 1 if attend is not both_ways else part.shape[2] * (part.shape[2] > 1)
        found.append((choices, numbers(alone, "Layer")))
    count = sum(n for n, _ in found)
    return numbers(whole, "Layer"), [sum(n * told[m] for n, told in found if n) / count for m in (0, 1)]


def ours(x, ids):
    return es.attention(x, x, x, es.causal() if ids is None else es.causal() & es.documents(ids))


def of_torch(x, ids):
    mask = torch.ones(x.shape[2], x.shape[2]).tril().bool()
    mask = mask if ids is None else mask & (ids == ids[:, None])
    return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def windowed(x, ids):
    return es.attention(x, x, x, es.window(2, 0) if ids is None else es.window(2, 0) & es.documents(ids))


def both_ways(x, ids):
    return es.attention(x, x, x, None if ids is None else es.documents(ids))


@pytest.mark.parametrize("attend", [ours, of_torch, windowed, both_ways])
def test_packed_documents_count_as_they_do_alone(attend):
    found, alone = packed(attend, torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3]))
    assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("attend", [ours, of_torch, windowed])
def test_queries_without_a_choice_are_no_collapse(attend):
    class Layer(nn.Module):
        def forward(self, x, ids=None):
            return attend(x, ids)

    monitor = Monitor(Layer())
    for ids, i in ((torch.arange(6), 6), (None, 1)):
        with monitor:
            monitor.model(torch.randn(1, 2, i, 8), ids)
        assert monitor.alarms() == [] and all(map(math.isnan, numbers(monitor, "Layer")))
    with monitor:  # nearly all alone, and two that choose evenly
        monitor.model(torch.zeros(1, 2, 60, 8), torch.arange(60).clamp(max=58))
    assert monitor.alarms() == [] and numbers(monitor, "Layer") == pytest.approx([math.log(2), 0.5])


def test_alarms():
    layer = es.nn.MultiHeadAttention(8, 2, mask=es.causal())
    monitor, x = Monitor(layer), torch.randn(2, 6, 8)
    with monitor:
        layer(x)
    assert monitor.alarms() == []
    with torch.no_grad():
        layer.query.weight[4:] *= 1e5
    with monitor:
        layer(x)
    (alarm,) = monitor.alarms()
    assert (alarm.kind, alarm.layer, alarm.head) == ("logits", "MultiHeadAttention", 1)
    assert "head 1: largest score" in str(alarm) and alarm.value > 100
    with torch.no_grad():
        layer.query.weight[:4] *= 1e5
    with monitor:
        layer(x)
    assert [alarm.kind for alarm in monitor.alarms()] == ["logits", "logits", "entropy"]
    assert "attention collapses" in str(monitor.alarms()[2])
    with torch.no_grad():
        layer.query.weight.fill_(torch.nan)
    with monitor:
        layer(x)
    assert [str(alarm) for alarm in monitor.alarms()] == [
        f"MultiHeadAttention, head {head}: scores are no numbers" for head in range(2)
    ]


def test_no_number_is_no_zero():
    """A head of NaN, as the weights themselves say it."""
    layer = es.nn.MultiHeadAttention(8, 2, mask=es.causal())
    with torch.no_grad():
        layer.query.weight[:4] = torch.nan
    monitor = Monitor(layer, heads=True)
    with monitor:
        layer(torch.randn(2, 6, 8))
    found = monitor.summary()
    for quantity in ("max_score", "entropy", "first_token"):
        assert math.isnan(found[f"attention/MultiHeadAttention/{quantity}/head_0"])
        assert math.isfinite(found[f"attention/MultiHeadAttention/{quantity}/head_1"])


RANKS = """
import os, sys, torch
from einsight.nn import MultiHeadAttention
from einsight.lens import Monitor, qk_clip
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(MultiHeadAttention(8, 2), MultiHeadAttention(8, 4))
inputs = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1))
own = []
for part in inputs:
    with (monitor := Monitor(model)):
        model(part)
    own.append(monitor.max_score())
with (monitor := Monitor(torch.nn.parallel.DistributedDataParallel(model))):
    monitor.model(inputs[rank]).sum().backward()
found = monitor.max_score(torch.distributed.group.WORLD)
assert list(found) == ["module.0", "module.1"], list(found)
for name, scores in found.items():
    assert torch.equal(scores, torch.maximum(own[0][name[7:]], own[1][name[7:]]))
gamma = qk_clip(model, monitor, 1e-3, torch.distributed.group.WORLD)
both = [torch.empty_like(gamma["module.1"]) for _ in range(2)]
torch.distributed.all_gather(both, gamma["module.1"])
assert torch.equal(*both)
torch.distributed.barrier()
os._exit(0)  # gloo's own threads, ended while the interpreter ends, have aborted a process whose work was done
"""


def test_two_ranks(tmp_path):
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", RANKS]
    with ThreadPoolExecutor(2) as pool:
        ranks = pool.map(
            lambda rank: subprocess.run(
                [*command, str(rank), str(tmp_path / "store")], cwd="tests", capture_output=True, text=True, timeout=120
            ),
            range(2),
        )
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr[-3000:]


COMPILED = """
import torch
from lens.gpt import GPT
from einsight.lens import Monitor
torch.manual_seed(0)
model = GPT("sdpa")
ids = torch.randint(0, 17, (2, 9))
plain = Monitor(model)
with plain:
    model.eval()(ids).sum().backward()
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
monitor = Monitor(compiled, every=3)
for _ in range(4):
    with monitor:
        compiled(ids).sum().backward()
for name, value in plain.summary().items():
    assert abs(monitor.summary()[name] - value) < 1e-5, name
assert monitor.summary().keys() == plain.summary().keys()
"""


def test_compiled():
    ran = subprocess.run([sys.executable, "-c", COMPILED], cwd="tests", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
