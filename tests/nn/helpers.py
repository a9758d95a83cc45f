"""What the tests of the layers share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from oracle import budget
from torch import Tensor

import einsight as es


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(*shape: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, exact: Tensor, low: list[Tensor]) -> None:
    """Within twice the error of the others' float32 against float64, and one rounding."""
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max().item()
    assert error <= budget(exact.detach(), [t.detach() for t in low], ours.dtype)


@contextlib.contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """Our own refusal, without the shapes of signatures being checked first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(kind, match=message):
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def small(**changes: object) -> es.nn.DecoderConfig:
    settings = {"vocab_size": 53, "embed_dim": 20, "num_layers": 2, "num_heads": 2, "hidden_dim": 31, "max_length": 37}
    return es.nn.DecoderConfig(**{**settings, **changes})


def decoder(**changes: object) -> es.nn.Decoder:
    torch.manual_seed(0)
    made = es.nn.Decoder(small(**changes)).eval()
    for parameter in made.parameters():  # far from the small start, so that every part tells
        torch.nn.init.normal_(parameter, std=0.3)
    return made
