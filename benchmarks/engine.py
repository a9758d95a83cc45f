"""The torch engines against the five lines and PyTorch's kernel: ratios of medians, taken alternately in one run.

python benchmarks/engine.py [ENGINE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import einsight as es
from einsight import formula

ROUNDS = 7


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call, the calls taking turns."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def show(title: str, against: dict[str, Callable[[], object]], ours: dict[str, Callable[[], object]]) -> None:
    taken = medians({**against, **ours})
    print(title)
    for name, seconds in taken.items():
        ratios = "  ".join(f"{taken[other] / seconds:5.2f} × {other}" for other in against) if name in ours else ""
        print(f"  {name:34} {seconds * 1e3:9.2f} ms  {ratios}")


def main() -> None:
    engine = sys.argv[1] if len(sys.argv) > 1 else "stream"
    four = [es.LogSumExp(), es.MaxScore(), es.Entropy(), es.Received()]
    print(f"engine {engine}, {torch.get_num_threads()} threads, torch {torch.__version__}")

    q, k, v = torch.randn(3, 32, 8, 512, 64)
    future = torch.triu(torch.ones(512, 512), diagonal=1).bool()
    mask = es.forbid(future) if engine != "auto" else es.causal()
    show(
        "textbook function, dense weights, (32, 8, 512, 64)",
        {"five lines": lambda: formula.attention(q, k, v, causal=True)},
        {
            "dense mask": lambda: es.attention(q, k, v, mask, readouts=es.Weights(), engine=engine),
            "causal()": lambda: es.attention(q, k, v, es.causal(), readouts=es.Weights(), engine=engine),
        },
    )

    q, k, v = torch.randn(3, 1, 8, 4096, 64)
    show(
        "causal, (1, 8, 4096, 64)",
        {
            "five lines": lambda: formula.attention(q, k, v, causal=True),
            "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        },
        {
            "output": lambda: es.attention(q, k, v, es.causal(), engine=engine),
            "output + received + max": lambda: es.attention(
                q, k, v, es.causal(), engine=engine, readouts=[es.Received(), es.MaxScore()]
            ),
            "output + lse, max, entropy, received": lambda: es.attention(
                q, k, v, es.causal(), engine=engine, readouts=four
            ),
        },
    )

    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 8, 2048, 64))
    show(
        "forward + backward, causal, (1, 8, 2048, 64)",
        {"SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()},
        {
            "output": lambda: es.attention(q, k, v, es.causal(), engine=engine).sum().backward(),
            "output + entropy": lambda: sum(
                t.sum() for t in es.attention(q, k, v, es.causal(), engine=engine, readouts=es.Entropy())
            ).backward(),
        },
    )

    q, k, v = torch.randn(3, 1, 8, 8192, 64)
    near = es.window(256, 0)
    dense = near.dense(8192, 8192)
    show(
        "window of 256, (1, 8, 8192, 64)",
        {"SDPA with a mask": lambda: scaled_dot_product_attention(q, k, v, attn_mask=dense)},
        {"output": lambda: es.attention(q, k, v, near, engine=engine)},
    )


if __name__ == "__main__":
    main()
