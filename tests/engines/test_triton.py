"""The Triton engine without a GPU: its kernels' values under the interpreter, and what the compiler makes of them. Each
in a process of its own, since Triton decides when it is imported which of the two it is."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checks import draw

import einsight as es
from einsight.engines import torch_flash, triton
from einsight.engines.rules import Rule
from einsight.engines.triton.lowered import ends
from einsight.pose import pose

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize(
    "files",
    [["tests/engines/interpreted.py"], ["tests/test_readouts.py"], ["tests/test_laws.py", "tests/test_generated.py"]],
    ids=["own", "readouts", "generated"],
)
def test_values_under_the_interpreter(files: list[str]) -> None:
    # What is selected away afterwards may be −∞ · 0 before, of which numpy warns.
    quiet = ["-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"]
    examples = os.environ.get("EXAMPLES", "3")
    done = run(["-m", "pytest", "-q", *quiet, *files], TRITON_INTERPRET="1", EXAMPLES=examples)
    assert done.returncode == 0, done.stdout[-6000:]


@needs_triton
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_and_spill_nothing(arch: str) -> None:
    done = run(["benchmarks/gpu_compile.py", arch, "--one"])
    assert done.returncode == 0 and "0 faults" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    done = run(["benchmarks/gpu.py"])
    assert done.returncode == 1 and done.stderr.startswith("PyTorch sees no GPU here; the correctness alone")


def test_bounds_as_numbers_are_those_of_the_window() -> None:
    i, j, offset = 5, 7, 3
    problem = pose(*(draw(1, 1, n, 4) for n in (i, j, j)), es.window(4, 1), offset=offset)
    lo, hi = ends(Rule(offset - 4, offset + 2), i, j)
    assert torch.equal(lo, problem.bounds.lo) and torch.equal(hi, problem.bounds.hi)


def test_it_is_for_gpus() -> None:
    q, k, v = (draw(1, 1, 3, 4, seed=n) for n in range(3))
    problem = pose(q, k, v, readouts=(es.Received(),))
    why = "it runs on GPUs, and the tensors are on cpu; write query.cuda()"
    assert triton.refuses(problem) == torch_flash.refuses(problem) == why
    with pytest.raises(ValueError, match="engine='triton' can't compute this: it runs on GPUs"):
        es.attention(q, k, v, engine="triton")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    q, k, v = (draw(1, 1, 3, 4, seed=n) for n in range(3))
    assert triton.refuses(pose(q, k, v)) == "Triton is not installed: pip install triton"
    with torch.no_grad():
        assert es.attention(q, k, v, readouts=es.Entropy())[1].shape == (1, 1, 3)
