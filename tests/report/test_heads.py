"""All heads at once: the grids, the table, the map."""

import pytest
import torch
from report.conftest import settled, spaced
from report.pages import TEXT, N, point, press, said, state
from report.stored import step

import einsight as es
from einsight import report


def cell(page, grid, layer, head):
    box = page.locator(grid).bounding_box()
    wide, high = page.evaluate(f"[$('{grid[1:]}').geometry.wide, $('{grid[1:]}').geometry.high]")
    return box["x"] + 30 + (layer + 0.5) * wide, box["y"] + (head + 0.5) * high


@pytest.mark.parametrize("grid", ["#all", "#each"])
def test_heads_under_the_pointer(visit, text, grid):
    page = visit(text)
    before = state(page, "head")
    page.mouse.move(*cell(page, grid, 4, 2))
    settled(page)
    assert (state(page, "hovered"), state(page, "head")) == (14, before)
    assert said(page, "h-text") == "Layer 4, head 2"
    assert said(page, "all-read").startswith("L4H2 induction")
    page.mouse.move(5, 5)
    settled(page)
    assert state(page, "hovered") is None
    page.mouse.click(*cell(page, grid, 3, 1))
    settled(page)
    assert state(page, "head") == 10


def test_sorting_and_filtering(visit, text):
    page = visit(text)
    page.click("#sort")
    settled(page)
    scores = torch.tensor(page.evaluate("Array.from(scores())"))
    order = scores.argsort(descending=True, stable=True).tolist()
    assert page.evaluate(f"$('all').geometry.at[{order[0]}]") == [0, 0]
    assert page.evaluate(f"$('all').geometry.at[{order[4]}]") == [1, 1]
    page.locator("#least").focus()
    press(page, *["ArrowRight"] * 50)
    least = 0.5 * float(scores.max())
    count = int((scores >= least).sum())
    assert f"; {count} head{'s' * (count != 1)} from" in said(page, "all-read")
    kind = page.locator("#kinds [data-kind=first]")
    if kind.is_enabled():
        kind.click()
        settled(page)
        assert (state(page, "only"), state(page, "statistic")) == ("first", "first")


def test_the_map(visit, text, lens):
    page = visit(text)
    layer, head = divmod(state(page, "head"), 3)
    dense = lens[layer].weights.dense()[0, head]
    box, size = page.locator("#map").bounding_box(), page.evaluate("CELL.w")

    def over(q, k):
        return box["x"] + (k + 0.5) * size, box["y"] + 60 + (q + 0.5) * size

    page.mouse.move(*over(13, 6))
    settled(page)
    weight = float(dense[13, 6])
    assert said(page, "map-read").startswith("saw13 looks at .6") or "looks at" in said(page, "map-read")
    found = page.evaluate("rawWeight(PART, current(), 13, 6)")
    assert abs(found - weight) <= float(step(dense[13, 6])) + 2e-6
    page.mouse.move(*over(3, 12))  # masked: as if the pointer weren't there
    settled(page)
    assert page.evaluate("pair()") is None
    page.mouse.click(*over(13, 6))
    settled(page)
    assert (state(page, "focus"), state(page, "other"), state(page, "pinned")) == (13, 6, True)
    page.mouse.dblclick(*over(13, 6))
    settled(page)
    assert page.evaluate("VIEW.w") == N / 2
    at = page.evaluate("[(6.5 - VIEW.x) * CELL.w, 60 + (13.5 - VIEW.y) * CELL.h]")
    assert at[0] == pytest.approx((6 + 0.5) * size, abs=size)
    press(page, "0")
    assert page.evaluate("VIEW") is None
    press(page, "+")
    assert page.evaluate("VIEW.w") == N / 2
    page.click("#zooms [data-v=all]")
    settled(page)
    assert page.evaluate("VIEW") is None
    opaque = page.evaluate(
        """() => { const image = mapImage(current()), all = image.getContext("2d").getImageData(0, 0, 6, 6).data;
                   return [all[(2 * 6 + 5) * 4 + 3], all[(5 * 6 + 2) * 4 + 3]]; }"""
    )
    assert opaque == [0, 255]  # masked is bare paper, not the colour of zero


