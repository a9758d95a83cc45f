"""What is refused of layers, lenses, reports and models."""

from __future__ import annotations

import pytest
import torch
from refusals.given import Refusal, W, check

import einsight as es
from einsight import nn
from einsight.lens import Lens, Monitor, effects, qk_clip

layer, x = nn.MultiHeadAttention(16, 2), torch.zeros(2, 5, 16)
with Lens(layer) as lens:
    layer(x)

REFUSALS: dict[str, Refusal] = {
    # layers
    "x of another dtype": (
        lambda: layer(x.double()), TypeError,
        "x is torch.float64, but the layer's weights are torch.float32: write x.to(torch.float32), or "
        "layer.to(x.dtype)",
    ),
    "x of integers": (lambda: layer(x.long()), TypeError, "x is torch.int64, but the layer's weights are torch."),
    "cache of another kind": (lambda: layer(x, cache={}), TypeError, "cache must be a KVCache, not {}"),
    "PyTorch's padding": (
        lambda: layer(x, key_padding_mask=x[..., 0] > 0), TypeError,
        "instead of key_padding_mask= write mask=~einsight.padding(key_padding_mask)",
    ),
    "PyTorch's mask": (lambda: layer(x, attn_mask=x), TypeError, "instead of attn_mask= write mask=einsight.forbid("),
    "PyTorch's weights": (
        lambda: layer(x, need_weights=True), TypeError, "instead of need_weights= write readouts=einsight.Weights()"
    ),
    "nearly a mask": (lambda: layer(x, masks=None), TypeError, "takes no masks=; did you mean mask=?"),
    "PyTorch's bias": (
        lambda: nn.MultiHeadAttention(16, 2, bias=True), TypeError, "instead of bias= write proj_bias="
    ),
    "PyTorch's batch_first": (
        lambda: nn.MultiHeadAttention(16, 2, batch_first=True), TypeError,
        "instead of batch_first= write nothing: x is [b, length, embed_dim]",
    ),
    "block of a number": (
        lambda: nn.TransformerBlock(3, hidden_dim=4), TypeError, "attention must be a MultiHeadAttention, not 3"
    ),
    "feed-forward of nothing": (
        lambda: nn.FeedForward(16, 0), ValueError, "FeedForward's hidden_dim must be a positive int, not 0"
    ),
    "decoder whose heads don't divide": (
        lambda: nn.DecoderConfig(vocab_size=8, embed_dim=16, num_layers=1, num_heads=3, hidden_dim=8), ValueError,
        "embed_dim=16 is not divisible by num_heads=3: choose another, or say how large a head is, such as head_dim=5",
    ),
    "positions of a tensor": (
        lambda: nn.LearnedPositions(4, 16)(x), TypeError,
        "LearnedPositions takes how many tokens there are, such as 16, not a tensor",
    ),
    "sines of a tensor": (lambda: nn.SinusoidalPositions(16)(x), TypeError, "SinusoidalPositions takes how many"),
    # weights
    "weights as an array": (
        W.__array__, TypeError, "AttentionWeights hold no matrix; to compute one write W.dense().numpy(force=True)"
    ),
    # lens
    "half a layer": (
        lambda: Lens(layer, layers=[1.5]), TypeError,
        "layers must be a range, list or set of layer numbers, but holds 1.5",
    ),
    "layers by name": (lambda: Lens(layer, layers=["0"]), TypeError, "layer numbers, but holds '0'"),
    "values of text": (lambda: Lens(layer, values="yes"), TypeError, "values must be True or False, not 'yes'"),
    "heads of text": (lambda: Monitor(layer, heads="yes"), TypeError, "heads must be True or False, not 'yes'"),
    "tokenizer by name": (
        lambda: lens.heads(torch.arange(10).view(2, 5), "gpt2"), TypeError,
        "tokenizer must be a tokenizer of Hugging Face's, not 'gpt2'",
    ),
    "metric of a number": (
        lambda: effects(layer.eval(), x, 3), TypeError,
        "metric must be a function of the model's output that gives a number, not 3",
    ),
    "a lens as monitor": (
        lambda: qk_clip(layer, lens), TypeError,
        "qk_clip takes the model and its Monitor, qk_clip(model, monitor), not MultiHeadAttention and Lens",
    ),
    # report
    "a number as path": (lambda: es.report.html(W, 3), TypeError, "path must be the name of a file to write, not 3"),
    "tokens of None": (
        lambda: es.report.html(lens, "x.html", tokens=[None] * 5, item=0), TypeError,
        "tokens must hold strings, but holds None: write tokenizer.convert_ids_to_tokens(ids)",
    ),
    "model of a number": (
        lambda: es.models.load(3), TypeError, "model: expected a folder or the name of a model, not 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check(REFUSALS[name])
