"""What is refused of what changes scores: biases, score_mod and sinks."""

from __future__ import annotations

import pytest
import torch
from refusals.given import Refusal, attention, boolean, check, elsewhere

import einsight as es

REFUSALS: dict[str, Refusal] = {
    "bias that doesn't broadcast": (
        lambda: attention(bias=torch.zeros(7, 5)), ValueError,
        "bias has shape [7, 5], which does not broadcast to [b, h, i, j] = [2, 6, 5, 7]",
    ),
    "bias of five dimensions": (
        lambda: attention(bias=torch.zeros(1, 1, 1, 5, 7)), ValueError, "bias has shape [1, 1, 1, 5, 7], which does"
    ),
    "boolean bias": (
        lambda: attention(bias=boolean), TypeError,
        "bias must be a float tensor, not torch.bool: a mask goes in as mask=es.allow(tensor) or es.forbid(tensor)",
    ),
    "integer bias": (
        lambda: attention(bias=boolean.long()), TypeError, "bias must be a float tensor, not torch.int64"
    ),
    "mask as bias": (
        lambda: attention(bias=es.causal()), TypeError, "bias must be a float tensor, alibi(…) or relative(…), not"
    ),
    "bias + a number": (
        lambda: es.alibi(torch.ones(6)) + 1, TypeError, "bias must be a float tensor, alibi(…) or relative(…), not 1"
    ),
    "bias on another device": (
        lambda: attention(bias=elsewhere(5, 7)), ValueError,
        "bias is on cuda:0 but query on cpu; write bias.to(query.device)",
    ),
    "slopes for other heads": (
        lambda: attention(bias=es.alibi(torch.ones(3)), offset=0), ValueError,
        "alibi has 3 slopes, but query has 6 heads",
    ),
    "slopes of two dimensions": (
        lambda: es.alibi(torch.ones(6, 1)), TypeError,
        "alibi takes a float tensor of one slope per query head [h], not a tensor of torch.float32 [6, 1]",
    ),
    "slopes of a list": (
        lambda: es.alibi([1.0]), TypeError, "alibi takes a float tensor of one slope per query head [h], not [1.0]"
    ),
    "table for other heads": (
        lambda: attention(bias=es.relative(torch.ones(8, 3)), offset=0), ValueError,
        "relative's table [8, 3] is for 3 heads, but query has 6",
    ),
    "table of one dimension": (
        lambda: es.relative(torch.ones(8)), TypeError,
        "relative takes a float table [n, h] of n buckets for each head, not a tensor of torch.float32 [8]",
    ),
    "table too small": (
        lambda: es.relative(torch.ones(3, 6)), ValueError, "relative's table needs at least 4 buckets, not 3"
    ),
    "table too small for one direction": (
        lambda: es.relative(torch.ones(1, 6), bidirectional=False), ValueError,
        "relative's table needs at least 2 buckets, not 1",
    ),
    "distance within the exact buckets": (
        lambda: es.relative(torch.ones(32, 6), max_distance=8), ValueError,
        "relative's max_distance must be an int that exceeds the 8 exact buckets, not 8",
    ),
    "score_mod of a number": (
        lambda: attention(score_mod=3), TypeError, "score_mod must be a function fn(score, b, h, p, j), not 3"
    ),
    "score_mod of one": (
        lambda: attention(score_mod=lambda s: s), TypeError,
        "score_mod must be a function fn(score, b, h, p, j), but takes (s): too many positional arguments",
    ),
    "score_mod that gives one item": (
        lambda: attention(score_mod=lambda s, b, h, p, j: s[0], offset=0), ValueError,
        "score_mod(score, b, h, p, j) must return the scores, a float tensor [2, 6, 5, 7], but returned torch.float32 "
        "[6, 5, 7]",
    ),
    "score_mod that gives a number": (
        lambda: attention(score_mod=lambda s, b, h, p, j: s.sum(), offset=0), ValueError, "returned torch.float32 []"
    ),
    "score_mod that gives another shape": (
        lambda: attention(score_mod=lambda s, b, h, p, j: s[..., :2], offset=0), ValueError,
        "score_mod(score, b, h, p, j) must return the scores, a float tensor [2, 6, 5, 7], but returned torch.float32 "
        "[2, 6, 5, 2]",
    ),
    "score_mod that gives nothing": (
        lambda: attention(score_mod=lambda s, b, h, p, j: None, offset=0), TypeError,
        "score_mod(score, b, h, p, j) must return the scores, a float tensor [2, 6, 5, 7], but returned None",
    ),
    "sink of integers": (
        lambda: attention(sink=torch.zeros(6).long()), TypeError,
        "sink must be a float tensor of one score per query head [h], or a number, not a tensor of torch.int64",
    ),
    "sink of another shape": (
        lambda: attention(sink=torch.zeros(3)), ValueError,
        "sink must have shape [h] = [6], one score per query head, not [3]",
    ),
    "bias without numbers": (
        lambda: attention(bias=torch.zeros(5, 7, device="meta")), TypeError,
        "bias must be a dense tensor that holds numbers, but it is on the meta device",
    ),
    "slopes without numbers": (
        lambda: es.alibi(torch.zeros(6, device="meta")), TypeError, "alibi's slopes must be a dense tensor that holds"
    ),
    "directions of a number": (
        lambda: es.relative(torch.ones(8, 6), bidirectional=1), TypeError,
        "relative's bidirectional must be True or False, not 1",
    ),
    "sink without numbers": (
        lambda: attention(sink=torch.zeros(6, device="meta")), TypeError,
        "sink must be a dense tensor that holds numbers, but it is on the meta device",
    ),
    "sink on another device": (
        lambda: attention(sink=elsewhere(6)), ValueError,
        "sink is on cuda:0 but query on cpu; write sink.to(query.device)",
    ),
    "sink of text": (lambda: attention(sink="1"), TypeError, "sink must be a float tensor of one score per query"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check(REFUSALS[name])
