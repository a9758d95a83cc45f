"""Drawn shapes, strides and settings through the native binding, against contiguous copies: the same bits.

Small and large problems, so that both ways of cutting tasks, several blocks of 96 rows and several tiles of 256 keys
come up; any instruction set, any number of threads. `make sanitize` runs it under the sanitizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from checks import drawing, operands
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import einsight as es
from einsight.engines import native
from einsight.pose import pose

pytestmark = pytest.mark.skipif(native.operations.kernel is None, reason="the native engine is not compiled")

LEVELS = native.operations.kernel.levels if native.operations.kernel else ["none"]
DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if native.operations.kernel is None or native.refuses(pose(*operands(dtype=dtype))) is None
]
LAYOUTS = ["contiguous", "heads last", "features first", "sliced", "offset", "expanded", "one", "negative", "imaginary"]
LENGTHS = [1, 2, 3, 5, 7, 13, 67, 97, 131, 257, 331]


class Drawn:
    """Tensors in drawn layouts, of seeded numbers."""

    def __init__(self, draw: Any):
        self.draw, self.generator = draw, torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.6
        if dtype == torch.int64:
            return torch.randint(0, 4, shape, generator=self.generator)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def view(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        layout, numbers = self.draw(st.sampled_from(LAYOUTS)), partial(self.numbers, dtype=dtype)
        if layout == "heads last" and len(shape) > 2:
            return numbers(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)
        if layout == "features first" and len(shape) > 1:
            return numbers(*shape[:-2], shape[-1], shape[-2]).mT
        if layout == "sliced":
            start, step = self.draw(st.integers(0, 2)), self.draw(st.integers(1, 3))
            return numbers(*(n * step + start for n in shape))[tuple(slice(start, None, step) for _ in shape)]
        if layout == "offset":  # two bytes past what an allocator aligns, for half precision
            start = self.draw(st.integers(1, 3))
            return numbers(start + torch.Size(shape).numel())[start:].view(shape)
        if layout == "expanded":
            return numbers(*(n if self.draw(st.booleans()) else 1 for n in shape)).expand(shape)
        if layout == "one":
            return numbers(*(1 for _ in shape)).expand(shape)
        if layout == "negative" and dtype.is_floating_point:
            return torch._neg_view(numbers(*shape))
        if layout == "imaginary" and dtype in (torch.float32, torch.float64):
            return torch.view_as_complex(numbers(*shape, 2)).conj().imag  # every other number, negated when read
        return numbers(*shape)

    def broadcast(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Of a shape that broadcasts to this one."""
        shape = tuple(n if self.draw(st.booleans()) else 1 for n in shape)
        return self.view(*shape[self.draw(st.integers(0, len(shape) - 1)) :], dtype=dtype)


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


Sizes = tuple[int, int, int, int, int, int, int]


@st.composite
def sizes(draw: Any) -> Sizes:
    b, g, shared = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    i, j = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    d, e = draw(st.sampled_from([1, 3, 8, 17, 33, 64])), draw(st.sampled_from([1, 2, 7, 16, 37, 64]))
    return b, g * shared, g, i, j, d, e


def a_mask(drawn: Drawn, sizes: Sizes) -> tuple[Any, dict[str, Tensor]]:
    """What makes the mask of its tensors, and these."""
    b, h, _, i, j, _, _ = sizes
    kind = drawn.draw(st.sampled_from(["none", "causal", "window", "lengths", "padding", "same", "allow", "both"]))
    if kind == "lengths":
        return lambda n: es.lengths(n), {"n": drawn.view(b, dtype=torch.int64) % (j + 1)}
    if kind == "padding":
        return lambda keep: es.padding(keep), {"keep": drawn.view(b, j, dtype=torch.bool)}
    if kind == "same":
        ids = {"queries": drawn.view(b, i, dtype=torch.int64), "keys": drawn.view(b, j, dtype=torch.int64)}
        return lambda queries, keys: es.same(queries, keys), ids
    if kind in ("allow", "both"):
        tensor = {"tensor": drawn.broadcast(b, h, i, j, dtype=torch.bool)}
        return lambda tensor: es.allow(tensor) & es.causal() if kind == "both" else es.allow(tensor), tensor
    return lambda: {"none": None, "causal": es.causal(), "window": es.window(9, 2)}[kind], {}


def a_bias(drawn: Drawn, sizes: Sizes) -> tuple[Any, dict[str, Tensor]]:
    b, h, _, i, j, _, _ = sizes
    kind = drawn.draw(st.sampled_from(["none", "none", "tensor", "alibi", "both"]))
    tensors = {} if kind in ("none", "tensor") else {"slopes": drawn.view(h)}
    if kind in ("tensor", "both"):
        tensors["table"] = drawn.broadcast(b, h, i, j, dtype=torch.float32)

    def make(slopes: Tensor | None = None, table: Tensor | None = None) -> Any:
        if slopes is None:
            return table
        return es.alibi(slopes) if table is None else es.alibi(slopes) + table

    return make, tensors


