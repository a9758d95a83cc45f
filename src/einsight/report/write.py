"""The report: one HTML file that opens anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from einsight.lens import Lens
from einsight.report.naming import Named, chosen_grid, named, titles
from einsight.report.pack import packed
from einsight.report.picture import picture
from einsight.report.question import question
from einsight.report.source import Layer, parts
from einsight.report.survey import lengths, survey
from einsight.report.text import Piece, apart, texts
from einsight.values import described

SCRIPTS = ("data", "basics", "state", "grids", "tokens", "patches", "map", "views", "keys", "start")


def html(
    source: Any,
    path: str | os.PathLike[str],
    *,
    tokens: Any = None,
    key_tokens: Any = None,
    image: Any = None,
    grid: tuple[int, int] | None = None,
    hidden_states: Sequence[Tensor] | None = None,
    prompt: int | None = None,
    item: int | None = None,
) -> Path:
    """Write where attention goes as one HTML page that needs no network and nothing beside it.

    Up to 512 tokens the page holds every weight, to 1/254 of its square root; above, for each query and head its
    strongest keys and what they cover, and pooled maps. docs/report.md says what each view means.

    Arguments:
        source: a `Lens`; an `AttentionWeights`; dense weights [b, h, i, j], [h, i, j] or [i, j]; or a tuple of them,
            as Hugging Face's `attentions`. With a lens that kept values (`Lens(model, values=True)`) the page
            also shows weights × values.
        path: the file to write; one that is there is replaced.
        tokens: the text's tokens as strings, in the tokenizer's spelling (`tokenizer.convert_ids_to_tokens(ids)`)
            or decoded, or a fast tokenizer's output. Those of the queries, where the keys are another text.
        key_tokens: the tokens of the keys, where they are another text: cross-attention.
        image: the picture that the keys are patches of: a path, a PIL image or an array.
        grid: how many (rows, columns) of patches it has; a square by default. The patches are the last keys, or a run
            of so many equal tokens, such as `<image>`.
        hidden_states: [b, i, m] for each layer, as `output_hidden_states=True` gives them: then what heads write
            is told in percent of the residual stream.
        prompt: how many of the tokens were the prompt's, where the rest was generated.
        item: which sequence of a batch; needed where there are several.

    Returns:
        The path of the page.

    Raises:
        ValueError, TypeError: a source, tokens or a grid that are none or don't fit.
        LookupError: a lens that saw nothing or kept only results.
        OSError: a path that can't be written to.

    Example:
        >>> import einsight as es, tempfile, torch
        >>> from einsight import report
        >>> q, k = torch.randn(2, 1, 2, 5, 4)
        >>> W = es.AttentionWeights(q, k, es.causal())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.html(W, f"{folder}/report.html", tokens="to be or not to".split()).name
        'report.html'
    """
    path = checked(path)
    page = _template()
    made = gathered(source, tokens, key_tokens, image, grid, hidden_states, item)
    if prompt is not None:
        _check_prompt(prompt, made)
    fitting = None if image is None and grid is None else chosen_grid(grid, image, [one.part for one in made])
    drawn = None if fitting is None or image is None else picture(image, fitting)._asdict()
    blocks: list[list[str]] = []
    about = []
    with progress(sum(len(one.part.layers) for one in made)) as step, torch.inference_mode():
        for one in made:
            header, data = _part(one, step, fitting)
            about.append(header | {"prompt": None if one.part.encoder else prompt})
            blocks.append(data)
    title = _title(source)
    header = {"model": title, "parts": about, "picture": drawn}
    text = _rendered(page, title, header, blocks)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _check_prompt(prompt: Any, made: Sequence[Named]) -> None:
    longest = max(len(one.queries) for one in made)
    if isinstance(prompt, bool) or not isinstance(prompt, int) or not 1 <= prompt <= longest:
        raise ValueError(f"prompt must be how many of the {longest} tokens the prompt has, not {prompt!r}")


def checked(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be written there; asked before any work."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the name of a file to write, not {described(path)}")
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"path: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PermissionError(f"path: {path} can't be written to")
    return path


def gathered(
    source: Any,
    tokens: Any,
    key_tokens: Any,
    image: Any,
    grid: Any,
    hidden_states: Sequence[Tensor] | None,
    item: int | None,
) -> list[Named]:
    """The source's parts with their names; every refusal of the arguments comes from here."""

    def one_text(i: int, j: int) -> bool:
        if key_tokens is not None or i > j:
            return False
        if i == j:
            return True
        # The last queries of a text, after a cache; or a text that looks at another thing.
        if tokens is None:
            return image is None and grid is None
        return len(texts(tokens, "tokens", item or 0)) in (j, j + 1)

    found = parts(source, one_text=one_text, item=item, hidden_states=hidden_states)
    fitting = chosen_grid(grid, image, found)
    made = named(found, tokens, key_tokens, item or 0, fitting)
    titles(made)
    return made


