"""The command `einsight`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: `einsight look …`."""
    try:
        from einsight.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f'einsight: {error.name} is not installed: pip install "einsight[look]"', file=sys.stderr)
        raise SystemExit(2) from None
    app()
