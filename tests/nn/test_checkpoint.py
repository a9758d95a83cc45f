"""Published models: tiny random ones of every family beside transformers' own, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nn.helpers import close, decoder, refused, tokens
from torch import Tensor

from einsight.nn import Decoder

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file

UP = "model.layers.0.mlp.up_proj.weight"

LLAMA = {
    "vocab_size": 53, "hidden_size": 20, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": ROPE, "head_dim": 14}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": 5}),
    "mistral without a window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 14}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2 with a window": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 14}),
    "gpt2": ("GPT2", {}),
    "gpt2 of another width": ("GPT2", {"n_inner": 31, "activation_function": "gelu"}),
}


def save(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, written to the folder."""
    name, settings = FAMILIES[family]
    sizes: dict[str, Any] = LLAMA
    if name == "GPT2":
        sizes = {"vocab_size": 53, "n_positions": 64, "n_embd": 20, "n_layer": 2, "n_head": 2, "resid_pdrop": 0,
                 "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **settings, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_logits_and_tokens(family: str, tmp_path: Path) -> None:
    model = save(tmp_path, family)
    ours = Decoder.from_pretrained(tmp_path)
    assert not ours.training and all(p.requires_grad for p in ours.parameters())
    prompt = tokens(2, 19, vocab=53)
    with torch.no_grad():
        low = []
        for kind in ("eager", "sdpa"):
            model.set_attn_implementation(kind)
            low.append(model(prompt).logits)
        exact = model.double()(prompt).logits
        model.float()
        close(ours(prompt), exact, low)
        right = model.generate(prompt, max_new_tokens=23, do_sample=False)[:, 19:]
    assert torch.equal(ours.generate(prompt, 23, temperature=0), right)
    # The same by loading their state dict, through the hook.
    made = Decoder(ours.config)
    made.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), ours.parameters(), strict=True))


def test_our_own_names_are_taken_too() -> None:
    model = decoder()
    other = Decoder(model.config)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    holder = torch.nn.ModuleDict({"decoder": Decoder(model.config)})
    holder.load_state_dict({f"decoder.{name}": tensor for name, tensor in model.state_dict().items()})


def test_dtype_and_shards(tmp_path: Path) -> None:
    model = save(tmp_path, "llama")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    (tmp_path / "model.safetensors").unlink()
    made = Decoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert made.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(made.embedding.weight, model.model.embed_tokens.weight.bfloat16())
    next(tmp_path.glob("model-00002*")).unlink()
    with refused(FileNotFoundError, r"names model-00002-of-.*, which .* doesn't hold"):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("rope", [{"rope_theta": 500.0, "rope_scaling": {**ROPE, "type": "llama3"}}])
def test_configurations_of_older_transformers(rope: dict, tmp_path: Path) -> None:
    save(tmp_path, "llama 3")
    right = Decoder.from_pretrained(tmp_path).config
    change(tmp_path, rope_parameters=None, **rope)
    assert Decoder.from_pretrained(tmp_path).config == right


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "mamba"}, "model_type is 'mamba', but Decoder knows 'llama', 'mistral'"),
        ("llama", {"hidden_size": ...}, "says nothing of hidden_size, which a llama model needs"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu', which Decoder doesn't have"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', which Decoder doesn't have"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is set"),
        ("llama", {"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ("llama", {"intermediate_size": 37}, r"6 weights have another shape .* is \[31, 20\], expected \[37, 20\]"),
        ("llama", {"num_hidden_layers": 3}, "not those of its config.json .missing: blocks.2.* and 6 more"),
        ("llama", {"num_hidden_layers": 1}, r"unknown: blocks\.1\..*"),
        ("llama", {"model_type": "qwen2"}, r"missing: blocks\.0\.attention\.query\.bias"),
        ("llama", {"model_type": "qwen3"}, r"missing: blocks\.0\.attention\.query_norm\.weight"),
        (
            "qwen2 with a window",
            {"max_window_layers": 1, "layer_types": None},
            "some layers have a sliding window and some have none",
        ),
        ("llama", {"rope_parameters": "linear"}, "rope_parameters must be an object, not 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_parameters and rope_scaling say different things"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": None}},
            r"config\.json: RotaryEmbedding's base must be a positive",
        ),
        ("llama", {"rope_parameters": {**ROPE, "factor": "8"}}, r"json: Llama3Scaling's factor must be a positive"),
        ("llama", {"hidden_size": "20"}, r"config\.json: embed_dim must be a positive int, not '20'"),
        (
            "llama",
            {"num_attention_heads": 3, "head_dim": None},
            r"config\.json: embed_dim=20 is not divisible by num_heads=3",
        ),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_another_shape_or_family(family: str, changes: dict, message: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    change(tmp_path, **changes)
    with refused(ValueError, message):
        Decoder.from_pretrained(tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(path).items()}), path)


def test_a_head_of_its_own_where_config_json_says_it_is_tied(tmp_path: Path) -> None:
    """transformers unties it then, and so do we; one that is the embedding changes nothing."""
    save(tmp_path, "llama", tie_word_embeddings=False)
    change(tmp_path, tie_word_embeddings=True)
    prompt = tokens(2, 19, vocab=53)
    ours = Decoder.from_pretrained(tmp_path)
    assert not ours.config.tied
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        close(ours(prompt), deepcopy(model).double()(prompt).logits, [model(prompt).logits])
    tied = Decoder(replace(ours.config, tied=True))
    before = tied.embedding.weight.clone()
    with refused(ValueError, r"lm_head\.weight differs from the embedding, .* DecoderConfig\(…, tied=False\)"):
        tied.load_state_dict(model.state_dict())
    assert torch.equal(before, tied.embedding.weight)
    rewrite(tmp_path, lambda held: {**held, "lm_head.weight": held["model.embed_tokens.weight"].clone()})
    ours = Decoder.from_pretrained(tmp_path)
    assert ours.config.tied and ours.head is None


def test_other_names_of_the_same(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    right = Decoder.from_pretrained(tmp_path)
    change(tmp_path, hidden_act="swish")
    rewrite(tmp_path, lambda held: {name.removeprefix("model."): tensor for name, tensor in held.items()})
    ours = Decoder.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), right.parameters(), strict=True))


