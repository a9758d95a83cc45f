"""What is imported with the package, and what only when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import einsight as es

SCRIPT = """
import sys, torch
before = set(sys.modules)
import einsight as es
assert not {name.split(".")[1] for name in sys.modules if name.startswith("einsight.")} & {"lens", "models", "report"}
assert es.lens.Lens and es.models.load and es.report.html
third = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert third <= {"einsight", "einops", "jaxtyping", "numpy", "torch", "wadler_lindig", "typing_extensions"}, third
assert "torch._dynamo" not in sys.modules  # a second
"""


def test_what_stands_on_the_engine_is_imported_when_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'einsight' has no attribute 'colour'"):
        es.colour  # noqa: B018
