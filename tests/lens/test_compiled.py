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
