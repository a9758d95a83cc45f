"""The decoder: with and without a cache, whole and in chunks, alone and in a batch; and generation."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from nn.helpers import close, decoder, draw, refused, small, tokens
from torch import Tensor
from torch.func import functional_call, grad, vmap

import einsight as es
from einsight.nn import Decoder, FeedForward, Llama3Scaling, MultiHeadAttention, TransformerBlock
from einsight.nn.generation import sample

KINDS = {
    "llama": {"num_kv_heads": 1},
    "llama 3": {"rotary_base": 500000.0, "rotary_scaling": Llama3Scaling(original_length=16)},
    "mistral": {"window": 3, "head_dim": 6, "tied": False},
    "qwen 3": {"qk_norm": 1e-6, "proj_bias": "qkv", "head_dim": 14},
    "gpt-2": {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "proj_bias": True, "mlp_bias": True},
    "2017": {"positions": "sinusoidal", "norm": "layer", "activation": "gelu"},
    "sink and softcap": {"sink": True, "softcap": 3.0},
}


@torch.no_grad()
def references(model: Decoder, prompt: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits in float64, and in float32 without a cache."""
    exact = model.double()(prompt)
    low = model.float()(prompt)
    return exact, [low, torch.cat([model(row[None]) for row in prompt])]


@pytest.mark.parametrize("kind", KINDS)
def test_in_chunks_and_in_a_batch(kind: str) -> None:
    model = decoder(**KINDS[kind])
    prompt = tokens(3, 13, vocab=53)
    exact, low = references(model, prompt)
    with torch.no_grad():
        for edges in ([0, 13], [0, 5, 6, 13], list(range(14))):
            cache = model.cache(3, 13)
            parts = [model(prompt[:, a:b], cache=cache) for a, b in itertools.pairwise(edges)]
            close(torch.cat(parts, 1), exact, low)
        # Prompts of 4, 7 and 2 tokens, and the rest one by one.
        cache = model.cache(3, 14)
        model(prompt[:, :7], cache=cache)
        lengths = [4, 7, 2]
        for layer in cache:
            layer.trim(lengths)
        for step in range(6):
            column = torch.stack([prompt[n, length + step] for n, length in enumerate(lengths)])
            logits = model(column[:, None], cache=cache)[:, 0]
            right = torch.stack([exact[n, length + step] for n, length in enumerate(lengths)])
            close(logits, right, [torch.stack([t[n, length + step] for n, length in enumerate(lengths)]) for t in low])


@pytest.mark.parametrize("kind", KINDS)
def test_generation_in_a_batch_of_different_lengths(kind: str) -> None:
    model = decoder(**KINDS[kind])
    prompts = [tokens(n, vocab=53, seed=n).tolist() for n in (3, 11, 1, 5)]
    together = model.generate(prompts, 17, temperature=0)
    assert together.shape == (4, 17)
    for prompt, got in zip(prompts, together, strict=True):
        right = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(17):
                right = torch.cat([right, model(right)[:, -1:].argmax(-1)], 1)
        assert torch.equal(got, right[0, len(prompt) :])


def test_the_future_is_not_seen() -> None:
    model, prompt = decoder(), tokens(1, 13, vocab=53)
    other = prompt.clone()
    other[0, 9] = (other[0, 9] + 1) % 53
    with torch.no_grad():
        before, after = model(prompt), model(other)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9], after[:, 9])


def test_packed_sequences() -> None:
    """Documents in one row are as if alone: rotary positions differ then, but not the distances."""
    model = decoder()
    one, two = tokens(1, 5, vocab=53), tokens(1, 8, vocab=53, seed=1)
    packed, ids = torch.cat([one, two], 1), torch.tensor([0] * 5 + [1] * 8)
    with torch.no_grad():
        alone = torch.cat([model(one), model(two)], 1)
        exact = torch.cat([model.double()(one), model.double()(two)], 1)
        turned = model(packed, mask=es.documents(ids))
        got = model.float()(packed, mask=es.documents(ids))
    # What the rounding of the angles alone does shows in float64.
    close(got, exact, [alone, alone + (turned - exact)])


def test_readouts_of_every_layer() -> None:
    model = decoder()
    prompt = tokens(2, 7, vocab=53)
    with torch.no_grad():
        logits, seen = model(prompt, readouts={"weights": es.Weights(), "entropy": es.Entropy()})
        exact, low = references(model, prompt)
    close(logits, exact, low)
    assert len(seen) == 2 and seen[1]["weights"].shape == (2, 2, 7, 7) and (seen[1]["weights"].triu(1) == 0).all()


