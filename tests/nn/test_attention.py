"""The attention layer against PyTorch's, and the kinds of fault that others' layers have had."""

from __future__ import annotations

import itertools

import pytest
import torch
from nn.helpers import close, draw, refused
from oracle import budget
from torch import Tensor
from torch import nn as torch_nn

import einsight as es
from einsight.nn import KVCache, MultiHeadAttention, RotaryEmbedding

B, N, J, M, H = 2, 5, 7, 33, 3


def theirs(dtype: torch.dtype = torch.float32, **settings: object) -> torch_nn.MultiheadAttention:
    layer = torch_nn.MultiheadAttention(M, H, batch_first=True, dtype=dtype, **settings)
    for n, parameter in enumerate(layer.parameters()):
        parameter.data = draw(*parameter.shape, seed=n, dtype=dtype) * 0.3
    return layer


def masks(i: int, j: int) -> dict[str, tuple[dict[str, Tensor], dict[str, object]]]:
    """What PyTorch takes, and what says the same to us; no row is wholly masked."""
    future = torch.ones(i, j).triu(1).bool()
    padded = torch.arange(j) >= torch.tensor([j, j - 2])[:, None]
    added = draw(i, j, seed=31)
    by_head = draw(B * H, i, j, seed=32)
    return {
        "none": ({}, {}),
        "padding": ({"key_padding_mask": padded}, {"mask": ~es.padding(padded)}),
        "boolean": ({"attn_mask": future}, {"mask": es.forbid(future)}),
        "float": ({"attn_mask": added}, {"bias": added}),
        "float by head": ({"attn_mask": by_head}, {"bias": by_head.unflatten(0, (B, H))}),
        "both": (
            {"attn_mask": future, "key_padding_mask": padded},
            {"mask": es.forbid(future) & ~es.padding(padded)},
        ),
    }


@pytest.mark.parametrize("mask", list(masks(N, J)))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", ["self", "cross", "other size"])
def test_pytorchs_numbers(way: str, bias: bool, mask: str) -> None:
    settings = {"bias": bias, **({"kdim": 17, "vdim": 17} if way == "other size" else {})}
    j = N if way == "self" else J
    asked, said = masks(N, j)[mask]

    def run(dtype: torch.dtype, ours: bool, seed: int = 51) -> tuple[list[Tensor], list[Tensor]]:
        layer = theirs(dtype, **settings)
        x = draw(B, N, M, seed=seed, dtype=dtype).requires_grad_()
        context = draw(B, J, layer.kdim, seed=seed + 1, dtype=dtype).requires_grad_()
        if ours:
            made = MultiHeadAttention.from_torch(layer)
            weights: dict[str, object] = {n: t.to(dtype) if n == "bias" else t for n, t in said.items()}
            output, seen = made(x, None if way == "self" else context, **weights, readouts=es.Weights())
            averaged = seen.mean(1)
            projections = [p.weight for p in (made.query, made.key, made.value)]
            parameters = [*projections, made.out.weight]
        else:
            other = x if way == "self" else context
            converted = {n: t.to(dtype) if t.is_floating_point() else t for n, t in asked.items()}
            output, averaged = layer(x, other, other, **converted)
            packed = layer.in_proj_weight is not None
            parameters = [
                *(
                    [layer.in_proj_weight]
                    if packed
                    else [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
                ),
                layer.out_proj.weight,
            ]
        leaves = [x, *([] if way == "self" else [context]), *parameters]
        grads = list(torch.autograd.grad(output.square().sum() + averaged.square().sum(), leaves))
        at = 1 if way == "self" else 2
        if ours and way != "other size":  # the three projections as PyTorch packs them
            grads[at : at + 3] = [torch.cat(grads[at : at + 3])]
        return [output.detach(), averaged.detach()], grads

    # On one input either error may be small by luck, or large: those of several are added up, and their budgets.
    errors, budgets = [], []
    for seed in range(51, 131, 10):
        ways = (torch.float32, True), (torch.float64, False), (torch.float32, False)
        triples = list(zip(*(itertools.chain(*run(*way, seed)) for way in ways), strict=True))
        errors.append([(ours.double() - right).abs().max().item() for ours, right, _ in triples])
        budgets.append([budget(right, [their.double()], ours.dtype) for ours, right, their in triples])
    for error, allowed in zip(zip(*errors, strict=True), zip(*budgets, strict=True), strict=True):
        assert sum(error) <= sum(allowed)


def test_from_torch_copies() -> None:
    layer = theirs()
    made = MultiHeadAttention.from_torch(layer.eval())
    assert not made.training and made.embed_dim == M and made.num_heads == H
    before = made.query.weight.clone()
    layer.in_proj_weight.data.zero_()
    assert torch.equal(made.query.weight, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv=True adds a learned key and value"),
        ({"add_zero_attn": True}, r"add_zero_attn=True .* MultiHeadAttention\(…, sink=True\)"),
        ({"kdim": 17}, "kdim is 17 and vdim 33"),
    ],
)
def test_from_torch_refuses(settings: dict, message: str) -> None:
    with refused(ValueError, message):
        MultiHeadAttention.from_torch(torch_nn.MultiheadAttention(M, H, **settings))
    with refused(TypeError, r"takes a torch\.nn\.MultiheadAttention, not Linear"):
        MultiHeadAttention.from_torch(torch_nn.Linear(2, 3))


