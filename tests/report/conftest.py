"""A browser for the pages, one for the whole run."""

import shutil
from collections.abc import Iterator

import pytest

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
