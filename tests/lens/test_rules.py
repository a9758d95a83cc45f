"""Rules found in masks, and joined over the steps of a generation."""

import random

import pytest
import torch

import einsight as es
from einsight.lens.rules import Rule, Steps, joined, of_mask, recognise, repeated


def seen(steps, j):
    """What each query sees of all j keys, [b, i, j]."""
    rule, start = steps.rule, steps.keys - steps.width
    place = steps.offset + torch.arange(steps.i)[:, None]
    keys = torch.arange(j)
    allowed = (keys >= start) & (keys < steps.keys)
    if rule.causal:
        allowed = allowed & (keys <= place)
    if rule.left is not None:
        allowed = allowed & (keys >= place - rule.left)
    if rule.keep is not None:
        keep = torch.ones(len(rule.keep), j, dtype=torch.bool)
        keep[:, start : steps.keys] = rule.keep
        allowed = allowed & keep[:, None]
    return allowed.expand(-1 if rule.keep is not None else 1, steps.i, j)


def random_step(draw, before):
    i = draw.choice([1, 1, 1, 2, 3])
    keys = before + i
    width = draw.choice([keys, keys, min(keys, i + draw.randint(0, 4))])
    keep = None
    if draw.random() < 0.5:
        keep = torch.arange(width) >= torch.tensor([draw.randint(0, 3) for _ in range(draw.choice([1, 2]))])[:, None]
    left = draw.choice([None, None, 2, 3])
    return Steps(Rule(i > 1 or draw.random() < 0.5 or left is not None, left, keep), i, before, keys, width)


def test_what_is_joined_says_what_its_parts_say():
    draw, found = random.Random(0), 0
    for _ in range(3000):
        first = random_step(draw, 0)
        then = random_step(draw, first.keys)
        one = joined(first, then)
        if one is None:
            continue
        found += 1
        whole = seen(one, then.keys)
        parts = [seen(first, then.keys), seen(then, then.keys)]
        b = max(len(part) for part in (whole, *parts))
        expected = torch.cat([part.expand(b, -1, -1) for part in parts], 1)
        assert torch.equal(whole.expand(b, -1, -1), expected), (first, then, one)
    assert found > 300


@pytest.mark.parametrize("window", [None, 0, 3, 5])
@pytest.mark.parametrize("kept", ["all", "window"])
@pytest.mark.parametrize("lengths", [(7, 1, 1, 1, 1), (1,) * 9, (2, 3, 1, 2, 1, 1), (4, 4, 1)])
@pytest.mark.parametrize("pads", [(0, 0), (0, 2), (1, 4), (3, 3)])
def test_a_generation_has_the_rule_of_its_steps(window, kept, lengths, pads):
    """However a cache rolls, and however little the masks of single queries tell."""
    if min(pads) >= lengths[0]:
        pytest.skip("a first step of nothing but padding tells nothing")
    keep = None if pads == (0, 0) else torch.arange(sum(lengths)) >= torch.tensor(pads)[:, None]

    def until(i, keys):
        rule = Rule(True, window, None if keep is None else keep[:, :keys])
        return seen(Steps(rule, i, keys - i, keys, keys), keys)

    total, place = None, 0
    for i in lengths:
        start = 0 if kept == "all" or window is None else max(place - window, 0)
        place += i
        told, offset = recognise(until(i, place)[:, None, :, start:], i, place - start)
        step = Steps(told, i, offset + start, place, place - start)
        total = step if total is None else joined(total, step)
        assert total is not None
    assert torch.equal(*torch.broadcast_tensors(seen(total, place), until(place, place)))


def test_cross_attention_keeps_its_keys():
    keep = torch.tensor([[True, True, False], [True, True, True]])
    first, then = (Steps(Rule(keep=keep.clone()), i, 0, 3, 3) for i in (2, 1))
    one = repeated(first, then)
    assert one.i == 3 and torch.equal(one.rule.keep, keep)
    assert repeated(first, then._replace(rule=Rule())) is None


def test_masks_of_einsight_as_rules():
    keep = torch.tensor([[False, True, True, True]])
    assert of_mask(None, 4, 4, 0) == Rule()
    assert of_mask(es.causal(), 4, 4, 0) == Rule(causal=True)
    assert of_mask(es.window(2, 0) & es.window(3, 0), 4, 4, 0) == Rule(causal=True, left=2)
    assert of_mask(es.window(2, None), 1, 4, 3) == Rule(causal=True, left=2)
    found = of_mask(es.causal() & es.padding(keep), 4, 4, 0)
    assert found.causal and torch.equal(found.keep, keep)
    assert of_mask(es.padding(torch.ones(1, 4, dtype=torch.bool)), 4, 4, 0) == Rule()
    for mask in (es.window(2, 1), es.window(2, None), es.window(-1, 3), es.causal() | es.lengths(2), ~es.causal()):
        assert of_mask(mask, 4, 4, 0).other is mask
