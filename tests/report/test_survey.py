"""What a page holds, against dense weights in float64."""

import pytest
import torch
from report.stored import arrays, decoded, header, step

import einsight as es
from einsight import report
from einsight.report import readouts
from einsight.report import survey as surveys


def problem(mask, i=23, j=23, h=3, g=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, h, i, 5, generator=draw) * 2, torch.randn(1, g, j, 5, generator=draw)
    offset = None if i == j else j - i
    return es.AttentionWeights(q, k, mask, offset=offset), es.AttentionWeights(
        q.double(), k.double(), mask, offset=offset
    )


MASKS = {
    "causal": es.causal(),
    "all": None,
    "window": es.window(4, 0),
    "left padding": es.causal() & es.padding(torch.arange(23)[None] >= 3),
    "documents": es.documents(torch.arange(23) // 6) & es.causal(),
    "gaps": es.where(lambda b, h, p, j: (p - j) % 2 == 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_weight_within_its_step(tmp_path, name):
    weights, exact = problem(MASKS[name])
    page = report.html(weights, tmp_path / "page.html")
    found, dense = arrays(page, 0, 0), exact.dense()[0]
    seen = (exact.scores() > -torch.inf).expand(exact.shape)[0]
    assert torch.equal(found["weights"].isnan(), ~seen)
    assert ((found["weights"].nan_to_num() - dense).abs() <= step(dense) + 1e-6).all()
    received = exact.received(mean=True)[0].flatten()
    assert torch.allclose(found["received"].double(), received, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("name", MASKS)
def test_statistics_with_and_without_the_first_token(tmp_path, name):
    weights, exact = problem(MASKS[name])
    about = header(report.html(weights, tmp_path / "page.html"))["parts"][0]
    dense = exact.dense()[0]
    seen = (exact.scores() > -torch.inf).expand(exact.shape)[0]
    first = int(seen.any(0).any(0).nonzero()[0])
    assert about["first"] == first
    left = 1 - dense[..., first]
    rest = torch.where(left > 0.004, 1 / left, 0)[..., None] * dense
    rest[..., first] = 0
    place = torch.arange(23)
    for shown, w in ((about["statistics"], dense), (about["without_first"], rest)):
        want = {
            "entropy": -(w * w.clamp(min=1e-300).log()).sum(-1),
            "first": w[..., first],
            "previous": torch.cat([torch.zeros(3, 1), w.diagonal(-1, -2, -1)], 1),
            "next": torch.cat([w.diagonal(1, -2, -1), torch.zeros(3, 1)], 1),
            "distance": (w * (place[:, None] - place).abs()).sum(-1),
            "strongest": w.amax(-1),
        }
        asked = seen[0].sum(-1) > 1
        for statistic, values in shown.items():
            assert values[0] == pytest.approx(want[statistic][:, asked].mean(-1).tolist(), abs=3e-6), statistic


def test_received_without_the_first_token(tmp_path):
    weights, exact = problem(es.causal())
    found, dense = arrays(report.html(weights, tmp_path / "page.html"), 0, 0), exact.dense()[0]
    left = 1 - dense[..., 0]
    rest = torch.where(left > 0.004, 1 / left, 0)[..., None] * dense
    rest[..., 0] = 0
    want = rest.sum(1) / torch.arange(23, 0, -1)
    assert torch.allclose(found["received_without_first"].double(), want.flatten(), rtol=2e-3, atol=1e-7)


def test_induction_is_where_two_tokens_repeat():
    assert surveys.repeats(list("abcab")).tolist() == [-1, -1, -1, -1, 2]
    assert surveys.repeats(list("xabxabxab")).tolist() == [-1, -1, -1, -1, 2, 3, 4, 5, 6]
    assert surveys.repeats(list("abacad")) is None  # "a" alone comes again
    assert surveys.repeats([]) is None


def test_induction_is_left_out_where_nothing_repeats(tmp_path):
    weights, exact = problem(es.causal())
    tokens = [*"abcabdxyzuvwabc", *"12345678"]
    page = report.html(weights, tmp_path / "page.html", tokens=tokens)
    about = header(page)["parts"][0]
    targets = torch.tensor(about["targets"])
    asked = (targets >= 0).nonzero().flatten()
    assert targets[asked].tolist() == [2, 5, 3]
    want = exact.dense()[0][:, asked, targets[asked]].mean(-1)
    assert about["statistics"]["induction"][0] == pytest.approx(want.tolist(), abs=1e-6)
    other = header(report.html(weights, tmp_path / "other.html", tokens=[str(n) for n in range(23)]))["parts"][0]
    assert "induction" not in other["statistics"]


@pytest.fixture
def short_pages(monkeypatch):
    monkeypatch.setattr(surveys, "WHOLE", 16)
    monkeypatch.setattr(surveys, "CELLS", 7)
    monkeypatch.setattr(surveys, "STRONGEST", 400)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("i", [23, 19])
def test_long_inputs_keep_the_strongest_keys(tmp_path, short_pages, name, i):
    weights, exact = problem(MASKS[name], i)
    page = report.html(weights, tmp_path / "page.html")
    about, found, dense = header(page)["parts"][0], arrays(page, 0, 0), exact.dense()[0]
    count, block = about["strongest"], about["block"]
    assert (about["whole"], block, count) == (False, 4, 400 // (3 * i))
    top = exact.topk(count)
    codes = found["top"].view(3, count, i)
    keys = (torch.arange(i) + about["offset"] - found["keys"].view(3, count, i)) % 23
    strong = codes > 0
    want = dense.gather(-1, keys.mT).mT
    assert ((decoded(codes) - want).abs() <= step(want) + 1e-6)[strong].all()
    assert torch.equal(strong.sum(1), (decoded(readouts.coded(top.weights[0].float())) > 0).sum(-1))
    covered = top.weights[0].sum(-1)
    assert ((found["covered"].view(3, i) / 255 - covered).abs() <= 0.5 / 255 + 1e-6).all()
    pool, cells = exact.pool(block)[0], decoded(found["pool"].view(3, -1, 6))
    assert ((cells.nan_to_num() - pool).abs() <= step(pool) + 1e-6).all()
    seen = (exact.scores() > -torch.inf)[0]
    whole = torch.zeros(len(pool[0]) * block, 6 * block, dtype=torch.bool)
    lo, hi = found["lo"], found["hi"]
    j = torch.arange(23)
    whole[:i, :23] = (j >= lo[:, None]) & (j < hi[:, None])
    assert torch.equal(~cells[0].isnan(), whole.unflatten(0, (-1, block)).unflatten(2, (-1, block)).any(3).any(1))
    assert (seen.any(0) <= whole[:i, :23]).all()
    assert about["gaps"] == (name == "gaps")


def test_lengths_are_those_of_the_heads_output():
    weights, exact = problem(es.causal(), g=1)
    draw = torch.Generator().manual_seed(1)
    value, matrix = torch.randn(1, 23, 7, generator=draw), torch.randn(3, 11, 7, generator=draw)
    stream = torch.randn(23, 11, generator=draw)
    found = surveys.lengths(weights, value, matrix, stream)
    moved = torch.einsum("hme,gje->hjm", matrix.double(), value.double())
    output = torch.einsum("hme,hie->him", matrix.double(), exact.dense()[0] @ value.double())
    for name, want in [
        ("value", value.norm(dim=-1).expand(3, -1)),
        ("write", moved.norm(dim=-1)),
        ("out", output.norm(dim=-1)),
        ("stream", stream.norm(dim=-1)),
    ]:
        assert torch.allclose(found[name].double(), want.double(), rtol=1e-4), name
    alone = surveys.lengths(weights, value, None, stream)
    assert alone.keys() == {"value", "out"}
    assert torch.allclose(alone["out"].double(), (exact.dense()[0] @ value.double()).norm(dim=-1), rtol=1e-4)


def test_nan_is_refused(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    q[0, 1, 3] = torch.nan
    with pytest.raises(ValueError, match="the weights hold NaN"):
        report.html(es.AttentionWeights(q, q), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
