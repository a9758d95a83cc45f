"""Passes that go back: caches that are cropped, copied for several continuations, or begun before the lens."""

import contextlib
import copy

import pytest
import torch
import transformers as hf
from lens.architectures import build
from lens.test_generation import CLOSE, compare, weights_of
from torch import nn

import einsight as es
from einsight.lens import Edit, Lens
from einsight.lens.huggingface import register
from einsight.lens.rules import Rule

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")


def llama():
    model, _ = build("llama", "sdpa")
    return model, torch.randint(3, 53, (1, 20))


def same(calls, weights, start=0):
    for call, expected in zip(calls, weights, strict=True):
        assert call.offset == start
        torch.testing.assert_close(call.weights.dense(), expected[:, :, start:], **CLOSE)


def test_cropped_within_the_last_call_in_a_lens_opened_late():
    model, ids = llama()
    cache = hf.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :6], past_key_values=cache)
        with Lens(model, values=True) as lens:
            model(input_ids=ids[:, 6:8], past_key_values=cache)
            model(input_ids=ids[:, 8:13], past_key_values=cache)  # a draft, of which two tokens are right
            held = [lens[n] for n in range(len(lens))]
            cache.crop(-3)
            model(input_ids=ids[:, 15:18], past_key_values=cache)
    assert len(lens.passes(0)) == 1
    same(lens, weights_of("llama", "sdpa", torch.cat([ids[:, :10], ids[:, 15:18]], 1)), 6)
    assert lens[0].value.shape == lens[0].key.shape
    # What was taken before is what it was.
    same(held, weights_of("llama", "sdpa", ids[:, :13]), 6)


def test_cropped_to_before_the_lens():
    model, ids = llama()
    cache = hf.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :6], past_key_values=cache)
        with Lens(model) as lens:
            model(input_ids=ids[:, 6:8], past_key_values=cache)
            cache.crop(-3)
            model(input_ids=ids[:, 10:13], past_key_values=cache)
    first, second = zip(*(lens.passes(n) for n in range(2)), strict=True)
    same(first, weights_of("llama", "sdpa", ids[:, :8]), 6)
    same(second, weights_of("llama", "sdpa", torch.cat([ids[:, :5], ids[:, 10:13]], 1)), 5)


@pytest.mark.parametrize("steps", [1, 3])
def test_branches_of_one_prompt(steps):
    model, ids = llama()
    prompt, choices = ids[:, :6], [ids[:, 6:9], ids[:, 10:13], ids[:, 14:17]]
    cache = hf.DynamicCache()
    with torch.no_grad(), Lens(model) as lens:
        model(input_ids=prompt, past_key_values=cache)
        for choice in choices:
            mine = copy.deepcopy(cache)
            for step in choice.chunk(steps, 1):
                model(input_ids=step, past_key_values=mine)
    passes = [lens.passes(n) for n in range(2)]
    assert len(passes[0]) == 3
    for n, choice in enumerate(choices):
        same([p[n] for p in passes], weights_of("llama", "sdpa", torch.cat([prompt, choice], 1)))


def test_beams_in_a_sliding_window():
    model, _ = build("mistral", "sdpa")
    ids = torch.randint(3, 53, (3, 6))
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad(), Lens(model) as lens:
        model(input_ids=ids, past_key_values=cache)
        for step in ([2, 0, 0], [0, 1, 2], [1, 1, 2]):
            rows = torch.tensor(step)
            cache.reorder_cache(rows)
            new = torch.randint(3, 53, (3, 1))
            ids = torch.cat([ids[rows], new], 1)
            model(input_ids=new, past_key_values=cache)
    assert cache.layers[0].keys.shape[2] == 3  # a window of 4 keys, less the newest
    assert len(lens.passes(0)) == 1
    compare(lens, weights_of("mistral", "sdpa", ids))


def test_interleaved_conversations():
    model, ids = llama()
    other = ids.flip(1)
    caches = hf.DynamicCache(), hf.DynamicCache()
    with torch.no_grad(), Lens(model) as lens:
        for start, stop in ((0, 6), (6, 7), (7, 9)):
            for text, cache in ((ids, caches[0]), (other, caches[1])):
                model(input_ids=text[:, start:stop], past_key_values=cache)
        model(input_ids=ids[:, 9:11], past_key_values=caches[0])
    passes = [lens.passes(n) for n in range(2)]
    assert [len(found) for found in passes] == [2, 2]
    same([found[0] for found in passes], weights_of("llama", "sdpa", other[:, :9]))
    same(lens, weights_of("llama", "sdpa", ids[:, :11]))  # what went on last


@pytest.mark.parametrize("attention", ["eager", "sdpa", "einsight"])
@pytest.mark.parametrize("keep", [1, 2])
def test_cropped_within_a_sliding_window(attention, keep):
    register()
    model, _ = build("mistral", "sdpa")
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 53, (1, 20))
    cache = hf.DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad(), Lens(model, values=True) as lens:
        model(input_ids=ids[:, :6], past_key_values=cache)
        cache.crop(0)
        model(input_ids=ids[:, 6:9], past_key_values=cache)  # a draft, of which some tokens are right
        cache.crop(keep - 3)
        model(input_ids=ids[:, 12:14], past_key_values=cache)
        cache.crop(0)
        model(input_ids=ids[:, 14:15], past_key_values=cache)
    assert cache.layers[0].keys.shape[2] == 4  # a window of 4 keys, with the newest
    assert len(lens.passes(0)) == 1
    same(lens, weights_of("mistral", "sdpa", torch.cat([ids[:, : 6 + keep], ids[:, 12:15]], 1)))
    assert lens[0].rule == Rule(causal=True, left=3)
    assert lens[0].value.shape == lens[0].key.shape


