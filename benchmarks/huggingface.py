"""SmolLM2 with `attn_implementation="einsight"` beside "sdpa": ratios of medians, taken alternately in one run.
Seconds of CPU say more than seconds where other work is going on (with OMP_NUM_THREADS=1: waiting threads count too).

    python benchmarks/huggingface.py time [tokens] [rounds]
    python benchmarks/huggingface.py memory [tokens]

`forward` is the model up to the last token's logits; `64 tokens` continue a prompt of that length from its cache;
`window 512` is the same model with Mistral's sliding window. Memory is the peak of a process that does nothing else,
less what it held with the model loaded.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from process import held

NAMES = ("sdpa", "einsight")
WORK = ("forward", "64 tokens", "window 512")


def models() -> tuple[Any, Any]:
    """SmolLM2, and the same weights with a window."""
    from transformers import MistralConfig, MistralForCausalLM

    from einsight.lens.huggingface import register
    from einsight.models import load

    register()
    model, _ = load()
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    with torch.device("meta"):
        windowed = MistralForCausalLM(MistralConfig(**{**settings, "sliding_window": 512}))
    windowed.load_state_dict(model.state_dict(), assign=True)
    windowed.tie_weights()
    windowed.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    return model, windowed.eval()


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(100, 40000, (1, tokens), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor) -> Any:
    return model(ids, logits_to_keep=1, use_cache=True).past_key_values


@torch.inference_mode()
def continued(model: Any, ids: torch.Tensor, cache: Any) -> None:
    for step in range(64):
        model(ids[:, step : step + 1], cache=cache, use_cache=True)


def timed(tokens: int, rounds: int) -> None:
    model, windowed = models()
    ids = prompt(tokens)
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {(work, name): [] for work in WORK for name in NAMES}

    def timed_call(work: str, name: str, call: Any) -> Any:
        wall, used = time.perf_counter(), time.process_time()
        result = call()
        taken[work, name].append((time.perf_counter() - wall, time.process_time() - used))
        print(f"  {work} {name} {taken[work, name][-1]}", file=sys.stderr, flush=True)
        return result

    for name in NAMES:
        for each in (model, windowed):
            each.set_attn_implementation(name)
            prefill(each, ids[:, :64])  # the first call of all is slower
    for _ in range(rounds):
        caches = {}
        for name in NAMES:
            model.set_attn_implementation(name)
            windowed.set_attn_implementation(name)
            caches[name] = timed_call("forward", name, lambda: prefill(model, ids))
            timed_call("window 512", name, lambda: prefill(windowed, ids))
        for _ in range(3):
            for name in NAMES:
                model.set_attn_implementation(name)
                timed_call("64 tokens", name, lambda cache=caches[name]: continued(model, ids, cache))
                caches[name].crop(-64)
    print(f"{tokens} tokens, float32, {torch.get_num_threads()} threads, medians of {rounds}")
    for n, kind in enumerate(("seconds", "seconds of CPU")):
        for work in WORK:
            sdpa, ours = (statistics.median(pair[n] for pair in taken[work, name]) for name in NAMES)
            print(f"  {work:12} sdpa {sdpa:7.2f}   einsight {ours:7.2f} {kind}   {sdpa / ours:5.2f} times as fast")


def alone(work: str, name: str, tokens: int) -> None:
    model, windowed = models()
    ids = prompt(tokens)
    model.set_attn_implementation(name)
    windowed.set_attn_implementation(name)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    before = held("VmHWM")
    cache = prefill(windowed if work == "window 512" else model, ids)
    if work == "64 tokens":
        continued(model, ids, cache)
    print(held("VmHWM") - before)


def memory(tokens: int) -> None:
    print(f"{tokens} tokens, peak beyond the loaded model")
    for work in WORK:
        peaks = {}
        for name in NAMES:
            command = [sys.executable, __file__, "alone", work, name, str(tokens)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[name] = float(ran.stdout.split()[-1])
        print(f"  {work:12} sdpa {peaks['sdpa']:7.0f} MB   einsight {peaks['einsight']:7.0f} MB", flush=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["time"]
    if what == "alone":
        alone(rest[0], rest[1], int(rest[2]))
    elif what == "memory":
        memory(int(rest[0]) if rest else 4096)
    else:
        timed(int(rest[0]) if rest else 4096, int(rest[1]) if len(rest) > 1 else 3)