def some_readouts(drawn: Drawn, sizes: Sizes, derived: bool) -> tuple[Any, dict[str, Tensor]]:
    b, _, _, i, j, _, _ = sizes
    asked = drawn.draw(st.lists(st.sampled_from(["ids", "matrix", "scores", *range(14)]), unique=True))
    some = drawn.draw(st.lists(st.integers(0, i - 1), unique=True, min_size=1, max_size=5))
    made = [es.LogSumExp(), es.MaxScore(), es.Entropy(), es.Received(), es.Received(mean=True), es.Weights()]
    made += [es.Received(some, per_group=True), es.TopK(3), es.TopK(2, some), es.Share(es.window(2, 1))]
    made += [es.Rows(some), es.Diagonal(-1), es.Distance(), es.Pool(5)]
    tensors = {
        "ids": drawn.view(b, j, dtype=torch.int64),
        "matrix": drawn.view(j, drawn.draw(st.sampled_from([3, 16]))),
    }
    tensors = {name: tensor for name, tensor in tensors.items() if name in asked}

    def make(ids: Tensor | None = None, matrix: Tensor | None = None) -> list[es.Readout]:
        own = [made[n] for n in asked if isinstance(n, int)]
        own += [] if ids is None else [es.Mass(ids, 4)]
        own += [] if matrix is None else [es.Mass(matrix)]
        return own + ([es.Scores()] if "scores" in asked and not derived else [])

    return make, tensors


@contextmanager
def at(level: int, threads: int) -> Iterator[None]:
    """Within it the kernel runs on these; PyTorch's own sums, which threads change the bits of, stay as they are."""
    with native.operations.at_level(level), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        yield


def bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().resolve_neg().contiguous().view(kinds[tensor.dtype.itemsize])


def assert_same_bits(given: list[Tensor], contiguous: list[Tensor]) -> None:
    for n, (one, other) in enumerate(zip(given, contiguous, strict=True)):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other)), (n, one, other)


@drawing(300)
@given(
    data=st.data(),
    sizes=sizes(),
    dtype=st.sampled_from(DTYPES),
    level=st.integers(0, len(LEVELS) - 1),
    threads=st.integers(1, 3),
    derived=st.booleans(),
)
def test_any_strides_give_the_bits_of_contiguous_tensors(
    data: Any, sizes: Sizes, dtype: torch.dtype, level: int, threads: int, derived: bool
) -> None:
    drawn = Drawn(data.draw)
    b, h, g, i, j, d, e = sizes
    leaves = {
        "query": drawn.view(b, h, i, d, dtype=dtype),
        "key": drawn.view(b, g, j, d, dtype=dtype),
        "value": drawn.view(b, g, j, e, dtype=dtype),
    }
    make_mask, of_mask = a_mask(drawn, sizes)
    make_bias, of_bias = a_bias(drawn, sizes)
    make_readouts, of_readouts = some_readouts(drawn, sizes, derived)
    if data.draw(st.booleans()):
        leaves["sink"] = drawn.view(h)
    softcap = data.draw(st.sampled_from([None, None, 1.5]))
    offset = data.draw(st.sampled_from([0, j - i, -2]))

    def run(leaves: dict[str, Tensor], others: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        mask, bias, readouts = others
        own = {name: leaf.detach().requires_grad_(derived) for name, leaf in (leaves | bias).items()}
        settings: dict[str, Any] = {"sink": own["sink"]} if "sink" in own else {}
        output, found = es.attention(
            own["query"],
            own["key"],
            own["value"],
            make_mask(**mask),
            bias=make_bias(**{name: own[name] for name in bias}),
            softcap=softcap,
            offset=offset,
            readouts=[r for r in make_readouts(**readouts) if dtype != torch.float64 or type(r) is not es.TopK],
            engine="native",
            **settings,
        )
        return [output, *(x for part in found for x in (part if isinstance(part, tuple) else (part,)))], own

    def derive(results: list[Tensor], own: dict[str, Tensor], upper: list[Tensor]) -> list[Tensor]:
        made = torch.autograd.grad(results, list(own.values()), upper, allow_unused=True)
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(made, own.values(), strict=True)]

    others = [of_mask, of_bias, of_readouts]
    with at(level, threads):
        found, own = run(leaves, others)
    copies = [{name: copied(tensor) for name, tensor in group.items()} for group in (leaves, *others)]
    with at(level, 1):
        right, own_copies = run(copies[0], copies[1:])
    assert_same_bits(found, right)
    if derived:
        found, right = ([x for x in results if x.requires_grad] for results in (found, right))
        upper = [drawn.view(*x.shape, dtype=x.dtype) for x in found]
        with at(level, threads):
            grads = derive(found, own, upper)
        with at(level, 1):
            grads_of_copies = derive(right, own_copies, [copied(x) for x in upper])
        assert_same_bits(grads, grads_of_copies)


@pytest.mark.parametrize("size", "bhij")
def test_nothing_is_refused_before_the_binding(size: str) -> None:
    query, key, value = operands(**{"g": 3, size: 0} if size != "h" else {"h": 0, "g": 0})
    with pytest.raises(ValueError, match="engine='native' can't compute this: there are no items, heads, queries"):
        es.attention(query, key, value, engine="native")