def test_one_head_shows_no_grids(visit, tmp_path):
    page = visit(report.html(torch.eye(3), tmp_path / "page.html"))
    assert not page.locator("#s-all").is_visible()
    assert page.locator("#s-text").is_visible()
    page = visit(report.html(torch.eye(1), tmp_path / "one.html"))
    assert said(page, "about") == "1 token, 1 head"


@pytest.mark.parametrize(("layers", "heads"), [(3, 300), (1000, 2), (120, 60)])
@pytest.mark.parametrize("width", [390, 1280])
def test_many_heads_scroll_in_their_box(visit, tmp_path, layers, heads, width):
    torch.manual_seed(0)
    one = torch.softmax(torch.randn(1, heads, 5, 5), -1)
    path = report.html(tuple(one.roll(n, 1) for n in range(layers)), tmp_path / "page.html", tokens=[*"abcde"])
    page = visit(path, {"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("all", "each"):
        box = page.locator(f"#{name}").locator("..").bounding_box()
        assert box["height"] <= 320 and box["x"] + box["width"] <= width
        at = page.evaluate(f"({{ ...$('{name}').geometry, at: null, grid: null }})")
        assert at["wide"] >= 6 and at["high"] >= 7
    last = layers * heads - 1
    page.evaluate(f"set({{ head: {last} }})")
    settled(page)
    settled(page)
    wide, high, left, top = (page.evaluate(f"$('all').geometry.{name}") for name in ("wide", "high", "left", "top"))
    canvas = page.locator("#all").bounding_box()
    x, y = 30 + (layers - 0.5) * wide - left, (heads - 0.5) * high - top
    assert 30 <= x <= canvas["width"] and 0 <= y <= canvas["height"] - 20
    page.locator("#all").hover(position={"x": x - wide, "y": y})
    settled(page)
    assert state(page, "hovered") == last - heads
    page.locator("#all").click(position={"x": x, "y": y})
    page.evaluate("document.querySelector('.pan').scrollTo(0, 0)")
    settled(page)
    settled(page)
    page.locator("#all").click(position={"x": 30 + 1.5 * wide, "y": 1.5 * high})
    settled(page)
    assert state(page, "head") == heads + 1


def test_a_move_over_the_text_draws_no_grid_of_all_heads_anew(visit, text):
    page = visit(text)
    page.evaluate("globalThis.drawn = 0; const before = drawAll; drawAll = () => { drawn++; before(); }; 0")
    for n in (3, 9, 14):
        point(page, n)
    assert page.evaluate("drawn") == 0
    press(page, "s", "2", "f")
    press(page, "ArrowDown")
    assert page.evaluate("drawn") >= 2
    assert page.evaluate("$('all').geometry.at[0]") == page.evaluate("cells(strongestOf(scores(), 99)).at[0]")


@pytest.mark.parametrize("mask", [es.causal(), None, es.window(3, 3)])
def test_the_name_of_a_row_lies_over_no_cell(visit, tmp_path, mask):
    q, k = torch.randn(2, 1, 2, N, 8)
    page = visit(report.html(es.AttentionWeights(q, k, mask), tmp_path / "page.html", tokens=spaced(TEXT)))
    for n in range(N):
        page.evaluate(f"set({{ focus: {n} }})")
        settled(page)
        found = page.evaluate("({ ...NAMED, size: CELL.w, high: CELL.h, low: 60 + CELL.h * PART.i })")
        if not found["beside"]:
            assert found["y"] - 6 >= found["low"]
            continue
        rows = [(y - 60) / found["high"] for y in (found["y"] - 5, found["y"] + 5)]
        for row in range(max(int(rows[0]), 0), min(int(rows[1]), N - 1) + 1):
            assert found["x"] >= page.evaluate(f"PART.heads[0].layer.arrays.hi[{row}]") * found["size"]
