"""What can't be looked at runs as without a lens, and the lens says so."""

import contextlib
import inspect
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from lens.gpt import GPT
from torch import nn
from torch._subclasses import FakeTensorMode

import einsight as es
from einsight.lens import Lens, Monitor

IDS = torch.randint(0, 17, (2, 6))


def same_but_unseen(model, run, reason):
    with warnings.catch_warnings(record=True) as said:  # also prototypes, and what tracers say themselves
        warnings.simplefilter("always")
        plain = run()
        with Lens(model):
            looked_at = run()
    assert any(reason in str(warning.message) for warning in said), [str(warning.message) for warning in said]
    return plain, looked_at


def test_transforms_of_functions():
    model = GPT("sdpa").eval()
    parameters = dict(model.named_parameters())

    def loss(parameters, ids):
        return torch.func.functional_call(model, parameters, (ids[None],)).square().mean()

    def run():
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, IDS)

    plain, seen = same_but_unseen(model, run, "3 in a transform of torch.func")
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def test_transforms_of_multihead_attention():
    model = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(4, 2, 5, 12)
    for need_weights in (True, False):
        run = torch.func.vmap(lambda x, need=need_weights: model(x, x, x, need_weights=need)[0])
        plain, seen = same_but_unseen(model, lambda run=run: run(x), "in a transform of torch.func")
        assert torch.equal(plain, seen)


class Attend(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)


def test_nested_tensors():
    model = Attend()
    q = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    plain, seen = same_but_unseen(model, lambda: model(q, q, q), "1 of nested tensors (pad them")
    assert all(torch.equal(a, b) for a, b in zip(plain.unbind(), seen.unbind(), strict=True))


def test_tensors_without_numbers():
    model = GPT("sdpa").to("meta")
    _, seen = same_but_unseen(model, lambda: model(IDS.to("meta")), "of tensors without numbers (meta or fake)")
    assert seen.shape == (2, 6, 16)
    with FakeTensorMode() as mode:
        model = GPT("sdpa")
        ids = mode.from_tensor(IDS)
        _, seen = same_but_unseen(model, lambda: model(ids), "of tensors without numbers (meta or fake)")
    assert seen.shape == (2, 6, 16)


def test_traced():
    model = GPT("sdpa").eval()
    plain, seen = same_but_unseen(model, lambda: torch.jit.trace(model, IDS), "while torch.jit.trace traces")
    assert [node.kind() for node in plain.inlined_graph.nodes()] == [node.kind() for node in seen.inlined_graph.nodes()]
    assert torch.equal(plain(IDS), seen(IDS))


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    model = GPT("sdpa").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plain = torch.export.export(model, (IDS,), strict=strict)
        with Lens(model):
            seen = torch.export.export(model, (IDS,), strict=strict)
    targets = [[str(node.target) for node in program.graph.nodes] for program in (plain, seen)]
    assert targets[0] == targets[1]
    assert torch.equal(plain.module()(IDS), seen.module()(IDS))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_partly_seen_model_says_so():
    model, said = GPT("sdpa").eval(), "did not see these calls of attention, which ran as without it: 3 in a"
    with pytest.warns(UserWarning, match=said), Lens(model) as lens:
        model(IDS)
        torch.func.vmap(lambda ids: model(ids[None]))(IDS)
    assert len(lens.passes(0)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_dtypes_under_autocast(dtype):
    class Mixed(nn.Module):
        def forward(self, x, attention):
            return attention(x, x.to(dtype), x)

    x = torch.randn(2, 3, 5, 8)
    for attention in (F.scaled_dot_product_attention, es.attention):
        with torch.autocast("cpu", dtype), Lens(Mixed(), values=True) as lens:
            output = lens.model(x, attention)
        assert {lens[0].query.dtype, lens[0].key.dtype, lens[0].value.dtype} == {dtype}
        expected = torch.softmax(x.to(dtype).float() @ x.to(dtype).float().mT / 8**0.5, -1)
        torch.testing.assert_close(lens[0].weights.dense(), expected, atol=1e-5, rtol=1e-4)
        close = 2 * torch.finfo(dtype).eps * x.abs().max().item()
        torch.testing.assert_close((lens[0].weights @ lens[0].value).float(), output.float(), atol=close, rtol=close)


def test_record_is_never_ignored():
    model, x = Attend(), torch.randn(1, 2, 5, 4)
    record = inspect.unwrap(Lens.record)  # without the check of types that the tests wrap around it
    with contextlib.suppress(UserWarning), Lens(model) as lens:
        with pytest.raises(ValueError, match="outside the model's modules, whose names a layer is called by"):
            lens.record(x, x)
        with pytest.raises(ValueError, match="value has 4 key positions but key has 5"):
            record(lens, x, x, x[:, :, :4], name="x")
        lens.record(x, x, x, name="by hand")
    assert lens.names == ("by hand",)
    with pytest.raises(RuntimeError, match="for calls while the lens is open"):
        lens.record(x, x, name="late")


def test_opened_twice():
    lens = Lens(Attend())
    x = torch.randn(1, 2, 5, 4)
    with lens:
        with pytest.raises(RuntimeError, match="this lens is open already"):
            lens.__enter__()
        lens.model(x, x, x)
    with lens:
        lens.model(x, x, x)
    assert len(lens.passes(0)) == 2
    lens.clear()
    with pytest.raises(LookupError, match="saw no call"):
        lens[0]


def test_what_is_not_there_is_said_so():
    model = nn.ModuleDict({"own": Attend(), "cross_attn": Attend()})
    x = torch.randn(1, 2, 5, 4)
    with Lens(model) as lens:
        for layer in model.values():
            layer(x, x, x)
    with pytest.raises(LookupError, match="the lens was opened without readouts="):
        lens[0].results["entropy"]
    for source, name, said in [
        (lens, "cross_attn", r"'cross_attn' is cross-attention: lens\.cross\["),
        (lens.cross, "own", r"'own' is self-attention: lens\["),
        (lens, "x", "no self-attention layer 'x' was kept; there are own"),
        (lens.cross, "x", "no cross-attention layer 'x' was kept; there are cross_attn"),
    ]:
        with pytest.raises(KeyError, match=said):
            source[name]
    with pytest.raises(ValueError, match="keep_on='meta' would keep no numbers"):
        Lens(model, keep_on="meta")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap's
def test_a_monitor_says_what_it_did_not_see():
    model = GPT("sdpa").eval()
    with Monitor(model) as monitor:
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 4))  # not the model's
        torch.func.vmap(lambda ids: model(ids[None]))(IDS)
    with pytest.raises(LookupError, match=r"did not see these calls .*: 3 in a transform of torch\.func"):
        monitor.summary()


def test_compiled_code_is_not_edited():
    """In a process of its own: the tests' check of shapes can't be compiled."""
    code = """
import torch, einsight.lens
from lens.gpt import GPT
from einsight.lens import Edit, Lens
model = GPT("sdpa").eval()
compiled = torch.compile(model, backend="eager")
ids = torch.randint(0, 17, (2, 9))
with torch.no_grad():
    with Lens(compiled):
        plain = compiled(ids)
    assert torch.equal(compiled(ids), plain)  # the graph that reports, without anyone listening
    try:
        with Edit(compiled, layers=0, output=0):
            compiled(ids)
    except RuntimeError as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True)
    assert "in compiled code: edit the model before it is compiled" in ran.stdout, ran.stderr[-3000:]
