"""Calls in a compiled function: one graph that serves every length, and the same results.

Each in a process of its own: torch.compile can't look into the suite's checks of shapes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CALLS = {
    "no mask": "es.attention(q, k, v)",
    "causal": "es.attention(q, k, v, es.causal())",
    "an offset from sizes": "es.attention(q, k, v, es.causal(), offset=k.shape[2] - q.shape[2])",
    "readouts": "es.attention(q, k, v, es.window(3, 0), readouts=[es.Entropy(), es.Received(), es.TopK(2)])",
    "a picture": "es.attention(q, k, v, es.causal(), readouts=es.Pool(4))",
    "chosen queries": "es.attention(q, k, v, readouts={'rows': es.Rows([-1]), 'of': es.Received(slice(-3, None))})",
    "listed queries": "es.attention(q, k, v, readouts=[es.Rows([-1, 0]), es.TopK(2, [3, 1]), es.Received([4, 2])])",
    "listed heads": "es.AttentionWeights(q, k, es.causal()).select(heads=[3, 1]).read([es.Entropy(), es.Rows([-1])])",
    "lengths": "es.attention(q, k, v, es.lengths(lengths) & es.causal())",
    "padding": "es.attention(q, k, v, es.padding(keep[:, : k.shape[2]]) & es.causal())",
    "documents": "es.attention(q, k, v, es.documents(ids[: k.shape[2]]) & es.causal(), readouts=es.Entropy())",
    "either of two": "es.attention(q, k, v, es.causal() | es.lengths(2))",
    "pairs": "es.attention(q, k, v, es.pairs([1, 3], [2, 4]))",
    "alibi": "es.attention(q, k, v, bias=es.alibi(slopes))",
    "a tensor": "es.attention(q, k, v, es.allow(torch.ones(q.shape[2], k.shape[2]).tril().bool()))",
    "a learned tensor": "es.attention(q, k, v, bias=learned[:, : q.shape[2], : k.shape[2]])",
    "groups": "es.attention(q, k, v, readouts=es.Mass(ids[: k.shape[2]], n=20))",
    "a part of an operator": "es.AttentionWeights(q, k, es.causal())[0, 1]",
    "the textbook's mask": "es.scaled_dot_product_attention(q, k, v, hidden[: q.shape[2], : k.shape[2]])",
    "the textbook's": "es.scaled_dot_product_attention(q, k, v, es.causal())",
    "an operator": "es.AttentionWeights(q, k, es.causal()).read([es.Entropy(), es.Received()])",
}

SCRIPT = """
import torch, einsight as es
from torch.utils._pytree import tree_leaves

lengths, slopes, learned = torch.tensor([3, 5]), torch.rand(4), torch.randn(4, 99, 99, requires_grad=True)
hidden, ids = torch.ones(99, 99).triu(1).bool(), torch.arange(99) // 5
keep = torch.arange(198).view(2, 99) % 7 > 0

def call(q, k, v):
    return {call}

def run(call, n, dtype):
    torch.manual_seed(n)
    q, k, v = (torch.randn(2, 4, m, 8).to(dtype).requires_grad_() for m in (n, n + {more}, n + {more}))
    results = [x for x in tree_leaves(call(q, k, v)) if x.is_floating_point()]
    leaves = q, k, v, learned
    grads = torch.autograd.grad(sum(x.cos().sum() for x in results), leaves, allow_unused=True)
    return [*results, *(grad for grad in grads if grad is not None)]

def far(found, truth):
    return ((found - truth).abs().max() / truth.abs().max()).item()

torch.manual_seed(0)
for dynamic, graphs in ((None, 2), (True, 1)):
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    compiled, errors = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic), []
    for n in (7, 9, 13, 6, 67):
        results = run(compiled, n, torch.float32), run(call, n, torch.float32), run(call, n, torch.float64)
        errors.append([(far(got, truth), far(plain, truth)) for got, plain, truth in zip(*results, strict=True)])
    # The largest over all lengths: one alone may be small by luck.
    for of_one in zip(*errors, strict=True):
        ours, theirs = map(max, zip(*of_one, strict=True))
        assert ours <= 2 * theirs + torch.finfo(torch.float32).eps, (ours, theirs)
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found == graphs, found
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_serves_every_length(name: str) -> None:
    run(SCRIPT.format(call=CALLS[name], more=3 if "offset" in name else 0))


