"""What a page holds, against dense weights in float64."""

import pytest
import torch
import transformers as hf
from report.stored import arrays, decoded, header, step

import einsight as es
from einsight import report
from einsight.lens import Lens
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
        count = seen[0].sum(-1)
        told = {"first": place != first, "previous": place != first, "next": place < 22, "strongest": count > 1}
        for statistic, values in shown.items():
            asked = (count > (0 if w is dense else 1)) & told.get(statistic, torch.tensor(True))
            assert values[0] == pytest.approx(want[statistic][:, asked].mean(-1).tolist(), abs=3e-6), statistic


def test_received_without_the_first_token(tmp_path):
    weights, exact = problem(es.causal())
    found, dense = arrays(report.html(weights, tmp_path / "page.html"), 0, 0), exact.dense()[0]
    left = 1 - dense[..., 0]
    rest = torch.where(left > 0.004, 1 / left, 0)[..., None] * dense
    rest[..., 0] = 0
    want = rest.sum(1) / torch.arange(23, 0, -1)
    assert torch.allclose(found["received_without_first"].double(), want.flatten(), rtol=2e-3, atol=1e-7)


def found_in(tokens, tmp_path, mask=None):
    weights, _ = problem(es.causal() if mask is None else mask, len(tokens), len(tokens))
    return header(report.html(weights, tmp_path / "page.html", tokens=tokens))["parts"][0]


@pytest.mark.parametrize(
    ("tokens", "targets"),
    [
        ("abcab", [-1, -1, -1, -1, 2]),
        ("xabxabxab", [-1, -1, -1, -1, 2, 3, 4, 5, 6]),
        ("abacad", None),  # "a" alone comes again
        ("abc", None),
        ("abcddabcdd", [-1, -1, -1, -1, -1, -1, 2, 3, 4, -1]),  # a run of equal tokens is no phrase
    ],
)
def test_the_page_opens_where_two_tokens_repeat(tmp_path, tokens, targets):
    assert found_in([*tokens], tmp_path)["targets"] == targets


def test_induction_is_left_out_where_nothing_repeats_or_only_runs_do(tmp_path):
    def told(tokens):
        return "induction" in found_in(tokens, tmp_path)["statistics"]

    assert told([*"abacad"])
    assert not told([*"abcdef"])
    assert not told(["a", "b", *["<image>"] * 30, "c", "a", "b"])
    assert told(["a", "b", *["<image>"] * 3, *"cabcabc"])


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("long", [False, True])
def test_statistics_are_those_of_the_lens_table(tmp_path, padding, long, monkeypatch):
    """What the terminal's `look` tells of a head is what the page tells."""
    if long:
        monkeypatch.setattr(surveys, "WHOLE", 16)
    torch.manual_seed(0)
    ids = torch.randint(3, 12, (1, 41))
    kept = torch.ones(1, 41, dtype=torch.long)
    if padding != "none":
        kept[:, slice(0, 6) if padding == "left" else slice(-6, None)] = 0
        ids[kept == 0] = 0
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=12,
            hidden_size=24,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
        )
    ).eval()
    with torch.inference_mode(), Lens(model) as lens:
        model(ids, attention_mask=kept)
    tokens = [f" w{n}" if n else "<pad>" for n in ids[0].tolist()]
    about = header(report.html(lens, tmp_path / "page.html", tokens=tokens))["parts"][0]
    assert about["padded"] == (None if padding == "none" else (kept[0] == 0).nonzero().flatten().tolist())
    rows = list(lens.heads({"input_ids": ids, "attention_mask": kept}))
    for name in ("entropy", "first", "previous", "induction", "distance"):
        found = [value for layer in about["statistics"][name] for value in layer]
        assert found == pytest.approx([row[name] for row in rows], rel=1e-4, abs=2e-6), name
    assert about["first"] == (6 if padding == "left" else 0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("said", ["by the tokens", "by the tokenizer"])
def test_padding_is_left_out(tmp_path, side, causal, said, without_shape_checks):
    """Rows of padding as Hugging Face's dense attentions hold them: alike over all keys."""
    torch.manual_seed(0)
    real = torch.arange(17) >= 5 if side == "left" else torch.arange(17) < 12
    seen = (real & torch.ones(17, 17, dtype=torch.bool).tril(0 if causal else 17)) | ~real[:, None]
    dense = torch.randn(1, 3, 17, 17).masked_fill(~seen, -torch.inf)
    dense[:, :, ~real] = 0
    dense = dense.softmax(-1)
    tokens = [f" w{n % 4}" if real[n] else "<|endoftext|>" for n in range(17)]
    if said == "by the tokenizer":
        tokens = Encoded(tokens, real)
    page = report.html(dense, tmp_path / "page.html", tokens=tokens)
    about, found = header(page)["parts"][0], arrays(page, 0, 0)
    assert about["padded"] == (~real).nonzero().flatten().tolist()
    inside = dense[0][:, real][:, :, real].double()
    entropy = -(inside * inside.clamp(min=1e-30).log()).sum(-1).mean(-1)
    assert about["statistics"]["entropy"][0] == pytest.approx(entropy.tolist(), rel=1e-5)
    assert found["weights"][:, ~real].isnan().all()
    count = seen[real][:, real].sum(0)
    received = found["received"].view(3, 17)
    assert torch.allclose(received[:, real].double(), inside.sum(1) / count, rtol=3e-3)
    assert (received[:, ~real] == 0).all()


class Encoded(dict):
    """A fast tokenizer's output, as far as it is asked."""

    def __init__(self, tokens, real):
        super().__init__(input_ids=[list(range(len(tokens)))], attention_mask=real.long()[None])
        self.words = tokens

    input_ids = property(lambda self: self["input_ids"])

    def tokens(self, item):
        return self.words


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
