"""Where a language model's heads look in a text: the work behind `einsight look`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from einsight.lens import Call, Heads, Lens

STATISTICS = {
    "entropy": "entropy of the weights, in nats",
    "first": "weight on the first token",
    "previous": "weight on the previous token",
    "induction": "weight on what followed an earlier copy of the token",
    "distance": "mean distance looked across, in tokens",
}
KINDS = {
    "induction": "heads that look at what followed an earlier copy of the token",
    "duplicate": "heads that look at an earlier copy of the token",
    "previous": "heads that look at the token before",
    "first": "heads that look at the first token",
    "distance": "heads that look far away, though not at the first token",
}


def look(
    text: str | None, file: Path | None, model: str | None, by: str, truncate: bool, html: Path | None = None
) -> None:
    """Run a model over a text and print where its heads look; with `html`, write the report there as well."""
    if by not in STATISTICS:
        refuse(f"--by {by}: expected one of {', '.join(STATISTICS)}")
    if html is not None:
        writable(html)
    text = read(text, file)
    console = Console()
    with progress() as bar:
        task = bar.add_task("loading the model", total=None)
        net, tokenizer = loaded(model)
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        ids = fitted(ids, context(net, tokenizer), truncate)
        layers = getattr(net.config.get_text_config(), "num_hidden_layers", None)
        bar.update(task, description=f"running it over {ids.shape[1]} tokens", total=layers)
        kept = html is not None  # the report also tells what heads write, in percent of the residual stream
        with torch.inference_mode(), Lens(net, values=kept, on_call=lambda call: bar.advance(task)) as lens:
            # Without the language-model head: nobody asks for the next token.
            output = net.base_model(input_ids=ids, use_cache=False, output_hidden_states=kept)
        bar.update(task, description="reading its heads", total=None)
        with torch.inference_mode():
            heads = lens.heads(ids, tokenizer)
            bar.update(task, description="finding what they connect")
            found = {kind: striking(heads, kind, lens, ids) for kind in KINDS}
    tokens = [tokenizer.decode([token]) for token in ids[0].tolist()]
    show(console, net, heads, by, found, tokens)
    if html is not None:
        report(console, html, lens, tokenizer.convert_ids_to_tokens(ids[0].tolist()), output)


def writable(path: Path) -> None:
    from einsight.report.write import checked

    try:
        checked(path)
    except OSError as error:
        refuse(f"--html {path}: {str(error).removeprefix('path: ')}")


def report(console: Console, path: Path, lens: Lens, tokens: list[str], output: Any) -> None:
    from einsight.report import html

    states = getattr(output, "hidden_states", None)
    if states is None or len(states) != len(lens) + 1:
        states = None  # not every layer has attention, so that theirs can't be told
    try:
        html(lens, path, tokens=tokens, hidden_states=states)
    except OSError as error:
        refuse(f"--html {path}: {error.strerror or error}")
    console.print(f"\n[bold]report[/]: {path.resolve()} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def read(text: str | None, file: Path | None) -> str:
    """The text, from wherever it was given."""
    if text is not None and file is not None:
        refuse("give a text or --file, not both")
    if text is None:
        text = from_file(file) if file is not None else from_standard_input()
    if not text.strip():
        refuse("the text is empty")
    return text


def from_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        refuse(f"--file {file}: no such file")
    except OSError as error:
        refuse(f"--file {file}: {error.strerror}")
    except UnicodeDecodeError:
        refuse(f"--file {file}: not a text in UTF-8")


def from_standard_input() -> str:
    if sys.stdin.isatty():
        refuse('no text: give it as an argument, with --file PATH, or on standard input; einsight look "some text"')
    return sys.stdin.read()


def loaded(name: str | None) -> tuple[Any, Any]:
    from einsight.models import load

    try:
        return load(name)
    except (ImportError, OSError, ValueError) as error:
        refuse(" ".join(str(error).split()))


def context(net: Any, tokenizer: Any) -> int | None:
    """How many tokens the model can take at once, as far as it says."""
    limit = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    # A tokenizer without a limit says something like 10^30.
    return limit or (tokenizer.model_max_length if tokenizer.model_max_length < 10**9 else None)


def fitted(ids: torch.Tensor, limit: int | None, truncate: bool) -> torch.Tensor:
    if ids.shape[1] == 0:
        refuse("the text has no tokens for this model")
    if limit is not None and ids.shape[1] > limit:
        if not truncate:
            refuse(f"the text has {ids.shape[1]} tokens, but the model's context holds {limit}; --truncate cuts it")
        ids = ids[:, :limit]
    return ids


def striking(heads: Heads, kind: str, lens: Lens, ids: torch.Tensor) -> list[tuple[int, int, float, list[Any]]]:
    """The three strongest heads of a kind: layer, head, value, and the pairs of tokens they connect most."""
    told = [row for row in heads.sort(kind) if row[kind] == row[kind]]
    if kind == "distance":
        told = [row for row in told if row["first"] < 0.5]  # the first token is far away, but a kind of its own
    return [
        (row["layer"], row["head"], row[kind], connected(lens[row["layer"]], row["head"], kind, ids[0]))
        for row in told[:3]
    ]


def connected(call: Call, head: int, kind: str, ids: torch.Tensor, count: int = 3) -> list[tuple[int, int, float]]:
    """The strongest (query, key, weight) of a head that are of a kind, each pair of tokens once."""
    top = call.weights.select(batch=[0], heads=[head]).topk(1)
    weights, keys = top.weights.flatten(), top.indices.flatten()
    queries = torch.arange(len(keys))
    of_kind = {
        "first": (keys == 0) & (queries > 0),
        "previous": keys == queries - 1,
        "duplicate": (ids[keys] == ids) & (keys < queries),
        "induction": (keys > 0) & (ids[keys - 1] == ids) & (keys <= queries),
        "distance": keys < queries,
    }[kind]
    # Where a head looks far away, the farthest matter as much as the strongest.
    rank = weights * (queries - keys) if kind == "distance" else weights
    found: dict[tuple[int, int], tuple[int, int, float]] = {}
    for n in rank.where(of_kind, -1).argsort(descending=True).tolist():
        if not of_kind[n] or len(found) == count:
            break
        key = int(keys[n])
        found.setdefault((int(ids[n]), int(ids[key])), (n, key, float(weights[n])))
    return list(found.values())


def show(console: Console, net: Any, heads: Heads, by: str, found: dict[str, Any], tokens: list[str]) -> None:
    from einsight.report import terminal

    values = heads.grid(by)
    console.print(f"[bold]{len(tokens)} tokens, {values.shape[0]} layers of {values.shape[1]} heads[/]")
    console.print(f"\n[bold]{by}[/]: {STATISTICS[by]}\n")
    console.print(terminal.grid(values, console.width))
    for kind, rows in found.items():
        unit = " tokens" if kind == "distance" else ""
        console.print(f"\n[bold]{kind}[/]: {KINDS[kind]}")
        if not rows:
            console.print("  none: no token occurs twice", style="dim")
        for layer, head, value, pairs in rows:
            line = Text(f"  layer {layer:>2} head {head:>2}  {value:.2f}{unit}   ")
            console.print(line + terminal.connections(pairs, tokens), soft_wrap=True)


@contextlib.contextmanager
def progress() -> Generator[Progress, None, None]:
    """A line on standard error that says what is going on, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def refuse(message: str) -> NoReturn:
    print(f"einsight look: {message}", file=sys.stderr)
    raise typer.Exit(2)
