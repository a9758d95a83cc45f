"""Layers, from attention to a working decoder."""

from einsight.nn.attention import MultiHeadAttention
from einsight.nn.block import FeedForward, TransformerBlock
from einsight.nn.cache import KVCache
from einsight.nn.decoder import Decoder, DecoderConfig
from einsight.nn.positions import LearnedPositions, Llama3Scaling, RotaryEmbedding, SinusoidalPositions

__all__ = [
    "Decoder",
    "DecoderConfig",
    "FeedForward",
    "KVCache",
    "LearnedPositions",
    "Llama3Scaling",
    "MultiHeadAttention",
    "RotaryEmbedding",
    "SinusoidalPositions",
    "TransformerBlock",
]
