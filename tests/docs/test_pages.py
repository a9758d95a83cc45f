"""Every block of Python in the README and the documentation runs, and prints what the page says that it prints."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from einsight import models

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(<!-- not run: .+? -->\n)?^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?")


def fences(page: Path) -> list[re.Match[str]]:
    return list(FENCE.finditer(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smol: Any) -> None:
    """In order, in one namespace; a block of text that follows one of Python is what that prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda: copy.deepcopy(smol))  # read once for all
    module = ModuleType("page")  # compilers look names up in it
    monkeypatch.setitem(sys.modules, "page", module)
    text, printed = page.read_text(encoding="utf-8"), ""
    for fence in fences(page):
        not_run, language, code = fence.groups()
        if language == "python" and not not_run:
            shown = io.StringIO()
            line = text[: fence.start(3)].count("\n")
            with contextlib.redirect_stdout(shown):
                exec(compile("\n" * line + code, str(page), "exec"), vars(module))
            printed = shown.getvalue()
        elif language == "text" and printed:
            alike(printed, code)
            printed = ""


def alike(printed: str, said: str) -> None:
    """Equal but for the last digits of numbers, which differ between processors."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", said).split(), printed
    found, expected = ([float(n) for n in NUMBER.findall(text)] for text in (printed, said))
    assert found == pytest.approx(expected, rel=0.02, abs=1e-3), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fences_say_what_they_hold(page: Path) -> None:
    """Without a language a block would be neither run nor looked at."""
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(fences(page))
    known = {"python", "text", "bash", "pycon"}
    assert {fence[2] for fence in fences(page)} <= known


def test_what_is_printed_is_compared() -> None:
    alike("tensor([0.1234])\n", "tensor([0.1235])\n")
    with pytest.raises(AssertionError):
        alike("tensor([0.12])\n", "tensor([0.19])\n")
    with pytest.raises(AssertionError):
        alike("True\n", "False\n")


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "site" / "api" / "functions.html").exists()
