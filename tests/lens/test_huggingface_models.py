"""Setting, saving, training with `attn_implementation="einsight"`, and the models that can't have it."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from lens.tiny import Exactly, assert_as_good, build, exactly, inputs

from einsight.lens.huggingface import register

register()


def text():
    found, real = inputs("llama", "right")
    return {**found, "labels": found["input_ids"].masked_fill(~real, -100)}


def test_registering_twice_changes_nothing():
    before = hf.PreTrainedModel.set_attn_implementation
    register()
    assert hf.PreTrainedModel.set_attn_implementation is before


def test_names_the_extra_where_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match=r'register needs transformers 5.0 or newer: pip install "einsight\[look\]"'):
        register()


IGNORE = {
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=53)),
    "longformer": (
        hf.LongformerModel,
        hf.LongformerConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, attention_window=4
        ),
    ),
    "falcon": (
        hf.FalconForCausalLM,
        hf.FalconConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=53),
    ),
    "gpt_neo": (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig(hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], vocab_size=53),
    ),
    "mpt": (hf.MptForCausalLM, hf.MptConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=53)),
}


@pytest.mark.parametrize("name", IGNORE)
def test_says_which_models_it_cannot_serve(name):
    model_class, config = IGNORE[name]
    said = (
        rf'{model_class.__name__} computes its attention itself and can\'t have attn_implementation="einsight"; leave'
    )
    model = model_class(config)
    with pytest.raises(ValueError, match=said):
        model.set_attn_implementation("einsight")
    config._attn_implementation = "einsight"
    with pytest.raises(ValueError, match="computes its attention itself"):
        model_class(config)


@pytest.mark.parametrize("name", ["indices", "block_indices", "cache"])
def test_refuses_what_would_change_the_weights(name):
    from einsight.lens.huggingface.attention import attention

    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=rf"Linear hands {name}= to its attention function, .* use model.set_attn"):
        attention(torch.nn.Linear(1, 1), q, q, q, None, **{name: q})


def test_there_and_back():
    model, given = build("llama", "eager"), inputs("llama")[0]
    with torch.no_grad():
        eager = model(**given).logits
        model.set_attn_implementation("einsight")
        ours = model(**given).logits
        model.set_attn_implementation("eager")
        again = model(**given).logits
    assert torch.equal(eager, again) and not torch.equal(eager, ours)


def test_saved_and_loaded(tmp_path):
    model, given = build("llama", "einsight"), inputs("llama")[0]
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="einsight")
    assert loaded.config._attn_implementation == "einsight"
    with torch.no_grad():
        assert torch.equal(loaded(**given).logits, model(**given).logits)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    found = []
    for attention, exact in (("einsight", False), ("eager", False), ("eager", True)):
        model, given = build("mistral", attention).train(), text()
        if exact:
            model, given = exactly(model, given)
        else:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with Exactly() if exact else torch.enable_grad():
            loss = model(**given, use_cache=False).loss
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_as_good(*found)


def test_dropout():
    """Repeats with its seed, differs with another, is off in evaluation, and keeps the output's mean."""
    model, given = build("llama", "einsight", attention_dropout=0.3), text()

    def loss(seed):
        torch.manual_seed(seed)
        return model(**given).loss.item()

    plain = loss(0)
    assert loss(1) == plain
    model.train()
    assert loss(0) == loss(0) != loss(1)

    from einsight.lens.huggingface.attention import attention

    q, k, v = torch.randn(3, 1, 1, 40, 8, generator=torch.Generator().manual_seed(0))
    dropped = torch.stack([attention(model, q, k, v, None, dropout=0.3, is_causal=False)[0] for _ in range(400)])
    whole = attention(model, q, k, v, None, is_causal=False)[0]
    error = dropped.std(0) / 400**0.5
    assert ((dropped.mean(0) - whole).abs() < 6 * error).all()


def curve(attention, dtype, exact=False):
    """The loss of 20 steps of training."""
    model, given = build("llama", attention).train().to(dtype), text()
    if exact:
        model, given = exactly(model, given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        with Exactly() if exact else torch.enable_grad():
            loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float() if not exact else loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_curve(dtype):
    """20 steps: as near to the curve in float64 as that of "sdpa", and falling."""
    ours, sdpa, right = curve("einsight", dtype), curve("sdpa", dtype), curve("sdpa", torch.float64, exact=True)
    rounding = torch.finfo(dtype).eps * right.abs().max()
    assert (ours - right).abs().max() <= 2 * (sdpa - right).abs().max() + rounding
    assert right[-1] < right[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_bfloat16(name):
    given, real = inputs(name)
    found = []
    with torch.no_grad():
        for attention in ("einsight", "eager"):
            found.append(build(name, attention).bfloat16()(**given)[0][real])
        with Exactly():
            found.append(build(name, "eager").bfloat16().double()(**given)[0][real])
    assert_as_good(*found)


def test_autocast():
    given, model = text(), build("llama", "einsight").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**given).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_compiled_model():
    given = inputs("llama")[0]
    model = build("llama", "einsight")
    with torch.no_grad():
        plain = model(**given).logits
        compiled = torch.compile(model, backend="eager")(**given).logits
    torch.testing.assert_close(compiled, plain)


def test_the_guide_runs():
    guide = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {"__name__": "guide"})
