"""The training example at a tiny size: it learns, and a run that was interrupted ends as one that wasn't."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

safetensors = pytest.importorskip("safetensors")

TINY = {"steps": 12, "batch": 3, "length": 17, "width": 20, "layers": 2, "heads": 2, "warm_up": 3, "every": 5}
ARGUMENTS = [f"--{name}={value}" for name, value in TINY.items()]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "train_decoder.py"
    spec = importlib.util.spec_from_file_location("train_decoder", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_decoder"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def short_text(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt, judged = example.text()
    monkeypatch.setattr(example, "text", lambda: (learnt[:5000], judged[:500]))


def test_resumes_to_the_last_bit(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example.main([*ARGUMENTS, "--folder", str(tmp_path / "whole")])
    saves = []

    def interrupted(*arguments: object) -> None:
        save(*arguments)
        saves.append(arguments)
        raise KeyboardInterrupt

    save = example.save
    monkeypatch.setattr(example, "save", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            example.main([*ARGUMENTS, "--folder", str(tmp_path / "parts")])
    monkeypatch.setattr(example, "save", save)
    example.main([*ARGUMENTS, "--folder", str(tmp_path / "parts")])
    assert [arguments[3] for arguments in saves] == [5, 10]
    whole, parts = (contents(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "parts"))
    assert whole[0] == parts[0] and whole[1].keys() == parts[1].keys()
    assert all(torch.equal(tensor, parts[1][name]) for name, tensor in whole[1].items())
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["checkpoint.safetensors"]


def contents(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_says_what_matters(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main([*ARGUMENTS, "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    for words in ("loss", "tokens/s", "left", "validation loss", "a bigram model's is", "processor time", "\nThe "):
        assert words in said


def test_learns(example: ModuleType, tmp_path: Path) -> None:
    settings = example.Settings(**{**TINY, "steps": 40})
    model = example.train(settings, tmp_path)
    judged = example.text()[1]
    torch.manual_seed(0)
    untrained = example.es.nn.Decoder(settings.config())
    before = example.validation_loss(untrained, judged, 17)
    assert abs(before - math.log(256)) < 0.1
    assert example.validation_loss(model, judged, 17) < before - 0.5


def test_bigram(example: ModuleType) -> None:
    text = torch.tensor([0, 1] * 50)
    right = -math.log((50 + 0.1) / (50 + 25.6))
    assert example.bigram_loss(text, torch.tensor([0, 1])) == pytest.approx(right, rel=1e-12)


def test_rate(example: ModuleType) -> None:
    settings = example.Settings(steps=100, warm_up=10, rate=1.0)
    rates = [example.rate_at(step, settings) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1 and rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_refusals(example: ModuleType, tmp_path: Path) -> None:
    example.main([*ARGUMENTS, "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"a run with other settings: layers is 2, not 1\. Choose another --folder"):
        example.main([*ARGUMENTS, "--layers=1", "--folder", str(tmp_path)])
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(SystemExit, match="is not a whole checkpoint"):
        example.main([*ARGUMENTS, "--folder", str(tmp_path)])
