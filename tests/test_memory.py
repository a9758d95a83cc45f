"""Memory is linear: what a call holds beyond its arguments and results, measured in a fresh process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from einsight.room import memory_of, too_large

MEASURE = Path(__file__).parents[1] / "benchmarks" / "memory.py"


# A window, since the whole takes minutes on small machines; `benchmarks/memory.py` measures that.
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("tokens", "mask"), [(32_768, "window"), (8_192, "none")])
def test_a_call_holds_a_few_blocks(tokens: int, mask: str) -> None:
    said = subprocess.run(
        [sys.executable, MEASURE, str(tokens), mask], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    megabytes = float(re.match(r"(-?[\d.]+) MB", said)[1])  # type: ignore[index]
    assert megabytes < 100, said


def test_where_the_size_of_memory_is_not_known_nothing_is_too_large() -> None:
    meta = torch.device("meta")
    assert memory_of(meta) is None and too_large(1 << 60, meta) is None
