"""The five steps, as numbers and as text."""

from __future__ import annotations

import torch
from checks import operands

import einsight as es

q, k, v = operands(b=1, h=2, g=1, i=3, j=3, d=2, e=5)


def test_the_steps_are_those_of_the_formula() -> None:
    scores, scaled, masked, weights, output = (step.tensor for step in es.explain(q, k, v, es.causal()).steps)
    future = torch.ones(3, 3).triu(1).bool()
    torch.testing.assert_close(scores, q @ k.mT)
    torch.testing.assert_close(scaled, scores / 2**0.5)
    torch.testing.assert_close(masked, scaled.masked_fill(future, -torch.inf))
    torch.testing.assert_close(weights, masked.softmax(-1))
    torch.testing.assert_close(output, weights @ v)


def test_every_setting_is_named() -> None:
    text = str(
        es.explain(
            q, k, v, es.causal(), scale=0.5, softcap=2.0, bias=torch.zeros(3), sink=0.0,
            score_mod=lambda s, b, h, p, j: s,
        )
    )  # fmt: skip
    assert "scores · 0.5 " in text
    assert "softcap, score_mod, + bias, −∞ where a query may not see a key" in text
    assert "exp(score − lse), the sink in the sum" in text
    assert "each key head for 2 query heads" in text
    assert "b=0 h=1" in text
    assert "nothing is hidden" in str(es.explain(q, k, v))
    assert [line.split("   ")[0] for line in text.splitlines() if line[:1].isdigit()] == [
        "1. scores", "2. scaled", "3. masked", "4. weights", "5. output",
    ]  # fmt: skip


def test_large_matrices_are_given_by_shape() -> None:
    text = str(es.explain(*operands(b=1, h=1, g=1, i=17, j=17)))
    assert text.count("(too large to print)") == 5 and "[b=1, h=1, i=17, j=17]" in text


def test_half_precision_is_explained_too() -> None:
    assert "5. output" in str(es.explain(*(x.half() for x in (q, k, v))))
