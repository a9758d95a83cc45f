"""The picture for paper."""

import io
import sys

import pytest
import torch
from PIL import Image
from torch import nn

from einsight import report
from einsight.lens import Lens
from einsight.report.write import progress


def dense(i=9, j=9, layers=3, h=2):
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.softmax(torch.randn(1, h, i, j, generator=draw) * 3, -1) for _ in range(layers))


def coloured(path):
    """How many pixels are the paper's, and how many the accent's."""
    image = torch.frombuffer(bytearray(Image.open(path).convert("RGB").tobytes()), dtype=torch.uint8).view(-1, 3)
    return [int((image == torch.tensor(colour)).all(1).sum()) for colour in ((252, 251, 248), (194, 71, 15))]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens": [*"ab$c$\nfg", "\ud800"]},
        {"head": (2, 1)},
        {"image": torch.rand(30, 30), "grid": (2, 4)},
        {"grid": (3, 3)},
    ],
)
def test_pictures(tmp_path, settings):
    path = report.png(dense(), tmp_path / "page.png", **settings)
    paper, accent = coloured(path)
    assert paper > 100_000
    assert accent > 300


def test_two_texts_and_many_tokens(tmp_path):
    report.png(dense(4, 7), tmp_path / "page.png", tokens=[*"abcd"], key_tokens=[*"tuvwxyz"])
    report.png(dense(600, 600, 1, 1), tmp_path / "page.png")


def test_masked_is_paper(tmp_path):
    causal = tuple((w * torch.ones(9, 9).tril()) for w in dense())
    causal = tuple(w / w.sum(-1, keepdim=True) for w in causal)
    there = coloured(report.png(causal, tmp_path / "a.png"))[0]
    assert there > coloured(report.png(dense(), tmp_path / "b.png"))[0] + 50_000


@pytest.mark.parametrize(("head", "error"), [((3, 0), ValueError), ((0, 2), ValueError), (5, TypeError)])
def test_refused_heads(tmp_path, without_shape_checks, head, error):
    with pytest.raises(error, match="head"):
        report.png(dense(), tmp_path / "page.png", head=head)


@pytest.mark.parametrize(
    ("write", "module", "said"),
    [
        (report.png, "matplotlib.figure", r'png needs matplotlib: pip install "einsight\[look\]"'),
        (report.html, "jinja2", r'the report needs jinja2: pip install "einsight\[look\]"'),
    ],
)
def test_without_the_extra(tmp_path, monkeypatch, write, module, said):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=said):
        write(dense(), tmp_path / "page")


def test_cross_attention_is_drawn_where_its_keys_are_named(tmp_path):
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True).eval()
    with torch.no_grad(), Lens(model) as lens:
        model(torch.randn(1, 7, 8), torch.randn(1, 4, 8))
    pages = [
        report.png(lens, tmp_path / name, tokens=[*"abcd"], **more).read_bytes()
        for name, more in (("own.png", {}), ("cross.png", {"key_tokens": [*"tuvwxyz"]}))
    ]
    assert pages[0] != pages[1]


def test_a_line_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(2) as step:
        step()
        step()
    assert "writing the report" in terminal.getvalue()