def _part(one: Named, step: Any, grid: tuple[int, int] | None) -> tuple[dict[str, Any], list[str]]:
    """A part's header and the data of its layers."""
    part, asked = one.part, question(one)
    with ThreadPoolExecutor(2) as pool:
        found = []
        for layer in part.layers:
            weights = layer.weights()
            seen = survey(weights, asked)
            if layer.value is not None:
                seen.arrays |= {
                    n: t.cpu() for n, t in lengths(weights, layer.value, layer.matrix, layer.stream).items()
                }
            # Deflating lets other threads run, so that it costs next to nothing beside the next layer's readouts.
            found.append((layer, replace(seen, arrays={}), pool.submit(packed, seen.arrays)))
            step()
        done = [(layer, seen, job.result()) for layer, seen, job in found]
    kept = {"value", "write", "stream"}
    for _, _, store in done:
        kept &= store.places.keys()
    statistics, without = (
        {name: [[round(value, 6) for value in found[name]] for found in table] for name in asked.statistics}
        for table in ([seen.statistics for _, seen, _ in done], [seen.without_first for _, seen, _ in done])
    )
    header = {
        "name": one.name,
        "i": part.i,
        "j": part.j,
        "cross": part.cross,
        "offset": part.offset,
        "first": asked.first,
        "whole": asked.whole,
        "block": asked.block,
        "strongest": asked.strongest,
        "queries": _spelled(one.queries) if part.cross else None,
        "keys": _spelled(one.keys),
        "named": one.spelled,
        "patches": None if one.patches is None or grid is None else _patches(one.patches, grid),
        "targets": None if asked.targets is None else asked.targets.tolist(),
        "padded": None if bool(asked.real.all()) else (~asked.real).nonzero().flatten().tolist(),
        "kept": sorted(kept),
        "gaps": any(seen.gaps for _, seen, _ in done),
        "statistics": statistics,
        "without_first": without,
        "layers": [_layer(layer, store.places) for layer, _, store in done],
    }
    return header, [store.data for _, _, store in done]


def _layer(layer: Layer, index: dict[str, Any]) -> dict[str, Any]:
    return {"number": layer.number, "name": layer.name, "heads": layer.heads, "index": index}


def _patches(start: int, grid: tuple[int, int]) -> dict[str, int]:
    return {"start": start, "rows": grid[0], "columns": grid[1]}


def _spelled(pieces: Sequence[Piece]) -> dict[str, Any]:
    cut = {n: [piece.part, piece.of] for n, piece in enumerate(pieces) if piece.of > 1}
    return {"text": [piece.text for piece in pieces], "cut": cut, "apart": apart(pieces)}


def _title(source: Any) -> str:
    if not isinstance(source, Lens):
        return ""
    name = getattr(getattr(source.model, "config", None), "_name_or_path", "")
    return Path(name).name if isinstance(name, str) and name else type(source.model).__name__


def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError('the report needs jinja2: pip install "einsight[look]"') from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_source("page.html.j2"))


def _rendered(page: Any, title: str, header: dict[str, Any], blocks: list[list[str]]) -> str:
    style = _source("page.css")
    script = '"use strict";\n' + "\n".join(_source(f"{name}.js") for name in SCRIPTS)
    # In a script element only "<" can end it or begin a comment.
    data = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.render(
        title=title,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=data,
        blocks=blocks,
    )


def _source(name: str) -> str:
    return (files("einsight.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@contextmanager
def progress(layers: int) -> Generator[Any, None, None]:
    """A line on standard error while layers are read, where somebody sees it."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("writing the report", total=layers)
        yield lambda: bar.advance(task)
