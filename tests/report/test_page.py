"""The page, as people use it: in a browser, with a pointer and a keyboard."""

import pytest
import torch
import transformers as hf
from report.conftest import settled
from report.stored import header, step

import einsight as es
from einsight import report
from einsight.lens import Lens

TEXT = [
    *["The", "owl", "saw", "the", "mouse"],
    ".\n",
    *["And", "the", "owl", "saw", "the", "moon", ",", "and", "the", "mouse", "saw", "the", "owl", "."],
]
N = len(TEXT)
HOSTILE = [
    "</script><script>hacked=1</script>",
    " <img src=x onerror=hacked=2>",
    " &lt;b&gt;",
    " {{7*7}}",
    "\u202e\u202e",
]


def spaced(words):
    return [words[0], *[word if word[0] == "\n" else " " + word for word in words[1:]]]


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(3)
    config = hf.LlamaConfig(
        vocab_size=60,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    made = hf.LlamaForCausalLM(config).eval().requires_grad_(False)
    for block in made.model.layers:
        block.self_attn.q_proj.weight *= 60
        block.self_attn.k_proj.weight *= 60
    return made


@pytest.fixture(scope="session")
def ids():
    numbers = {word: n for n, word in enumerate(dict.fromkeys(TEXT), 3)}
    return torch.tensor([[numbers[word] for word in TEXT]])


@pytest.fixture(scope="session")
def lens(model, ids):
    with Lens(model, values=True) as lens:
        lens.output = model(ids, output_hidden_states=True)
    return lens


@pytest.fixture(scope="session")
def text(lens, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "text.html"
    states = lens.output.hidden_states
    return report.html(lens, path, tokens=spaced(TEXT), hidden_states=states, prompt=12)


def token(page, n, text=0):
    return page.locator(".text").nth(text).locator(f'.t[data-i="{n}"]')


def point(page, n, text=0):
    token(page, n, text).hover()
    settled(page)


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
    settled(page)


def state(page, name):
    return page.evaluate(f"S.{name}")


def said(page, name):
    return " ".join(page.locator(f"#{name}").inner_text().split())


def shown(page):
    """What the tokens show, as numbers: the page's own, before they are rounded for the eye."""
    found = page.evaluate("Array.from(values(current()), x => Number.isNaN(x) ? null : x)")
    return torch.tensor([torch.nan if x is None else x for x in found])


def test_opens_on_a_finding(visit, text):
    page = visit(text)
    about = header(text)["parts"][0]
    induction = torch.tensor(about["statistics"]["induction"])
    assert state(page, "head") == int(induction.flatten().argmax())
    assert about["targets"][state(page, "focus")] >= 0
    assert said(page, "about") == "LlamaForCausalLM reading 20 tokens, 5 layers of 3 heads"
    assert "looks at" in said(page, "text-read")


@pytest.mark.parametrize("layer", range(5))
def test_pointing_at_a_token_shows_its_weights(visit, text, lens, layer):
    page = visit(text)
    dense = lens[layer].weights.dense()[0]
    for head in range(3):
        page.evaluate(f"set({{ head: {layer * 3 + head} }})")
        for n in (0, 7, N - 1):
            point(page, n)
            want, found = dense[head, n], shown(page)
            assert torch.equal(found.isnan(), torch.arange(N) > n)
            assert ((found.nan_to_num() - want).abs() <= step(want) + 2e-6).all()
            labels, masked = page.evaluate(
                """() => { const tokens = [...document.querySelectorAll(".t")];
                     return [tokens.map(t => t.dataset.w ?? ""), tokens.map(t => t.classList.contains("off"))]; }"""
            )
            assert masked == [k > n for k in range(N)]
            for k in range(N):
                assert labels[k] == ("" if k > n or found[k] < 0.0099 else str(round(float(found[k]) * 100 + 1e-9)))


def test_turning_round_and_received(visit, text, lens):
    page = visit(text)
    layer, head = divmod(state(page, "head"), 3)
    dense = lens[layer].weights.dense()[0, head]
    page.click("#directions [data-v=in]")
    point(page, 4)
    found = shown(page)
    assert torch.equal(found.isnan(), torch.arange(N) < 4)
    assert ((found.nan_to_num() - dense[:, 4]).abs() <= step(dense[:, 4]) + 2e-6).all()
    assert "is looked at by" in said(page, "text-read")
    page.click("#directions [data-v=sum]")
    settled(page)
    means = torch.stack([lens[n].weights.received(mean=True)[0] for n in range(5)])
    assert torch.allclose(shown(page), means[layer, head], rtol=3e-3, atol=1e-6)
    page.click("#scopes [data-v=layer]")
    settled(page)
    assert torch.allclose(shown(page), means[layer].mean(0), rtol=3e-3, atol=1e-6)
    page.click("#scopes [data-v=all]")
    settled(page)
    assert torch.allclose(shown(page), means.mean((0, 1)), rtol=3e-3, atol=1e-6)


def test_hiding_the_first_token(visit, text, lens):
    page = visit(text)
    layer, head = divmod(state(page, "head"), 3)
    point(page, 9)
    page.click("#hide")
    settled(page)
    dense = lens[layer].weights.dense()[0, head, 9]
    want = dense / (1 - dense[0])
    assert torch.allclose(shown(page)[1:10], want[1:10], atol=0.02)
    assert float(shown(page)[0]) == 0
    assert "hid" in token(page, 0).get_attribute("class").split()
    share = page.evaluate(f"percent(rawWeight(PART, {layer * 3 + head}, 9, 0))")
    assert f"Hidden: The0, which takes {share}; the rest is scaled up." in said(page, "text-read")
    page.click("#directions [data-v=in]")
    point(page, 4)
    received = page.evaluate("percent(receivedOf(PART, current(), false)[0])")
    assert f"Hidden: The0, which receives {received} of all attention on average" in said(page, "text-read")
    token(page, 4).click()
    point(page, 9)
    assert f"Hidden: The0, which takes {share} of what saw9 has" in said(page, "text-read")
    assert f"Hidden: The0, which takes {share}" in said(page, "map-read")
    page.click("#directions [data-v=sum]")
    settled(page)
    assert f"Hidden: The0, which receives {received}" in said(page, "text-read")
    page.click("#directions [data-v=out]")
    token(page, 0).click()
    settled(page)
    assert "Hidden: The0, which takes 100%; too little is left to show." in said(page, "text-read")
    page.click("#hide")
    settled(page)
    assert "idden" not in said(page, "text-read") + said(page, "map-read") + said(page, "each-read")
    page.click("#hide")
    settled(page)
    about = header(text)["parts"][0]
    assert page.evaluate("Array.from(scores('entropy'))") == pytest.approx(
        torch.tensor(about["without_first"]["entropy"]).flatten().tolist(), abs=1e-6
    )


def test_weights_times_values(visit, text, lens):
    page = visit(text)
    layer, head = divmod(state(page, "head"), 3)
    call = lens[layer]
    dense, value = call.weights.dense()[0, head, 11], call.value[0, 0]
    matrix = call.module.o_proj.weight.unflatten(1, (3, 8))[:, head]
    stream = lens.output.hidden_states[layer][0, 11].norm()
    point(page, 11)
    for measure, length in [("value", value.norm(dim=-1)), ("write", (value @ matrix.mT).norm(dim=-1) / stream)]:
        page.click(f"#measures [data-v={measure}]")
        settled(page)
        bound = (step(dense) + 2e-6) * length + 4e-3 * dense * length
        assert ((shown(page).nan_to_num() - dense * length).abs() <= bound)[:12].all()
    assert "% of the residual stream" in said(page, "text-note")
    out = dense[:12] @ value[:12] @ matrix.mT
    assert page.evaluate(f"PART.layers[{layer}].arrays.out[{head} * {N} + 11]") == pytest.approx(
        float(out.norm()), rel=4e-3
    )


def test_pinning_and_pairs(visit, text):
    page = visit(text)
    token(page, 9).click()
    point(page, 3)
    assert (state(page, "focus"), state(page, "other"), state(page, "pinned")) == (9, 3, True)
    assert said(page, "h-each") == "From the3 to saw9, in every head"
    page.mouse.move(5, 5)
    settled(page)
    assert state(page, "other") is None
    token(page, 2).click(modifiers=["Shift"])
    page.mouse.move(5, 5)
    settled(page)
    assert (state(page, "focus"), state(page, "other")) == (9, 2)
    token(page, 9).click()
    settled(page)
    assert not state(page, "pinned")


def test_the_keyboard(visit, text):
    page = visit(text)
    press(page, "Escape")
    assert state(page, "focus") is None
    press(page, "ArrowRight", "ArrowRight")
    assert (state(page, "focus"), state(page, "pinned")) == (1, True)
    press(page, "ArrowLeft", "ArrowLeft")
    assert state(page, "focus") == 0
    press(page, *["ArrowUp"] * 4, *["Shift+ArrowUp"] * 6)
    assert state(page, "head") == 0
    press(page, "ArrowDown", "Shift+ArrowDown")
    assert state(page, "head") == 4
    page.locator("#all").focus()
    press(page, "ArrowRight", "ArrowLeft", "ArrowLeft")
    assert state(page, "head") == 1
    press(page, "d")
    assert state(page, "direction") == "in"
    press(page, "d", "d", "f", "s")
    assert (state(page, "direction"), state(page, "hide"), state(page, "sorted")) == ("out", True, True)
    names = page.evaluate("Object.keys(PART.score)")
    assert names == ["entropy", "first", "previous", "induction", "distance", "strongest"]
    for n, name in enumerate(names, 1):
        press(page, str(n))
        assert state(page, "statistic") == name
        assert said(page, "all-note")
    press(page, "?")
    assert page.locator("#help").is_visible()
    press(page, "Escape")
    assert not page.locator("#help").is_visible()


def test_finding_words_and_heads(visit, text):
    page = visit(text)
    press(page, "/")
    page.keyboard.type("the owl")
    settled(page)
    assert page.evaluate("S.found") == [0, 1, 7, 8, 17, 18]
    press(page, "Enter")
    first = state(page, "focus")
    press(page, "Enter")
    second = state(page, "focus")
    press(page, "Enter")
    assert {first, second, state(page, "focus")} == {1, 8, 18}
    assert said(page, "found") == "3 places"
    press(page, "Escape")
    assert page.evaluate("S.found") == []
    assert not page.locator("#found").is_visible()
    for asked, answer in [
        ("owls", "nowhere in the text"),
        ("L9H1", "no head L9H1 here, nor such a text"),
        ("owl", "3 places"),
    ]:
        page.fill("#find", asked)
        settled(page)
        assert said(page, "found") == answer
        assert page.locator("#found").is_visible()
    for asked, head in [("L2H1", 7), ("3.2", 11), ("0 0", 0)]:
        page.fill("#find", asked)
        settled(page)
        assert state(page, "head") == head


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


def inside(box, around):
    return around["y"] <= box["y"] and box["y"] + box["height"] <= around["y"] + around["height"]


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


def test_one_head_shows_no_grids(visit, tmp_path):
    page = visit(report.html(torch.eye(3), tmp_path / "page.html"))
    assert not page.locator("#s-all").is_visible()
    assert page.locator("#s-text").is_visible()
    page = visit(report.html(torch.eye(1), tmp_path / "one.html"))
    assert said(page, "about") == "1 token, 1 head"


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
