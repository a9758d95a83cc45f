"""A text, and how a page is pointed at, pressed and read."""

import torch
from report.conftest import TEXT, settled

N = len(TEXT)


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


def inside(box, around):
    return around["y"] <= box["y"] and box["y"] + box["height"] <= around["y"] + around["height"]
