"""Docstrings as Markdown: their sections as lists, and their examples as code. Used by mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"(Arguments|Returns|Raises|Example):$")
ITEM = re.compile(r"    (\w[\w, ]*): (.*)")


class Markdown(Extension):
    """Rewrites each docstring when it has been read from the source."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    lines: list[str] = []
    section, example = "", False
    for line in text.splitlines():
        if example and not line.strip():
            lines.append("```")
            example = False
        if found := SECTION.match(line):
            section = found[1]
            lines += ["", f"**{section}**" if section != "Example" else "", ""]
            continue
        if section and line and not line.startswith(" "):
            section = ""
        if line.lstrip().startswith(">>>") and not example:
            lines += ["", "```pycon"]
            example = True
        if section in ("Arguments", "Raises") and (found := ITEM.match(line)):
            names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
            line = f"- {names}: {found[2]}"
        elif section:
            line = line.removeprefix("    ")
            if section in ("Arguments", "Raises") and line:
                line = f"  {line.strip()}"
        lines.append(line)
    return "\n".join([*lines, "```"] if example else lines)
