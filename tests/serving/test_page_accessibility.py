"""axe-core finds nothing on the page that would keep people out: light and dark, wide and narrow, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from page_visit import PHONE, WIDE, answered, card, give, opened, overlaid, photo, unfold
from stand_in import PAGE, Model, StandIn

from browser import chromium
from vitrail.serving.reference import describe_api, render_reference
from vitrail.serving.settings import ServerSettings

pytestmark = pytest.mark.slow  # a browser and a server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

axe_playwright = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
)

CLOSE = Model("close", labels=("Egyptian cat", "tabby cat", "lynx"), shares=(0.5, 0.45, 0.05), classes=3)
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def find_grave(page: Page) -> list[str]:
    """Findings of axe-core that are serious or critical, with the places that they are about."""
    results = axe_playwright.Axe().run(page).response
    return [
        f"{found['id']}: {node['html'][:200]}"
        for found in results["violations"]
        if found["impact"] in GRAVE
        for node in found["nodes"]
    ]


def test_axe_does_find_something(window: Browser):
    page = window.new_page()
    try:
        page.set_content("<html lang=en><title>x</title><main><button></button><img src='data:,'></main>")
        assert {found.partition(":")[0] for found in find_grave(page)} == {"button-name", "image-alt"}
    finally:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_grave_is_found_on_the_reference(window: Browser, scheme: str):
    style = f"<style>{(PAGE.parent / 'reference.css').read_text()}</style>"
    text = render_reference(describe_api(ServerSettings(token="x")))
    link = '<link rel="stylesheet" href="/docs.css">'
    assert link in text
    page = window.new_page(color_scheme=scheme)
    try:
        page.set_content(text.replace(link, style))
        assert find_grave(page) == []
    finally:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["wide", "phone"])
def test_nothing_grave_is_found(window: Browser, scheme: str, size: str):
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if size == "phone" else {"viewport": WIDE}
    with (
        StandIn((Model(set_size=2, is_unknown=True), CLOSE)).running() as stand,
        opened(window, stand, color_scheme=scheme, **options) as page,
    ):
        page.get_by_text("1,000 classes").wait_for()
        assert find_grave(page) == []
        give(page, ("cat.png", photo()), ("dog.png", photo(60, 90)), ("notes.txt", b"no image"))
        here = card(page, "cat.png")
        answered(here)
        answered(card(page, "dog.png"))
        stand.open.clear()
        unfold(here)
        here.get_by_text("Working out where it looked…").first.wait_for()
        assert find_grave(page) == []
        stand.open.set()
        overlaid(here)
        page.get_by_label("Compare with").select_option("close")
        here.get_by_role("group", name="close").get_by_text("unsure").wait_for()
        page.get_by_role("button", name="Close dog.png").click()
        assert find_grave(page) == []
        stand.token = "s3cret"
        give(page, ("late.png", photo()))
        card(page, "late.png").get_by_text("Enter it above").first.wait_for()
        assert find_grave(page) == []