def test_a_copied_cache_of_a_decoder_that_looks_at_an_encoder():
    model, inputs = build("bart", "sdpa")
    text, ids = inputs["input_ids"], torch.randint(3, 53, (2, 9))
    cache = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())
    with torch.no_grad(), Lens(model) as lens:
        encoder = model.get_encoder()(text)
        model(encoder_outputs=encoder, decoder_input_ids=ids[:, :3], past_key_values=cache)
        for choice in (ids[:, 3:5], ids[:, 6:9]):
            mine = copy.deepcopy(cache)
            for step in choice.split(1, 1):
                model(encoder_outputs=encoder, decoder_input_ids=step, past_key_values=mine)
    assert [len(lens.passes(2)), len(lens.cross.passes(1))] == [2, 2]
    for n, choice in enumerate((ids[:, 3:5], ids[:, 6:9])):
        tokens = torch.cat([ids[:, :3], choice], 1)
        with torch.no_grad():
            run = build("bart", "eager")[0](input_ids=text, decoder_input_ids=tokens, output_attentions=True)
        same([lens.passes(m)[n] for m in (2, 3)], run.decoder_attentions)
        for m, expected in enumerate(run.cross_attentions):
            torch.testing.assert_close(lens.cross.passes(m)[n].weights.dense(), expected, **CLOSE)


@pytest.mark.parametrize("edited", [False, True])
def test_biases_that_are_rules_hold_for_all_steps(edited):
    class Attend(nn.Module):
        def forward(self, q, k):
            bias = es.alibi(torch.tensor([0.5, 0.25]))
            return es.attention(q, k, k, es.causal(), offset=k.shape[2] - q.shape[2], bias=bias)

    model, q, k = Attend(), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    steer = Edit(model, heads=[1], bias=es.alibi(torch.tensor([3.0, 3.0])))
    cut = Edit(model, heads=[1], bias=torch.tensor(0.0), mask=~es.pairs(-1, 0))
    with steer, cut if edited else contextlib.nullcontext(), Lens(model) as lens:
        model(q[:, :, :3], k[:, :, :3])
        model(q[:, :, 3:5], k[:, :, :5])
        model(q[:, :, 5:], k)
    assert len(lens.passes(0)) == 1
    found = lens[0].weights.dense()
    expected = es.AttentionWeights(q, k, es.causal(), bias=es.alibi(torch.tensor([0.5, 3.25]))).dense()
    torch.testing.assert_close(found[:, 0], expected[:, 0])
    rows = [0, 1, 3] if edited else range(6)
    torch.testing.assert_close(found[:, 1, rows], expected[:, 1, rows])
    assert bool((found[:, 1, [2, 4, 5], 0] == 0).all()) == edited


def test_a_model_that_generates_in_its_forward():
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama()[0]

        def forward(self, ids, steps):
            cache, new = hf.DynamicCache(), ids
            for _ in range(steps):
                logits = self.model(input_ids=new, past_key_values=cache).logits
                new = logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, new], 1)
            return ids

    model = Writer()
    with torch.no_grad(), Lens(model) as lens:
        ids = model(torch.randint(3, 53, (1, 5)), 4)
    assert lens.names == tuple(f"model.model.layers.{n}.self_attn" for n in range(2))
    assert [len(lens.passes(n)) for n in range(2)] == [1, 1]
    compare(lens, weights_of("llama", "sdpa", ids[:, :-1]))


def test_runs_of_a_part_are_passes_of_its_own_lens():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 20, batch_first=True), 2)

        def forward(self, frames):
            return torch.stack([self.encoder(frame) for frame in frames.unbind(1)], 1)

    model = Frames()
    with Lens(model) as lens, Lens(model.encoder) as part:
        model(torch.randn(2, 3, 5, 16))
    assert len(lens) == 6  # as the layers of a model that uses some of them again
    assert len(part) == 2 and [len(part.passes(n)) for n in range(2)] == [3, 3]


def test_layers_of_an_encoder_and_a_decoder():
    model, inputs = build("whisper", "sdpa")
    with torch.no_grad(), Lens(model) as lens:
        model(**inputs)
    tokens = inputs["decoder_input_ids"]
    with pytest.raises(ValueError, match=r"layers='model\.decoder\.layers'"):
        lens.heads(tokens)
    heads = lens.heads(tokens, layers="model.decoder")
    assert sorted(set(heads["layer"])) == [2, 3]
    assert lens.heads(tokens, layers=[3])["entropy"] == heads["entropy"][4:]
    assert lens.rollout(-1, layers="model.encoder").shape == (2, 1, lens[0].key.shape[2])
    with pytest.raises(ValueError, match=r"layers='model\.encoder\.layers'.*layers='model\.decoder\.layers'"):
        lens.rollout(-1)
    with pytest.raises(KeyError, match="no self-attention layer is in 'encoder'"):
        lens.heads(tokens, layers="encoder")
    assert [call.name for call in lens.cross] == list(lens.cross.names)
    assert len(lens.cross.passes(1)) == 1
