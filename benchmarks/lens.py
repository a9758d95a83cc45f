"""What the lens costs on the default model: time and peak memory beside the plain pass.

    python benchmarks/lens.py [tokens] [rounds]

`table` keeps queries and keys and asks for entropy, received, max score and the whole head table of all heads;
`received` reads what keys receive from the last 64 queries, on the way; `eager` is output_attentions=True (only for
up to 2,048 tokens: it holds every weight). Each measurement is a process of its own, taken in turn. On a machine that
others use, look at the CPU's time, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import time

from process import held


def measure(kind: str, tokens: int) -> None:
    import torch

    import einsight as es
    from einsight.lens import Lens
    from einsight.models import load

    model, tokenizer = load()
    passage = pathlib.Path("examples/passage.txt").read_text()
    ids = tokenizer(passage * (tokens // 100), return_tensors="pt")["input_ids"][:, :tokens]
    if kind == "eager":
        model.set_attn_implementation("eager")
    with torch.inference_mode():
        model(ids[:, :256], use_cache=False)  # warm
        if kind == "table":
            with Lens(model) as lens:
                model(ids[:, :256], use_cache=False)
            lens.heads(ids[:, :256], tokenizer)
        start, spent = time.perf_counter(), time.process_time()
        if kind == "plain":
            model(ids, use_cache=False)
        elif kind == "eager":
            model(ids, use_cache=False, output_attentions=True)
        elif kind == "received":
            with Lens(model, readouts=es.Received(queries=slice(-64, None))):
                model(ids, use_cache=False)
        else:
            with Lens(model) as lens:
                output = model(ids, use_cache=False)
            del output
            for call in lens:
                call.weights.read([es.Entropy(), es.Received(), es.MaxScore()])
            lens.heads(ids, tokenizer)
        seconds, spent = time.perf_counter() - start, time.process_time() - spent
    print(seconds, spent, held("VmHWM"))


def main(tokens: int, rounds: int) -> None:
    kinds = ["plain", "table", "received"] + (["eager"] if tokens <= 2048 else [])
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            command = [sys.executable, __file__, kind, str(tokens)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind].append([float(n) for n in ran.stdout.split()[-3:]])
    middle = {kind: [statistics.median(c) for c in zip(*rows, strict=True)] for kind, rows in found.items()}
    print(f"{tokens} tokens, median of {rounds}")
    for kind, figures in middle.items():
        seconds, spent, peak = figures
        ratios = [a / b for a, b in zip(figures, middle["plain"], strict=True)]
        print(
            f"{kind:9} {seconds:7.2f} s ({ratios[0]:5.2f} ×)  of the CPU {spent:7.2f} s ({ratios[1]:5.2f} ×)  "
            f"{peak:7.0f} MB ({ratios[2]:5.2f} ×)"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].isdigit():
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main(*[*map(int, sys.argv[1:]), 4096, 3][:2]) if len(sys.argv) != 2 else main(int(sys.argv[1]), 3)
