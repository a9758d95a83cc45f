"""Writing on: one token at a time, with the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from einsight.nn.checks import is_integral
from einsight.nn.positions import LearnedPositions
from einsight.values import described

if TYPE_CHECKING:
    from einsight.nn.decoder import Decoder

_EXPECTED = "tokens must be an int tensor [b, i] or a list of prompts, each a list of ints"


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Int[Tensor, "b i"] | Sequence[Sequence[int] | Int[Tensor, ...]],
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: int | Sequence[int] | None,
) -> Int[Tensor, "b n"]:
    """See `Decoder.generate`."""
    device, vocab_size = model.embedding.weight.device, model.config.vocab_size
    prompts, lengths = _prompts(tokens, vocab_size, device)
    _check(max_new_tokens, temperature, top_p, seed)
    stops = _stops(stop, vocab_size, device)
    b, longest = prompts.shape
    room = longest + max(max_new_tokens, 1) - 1  # the last one's keys are never needed
    if isinstance(model.positions, LearnedPositions):
        model.positions.check(room)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        cache = model.cache(b, room)
        hidden, _ = model.hidden(prompts, cache=cache)
        for layer in cache:
            layer.trim(lengths)
        last = hidden[torch.arange(b, device=device), torch.tensor(lengths, device=device) - 1]
        new: list[Tensor] = []
        ended = torch.zeros(b, dtype=torch.bool, device=device)
        while len(new) < max_new_tokens:
            drawn = sample(model.logits(last), temperature, top_p, generator)
            if stops is not None:
                drawn = drawn.where(~ended, stops[0])
                ended |= torch.isin(drawn, stops)
            new.append(drawn)
            if len(new) == max_new_tokens or (stops is not None and bool(ended.all())):
                break
            last = model.hidden(drawn.unsqueeze(1), cache=cache)[0][:, 0]
    finally:
        for module, training in modes:
            module.training = training
    return torch.stack(new, 1) if new else prompts.new_zeros(b, 0)


def sample(
    logits: Float[Tensor, "b v"], temperature: float, top_p: float, generator: torch.Generator | None
) -> Int[Tensor, " b"]:
    """A token for each row of logits."""
    if temperature == 0:
        return logits.argmax(-1)
    # From the largest down, and no lower than what float32 divides by, so that none is ∞ − ∞.
    below = logits.float() - logits.amax(-1, keepdim=True)
    probabilities = (below / max(temperature, 1e-30)).softmax(-1)
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
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes):
        rows = [_prompt(row) for row in tokens]
    else:
        raise TypeError(f"{_EXPECTED}, not {described(tokens)}")
    if not rows:
        raise ValueError("generate continues prompts, but there is none")
    lengths = [len(row) for row in rows]
    if min(lengths) == 0:
        raise ValueError("generate continues prompts, but one is empty; begin with the model's first token")
    prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    low, high = int(prompts.min()), int(prompts.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens go from {low} to {high}, but the vocabulary from 0 to {vocab_size - 1}")
    return prompts, lengths


def _prompt(row: Any) -> Int[Tensor, " i"]:
    if isinstance(row, Tensor) and row.ndim == 1 and row.dtype in (torch.int64, torch.int32):
        return row.long()
    if isinstance(row, Iterable) and not isinstance(row, str | Tensor):
        prompt = list(row)
        if all(is_integral(token) for token in prompt):
            return torch.tensor(prompt, dtype=torch.int64)
    way = "; turn text into tokens first" if isinstance(row, str) else ""
    raise TypeError(f"{_EXPECTED}, but one is {described(row)}{way}")


def _stops(stop: Any, vocab_size: int, device: torch.device) -> Int[Tensor, " n"] | None:
    if stop is None:
        return None
    stops = list(stop) if isinstance(stop, Sequence) else [stop]
    if not stops or not all(is_integral(token) and 0 <= token < vocab_size for token in stops):
        raise ValueError(f"stop must be a token from 0 to {vocab_size - 1}, or several, not {stop!r}")
    return torch.tensor(stops, dtype=torch.int64, device=device)


def _check(max_new_tokens: Any, temperature: Any, top_p: Any, seed: Any) -> None:
    if not is_integral(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an int of at least 0, not {max_new_tokens!r}")
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (the likeliest token) or larger, not {temperature!r}")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ValueError(f"top_p must be a probability in (0, 1], not {top_p!r}")
    if seed is not None and not is_integral(seed):
        raise ValueError(f"seed must be an int, or None, not {seed!r}")
