"""Masks, biases and positions as the kernels read them, on the device. Nothing here needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from einsight.biases import Alibi
from einsight.engines.rules import Rule, lower, lower_bias
from einsight.masks import Mask
from einsight.problem import Problem
from einsight.readouts import Distance


class Lines(NamedTuple):
    """A rule: intervals int32 [2, #b, #h, i] of keys; bytes, and whether 1 shows a key (1 or 0); ids to be alike."""

    bounds: Int[Tensor, "#ends #b #h i"]
    seen: Tensor | None
    shows: int
    query_ids: Tensor | None
    key_ids: Tensor | None


@dataclass(frozen=True)
class Lowered:
    """What the settings of a problem become."""

    rule: Lines
    slopes: Float[Tensor, " h"] | None
    bias: Float[Tensor, "#b #h #i #j"] | None
    positions: Int[Tensor, "#b i"] | None


def lowered(problem: Problem) -> Lowered | str:
    """The settings of a problem, or why they can't be lowered."""
    if "triton lowered" not in problem.memory:
        problem.memory["triton lowered"] = _lowered(problem)
    return problem.memory["triton lowered"]


def _lowered(problem: Problem) -> Lowered | str:
    bounds, biases = problem.bounds, (None, None)
    rule: Rule | str = Rule(bounds.lo, bounds.hi)
    if problem.mask is not None and not bounds.exact:
        rule = lower(problem.mask, problem.whole, (bounds.lo[..., None], bounds.hi[..., None]), problem.here)
    if problem.bias is not None:
        lowered = lower_bias(problem.bias, problem.here, problem.dtype)
        if isinstance(lowered, str):
            return lowered
        biases = lowered
    if isinstance(rule, str):
        return rule
    places = biases[0] is not None or any(type(readout) is Distance for readout in problem.readouts)
    positions = problem.here.positions if places else None
    slopes, bias = (None if x is None else x.detach() for x in biases)
    return Lowered(lines(rule, problem.sizes.i, problem.sizes.j, problem.device), slopes, bias, positions)


def ends(rule: Rule, i: int, j: int) -> tuple[Int[Tensor, "#b #h i"], Int[Tensor, "#b #h i"]]:
    """The interval of keys of each query, within the keys."""
    return _end(rule.lo, 0, i, j), _end(rule.hi, j, i, j)


def _end(bound: Tensor | int | None, if_none: int, i: int, j: int) -> Int[Tensor, "#b #h i"]:
    if bound is None:
        return torch.full((1, 1, i), if_none)
    bound = bound if isinstance(bound, Tensor) else torch.arange(bound, bound + i)[None, None]
    bound = bound.clamp(0, j)
    return bound.expand(*bound.shape[:2], i)


def lines(rule: Rule, i: int, j: int, device: torch.device) -> Lines:
    lo, hi = torch.broadcast_tensors(*ends(rule, i, j))
    bounds = torch.stack([lo, torch.maximum(lo, hi)]).to(torch.int32).to(device)
    seen = None if rule.seen is None else rule.seen.to(device).view(torch.uint8)
    query_ids, key_ids = (None if ids is None else ids.to(device, torch.int64).contiguous() for ids in rule[4:6])
    return Lines(bounds, seen, int(rule.shows), query_ids, key_ids)


def lower_question(mask: Mask, problem: Problem) -> Rule | str:
    """The rule that a readout asks about."""
    return lower(mask, problem.whole, None, problem.here)


def learns_more_than_slopes(problem: Problem) -> bool:
    """Whether a gradient goes to a bias that isn't alibi's."""
    bias = problem.bias
    return bias is not None and type(bias) is not Alibi and any(t.requires_grad for t in bias.tensors)
