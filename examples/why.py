"""Measure what textbooks claim of attention: every number and the picture in docs/why.md.

    python examples/why.py            # print the tables
    python examples/why.py --write    # and put them into docs/why.md, the picture into docs/why-scale.svg

About three minutes on two cores. The small models read `pydoc_data.topics`, Python's documentation, as bytes.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from train_decoder import Settings, batch, bigram_loss, loss_of, optimiser, rate_at, text, validation_loss, write

import einsight as es

DOCS = Path(__file__).parents[1] / "docs"
SMALL = Settings(steps=300, batch=16, length=64, width=64, layers=2, heads=2, rate=4e-3, warm_up=30)


def saturation(d: int, scale: float, keys: int = 64, queries: int = 256) -> tuple[float, float, float]:
    """For queries and keys of d numbers of mean 0 and variance 1: the entropy of the weights as a share of its
    largest value, the largest weight (means over the queries), and the norm of the gradient that reaches the
    scores of the median query.

    The gradient is of one coordinate of the output, for values of variance 1. It is taken at the scores, where
    the softmax passes it on, so that the scale itself, by which it is multiplied later, is left out.
    """
    draw = torch.Generator().manual_seed(d)
    q, k = (torch.randn(1, 1, n, d, generator=draw, dtype=torch.float64) for n in (queries, keys))
    v = torch.randn(1, 1, keys, 1, generator=draw, dtype=torch.float64)
    at_scores = torch.zeros(1, 1, queries, keys, dtype=torch.float64, requires_grad=True)
    output, (entropy, top) = es.attention(q, k, v, scale=scale, bias=at_scores, readouts=[es.Entropy(), es.TopK(1)])
    (gradient,) = torch.autograd.grad(output.sum(), at_scores)
    highest = torch.log(torch.tensor(float(keys), dtype=torch.float64))
    return (entropy.mean() / highest).item(), top.weights.mean().item(), gradient.norm(dim=-1).median().item()


def scale_table() -> tuple[str, dict[str, list[tuple[float, float, float]]], list[int]]:
    dims = [4, 16, 64, 256, 1024]
    found = {
        "with": [saturation(d, d**-0.5) for d in dims],
        "without": [saturation(d, 1.0) for d in dims],
    }
    rows = [
        "| d | entropy, with | without | largest weight, with | without | gradient, with | without |",
        "|--:" * 7 + "|",
    ]
    for n, d in enumerate(dims):
        cells = [f"{found[way][n][what]:.3f}" for what in range(3) for way in ("with", "without")]
        rows.append(f"| {d} | {' | '.join(cells)} |")
    return "\n".join(rows), found, dims


def picture(found: dict[str, list[tuple[float, float, float]]], dims: list[int], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "einsight"  # the same file each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, what, title in zip(
        axes, (0, 2), ("entropy of the weights / ln 64", "gradient at the scores"), strict=True
    ):
        axis.plot(dims, [x[what] for x in found["with"]], "o-", label="scores / √d")
        axis.plot(dims, [x[what] for x in found["without"]], "s--", label="scores as they are")
        axis.set(xscale="log", xlabel="d", title=title, ylim=(0, None), xticks=dims, xticklabels=dims)
        axis.minorticks_off()
        axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def trained(settings: Settings, mask: es.Mask | None = None) -> tuple[es.nn.Decoder, float]:
    """A small decoder after its training, in which another mask may have leaked the future; and its last losses."""
    learnt, _ = text()
    torch.manual_seed(settings.seed)
    model = es.nn.Decoder(settings.config())
    causal = [block.attention.mask for block in model.blocks]
    if mask is not None:
        for block in model.blocks:
            block.attention.mask = mask
    adam, losses = optimiser(model, settings), []
    for step in range(settings.steps):
        for group in adam.param_groups:
            group["lr"] = rate_at(step, settings)
        loss = loss_of(model, *batch(learnt, step, settings))
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        adam.step()
        losses.append(loss.item())
    for block, own in zip(model.blocks, causal, strict=True):
        block.attention.mask = own
    return model, statistics.fmean(losses[-20:])


def leak_table(settings: Settings = SMALL) -> str:
    learnt, judged = text()
    rows = [
        "| a token sees, in training | loss in training | loss where it sees the past alone | it writes |",
        "|---|--:|--:|---|",
    ]
    for name, mask in (("the past", None), ("and the next token", es.window(None, 1))):
        model, loss = trained(settings, mask)
        sample = re.sub(r"\s+", " ", write(model, "The ", 60)).replace("|", "\\|").replace("`", "'")
        rows.append(f"| {name} | {loss:.2f} | {validation_loss(model, judged, settings.length):.2f} | `{sample}` |")
    rows.append(f"| *(a bigram model)* | | {bigram_loss(learnt, judged):.2f} | |")
    return "\n".join(rows)


def diversity(model: es.nn.Decoder, judged: Tensor, length: int) -> float:
    """How far apart the heads of a layer look: half the summed difference of two heads' weights, on average."""
    tokens = judged[: 8 * length].view(8, length)
    with torch.no_grad():
        _, seen = model(tokens, readouts=es.Weights())
    apart = [(w[:, m] - w[:, n]).abs().sum(-1).mean() / 2 for w in seen for m in range(w.shape[1]) for n in range(m)]
    return torch.stack(apart).mean().item() if apart else 0.0


def heads_table(settings: Settings = SMALL, seeds: int = 3) -> str:
    _, judged = text()
    rows = [
        "| heads | of dimension | loss (mean of the seeds) | lowest – highest | heads differ by |",
        "|--:|--:|--:|:-:|--:|",
    ]
    for heads in (1, 2, 8):
        losses, apart = [], []
        for seed in range(seeds):
            chosen = replace(settings, heads=heads, seed=seed)
            model, _ = trained(chosen)
            losses.append(validation_loss(model, judged, settings.length))
            apart.append(diversity(model, judged, settings.length))
        differ = f"{statistics.fmean(apart):.2f}" if heads > 1 else "–"
        rows.append(
            f"| {heads} | {settings.width // heads} | {statistics.fmean(losses):.3f} | "
            f"{min(losses):.3f} – {max(losses):.3f} | {differ} |"
        )
    return "\n".join(rows)


def put(page: str, name: str, table: str) -> str:
    """The page with another table between the two markers of a name."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"docs/why.md has no place for {name}: <!-- {name} --> … <!-- end -->")
    return pattern.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the numbers and the picture into docs/")
    chosen = parser.parse_args(arguments)
    scale, found, dims = scale_table()
    path = DOCS / "why.md"
    for name, measure in (("scale", lambda: scale), ("leak", leak_table), ("heads", heads_table)):
        table = measure()
        print(f"{name}\n\n{table}\n", flush=True)
        if chosen.write:
            path.write_text(put(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")
    if chosen.write:
        picture(found, dims, DOCS / "why-scale.svg")


if __name__ == "__main__":
    main()
