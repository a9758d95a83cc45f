"""What a lens keeps of a generation, over implementations, caches, padding, windows and beams.

However it was computed, it is what one run over all tokens shows, in one pass, and under a rule that says so.
"""

import functools

import pytest
import torch

pytest.importorskip("transformers")

from lens.tiny import build, inputs
from transformers import DynamicCache

from einsight.lens import Lens
from einsight.lens.huggingface import register

register()
STEPS = 6
WINDOWS = {"llama": [None, None], "mistral": [6, 6], "gemma3": [6, None]}
CLOSE = {"atol": 3e-5, "rtol": 1e-3}
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "that keeps all keys": None,
}
BEAMS = {"greedy": {}, "beams": {"num_beams": 3}}


@functools.cache
def model_of(name):
    # The keys of a window are those of one beam alone: those of several that are equal can't be told apart.
    model = build(name, "eager", sliding_window=7) if WINDOWS.get(name, [None])[0] else build(name, "eager")
    model.generation_config.eos_token_id = None
    return model


def generated(name, attention, cache, side, beams):
    """A lens on a generation, the tokens that were run, which of them are real, and their weights by eager."""
    model = model_of(name)
    model.set_attn_implementation(attention)
    given, _ = inputs(name, "left")
    if side == "none":
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    how = BEAMS[beams] | ({"cache": DynamicCache()} if CACHES[cache] is None else CACHES[cache])
    with Lens(model, values=True) as lens:
        tokens = model.generate(**given, max_new_tokens=STEPS, do_sample=False, **how)[:, :-1]
    real = given["attention_mask"]
    real = torch.cat([real, real.new_ones(len(real), STEPS - 1)], 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        positions = (real.cumsum(1) - 1).clamp(min=0)
        expected = model(tokens, attention_mask=real, position_ids=positions, output_attentions=True).attentions
    return lens, tokens, real, expected


def assert_is_a_beam(beams, best):
    """The best sequence of each text is one of its three beams."""
    for n, sequence in enumerate(best):
        assert min(float((beam - sequence).abs().max()) for beam in beams[3 * n : 3 * n + 3]) < 1e-4


@pytest.mark.parametrize("beams", BEAMS)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "einsight"])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_generation(name, attention, cache, side, beams):
    lens, tokens, real, expected = generated(name, attention, cache, side, beams)
    padded = real.bool()[:, None, :, None]
    for n, (weights, window) in enumerate(zip(expected, WINDOWS[name], strict=True)):
        (call,) = lens.passes(n)
        assert (call.rule.causal, call.rule.left, call.rule.other) == (True, window, None)
        assert call.offset == 0 and call.value.shape[2] == call.key.shape[2] == tokens.shape[1]
        if side == "none":
            assert call.rule.keep is None
        else:
            assert torch.equal(call.rule.keep[:: len(call.query) // 3], real.bool())
        dense, weights = call.weights.dense(), weights.where(padded, 0)
        if beams == "greedy":
            torch.testing.assert_close(dense, weights, **CLOSE)
        else:
            assert_is_a_beam(dense, weights)
    if beams == "greedy" and side == "left":  # found again in the masks
        told = lens.heads({"input_ids": tokens, "attention_mask": real})
        assert lens.heads(tokens).to_dict() == told.to_dict()


@pytest.mark.parametrize("beams", BEAMS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "einsight"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_an_encoder_and_a_decoder(name, attention, cache, beams):
    model = model_of(name)
    model.set_attn_implementation(attention)
    given = {key: tensor for key, tensor in inputs(name, "right")[0].items() if not key.startswith("decoder")}
    how = CACHES[cache] | BEAMS[beams] | {"max_new_tokens": STEPS, "do_sample": False}
    with Lens(model) as lens:
        tokens = model.generate(**given, **how, return_dict_in_generate=True).sequences[:, :-1]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        run = model(**given, decoder_input_ids=tokens, output_attentions=True)
    for calls, expected in (([lens[2], lens[3]], run.decoder_attentions), (lens.cross, run.cross_attentions)):
        for call, weights in zip(calls, expected, strict=True):
            dense = call.weights.dense()
            assert call.rule.other is None
            if beams == "greedy":
                torch.testing.assert_close(dense, weights, **CLOSE)
            else:
                assert_is_a_beam(dense, weights)
    assert [len(lens.passes(n)) for n in (2, 3)] == [len(lens.cross.passes(n)) for n in (0, 1)] == [1, 1]