def test_buffers_that_are_no_weights(tmp_path: Path) -> None:
    """Older GPT-2s saved their causal masks."""
    save(tmp_path, "gpt2")
    right = Decoder.from_pretrained(tmp_path)
    more = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.1.attn.masked_bias": torch.ones(())}
    rewrite(tmp_path, lambda held: {**held, **more})
    ours = Decoder.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda held: {**held, "norm.weight": torch.ones(20)},
            r"model\.norm\.weight and norm\.weight are both the weight",
        ),
        (
            lambda held: {**held, UP: held[UP].to(torch.int8)},
            r"up\.weight is torch\.int8, so the weights are quantised",
        ),
        (lambda held: {**held, UP: held[UP].to(torch.float8_e4m3fn)}, "float8_e4m3fn, so the weights are quantised"),
        (lambda held: {n: t for n, t in held.items() if "embed" not in n}, r"missing: embedding\.weight\)"),
        (lambda held: {**held, "foo": torch.ones(3)}, r"unknown: foo\)"),
    ],
)
def test_weights_refused(changed: Any, message: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    rewrite(tmp_path, changed)
    with refused(ValueError, message):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", torch.int64, torch.float8_e4m3fn, None])
def test_dtypes_refused(dtype: Any, tmp_path: Path) -> None:
    with refused(TypeError, r"dtype must be one of torch\.float32, torch\.bfloat16, .*, not "):
        Decoder.from_pretrained(tmp_path, dtype=dtype)


def test_what_happens_to_the_file_later_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    ours = Decoder.from_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\0" * size)  # cut off, it would end the process
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"index\.json is not JSON"),
        ("[]", r"index\.json must hold a JSON object, not list"),
        ("{}", "must say in weight_map which file holds each weight"),
        ('{"weight_map": {"a": 3}}', "must say in weight_map which file holds each weight"),
        ('{"weight_map": []}', "must say in weight_map which file holds each weight"),
    ],
)
def test_an_index_that_says_nothing(text: str, message: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with refused(ValueError, message):
        Decoder.from_pretrained(tmp_path)


def test_a_corrupt_file(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for spoilt in (whole[:-100], b"", b"\xff" * 100, whole[:50]):
        path.write_bytes(spoilt)
        with refused(ValueError, r"model\.safetensors is not a whole safetensors file"):
            Decoder.from_pretrained(tmp_path)


def test_no_model(tmp_path: Path) -> None:
    with refused(FileNotFoundError, r"holds no config\.json"):
        Decoder.from_pretrained(tmp_path)
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with refused(FileNotFoundError, r"no model\.safetensors; weights in pickles .* are never opened"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with refused(ValueError, "is not JSON"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with refused(ValueError, r"config\.json must hold a JSON object, not list"):
        Decoder.from_pretrained(tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with refused(ImportError, r'pip install "einsight\[look\]"'):
        Decoder.from_pretrained(tmp_path)


def test_smollm2(smol: Any) -> None:
    from einsight import models

    theirs, tokenizer = smol
    ours = Decoder.from_pretrained(models.default_folder())
    text = Path(__file__).parents[2].joinpath("examples", "passage.txt").read_text()
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    prompt = prompt.repeat(1, 512 // prompt.shape[1] + 1)[:, :512]
    with torch.inference_mode():
        low = [theirs(prompt).logits]
        got = ours(prompt)
        theirs.set_attn_implementation("eager")
        low.append(theirs(prompt).logits)
        theirs.set_attn_implementation("sdpa")
        right = theirs.generate(prompt[:, :100], max_new_tokens=64, min_new_tokens=64, do_sample=False)[:, 100:]
        assert torch.equal(ours.generate(prompt[:, :100], 64, temperature=0), right)
        exact = deepcopy(theirs).double()(prompt).logits  # other tests use the model too
    close(got, exact, low)