def test_gradients_reach_every_parameter() -> None:
    for kind in KINDS:
        model = decoder(**KINDS[kind]).train()
        model(tokens(2, 7, vocab=53)).logsumexp(-1).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()), kind


def test_the_start_is_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = Decoder(small(embed_dim=40, num_layers=4))
    spread = model(tokens(2, 13, vocab=53)).std(-1).max()
    assert spread < 0.5  # 0.02 · √40 · a few


def test_feed_forward() -> None:
    x = draw(2, 3, 5, dtype=torch.float64)
    for activation, function in (("gelu", torch.nn.GELU()), ("gelu_tanh", torch.nn.GELU("tanh"))):
        layer = FeedForward(5, 7, activation, bias=True).double()
        assert torch.equal(layer(x), layer.down(function(layer.up(x))))
    layer = FeedForward(5, 7).double()
    gate = layer.gate(x)
    assert (layer(x) - layer.down(gate * torch.sigmoid(gate) * layer.up(x))).abs().max() < 1e-15


def test_block_is_two_residual_steps() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(MultiHeadAttention(6, 2), hidden_dim=11, norm="layer").double()
    x = draw(1, 5, 6, dtype=torch.float64)
    middle = x + block.attention(block.attention_norm(x))
    assert torch.equal(block(x), middle + block.feed_forward(block.feed_forward_norm(middle)))


# Generation.


def test_seeds() -> None:
    model = decoder()
    prompt = tokens(2, 3, vocab=53)
    one = model.generate(prompt, 11, seed=1, temperature=5.0)
    assert torch.equal(one, model.generate(prompt, 11, seed=1, temperature=5.0))
    assert not torch.equal(one, model.generate(prompt, 11, seed=2, temperature=5.0))
    state = torch.get_rng_state()
    model.generate(prompt, 3, seed=1)
    assert torch.equal(state, torch.get_rng_state())  # a seed of its own leaves the others alone


def test_sampling() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(**settings: float) -> Tensor:
        return sample(logits, settings.get("temperature", 1), settings.get("top_p", 1), generator).bincount(
            minlength=4
        ) / len(logits)

    spread = 4 * (0.25 / len(logits)) ** 0.5  # four standard deviations
    assert (shares() - torch.tensor([0.5, 0.3, 0.15, 0.05])).abs().max() < spread
    assert (shares(top_p=0.8) - torch.tensor([5 / 8, 3 / 8, 0, 0])).abs().max() < spread
    assert torch.equal(shares(top_p=1e-9), torch.tensor([1.0, 0, 0, 0]))
    assert torch.equal(shares(temperature=0), torch.tensor([1.0, 0, 0, 0]))
    squared = torch.tensor([0.5, 0.3, 0.15, 0.05]).square()
    assert (shares(temperature=0.5) - squared / squared.sum()).abs().max() < spread


def test_stop() -> None:
    model = decoder()
    prompts = [[1, 2], [3]]
    free = model.generate(prompts, 17, temperature=0)
    stop = int(free[0, 4])
    got = model.generate(prompts, 17, temperature=0, stop=stop)
    for row, right in zip(got, free, strict=True):
        places = (right == stop).nonzero().flatten()
        end = int(places[0]) + 1 if len(places) else 17
        assert torch.equal(row[:end], right[: min(end, got.shape[1])]) and (row[end:] == stop).all()


def test_several_stops() -> None:
    model = decoder()
    prompts = [[1, 2], [3]]
    free = model.generate(prompts, 17, temperature=0)
    stops = [int(free[0, 4]), int(free[1, 6])]
    got = model.generate(prompts, 17, temperature=0, stop=stops)
    for row, right in zip(got, free, strict=True):
        end = int(torch.isin(right, torch.tensor(stops)).nonzero()[0]) + 1
        assert torch.equal(row[:end], right[:end]) and (row[end:] == stops[0]).all()


def test_prompts_of_any_kind() -> None:
    model = decoder()
    right = model.generate([[1, 2, 3], [4]], 5, temperature=0)
    for prompts in ([b"\x01\x02\x03", b"\x04"], [torch.tensor([1, 2, 3]), torch.tensor([4], dtype=torch.int32)],
                    (range(1, 4), [torch.tensor(4).item()])):  # fmt: skip
        assert torch.equal(model.generate(prompts, 5, temperature=0), right)


