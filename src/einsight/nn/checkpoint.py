"""Published models as Hugging Face stores them: their configurations, their weights and their names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from einsight.nn.positions import Llama3Scaling

# What a name of theirs begins with or holds, and ours in its place.
LLAMA = {
    r"^(model\.)?embed_tokens\.": "embedding.",
    r"^(model\.)?layers\.": "blocks.",
    r"^(model\.)?norm\.": "norm.",
    r"^lm_head\.": "head.",
    r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".feed_forward_norm.",
    r"\.self_attn\.q_proj\.": ".attention.query.",
    r"\.self_attn\.k_proj\.": ".attention.key.",
    r"\.self_attn\.v_proj\.": ".attention.value.",
    r"\.self_attn\.o_proj\.": ".attention.out.",
    r"\.self_attn\.q_norm\.": ".attention.query_norm.",
    r"\.self_attn\.k_norm\.": ".attention.key_norm.",
    r"\.mlp\.(gate|up|down)_proj\.": r".feed_forward.\1.",
}
GPT2 = {
    r"^(transformer\.)?wte\.": "embedding.",
    r"^(transformer\.)?wpe\.": "positions.",
    r"^(transformer\.)?h\.": "blocks.",
    r"^(transformer\.)?ln_f\.": "norm.",
    r"^lm_head\.": "head.",
    r"\.ln_1\.": ".attention_norm.",
    r"\.ln_2\.": ".feed_forward_norm.",
    r"\.attn\.c_proj\.": ".attention.out.",
    r"\.mlp\.c_fc\.": ".feed_forward.up.",
    r"\.mlp\.c_proj\.": ".feed_forward.down.",
}
# Who holds one of these names its weights so.
SIGNS = {r"^(model\.)?(embed_tokens|layers)\.|^model\.norm\.": LLAMA, r"^(transformer\.)?(wte|wpe|h|ln_f)\.": GPT2}
# GPT-2 wrote its causal mask into old checkpoints.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_WEIGHT = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")


def adapted(state: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Weights under our names, whether they came under ours or Hugging Face's. A head that is tied is left out.

    Raises ValueError where two are one weight of ours, or a head to be tied isn't the embedding.
    """
    table = next((t for sign, t in SIGNS.items() if any(re.search(sign, name) for name in state)), None)
    if table is None:
        return state
    found: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in state.items():
        if _NO_WEIGHT.search(name):
            continue
        new = name
        for theirs, ours in table.items():
            new = re.sub(theirs, ours, new)
        if new in origins:
            raise ValueError(f"{origins[new]} and {name} are both the weight {new}; only one can be")
        origins[new] = name
        if table is GPT2 and re.search(r"\.c_\w+\.weight$", name):
            tensor = tensor.mT.contiguous()  # theirs are [in, out]
        if ".attn.c_attn." in name:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[new.replace(".attn.c_attn.", f".attention.{part}.")] = piece.contiguous()
        else:
            found[new] = tensor
    if tied and "head.weight" in found:
        if not is_tied(found):
            raise ValueError(
                "lm_head.weight differs from the embedding, but a tied decoder has the embedding for a head: make it "
                "with DecoderConfig(…, tied=False)"
            )
        del found["head.weight"]
    return found


def is_tied(weights: dict[str, Tensor]) -> bool:
    """Whether the head, if there is one, is the embedding."""
    head, embedding = weights.get("head.weight"), weights.get("embedding.weight")
    return head is None or head is embedding or (embedding is not None and torch.equal(head, embedding))


