"""Readouts of single weights: rows, diagonals, distances, pooled and whole matrices."""

from __future__ import annotations

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from einsight.coordinates import Sizes, as_int, is_int
from einsight.masks.mask import FAR
from einsight.readouts.readout import Block, Chosen, Readout, Shapes, changed
from einsight.values import described


class Rows(Chosen):
    """The weights of the queries one cares about: [b, h, n, j].

    `queries` are an int, slice, range, list or int tensor; negative ones count from the end.

    Raises:
        TypeError: None; for all rows ask for `Weights()`.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Rows([1, -1]))[1]
    tensor([[[[0.5000, 0.5000, 0.0000, 0.0000],
              [0.2500, 0.2500, 0.2500, 0.2500]]]])
    """

    def __init__(self, queries: object):
        if queries is None:
            raise TypeError("Rows takes the queries to read; for all of them ask for Weights()")
        super().__init__(queries)

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, sizes.i, sizes.j),)

    def start(self, x: Block) -> tuple[int, ...]:
        return x.row, x.at.keys.start

    def block(self, x: Block) -> Float[Tensor, "b h i j"]:
        return x.weights


class Diagonal(Readout):
    """The weight on the key `shift` places from the query's own position, p + shift: [b, h, i]; 0 where there is none.

    -1 is the previous token, 0 the token itself.

    Raises:
        TypeError: a shift that is no int.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Diagonal(-1))[1]
    tensor([[[0.0000, 0.5000, 0.3333, 0.2500]]])
    """

    positional = True

    def __init__(self, shift: int = 0):
        shift = as_int(shift)  # type: ignore[assignment]
        if not is_int(shift):
            raise TypeError(f"Diagonal's shift must be an int, not {described(shift)}")
        self.shift = max(-FAR, min(shift, FAR))  # so that it fits beside positions in an int64

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        b, h, i, j = x.weights.shape
        if j == 0:
            return x.weights.sum(-1)
        key = (x.at.p + (self.shift - x.at.keys.start)).expand(b, h, i, 1)
        inside = (key >= 0) & (key < j)
        return x.weights.gather(-1, key.clamp(0, j - 1)).where(inside, 0).squeeze(-1)


class Distance(Readout):
    """How far away a query looks: Σ w · |p − j|, in positions: [b, h, i].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Distance())[1]
    tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]])
    """

    positional = True

    def block(self, x: Block) -> Float[Tensor, "b h i"]:
        return (x.weights * (x.at.p - x.at.j).abs()).sum(-1)


class Pool(Readout):
    """A picture of a long sequence: for blocks of queries and keys, the mean over the block's queries of the
    weight on the block's keys: [b, h, ⌈i / block⌉, ⌈j / block⌉].

    Raises:
        ValueError: a block that is no positive int.

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Pool(2))[1]
    tensor([[[[1.0000, 0.0000],
              [0.5833, 0.4167]]]])
    """

    adds = True
    _queries = 0  # how many the problem has

    def __init__(self, block: int):
        block = as_int(block)  # type: ignore[assignment]
        if not is_int(block) or block < 1:
            raise ValueError(f"Pool's block must be a positive int, not {described(block)}")
        self.size = min(block, FAR)

    def __repr__(self) -> str:
        return f"Pool({self.size})"

    def check(self, given: Sizes, sizes: Sizes) -> Readout:
        return changed(self, _queries=sizes.i)

    def shapes(self, sizes: Sizes) -> Shapes:
        return ((sizes.b, sizes.h, -(-sizes.i // self.size), -(-sizes.j // self.size)),)

    def start(self, x: Block) -> tuple[int, ...]:
        return x.row // self.size, x.at.keys.start // self.size

    def block(self, x: Block) -> Float[Tensor, "b h m n"]:
        size, (_, _, i, j) = self.size, x.weights.shape
        row, key = x.row % size, x.at.keys.start % size
        # What is there of a first cell may be all.
        height, width = max(1, min(size, row + i)), max(1, min(size, key + j))
        lines = reduce(pad(x.weights, (key, -(key + j) % width)), "b h i (n j) -> b h i n", "sum", j=width)
        sums = reduce(pad(lines, (0, 0, row, -(row + i) % height)), "b h (m i) n -> b h m n", "sum", i=height)
        first = (x.row // size) * size
        count = [min(size, self._queries - first - n * size) for n in range(sums.shape[2])]
        return sums / torch.tensor(count, dtype=sums.dtype, device=sums.device)[:, None]


class Weights(Rows):
    """All of the weights, if you have the memory: [b, h, i, j].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Weights())[1][0, 0]
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000],
            [0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self):
        self.queries = None


class Scores(Weights):
    """All of the scores as the softmax saw them, −∞ where masked: [b, h, i, j].

    >>> import einsight as es, torch
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 2)
    >>> es.attention(q, k, v, es.causal(), readouts=es.Scores())[1][0, 0]
    tensor([[0., -inf, -inf, -inf],
            [0., 0., -inf, -inf],
            [0., 0., 0., -inf],
            [0., 0., 0., 0.]])
    """

    reads_scores = True
    fill = -torch.inf

    def block(self, x: Block) -> Float[Tensor, "b h i j"]:
        return x.scores