def test_add_zero_attn_is_a_sink_of_zero() -> None:
    layer = theirs(add_zero_attn=True)
    made = MultiHeadAttention(M, H, proj_bias=True, sink=True)
    plain = MultiHeadAttention.from_torch(theirs())
    made.load_state_dict({**plain.state_dict(), "sink": torch.zeros(H)})
    x = draw(B, N, M)
    exact = theirs(torch.float64, add_zero_attn=True)(*[x.double()] * 3)[0]
    close(made(x), exact, [layer(x, x, x)[0]])


# The kinds of fault in cases/reports.md that speak of layers.


def test_a_head_that_is_wholly_masked() -> None:  # pytorch#160064, #152028, #41508
    layer = MultiHeadAttention.from_torch(theirs())
    x = draw(1, 5, M).requires_grad_()
    forbidden = torch.zeros(1, H, 5, 5, dtype=torch.bool)
    forbidden[:, 2] = True
    output, weights = layer(x, mask=es.forbid(forbidden), readouts=es.Weights())
    assert (weights[:, 2] == 0).all() and output.isfinite().all()
    plain = layer(x, mask=es.forbid(forbidden))
    exact = layer.double()(x.double(), mask=es.forbid(forbidden))
    close(plain, exact, [output])
    layer.float()
    output.square().sum().backward()
    assert x.grad.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    # PyTorch's own layer, for comparison, gives NaN here.
    right, _ = theirs()(x, x, x, attn_mask=forbidden[0])
    assert right.isnan().any()


def test_items_that_are_all_padding() -> None:  # transformers#27114
    layer = MultiHeadAttention.from_torch(theirs())
    x, padded = draw(2, 5, M), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    output, weights = layer(x, mask=~es.padding(padded) & es.causal(), readouts=es.Weights())
    assert output.isfinite().all() and (weights[0] == 0).all()
    assert torch.equal(output[0], layer.out.bias.expand(5, M))
    low = torch.finfo(torch.float32).min
    future = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), low)
    keys = torch.zeros(2, 1, 1, 5).masked_fill(padded[:, None, None], low)
    assert layer(x, bias=future + keys).isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_a_float_mask_by_every_path(training: bool) -> None:  # pytorch#107084
    made = MultiHeadAttention.from_torch(theirs()).train(training)
    x, added = draw(B, 5, M), draw(5, 5, seed=3)
    exact = theirs(torch.float64)(*[x.double()] * 3, attn_mask=added.double())[0]
    low = theirs()(x, x, x, attn_mask=added, need_weights=False)[0]
    for readouts in (None, es.Weights(), es.Entropy()):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                output = made(x, bias=added, readouts=readouts)
            close(output if readouts is None else output[0], exact, [low])


def test_dropout_and_the_weights_before_it() -> None:  # pytorch#42929, #90842
    layer = MultiHeadAttention(2, 1, dropout=0.2)
    for linear in (layer.value, layer.out):
        linear.weight.data = torch.eye(2)
    x = torch.ones(64, 1, 2)
    torch.manual_seed(0)
    output, weights = layer(x, readouts=es.Weights())
    assert set(output.flatten().tolist()) == {0.0, 1.25} and (weights == 1).all()
    assert (layer.eval()(x) == 1).all()


def test_causal_and_weights_asked_for() -> None:  # keras#23038
    layer = MultiHeadAttention(M, H, mask=es.causal())
    x = draw(B, 7, M)
    output, weights = layer(x, readouts=es.Weights())
    assert (weights.triu(1) == 0).all()
    close(output, layer.double()(x.double()), [layer.float()(x)])


