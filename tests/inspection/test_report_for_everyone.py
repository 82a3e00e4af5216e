"""The whole report with its real drawings: axe-core finds nothing grave, and a phone shows every chart uncut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import made_up
import pytest

from browser import chromium, opened
from vitrail.inspection.draw.figures import draw_findings
from vitrail.inspection.page.report import write_report

pytestmark = pytest.mark.slow  # a browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 380, "height": 800}
GRAVE = ("serious", "critical")
CUT = """all => all.filter(it => it.offsetWidth > 0).map(it => {
    const box = it.getBoundingClientRect();
    return [box.left, box.right, it.scrollWidth - it.clientWidth];
})"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Of a model with everything, drawn for a desk and for a phone, with folded classes and a warning."""
    folder = tmp_path_factory.mktemp("everyone")
    confusion = [[3 if row == column else row % 2 for column in range(24)] for row in range(24)]
    scored = made_up.made_report(confusion, [f"class {n}" for n in range(24)], was_trained_on=True)
    rates = {"learning_rate": 0.1, "accuracy": 0.5}
    findings = made_up.vit(
        depth=8, scores=made_up.made_scores(scored), records=tuple(each | rates for each in made_up.RECORDS)
    )
    figures, narrow = draw_findings(findings, folder / "wide"), draw_findings(findings, folder / "narrow", narrow=True)
    return write_report([findings], [figures], folder / "report.html", narrow=[narrow])


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [
        (WIDE, "light"),
        (PHONE, "dark"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((WIDE, "dark"), (PHONE, "light"))),
    ],
)
def test_nothing_grave_is_found(window: Browser, report, viewport, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    with opened(window, report, viewport=viewport, color_scheme=scheme) as page:
        for folded in page.locator("details").all():
            folded.evaluate("it => { it.open = true; }")
        results = axe.Axe().run(page).response
    assert [rule["id"] for rule in results["passes"] if rule["id"] == "color-contrast"], "it has looked"
    grave = [each for each in results["violations"] if each["impact"] in GRAVE]
    assert [f"{each['id']}: {node['html'][:200]}" for each in grave for node in each["nodes"]] == []


def test_a_phone_shows_every_chart_whole_and_large_enough(window: Browser, report):
    with opened(window, report, viewport=PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        parts = page.locator(".drawing, .drawing svg, .photos, .bars, table").evaluate_all(CUT)
        assert len(parts) > 10
        for left, right, hidden in parts:
            assert left >= 0
            assert right <= PHONE["width"]
            assert hidden <= 1
        for name in ("distance", "layers", "curves", "positions"):
            shown = page.locator(f"#{name} svg").evaluate_all(
                "all => all.filter(it => it.getBoundingClientRect().width > 0)"
                ".map(it => it.getBoundingClientRect().width / Number(it.getAttribute('width')))"
            )
            assert len(shown) == 1, "one of the two drawings"
            assert shown[0] > 0.85, f"{name} is drawn so small that its words cannot be read"


def test_a_desk_shows_the_wide_drawings(window: Browser, report):
    with opened(window, report, viewport=WIDE) as page:
        for name in ("distance", "layers", "curves", "positions", "filters"):
            assert page.locator(f"#{name} .wide svg").first.is_visible()
            assert not page.locator(f"#{name} .narrow svg").first.is_visible()
        first = page.locator("section").first.bounding_box()
        assert first["y"] + 200 < WIDE["height"], "the accuracy is on the first screen"


def test_many_classes_are_unfolded_by_a_click(window: Browser, report):
    with opened(window, report, viewport=PHONE) as page:
        rest = page.locator("#classes details")
        assert not rest.locator("li").first.is_visible()
        rest.locator("summary").click()
        assert rest.locator("li").count() == 4
        assert rest.locator("li").first.is_visible()
