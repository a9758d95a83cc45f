"""The report's picture for paper: one PNG of all heads, and of one head's text or map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from einsight.report.naming import Named, chosen_grid
from einsight.report.question import question
from einsight.report.readouts import POWER, STEPS
from einsight.report.source import Layer
from einsight.report.survey import Question, survey
from einsight.report.write import checked, gathered, progress

RAMP = ("#e9edf1", "#c3d7e8", "#8bb4d8", "#4a88bf", "#1f5592", "#0b2a57")
PAPER, INK, MUTE, ACCENT = "#fcfbf8", "#1e2226", "#666c73", "#c2470f"
NAMES = {
    "induction": "induction: weight on what followed earlier copies of the token",
    "strongest": "largest weight of a row, on average",
}


def png(
    source: Any,
    path: str | os.PathLike[str],
    *,
    tokens: Any = None,
    key_tokens: Any = None,
    image: Any = None,
    grid: tuple[int, int] | None = None,
    head: tuple[int, int] | None = None,
    item: int | None = None,
) -> Path:
    """Write a picture of all heads, and of one of them: its weights, and what its keys receive, on the image if given.

    Arguments:
        source, path, tokens, key_tokens, image, grid, item: as `html` takes them. Of several kinds of layers in a lens,
            the first that has queries called `tokens` is drawn, and cross-attention where `key_tokens` are given.
        head: the (layer, head) to draw; by default the strongest induction head, or the most decided one.

    Returns:
        The path of the picture.

    Raises:
        ValueError, TypeError, LookupError, OSError: as `html`; and a head that isn't there.

    Example:
        >>> import einsight as es, tempfile, torch
        >>> from einsight import report
        >>> q, k = torch.randn(2, 1, 2, 5, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.png(es.AttentionWeights(q, k, es.causal()), f"{folder}/heads.png").name
        'heads.png'
    """
    path = checked(path)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('png needs matplotlib: pip install "einsight[look]"') from error
    made = gathered(source, tokens, key_tokens, image, grid, None, item)
    fitting = None if image is None and grid is None else chosen_grid(grid, image, [one.part for one in made])
    one = _main(made, key_tokens is not None)
    asked = question(one)
    name = "induction" if "induction" in asked.statistics else "strongest"
    with progress(len(one.part.layers)) as step, torch.inference_mode():
        rows = []
        for layer in one.part.layers:
            rows.append(survey(layer.weights(), asked).statistics[name])
            step()
        layer, number = _chosen(one, rows, head)
        arrays = survey(layer.weights(), asked).arrays
    cells = arrays["weights" if asked.whole else "pool"][number]
    received = arrays["received"][number]
    figure = Figure(figsize=(11, 5.2), facecolor=PAPER, layout="constrained")
    all_heads, whole = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_heads(all_heads, one, rows, name, layer, number)
    if one.patches is not None and fitting is not None:
        _draw_patches(whole, received, one.patches, fitting, image)
    else:
        _draw_map(whole, cells, one, asked)
    what = "receives" if one.patches is not None else "looks at"
    title = (
        f"What layer {layer.number}, head {number} {what}" if len(one.part.layers) > 1 else f"What head {number} {what}"
    )
    whole.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    figure.savefig(path, dpi=160, format="png")
    return path


def _main(made: Sequence[Named], cross: bool) -> Named:
    """The part that the caller spoke of."""
    if cross and (found := next((one for one in made if one.part.cross), None)):
        return found
    return next((one for one in made if one.spelled), made[0])


def _chosen(one: Named, rows: Sequence[Sequence[float]], head: tuple[int, int] | None) -> tuple[Layer, int]:
    layers = one.part.layers
    if head is None:
        n = max(range(len(layers)), key=lambda n: max(rows[n]))
        return layers[n], max(range(layers[n].heads), key=lambda h: rows[n][h])
    numbers = {layer.number: layer for layer in layers}
    if not isinstance(head, Sequence) or len(head) != 2:
        raise TypeError(f"head must be (layer, head), not {head!r}")
    if head[0] not in numbers or not 0 <= head[1] < numbers[head[0]].heads:
        raise ValueError(f"head={head!r} isn't there: layers are {list(numbers)}, of {layers[0].heads} heads")
    return numbers[head[0]], head[1]


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("einsight", RAMP)


def _draw_heads(axes: Any, one: Named, rows: list[list[float]], name: str, layer: Layer, number: int) -> None:
    most = max(map(len, rows))
    table = torch.tensor([[*row, *[torch.nan] * (most - len(row))] for row in rows]).T.numpy()
    shown = axes.imshow(table, cmap=_colours(), vmin=0, aspect="auto" if len(rows) > 2 * most else "equal")
    axes.set_title("All heads", loc="left", color=INK, fontsize=11, fontweight="bold")
    step = max(1, -(-len(rows) // 12))
    axes.set_xticks(range(0, len(rows), step), [f"L{one.part.layers[n].number}" for n in range(0, len(rows), step)])
    step = max(1, -(-most // 16))
    axes.set_yticks(range(0, most, step), [f"H{n}" for n in range(0, most, step)])
    place = one.part.layers.index(layer)
    axes.add_patch(_frame(place - 0.5, number - 0.5, 1, 1))
    _plain(axes)
    bar = axes.figure.colorbar(shown, ax=axes, orientation="horizontal", shrink=0.5, aspect=30, pad=0.04)
    bar.set_label(NAMES[name], color=MUTE, fontsize=9)
    bar.ax.tick_params(colors=MUTE, labelsize=8, length=0)
    bar.outline.set_visible(False)


def _draw_map(axes: Any, cells: Tensor, one: Named, asked: Question) -> None:
    # The square root of the weight, as on the page: 1 % can be seen beside 100 %. What is masked is left out.
    root = ((cells.float() - 1).clamp(min=0) / STEPS) ** (1 / POWER / 2)
    shown = root.masked_fill(cells == 0, torch.nan).numpy()
    axes.imshow(shown, cmap=_colours(), vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    if asked.whole and max(asked.i, asked.j) <= 40:
        first = 0 if one.part.cross else one.part.offset
        axes.set_yticks(range(asked.i), [_label(one.queries[first + n].text) for n in range(asked.i)])
        axes.set_xticks(range(asked.j), [_label(piece.text) for piece in one.keys], rotation=90)
    else:
        note = "" if asked.whole else f", {asked.block} to a cell"
        axes.set_xlabel(f"keys{note}", color=MUTE, fontsize=9)
        axes.set_ylabel(f"queries{note}", color=MUTE, fontsize=9)
    _plain(axes)


def _draw_patches(axes: Any, received: Tensor, start: int, grid: tuple[int, int], image: Any) -> None:
    from einsight.report.picture import opened

    rows, columns = grid
    share = received[start : start + rows * columns].unflatten(0, grid)
    box = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    if image is not None:
        axes.imshow(opened(image).convert("L"), cmap="gray", extent=box, alpha=0.55)
    part = share.sqrt() / max(float(share.max()) ** 0.5, 1e-9)
    axes.imshow(share.sqrt().numpy(), cmap=_colours(), vmin=0, alpha=(0.1 + 0.8 * part).numpy(), extent=box)
    axes.set_xlabel(f"what each patch receives on average, {float(share.max()):.1%} at most", color=MUTE, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    _plain(axes)


def _frame(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, fill=False, edgecolor=ACCENT, linewidth=2, clip_on=False, zorder=3)


def _plain(axes: Any) -> None:
    axes.tick_params(colors=MUTE, labelsize=8, length=0)
    axes.set_facecolor(PAPER)
    for side in axes.spines.values():
        side.set_visible(False)


def _label(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # half of a pair of surrogates
    # What matplotlib would read as a formula, and what its font can't show.
    shown = text.strip().replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$") or "␣"
    return shown if len(shown) <= 14 else shown[:13] + "…"
