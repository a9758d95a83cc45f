"""`einsight look` beside the plain forward pass: time and peak memory, each in a process of its own.

python benchmarks/look.py [tokens]
"""

import pathlib
import subprocess
import sys
import time

from process import held


def text(tokens: int) -> str:
    from einsight.models import load

    _, tokenizer = load()
    passage = pathlib.Path("examples/passage.txt").read_text()
    ids = tokenizer(passage * (tokens // 100))["input_ids"][:tokens]
    return tokenizer.decode(ids)


def plain(path: str) -> None:
    import torch

    from einsight.models import load

    model, tokenizer = load()
    ids = tokenizer(pathlib.Path(path).read_text(), return_tensors="pt")["input_ids"]
    start = time.perf_counter()
    with torch.inference_mode():
        model(ids)
    report(start)


def look(path: str) -> None:
    from einsight import look as command
    from einsight.models import load

    ready = load()
    command.loaded = lambda name: ready
    start = time.perf_counter()
    command.look(None, pathlib.Path(path), None, "induction", False)
    report(start)


def report(start: float) -> None:
    seconds = time.perf_counter() - start
    print(f"{seconds:.2f} {held('VmHWM'):.0f}", file=sys.stderr)


def main(tokens: int) -> None:
    import statistics
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text"
        path.write_text(text(tokens))
        runs: dict[str, list] = {"plain": [], "look": []}
        for _ in range(3):
            for name in runs:
                command = [sys.executable, __file__, name, str(path)]
                ran = subprocess.run(command, capture_output=True, text=True, check=True)
                runs[name].append([float(n) for n in ran.stderr.split()[-2:]])
    middle = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
    for name, (seconds, megabytes) in middle.items():
        print(f"{name:6} {seconds:6.2f} s  {megabytes:6.0f} MB")
    ratio = [a / b for a, b in zip(middle["look"], middle["plain"], strict=True)]
    print(f"ratio  {ratio[0]:6.2f}    {ratio[1]:6.2f}   at {tokens} tokens")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"plain": plain, "look": look}[sys.argv[1]](sys.argv[2])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
