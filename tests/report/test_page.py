"""The page, as people use it: in a browser, with a pointer and a keyboard."""

import pytest
import torch
from report.conftest import settled
from report.pages import N, point, press, said, shown, state, token
from report.stored import header, step


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
