"""The lens on Hugging Face's own implementations: the weights it gives are those the model says it used."""

import pytest
import torch

pytest.importorskip("transformers")

from lens.architectures import ARCHITECTURES, build

from einsight.lens import Lens

SELF = ("attentions", "encoder_attentions", "decoder_attentions")
NO_SDPA = {"gpt_oss", "gemma2"}  # sinks and softcap: transformers computes them by hand, or on a GPU


def told(model, inputs):
    """(self-attention, cross-attention) weights as the model's eager implementation returns them."""
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    own = [w for name in SELF for w in (output.get(name) or ())]
    return own, list(output.get("cross_attentions") or ())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_and_outputs(name, attention):
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip("has no such implementation")
    model, inputs = build(name, attention)
    own, cross = told(build(name, "eager")[0], inputs)
    with torch.no_grad():
        plain = model(**inputs)
        with Lens(model) as lens:
            seen = model(**inputs)
    for key in plain:
        if isinstance(plain[key], torch.Tensor):
            assert torch.equal(plain[key], seen[key]), key
    pooling = 1 if name == "siglip" else 0  # an attention over the patches that transformers doesn't tell of
    assert (len(lens), len(lens.cross)) == (len(own), len(cross) + pooling)
    for n, weights in enumerate(own):
        torch.testing.assert_close(lens[n].weights.dense(), weights, atol=2e-6, rtol=1e-4)
    for n, weights in enumerate(cross):
        torch.testing.assert_close(lens.cross[n].weights.dense(), weights, atol=2e-6, rtol=1e-4)
    assert all(call.module is model.get_submodule(call.name.split(" ")[0]) for call in lens)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_and_random_state(name, attention):
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip("has no such implementation")
    model, inputs = build(name, attention)
    model.train()

    def step(lens):
        model.zero_grad()
        torch.manual_seed(3)
        with lens:
            output = model(**inputs)
            loss = sum(t.square().mean() for t in output.values() if isinstance(t, torch.Tensor) and t.requires_grad)
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()

    import contextlib

    plain, state = step(contextlib.nullcontext())
    seen, state_seen = step(Lens(model))
    assert len(plain) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(state, state_seen)


def test_at_least_twenty():
    assert len(ARCHITECTURES) >= 20
