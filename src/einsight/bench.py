"""How fast the engines are on this machine, beside PyTorch's own: everything in one run, alternating.

Medians of alternating calls, so that a machine that slows down slows down for all. `ratio` is the baseline's time
divided by ours: above 1, ours is faster. Useful operations are those of visible pairs only, 2·(d + e) each.
"""

from __future__ import annotations

import ctypes
import json as json_format
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from einsight.biases import alibi
from einsight.engines import choose, native
from einsight.functional import attention
from einsight.functional import scaled_dot_product_attention as textbook
from einsight.masks import allow, causal, documents, window
from einsight.pose import pose
from einsight.readouts import (
    Diagonal,
    Distance,
    Entropy,
    LogSumExp,
    Mass,
    MaxScore,
    Pool,
    Readout,
    Received,
    Rows,
    Share,
    TopK,
)

Shape = tuple[int, int, int, int]  # b, h, i = j, d
Ways = dict[str, Callable[[], Any]]

SHAPES: tuple[Shape, ...] = (
    (4, 8, 512, 64),
    (1, 8, 2048, 64),
    (1, 8, 4096, 64),
    (1, 4, 4096, 128),
    (2, 12, 1024, 64),
    (8, 12, 128, 64),
    (1, 9, 777, 96),
)
GROUPS = ("forward", "readouts", "training", "eleven", "masks", "dense", "window", "decode", "dtypes", "biases", "tiny")
TRAINING: tuple[Shape, ...] = ((2, 8, 512, 64), (1, 8, 2048, 64), (1, 8, 4096, 64), (2, 12, 1024, 64))
READOUTS = (LogSumExp(), MaxScore(), Entropy(), Received())


@dataclass(frozen=True)
class Case:
    """One thing to compute in several ways; ratios are to the first."""

    group: str
    what: str
    ways: Ways
    useful: float = 0.0  # floating-point operations
    each: int = 1  # calls between two looks at the clock
    memory: bool = False


@dataclass
class Row:
    group: str
    what: str
    way: str
    seconds: float
    ratio: float
    gflops: float | None = None
    of_peak: float | None = None
    of_matmul: float | None = None
    memory: int | None = None
    why_not: str | None = field(default=None)


def bench(
    groups: list[str] | None = None, *, seconds: float = 1.5, flex: bool = True, json: bool = False, out: Any = None
) -> list[Row]:
    """Run the benchmarks, print a table (or JSON lines) to `out`, and return its rows.

    Arguments:
        groups: some of `GROUPS`; all by default.
        seconds: how long each case is repeated.
        flex: compile and time flex_attention too (the first call of each shape takes a while).
        json: one JSON object per row in place of the table.
        out: a file to print to; standard output by default. Progress goes to standard error.
    """
    out = sys.stdout if out is None else out
    rows: list[Row] = []
    with torch.no_grad():
        peak, matmul = _peak(), _matmul()
        _head(peak, matmul, json, out)
        for case in cases(flex):
            if groups is not None and case.group not in groups:
                continue
            print(f"\r\x1b[K{case.group} {case.what} …", end="", file=sys.stderr, flush=True)
            found = _measure(case, seconds, peak, matmul)
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            for row in found:
                print(json_format.dumps(asdict(row)) if json else _line(row), file=out, flush=True)
            rows += found
    if not json:
        for group in ("forward", "readouts"):
            ratios = [row.ratio for row in rows if row.group == group and row.way in ("einsight", "einsight native")]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                print(f"{group}: geometric mean of the ratios {mean:.2f}, smallest {min(ratios):.2f}", file=out)
    return rows


