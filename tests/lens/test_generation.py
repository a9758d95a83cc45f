"""Generation with a cache: the steps of a pass join into what one run over all tokens would show."""

import pytest
import torch
import transformers as hf
from lens.architectures import build

from einsight.lens import Lens

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

CLOSE = {"atol": 2e-5, "rtol": 1e-3}


def weights_of(name, attention, ids, **more):
    """What the eager model itself says, over all tokens at once."""
    with torch.no_grad():
        return build(name, "eager")[0](input_ids=ids, output_attentions=True, **more).attentions


def compare(lens, weights, rows=slice(None)):
    assert len(lens) == len(weights)
    for call, expected in zip(lens, weights, strict=True):
        torch.testing.assert_close(call.weights.dense()[:, :, rows], expected[:, :, rows], **CLOSE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mistral", "gemma"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, attention, cache):
    model, inputs = build(name, attention)
    ids = inputs["input_ids"][:, :6]
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    mask = torch.ones_like(ids)
    plain = model.generate(ids, attention_mask=mask, **settings)
    with Lens(model) as lens:
        whole = model.generate(ids, attention_mask=mask, **settings)
        model.generate(ids[:, :4], attention_mask=mask[:, :4], **settings)
    assert torch.equal(plain, whole)
    first = [lens.passes(n)[0] for n in range(len(lens))]
    assert all(len(lens.passes(n)) == 2 for n in range(len(lens)))
    assert first[0].key.shape[2] == whole.shape[1] - 1  # the last token was never fed
    compare(first, weights_of(name, attention, whole[:, :-1]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding(attention):
    model, inputs = build("llama", attention)
    ids, mask = inputs["input_ids"].clone(), torch.ones(2, 11, dtype=torch.long)
    ids[1, :4] = mask[1, :4] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with Lens(model) as lens:
        whole = model.generate(ids, attention_mask=mask, **settings)
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    weights = weights_of("llama", attention, whole[:, :-1], attention_mask=mask, position_ids=positions)
    for call, expected in zip(lens, weights, strict=True):
        dense = call.weights.dense()
        torch.testing.assert_close(dense[0], expected[0], **CLOSE)
        torch.testing.assert_close(dense[1, :, 4:], expected[1, :, 4:], **CLOSE)
        assert not dense[1, :, :4].any()  # a padding query sees nothing
        assert call.rule.other is None and call.rule.causal  # as a rule, not as a matrix


@pytest.mark.parametrize("static", [False, True])
def test_beams_that_reorder(static):
    model, _inputs = build("llama", "sdpa")
    ids = torch.randint(3, 53, (3, 6))
    cache = hf.StaticCache(config=model.config, max_cache_len=16) if static else hf.DynamicCache()
    with torch.no_grad(), Lens(model) as lens:
        model(input_ids=ids, past_key_values=cache)
        for step in ([2, 0, 0], [0, 1, 2], [1, 1, 2]):
            rows = torch.tensor(step)
            cache.reorder_cache(rows)
            new = torch.randint(3, 53, (3, 1))
            ids = torch.cat([ids[rows], new], 1)
            where = torch.tensor([ids.shape[1] - 1])
            model(input_ids=new, past_key_values=cache, position_ids=where[None])
    assert len(lens.passes(0)) == 1
    compare(lens, weights_of("llama", "sdpa", ids))


def test_beam_search():
    model, inputs = build("llama", "sdpa")
    ids = inputs["input_ids"][:1, :5]
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(ids)
    with Lens(model) as lens:
        found = model.generate(ids, num_return_sequences=3, **settings)
    assert lens[0].weights.shape == (3, 4, 10, 10)
    full = weights_of("llama", "sdpa", found[:, :-1])
    for call, expected in zip(lens, full, strict=True):
        dense = call.weights.dense()
        # The best sequences needn't stand in the order in which the beams did.
        for sequence in expected:
            assert min(float((dense[beam] - sequence).abs().max()) for beam in range(3)) < 1e-4


def test_a_cropped_cache():
    model, inputs = build("llama", "sdpa")
    ids, cache = inputs["input_ids"], hf.DynamicCache()
    with torch.no_grad(), Lens(model) as lens:
        model(input_ids=ids[:, :6], past_key_values=cache)
        model(input_ids=ids[:, :4], past_key_values=cache)  # a draft, refused after its first token
        cache.crop(-3)
        model(input_ids=ids[:, 7:], past_key_values=cache)
    ids = torch.cat([ids[:, :6], ids[:, :1], ids[:, 7:]], 1)
    assert len(lens.passes(0)) == 1
    compare(lens, weights_of("llama", "sdpa", ids))


def test_a_cache_from_before():
    model, inputs = build("llama", "sdpa")
    ids, cache = inputs["input_ids"], hf.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :6], past_key_values=cache)
        with Lens(model) as lens:
            model(input_ids=ids[:, 6:8], past_key_values=cache)
            model(input_ids=ids[:, 8:], past_key_values=cache)
    full = weights_of("llama", "sdpa", ids)
    for call, expected in zip(lens, full, strict=True):
        assert call.offset == 6
        torch.testing.assert_close(call.weights.dense(), expected[:, :, 6:], **CLOSE)


@pytest.mark.parametrize("name", ["whisper", "bart", "t5"])
def test_cross_attention_keys_are_kept_once(name):
    model, inputs = build(name, "sdpa")
    inputs.pop("decoder_input_ids")
    key = "input_features" if name == "whisper" else "input_ids"
    with Lens(model) as lens:
        encoder = model.get_encoder()(inputs[key])
        tokens = torch.ones(2, 1, dtype=torch.long)
        cache = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())
        with torch.no_grad():
            for _ in range(6):
                output = model(
                    encoder_outputs=encoder, decoder_input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True
                )
                tokens = torch.cat([tokens, output.logits[:, -1].argmax(-1, keepdim=True)], 1)
    with torch.no_grad():
        eager = build(name, "eager")[0]
        full = eager(**{key: inputs[key]}, decoder_input_ids=tokens[:, :-1], output_attentions=True)
    assert len(lens.cross) == 2
    for n, expected in enumerate(full.cross_attentions):
        assert lens.cross[n].key.shape[2] == expected.shape[-1]
        assert lens.cross[n].query.shape[2] == 6
        torch.testing.assert_close(lens.cross[n].weights.dense(), expected, **CLOSE)
    decoder = [lens[n] for n in range(2, 4)]
    for call, expected in zip(decoder, full.decoder_attentions, strict=True):
        torch.testing.assert_close(call.weights.dense(), expected, **CLOSE)


def test_memory_is_linear_in_the_tokens():
    model, inputs = build("llama", "sdpa")
    ids = inputs["input_ids"]
    with Lens(model) as lens:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=None)
    kept = lens._records["model.layers.0.self_attn"][0]
    n = ids.shape[1] + 63
    assert kept.key.buffer.numel() <= 2 * (2 * 2 * n * 8)  # [b, g, j, d], and room to grow
    assert kept.query.buffer.numel() <= 2 * (2 * 4 * n * 8)
