"""Writing on: one token at a time, with the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from einsight.nn.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Int[Tensor, "b i"] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: int | None,
) -> Int[Tensor, "b n"]:
    """See `Decoder.generate`."""
    device = model.embedding.weight.device
    prompts, lengths = _prompts(tokens, model.config.vocab_size, device)
    _check(max_new_tokens, temperature, top_p)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    b, longest = prompts.shape
    training = model.training
    model.eval()
    try:
        cache = model.cache(b, longest + max(max_new_tokens, 1) - 1)
        hidden, _ = model.hidden(prompts, cache=cache)
        for layer in cache:
            layer.trim(lengths)
        last = hidden[torch.arange(b, device=device), torch.tensor(lengths, device=device) - 1]
        new: list[Tensor] = []
        ended = torch.zeros(b, dtype=torch.bool, device=device)
        while len(new) < max_new_tokens:
            drawn = sample(model.logits(last), temperature, top_p, generator)
            if stop is not None:
                drawn = drawn.masked_fill(ended, stop)
                ended |= drawn == stop
            new.append(drawn)
            if len(new) == max_new_tokens or (stop is not None and bool(ended.all())):
                break
            last = model.hidden(drawn.unsqueeze(1), cache=cache)[0][:, 0]
    finally:
        model.train(training)
    return torch.stack(new, 1) if new else prompts.new_zeros(b, 0)


def sample(
    logits: Float[Tensor, "b v"], temperature: float, top_p: float, generator: torch.Generator | None
) -> Int[Tensor, " b"]:
    """A token for each row of logits."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = probabilities.sort(-1, descending=True)
        # A token stays if those before it don't reach top_p yet: the likeliest always does.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def _prompts(tokens: Any, vocab_size: int, device: torch.device) -> tuple[Int[Tensor, "b i"], list[int]]:
    """The prompts padded on the right, and how long each is."""
    if isinstance(tokens, Tensor):
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"tokens must be an int tensor [b, i] or a list of prompts, not {tokens.dtype} {list(tokens.shape)}"
            )
        rows = list(tokens)
    elif isinstance(tokens, Sequence) and tokens and all(isinstance(row, Sequence | Tensor) for row in tokens):
        rows = [torch.as_tensor(row, dtype=torch.int64) for row in tokens]
    else:
        raise TypeError("tokens must be an int tensor [b, i] or a list of prompts, each a list of ints")
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) == 0:
        raise ValueError("generate continues prompts, but one is empty; begin with the model's first token")
    prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    low, high = int(prompts.min()), int(prompts.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens go from {low} to {high}, but the vocabulary from 0 to {vocab_size - 1}")
    return prompts, lengths


def _check(max_new_tokens: int, temperature: float, top_p: float) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an int of at least 0, not {max_new_tokens!r}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (the likeliest token) or larger, not {temperature!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be a probability in (0, 1], not {top_p!r}")
