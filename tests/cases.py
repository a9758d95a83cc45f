"""Generated attention problems: hypothesis draws their structure, a seeded generator their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from engines_under_test import INTERPRETED
from hypothesis import strategies as st
from oracle import Case, Predicate
from torch import Tensor

import einsight as es

LENGTHS = [0, 1, 2, 3, 5, 7, 11, 13]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
if INTERPRETED:  # tiles of 16, and nothing that the engine passes on
    LENGTHS, DTYPES = [1, 2, 5, 13, 17, 19], [torch.float32, torch.bfloat16, torch.float16]


class Drawn:
    """What a mask or bias is drawn for."""

    def __init__(
        self, draw: Any, sizes: tuple[int, int, int, int], offset: int | list[int], seed: int, dtype: torch.dtype
    ):
        self.draw, self.sizes, self.offset = draw, sizes, offset
        self.generator = torch.Generator().manual_seed(seed)
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def shape(self) -> list[int]:
        """A shape that broadcasts to [b, h, i, j]."""
        shape = [n if self.draw(st.booleans()) else 1 for n in self.sizes]
        return shape[self.draw(st.integers(0, 3)) :]

    def all_positions_inside(self) -> bool:
        _, _, i, j = self.sizes
        offsets = self.offset if isinstance(self.offset, list) else [self.offset]
        return all(o >= 0 and o + i <= j for o in offsets)


def _leaf(drawn: Drawn) -> tuple[es.Mask, Predicate]:
    draw, (b, h, i, j) = drawn.draw, drawn.sizes
    kind = draw(
        st.sampled_from(
            [
                "causal",
                "window",
                "lengths",
                "padding",
                "documents",
                "same",
                "prefix",
                "pairs",
                "allow",
                "forbid",
                "where",
            ]
        )
    )
    if kind == "causal":
        return es.causal(), lambda b, h, i, p, j: j <= p
    if kind == "window":
        left, right = draw(
            st.sampled_from([(None, 0), (2, 0), (0, 0), (1, 3), (None, None), (4, -1), (-1, 3), (0, None)])
        )
        return es.window(
            left, right
        ), lambda b, h, i, p, j: (left is None or j >= p - left) and (right is None or j <= p + right)
    if kind in ("lengths", "prefix"):
        one = draw(st.booleans())
        n = [draw(st.integers(0, j))] * b if one else drawn.integers(0, j + 1, b).tolist()
        given: Any = n[0] if one and b else torch.tensor(n, dtype=torch.int32) if draw(st.booleans()) else n
        if kind == "lengths":
            return es.lengths(given), lambda b, h, i, p, j: j < n[b]
        return es.prefix(given), lambda b, h, i, p, j: j < n[b] or j <= p
    if kind == "padding":
        keep = drawn.integers(0, 2, b, j) if draw(st.booleans()) else _padded(drawn)
        given = keep.bool() if draw(st.booleans()) else keep
        return es.padding(given), lambda b, h, i, p, j: bool(keep[b, j])
    if kind == "documents":
        ids = drawn.integers(0, 3, b, j)
        if draw(st.booleans()):
            ids = ids.sort().values
        if drawn.all_positions_inside() and draw(st.booleans()):
            return es.documents(ids), lambda b, h, i, p, j: ids[b, p] == ids[b, j]
        queries = drawn.integers(0, 4, b, i)
        return es.documents(ids, queries), lambda b, h, i, p, j: queries[b, i] == ids[b, j]
    if kind == "same":
        queries, keys = drawn.integers(0, 3, i), drawn.integers(0, 3, b, j)
        return es.same(queries, keys), lambda b, h, i, p, j: queries[i] == keys[b, j]
    if kind == "pairs":
        queries = draw(st.lists(st.integers(0, i - 1), unique=True)) if i else []
        start, stop = draw(st.integers(0, j)), draw(st.integers(0, j))
        return es.pairs(queries, slice(start, stop)), lambda b, h, i, p, j: i in queries and start <= j < stop
    if kind in ("allow", "forbid"):
        shape = drawn.shape()
        tensor = drawn.integers(0, 3, *shape) > 0
        whole = tensor.expand(b, h, i, j)
        if kind == "allow":
            return es.allow(tensor), lambda b, h, i, p, j: bool(whole[b, h, i, j])
        return es.forbid(tensor), lambda b, h, i, p, j: not whole[b, h, i, j]
    return es.where(lambda b, h, p, j: (p + j + h) % 3 != 0), lambda b, h, i, p, j: (p + j + h) % 3 != 0


def _padded(drawn: Drawn) -> Tensor:
    b, _, _, j = drawn.sizes
    lengths, left = drawn.integers(0, j + 1, b), drawn.draw(st.booleans())
    at = torch.arange(j)
    return ((at >= j - lengths[:, None]) if left else (at < lengths[:, None])).long()


def _mask(drawn: Drawn, depth: int) -> tuple[es.Mask, Predicate]:
    sign = drawn.draw(st.sampled_from(["", "", "&", "|", "~"])) if depth else ""
    if sign == "":
        return _leaf(drawn)
    left, says_left = _mask(drawn, depth - 1)
    if sign == "~":
        return ~left, lambda *at: not says_left(*at)
    right, says_right = _mask(drawn, depth - 1)
    if sign == "&":
        return left & right, lambda *at: says_left(*at) and says_right(*at)
    return left | right, lambda *at: says_left(*at) or says_right(*at)


def a_mask(draw: Any, case: Case, depth: int = 2) -> tuple[es.Mask, Predicate]:
    """Another mask for a problem, and what it says of single pairs."""
    b, h, _, i, j = case.sizes
    drawn = Drawn(draw, (b, h, i, j), case.offset, draw(st.integers(0, 2**31)), case.query.dtype)
    return _mask(drawn, depth)


def _laid_out(drawn: Drawn, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers in one of several layouts in memory."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn.generator, dtype=torch.float64).to(dtype)

    layout = drawn.draw(st.sampled_from(["contiguous", "heads last", "every other", "features first", "expanded"]))
    b, h, n, d = shape
    if layout == "heads last":
        return numbers(b, n, h, d).transpose(1, 2)
    if layout == "every other":
        return numbers(b, h, 2 * n, 2 * d)[:, :, ::2, ::2]
    if layout == "features first":
        return numbers(b, h, d, n).mT
    if layout == "expanded":
        return numbers(1, h, n, d).expand(b, h, n, d)
    return numbers(*shape)


def score_mod(score: Tensor, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
    return score + 0.25 * (h + 1) * torch.cos((p - j).to(score.dtype)) - 0.5 * b


@st.composite
def cases(
    draw: Any,
    dtypes: list[torch.dtype] = DTYPES,
    lengths: list[int] = LENGTHS,
    dims: Sequence[int] = (1, 2, 5, 8),
) -> Case:
    """A whole problem, with the arguments that say it to einsight."""
    b = draw(st.sampled_from([1, 2, 3, 0] if 0 in lengths else [1, 2, 3]))
    g, shared = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    i, j = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    d = draw(st.sampled_from(dims))
    e = draw(st.sampled_from([1, 3, 5, d]))
    dtype, h = draw(st.sampled_from(dtypes)), g * shared
    offset = draw(st.sampled_from([0, j - i, "items"]))
    if offset == "items":
        offset = [draw(st.integers(-2, max(j - i, 0) + 2)) for _ in range(b)]
    drawn = Drawn(draw, (b, h, i, j), offset, draw(st.integers(0, 2**31)), dtype)
    case = Case(
        _laid_out(drawn, b, h, i, d, dtype=dtype),
        _laid_out(drawn, b, g, j, d, dtype=dtype),
        _laid_out(drawn, b, g, j, e, dtype=dtype),
        offset=offset,
    )
    case.arguments["offset"] = torch.tensor(offset, dtype=torch.int64) if isinstance(offset, list) else offset
    if draw(st.booleans()):
        mask, case.predicate = _mask(drawn, 3)
        case.arguments["mask"] = mask
    if draw(st.booleans()):
        case.scale = case.arguments["scale"] = draw(st.sampled_from([0.125, 1.0, -0.5, 3]))
    if draw(st.integers(0, 3)) == 0:
        case.softcap = case.arguments["softcap"] = 1.5
    if draw(st.integers(0, 3)) == 0:
        case.score_mod = case.arguments["score_mod"] = score_mod
    if draw(st.integers(0, 2)) == 0:
        case.arguments["bias"], case.bias = _bias(drawn, case)
    if draw(st.integers(0, 2)) == 0:
        case.sink = torch.randn(h, generator=drawn.generator, dtype=drawn.exact)
        case.arguments["sink"] = case.learned["sink"] = case.sink
    return case


def _bias(drawn: Drawn, case: Case) -> tuple[Any, Any]:
    h = drawn.sizes[1]
    kind = drawn.draw(st.sampled_from(["tensor", "masking", "alibi", "relative", "sum"]))
    table = torch.randn(drawn.shape(), generator=drawn.generator, dtype=drawn.exact)
    slopes = torch.rand(h, generator=drawn.generator, dtype=drawn.exact)
    buckets = torch.randn(8, h, generator=drawn.generator, dtype=drawn.exact)
    away = (case.positions()[:, None, :, None] - torch.arange(drawn.sizes[3])).abs()
    if kind == "masking":
        table = table.masked_fill(torch.rand(table.shape, generator=drawn.generator) < 0.3, -torch.inf)
    if kind == "alibi":
        case.learned["slopes"] = slopes
        return es.alibi(slopes), lambda dtype: -slopes.to(dtype)[:, None, None] * away
    if kind == "relative":
        case.learned["buckets"] = buckets
        ahead = torch.arange(drawn.sizes[3]) - case.positions()[:, None, :, None]
        # Eight buckets, split by direction: distances 0, 1 exact, then logarithmic from 2 to 16.
        far = torch.log(away.clamp(min=1).float() / 2) / torch.log(torch.tensor(16.0) / 2) * 2
        index = torch.where(away < 2, away, (2 + far.long()).clamp(max=3)) + 4 * (ahead > 0)
        return (
            es.relative(buckets, max_distance=16),
            lambda dtype: buckets.to(dtype)[index[:, 0]].movedim(-1, 1),
        )
    case.learned["table"] = table
    if kind == "sum":
        case.learned["slopes"] = slopes
        return es.alibi(slopes) + table, lambda dtype: table.to(dtype) - slopes.to(dtype)[:, None, None] * away
    return table, lambda dtype: table.to(dtype)


def readouts_for(case: Case, draw: Any) -> dict[str, tuple[es.Readout, Any]]:
    """Any set of readouts, each with a function that takes the oracle's tensors and gives the right result."""
    import oracle

    b, h, g, i, j = case.sizes
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    some = draw(st.lists(st.integers(0, i - 1), unique=True)) if i else []
    shift, block, k = draw(st.integers(-3, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    ids = torch.randint(-1, 3, (b, j), generator=generator)
    matrix = torch.rand(j, 4, generator=generator)
    p = case.positions()[:, None, :, None]
    away = (p - torch.arange(j)).abs()

    def received(o: Any, rows: Any, mean: bool, per_group: bool) -> Tensor:
        total, count = o["weights"][:, :, rows].sum(2), o["visible"][:, :, rows].sum(2)
        if per_group:
            total, count = (t.reshape(b, g, h // g, j).sum(2) for t in (total, count))
        return total / count.clamp(min=1) if mean else total

    def diagonal(o: Any) -> Tensor:
        on = torch.arange(j) == p + shift
        return (o["weights"] * on).sum(-1)

    all_of_them = {
        "lse": (es.LogSumExp(), lambda o: o["lse"]),
        "max": (es.MaxScore(), lambda o: oracle.max_score(o["scores"])),
        "entropy": (es.Entropy(), lambda o: oracle.entropy(o["weights"])),
        "received": (es.Received(), lambda o: received(o, slice(None), False, False)),
        "received mean": (es.Received(mean=True), lambda o: received(o, slice(None), True, False)),
        "received some": (es.Received(queries=some, mean=True, per_group=True), lambda o: received(o, some, True, True)),  # noqa: E501
        "top": (es.TopK(k), lambda o: oracle.topk(o["weights"], o["visible"], k)),
        "top some": (
            es.TopK(k, queries=some),
            lambda o: oracle.topk(o["weights"][:, :, some], o["visible"][:, :, some], k),
        ),
        "share": (es.Share(es.window(2, 1)), lambda o: (o["weights"] * ((torch.arange(j) >= p - 2) & (torch.arange(j) <= p + 1))).sum(-1)),  # noqa: E501
        "mass ids": (es.Mass(ids, 4), lambda o: o["weights"] @ (ids[:, None, :, None] == torch.arange(4)).to(o["weights"].dtype)),  # noqa: E501
        "mass matrix": (es.Mass(matrix, queries=some), lambda o: o["weights"][:, :, some] @ matrix.to(o["weights"].dtype)),  # noqa: E501
        "rows": (es.Rows(some), lambda o: o["weights"][:, :, some]),
        "diagonal": (es.Diagonal(shift), diagonal),
        "distance": (es.Distance(), lambda o: (o["weights"] * away).sum(-1)),
        "pool": (es.Pool(block), lambda o: oracle.pool(o["weights"], block)),
        "weights": (es.Weights(), lambda o: o["weights"]),
        "scores": (es.Scores(), lambda o: o["scores"]),
    }  # fmt: skip
    names = draw(st.lists(st.sampled_from(sorted(all_of_them)), unique=True, min_size=1))
    return {name: all_of_them[name] for name in names}
