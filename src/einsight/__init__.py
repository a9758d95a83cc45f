"""Attention as pure linear algebra: the output at the speed of a fused kernel, and whatever you want to know
about the weights, without ever holding the [queries × keys] matrix."""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from einsight.biases import Bias, alibi, relative
from einsight.explanation import explain
from einsight.functional import attention, merge, scaled_dot_product_attention
from einsight.masks import (
    Mask,
    allow,
    causal,
    documents,
    forbid,
    lengths,
    padding,
    pairs,
    prefix,
    same,
    where,
    window,
)
from einsight.planning import plan
from einsight.readouts import (
    Diagonal,
    Distance,
    Entropy,
    LogSumExp,
    Mass,
    MaxScore,
    Pool,
    Readout,
    Received,
    Rows,
    Scores,
    Share,
    TopK,
    Weights,
)
from einsight.weights import AttentionWeights

# isort: split
from einsight import nn  # stands on all of the above

__version__ = version("einsight")

__all__ = [
    "AttentionWeights",
    "Bias",
    "Diagonal",
    "Distance",
    "Entropy",
    "LogSumExp",
    "Mask",
    "Mass",
    "MaxScore",
    "Pool",
    "Readout",
    "Received",
    "Rows",
    "Scores",
    "Share",
    "TopK",
    "Weights",
    "alibi",
    "allow",
    "attention",
    "causal",
    "documents",
    "explain",
    "forbid",
    "lengths",
    "merge",
    "nn",
    "padding",
    "pairs",
    "plan",
    "prefix",
    "relative",
    "same",
    "scaled_dot_product_attention",
    "where",
    "window",
]


def __getattr__(name: str) -> ModuleType:
    """The modules that stand on the engine, imported when they are first asked for."""
    if name in ("lens", "models", "report"):
        return import_module(f"einsight.{name}")
    raise AttributeError(f"module 'einsight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "lens", "models", "report", "__version__"]
