"""The decoder beside transformers' and beside itself on PyTorch's kernel: ratios of medians, taken alternately.

python benchmarks/layers.py [generate] [context] [train] [memory]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from process import held
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import einsight as es
from einsight import models

ROUNDS = 3


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call, the calls taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def generate() -> None:
    """New tokens per second of SmolLM2-135M after a prompt, here and in transformers (sdpa)."""
    theirs, _ = models.load()
    theirs.set_attn_implementation("sdpa")
    ours = es.nn.Decoder.from_pretrained(models.default_folder())
    new = 16
    for b, length in ((1, 100), (4, 100)):
        prompt = torch.randint(1000, 40000, (b, length), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(prompt)
        taken = medians(
            {
                "transformers": lambda p=prompt, m=mask: theirs.generate(
                    p, attention_mask=m, max_new_tokens=new, min_new_tokens=new, do_sample=False
                ),
                "Decoder": lambda p=prompt: ours.generate(p, new, temperature=0),
            }
        )
        speeds = "  ".join(f"{name} {b * new / seconds:6.1f} tokens/s" for name, seconds in taken.items())
        ratio = taken["transformers"] / taken["Decoder"]
        print(f"generate {new} tokens, prompt [{b}, {length}]: {speeds}  {ratio:.2f} ×", flush=True)


@torch.inference_mode()
def context() -> None:
    """Time of one more token of SmolLM2-135M after 100 and after 4,000, and what the attention has of it."""
    model = es.nn.Decoder.from_pretrained(models.default_folder())
    lengths = (100, 1000, 4000)
    caches = {}
    for n in lengths:
        caches[n] = model.cache(1, n + 1)
        model.hidden(torch.zeros(1, n, dtype=torch.int64), cache=caches[n])
    token = torch.zeros(1, 1, dtype=torch.int64)

    def step(n: int) -> None:
        model.logits(model.hidden(token, cache=caches[n])[0])
        for layer in caches[n]:
            layer.trim(n)

    def attend(n: int) -> None:
        for layer in caches[n]:
            key, value = layer._keys[:, :, : n + 1], layer._values[:, :, : n + 1]
            es.attention(torch.zeros(1, 9, 1, 64), key, value, es.causal(), offset=n)

    taken = medians(
        {f"{what} {n}": lambda f=f, n=n: f(n) for what, f in (("token", step), ("attention", attend)) for n in lengths}
    )
    for n in lengths:
        whole, inner = taken[f"token {n}"] * 1e3, taken[f"attention {n}"] * 1e3
        print(f"one token after {n}: {whole:.1f} ms, {inner:.1f} of it attention, {whole - inner:.1f} all else")


def on_sdpa(*tensors: Any, **_: Any) -> Any:
    """In the place of `es.attention` in a causal layer."""
    return scaled_dot_product_attention(*tensors[:3], is_causal=True, enable_gqa=True)


def train() -> None:
    """A training step, on Einsight's attention and on PyTorch's; and with the entropy and the largest score of every
    query of every layer."""
    small, large = (256, 160, 4, 4, 426), (256, 384, 6, 6, 1024)
    for b, length, sizes in ((16, 256, small), (4, 1024, small), (1, 4096, small), (2, 1024, large)):
        torch.manual_seed(0)
        config = es.nn.DecoderConfig(*sizes, max_length=length)
        model = es.nn.Decoder(config)
        adam = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(256, (b, length + 1))

        def step(attend: Callable[..., Any], model: Any = model, adam: Any = adam, tokens: Any = tokens) -> None:
            own, es.attention = es.attention, attend
            try:
                loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                adam.zero_grad()
                loss.backward()
                adam.step()
            finally:
                es.attention = own

        ours = es.attention

        def watching(*operands: Any, ours: Any = ours, **settings: Any) -> Any:
            return ours(*operands, **settings | {"readouts": (es.Entropy(), es.MaxScore())})[0]

        ways = {"on SDPA": on_sdpa, "Decoder": ours, "with readouts": watching}
        taken = medians({name: lambda s=step, a=attend: s(a) for name, attend in ways.items()})
        said = "  ".join(f"{name} {seconds * 1e3:7.0f} ms" for name, seconds in taken.items())
        ratios = " and ".join(f"{taken['on SDPA'] / taken[name]:.2f}" for name in ("Decoder", "with readouts"))
        print(f"{sizes[2]} layers of {sizes[1]}, training step [{b}, {length}]: {said}  {ratios} ×")


def step(tokens: int) -> None:
    """Print the peak of a process that makes one training step."""
    model = es.nn.Decoder(es.nn.DecoderConfig(256, 160, 2, 4, 426))
    model(torch.zeros(1, tokens, dtype=torch.int64)).logsumexp(-1).mean().backward()
    print(held("VmHWM"))


def memory() -> None:
    """Peak memory of a training step as the sequence grows, each in a process of its own."""

    def peak(tokens: int) -> float:
        command = [sys.executable, __file__, "step", str(tokens)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    base = peak(64)
    for tokens in (2048, 4096, 8192):
        more = peak(tokens) - base
        print(f"forward + backward of {tokens} tokens: {more:.0f} MB, {more / tokens * 1024:.1f} KB per token")


def main() -> None:
    chosen = sys.argv[1:] or ["generate", "context", "train", "memory"]
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in chosen:
        {"generate": generate, "context": context, "train": train, "memory": memory}[name]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        step(int(sys.argv[2]))
    else:
        main()
