"""What Triton's compiler makes of every kernel that the engine launches, without a GPU: a table of registers, spills,
shared memory and matrix instructions, for each architecture, head dimension and dtype.

python benchmarks/gpu_compile.py [sm_80 sm_90 sm_100] [--few | --one]

The engine itself runs, on tensors of this machine; a launch compiles instead. So what is compiled is what a GPU would
be given. Exits with 1 if a kernel spills, takes more shared memory than there is, or doesn't use the matrix unit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import einsight as es
from einsight.engines.triton import launch as launching
from einsight.engines.triton import running, trust
from einsight.pose import pose

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may have
MATRIX = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Line:
    """One kernel as it was compiled."""

    arch: int
    case: str
    kernel: str
    tile: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    matrix: str  # the instructions that multiply matrices, "" where there are none

    def fault(self) -> str | None:
        if self.spilled:
            return f"spills {self.spilled} bytes"
        if self.shared > SHARED[self.arch]:
            return f"takes {self.shared} bytes of shared memory, of {SHARED[self.arch]}"
        # Tiles with fewer than 64 rows use the older instruction.
        return None if self.matrix or "float32" in self.case else "has no matrix instructions"

    def __str__(self) -> str:
        kib = f"{self.shared / 1024:.0f} KiB"
        row = (
            f"sm_{self.arch:<4}{self.case:15}{self.kernel:21}{self.tile:16}{self.registers:>4}{self.spilled:>7}{kib:>9}"
        )
        return f"{row}  {self.matrix or '-':12}{self.fault() or ''}"


class _Driver:
    """Stands for a GPU of an architecture, as far as compiling asks for one."""

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # a number of its own: what is compiled is kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


READOUTS: list[list[es.Readout]] = [
    [es.LogSumExp(), es.MaxScore(), es.Entropy()],
    [es.Received(), es.Rows([3]), es.Share(~es.window(3, 0)), es.Mass(torch.zeros(256, dtype=torch.int64), 2)],
    [es.Pool(64), es.Share(es.window(3, 0)), es.Distance()],
]


def compiled(arch: int, case: str, d: int, dtype: torch.dtype) -> Iterator[Line]:
    """The kernels that three calls launch, one of them with its backward."""
    made: list[Line] = []

    def compile_instead(kernel: Any, programs: int, device: Any, size: Any, *arguments: Any, **constants: Any) -> None:
        found = kernel.warmup(*arguments, **constants, grid=(1,), num_warps=size.warps, num_stages=size.stages)
        line = _line(arch, case, kernel, size, constants, found)
        if line not in made:
            made.append(line)

    triton.runtime.driver.set_active(_Driver(arch))
    trust.trusted.add(torch.device("cpu"))
    launching.architecture = lambda device: arch
    for module in modules():
        module.launch = compile_instead  # type: ignore[attr-defined]
    for asked in READOUTS:
        query = torch.zeros(1, 4, 256, d, dtype=dtype, requires_grad=asked is READOUTS[0])
        key, value = torch.zeros(2, 1, 2, 256, d, dtype=dtype)
        key.requires_grad_(query.requires_grad)
        problem = pose(query, key, value, es.causal(), readouts=tuple(asked))
        output, results = running.run(problem)
        if query.requires_grad:
            sum((x.float().sum() for x in results), output.float().sum()).backward()  # type: ignore[union-attr]
        yield from made
        made.clear()


def modules() -> list[Any]:
    return [m for n, m in sys.modules.items() if n.startswith("einsight.engines.triton.") and hasattr(m, "launch")]


def _line(arch: int, case: str, kernel: Any, size: Any, constants: dict[str, Any], found: Any) -> Line:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    numbers = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    ptx = found.asm["ptx"]
    matrix = next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), "")
    name = kernel.fn.__name__ + (" (mend)" if constants.get("MEND") else "")
    tile = f"{size.rows}x{size.keys} {size.warps}w {size.stages}s"
    return Line(
        arch, case, name, tile, numbers["REG"], numbers["STACK"] + numbers["LOCAL"], found.metadata.shared, matrix
    )


def cases() -> Iterator[tuple[str, int, torch.dtype]]:
    """Every dtype and padded head dimension; with --few one of the half precisions, with --one a single case."""
    few, one = "--few" in sys.argv, "--one" in sys.argv
    for dtype in (torch.bfloat16, torch.float32) if few or one else (torch.bfloat16, torch.float16, torch.float32):
        for d in (64, 128, 256):
            if not one or (d, dtype) == (128, torch.bfloat16):
                yield f"{str(dtype).removeprefix('torch.')} d={d}", d, dtype


def main() -> None:
    wanted = [int(x.removeprefix("sm_")) for x in sys.argv[1:] if x.startswith("sm_")] or list(SHARED)
    print(f"{'':7}{'':15}{'kernel':21}{'tile':16}{'regs':>4}{'spills':>7}{'shared':>9}")
    faults = 0
    for arch in wanted:
        for case, d, dtype in cases():
            for line in compiled(arch, case, d, dtype):
                print(line, flush=True)
                faults += line.fault() is not None
    print(f"{faults} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
