"""The lens on compiled models, each in a process of its own: the tests' check of shapes can't be compiled."""

import subprocess
import sys

import pytest

COMPILED = """
import warnings, torch, einsight.lens
from lens.gpt import GPT
from einsight.lens import Lens
torch.manual_seed(0)
model = GPT("sdpa").eval()
compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
ids = torch.randint(0, 17, (2, 9))
plain = compiled(ids)
plain.square().sum().backward()
gradient = model.embed.weight.grad.clone()
for round in range(10):
    model.zero_grad()
    with Lens(compiled) as lens:
        for _ in range(3):
            seen = compiled(ids)
    seen.square().sum().backward()
    assert torch.equal(plain, seen)
    assert torch.equal(gradient, model.embed.weight.grad)
    assert lens.names == tuple(f"blocks.{n}.attention" for n in range(3)), lens.names
    assert [len(lens.passes(n)) for n in range(3)] == [3, 3, 3]
    assert lens[1].module is model.blocks[1].attention
    torch.testing.assert_close(lens[1].weights.dense(), model.blocks[1].attention.weights(), atol=1e-5, rtol=1e-4)
assert torch.equal(compiled(ids), plain)
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend):
    """In a process of its own: shapes checked by a wrapper around every function can't be compiled."""
    code = COMPILED.replace("BACKEND", repr(backend))
    ran = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


COMPILED_LLAMA = """
import torch
from lens.architectures import build
from einsight.lens import Lens
model, inputs = build("llama", "sdpa")
eager = build("llama", "eager")[0]
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    plain = compiled(**inputs, use_cache=False).logits
    with Lens(compiled) as lens:
        seen = compiled(**inputs, use_cache=False).logits
    weights = eager(**inputs, use_cache=False, output_attentions=True).attentions
assert torch.equal(plain, seen)
assert lens.names == ("model.layers.0.self_attn", "model.layers.1.self_attn"), lens.names
for call, expected in zip(lens, weights, strict=True):
    assert call.key.shape[1] == 2  # as they are, before they are repeated
    torch.testing.assert_close(call.weights.dense(), expected, atol=1e-5, rtol=1e-4)
"""


def test_compiled_llama():
    pytest.importorskip("transformers")
    ran = subprocess.run([sys.executable, "-c", COMPILED_LLAMA], cwd="tests", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


WAYS = """
import torch, torch.nn.functional as F
from torch import nn
from lens.gpt import GPT
from einsight.lens import Lens
torch.manual_seed(0)
ids = torch.randint(0, 17, (2, 9))
settings = {"fullgraph": True, "backend": BACKEND}

def of_the_original(model):
    return torch.compile(model, **settings)

def in_place(model):
    model.compile(**settings)
    return model

def blocks_in_place(model):
    for block in model.blocks:
        block.compile(**settings)
    return model

def blocks(model):
    for n, block in enumerate(model.blocks):
        model.blocks[n] = torch.compile(block, **settings)
    return model

def function(model):
    return torch.compile(lambda ids: model(ids), **settings)

class Outer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        torch._dynamo.graph_break()
        return self.model(ids)

def with_breaks(model):
    return torch.compile(Outer(model), backend=BACKEND)

for way in (of_the_original, in_place, blocks_in_place, blocks, function, with_breaks):
    torch._dynamo.reset()
    model = GPT("sdpa").eval()
    attentions = [block.attention for block in model.blocks]
    with torch.no_grad():
        run = way(model)
        plain = run(ids)
        for _ in range(10):
            with Lens(model) as lens:
                for _ in range(2):
                    assert torch.equal(run(ids), plain)
            assert lens.names == tuple(f"blocks.{n}.attention" for n in range(3)), (way, lens.names)
            assert [call.module for call in lens] == attentions, way
            assert [len(lens.passes(n)) for n in range(3)] == [2, 2, 2]

layer = nn.TransformerEncoderLayer(16, 2, 20, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
x = torch.randn(2, 5, 16)
run = torch.compile(model, **settings)
plain = run(x)
with Lens(model) as lens:
    assert torch.equal(run(x), plain)
with Lens(model) as eager:
    model(x)
assert lens.names == ("layers.0.self_attn", "layers.1.self_attn"), lens.names
torch.testing.assert_close(lens[1].weights.dense(), eager[1].weights.dense(), atol=1e-5, rtol=1e-4)

class Bare(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)

x = torch.randn(1, 2, 5, 4)
bare = torch.compile(Bare(), **settings)
with Lens(bare) as lens:
    bare(x)
assert lens.names == ("Bare",), lens.names
with Lens(bare) as lens, torch.autocast("cpu", torch.bfloat16):
    bare(x)
assert lens[0].query.dtype == torch.bfloat16
"""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_ways_to_compile(backend):
    code = WAYS.replace("BACKEND", repr(backend))
    ran = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


EAGER = """
import torch
from lens.architectures import build
from einsight.lens import Lens
for name in ("llama", "gpt2", "gpt_oss", "gemma2", "t5"):
    torch._dynamo.reset()
    model, inputs = build(name, "eager")
    with torch.no_grad():
        expected = model(**inputs, use_cache=False, output_attentions=True)
        model.compile(backend="aot_eager")
        plain = model(**inputs, use_cache=False).logits
        with Lens(model) as lens:
            seen = model(**inputs, use_cache=False).logits
    assert torch.equal(plain, seen)
    weights = expected.attentions if name != "t5" else (*expected.encoder_attentions, *expected.decoder_attentions)
    assert len(lens) == len(weights)
    for call, dense in zip(lens, weights, strict=True):
        torch.testing.assert_close(call.weights.dense(), dense, atol=1e-5, rtol=1e-4)
"""


def test_compiled_eager_attention():
    pytest.importorskip("transformers")
    ran = subprocess.run([sys.executable, "-c", EAGER], cwd="tests", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
