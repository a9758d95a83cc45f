"""The weights as a linear operator that is never materialised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from einsight.biases import Bias
from einsight.coordinates import Axis, Run, as_axis, as_int, numbers, pick
from einsight.engines import choose
from einsight.engines.products import weighted
from einsight.functional import refuse_unknown, unpack
from einsight.masks import Mask
from einsight.pose import autocast, pose
from einsight.problem import Problem, ScoreMod
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
    Top,
    TopK,
    Weights,
)
from einsight.values import check_dense, described


class AttentionWeights:
    """The attention weights W = softmax(scores) as an operator: products and readouts, without the matrix.

    Weights are those before dropout; `W @ value` applies it. Results are differentiable, readouts in float32
    (float64 for float64).

    Arguments:
        query: [b, h, i, d].
        key: [b, g, j, d]; query head n reads key head n // (h / g).
        mask, scale, softcap, score_mod, bias, sink, offset, dropout, engine: as `einsight.attention` takes them.

    Raises:
        TypeError, ValueError: as `einsight.attention`.

    >>> import einsight as es, torch
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> W = es.AttentionWeights(q, k, es.causal())
    >>> W
    AttentionWeights(b=1, h=2, i=5, j=5)
    >>> torch.allclose(W @ v, es.attention(q, k, v, es.causal()))
    True
    >>> W[0, 1, 0]
    tensor([1., 0., 0., 0., 0.])
    """

    def __init__(
        self,
        query: Float[Tensor, "b h i d"],
        key: Float[Tensor, "b g j d"],
        mask: Mask | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        bias: Bias | Tensor | None = None,
        sink: Float[Tensor, " h"] | Float[Tensor, ""] | float | None = None,
        offset: int | Int[Tensor, " b"] | None = None,
        dropout: float = 0.0,
        engine: str = "auto",
        **unknown: Any,
    ):
        refuse_unknown("AttentionWeights", unknown, "query", "key", "mask", "engine")
        choose.check_name(engine)
        problem = pose(
            query,
            key,
            None,
            mask,
            scale=scale,
            softcap=softcap,
            score_mod=score_mod,
            bias=bias,
            sink=sink,
            offset=offset,
            dropout=dropout,
        )
        self._hold(problem, engine)

    def _hold(self, problem: Problem, engine: str) -> None:
        self._problem, self._engine = problem, engine

    @property
    def shape(self) -> torch.Size:
        """[b, h, i, j]."""
        b, h, _, i, j, _, _ = self._problem.sizes
        return torch.Size((b, h, i, j))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: float32, or float64 for float64 inputs."""
        return self._problem.dtype

    @property
    def device(self) -> torch.device:
        """Where the query and the key are."""
        return self._problem.device

    @property
    def mT(self) -> TransposedWeights:
        """The operator transposed: `W.mT @ x` adds up the rows of x [b, h, i, e] at the keys they attend to."""
        return TransposedWeights(self)

    def __matmul__(self, value: Float[Tensor, "b g j e"]) -> Float[Tensor, "b h i e"]:
        """Attention: the weights applied to values [b, g, j, e], or [b, h, j, e] of one per query head.

        Of selected heads g and h may be those of the whole, too: the value as it goes with the key. Refused where the
        number of its heads may mean two things.
        """
        p, (value,) = self._problem, autocast(value)
        if not isinstance(value, Tensor) or value.ndim != 4:
            raise TypeError(f"W @ value takes a value [b, g, j, e], not {described(value)}")
        check_dense("W @ value: value", value)
        b, h, g, _, j, _, _ = p.sizes
        if value.shape[0] != b or value.shape[2] != j or value.shape[1] not in (h, g, p.given.h, p.given.g):
            raise ValueError(
                f"W @ value: value has shape {list(value.shape)}, but W reads [b, g, j, e] = [{b}, {g}, {j}, e]"
                + (f", or a value for each of the {h} query heads" if g != h else "")
            )
        if value.dtype != p.query.dtype:
            raise TypeError(f"W @ value: value is {value.dtype}, but query {p.query.dtype}: value.to(query.dtype)")
        if value.device != p.device:
            raise ValueError(f"W @ value: value is on {value.device}, but query on {p.device}: value.to(query.device)")
        heads = _value_heads(p, value.shape[1])
        if heads is not None:
            value = pick(value, 1, heads)
        if value.shape[1] != g:
            p = replace(p, key=p.key.repeat_interleave(h // g, 1))
        output, _ = choose.run(p.asking((), value), self._engine)
        return output  # type: ignore[return-value]

    def read(self, readouts: Any) -> Any:
        """Several readouts in one pass; a dict gives a dict, a list or tuple a tuple, one readout its result."""
        asked, pack = unpack(readouts)
        _, results = choose.run(self._problem.asking(asked, None), self._engine)
        return pack(results)

    def entropy(self) -> Float[Tensor, "b h i"]:
        """−Σ w ln w, in nats; see `Entropy`."""
        return self.read(Entropy())

    def lse(self) -> Float[Tensor, "b h i"]:
        """The logarithm of the sum of exp(scores); see `LogSumExp`."""
        return self.read(LogSumExp())

    def max_score(self) -> Float[Tensor, "b h i"]:
        """The largest score; see `MaxScore`."""
        return self.read(MaxScore())

    def received(self, queries: object = None, mean: bool = False, per_group: bool = False) -> Tensor:
        """How much weight each key receives, [b, h, j] or [b, g, j]; see `Received`."""
        return self.read(Received(queries, mean, per_group))

    def topk(self, k: int, queries: object = None) -> Top:
        """The k largest weights of each query and their keys, [b, h, i, k]; see `TopK`."""
        return self.read(TopK(k, queries))

    def share(self, mask: Mask) -> Float[Tensor, "b h i"]:
        """The weight on the keys that a rule allows; see `Share`."""
        return self.read(Share(mask))

    def mass(self, groups: Tensor, n: int | None = None, queries: object = None) -> Float[Tensor, "b h i n"]:
        """The weight on each group of keys; see `Mass`."""
        return self.read(Mass(groups, n, queries))

    def rows(self, queries: object) -> Float[Tensor, "b h n j"]:
        """The weights of some queries; see `Rows`."""
        return self.read(Rows(queries))

    def diagonal(self, shift: int = 0) -> Float[Tensor, "b h i"]:
        """The weight on the key at p + shift; see `Diagonal`."""
        return self.read(Diagonal(shift))

    def distance(self) -> Float[Tensor, "b h i"]:
        """Σ w · |p − j|; see `Distance`."""
        return self.read(Distance())

    def pool(self, block: int) -> Float[Tensor, "b h m n"]:
        """The weights by blocks of queries and keys; see `Pool`."""
        return self.read(Pool(block))

    def scores(self) -> Float[Tensor, "b h i j"]:
        """All of the scores; see `Scores`."""
        return self.read(Scores())

    def dense(self) -> Float[Tensor, "b h i j"]:
        """All of the weights as a tensor, if you have the memory."""
        return self.read(Weights())

    def sum(self, dim: int) -> Tensor:
        """The sum over the queries (-2): what each key receives, [b, h, j]; or over the keys (-1): 1 less the
        sink's share, [b, h, i]."""
        if dim in (-2, 2):
            return self.received()
        if dim in (-1, 3):
            return self.read(_RowSum())
        raise ValueError(f"W.sum goes over the queries (-2) or the keys (-1), not {described(dim)}")

    def select(self, *, batch: object = None, heads: object = None, queries: object = None) -> AttentionWeights:
        """The weights of some batch items, heads or queries (ints, slices, lists, int tensors), still lazy.

        Positions, masks and everything else that speaks of the whole stay right.
        """
        b, h, i, _ = self.shape
        axes: dict[str, Axis | None] = {
            name: None if chosen is None else as_axis(chosen, size, name)
            for name, chosen, size in (("batch", batch, b), ("heads", heads, h), ("queries", queries, i))
        }
        narrowed = object.__new__(type(self))
        narrowed._hold(self._problem.select(**axes), self._engine)
        return narrowed

    def __getitem__(self, index: Any) -> Tensor:
        """Indexing reads: `W[0, 3, -1]` is one dense row, `W[:, 3]` a head's matrices. No more is computed."""
        index = tuple(as_int(n) for n in (index if isinstance(index, tuple) else (index,)))
        if Ellipsis in [n for n in index if n is Ellipsis]:
            at = [n is Ellipsis for n in index].index(True)
            index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1 :])
        if len([n for n in index if not isinstance(n, int | slice)]) > 1:
            raise IndexError("W takes one list or tensor of indices at a time; for several: W.select(…).dense()[…]")
        if len(index) > 4 or any(n is None for n in index):
            raise IndexError(f"W has four dimensions [b, h, i, j]; it can't be indexed by {described(index)}")
        names = ("batch", "heads", "queries")
        chosen = {n: k for n, k in zip(names, index, strict=False) if not (isinstance(k, slice) and k == slice(None))}
        for name, (n, size) in zip(names, zip(index, self.shape, strict=False), strict=False):
            if isinstance(n, int) and not -size <= n < size:
                raise IndexError(f"index {n} is out of range for W's {name}, of which there are {size}")
        dense = self.select(**chosen).dense()
        taken = tuple(0 if isinstance(n, int) else slice(None) for n in index[:3])
        return dense[(*taken, *index[3:])]

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("AttentionWeights hold no matrix; to compute one write W.dense().numpy(force=True)")

    def __repr__(self) -> str:
        return "AttentionWeights({})".format(", ".join(f"{n}={s}" for n, s in zip("bhij", self.shape, strict=True)))


