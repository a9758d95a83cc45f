"""What a page can be about: two texts, parts, images, patches, long and generated text."""

import pytest
import torch
from report.conftest import settled, spaced
from report.pages import inside, point, press, said, shown, state, token
from report.stored import header, step

import einsight as es
from einsight import report
from einsight.lens import Lens


def test_generated_text(visit, text):
    page = visit(text)
    rule = page.locator(".generated")
    assert rule.inner_text() == "generated from here on"
    above = page.evaluate(
        "document.querySelector('.generated').previousElementSibling.querySelector('.t:last-of-type').dataset.i"
    )
    assert above == "11"


def test_cross_attention(visit, tmp_path):
    weights = torch.softmax(torch.randn(1, 3, 4, 7) * 3, -1)
    path = report.html(weights, tmp_path / "page.html", tokens=spaced([*"abcd"]), key_tokens=spaced([*"tuvwxyz"]))
    page = visit(path)
    head = state(page, "head")
    point(page, 2, text=0)
    assert (state(page, "direction"), state(page, "focus")) == ("out", 2)
    assert ((shown(page) - weights[0, head, 2]).abs() <= step(weights[0, head, 2]) + 1e-6).all()
    point(page, 5, text=1)
    assert (state(page, "direction"), state(page, "focus")) == ("in", 5)
    assert ((shown(page) - weights[0, head, :, 5]).abs() <= step(weights[0, head, :, 5]) + 1e-6).all()
    token(page, 1, text=0).click()
    point(page, 4, text=1)
    assert page.evaluate("pair()") == [1, 4]
    press(page, "/")
    page.keyboard.type("w")
    settled(page)
    assert (page.evaluate("S.found"), page.evaluate("S.foundKeys")) == ([], [3])
    assert said(page, "found") == "0 places in the queries, 1 place in the keys"
    page.fill("#find", "no")
    settled(page)
    assert said(page, "found") == "nowhere in the texts"


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_two_long_texts_are_usable_together(visit, tmp_path, width):
    torch.manual_seed(0)
    weights = torch.softmax(torch.randn(1, 3, 170, 310) * 4, -1)
    tokens, keys = [f" query{n}" for n in range(170)], [f" key{n}" for n in range(310)]
    page = visit(
        report.html(weights, tmp_path / "page.html", tokens=tokens, key_tokens=keys), {"width": width, "height": 844}
    )
    page.evaluate("document.querySelector('#text-note').scrollIntoView()")
    settled(page)
    boxes = [page.locator(".text").nth(n).bounding_box() for n in (0, 1)]
    for box in boxes:
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 844 - page.locator("#text-read").bounding_box()["height"]
        assert box["height"] >= 200
    if width > 560:
        assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    for n in (2, 5):
        point(page, n, text=0)
        settled(page)
        half = (
            (weights[0, state(page, "head"), n] > 0.51 * weights[0, state(page, "head"), n].max()).nonzero().flatten()
        )
        assert any(inside(token(page, k, text=1).bounding_box(), boxes[1]) for k in half.tolist())
        assert inside(token(page, n, text=0).bounding_box(), boxes[0])  # the text that is read stays


def test_parts(visit, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Transformer(12, 2, 2, 2, 8, batch_first=True).eval()
    with torch.no_grad(), Lens(model) as lens:
        model(torch.randn(1, 7, 12), torch.randn(1, 5, 12))
    page = visit(report.html(lens, tmp_path / "page.html", tokens=[*"vwxyz"], key_tokens=[*"abcdefg"]))
    assert page.locator("#parts button").all_inner_texts() == ["encoder", "decoder", "cross-attention"]
    page.click("#parts [data-v='2']")
    page.wait_for_selector("html[data-ready='2']", state="attached")
    settled(page)
    assert "5 tokens looking at 7 keys" in said(page, "about")
    assert page.locator(".text").count() == 2


def test_an_image(visit, tmp_path):
    weights = torch.softmax(torch.randn(1, 2, 13, 13) * 2, -1)
    page = visit(report.html(weights, tmp_path / "page.html", image=torch.rand(30, 40, 3), grid=(3, 4)))
    head = state(page, "head")
    box = page.locator(".patches").bounding_box()
    assert box["width"] / box["height"] == pytest.approx(4 / 3, rel=0.02)
    page.mouse.move(box["x"] + box["width"] * 2.5 / 4, box["y"] + box["height"] * 1.5 / 3)
    settled(page)
    assert state(page, "focus") == 1 + 1 * 4 + 2
    assert ((shown(page) - weights[0, head, 7]).abs() <= step(weights[0, head, 7]) + 1e-6).all()
    assert said(page, "text-read").startswith("patch 1,27 looks at")
    point(page, 0)
    assert state(page, "focus") == 0


def test_long_input(visit, tmp_path):
    n = 4096
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, n, 8, generator=draw) * 1.5 for _ in range(2))
    weights = es.AttentionWeights(q, k, es.causal())
    tokens = [("\n" if i % 50 == 49 else " ") + f"w{i}" for i in range(n)]
    page = visit(report.html(weights, tmp_path / "page.html", tokens=tokens))
    head = state(page, "head")
    page.evaluate("set({ head: 1 })")
    press(page, "/")
    page.keyboard.type("w3000")
    press(page, "Enter")
    assert state(page, "focus") == 3000
    box, at = page.locator(".text").bounding_box(), token(page, 3000).bounding_box()
    assert box["y"] <= at["y"] <= box["y"] + box["height"]
    found = shown(page)
    row = weights[0, 1, 3000]
    count = header(tmp_path / "page.html")["parts"][0]["strongest"]
    top = row.topk(count)
    assert ((found[top.indices] - top.values).abs() <= step(top.values) + 2e-6).all()
    assert int((found > 0).sum()) <= count
    assert found[3001:].isnan().all() and not found[:3001].isnan().any()
    assert f"cover {round(float(top.values.sum()) * 100)}%" in said(page, "text-read")
    page.evaluate("zoom(64)")
    settled(page)
    assert "Each query’s strongest keys, exactly" in said(page, "map-note")
    assert head in (0, 1)


