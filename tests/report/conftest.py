"""A browser for the pages, one for the whole run, and a text that a small model read."""

import shutil
from collections.abc import Iterator

import pytest
import torch
import transformers as hf

from einsight import report
from einsight.lens import Lens

TEXT = [
    *["The", "owl", "saw", "the", "mouse"],
    ".\n",
    *["And", "the", "owl", "saw", "the", "moon", ",", "and", "the", "mouse", "saw", "the", "owl", "."],
]
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("the report is tested in Chromium, and there is none: apt-get install chromium", pytrace=False)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser) -> Iterator:
    """Opens a page from its file; at the end nothing may have gone wrong, nor anything been asked for."""
    contexts, complaints, requests = [], [], []

    def visit(path, viewport=WIDE, **settings):
        contexts.append(browser.new_context(viewport=viewport, reduced_motion="reduce", **settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        settled(page)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("file:///")] == []
    assert len(requests) == len(contexts)


def settled(page) -> None:
    """After the next picture has been drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


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
