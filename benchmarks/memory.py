"""Peak memory of a call beyond its arguments and results: 32,768 tokens, 2 heads, the output and five readouts.

    python benchmarks/memory.py [tokens] [mask] [engine] [forward | backward]

The mask is "none", "causal" or "window"; backward stands for both passes, and the entropy alone as a readout. Prints
the megabytes, and how many tokens they are of.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import einsight as es

MASKS = {"none": None, "causal": es.causal(), "window": es.window(255, 0)}
READOUTS = [es.LogSumExp(), es.Entropy(), es.MaxScore(), es.Received(), es.TopK(4)]


def held(name: str) -> float:
    """The megabytes that this process holds (VmRSS), or has held at most (VmHWM), as Linux tells.

    Not getrusage's ru_maxrss, in which a process begins with what the one that started it held.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


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
