"""What to ask of a part's layers: which statistics, over which queries, and what the page opens on."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from einsight.lens.heads import came_before
from einsight.report.naming import Named
from einsight.report.readouts import Seen
from einsight.report.survey import Copies, Question, strongest

# Of what comes later a causal model sees nothing anyway: at the end only the name tells padding.
_LAST = re.compile(r"pad|eos|end|</s>", re.IGNORECASE)


def question(one: Named) -> Question:
    """What to ask of a part's layers."""
    part = one.part
    seen = part.layers[0].weights().select(heads=[0]).read(Seen())[0, 0].cpu()
    real = _real(one, seen)
    asks = torch.ones(part.i, dtype=torch.bool) if part.cross else real[part.offset :][: part.i]
    there = asks & (seen[:, 2] > 0)
    first = int(seen[there, 0].min()) if bool(there.any()) else 0
    place = torch.arange(part.i) + part.offset
    causal = bool((seen[asks, 1] <= place[asks] + 1).all())
    copies = targets = None
    if part.cross:
        names: tuple[str, ...] = ("entropy", "strongest")
    elif one.patches is not None and not one.spelled:
        names = ("entropy", "strongest", "itself", *(("first",) if one.patches else ()))
    else:
        if one.tokens is not None and causal:
            ids = _ids(one.tokens)
            copies = _copies(ids, real, place)
            targets = None if copies is None else _repeats(ids, real)[place]
            targets = None if targets is None or not bool((targets >= 0).any()) else targets
        names = ("entropy", "first", "previous", *(() if causal else ("next",)))
        names += (*(("induction",) if copies is not None else ()), "distance", "strongest")
    heads = sum(layer.heads for layer in part.layers)
    kept = strongest(heads, part.i)
    return Question(part.i, part.j, part.offset, first, names, copies, targets, kept, real, asks)


def _real(one: Named, seen: Int[Tensor, "i 3"]) -> Bool[Tensor, " j"]:
    """The keys that aren't padding: as the tokenizer or the model's mask says, or as the tokens themselves show."""
    part = one.part
    real = torch.ones(part.j, dtype=torch.bool)
    for said in (one.real, part.layers[0].keep):
        if said is not None:
            real &= said
    if one.tokens is None or part.cross or not bool(real.all()) or part.i < part.j:
        return real
    there = seen[:, 2] > 0
    lo, hi = seen[:, 0].masked_fill(~there, part.j), seen[:, 1]
    # Padding is a run of equal tokens at the start that no later one sees, or at the end that no earlier one sees.
    start, end = _equal(one.tokens), part.j - _equal(one.tokens[::-1])
    if start < part.j and bool((lo[start:] >= start).all()):
        real[:start] = False
    if end > 0 and bool((hi[:end] <= end).all()):
        causal = bool((hi <= torch.arange(part.i) + 1).all())
        real[end:] = causal and (end == part.j - 1 or _LAST.search(one.tokens[-1]) is None)
    return real


def _equal(tokens: Sequence[str]) -> int:
    """How many equal tokens stand at the start."""
    return next((n for n, token in enumerate(tokens) if token != tokens[0]), len(tokens))


def _ids(tokens: Sequence[str]) -> Int[Tensor, " j"]:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])


def _copies(ids: Int[Tensor, " j"], real: Bool[Tensor, " j"], place: Int[Tensor, " i"]) -> Copies | None:
    """What the lens' table calls induction: the weight on what followed earlier copies of a token. None where no token
    comes again, or where most that do stand in runs of equal ones, as `<image>`, where it means nothing."""
    ids = ids[real]
    again, inside = torch.zeros_like(real), torch.zeros_like(real)
    again[real] = came_before(ids)
    inside[real] = torch.cat([torch.zeros(1, dtype=torch.bool), ids[1:] == ids[:-1]])[: len(ids)]
    own, before = torch.full(real.shape, -1), torch.full(real.shape, -2)
    own[real] = ids
    before[real.nonzero().flatten()[1:]] = ids[:-1]
    asked = again[place]
    if not bool(asked.any()) or int((asked & inside[place]).sum()) * 2 > int(asked.sum()):
        return None
    return Copies(own[place], before, asked)


def _repeats(ids: Int[Tensor, " j"], real: Bool[Tensor, " j"]) -> Int[Tensor, " j"]:
    """For each token the place after the last earlier copy of it and the token before it; −1 where there is none.

    Where to open a page: two different tokens must repeat, since of one, such as a comma, there are copies that mean
    nothing, and of a run of equal ones too.
    """
    last: dict[tuple[int, int], int] = {}
    places = torch.full(ids.shape, -1)
    known = ids.tolist()
    for n in range(1, len(known)):
        if not bool(real[n - 1] & real[n]) or known[n] == known[n - 1]:
            continue
        pair = (known[n - 1], known[n])
        places[n] = last.get(pair, -2) + 1
        last[pair] = n
    return places
