"""Rotary, learned and sinusoidal positions against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from nn.helpers import draw, refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from einsight.nn import LearnedPositions, Llama3Scaling, RotaryEmbedding, SinusoidalPositions


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Neighbouring dimensions as complex numbers, turned, in float64; with the angles of float32."""
    d = x.shape[-1]
    frequencies = 1 / base ** (torch.arange(0, d, 2).float() / d)
    angles = (positions.float()[..., None] * frequencies).double()
    return torch.view_as_real(
        torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.exp(1j * angles)
    ).flatten(-2)


def halves(x: Tensor) -> Tensor:
    """Interleaved pairs as half-split ones."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("offset", [0, 3, 1021])
def test_rotary(offset: int, base: float) -> None:
    x = draw(2, 3, 7, 10)
    right = turned(x, offset + torch.arange(7), base)
    tolerance = 4 * torch.finfo(torch.float32).eps * x.abs().max().item()  # two products, two roundings of cos and sin
    assert (RotaryEmbedding(10, base=base, interleaved=True)(x, offset) - right).abs().max() <= tolerance
    assert (RotaryEmbedding(10, base=base)(halves(x), offset) - halves(right)).abs().max() <= tolerance


def test_rotary_of_some_dimensions() -> None:
    x = draw(2, 3, 7, 11)
    made = RotaryEmbedding(6)(x)
    assert torch.equal(made[..., 6:], x[..., 6:])
    assert torch.equal(made[..., :6], RotaryEmbedding(6)(x[..., :6]))


def test_items_stand_at_their_own_places() -> None:
    x, rotary = draw(3, 2, 5, 6), RotaryEmbedding(6)
    made = rotary(x, torch.tensor([0, 2000, 7]))
    for item, offset in enumerate((0, 2000, 7)):
        assert torch.equal(made[item : item + 1], rotary(x[item : item + 1], offset))


def test_products_depend_on_the_distance() -> None:
    rotary = RotaryEmbedding(6)
    q, k = draw(1, 1, 1, 6, dtype=torch.float64), draw(1, 1, 1, 6, seed=1, dtype=torch.float64)
    products = torch.stack([(rotary(q, n + 3) * rotary(k, n)).sum() for n in (0, 1, 50)])
    # Angles are rounded to float32: at 53 by at most 53 · eps, in each of three pairs.
    assert (products - products[0]).abs().max() <= 3 * 53 * torch.finfo(torch.float32).eps * (q.norm() * k.norm())


def test_half_precision_is_rounded_once() -> None:
    rotary, x = RotaryEmbedding(6), draw(1, 2, 5, 6, dtype=torch.bfloat16)
    assert torch.equal(rotary(x, 100), rotary(x.float(), 100).bfloat16())
    assert torch.equal(rotary.bfloat16()(x, 100), rotary(x.float(), 100).bfloat16())  # the angles are not cast


def test_llama_3_as_transformers_has_it() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(4000)[None])
    rotary = RotaryEmbedding(128, base=500000.0, scaling=Llama3Scaling())
    ours_cos, ours_sin = (angles[:, 64:] for angles in rotary._angles(0, torch.empty(1, 1, 4000, 128)))
    # A frequency may differ by some roundings, and the angle by as many times the position.
    tolerance = 4 * 4000 * torch.finfo(torch.float32).eps
    assert (ours_cos - cos[0, :, :64]).abs().max() <= tolerance and (ours_sin - sin[0, :, :64]).abs().max() <= tolerance


def test_without_looking_at_numbers_the_angles_are_the_same() -> None:
    """torch.func and fakes leave no table behind, and get what the table holds."""
    x, offset = draw(3, 2, 5, 6), torch.tensor([0, 2000, 7])
    rotary = RotaryEmbedding(6)
    with FakeTensorMode() as mode:
        assert rotary(mode.from_tensor(x), mode.from_tensor(offset)).shape == x.shape
    assert torch.equal(torch.vmap(rotary, (1, None), 1)(x[:, :, None], offset)[:, :, 0], rotary(x, offset))
    assert RotaryEmbedding(6)(x.to("meta"), 3).is_meta
    with torch.inference_mode():
        rotary(x, 5)
    rotary(x.requires_grad_(), 5).sum().backward()


def test_sinusoidal() -> None:
    made = SinusoidalPositions(6)(5, offset=3)[0]
    for i in range(5):
        for n in range(3):
            angle = (3 + i) / 10000 ** (2 * n / 6)
            assert abs(made[i, 2 * n].item() - math.sin(angle)) < 8 * 8 * torch.finfo(torch.float32).eps
            assert abs(made[i, 2 * n + 1].item() - math.cos(angle)) < 8 * 8 * torch.finfo(torch.float32).eps


def test_learned() -> None:
    positions = LearnedPositions(7, 3)
    assert torch.equal(positions(3, 4)[0], positions.weight[4:7])
    made = positions(2, torch.tensor([0, 5]))
    assert torch.equal(made[1], positions.weight[5:7]) and torch.equal(made[0], positions.weight[:2])


def test_refusals() -> None:
    with refused(ValueError, r"RotaryEmbedding\(6\) turns 6 dimensions .* heads of 5"):
        RotaryEmbedding(6)(draw(1, 2, 3, 5))
    with refused(ValueError, "stands at position -1; positions start at 0"):
        RotaryEmbedding(6)(draw(1, 2, 3, 6), -1)
    for offset in (1.5, None, True, torch.tensor([1.5, 2.0]), torch.tensor([True, False])):
        with refused(TypeError, r"RotaryEmbedding: offset must be an int or an int tensor \[b\], not "):
            RotaryEmbedding(6)(draw(2, 2, 3, 6), offset)
    with refused(ValueError, "offset has 3 places, but there are 2 batch items"):
        RotaryEmbedding(6)(draw(2, 2, 3, 6), torch.tensor([1, 2, 3]))
    for base in (0, -3.0, float("nan"), None):
        with refused(ValueError, "RotaryEmbedding's base must be a positive number, not "):
            RotaryEmbedding(6, base=base)
    with refused(TypeError, "scaling must be a Llama3Scaling, not int"):
        RotaryEmbedding(6, scaling=8)
    with refused(ValueError, "Llama3Scaling's factor must be a positive number, not 0"):
        Llama3Scaling(0)
    with refused(ValueError, "low_freq_factor must be smaller than high_freq_factor, not 4.0 and 4.0"):
        Llama3Scaling(8.0, 4.0)
    with refused(ValueError, "LearnedPositions: a token stands at position -2; positions start at 0"):
        LearnedPositions(7, 3)(3, -2)
    with refused(ValueError, "SinusoidalPositions: a token stands at position -3; positions start at 0"):
        SinusoidalPositions(6)(3, torch.tensor([-3, 2]))
    with refused(ValueError, "LearnedPositions' length must be a positive int, not 0"):
        LearnedPositions(0, 3)
    with refused(ValueError, r"stands at position 7, but LearnedPositions has 7 positions \(0 to 6\)"):
        LearnedPositions(7, 3)(3, 5)
    with refused(ValueError, "embed_dim must be even, not 5"):
        SinusoidalPositions(5)
