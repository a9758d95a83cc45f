"""`attn_implementation="einsight"` on twenty-two architectures: logits, attentions and gradients as good as eager's."""

import pytest
import torch

pytest.importorskip("transformers")

from lens.tiny import DECODERS, TINY, Exactly, assert_as_good, build, exactly, inputs

from einsight.lens import Lens
from einsight.lens.huggingface import register

register()
SIDES = ("left", "right")
UNPADDED = {"vit", "whisper"}


def cases():
    return [(name, side) for name in TINY for side in SIDES if side == "left" or name not in UNPADDED]


def runs(name, side, **asked):
    """(ours, eager's, eager's in float64), and which positions are real."""
    given, real = inputs(name, side)
    ours, eager = (build(name, attention) for attention in ("einsight", "eager"))
    with torch.no_grad():
        found = [model(**given, **asked) for model in (ours, eager)]
        with Exactly():
            exact, given = exactly(build(name, "eager"), given)
            found.append(exact(**given, **asked))
    return found, real


def main_result(output):
    return output["logits"] if "logits" in output else output["last_hidden_state"]


@pytest.mark.parametrize("name, side", cases())
def test_logits_and_attentions(name, side):
    given, _ = inputs(name, side)
    found, real = runs(name, side, output_attentions=True)
    assert_as_good(*(main_result(output)[real] for output in found))
    kinds = [kind for kind in found[1] if "attentions" in kind and found[1][kind]]
    assert kinds
    for kind in kinds:
        layers = [output[kind] for output in found]
        assert len(layers[0]) == len(layers[1])
        for n, weights in enumerate(zip(*layers, strict=True)):
            i = weights[0].shape[2]
            keep = given.get("attention_mask", real) if kind == "encoder_attentions" else real
            # A query of padding may see nothing: 0 with us, uniform with eager.
            keep = keep.bool() if keep.shape[1] == i else torch.ones(len(weights[0]), i, dtype=torch.bool)
            assert_as_good(*(w.transpose(1, 2)[keep] for w in weights), f"{kind} {n}")


@pytest.mark.parametrize("name", TINY)
def test_without_attentions(name):
    """What is computed without weights is as good, and gives none."""
    found, real = runs(name, "left")
    assert_as_good(*(main_result(output)[real] for output in found))
    assert not any(found[0].get(kind) for kind in ("attentions", "decoder_attentions", "cross_attentions"))


@pytest.mark.parametrize("name, side", cases())
def test_gradients(name, side):
    given, real = inputs(name, side)
    found = []
    for attention, exact in (("einsight", False), ("eager", False), ("eager", True)):
        model = build(name, attention)
        if exact:
            model, given = exactly(model, given)
        with Exactly() if exact else torch.enable_grad():
            result = main_result(model(**given))[real]
            torch.nn.functional.log_softmax(result, -1)[:, 5].sum().neg().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(grads))
    assert_as_good(*found)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bart"])
def test_the_lens_sees_the_same_calls(name):
    given, _ = inputs(name)
    model = build(name, "einsight")
    with torch.no_grad():
        plain = model(**given, output_attentions=True)
        with Lens(model) as lens:
            seen = model(**given)
    assert torch.equal(main_result(seen), main_result(plain))
    own = [w for kind in ("attentions", "encoder_attentions", "decoder_attentions") for w in plain.get(kind) or ()]
    assert len(lens) == len(own)
    for call, weights in zip(lens, own, strict=True):
        # The same rules, through the same engines.
        torch.testing.assert_close(call.weights.dense(), weights, atol=0, rtol=1e-5)


def test_there_are_twenty_two():
    assert len(TINY) == 22 and set(DECODERS) <= set(TINY)
