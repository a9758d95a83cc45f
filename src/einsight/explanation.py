"""The five steps of attention on a small example, with shapes and matrices, for learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from einsight.engines import choose
from einsight.functional import NO_VALUE, refuse_unknown
from einsight.pose import pose
from einsight.problem import Problem
from einsight.readouts import LogSumExp, Scores, Weights

_LARGEST = 12  # rows and columns that are still printed


@dataclass(frozen=True)
class Step:
    """One step: what it is called, its formula, and the tensor it makes."""

    name: str
    formula: str
    letters: str
    tensor: Tensor

    def __str__(self) -> str:
        shape = "[" + ", ".join(f"{c}={n}" for c, n in zip(self.letters.split(), self.tensor.shape, strict=True)) + "]"
        return f"{self.name}   {self.formula}   {shape}\n{_matrix(self.tensor)}"


@dataclass(frozen=True)
class Explanation:
    """The steps, in order; printing it shows them."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n\n".join(f"{n}. {step}" for n, step in enumerate(self.steps, 1))


def explain(query: Any, key: Any, value: Any, mask: Any = None, **settings: Any) -> Explanation:
    """Attention in five steps: scores, scaled, masked, weights, output, each with its formula, shape and numbers.

    Takes `attention`'s arguments but `readouts` and `engine`: query [b, h, i, d], key [b, g, j, d], value [b, g, j, e],
    `mask`, and the settings. Meant for small tensors: matrices beyond 12 × 12 are given by shape alone.

    Raises:
        TypeError, ValueError: as `attention`; and for dropout, which isn't certain.

    >>> import einsight as es, torch
    >>> q = k = v = torch.eye(2)[None, None]
    >>> print(es.explain(q, k, v, es.causal()))
    1. scores   Q Kᵀ = einsum('bhid,bhjd->bhij', Q, K)   [b=1, h=1, i=2, j=2]
        1.000  0.000
        0.000  1.000
    <BLANKLINE>
    2. scaled   scores / √2   [b=1, h=1, i=2, j=2]
        0.707  0.000
        0.000  0.707
    <BLANKLINE>
    3. masked   −∞ where a query may not see a key   [b=1, h=1, i=2, j=2]
        0.707     −∞
        0.000  0.707
    <BLANKLINE>
    4. weights   softmax over the keys: exp(score − lse)   [b=1, h=1, i=2, j=2]
        1.000  0.000
        0.330  0.670
    <BLANKLINE>
    5. output   weights · V = einsum('bhij,bhje->bhie', weights, V)   [b=1, h=1, i=2, e=2]
        1.000  0.000
        0.330  0.670
    """
    for name in ("readouts", "engine"):
        if name in settings:
            raise TypeError(f"explain takes no {name}=")
    refuse_unknown("explain", settings, "query", "key", "value", "mask")
    if settings.get("dropout"):
        raise ValueError("explain shows the weights that are certain; leave dropout out")
    if value is None:
        raise TypeError(NO_VALUE)
    problem = pose(query, key, value, mask, **settings)
    raw = pose(query, key, None, scale=1.0)
    scale = f"scores / √{problem.sizes.d}" if settings.get("scale") is None else f"scores · {problem.scale:g}"
    (products,) = _read(raw, Scores())
    scores, weights, _ = _read(problem, Scores(), Weights(), LogSumExp())
    output, _ = choose.run(problem, "reference")
    groups = (
        ""
        if problem.sizes.g == problem.sizes.h
        else f", each key head for {problem.sizes.h // problem.sizes.g} query heads"
    )
    changes = [
        text
        for text, used in (
            ("softcap", problem.softcap is not None),
            ("score_mod", problem.score_mod is not None),
            ("+ bias", problem.bias is not None),
            ("−∞ where a query may not see a key", problem.mask is not None),
        )
        if used
    ]
    softmax = "exp(score − lse)" + (", the sink in the sum" if problem.sink is not None else "")
    return Explanation(
        (
            Step("scores", f"Q Kᵀ = einsum('bhid,bhjd->bhij', Q, K){groups}", "b h i j", products),
            Step("scaled", scale, "b h i j", products * problem.scale),
            Step("masked", ", ".join(changes) or "nothing is hidden", "b h i j", scores),
            Step("weights", f"softmax over the keys: {softmax}", "b h i j", weights),
            Step("output", "weights · V = einsum('bhij,bhje->bhie', weights, V)", "b h i e", output),  # type: ignore[arg-type]
        )
    )


def _read(problem: Problem, *readouts: Any) -> tuple[Any, ...]:
    return choose.run(problem.asking(readouts, None), "reference")[1]


def _matrix(tensor: Tensor) -> str:
    """The matrices of a tensor [b, h, …, …], each head named if there are several."""
    b, h, rows, columns = tensor.shape
    if max(rows, columns) > _LARGEST or b * h > _LARGEST:
        return "   (too large to print)"
    blocks = []
    for item in range(b):
        for head in range(h):
            title = f"   b={item} h={head}\n" if b * h > 1 else ""
            lines = (
                " ".join(_number(x) for x in row) for row in tensor[item, head].detach().to(torch.float64).tolist()
            )
            blocks.append(title + "\n".join("   " + line for line in lines))
    return "\n".join(blocks)


def _number(x: float) -> str:
    text = "−∞" if x == -torch.inf else f"{x:.3f}".replace("-0.000", "0.000").replace("-", "−")
    return text.rjust(6)
