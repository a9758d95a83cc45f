"""The subcommands of `einsight`, and what they take."""

from __future__ import annotations

from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _tell_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"einsight {installed('einsight')}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Attention as pure linear algebra: see where a model looks."""


@app.command()
def look(
    text: Annotated[str | None, typer.Argument(help="The text; without it and --file, standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file to read the text from.")] = None,
    model: Annotated[str | None, typer.Option(help="A model folder or Hugging Face id. Default: SmolLM2-135M.")] = None,
    by: Annotated[str, typer.Option(help="entropy, first, previous, induction or distance.")] = "induction",
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is longer than the context.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report to look around in, one HTML file.")] = None,
) -> None:
    """Run a language model over a text and tell where its heads look."""
    from einsight.look import look

    look(text, file, model, by, truncate, html)


@app.command()
def bench(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="forward, readouts, dense, window, decode, dtypes, biases, tiny; all without."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per row in place of the table.")] = False,
) -> None:
    """Time the engines beside PyTorch's own, in one run."""
    from einsight.bench import GROUPS, bench

    unknown = [group for group in groups or () if group not in GROUPS]
    if unknown:
        typer.echo(f"einsight bench: no group {unknown[0]!r}; there are {', '.join(GROUPS)}", err=True)
        raise typer.Exit(2)
    bench(groups or None, json=json)


@app.command()
def check(
    json: Annotated[bool, typer.Option("--json", help="One JSON object per row in place of the table.")] = False,
) -> None:
    """Compare every engine on this machine with the float64 reference; exit code 1 if an error is over its budget."""
    from einsight.check import check

    if any(row.ratio > 1 for row in check(json=json)):
        raise typer.Exit(1)