def test_masks_of_keys_and_of_queries() -> None:  # jax#28974, transformer#40
    layer = MultiHeadAttention(M, H)
    x = draw(B, 5, M)
    keep = torch.arange(5) < torch.tensor([3, 5])[:, None]
    _, weights = layer(x, mask=es.allow(keep[:, None, None]), readouts=es.Weights())
    assert torch.equal(weights > 0, keep[:, None, None].expand_as(weights))
    output = layer(x, mask=es.allow(keep[:, None, :, None]))
    assert (output[0, 3:] == 0).all() and (output[0, :3] != 0).any()


def test_masks_intersect() -> None:  # pytorch#187801
    layer = MultiHeadAttention(M, H, mask=es.causal())
    keep = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]])
    _, weights = layer(draw(B, 5, M), mask=es.padding(keep), readouts=es.Weights())
    assert torch.equal(weights > 0, (keep.bool()[:, None, None] & torch.ones(5, 5).tril().bool()).expand_as(weights))


@pytest.mark.parametrize("mask", [torch.ones(5, 5).bool(), torch.ones(5, 5).long()])
def test_masks_that_could_mean_either(mask: Tensor) -> None:  # LLMs-from-scratch#1061, pytorch#170400
    layer = MultiHeadAttention(M, H)
    with refused(TypeError, r"es\.allow\(mask.*es\.forbid\(mask"):
        layer(draw(1, 5, M), mask=mask)
    with refused(TypeError, r"mask must be one of einsight's masks, such as es\.causal\(\), not Tensor"):
        MultiHeadAttention(M, H, mask=mask)


def test_a_value_that_may_not_be_seen_touches_nothing() -> None:  # pytorch#101967
    layer = MultiHeadAttention(M, H, mask=es.causal())
    x = draw(1, 7, M)
    spoilt = x.clone()
    spoilt[:, 5] = torch.nan
    assert torch.equal(layer(spoilt)[:, :5], layer(x)[:, :5])
    assert layer(spoilt)[:, 5:].isnan().all()


def test_asking_for_weights_is_the_callers_choice() -> None:  # RT-DETR#678
    layer = MultiHeadAttention(M, H)
    assert isinstance(layer(draw(1, 5, M)), Tensor)