def _value_heads(problem: Problem, count: int) -> Axis | None:
    """Which heads of a value with so many belong to the problem's heads; None: all, in their order."""
    _, h, g, *_ = problem.sizes
    whole = problem.given
    if (h, g) == (whole.h, whole.g) and isinstance(problem.heads, Run):
        return None
    heads = numbers(problem.heads)
    # Each reading as the value's head for each of our heads.
    readings = [torch.arange(h)] if count == h else []
    readings += [torch.arange(g).repeat_interleave(h // g)] if count == g else []
    readings += [heads] if count == whole.h else []
    readings += [heads // (whole.h // whole.g)] if count == whole.g else []
    if any(not torch.equal(reading, readings[0]) for reading in readings):
        raise ValueError(
            f"W @ value: value has {count} heads, which may be those selected, in their order, or the whole's: apply "
            "the whole W to the whole's value and select after that, (W @ value)[:, heads]"
        )
    return None if count in (g, h) else readings[0]


class TransposedWeights:
    """Wᵀ: what flows back from the queries to the keys."""

    def __init__(self, weights: AttentionWeights):
        self.mT = weights

    @property
    def shape(self) -> torch.Size:
        """[b, h, j, i]."""
        b, h, i, j = self.mT.shape
        return torch.Size((b, h, j, i))

    def __matmul__(self, x: Float[Tensor, "b h i e"]) -> Float[Tensor, "b h j e"]:
        """Σ over the queries of weight · x: [b, h, j, e]; computed in the weights' dtype."""
        b, h, i, _ = self.mT.shape
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise TypeError(f"W.mT @ x takes an x [b, h, i, e], not {described(x)}")
        check_dense("W.mT @ x: x", x)
        if x.shape[:3] != (b, h, i):
            raise ValueError(f"W.mT @ x: x has shape {list(x.shape)}, but W.mT reads [b, h, i, e] = [{b}, {h}, {i}, e]")
        if not x.dtype.is_floating_point:
            raise TypeError(f"W.mT @ x: x must be a float tensor, not {x.dtype}; write x.float()")
        if x.device != self.mT.device:
            raise ValueError(f"W.mT @ x: x is on {x.device}, but query on {self.mT.device}: x.to(query.device)")
        return self.mT.read(_Spread(x))

    def __repr__(self) -> str:
        return repr(self.mT) + ".mT"


class _RowSum(Readout):
    def block(self, x: Any) -> Float[Tensor, "b h i"]:
        return x.weights.sum(-1)


class _Spread(Readout):
    """Wᵀ x, a piece per block of queries."""

    adds = True

    def __init__(self, x: Float[Tensor, "b h i e"]):
        self.x, self.tensors = x, (x,)

    def shapes(self, sizes: Any) -> tuple[tuple[int, ...], ...]:
        return ((sizes.b, sizes.h, sizes.j, self.x.shape[3]),)

    def start(self, x: Any) -> tuple[int, ...]:
        return (x.at.keys.start,)

    def block(self, x: Any) -> Float[Tensor, "b h j e"]:
        rows = self.x[x.item : x.item + x.weights.shape[0], x.head : x.head + x.weights.shape[1]]
        rows = rows[:, :, x.row : x.row + x.weights.shape[2]].to(x.weights.dtype)
        flat = (t.expand(x.at.shape).flatten(0, 1).mT for t in (x.weights, x.seen))
        weights, seen = flat
        return weighted(weights, rows.flatten(0, 1), seen).unflatten(0, rows.shape[:2])
