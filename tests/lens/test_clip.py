"""QK-clip by its effect."""

import pytest
import torch
from lens.edits import IDS
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Monitor, qk_clip


def test_clip_uses_the_numbers_of_a_step_once():
    layer, x = es.nn.MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
    with torch.no_grad():
        layer.query.weight *= 1000
    monitor = Monitor(layer, every=3)
    weights = []
    for _ in range(3):
        with monitor:
            layer(x)
        found = qk_clip(layer, monitor)
        weights.append(layer.query.weight.clone())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2])
    assert torch.equal(found["MultiHeadAttention"], torch.ones(2))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_clip_ours(kv_heads):
    torch.manual_seed(0)
    layer = es.nn.MultiHeadAttention(16, 4, num_kv_heads=kv_heads, mask=es.causal(), proj_bias="qkv")
    with torch.no_grad():
        layer.query.weight[8:] *= 500
    clipped(
        layer, "MultiHeadAttention", lambda: layer(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)))
    )


@pytest.mark.parametrize("settings", [{}, {"kdim": 16, "vdim": 12, "bias": False}])
def test_clip_of_torch(settings):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True, **settings)
    x, value = torch.randn(2, 6, 16), torch.randn(2, 6, 12 if settings else 16)
    with torch.no_grad():
        (layer.q_proj_weight if settings else layer.in_proj_weight)[8:16] *= 500
        if not settings:
            layer.in_proj_bias.normal_()
    clipped(layer, "MultiheadAttention", lambda: layer(x, x, value))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_clip_llama(name):
    pytest.importorskip("transformers")
    from lens.architectures import build

    model, inputs = build(name, "sdpa")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[8:] *= 50
    clipped(model, "model.layers.1.self_attn", lambda: model(**inputs))


def clipped(model, name, run):
    monitor = Monitor(model)
    with monitor:
        run()
    before = monitor.max_score()[name]
    tau = float(before.median()) + 0.01  # some heads above, some below
    gamma = qk_clip(model, monitor, tau)[name]
    assert 0 < int((gamma < 1).sum()) < len(gamma)
    with monitor:
        run()
    after = monitor.max_score()[name]
    torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-4, atol=1e-4)


def test_clip_refuses():
    plain = es.nn.MultiHeadAttention(8, 2)
    x = torch.randn(1, 5, 8)
    for model, run, said in [
        (GPT("sdpa"), lambda model: model(IDS), "'blocks.0.attention' is of Attention: qk_clip knows"),
        (es.nn.MultiHeadAttention(8, 2, qk_norm=1e-6), lambda model: model(x), "which norms queries and keys"),
        (es.nn.MultiHeadAttention(8, 2, softcap=5.0), lambda model: model(x), "caps its scores by tanh"),
    ]:
        monitor, state = Monitor(model), {k: v.clone() for k, v in model.state_dict().items()}
        with monitor:
            run(model)
        with pytest.raises(ValueError, match=said):
            qk_clip(model, monitor, 1e-3)
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        with pytest.raises(ValueError, match="the monitor watches another model"):
            qk_clip(plain, monitor)
    with pytest.raises(ValueError, match="tau must be a positive number, the largest score allowed, not 0"):
        qk_clip(plain, Monitor(plain), 0)
    with pytest.raises(LookupError, match="saw no step"):
        qk_clip(plain, Monitor(plain))
