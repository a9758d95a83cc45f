"""ONNX's Attention operator (opsets 23 to 25): the cases of its own conformance suite, on every engine.

The truth is ONNX's reference in float64, and the budget stands on its error in the case's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from checks import ORDERS, check_close
from engines_under_test import ENGINES, using
from onnx.backend.test.case.node import attention as suite
from onnx.reference.ops.op_attention import _compute_attention as reference
from torch import Tensor
from torch.nn.functional import pad

import einsight as es

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
RAW, CAPPED, BIASED, WEIGHTS = range(4)  # what qk_matmul_output_mode gives besides the output


@dataclass
class Case:
    """A node's inputs by name, as tensors of four dimensions, and its attributes."""

    inputs: dict[str, Tensor]
    attributes: dict[str, Any]
    joined: bool  # whether heads lie in one dimension with their features, [b, i, h · d]
    outputs: list[np.ndarray]  # what the suite expects

    @property
    def asks_for_scores(self) -> bool:
        return len(self.outputs) == 4


def drawn() -> dict[str, Case]:
    """The suite's cases by name."""
    found: dict[str, Case] = {}

    def keep(node: Any, inputs: list[np.ndarray], outputs: list[np.ndarray], name: str, **_: Any) -> None:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        given = iter(inputs)
        named = {kind: tensor(next(given)) for kind, name in zip(INPUTS, node.input, strict=False) if name}
        joined = named["Q"].ndim == 3
        if joined:
            for kind, heads in (("Q", "q_num_heads"), ("K", "kv_num_heads"), ("V", "kv_num_heads")):
                named[kind] = named[kind].unflatten(2, (attributes[heads], -1)).transpose(1, 2)
        found[name] = Case(named, attributes, joined, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "expect", keep)
        before = np.random.get_state()
        np.random.seed(0)  # the suite draws from numpy's global state
        for name in dir(suite.Attention):
            if name.startswith("export"):
                getattr(suite.Attention, name)()
        np.random.set_state(before)
    return found


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(array))


CASES = drawn()


def truth(case: Case, dtype: torch.dtype, mode: int, order: int = 0) -> tuple[Tensor, Tensor]:
    """The output and qk_matmul_output of ONNX's reference in a dtype, the head dimension in some order."""
    kinds = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16, torch.float64: np.float64}
    permuted = torch.randperm(case.inputs["Q"].shape[3], generator=torch.Generator().manual_seed(order))
    given: dict[str, Any] = {}
    for name, x in case.inputs.items():
        if order and name in ("Q", "K", "past_key"):
            x = x[..., permuted]
        plain = x.double().numpy() if x.is_floating_point() else x.numpy()
        given[name] = plain.astype(kinds.get(dtype, np.float32)) if x.is_floating_point() else plain
    kept = {
        k: v for k, v in case.attributes.items() if k not in ("q_num_heads", "kv_num_heads", "qk_matmul_output_mode")
    }
    if dtype == torch.float64:
        kept.pop("softmax_precision", None)
    output, _, _, scores = reference(**given, **kept, qk_matmul_output_mode=mode)
    return tensor(output), tensor(scores)


@cache
def truths(name: str, mode: int) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]:
    """The truth in float64, and in the case's dtype with the head dimension in several orders."""
    case = CASES[name]
    dtype = case.inputs["Q"].dtype
    return truth(case, torch.float64, mode), [truth(case, dtype, mode, order) for order in range(ORDERS)]


def said_here(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Query, key, value, and the settings that say what the node says."""
    at, given = case.attributes, dict(case.inputs)
    query, key, value = (given.pop(name) for name in "QKV")
    offset: Any = 0
    if "past_key" in given:
        offset = given["past_key"].shape[2]
        key, value = torch.cat([given["past_key"], key], 2), torch.cat([given["past_value"], value], 2)
    rules: list[es.Mask] = []
    if "nonpad_kv_seqlen" in given:
        lengths = given["nonpad_kv_seqlen"].flatten()
        offset = lengths - query.shape[2]
        rules.append(es.lengths(lengths))
    if at.get("is_causal"):
        rules.append(es.causal())
    left, right = (None if n < 0 else n for n in (at.get("left_window_size", -1), at.get("right_window_size", -1)))
    if (left, right) != (None, None):
        rules.append(es.window(left, right))
    settings: dict[str, Any] = {"scale": at.get("scale"), "softcap": at.get("softcap") or None, "offset": offset}
    if (mask := given.get("attn_mask")) is not None:
        # Keys behind the mask's end are hidden.
        is_rule = mask.dtype == torch.bool
        mask = pad(mask, (0, key.shape[2] - mask.shape[-1]), value=False if is_rule else -torch.inf)
        if is_rule:
            rules.append(es.allow(mask))
        else:
            settings["bias"] = mask
    rule = rules[0] if rules else None
    for other in rules[1:]:
        rule = rule & other  # type: ignore[operator]
    return (query, key, value), settings | {"mask": rule}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param) as name:
        yield name


@pytest.mark.parametrize("name", CASES)
def test_the_output(name: str, engine: str) -> None:
    case = CASES[name]
    (query, key, value), settings = said_here(case)
    output = es.attention(query, key, value, engine=engine, **settings)
    right, low = truths(name, WEIGHTS)
    check_close(name, output, right[0], [x[0] for x in low])
    if case.joined:
        output = output.transpose(1, 2).flatten(2)
    assert output.shape == case.outputs[0].shape and output.dtype == tensor(case.outputs[0]).dtype


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.asks_for_scores])
def test_scores_and_weights(name: str, engine: str) -> None:
    case = CASES[name]
    mode = case.attributes.get("qk_matmul_output_mode", RAW)
    (query, key, _), settings = said_here(case)
    if mode in (RAW, CAPPED):
        settings |= {"mask": None, "bias": None}
    if mode == RAW:
        settings["softcap"] = None
    weights = es.AttentionWeights(query, key, engine=engine, **settings)
    right, low = truths(name, mode)
    check_close(name, weights.dense() if mode == WEIGHTS else weights.scores(), right[1], [x[1] for x in low])