def test_a_temperature_next_to_nothing_takes_the_likeliest() -> None:
    model = decoder()
    right = model.generate([[1, 2, 3]], 5, temperature=0)
    for temperature in (1e-30, 1e-40, 1e-320):
        assert torch.equal(model.generate([[1, 2, 3]], 5, temperature=temperature), right)


def test_generation_under_autocast() -> None:
    model = decoder(qk_norm=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        got = model.generate([[1, 2, 3], [4]], 7, temperature=0)
        assert model.cache(1, 5)[0]._keys.dtype == torch.bfloat16
        for prompt, row in zip(([1, 2, 3], [4]), got, strict=True):
            right = torch.tensor([prompt])
            with torch.no_grad():
                for _ in range(7):
                    right = torch.cat([right, model(right)[:, -1:].argmax(-1)], 1)
            assert torch.equal(row, right[0, len(prompt) :])


def test_no_layer_keeps_tokens_that_another_has_no_room_for() -> None:
    model, prompt = decoder(), tokens(1, 5, vocab=53)
    cache = model.cache(1, 7)
    cache[1] = es.nn.KVCache(1, 2, 4, 10)
    with refused(ValueError, "the cache is full: it has room for 4 tokens and holds 0, so 5"), torch.no_grad():
        model(prompt, cache=cache)
    assert cache[0].lengths == cache[1].lengths == (0,)
    cache = model.cache(1, 7)
    with torch.no_grad():
        model(prompt, cache=cache)
    cache[1].trim(3)
    with refused(ValueError, r"hold the same tokens, but layer 0's hold \(5,\) and layer 1's \(3,\)"):
        model(prompt[:, :1], cache=cache)


def test_gradients_of_each_sample() -> None:
    model, rows = decoder(), tokens(3, 7, vocab=53)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row[None],)).logsumexp(-1).sum()

    got = vmap(grad(loss), (None, 0))(parameters, rows)
    for n, row in enumerate(rows):
        right = torch.autograd.grad(loss(parameters, row), list(parameters.values()))
        for gradient, exact in zip(got.values(), right, strict=True):
            torch.testing.assert_close(gradient[n], exact, rtol=1e-4, atol=1e-4)


def test_on_the_meta_device_it_can_only_be_made() -> None:
    with torch.device("meta"):
        model = Decoder(small())
    with refused(TypeError, "query must be a dense tensor .* that holds numbers, but it is on the meta device"):
        model(torch.zeros(2, 5, dtype=torch.int64, device="meta"))


def test_training_mode_is_left_as_it_was() -> None:
    model = decoder(dropout=0.5).train()
    assert torch.equal(model.generate([[1, 2]], 5, temperature=0), model.eval().generate([[1, 2]], 5, temperature=0))
    model.train()
    model.blocks[0].eval()
    model.generate([[1]], 0)
    assert model.training and model.blocks[1].feed_forward.training
    assert not any(module.training for module in model.blocks[0].modules())
    assert model.generate([[1]], 0).shape == (1, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embed_dim": 21}, "embed_dim=21 is not divisible by num_heads=2"),
        ({"embed_dim": 22}, "dim must be even and at least 2, not 11"),
        ({"num_layers": 0}, "num_layers must be a positive int, not 0"),
        ({"window": 0}, "window must be at least 1"),
        ({"positions": "alibi"}, "positions must be one of 'rotary', 'learned', 'sinusoidal', not 'alibi'"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'layer', not 'batch'"),
        ({"activation": "relu"}, "activation must be one of 'swiglu', 'gelu', 'gelu_tanh', not 'relu'"),
    ],
)
def test_settings_refused(settings: dict, message: str) -> None:
    with refused(ValueError, message):
        Decoder(small(**settings))


