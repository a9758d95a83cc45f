"""The keys and values of earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from einsight.nn.checks import count, is_integral
from einsight.problem import is_autocast
from einsight.values import described


class KVCache:
    """The keys and values that one attention layer has computed so far, for a batch of sequences.

    The memory is allocated once; `append` writes in place. Items may differ in length: item n holds
    `lengths[n]` tokens, and its next token is written right after them. For prompts of different lengths pad
    them on the right, run them, and `trim` the cache to the real lengths: what the padding wrote is never seen
    and is overwritten by the next tokens. `trim(0)` empties it for the next batch; it stays in the dtype and on the
    device it was made for.

    Arguments:
        batch: how many sequences.
        num_kv_heads: g, the layer's key/value heads.
        capacity: how many tokens of each sequence there is room for.
        head_dim: d.
        dtype, device: of the keys and values; by default PyTorch's defaults.

    Raises:
        ValueError: a size that is no positive int.

    >>> import einsight as es, torch
    >>> cache = es.nn.KVCache(1, 2, 8, 4)
    >>> keys, values = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    >>> keys.shape, cache.lengths
    (torch.Size([1, 2, 3, 4]), (3,))
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        shape = (batch, num_kv_heads, capacity, head_dim)
        for name, size in zip(("batch", "num_kv_heads", "capacity", "head_dim"), shape, strict=True):
            count(f"KVCache's {name}", size)
        # Zeros, not empty: what was never written is hidden, but needn't be NaN either.
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._lengths = [0] * batch

    @property
    def capacity(self) -> int:
        """How many tokens of each sequence there is room for."""
        return self._keys.shape[2]

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens of each item it holds."""
        return tuple(self._lengths)

    @property
    def offset(self) -> int | Int[Tensor, " b"]:
        """Where the next token stands: an int if all items are equally long, else an int tensor [b] on the CPU."""
        return self._lengths[0] if self._are_alike() else torch.tensor(self._lengths)

    def append(
        self, key: Float[Tensor, "b g i d"], value: Float[Tensor, "b g i d"]
    ) -> tuple[Float[Tensor, "b g j d"], Float[Tensor, "b g j d"]]:
        """Write the keys and values of i more tokens of each item, in place.

        Returns views of all keys and values, [b, g, j, d], j the longest item's length. Of a shorter item the
        last ones are not its own: hide them with `einsight.lengths(cache.lengths)`, or `causal()` with
        `offset=` the offset before the call.

        Raises:
            ValueError: the cache is full (nothing is written), or is for other shapes, or gradients are wanted.
        """
        self._check(key, value)
        # Under autocast some layers compute in half precision and some not.
        key, value = key.to(self._keys.dtype), value.to(self._keys.dtype)
        i = key.shape[2]
        offset = self.offset
        if isinstance(offset, int):
            self._keys[:, :, offset : offset + i] = key
            self._values[:, :, offset : offset + i] = value
        else:
            places = rearrange(offset.unsqueeze(1) + torch.arange(i), "b i -> b 1 i 1").to(key.device).expand_as(key)
            self._keys.scatter_(2, places, key)
            self._values.scatter_(2, places, value)
        self._lengths = [n + i for n in self._lengths]
        longest = max(self._lengths)
        return self._keys[:, :, :longest], self._values[:, :, :longest]

    def trim(self, lengths: int | Sequence[int] | Int[Tensor, ...]) -> None:
        """Forget all but the first `lengths` tokens (one number, or one for each item); `trim(0)` empties the cache.

        Raises:
            TypeError: lengths that aren't ints.
            ValueError: an item doesn't hold as many, or there isn't one length for each.
        """
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        wanted = list(given) if isinstance(given, Sequence) else [given] * len(self._lengths)
        if not all(is_integral(n) for n in wanted):
            raise TypeError(f"trim takes an int, or one for each item, not {described(lengths)}")
        if len(wanted) != len(self._lengths):
            raise ValueError(f"trim takes one length for each of the {len(self._lengths)} items, not {len(wanted)}")
        if any(not 0 <= n <= held for n, held in zip(wanted, self._lengths, strict=True)):
            raise ValueError(f"trim can only shorten: the items hold {self._lengths} tokens, not {wanted}")
        self._lengths = [int(n) for n in wanted]

    def check(self, b: int, g: int, i: int, d: int) -> None:
        """Refuse keys and values [b, g, i, d] that it isn't for, or has no room for."""
        items, heads, capacity, size = self._keys.shape
        if (b, g, d) != (items, heads, size):
            raise ValueError(
                f"the cache is for keys and values [b, g, i, d] = [{items}, {heads}, i, {size}], but these are "
                f"[{b}, {g}, {i}, {d}]"
            )
        if max(self._lengths) + i > capacity:
            raise ValueError(
                f"the cache is full: it has room for {capacity} tokens and holds {max(self._lengths)}, so {i} more "
                "don't fit; make it larger, or trim it"
            )

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape or key.ndim != 4:
            raise ValueError(
                f"key and value must have one shape [b, g, i, d], but key is {list(key.shape)} and value "
                f"{list(value.shape)}"
            )
        self.check(*key.shape)
        if key.device != self._keys.device or (key.dtype != self._keys.dtype and not is_autocast(key.device.type)):
            raise ValueError(
                f"the cache holds {self._keys.dtype} on {self._keys.device}, but key is {key.dtype} on {key.device}: "
                "make it with KVCache(…, dtype=…, device=…)"
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError(
                "a cache is written in place and can't be trained through: call the model under torch.no_grad(), or "
                "without a cache"
            )

    def _are_alike(self) -> bool:
        # One by one: a set would have torch.compile compile again for each length.
        return all(n == self._lengths[0] for n in self._lengths)

    def __repr__(self) -> str:
        b, g, capacity, d = self._keys.shape
        held = self._lengths[0] if self._are_alike() else self._lengths
        return f"KVCache(b={b}, g={g}, d={d}: {held} of {capacity} tokens)"