def cases(flex: bool) -> Iterator[Case]:
    """The grid. Tensors are made when a case comes up, and forgotten after it."""
    for shape in SHAPES:
        q, k, v = _tensors(shape)
        theirs: Ways = {"SDPA": partial(sdpa, q, k, v, is_causal=True)}
        ours: Ways = {f"einsight {name}": partial(attention, q, k, v, causal(), engine=name) for name in _able(q, k, v)}
        if flex and shape in SHAPES[1:2]:
            ours["flex_attention"] = _flex(q, k, v, lambda b, h, i, j: i >= j)
        useful = _useful(shape)
        yield Case("forward", _name(shape), theirs | ours, useful)
        yield Case(
            "readouts",
            f"{_name(shape)} + lse, max, entropy, received",
            theirs | {"einsight": partial(attention, q, k, v, causal(), readouts=READOUTS)},
            useful,
        )

    for shape in TRAINING:
        q, k, v = _tensors(shape)
        ways = {
            "SDPA": _step(lambda q, k, v: sdpa(q, k, v, is_causal=True), q, k, v),
            "einsight": _step(lambda q, k, v: attention(q, k, v, causal()), q, k, v),
            "einsight + entropy, max": _step(
                lambda q, k, v: attention(q, k, v, causal(), readouts=(Entropy(), MaxScore()))[0], q, k, v
            ),
        }
        # Three and a half times the forward's: seven products for two.
        yield Case("training", f"{_name(shape)} forward + backward", ways, 3.5 * _useful(shape))
    q, k, v = _tensors((1, 2, 32768, 64))
    ways = {"einsight": _step(lambda q, k, v: attention(q, k, v, causal()), q, k, v)}
    yield Case("training", f"{_name((1, 2, 32768, 64))} forward + backward", ways, memory=True)

    shape = SHAPES[1]
    q, k, v = _tensors(shape)
    theirs = {"SDPA": partial(sdpa, q, k, v, is_causal=True)}
    yield Case(
        "eleven",
        f"{_name(shape)} + all row and key readouts",
        theirs | {"einsight": partial(attention, q, k, v, causal(), readouts=_eleven(shape[2]))},
        _useful(shape),
    )
    some = torch.rand(shape[2], shape[2], generator=torch.Generator().manual_seed(0)) < 0.5
    for what, seen in (("random", some), ("causal", torch.ones_like(some).tril())):
        ways = {
            "SDPA with the mask": partial(sdpa, q, k, v, attn_mask=seen),
            "einsight": partial(attention, q, k, v, allow(seen)),
        }
        yield Case("masks", f"{_name(shape)} {what} boolean mask", ways)
    ids = torch.arange(8192) // 512
    q, k, v = _tensors((1, 8, 8192, 64))
    ways = {
        "SDPA with a mask": partial(sdpa, q, k, v, attn_mask=ids[:, None] == ids),
        "einsight": partial(attention, q, k, v, documents(ids)),
    }
    yield Case("masks", f"documents of 512 in {_name((1, 8, 8192, 64))}", ways)

    shape = (32, 8, 512, 64)
    q, k, v = _tensors(shape)
    mask = torch.triu(torch.ones(512, 512), diagonal=1).bool()
    ways: Ways = {
        "five lines": partial(_five_lines, q, k, v, mask),
        "einsight": partial(textbook, q, k, v, mask),
    }
    yield Case("dense", f"{_name(shape)} with weights", ways, _useful(shape), memory=True)

    n = 8192
    q, k, v = _tensors((1, 8, n, 64))
    i, j = torch.arange(n)[:, None], torch.arange(n)
    near = (i >= j) & (i - j < 256)
    ways = {
        "SDPA with a mask": partial(sdpa, q, k, v, attn_mask=near),
        "einsight": partial(attention, q, k, v, window(255, 0)),
    }
    if flex:
        ways["flex_attention"] = _flex(q, k, v, lambda b, h, i, j: (i >= j) & (i - j < 256))
    yield Case("window", f"256 of {_name((1, 8, n, 64))}", ways, 8 * 4 * 64 * (256 * n - 256 * 255 / 2), memory=True)
    long = 32768
    q, k, v = _tensors((1, 8, long, 64))
    ways = {"einsight": partial(attention, q, k, v, window(255, 0))}
    yield Case(
        "window", f"256 of {_name((1, 8, long, 64))}", ways, 8 * 4 * 64 * (256 * long - 256 * 255 / 2), memory=True
    )

    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(1, 32, 1, 128).to(dtype)
        k, v = (torch.randn(1, 8, n, 128).to(dtype) for _ in range(2))
        ways = {
            "SDPA": partial(sdpa, q, k, v, enable_gqa=True),
            "einsight": partial(attention, q, k, v),
            "einsight + received": partial(attention, q, k, v, readouts=Received()),
        }
        yield Case("decode", f"32 heads on 8, {n} keys, {str(dtype)[6:]}", ways, 32 * 4 * 128 * n)

    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (t.to(dtype) for t in _tensors(SHAPES[1]))
        ways = {
            "SDPA": partial(sdpa, q, k, v, is_causal=True),
            "einsight": partial(attention, q, k, v, causal()),
            "einsight, float32": partial(attention, *_tensors(SHAPES[1]), causal()),
        }
        yield Case("dtypes", f"{_name(SHAPES[1])} {str(dtype)[6:]}", ways, _useful(SHAPES[1]))

    q, k, v = _tensors(SHAPES[1])
    settings = {
        "softcap": {"softcap": 50.0},
        "sink": {"sink": torch.zeros(8)},
        "alibi": {"bias": alibi(torch.linspace(0.1, 0.8, 8))},
    }
    ways = {"SDPA, causal alone": partial(sdpa, q, k, v, is_causal=True)}
    ways |= {f"einsight, {name}": partial(attention, q, k, v, causal(), **s) for name, s in settings.items()}
    yield Case("biases", _name(SHAPES[1]), ways, _useful(SHAPES[1]))

    q, k, v = _tensors((1, 1, 1, 8))
    ways = {"SDPA": partial(sdpa, q, k, v), "einsight": partial(attention, q, k, v)}
    yield Case("tiny", _name((1, 1, 1, 8)), ways, each=500)