def test_inputs_refused() -> None:
    model = decoder(positions="learned")
    with refused(TypeError, r"tokens must be an int tensor \[b, i\], not torch\.float32"):
        model(torch.zeros(1, 3))
    with refused(ValueError, r"tokens must have shape \[b, i\], but have \[3\]; .* tokens\.unsqueeze\(0\)"):
        model(torch.zeros(3, dtype=torch.int64))
    with refused(ValueError, r"tokens must be an int tensor \[b, i\] or a list of prompts, not torch\.int64 \[3\]"):
        model.generate(torch.zeros(3, dtype=torch.int64), 1)
    with refused(ValueError, "tokens go from 0 to 53, but the vocabulary from 0 to 52"):
        model(torch.tensor([[0, 53]]))
    for cache in (model.cache(1, 5)[:1], model.cache(1, 5)[:1] * 2):
        with refused(ValueError, "cache must hold one KVCache for each of the 2 layers, not 1"):
            model(torch.tensor([[0]]), cache=cache)
    with refused(TypeError, r"a list of KVCaches, one for each layer, as cache\(\) makes it, not KVCache\(b=1"):
        model(torch.tensor([[0]]), cache=model.cache(1, 5)[0])
    with refused(ValueError, "stands at position 37, but LearnedPositions has 37 positions"):
        model(torch.zeros(1, 38, dtype=torch.int64))
    with refused(ValueError, "one is empty"):
        model.generate([[1], []], 3)
    for prompts in ([1, 2], [[1.9, 2.7]], [[True]], [["a"]], [torch.tensor([1.9])], [[[1]]], [torch.tensor([[1]])]):
        with refused(TypeError, "a list of prompts, each a list of ints, but one is "):
            model.generate(prompts, 3)
    with refused(TypeError, "each a list of ints, but one is 'ab'; turn text into tokens first"):
        model.generate(["ab"], 3)
    for prompts in ("ab", b"ab", 3):
        with refused(TypeError, f"each a list of ints, not {prompts!r}"):
            model.generate(prompts, 3)
    for prompts in ([], torch.zeros(0, 3, dtype=torch.int64)):
        with refused(ValueError, "generate continues prompts, but there is none"):
            model.generate(prompts, 3)
    with refused(ValueError, "stands at position 37, but LearnedPositions has 37 positions"):
        model.generate([[1, 2, 3]], 36)
    with refused(ValueError, "tokens go from 1 to 53"):
        model.generate([[1, 53]], 3)
    for settings, message in (
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": "a"}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must be a probability in \(0, 1\]"),
        ({"seed": 1.5}, r"seed must be an int, or None, not 1\.5"),
        ({"stop": 53}, "stop must be a token from 0 to 52, or several, not 53"),
        ({"stop": []}, r"stop must be a token from 0 to 52, or several, not \[\]"),
        ({"stop": [1, 2.0]}, r"stop must be a token from 0 to 52, or several, not \[1, 2\.0\]"),
    ):
        with refused(ValueError, message):
            model.generate([[1]], 3, **settings)
    with refused(ValueError, "max_new_tokens must be an int of at least 0, not -1"):
        model.generate([[1]], -1)
    with (
        refused(ValueError, "the cache is full: it has room for 4 tokens and holds 0, so 5 more don't fit"),
        torch.no_grad(),
    ):
        model(tokens(1, 5, vocab=53), cache=model.cache(1, 4))
    with refused(TypeError, "Decoder takes a DecoderConfig, not dict"):
        Decoder({})


def test_training_holds_memory_linear_in_the_sequence() -> None:
    def held(n: int, **changes: object) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = Decoder(small(max_length=2048, **changes)).train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens(1, n, vocab=53)).logsumexp(-1).sum()
        weights = sum(p.numel() * 4 for p in model.parameters())
        assert loss.isfinite()
        return sum(sizes.values()) - weights

    for changes in ({}, {"window": 300}, {"softcap": 5.0, "sink": True}):
        assert held(2048, **changes) < 2.1 * held(1024, **changes)


def test_compiles_without_a_break() -> None:
    code = """
import torch, einsight as es
model = es.nn.Decoder(es.nn.DecoderConfig(53, 20, 2, 2, 31)).eval()
tokens = torch.randint(53, (2, 13))
with torch.no_grad():
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens), model(tokens))
    steps = []
    for run in (model, compiled):  # items of different lengths
        cache = model.cache(2, 13)
        run(tokens[:, :7], cache=cache)
        for layer in cache:
            layer.trim([7, 4])
        steps.append(run(tokens[:, 7:9], cache=cache))
    assert torch.equal(*steps)
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    compiled, cache = torch.compile(model, backend="eager", fullgraph=True), model.cache(2, 13)
    for n in range(13):
        compiled(tokens[:, n : n + 1], cache=cache)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 3, graphs  # for an empty cache, for one that isn't, and for any other length
assert torch.equal(torch.export.export(model, (tokens,), strict=False).module()(tokens), model(tokens))
"""
    # In a process of its own: the checks of signatures in the tests can't be traced.
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
