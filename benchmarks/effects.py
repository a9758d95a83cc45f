"""What `effects` over all heads costs beside as many passes: SmolLM2-135M (270 heads) at 128 tokens.

    python benchmarks/effects.py

By the processor's time; on a machine that others use, run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from einsight.lens import effects
from einsight.models import load


def main() -> None:
    model, _ = load()
    half = torch.randint(1000, 40000, (1, 64), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([half, half], 1)
    inputs = {"input_ids": tokens, "use_cache": False}

    def passes() -> float:
        taken = []
        with torch.no_grad():
            for _ in range(7):
                start = time.process_time()
                model(**inputs)
                taken.append(time.process_time() - start)
        return statistics.median(taken)

    passes()
    before = passes()
    start = time.process_time()
    table = effects(model, inputs, lambda output: F.cross_entropy(output.logits[0, 64:-1], tokens[0, 65:]))
    taken = time.process_time() - start
    one = (before + passes()) / 2
    print(f"{len(table)} heads: {taken:.1f} s, {taken / (len(table) * one):.3f} × as many passes of {one:.3f} s")


if __name__ == "__main__":
    main()
