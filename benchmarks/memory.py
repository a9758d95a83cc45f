"""Peak memory of a call beyond its arguments and results: 32,768 tokens, 2 heads, the output and five readouts.

    python benchmarks/memory.py [tokens] [mask] [engine] [forward | backward]

The mask is "none", "causal" or "window"; backward stands for both passes, and the entropy alone as a readout. Prints
the megabytes, and how many tokens they are of.
"""

from __future__ import annotations

import sys

import torch
from process import held

import einsight as es

MASKS = {"none": None, "causal": es.causal(), "window": es.window(255, 0)}
READOUTS = [es.LogSumExp(), es.Entropy(), es.MaxScore(), es.Received(), es.TopK(4)]


def measure(tokens: int, mask: str, engine: str, passes: str) -> float:
    """The peak over what was held before the call, less the results."""

    def both(tokens: int) -> tuple[torch.Tensor, ...]:
        operands = [x[:, :, :tokens].requires_grad_() for x in qkv]
        output, entropy = es.attention(*operands, MASKS[mask], readouts=es.Entropy(), engine=engine)
        return output, entropy, *torch.autograd.grad(output, operands, qkv[0][:, :, :tokens])

    def call(tokens: int) -> tuple[torch.Tensor, ...]:
        output, found = es.attention(*(x[:, :, :tokens] for x in qkv), MASKS[mask], readouts=READOUTS, engine=engine)
        lse, entropy, largest, received, top = found
        return output, lse, entropy, largest, received, *top

    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 2, tokens, 64, generator=generator) for _ in range(3)]
    call = call if passes == "forward" else both
    call(512)  # what libraries take at their first use
    before = held("VmRSS")
    results = call(tokens)
    return held("VmHWM") - before - sum(x.nbytes for x in results) / 2**20


if __name__ == "__main__":
    given = sys.argv[1:]
    others = given[1:] + ["causal", "auto", "forward"][len(given[1:]) :]
    tokens = int(given[0]) if given else 32_768
    print(f"{measure(tokens, *others):.1f} MB beyond arguments and results, {tokens:,} tokens, {', '.join(others)}")