# What PyTorch's layer doesn't have.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_settings_together(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(6)
    layer = MultiHeadAttention(
        33, 6, num_kv_heads=2, head_dim=7, proj_bias="qkv", rotary=rotary, qk_norm=1e-6, mask=es.window(3, 0),
        softcap=2.0, sink=True,
    ).double()  # fmt: skip
    layer.sink.data = draw(6, seed=8, dtype=torch.float64)
    layer.query_norm.weight.data = draw(7, seed=9, dtype=torch.float64)
    assert layer.out.bias is None and layer.query.bias is not None
    x = draw(2, 11, 33, dtype=torch.float64)

    def formula(x: Tensor) -> Tensor:
        def heads(linear: torch_nn.Linear, norm: torch_nn.RMSNorm | None) -> Tensor:
            made = linear(x).unflatten(-1, (-1, 7)).transpose(1, 2)
            if norm is not None:
                made = made * (made.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                made = rotary(made * norm.weight)
            return made.repeat_interleave(6 // made.shape[1], 1)

        q, k, v = heads(layer.query, layer.query_norm), heads(layer.key, layer.key_norm), heads(layer.value, None)
        scores = 2 * torch.tanh(q @ k.mT / 7**0.5 / 2)
        p = torch.arange(11)
        hidden = (p > p[:, None]) | (p < p[:, None] - 3)
        scores = torch.cat([scores.masked_fill(hidden, -torch.inf), layer.sink[:, None, None].expand(2, 6, 11, 1)], -1)
        return layer.out((scores.softmax(-1)[..., :11] @ v).transpose(1, 2).flatten(2))

    exact = formula(x)
    layer.to(dtype)
    close(layer(x.to(dtype)), exact, [formula(x.to(dtype))])


def test_cross_attention_with_grouped_heads() -> None:
    layer = MultiHeadAttention(30, 6, num_kv_heads=2)
    x, context = draw(2, 3, 30), draw(2, 11, 30, seed=1)
    output, weights = layer(x, context, mask=es.lengths([11, 4]), readouts=es.Weights())
    assert output.shape == (2, 3, 30) and weights.shape == (2, 6, 3, 11) and (weights[1, ..., 4:] == 0).all()


@pytest.mark.parametrize("offset", [0, 3, torch.tensor([2, 6])])
def test_cross_attention_where_queries_stand(offset: int | Tensor) -> None:
    layer = MultiHeadAttention(30, 6, mask=es.window(2, 1))
    x, context = draw(2, 5, 30), draw(2, 11, 30, seed=1)
    _, weights = layer(x, context, offset=offset, readouts=es.Weights())
    places = torch.arange(5) + torch.as_tensor(offset).reshape(-1, 1)
    away = torch.arange(11) - places[..., None]
    seen = (away >= -2) & (away <= 1)
    assert torch.equal(weights > 0, seen[:, None].expand(2, 6, 5, 11))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((33, 5), {}, "embed_dim=33 is not divisible by num_heads=5.*head_dim=6"),
        ((30, 6), {"num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, not 6 and 4"),
        ((33, 3), {"rotary": RotaryEmbedding(12)}, r"rotary turns 12 dimensions, but heads have 11 .*Embedding\(10\)"),
        ((33, 3), {"dropout": 1.0}, r"dropout must be a probability in \[0, 1\), not 1.0"),
        ((33, 3.0), {}, r"num_heads must be a positive int, not 3\.0"),
        ((33, 3), {"head_dim": 0}, "head_dim must be a positive int, not 0"),
        ((33, 3), {"proj_bias": "kv"}, "proj_bias must be True, False or 'qkv', not 'kv'"),
        ((33, 3), {"qk_norm": True}, r"qk_norm \(the epsilon .*\) must be a positive number, not True"),
        ((33, 3), {"softcap": -1.0}, r"softcap must be a positive number, not -1\.0"),
    ],
)
def test_settings_refused(arguments: tuple, settings: dict, message: str) -> None:
    with refused(ValueError, message):
        MultiHeadAttention(*arguments, **settings)


def test_odd_heads_can_be_turned_in_part() -> None:
    with refused(ValueError, r"dim must be even and at least 2, not 11; .* RotaryEmbedding\(head_dim - 1\)"):
        RotaryEmbedding(11)
    assert MultiHeadAttention(33, 3, rotary=RotaryEmbedding(10))(draw(1, 5, 33)).shape == (1, 5, 33)


def test_inputs_refused() -> None:
    layer = MultiHeadAttention(33, 3)
    with refused(ValueError, r"x must have shape \[b, length, 33\], but has \[5, 33\]; .* x\.unsqueeze\(0\)"):
        layer(draw(5, 33))
    with refused(ValueError, r"x must have shape \[b, length, 33\], but has \[1, 5, 31\]"):
        layer(draw(1, 5, 31))
    with refused(TypeError, r"x must be a tensor \[b, length, 33\], not list"):
        layer([1.0])
    with refused(ValueError, r"context must have shape \[b, length, 33\], but has \[1, 5, 31\]"):
        layer(draw(1, 5, 33), draw(1, 5, 31))
    with refused(ValueError, "context has 2 batch items but x has 1"):
        layer(draw(1, 5, 33), draw(2, 5, 33))
    with refused(ValueError, "cache counts the positions of one sequence, but x attends to a context"):
        layer(draw(1, 5, 33), draw(1, 5, 33), cache=KVCache(1, 3, 8, 11))
    rotary = MultiHeadAttention(33, 3, rotary=RotaryEmbedding(10))
    with refused(ValueError, "rotary counts the positions of one sequence"):
        rotary(draw(1, 5, 33), draw(1, 5, 33))
    with refused(ValueError, r"this layer attends to a context \[b, length, 17\]"):
        MultiHeadAttention.from_torch(theirs(kdim=17, vdim=17))(draw(1, 5, 33))
    with refused(ValueError, r"offset is needed: .* 5 queries but 7 keys. offset=2"):
        MultiHeadAttention(33, 3, mask=es.causal())(draw(1, 5, 33), draw(1, 7, 33))
    with refused(ValueError, "offset says where x stands in a context; without one x stands where its cache ends"):
        layer(draw(1, 5, 33), offset=2)
    with refused(TypeError, r"rotary must be a RotaryEmbedding, such as RotaryEmbedding\(11\), not True"):
        MultiHeadAttention(33, 3, rotary=True)


def test_repr() -> None:
    assert repr(MultiHeadAttention(6, 2)).startswith("MultiHeadAttention(\n  6, 2, head_dim=3\n")
    assert "\n  6, 2, num_kv_heads=1, head_dim=3\n" in repr(MultiHeadAttention(6, 2, num_kv_heads=1))
