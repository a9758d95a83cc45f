"""Generation with `attn_implementation="einsight"`: the tokens that eager generates, through every cache and mode."""

import pytest
import torch

pytest.importorskip("transformers")

from lens.tiny import DECODERS, Exactly, assert_as_good, build, inputs
from transformers import DynamicCache, StaticCache

from einsight.lens.huggingface import register

register()
LENGTH = 6
SEQ2SEQ = ("t5", "bart", "whisper")


def given(name):
    found, _ = inputs(name, "left")
    return {key: value for key, value in found.items() if not key.startswith("decoder")}


def generate(name, attention, double=False, **how):
    model = build(name, attention)
    model = model.double() if double else model
    return model.generate(**given(name), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, **how)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_left_padded(name, cache):
    how = {"cache_implementation": cache}
    assert torch.equal(generate(name, "einsight", **how), generate(name, "eager", **how))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder(name, cache):
    how = {"cache_implementation": cache}
    assert torch.equal(generate(name, "einsight", **how), generate(name, "eager", **how))


def test_vision_and_language():
    assert torch.equal(generate("qwen2_vl", "einsight"), generate("qwen2_vl", "eager"))


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
        {"num_beams": 2, "cache_implementation": "static"},
    ],
    ids=["beams", "chunked prefill", "no cache", "beams, static cache"],
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_modes(name, how):
    assert torch.equal(generate(name, "einsight", **how), generate(name, "eager", **how))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_assisted(name):
    """A model's own guesses, checked several at a time."""

    def tokens(attention):
        model = build(name, attention)
        helper = build(name, attention, num_hidden_layers=1)
        ids = given(name)["input_ids"][1:2]
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=helper, max_new_tokens=12, do_sample=False
        )

    assert torch.equal(tokens("einsight"), tokens("eager"))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
def test_prefill_by_hand(name, kind):
    """Chunks of 4, 5 and 2 tokens give the logits of the whole; a static cache has more keys than queries."""
    found = given(name)
    ids, real = found["input_ids"], found["attention_mask"]
    model = build(name, "einsight")
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=13)
    with torch.no_grad():
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        whole = build(name, "eager")(ids, attention_mask=real, position_ids=positions).logits
        parts, start = [], 0
        for length in (4, 5, 2):
            part = slice(start, start + length)
            start += length
            output = model(ids[:, part], attention_mask=real[:, :start], position_ids=positions[:, part], cache=cache)
            parts.append(output.logits)
    with torch.no_grad(), Exactly():
        exact = build(name, "eager").double()(ids, attention_mask=real, position_ids=positions).logits
    assert_as_good(*(logits[real.bool()] for logits in (torch.cat(parts, 1), whole, exact)))


def test_attentions_of_each_step():
    how = {"output_attentions": True, "return_dict_in_generate": True}
    found = [generate("llama", attention, **how).attentions for attention in ("einsight", "eager")]
    with Exactly():
        found.append(generate("llama", "eager", double=True, **how).attentions)
    for steps in zip(*found, strict=True):
        for a, b, c in zip(*steps, strict=True):
            sees = a.amax(-1) > 0  # not padding before the first token
            assert_as_good(a[sees], b[sees], c[sees])