def adapt(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """A state-dict hook: lets `load_state_dict` take Hugging Face's names as well as ours."""
    own = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({prefix + name: tensor for name, tensor in adapted(own, module.config.tied).items()})


def check(state: dict[str, Tensor], model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Refuse weights that are not the model's, before any is loaded."""
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in state.items()}
    missing, unknown = [n for n in wanted if n not in given], [n for n in given if n not in wanted]
    if missing or unknown:
        said = [f"{what}: {_some(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ValueError(f"{folder}: the weights are not those of its config.json ({'; '.join(said)})")
    wrong = [name for name in wanted if wanted[name] != given[name]]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{folder}: {len(wrong)} weights have another shape than config.json asks for: {name} is {given[name]}, "
            f"expected {wanted[name]}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read(folder: str | os.PathLike[str], dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of a `DecoderConfig`, and the weights under our names."""
    if dtype not in _DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, not {dtype!r}")
    folder = Path(folder).expanduser()
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so it isn't a Hugging Face model folder")
    config = _json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type is {family!r}, but Decoder knows {', '.join(map(repr, FAMILIES))}")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{path}: the weights are quantised, which Decoder can't read; take the model's plain weights")
    try:
        settings = FAMILIES[family](config)
    except KeyError as error:
        raise ValueError(f"{path} says nothing of {error.args[0]}, which a {family} model needs") from error
    except NotImplementedError as error:
        raise ValueError(f"{path}: {error}, which Decoder doesn't have") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    stored = _weights(folder)
    try:
        weights = adapted(stored, tied=False)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    strange = next((name for name, tensor in weights.items() if tensor.dtype not in _DTYPES), None)
    if strange is not None:
        raise ValueError(
            f"{folder}: {strange} is {weights[strange].dtype}, so the weights are quantised, which Decoder can't read; "
            "take the model's plain weights"
        )
    # As transformers does it: a head of its own in the file counts for more than what the configuration says.
    if settings["tied"] and is_tied(weights):
        weights.pop("head.weight", None)
    else:
        settings["tied"] = False
    # Copies, since the file is mapped into memory: nothing that happens to it later reaches the model.
    return settings, {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(found).__name__}")
    return cast(dict[str, Any], found)


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError('safetensors is not installed: pip install "einsight[look]"') from error
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        named: Any = _json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ValueError(f"{index} must say in weight_map which file holds each weight")
        files = [folder / Path(name).name for name in sorted(set(named.values()))]
    else:
        raise FileNotFoundError(f"{folder} holds no model.safetensors; weights in pickles (.bin, .pt) are never opened")
    weights: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index.name} names {file.name}, which {folder} doesn't hold")
        try:
            weights.update(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    return weights


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise NotImplementedError(f"hidden_act is {config['hidden_act']!r}")
    base, scaling = _rotary(config)
    return {
        "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "max_length": config["max_position_embeddings"],
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "proj_bias": bool(config.get("attention_bias", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "tied": config.get("tie_word_embeddings", False),
    }


def _rotary(config: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    # Since transformers 5 all is in rope_parameters; before, the base stood apart.
    given = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    for name, rope in given.items():
        if not isinstance(rope, dict):
            raise ValueError(f"{name} must be an object, not {rope!r}")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError("rope_parameters and rope_scaling say different things; leave one out")
    rope = next(iter(given.values()), {})
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) not in (1, None):
        raise NotImplementedError("partial_rotary_factor is set")
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise NotImplementedError(f"rope_type is {kind!r}")
    return base, Llama3Scaling(
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )


def _mistral(config: dict[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "window": config.get("sliding_window")}


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "proj_bias": "qkv", "window": _qwen_window(config)}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    settings = {"head_dim": 128, **{n: s for n, s in _llama(config).items() if n != "head_dim" or s is not None}}
    return {**settings, "qk_norm": settings["norm_eps"], "window": _qwen_window(config)}


def _qwen_window(config: dict[str, Any]) -> int | None:
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return None
    layers = config["num_hidden_layers"]
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    if len(set(kinds[:layers])) > 1:
        raise NotImplementedError("some layers have a sliding window and some have none")
    return config["sliding_window"] if kinds[0] == "sliding_attention" else None


def _gpt2(config: dict[str, Any]) -> dict[str, Any]:
    activation = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    if config.get("activation_function", "gelu_new") not in activation:
        raise NotImplementedError(f"activation_function is {config['activation_function']!r}")
    for name, plain in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(name, plain) != plain:
            raise NotImplementedError(f"{name} is {config[name]}")
    return {
        "vocab_size": config["vocab_size"],
        "embed_dim": config["n_embd"],
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "hidden_dim": config.get("n_inner") or 4 * config["n_embd"],
        "max_length": config["n_positions"],
        "positions": "learned",
        "proj_bias": True,
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": activation[config.get("activation_function", "gelu_new")],
        "mlp_bias": True,
        "tied": config.get("tie_word_embeddings", True),
    }


FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}
