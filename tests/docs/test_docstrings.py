"""Every public name says what it is, takes, gives and raises, where its formula is from, and shows an example."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MODULES = ("einsight", "einsight.nn", "einsight.lens", "einsight.report", "einsight.lens.huggingface")
SHAPE = re.compile(r"\[[^\]]*\b[bhgijmn]\b[^\]]*\]")
SOURCE = re.compile(r"\((?:[^()]*; )?[A-Z][^()]*\d{4}[^()]*\)|arXiv:\d{4}\.\d{5}|Flash-decoding|GPT-|T5")
# What has a formula that somebody published.
FORMULAS = {
    "attention",
    "merge",
    "alibi",
    "relative",
    "MaxScore",
    "Received",
    "MultiHeadAttention",
    "RotaryEmbedding",
    "Llama3Scaling",
    "SinusoidalPositions",
    "FeedForward",
    "TransformerBlock",
    "LearnedPositions",
    "Edit",
    "Monitor",
    "qk_clip",
    "pairs",
}


def public() -> Iterator[Any]:
    for name in MODULES:
        module = importlib.import_module(name)
        for each in module.__all__:
            if not inspect.ismodule(getattr(module, each)):
                yield pytest.param(getattr(module, each), id=f"{name}.{each}")


def written(thing: Any) -> str:
    """The docstring itself, not one inherited or made by dataclass."""
    return inspect.cleandoc(thing.__doc__ or "")


def methods(thing: Any) -> dict[str, Any]:
    """The public methods and properties of a class that is ours, as functions."""
    found = {}
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            found[name] = function
    return found


def parameters(thing: Any) -> list[str]:
    ignored = ("self", "args", "kwargs", "unknown", "settings")
    return [name for name in inspect.signature(thing).parameters if name not in ignored and not name.startswith("_")]


@pytest.mark.parametrize("thing", list(public()))
class TestDocstring:
    def test_defines(self, thing: Any) -> None:
        first = written(thing).split("\n\n")[0]
        assert first and first.rstrip().endswith((".", ":")), first
        assert "dataclass" not in first and not first.startswith(f"{thing.__name__}(")

    def test_names_its_arguments(self, thing: Any) -> None:
        text = written(thing)
        missing = [name for name in parameters(thing) if not re.search(rf"\b{name}\b", text)]
        assert not missing, f"{thing.__name__} says nothing of {missing}"

    def test_shows_an_example_that_runs(self, thing: Any) -> None:
        examples = doctest.DocTestParser().get_examples(written(thing))
        assert any(example.want for example in examples), f"{thing.__name__} has no example that shows a result"

    def test_says_what_is_raised(self, thing: Any) -> None:
        if takes(thing):
            assert re.search(r"\bRaises\b", written(thing)), f"{thing.__name__} doesn't say what it raises"

    def test_names_the_source_of_its_formula(self, thing: Any) -> None:
        if thing.__name__ in FORMULAS:
            assert SOURCE.search(written(thing)), f"{thing.__name__} names no source"

    def test_has_shapes(self, thing: Any) -> None:
        if any("Tensor" in str(p.annotation) for p in inspect.signature(thing).parameters.values()):
            assert SHAPE.search(written(thing)), f"{thing.__name__} gives no shape"

    def test_its_methods_are_defined(self, thing: Any) -> None:
        bare = [name for name, function in methods(thing).items() if not function.__doc__ and name != "extra_repr"]
        alone = [name for name in bare if not inspect.getdoc(getattr(thing, name))]
        assert not alone, f"{thing.__name__}: {alone} say nothing"

    def test_is_in_the_reference(self, thing: Any, request: pytest.FixtureRequest) -> None:
        pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
        name = request.node.callspec.id
        assert f"::: {name}\n" in pages + "\n", f"docs/api doesn't have {name}"


def takes(thing: Any) -> bool:
    """Whether it can be given something wrong: by arguments, in code of ours."""
    made = thing.__init__ if inspect.isclass(thing) else thing
    if is_dataclass(thing) or not inspect.isfunction(made):
        return False
    return bool(parameters(thing)) and "raise " in inspect.getsource(made)
