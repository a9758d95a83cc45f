"""What the report weighs, how long it takes to write, and how quickly its page answers, for SmolLM2's 270 heads.

    python benchmarks/report.py [text file] [rounds]

For 256, 512 and 4,096 tokens, with weights alone and with values and the residual stream: megabytes of the page, and
seconds to write it beyond the model's pass. In the browser (Chromium by playwright), on the page of 4,096 tokens:
seconds until it shows its finding and until all layers are read, and milliseconds from a pointer move over a token,
far from the last one, to the next picture; also of the main thread's processor time, which other work on the machine
leaves alone. The text is repeated or cut to length.
"""

from __future__ import annotations

import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import torch

from einsight import report
from einsight.lens import Lens
from einsight.models import load

MOVE = """async n => {
  const tokens = document.querySelectorAll(".t"), began = performance.now();
  tokens[n % tokens.length].dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
  await new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn)));
  return performance.now() - began;
}"""


def write(text: str, tokens: int, values: bool, page: pathlib.Path) -> tuple[float, float]:
    """Seconds for the model's pass and for the report."""
    model, tokenizer = load()
    ids = tokenizer(text * (1 + 10 * tokens // len(text)), return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
    start = time.perf_counter()
    with torch.inference_mode(), Lens(model, values=values) as lens:
        output = model.base_model(ids, use_cache=False, output_hidden_states=values)
    between = time.perf_counter()
    names = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    report.html(lens, page, tokens=names, hidden_states=output.hidden_states if values else None)
    return between - start, time.perf_counter() - between


def visit(page: pathlib.Path) -> tuple[float, float, list[float], list[float]]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tools = tab.context.new_cdp_session(tab)
        tools.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy() -> float:
            metrics = tools.send("Performance.getMetrics")["metrics"]
            return 1000 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

        start = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-shown]", state="attached")
        shown = time.perf_counter() - start
        tab.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
        ready = time.perf_counter() - start
        waited, worked = [], []
        for n in range(60):
            before = busy()
            waited.append(tab.evaluate(MOVE, n * 613))
            worked.append(busy() - before)
        browser.close()
    return shown, ready, waited, worked


def main(text: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder) / "report.html"
        write(text, 64, True, page)  # warm
        for tokens in (256, 512, 4096):
            for values in (False, True):
                times = [write(text, tokens, values, page) for _ in range(rounds if tokens < 4096 else 1)]
                passed, wrote = (statistics.median(column) for column in zip(*times, strict=True))
                size = page.stat().st_size / 1e6
                kept = "with values" if values else "weights    "
                print(
                    f"{tokens:5} tokens, {kept}  {size:5.1f} MB  pass {passed:5.2f} s, report {wrote:5.2f} s",
                    flush=True,
                )
        visits = [visit(page) for _ in range(rounds)]
        shown, ready = (statistics.median(column) for column in zip(*((v[0], v[1]) for v in visits), strict=True))
        print(f"at 4096 tokens the page shows its finding after {shown:.2f} s, has read all layers after {ready:.2f} s")
        for name, which in (("is drawn after", 2), ("takes the main thread", 3)):
            spent = [move for one in visits for move in one[which]]
            print(f"a pointer move {name} {statistics.median(spent):.0f} ms (median; largest {max(spent):.0f} ms)")


if __name__ == "__main__":
    passage = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "examples/passage.txt").read_text()
    main(passage, int(sys.argv[2]) if len(sys.argv) > 2 else 3)