class Given(torch.nn.Module):
    def forward(self, query, key, value):
        return es.attention(query, key, value)


def test_patches_are_called_patches(visit, tmp_path):
    def words(j, **settings):
        weights = torch.softmax(torch.randn(2, 1, 2, j, j), -1)
        page = visit(report.html(tuple(weights), tmp_path / "page.html", image=torch.rand(30, 40, 3), **settings))
        for n in range(4):
            press(page, str(n + 1))
            yield said(page, "all-note") + said(page, "all-read") + said(page, "kinds")
        page.evaluate("set({ focus: 3, direction: 'sum' })")
        yield from (page.locator("#help").text_content(), said(page, "each-note"), said(page, "about"))
        yield said(page, "hide") if page.locator("#hide").is_visible() else ""
        page.evaluate("set({ focus: null, direction: 'out' })")
        settled(page)
        yield from (said(page, "text-read"), said(page, "each-note"), said(page, "text-note"))

    for settings in ({"j": 12, "grid": (3, 4)}, {"j": 13, "grid": (3, 4)}):
        found = " ".join(words(**settings))
        assert "token" not in found
        assert "patch" in found
    assert "first key" in found


def run_of_images(tmp_path, before=("<pad>",) * 20):
    torch.manual_seed(0)
    tokens = [*before, "<s>", " see", ":", *["<image>"] * 64, "\n", *[" a", " cat", " sat", " a", " cat", " sat", "."]]
    n = len(tokens)
    kept = torch.tensor([token != "<pad>" for token in tokens])
    q, k = torch.randn(1, 3, n, 8), torch.randn(1, 3, n, 8)
    weights = es.AttentionWeights(q, k, es.causal() & es.padding(kept[None]))
    return weights, tokens, report.html(weights, tmp_path / "page.html", tokens=tokens)


def test_runs_of_special_tokens_are_folded(visit, tmp_path):
    weights, tokens, path = run_of_images(tmp_path)
    page = visit(path)
    folds = page.locator(".fold")
    assert folds.all_inner_texts() == ["+ 19 more", "+ 63 more"]
    assert token(page, 23).is_visible() and not token(page, 24).is_visible()
    head, last = state(page, "head"), len(tokens) - 1
    point(page, last)
    row = weights[0, head, last]
    assert int(folds.nth(1).get_attribute("data-w")) == pytest.approx(100 * float(row[24:87].sum()), abs=1.5)
    assert "off" in folds.nth(0).get_attribute("class")
    page.evaluate("set({ focus: 23, pinned: true })")
    press(page, "ArrowRight")
    assert state(page, "focus") == 87  # past what is folded
    press(page, "ArrowLeft")
    assert state(page, "focus") == 23
    folds.nth(1).click()
    settled(page)
    assert token(page, 60).is_visible()
    assert folds.all_inner_texts() == ["+ 19 more", "fold"]
    assert folds.nth(1).get_attribute("data-w") is None
    folds.nth(1).click()
    page.evaluate("set({ focus: 60, pinned: true }); reveal(60)")
    settled(page)
    assert token(page, 60).is_visible()
    page.evaluate("set({ focus: 3 })")
    settled(page)
    assert said(page, "text-read") == "<pad>3 is padding: it counts nowhere."


@pytest.mark.parametrize("before", [("<pad>",) * 20, ()])
def test_opens_on_a_token_that_means_something(visit, tmp_path, before):
    _, tokens, path = run_of_images(tmp_path, before)
    page = visit(path)
    assert state(page, "statistic") == "entropy"
    assert tokens[state(page, "focus")] not in ("<pad>", "<image>")
    assert page.evaluate("PART.first") == len(before)


@pytest.mark.parametrize("size", [1e-7, 3e-3, 1.0, 4e2, 5e4])
def test_lengths_of_any_size_have_significant_digits(visit, tmp_path, size):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 7, 4)
    value = torch.rand(1, 2, 7, 4) * size
    with Lens(Given(), values=True) as lens:
        lens.model(q, k, value)
    page = visit(report.html(lens, tmp_path / "page.html", tokens=[f" letter-{c}" for c in "abcdefg"]))
    page.click("#measures [data-v=value]")
    point(page, 6)
    found, labels = shown(page), [token(page, n).get_attribute("data-w") for n in range(7)]
    assert sum(label is not None for label in labels) > 2
    for want, label in zip(found.tolist(), labels, strict=True):
        if label is not None:
            assert float(label.replace(",", "")) == pytest.approx(want, rel=0.051)
    line = said(page, "text-read")
    top = page.evaluate("short(Math.max(...values(current())))")
    assert float(top.replace(",", "")) == pytest.approx(float(found.max()), rel=0.0051)
    assert f" {top}" in line
