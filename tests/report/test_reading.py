"""Whether everybody can read it: any width, scheme, script and token."""

import pytest
import torch
from report.conftest import settled
from report.pages import point, press, said, state, token

from einsight import report
from einsight.lens import Lens

HOSTILE = [
    "</script><script>hacked=1</script>",
    " <img src=x onerror=hacked=2>",
    " &lt;b&gt;",
    " {{7*7}}",
    "\u202e\u202e",
]


def test_hostile_tokens_are_shown_not_run(visit, tmp_path):
    dense = torch.softmax(torch.randn(1, 2, 5, 5), -1)
    page = visit(report.html(dense, tmp_path / "page.html", tokens=HOSTILE))
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img, #texts script").count() == 0
    assert token(page, 0).inner_text() == HOSTILE[0]
    assert token(page, 1).inner_text() == HOSTILE[1].strip()
    assert token(page, 2).inner_text() == "&lt;b&gt;"
    assert token(page, 3).inner_text() == "{{7*7}}"
    assert token(page, 4).inner_text() == "‹202e›‹202e›"
    for n in range(5):
        point(page, n)
    press(page, "/")
    page.keyboard.type("<img")
    settled(page)
    assert page.evaluate("S.found") == [1]


def test_a_hostile_name_of_a_model(visit, tmp_path, model, ids, monkeypatch):
    name = "</title><script>hacked=4<b>"
    monkeypatch.setattr(model.config, "_name_or_path", name)
    with Lens(model) as lens:
        model(ids)
    page = visit(report.html(lens, tmp_path / "page.html"))
    assert page.title() == f"{name.split('/')[-1]}: what each head looks at"
    assert said(page, "about").startswith(name.split("/")[-1])
    assert page.evaluate("typeof hacked") == "undefined"


def test_the_policy_lets_nothing_in(browser, text):
    page = browser.new_page()  # it complains of what is tried here, as it should
    page.goto(text.as_uri())
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    refused = page.evaluate(
        """async () => { const script = document.createElement("script"); script.textContent = "hacked = 3";
             const seen = []; addEventListener("securitypolicyviolation", event => seen.push(event.effectiveDirective));
             document.body.append(script); fetch("data:,x").catch(() => 0); new Image().src = "data:,x";
             await new Promise(done => setTimeout(done, 100));
             return [typeof hacked, seen.sort()]; }"""
    )
    page.close()
    assert refused == ["undefined", ["connect-src", "img-src", "script-src-elem"]]


