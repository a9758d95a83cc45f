"""What the lens sees, and that nothing changes by it, in models that aren't Hugging Face's."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from lens.gpt import GPT
from torch import nn
from torch.utils.checkpoint import checkpoint

import einsight as es
from einsight.lens import Lens


def same_with_and_without(model, *inputs, exact=True, **settings):
    """Outputs, gradients and random state are those of the model alone; returns the lens."""

    def step(context):
        model.zero_grad()
        torch.manual_seed(5)
        with context:
            output = model(*inputs, **settings)
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:
                output.square().sum().backward()
        return [output, *(p.grad.clone() for p in model.parameters() if p.grad is not None)], torch.get_rng_state()

    plain, state = step(contextlib.nullcontext())
    lens = Lens(model)
    seen, state_seen = step(lens)
    assert torch.equal(state, state_seen)
    for a, b in zip(plain, seen, strict=True):
        torch.testing.assert_close(a, b) if not exact else None
        assert not exact or torch.equal(a, b)
    return lens


@pytest.mark.parametrize("kind", ["sdpa", "einsight"])
@pytest.mark.parametrize("training", [True, False])
def test_hand_written_gpt(kind, training):
    model = GPT(kind).train(training)
    lens = same_with_and_without(model, torch.randint(0, 17, (2, 9)))
    assert lens.names == ("blocks.0.attention", "blocks.1.attention", "blocks.2.attention")
    assert lens["blocks.1.attention"].index == 1
    assert lens[1].module is model.blocks[1].attention
    torch.testing.assert_close(lens[1].weights.dense(), model.blocks[1].attention.weights())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "float", "per head", "both"])
def test_multihead_attention(need_weights, batch_first, masks):
    layer = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=batch_first).train()
    x = torch.randn((2, 7, 12) if batch_first else (7, 2, 12))
    causal = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    settings = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal},
        "float": {"attn_mask": torch.randn(7, 7)},
        "per head": {"attn_mask": torch.randn(6, 7, 7)},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[masks]
    lens = same_with_and_without(layer, x, x, x, need_weights=need_weights, **settings)
    with torch.no_grad():
        _, weights = layer.eval()(x, x, x, need_weights=True, average_attn_weights=False, **settings)
    torch.testing.assert_close(lens[0].weights.dense(), weights, atol=1e-6, rtol=1e-5)


def test_multihead_attention_unbatched_and_cross():
    layer = nn.MultiheadAttention(12, 3, kdim=8, vdim=10)
    query, key, value = torch.randn(5, 12), torch.randn(7, 8), torch.randn(7, 10)
    for need_weights in (True, False):
        lens = same_with_and_without(layer, query, key, value, need_weights=need_weights)
        assert (len(lens), len(lens.cross)) == (0, 1)
        _, weights = layer(query, key, value, average_attn_weights=False)
        torch.testing.assert_close(lens.cross[0].weights.dense()[0], weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_of_inputs_made_apart(need_weights):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.cross_attn = (nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))
            self.norm = nn.LayerNorm(12)

        def forward(self, x):
            self.attn(*(self.norm(x) for _ in range(3)), need_weights=need_weights)
            return self.cross_attn(x, x + 1, x, need_weights=need_weights)

    with Lens(Block()) as lens:
        lens.model(torch.randn(2, 5, 12))
    assert lens.names == ("attn",)
    assert lens.cross[0].name == "cross_attn"


def test_extra_keys_of_multihead_attention():
    layer = nn.MultiheadAttention(12, 3, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x = torch.randn(2, 5, 12)
    lens = same_with_and_without(layer, x, x, x)
    _, weights = layer(x, x, x, average_attn_weights=False)
    assert weights.shape[-1] == 7
    torch.testing.assert_close(lens[0].weights.dense(), weights)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(training):
    layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    lens = same_with_and_without(model, torch.randn(2, 6, 16), src_key_padding_mask=padding)
    assert lens.names == ("layers.0.self_attn", "layers.1.self_attn")
    assert torch.equal(lens[0].weights.dense()[1, ..., 4:], torch.zeros(4, 6, 2))


def test_inference_fast_path_agrees_off_padding():
    layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    x = torch.randn(2, 6, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        plain = model(x, src_key_padding_mask=padding)
        with Lens(model) as lens:
            seen = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(plain[~padding], seen[~padding])
    assert len(lens) == 2


def test_transformer_with_a_decoder():
    model = nn.Transformer(16, 4, 2, 2, 20, batch_first=True)
    lens = same_with_and_without(model, torch.randn(2, 6, 16), torch.randn(2, 5, 16))
    assert (len(lens), len(lens.cross)) == (4, 2)
    assert lens.cross[1].name == "decoder.layers.1.multihead_attn"
    assert lens.cross[1].weights.shape == (2, 4, 5, 6)


def test_any_number_of_dimensions():
    class Model(nn.Module):
        def forward(self, *tensors):
            return F.scaled_dot_product_attention(*tensors)

    for shape in [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)]:
        q, k, v = (torch.randn(shape) for _ in range(3))
        mask = torch.rand(*shape[:-2], 5, 5) > 0.3
        mask[..., 0] = True
        with Lens(Model()) as lens:
            output = lens.model(q, k, v, mask)
        weights = torch.softmax((q @ k.mT / 2).masked_fill(~mask, -torch.inf), -1)
        torch.testing.assert_close(weights @ v, output)
        torch.testing.assert_close(lens[0].weights.dense().reshape(weights.shape), weights)


def test_repeated_heads_are_kept_once():
    class Model(nn.Module):
        def forward(self, q, k, v):
            k, v = (t.repeat_interleave(3, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    with Lens(Model(), values=True) as lens:
        lens.model(q, k, v)
    assert torch.equal(lens[0].key, k) and torch.equal(lens[0].value, v)
    torch.testing.assert_close(lens[0].weights.dense(), es.AttentionWeights(q, k, es.causal()).dense())


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(first):
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (1, 4))
    with Lens(model) as lens:
        for inference in (first, not first):
            with torch.inference_mode(inference):
                model(ids)
    for call in lens.passes(1):
        assert not call.query.is_inference()
        weights = es.AttentionWeights(call.query.requires_grad_(), call.key, call.mask)
        weights.entropy().sum().backward()


class Attend(nn.Module):
    def forward(self, *tensors, **settings):
        return F.scaled_dot_product_attention(*tensors, **settings)


@pytest.mark.parametrize("inference", [True, False])
def test_a_mask_that_is_written_to(inference):
    with torch.inference_mode(inference), Lens(Attend()) as lens:
        q, mask = torch.randn(1, 2, 5, 4), torch.rand(1, 1, 5, 5) > 0.3
        mask[..., 0] = True
        seen = [mask.clone()]
        lens.model(q, q, q, mask)
        for change in (lambda: mask.fill_(True).tril_(), lambda: mask[..., 3].fill_(False)):
            change()
            seen.append(mask.clone())
            lens.model(q, q, q, mask)
    for call, expected in zip(lens.passes(0), seen, strict=True):
        assert torch.equal(call.weights.dense() > 0, expected.expand(1, 2, 5, 5))


def test_padding_behind_a_single_query():
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 6, 8)
    keep = torch.arange(6)[None] < 4
    with Lens(Attend()) as lens:
        for _ in range(2):
            lens.model(q, k, k, keep)
    assert len(lens.passes(0)) == 2
    expected = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~keep, -torch.inf), -1)
    torch.testing.assert_close(lens[0].weights.dense(), expected)
    with Lens(Attend()) as lens:  # room in a static cache
        for n in (4, 5):
            cache = torch.where(torch.arange(6)[:, None] < n, k, 0)
            lens.model(q, cache, cache, torch.arange(6)[None] < n)
    assert lens[0].weights.shape == (2, 2, 2, 5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_count_once(reentrant):
    model = GPT("sdpa", checkpoint=reentrant).train()
    x = torch.randint(0, 17, (2, 6))
    lens = same_with_and_without(model, x)
    assert len(lens) == 3
    assert [len(lens.passes(n)) for n in range(3)] == [1, 1, 1]


def test_one_item_of_keys_for_all():
    class Layer(nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

    layer, query, key, value = Layer(), torch.randn(2, 3, 5, 7), torch.randn(1, 3, 11, 7), torch.randn(1, 3, 11, 7)
    with Lens(layer) as lens:
        output = layer(query, key, value)
    call = lens.cross[0] if lens.cross.names else lens[0]
    torch.testing.assert_close(call.weights @ value.expand(2, -1, -1, -1), output)


def test_a_given_mask_is_kept_once_for_what_it_is_repeated_over():
    q, mask = torch.randn(2, 3, 5, 4), torch.rand(5, 5) > 0.4
    mask[:, 0] = True
    with Lens(Attend()) as lens:
        lens.model(q, q, q, mask.expand(2, 3, 5, 5))
    assert lens[0].rule.other.shape == (1, 1, 5, 5)
    assert torch.equal(lens[0].weights.dense() > 0, mask.expand(2, 3, 5, 5))


def test_heads_that_are_alike_at_their_first_key_alone():
    q, k = torch.randn(1, 6, 5, 4), torch.randn(1, 6, 5, 4)
    k[:, :, 0] = 1.0
    k[:, 1::2] = k[:, ::2]  # pairs of heads are one
    with Lens(Attend()) as lens:
        lens.model(q, k, k)
    assert torch.equal(lens[0].key, k[:, ::2])


class Recorded(nn.Module):
    """Attention by hand, of which the lens is told, in a block that is computed again for the backward."""

    lens = None

    def forward(self, x):
        return checkpoint(self._attend, x, use_reentrant=True)

    def _attend(self, x):
        self.lens.record(x, x, x, scale=1.0)
        return torch.softmax(x @ x.mT, -1) @ x


@pytest.mark.filterwarnings("ignore:the lens saw no call")
def test_what_is_recorded_again_for_the_backward_counts_once():
    model = Recorded()
    with Lens(model) as lens:
        model.lens = lens
        model(torch.randn(1, 2, 5, 4, requires_grad=True)).sum().backward()
    assert len(lens.passes(0)) == 1


@pytest.mark.parametrize("kind", ["sdpa", "multihead"])
def test_backwards_that_no_mode_sees(kind):
    """`torch.autograd.backward` hands itself to no function mode, which is active then for what is recomputed."""
    inner = Attend() if kind == "sdpa" else nn.MultiheadAttention(4, 2, batch_first=True)
    shape = (1, 2, 5, 4) if kind == "sdpa" else (1, 5, 4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = inner

        def forward(self, x):
            output = checkpoint(self.attention, x, x, x, use_reentrant=True)
            return output if kind == "sdpa" else output[0]

    model = Model()
    with Lens(model) as lens:
        torch.autograd.backward(model(torch.randn(shape, requires_grad=True)).sum())
    assert len(lens) == 1 and len(lens.passes(0)) == 1
