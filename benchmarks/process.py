"""What the other scripts here ask of their process."""

from __future__ import annotations

import re
from pathlib import Path


def held(name: str) -> float:
    """The megabytes that this process holds (VmRSS), or has held at most (VmHWM), as Linux tells.

    Not getrusage's ru_maxrss, in which a process begins with what the one that started it held.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]
