"""The Triton engine on a GPU: correctness, then times beside PyTorch's own kernels, in under four minutes.

python benchmarks/gpu.py            on a machine with a GPU
TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke    the correctness alone, on small problems, without one

Times are medians of calls that take turns; the last columns are the share of the matrix rate and of the bandwidth that
were measured in the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import einsight as es
from einsight.budgets import Trial, Truth, gradients
from einsight.engines import choose

SMOKE = "--smoke" in sys.argv
DEVICE = "cpu" if SMOKE else "cuda"
STARTED, BUDGET = time.perf_counter(), 210  # seconds

READOUTS: dict[str, es.Readout] = {
    "lse": es.LogSumExp(), "max": es.MaxScore(), "entropy": es.Entropy(), "received": es.Received(),
}  # fmt: skip
MORE: dict[str, es.Readout] = {
    "rows": es.Rows([3]), "share": es.Share(es.window(2, 0)), "distance": es.Distance(), "pool": es.Pool(16),
    "diagonal": es.Diagonal(-1), "top": es.TopK(3), "scores": es.Scores(),
}  # fmt: skip


def correctness() -> int:
    """Results and gradients against float64 on the host, within budgets measured there; how many are over."""
    over = 0
    sizes = [(1, 4, 2, 19, 23, 16, 16)] if SMOKE else [(2, 6, 3, 131, 197, 64, 64), (1, 4, 2, 67, 257, 100, 136)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for b, h, g, i, j, d, e in sizes:
            shapes = {"query": (b, h, i, d), "key": (b, g, j, d), "value": (b, g, j, e)}
            leaves = {n: torch.randn(*shape).to(dtype) for n, shape in shapes.items()}
            for named, settings in {
                "plain": {"offset": j - i},
                "causal": {"mask": es.causal(), "offset": j - i},
                "window": {"mask": es.window(9, 0), "offset": j - i, "softcap": 3.0},
                "boolean": {"mask": es.allow(torch.rand(i, j) > 0.3), "offset": 0},
            }.items():
                for readouts, derives in ((READOUTS, True), (MORE, False)):
                    trial = Trial(leaves, lambda _, settings=settings: settings, readouts)
                    over += _compare(trial, f"{dtype} {named}", derives)
    return over


def _compare(trial: Trial, name: str, derives: bool) -> int:
    truth = Truth(trial)
    there = trial.as_leaves()
    moved = {n: x.detach().to(DEVICE).requires_grad_(derives) for n, x in there.items()}
    found = {n: x.cpu() for n, x in trial.results(partial(choose.run, engine="triton"), moved).items()}
    judged = truth.judge(found)
    if derives:
        made = gradients(found, moved, 0)
        judged += truth.judge_gradients({n: x.cpu() for n, x in made.items()})
    wrong = [x for x in judged if x.error > x.budget]
    for x in wrong:
        print(f"OVER  {name}: {x.result} {x.error:.3g} of {x.budget:.3g}")
    return len(wrong)


def timed(*calls: Callable[[], Any]) -> list[float]:
    """Seconds of each, taking turns."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(7):
        for call, own in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            own.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(own) for own in times]


def peaks() -> tuple[float, float]:
    """Multiply-adds' operations and bytes in a second, of a large product and a large copy."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    room = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    half = 1 << 29
    product, copy = timed(lambda: a @ a, lambda: room[:half].copy_(room[half:]))
    return 2 * 8192**3 / product, (1 << 30) / copy


def by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def times() -> None:
    operations, bandwidth = peaks()
    print(f"measured: {operations / 1e12:.0f} TFLOP/s in bfloat16, {bandwidth / 1e12:.2f} TB/s")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = torch.compile(flex_attention)
    print(f"{'':44}{'ms':>9}{'beside best':>12}{'of matrix':>11}{'of memory':>11}")
    for d in (64, 128):
        for n in (1024, 8192, 32768):
            if time.perf_counter() - STARTED > BUDGET:
                print("the rest is left out: time is up")
                return
            q, k, v = (torch.randn(1, 16, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
            blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=DEVICE)
            own = partial(es.attention, q, k, v, es.causal(), engine="triton")
            four = [es.LogSumExp(), es.MaxScore(), es.Entropy()]
            last = es.Received(queries=range(n - 64, n))
            calls: dict[str, Callable[[], Any]] = {
                "flash": by(SDPBackend.FLASH_ATTENTION, q, k, v),
                "cuDNN": by(SDPBackend.CUDNN_ATTENTION, q, k, v),
                "flex_attention": lambda q=q, k=k, v=v, blocks=blocks: flex(q, k, v, block_mask=blocks),
                "einsight output": own,
                "einsight + lse, max, entropy": partial(own, readouts=four),
                "einsight + received as well": partial(own, readouts=[*four, es.Received()]),
                "auto, received of the last 64": partial(es.attention, q, k, v, es.causal(), readouts=last),
                "auto, output alone": partial(es.attention, q, k, v, es.causal()),
            }
            if n <= 8192:
                calls["five lines"] = partial(_five_lines, q, k, v)
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                calls["flash, forward and backward"] = partial(_both, by(SDPBackend.FLASH_ATTENTION, *leaves), leaves)
                entropy = partial(es.attention, *leaves, es.causal(), engine="triton", readouts=es.Entropy())
                calls["einsight with entropy, forward and backward"] = partial(_both, entropy, leaves)
            seconds = dict(zip(calls, timed(*calls.values()), strict=True))
            best, both = min(seconds["flash"], seconds["cuDNN"]), seconds.get("flash, forward and backward", 0.0)
            print(f"(1, 16, {n}, {d}) causal")
            for name, took in seconds.items():
                share = 2 * 2 * 16 * n * n * d / 2 * (3.5 if "backward" in name else 1) / took / operations
                moved = 4 * q.numel() * 2 * (3 if "backward" in name else 1) / took / bandwidth
                ratio = took / (both if "backward" in name else best)
                print(f"  {name:42}{took * 1e3:>9.3f}{ratio:>12.2f}{share:>11.0%}{moved:>11.0%}")


def _five_lines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bhje->bhie", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def _both(call: Callable[[], Any], leaves: list[Tensor]) -> None:
    found = call()
    total = found.sum() if isinstance(found, Tensor) else found[0].sum() + found[1].sum()
    torch.autograd.grad(total, leaves)


def main() -> None:
    if not SMOKE and not torch.cuda.is_available():
        sys.exit(
            "PyTorch sees no GPU here; the correctness alone, on small problems, needs none: "
            "TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke"
        )
    torch.manual_seed(0)
    over = correctness()
    print(f"correctness: {over} results over their budgets")
    if not SMOKE and not over:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
        times()
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