def test_spaces_and_line_breaks_and_split_characters(visit, tmp_path):
    dense = torch.softmax(torch.randn(1, 2, 9, 9), -1)
    tokens = ["def", "Ġf", ":", "Ċ", "ĉ", "ĠĠĠ", "ðŁ", "¦ī", "Ġx"]
    page = visit(report.html(dense, tmp_path / "page.html", tokens=tokens))
    texts = [token(page, n).inner_text() for n in range(9)]
    assert texts == ["def", "f", ":", "↵", "⇥", "␣␣␣", "🦉", "›", "x"]
    assert page.locator(".text p").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_any_width_and_scheme(visit, text, width, scheme):
    page = visit(text, {"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(252, 251, 248)" if scheme == "light" else "rgb(19, 21, 24)")
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    settled(page)
    assert page.evaluate("INK.paper") == ("#131518" if scheme == "light" else "#fcfbf8")


def test_touch(visit, text):
    page = visit(text, {"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    token(page, 8).tap()
    settled(page)
    assert (state(page, "focus"), state(page, "pinned")) == (8, True)


CONTRAST = """elements => { const parse = c => c.match(/[\\d.]+/g).map(Number);
  const lum = c => [.2126, .7152, .0722].reduce((sum, p, n) => {
    const x = c[n] / 255; return sum + p * (x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); }, 0);
  return elements.map(e => { let under = e, back = [0, 0, 0, 0];
    while (under && (back = parse(getComputedStyle(under).backgroundColor))[3] === 0) under = under.parentElement;
    const pair = [lum(parse(getComputedStyle(e).color)), lum(back)].sort((a, b) => b - a);
    return (pair[0] + .05) / (pair[1] + .05); }); }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(visit, text, scheme):
    page = visit(text, color_scheme=scheme)
    for n in (3, 12):
        point(page, n)
        for what in (".t", ".t i", ".note", "button:not([hidden])", "h2", "sub", "header p"):
            assert min(page.locator(what).evaluate_all(CONTRAST), default=21) >= 4.5, what
    ink, veil = (page.locator(f'.t[data-i="{n}"]').evaluate("e => getComputedStyle(e).color") for n in (2, 15))
    assert token(page, 15).get_attribute("class") == "t off"
    assert ink != veil
    least = page.evaluate("""() => { const lum = c => [.2126, .7152, .0722].reduce((sum, p, n) => {
        const x = c[n] / 255; return sum + p * (x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); }, 0);
      const of = hex => [1, 3, 5].map(n => parseInt(hex.slice(n, n + 2), 16));
      return Math.min(...RAMP.map((c, n) => { const [a, b] = [lum(c), lum(of(OVER[n]))].sort((a, b) => b - a);
        return (a + .05) / (b + .05); })); }""")
    assert least >= 4.5


def test_on_a_phone_the_numbers_stay_in_sight(visit, tmp_path):
    weights = torch.softmax(torch.randn(1, 9, 200, 200), -1)
    page = visit(
        report.html(weights, tmp_path / "page.html", tokens=[f" word{n}" for n in range(200)]),
        {"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
    )
    for n in (3, 60, 120):
        page.evaluate(f"""scrollBy(0, LISTS[0].tokens[{n}].getBoundingClientRect().top - 200)""")
        token(page, n).tap()
        settled(page)
        line = page.locator("#text-read").bounding_box()
        assert f"word{n}{n} looks at" in said(page, "text-read")
        assert line["y"] >= 0 and line["y"] + line["height"] <= 844
        assert page.evaluate(
            f"document.elementFromPoint({line['x'] + 9}, {line['y'] + 12}).closest('#text-read') !== null"
        )
    page.evaluate("scrollBy(0, document.querySelector('#map').getBoundingClientRect().top - 640)")
    settled(page)
    box = page.locator("#map-read").bounding_box()
    assert box["y"] + box["height"] <= 844


def test_plain_words_do_not_run_together(visit, tmp_path):
    words = ["The", "owl", "saw", "the", "mouse", ",", "and", "the", "owl", "(", "old", ")", "saw", "the", "moon", "."]
    dense = torch.softmax(torch.randn(1, 2, len(words), len(words)), -1)
    page = visit(report.html(dense, tmp_path / "page.html", tokens=words))
    assert (
        " ".join(page.locator(".text").inner_text().split())
        == "The owl saw the mouse, and the owl ( old) saw the moon."
    )
    gap = (
        token(page, 1).bounding_box()["x"] - token(page, 0).bounding_box()["x"] - token(page, 0).bounding_box()["width"]
    )
    assert gap >= 5
    page.fill("#find", "the owl")
    settled(page)
    assert page.evaluate("S.found") == [0, 1, 7, 8]


HEBREW = ["\u05e9\u05dc\u05d5\u05dd", " \u05dc\u05da", " Alice", " in", " Wonder", "land", " \u05e7\u05e8\u05d0"]


def test_text_that_runs_to_the_left(visit, tmp_path):
    tokens = [*HEBREW, "\n", " left", " again"]
    dense = torch.softmax(torch.randn(1, 2, 10, 10), -1)
    page = visit(report.html(dense, tmp_path / "page.html", tokens=tokens))
    at = page.evaluate("LISTS[0].tokens.map(t => t.getBoundingClientRect().x)")
    assert at[0] > at[1] > at[5] > at[4] > at[3] > at[2] > at[6]  # Hebrew to the left, the English in it to the right
    assert at[8] < at[9]
    for n in range(6):
        point(page, n)
        assert state(page, "focus") == n
        colours = page.evaluate("LISTS[0].tokens.map(t => t.style.backgroundColor !== '')")
        assert colours == page.evaluate("Array.from(values(current()), x => Math.sqrt(x) >= .055)")
    page.evaluate("set({ focus: 1, pinned: true })")
    press(page, "ArrowLeft")
    assert state(page, "focus") == 2
    press(page, "ArrowRight")
    assert state(page, "focus") == 1
    page.evaluate("set({ focus: 8, pinned: true })")
    press(page, "ArrowRight")
    assert state(page, "focus") == 9


def test_joiners_stay_where_they_join(visit, tmp_path):
    tokens = ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", " \U0001f468\u200d\U0001f469", " \u2764\ufe0f"]
    tokens += [" a\u200cb", " \u200d"]
    tokens += [" \u0915\u094d\u200d\u0937", "\u202e\u200b"]
    dense = torch.softmax(torch.randn(1, 2, 7, 7), -1)
    page = visit(report.html(dense, tmp_path / "page.html", tokens=tokens))
    texts = [token(page, n).text_content() for n in range(7)]
    assert texts == [*(t.strip() for t in tokens[:3]), "a‹200c›b", "‹200d›", tokens[5].strip(), "‹202e›‹200b›"]
    assert page.evaluate("spoken(PART.keys, 0)") == tokens[0]
