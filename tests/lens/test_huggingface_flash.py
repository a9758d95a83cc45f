"""What the lens says of flash attention, which hands over no mask: a stand-in for it, computed pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as hf
from lens.tiny import GROUPED
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

from einsight.lens import Lens

OUTPUTS: list[tuple[Tensor, Tensor]] = []  # of each call: in float64, and in the model's own dtype


def flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What flash attention computes: keys that are no padding and of no other document."""
    b, _, i, _ = query.shape
    written = key.shape[2] if attention_mask is None else attention_mask.shape[1]
    key, value = (x[:, :, :written].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    j = key.shape[2]
    p, k = torch.arange(i)[:, None] + j - i, torch.arange(j)
    causal = module.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
    seen = (k <= p if causal else k >= 0).expand(b, i, j)
    if sliding_window is not None and j > sliding_window:
        seen = seen & ((k - p).abs() < sliding_window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None].bool()
    elif b == 1 and i == j and not torch.equal(kwargs["position_ids"][0].diff(), torch.ones(j - 1, dtype=torch.int64)):
        document = (kwargs["position_ids"][0] == 0).cumsum(0)
        seen = seen & (document[:, None] == document)
    softcap = kwargs.get("softcap")

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0) @ value

    OUTPUTS.append((output(query.double(), key.double(), value.double()), output(query, key, value)))
    return OUTPUTS[-1][1].transpose(1, 2).contiguous(), None


AttentionInterface.register("flash_twin", flash)
AttentionMaskInterface.register("flash_twin", flash_attention_mask)


def seen(model: Any, **inputs: Any) -> Lens:
    """A lens over a run, in which every layer's weights gave the output that was computed."""
    OUTPUTS.clear()
    with torch.no_grad(), Lens(model, values=True) as lens:
        model(**inputs)
    check(lens)
    return lens


def check(lens: Lens) -> None:
    """The weights of each layer gave its outputs, one for each step."""
    layers = len(lens)
    assert layers > 0 and len(OUTPUTS) % layers == 0
    for n in range(layers):
        right, plain = (torch.cat(steps, 2) for steps in zip(*OUTPUTS[n::layers], strict=True))
        got = lens[n].weights @ lens[n].value
        budget = 2 * (plain - right).abs().max() + torch.finfo(got.dtype).eps * right.abs().max()
        assert got.shape == right.shape and (got - right).abs().max() <= budget


def build(kind: str, auto: Any = hf.AutoModel, **settings: Any) -> Any:
    torch.manual_seed(0)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    model = auto.from_config(hf.AutoConfig.for_model(kind, **{**GROUPED, **tokens, **settings})).eval()
    model.config._attn_implementation = "flash_twin"  # transformers asks for a package when it is chosen in other ways
    return model


IDS = torch.arange(26).view(2, 13) % 23 + 1
LEFT = torch.ones(2, 13, dtype=torch.int64)
LEFT[1, :4] = 0


@pytest.mark.parametrize("padding", [None, LEFT, LEFT.flip(1)], ids=["whole", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_decoders(kind: str, padding: Tensor | None) -> None:
    settings = {} if kind == "llama" else {"sliding_window": 5}
    lens = seen(build(kind, **settings), input_ids=IDS, attention_mask=padding)
    assert lens[0].rule.causal and lens[0].rule.left == (None if kind == "llama" else 4)


def test_packed() -> None:
    position_ids = torch.tensor([[*range(5), *range(2), *range(6)]])
    for settings in ({}, {"sliding_window": 4}):
        lens = seen(build("mistral" if settings else "llama", **settings), input_ids=IDS[:1], position_ids=position_ids)
        assert (lens[0].weights.dense()[0, :, 5:, :5] == 0).all()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache: str) -> None:
    model = build("llama", hf.AutoModelForCausalLM)
    OUTPUTS.clear()
    with torch.no_grad(), Lens(model, values=True) as lens:
        model.generate(
            input_ids=IDS, attention_mask=LEFT, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0,
            cache_implementation=cache, disable_compile=True,
        )  # fmt: skip
    check(lens)


def test_a_window_both_ways() -> None:
    settings = {"local_attention": 6, "num_hidden_layers": 2, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    lens = seen(build("modernbert", **settings), input_ids=IDS, attention_mask=LEFT.flip(1))
    assert not any(call.rule.causal for call in lens)
