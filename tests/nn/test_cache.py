"""The cache: what it holds, and that with it a layer gives what it gives without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn.helpers import close, draw, refused

import einsight as es
from einsight.nn import KVCache, MultiHeadAttention, RotaryEmbedding


def test_appends_in_place() -> None:
    cache = KVCache(2, 3, 11, 5)
    keys, values = draw(2, 3, 7, 5), draw(2, 3, 7, 5, seed=1)
    place = cache._keys.data_ptr()
    for start, end in ((0, 3), (3, 4), (4, 7)):
        seen = cache.append(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(seen[0], keys[:, :, :end]) and torch.equal(seen[1], values[:, :, :end])
        assert seen[0].data_ptr() == place
    assert cache.lengths == (7, 7) and cache.offset == 7 and cache.capacity == 11
    assert repr(cache) == "KVCache(b=2, g=3, d=5: 7 of 11 tokens)"


def test_items_of_different_lengths() -> None:
    cache = KVCache(3, 2, 11, 5)
    keys = draw(3, 2, 4, 5)
    cache.append(keys, keys)
    cache.trim([1, 4, 0])
    more = draw(3, 2, 2, 5, seed=1)
    seen, _ = cache.append(more, more)
    assert cache.lengths == (3, 6, 2) and seen.shape == (3, 2, 6, 5)
    for item, kept in enumerate((1, 4, 0)):
        assert torch.equal(seen[item, :, : kept + 2], torch.cat([keys[item, :, :kept], more[item]], 1))


@settings(deadline=None, max_examples=30)
@given(
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kept=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    mask=st.sampled_from([es.causal(), es.window(2, 0), None]),
    groups=st.sampled_from([1, 2]),
)
def test_a_layer_in_chunks_gives_what_it_gives_whole(
    chunks: list[int], kept: list[int], mask: es.Mask | None, groups: int
) -> None:
    """Without a mask the last chunk alone sees all that the whole does."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(22, 2, num_kv_heads=groups, rotary=RotaryEmbedding(6), mask=mask, sink=True).eval()
    x = draw(3, 3 + sum(chunks), 22)
    with torch.no_grad():
        cache = KVCache(3, groups, 3 + sum(chunks), 11)
        layer(x[:, :3], cache=cache)
        cache.trim(kept)
        at, last = 3, None
        for n in chunks:
            last = layer(x[:, at : at + n], cache=cache)
            at += n
        for item, length in enumerate(kept):
            whole = torch.cat([x[item, :length], x[item, 3:]])[None]
            low, exact = layer(whole), layer.double()(whole.double())
            layer.float()
            close(
                last[item : item + 1], exact[:, -chunks[-1] :], [low[:, -chunks[-1] :], layer(whole)[:, -chunks[-1] :]]
            )


def test_full() -> None:
    cache = KVCache(1, 2, 4, 3)
    cache.append(draw(1, 2, 3, 3), draw(1, 2, 3, 3))
    before = cache._keys.clone()
    with refused(ValueError, "the cache is full: it has room for 4 tokens and holds 3, so 2 more don't fit"):
        cache.append(draw(1, 2, 2, 3), draw(1, 2, 2, 3))
    assert cache.lengths == (3,) and torch.equal(cache._keys, before)


def test_refusals() -> None:
    cache = KVCache(1, 2, 4, 3)
    with refused(ValueError, r"\[b, g, i, d\] = \[1, 2, i, 3\], but these are \[1, 1, 2, 3\]"):
        cache.append(draw(1, 1, 2, 3), draw(1, 1, 2, 3))
    with refused(ValueError, r"holds torch\.float32 on cpu, but key is torch\.float64"):
        cache.append(draw(1, 2, 2, 3).double(), draw(1, 2, 2, 3).double())
    with refused(ValueError, r"can't be trained through: call the model under torch\.no_grad\(\)"):
        MultiHeadAttention(6, 2)(draw(1, 2, 6), cache=cache)
    with refused(ValueError, r"trim can only shorten: the items hold \[0\] tokens, not \[2\]"):
        cache.trim(2)
    with refused(ValueError, "trim takes one length for each of the 1 items, not 2"):
        cache.trim([0, 0])
    for lengths in ([1.9], 1.0, True, "1", None):
        with refused(TypeError, "trim takes an int, or one for each item, not "):
            cache.trim(lengths)
    with refused(ValueError, r"one shape \[b, g, i, d\], but key is \[1, 2, 2, 3\] and value \[1, 2, 1, 3\]"):
        cache.append(draw(1, 2, 2, 3), draw(1, 2, 1, 3))
    with refused(ValueError, "KVCache's capacity must be a positive int, not 0"):
        KVCache(1, 2, 0, 3)


def test_lengths_of_any_kind() -> None:
    cache = KVCache(2, 1, 4, 3)
    cache.append(draw(2, 1, 3, 3), draw(2, 1, 3, 3))
    for lengths, right in (([3, 2], (3, 2)), (torch.tensor([2, 2]), (2, 2)), (torch.tensor(2), (2, 2)), (0, (0, 0))):
        cache.trim(lengths)
        assert cache.lengths == right and all(type(n) is int for n in cache.lengths)


def test_autocast() -> None:
    """A cache made outside holds float32, of which autocast's attention makes bfloat16 again: the same bits."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(22, 2, rotary=RotaryEmbedding(6), mask=es.causal(), qk_norm=1e-6)
    x = draw(2, 5, 22)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = layer(x)
        for dtype in (torch.float32, torch.bfloat16):
            cache = KVCache(2, 2, 5, 11, dtype=dtype)
            parts = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], 1)
            assert parts.dtype == torch.bfloat16 and torch.equal(parts, whole)


def test_inference_mode() -> None:
    layer, cache = MultiHeadAttention(6, 2, mask=es.causal(), rotary=RotaryEmbedding(2)), KVCache(1, 2, 4, 3)
    with torch.inference_mode():
        layer(draw(1, 2, 6), cache=cache)
    layer(draw(1, 2, 6)).sum().backward()  # the angles made there serve here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    cache = KVCache(1, 1, 4, 3, dtype=dtype)
    assert cache.append(draw(1, 1, 2, 3, dtype=dtype), draw(1, 1, 2, 3, dtype=dtype))[0].dtype == dtype