def test_half_precision() -> None:
    run("""
import torch, einsight as es

q, k, v = torch.randn(3, 2, 4, 7, 8).bfloat16().unbind(0)
k = torch.randn(2, 4, 7, 9).bfloat16()[..., 1:]  # numbers that don't lie in pairs
call = lambda q, k, v: es.attention(q, k, v, es.causal())
assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v))
layer, x = es.nn.MultiHeadAttention(16, 2).bfloat16(), torch.randn(2, 7, 16).bfloat16()
assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))
""")


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_call_serves_every_length(strict: bool) -> None:
    run(f"""
import torch, einsight as es
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves

TABLE = torch.randn(99, 99)

def readouts(q, k, v):
    return es.attention(q, k, v, es.window(3, 0), offset=0, readouts=[es.Entropy(), es.Received(), es.TopK(2)])

def offset(q, k, v):
    return es.attention(q, k, v, es.causal(), offset=k.shape[2] - q.shape[2], readouts=es.Diagonal(-1))

def sizes(q, k, v):
    mask = es.lengths(k.shape[2] - 1) & es.prefix(q.shape[2] // 2)
    return es.attention(q, k, v, mask, offset=0, readouts=es.Rows(q.shape[2] - 2))

def tensors(q, k, v):
    keep, ids = TABLE[:3, : k.shape[2]] > 0, TABLE[0, : k.shape[2]].long()
    mask = es.padding(keep[:1]) & es.documents(ids, ids[: q.shape[2]]) | es.allow(TABLE[: q.shape[2], : k.shape[2]] > 1)
    return es.attention(q, k, v, mask, offset=0, bias=TABLE[: q.shape[2], : k.shape[2]], readouts=es.Entropy())

class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v)

def draw(b, i, j):
    return [torch.randn(b, 4, n, 8) for n in (i, j, j)]

b, i, j = Dim("b", max=64), Dim("i", min=4, max=98), Dim("j", min=4, max=98)
dims = {{"q": {{0: b, 2: i}}, "k": {{0: b, 2: j}}, "v": {{0: b, 2: j}}}}
for call in (readouts, offset, sizes, tensors):
    model = Model(call)
    exported = export(model, tuple(draw(2, 16, 19)), dynamic_shapes=dims, strict={strict}).module()
    for lengths in ((1, 5, 7), (3, 67, 67), (2, 6, 80)):
        operands = draw(*lengths)
        assert all(map(torch.equal, tree_leaves(exported(*operands)), tree_leaves(model(*operands)))), call
""")


def test_what_breaks_the_graph_gives_the_same() -> None:
    run("""
import torch, einsight as es
from torch.utils._pytree import tree_leaves

class Simpson(es.Readout):
    def block(self, x):
        return 1 - x.weights.square().sum(-1)

def own(q, k, v):
    return es.attention(q, k, v, es.causal(), readouts=[Simpson(), es.Entropy(), es.Received()])

def stream(q, k, v):
    mask = es.causal() & ~es.pairs([3], [1])
    return es.attention(q, k, v, mask, engine="stream", sink=0.5, readouts=[es.Entropy(), es.TopK(2), es.LogSumExp()])

def dropout(q, k, v):
    return es.attention(q, k, v, es.window(3, 0), dropout=1e-9)

torch.manual_seed(0)
for call in (own, stream, dropout):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")
    for n in (33, 48):
        operands = torch.randn(3, 1, 2, n, 16).unbind(0)
        with torch.no_grad():
            results = compiled(*operands), call(*operands), call(*(x.double() for x in operands))
        for got, plain, truth in zip(*map(tree_leaves, results), strict=True):
            ulp = torch.finfo(torch.float32).eps * truth.abs().max()
            assert (got - truth).abs().max() <= 2 * (plain - truth).abs().max() + ulp, (call, n)
""")
