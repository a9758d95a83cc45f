"""What docs/why.md says is what its script measures; the code in the pages is run in tests/docs."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def why() -> ModuleType:
    pytest.importorskip("safetensors")
    sys.path.insert(0, str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("why", ROOT / "examples" / "why.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def test_the_page_holds_what_the_script_measures(why: ModuleType) -> None:
    page = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    assert why.scale_table()[0] in page
    for name in ("leak", "heads"):
        assert re.search(rf"<!-- {name} -->\n\n\|.*?\|\n\n<!-- end -->", page, re.DOTALL), f"{name} was not measured"


def test_the_other_measurements_at_a_tiny_size(why: ModuleType) -> None:
    tiny = why.replace(why.SMALL, steps=3, batch=2, length=11, width=16, layers=1, warm_up=1)
    learnt, judged = why.text()
    why.text, kept = (lambda: (learnt[:2000], judged[:200])), why.text
    try:
        assert why.leak_table(tiny).count("\n") == 4
        assert why.heads_table(tiny, seeds=2).count("\n") == 4
    finally:
        why.text = kept


def test_the_picture(why: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, found, dims = why.scale_table()
    why.picture(found, dims, tmp_path / "scale.svg")
    assert (tmp_path / "scale.svg").read_text().startswith("<?xml")


def test_a_page_without_a_place(why: ModuleType) -> None:
    assert why.put("a\n<!-- x -->\nold\n<!-- end -->\nb", "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end -->\nb"
    with pytest.raises(SystemExit, match="no place for y"):
        why.put("", "y", "new")
