"""Readouts: what one may want to know of the weights."""

from einsight.readouts.keys import Mass, Received, Share, Top, TopK, strongest
from einsight.readouts.pairs import Diagonal, Distance, Pool, Rows, Scores, Weights
from einsight.readouts.readout import Block, Readout, Shapes, changed
from einsight.readouts.scores import Entropy, LogSumExp, MaxScore

__all__ = [
    "Block",
    "Diagonal",
    "Distance",
    "Entropy",
    "LogSumExp",
    "Mass",
    "MaxScore",
    "Pool",
    "Readout",
    "Received",
    "Rows",
    "Scores",
    "Shapes",
    "Share",
    "Top",
    "TopK",
    "Weights",
    "changed",
    "strongest",
]
