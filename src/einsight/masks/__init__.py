"""Masks: rules that say which keys a query may see."""

from einsight.masks.ids import documents, same
from einsight.masks.mask import Mask
from einsight.masks.pairs import allow, forbid, pairs, textbook, where
from einsight.masks.positions import causal, lengths, padding, prefix, window

__all__ = [
    "Mask",
    "allow",
    "causal",
    "documents",
    "forbid",
    "lengths",
    "padding",
    "pairs",
    "prefix",
    "same",
    "textbook",
    "where",
    "window",
]
