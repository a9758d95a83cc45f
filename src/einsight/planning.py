"""How a call would be computed, without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from einsight.engines import choose
from einsight.functional import refuse_unknown, unpack
from einsight.pose import pose


@dataclass(frozen=True)
class Plan:
    """Which engine computes a call and why not another; what it visits and holds."""

    engine: str
    refusals: dict[str, str]  # the engines passed over, and why
    visits: int  # pairs of query and key that are computed
    pairs: int  # b · h · i · j
    holds: int | None  # bytes beside arguments and results; None where only PyTorch knows
    makes: str  # what the engine does

    def __str__(self) -> str:
        part = f" of {self.pairs:,} ({self.visits / self.pairs:.1%})" if self.pairs else ""
        held = "what PyTorch's kernel needs" if self.holds is None else f"about {_size(self.holds)}"
        lines = [
            f"engine  {self.engine}: {self.makes}",
            *(f"not     {name}: {why}" for name, why in self.refusals.items()),
            f"visits  {self.visits:,} pairs of query and key{part}",
            f"holds   {held} beside arguments and results",
        ]
        return "\n".join(lines)


def plan(query: Any, key: Any, value: Any = None, mask: Any = None, *, readouts: Any = None, **settings: Any) -> Plan:
    """Which engine would compute a call of `attention` with these arguments, why the others wouldn't, at what cost.

    Arguments:
        query, key, value, mask, readouts: as for `attention`, [b, h, i, d], [b, g, j, d], [b, g, j, e]; `value=None`
            plans for readouts alone. So are all other settings.

    Returns:
        A plan to print: its `engine`, the others' `refusals`, `visits` of `pairs` of query and key, `holds` in bytes.

    Raises:
        TypeError, ValueError: as `attention`.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 1024, 64)
    >>> print(es.plan(q, k, v, es.window(64, 0), engine="stream"))
    engine  stream: any result, first and second derivatives; memory for a few blocks
    visits  188,416 pairs of query and key of 1,048,576 (18.0%)
    holds   about 0.2 MB beside arguments and results
    """
    engine = settings.pop("engine", "auto")
    refuse_unknown("plan", settings, "query", "key", "value", "mask", "readouts", "engine")
    asked, _ = unpack(() if readouts is None else readouts)
    problem = pose(query, key, value, mask, readouts=asked, **settings)
    needed = problem.only_needed_rows()
    name, refusals = choose.choose(needed, engine)
    chosen = choose.ENGINES[name]
    b, h, _, i, j, _, _ = problem.sizes
    return Plan(name, refusals, chosen.visits(needed), b * h * i * j, chosen.holds(needed), chosen.makes(needed))


def _size(n: int) -> str:
    if n < 1e3:
        return f"{n} bytes"
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} KB"
