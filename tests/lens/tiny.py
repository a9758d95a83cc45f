"""Tiny models of the twenty-two architectures for `attn_implementation="einsight"`, their padded inputs, and budgets
for errors from a run in float64."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from lens.architectures import ARCHITECTURES, GROUPED
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEEPSEEK = {
    **GROUPED,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
QWEN2_VL = {
    "text_config": {
        **GROUPED,
        "vocab_size": 60,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    },
    "image_token_id": 55,
    "vision_start_token_id": 56,
    "vision_end_token_id": 57,
    "video_token_id": 58,
}
WINDOWED = {**GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

TINY = {
    name: ARCHITECTURES[name]
    for name in [
        "llama",
        "mistral",
        "qwen3",
        "gemma2",
        "gpt_oss",
        "gpt2",
        "gpt_neox",
        "opt",
        "phi",
        "granite",
        "olmo2",
        "starcoder2",
        "bert",
        "modernbert",
        "t5",
        "bart",
        "vit",
        "whisper",
    ]
} | {
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, WINDOWED, "text"),
    "cohere2": (hf.Cohere2ForCausalLM, hf.Cohere2Config, {**WINDOWED, "eos_token_id": 2, "bos_token_id": 1}, "text"),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, DEEPSEEK, "text"),
    "qwen2_vl": (hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLConfig, QWEN2_VL, "image and text"),
}
DECODERS = [
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "gpt2",
    "gpt_neox",
    "opt",
    "phi",
    "granite",
    "cohere2",
    "olmo2",
    "starcoder2",
    "deepseek_v3",
]


def build(name: str, attention: str, **changes: Any) -> hf.PreTrainedModel:
    """The same random weights for every implementation, large enough that attention is far from uniform."""
    model_class, config_class, settings, _ = TINY[name]
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if name != "qwen2_vl" else {}
    if name in ("gpt_oss", "deepseek_v3"):
        special["experts_implementation"] = "eager"  # the default has no float64
    config = config_class(**{**special, **settings, **changes, "attn_implementation": attention})
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def inputs(name: str, side: str = "left") -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with padding on one side, and which positions of the (last) result are real [b, i]."""
    takes = TINY[name][3]
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 53, (3, 11), generator=draw)
    real = torch.ones(3, 11, dtype=torch.int64)
    if takes == "pixels":
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=draw)}, torch.ones(3, 10, dtype=torch.bool)
    if takes == "image and text":
        ids[:, 3:5] = torch.tensor([56, 55])
        image = torch.randn(3 * 4, 3 * 2 * 2 * 2, generator=draw)
        grid = torch.tensor([[1, 2, 2]]).expand(3, -1)
        if side == "left":
            ids[0, :2], real[0, :2] = 0, 0
        else:
            ids[0, 8:], real[0, 8:] = 0, 0
        kinds = (ids == 55).to(torch.int64)
        given = {"input_ids": ids, "attention_mask": real, "pixel_values": image, "image_grid_thw": grid}
        return given | {"mm_token_type_ids": kinds}, real.bool()
    for item, hidden in ((0, 3), (2, 6)):
        part = slice(0, hidden) if side == "left" else slice(11 - hidden, None)
        ids[item, part], real[item, part] = 0, 0
    if takes == "text":
        return {"input_ids": ids, "attention_mask": real}, real.bool()
    decoder = torch.randint(3, 53, (3, 7), generator=draw)
    kept = torch.ones(3, 7, dtype=torch.int64)
    kept[1, 5:] = 0
    if takes == "pair":
        given = {"input_ids": ids, "attention_mask": real}
    else:
        given = {"input_features": torch.randn(3, 8, 20, generator=draw)}
    return given | {"decoder_input_ids": decoder, "decoder_attention_mask": kept}, kept.bool()


class Exactly(TorchFunctionMode):
    """A float64 model really in float64: models compute norms, rotations and softmax in float32 by themselves."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if function is Tensor.float:
            return args[0].double()
        if function is Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return function(*args, **kwargs)


def exactly(model: hf.PreTrainedModel, given: dict[str, Tensor]) -> tuple[hf.PreTrainedModel, dict[str, Tensor]]:
    return model.double(), {k: v.double() if v.dtype.is_floating_point else v for k, v in given.items()}


def assert_as_good(ours: Tensor, eager: Tensor, exact: Tensor, what: str = "") -> None:
    """Our error is at most twice eager's own, and a rounding."""
    assert ours.shape == eager.shape == exact.shape, what
    if ours.numel():
        size, allowed = exact.abs().max().item(), (eager.double() - exact).abs().max().item()
        error = (ours.double() - exact).abs().max().item()
        rounding = torch.finfo(ours.dtype).eps * size
        assert error <= 2 * allowed + rounding, f"{what}: error {error:.2e}, eager's {allowed:.2e}, size {size:.2e}"