def _step(call: Callable[..., Tensor], *operands: Tensor) -> Callable[[], Any]:
    """A forward and a backward."""
    leaves = [tensor.clone().requires_grad_() for tensor in operands]
    upper = torch.ones_like(operands[2])

    def run() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(call(*leaves), leaves, upper)

    return run


def _five_lines(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(mask, -torch.inf)
    weights = scores.softmax(dim=-1)
    output = torch.einsum("bhij,bhje->bhie", weights, v)
    return output, weights


def _eleven(i: int) -> tuple[Readout, ...]:
    others = TopK(8), Share(window(32, 0)), Mass(torch.arange(i) // 256), Rows(range(i - 16, i))
    return (*READOUTS, *others, Diagonal(-1), Distance(), Pool(64))


def _able(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    problem = pose(q, k, v, causal())
    return [name for name in ("native", "stream") if choose.ENGINES[name].refuses(problem) is None]


def _tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=random) for _ in range(3))
    return q, k, v


def _name(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _useful(shape: Shape) -> float:
    b, h, i, d = shape
    return 4 * b * h * d * i * (i + 1) / 2


def _flex(q: Tensor, k: Tensor, v: Tensor, rule: Callable[..., Tensor]) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(rule, None, None, q.shape[2], k.shape[2], device="cpu")
    return lambda: compiled(q, k, v, block_mask=mask)


def _measure(case: Case, seconds: float, peak: float | None, matmul: float) -> list[Row]:
    failed: dict[str, str] = {}
    for way, run in case.ways.items():
        try:
            run()
        except Exception as error:  # whatever a compiler may raise: the table says so and goes on
            if way != "flex_attention":
                raise
            failed[way] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
    ways = {way: run for way, run in case.ways.items() if way not in failed}
    memory = {way: _memory(run) if case.memory else None for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for way, run in ways.items():
            start = time.perf_counter()
            for _ in range(case.each):
                run()
            times[way].append((time.perf_counter() - start) / case.each)
    medians = {way: statistics.median(t) for way, t in times.items()}
    baseline = next(iter(medians.values()))
    rows = []
    for way, median in medians.items():
        gflops = case.useful / median / 1e9 if case.useful else None
        of_peak = gflops / peak if gflops and peak else None
        of_matmul = gflops / matmul if gflops else None
        rows.append(Row(case.group, case.what, way, median, baseline / median, gflops, of_peak, of_matmul, memory[way]))
    return rows + [Row(case.group, case.what, way, math.nan, math.nan, why_not=why) for way, why in failed.items()]


def _peak() -> float | None:
    """GFLOP/s of nothing but multiply-adds, on all threads."""
    if native.operations.kernel is None:
        return None
    threads, best = torch.get_num_threads(), 0.0
    for _ in range(5):
        start = time.perf_counter()
        operations = native.operations.kernel.peak(20_000_000, threads)
        best = max(best, operations / (time.perf_counter() - start) / 1e9)
    return best


def _matmul(n: int = 4096) -> float:
    """GFLOP/s of a large matrix product."""
    a, b = torch.randn(2, n, n)
    torch.mm(a, b)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times) / 1e9


def _memory(run: Callable[[], Any]) -> int | None:
    """Bytes by which a call raises the process' peak, results included. Linux only."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists() or not reset.exists():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: it keeps what the first run freed, for the next
    if trim is not None:
        trim(0)
    before = _status(status, "VmRSS")
    reset.write_text("5")  # the peak starts again from here
    run()
    return _status(status, "VmHWM") - before


def _status(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _head(peak: float | None, matmul: float, json: bool, out: Any) -> None:
    levels = "not compiled" if native.operations.kernel is None else native.operations.kernel.levels[0]
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "native": levels, "matmul_gflops": matmul}
    facts["peak_gflops"] = peak
    if json:
        print(json_format.dumps(facts), file=out)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, native: {levels}", file=out)
    ceiling = "unknown" if peak is None else f"{peak:.0f} GFLOP/s"
    print(f"multiply-adds alone {ceiling}, large matrix product {matmul:.0f} GFLOP/s\n", file=out)
    print(f"{'':62}{'median':>11}{'ratio':>8}{'GFLOP/s':>9}{'of peak':>9}{'of matmul':>11}{'memory':>9}", file=out)


def _line(row: Row) -> str:
    name = f"{row.group:9}{row.what} · {row.way}"
    if row.why_not:
        return f"{name:62} {row.why_not}"
    median = f"{row.seconds * 1e3:.3f} ms" if row.seconds > 1e-3 else f"{row.seconds * 1e6:.1f} µs"
    cells = [
        "" if row.gflops is None else f"{row.gflops:.0f}",
        "" if row.of_peak is None else f"{row.of_peak:.0%}",
        "" if row.of_matmul is None else f"{row.of_matmul:.0%}",
        "" if row.memory is None else f"{row.memory / 1e6:.0f} MB",
    ]
    return f"{name:62}{median:>11}{row.ratio:>8.2f}{cells[0]:>9}{cells[1]:>9}{cells[2]:>11}{cells[3]:>9}"
