"""The native engine's targets: figures asked beside figures measured, in one run.

python benchmarks/native.py
"""

from __future__ import annotations

import math
import os
import statistics
import sys

from einsight.bench import Row, bench


def main() -> None:
    with open(os.devnull, "w") as nowhere:
        rows = bench(flex="--flex" in sys.argv, out=nowhere)

    def ours(group: str, what: str = "", way: str = "einsight") -> list[Row]:
        return [r for r in rows if r.group == group and what in r.what and r.way in (way, f"{way} native")]

    def mean(found: list[Row]) -> float:
        return math.exp(statistics.fmean(math.log(r.ratio) for r in found))

    forward, readouts = ours("forward"), ours("readouts")
    dense = ours("dense")[0]
    weights = 32 * 8 * 512 * 512 * 4
    tiny, sdpa = ours("tiny")[0], ours("tiny", way="SDPA")[0]
    near, far = ours("window")
    long = [r for r in forward if "4096" in r.what]
    asked = [
        ("1 output alone, geometric mean of ratios to SDPA", ">= 1.5", f"{mean(forward):.2f}"),
        ("  no shape below", ">= 0.97", f"{min(r.ratio for r in forward):.2f}"),
        ("2 with lse, max, entropy, received: geometric mean", ">= 1.0", f"{mean(readouts):.2f}"),
        ("  no shape below", "", f"{min(r.ratio for r in readouts):.2f}"),
        ("3 textbook function with weights, to the five lines", ">= 4", f"{dense.ratio:.2f}"),
    ]
    if dense.memory is not None:
        output = 32 * 8 * 512 * 64 * 4
        asked.append(
            ("  peak memory without the output / weights", "<= 1.1", f"{(dense.memory - output) / weights:.2f}")
        )
    asked += [
        ("4 window of 256 in 8,192", ">= 30", f"{near.ratio:.1f}"),
        ("  time of four times the length", "about 4", f"{far.seconds / near.seconds:.2f}"),
        ("5 decoding, 8,192 keys", ">= 4", f"{ours('decode', 'float32')[0].ratio:.2f}"),
        ("6 bfloat16", "> 1", f"{ours('dtypes', 'bfloat16')[0].ratio:.2f}"),
        ("7 tiny call, microseconds more than SDPA", "<= 30", f"{(tiny.seconds - sdpa.seconds) * 1e6:.1f}"),
    ]
    masked = ours("masks")
    asked += [
        ("9 output + all eleven row and key readouts, of SDPA's time", "<= 1.6", f"{1 / ours('eleven')[0].ratio:.2f}"),
        *((f"10 {row.what}", ">= 1.3", f"{row.ratio:.2f}") for row in masked[:-1]),
        (f"   {masked[-1].what}", ">= 12", f"{masked[-1].ratio:.1f}"),
    ]
    training, whole = ours("training")[:-1], ours("training")[-1]
    asked += [
        ("11 forward + backward, geometric mean", ">= 1.5", f"{mean(training):.2f}"),
        ("   no shape below", ">= 1.0", f"{min(r.ratio for r in training):.2f}"),
        ("   with entropy and max score", "", f"{mean(ours('training', way='einsight + entropy, max')):.2f}"),
        (f"   peak of {whole.what}, MB", "", f"{(whole.memory or 0) / 1e6:.0f}"),
    ]
    narrow, wide = ours("dtypes", "bfloat16")[0], ours("dtypes", "bfloat16", way="einsight, float32")[0]
    asked.append(("12 bfloat16, to our float32", ">= 1.5", f"{wide.seconds / narrow.seconds:.2f}"))
    for row in long:
        asked.append((f"8 {row.what}, of the multiply-add peak", ">= 85 %", f"{row.of_peak or math.nan:.0%}"))
        asked.append((f"  {row.what}, of a large matrix product", ">= 100 %", f"{row.of_matmul or math.nan:.0%}"))
    for name, wanted, measured in asked:
        print(f"{name:62}{wanted:>10}{measured:>10}")


if __name__ == "__main__":
    main()
