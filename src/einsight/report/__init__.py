"""Pictures of attention: a page to look around in, a PNG, and the terminal."""

from einsight.report.drawing import png
from einsight.report.write import html

__all__ = ["html", "png"]
