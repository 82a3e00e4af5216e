"""The report as a person has it: in a real browser, with mouse and keys, light and dark, on a phone and on paper."""

from __future__ import annotations

import base64
import dataclasses
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import made_up
import numpy as np
import pytest
from PIL import Image

import browser
from browser import chromium, opened
from vitrail.inspection.findings import Absent, Findings, ShownImage
from vitrail.inspection.page.report import SCORE_SECTIONS, TASK_SECTIONS, write_report
from vitrail.inspection.page.words import TITLES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 380, "height": 800}
HOSTILE = "</script><img src=x onerror=alert(1)><svg onload=alert(2)>"


SIZES = """all => all.map(it => ({
    still: it.matches(".still"),
    parts: it.querySelectorAll("svg path, svg image").length,
    width: it.querySelector("svg").getBoundingClientRect().width,
    height: it.querySelector("svg").getBoundingClientRect().height,
}))"""
# Beside its size, whether a canvas differs from one that nobody has painted on.
PAINTED = """all => all.map(it => [it.offsetWidth, it.offsetHeight, it.toDataURL() !==
    Object.assign(document.createElement("canvas"), {width: it.width, height: it.height}).toDataURL()])"""


@pytest.fixture(scope="module")
def window():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    between = made_up.made_layers(("block 1", "block 2"), ("stage 1", "stage 2"))
    folder = tmp_path_factory.mktemp("reports")
    drawn_between = made_up.made_figure(folder / "between.png")
    return {
        "one": report(folder / "one", made_up.vit(images=3)),
        "pair": report(folder / "pair", made_up.vit("a"), made_up.resnet("b"), between=between,
                       between_figure=drawn_between),
        "twins": report(folder / "twins", made_up.vit("a", depth=3), made_up.vit("b", depth=2, heads=4, seed=7)),
        "nothing": report(folder / "nothing", made_up.nothing()),
    }  # fmt: skip


def report(folder: Path, *findings: Findings, **others: Any) -> Path:
    figures = [made_up.made_figures(each, folder / f"model-{number}") for number, each in enumerate(findings)]
    return write_report(findings, figures, folder / "report.html", **others)


def instrument(page: Page, kind: str, model: int = 0) -> Locator:
    return page.locator(f'[data-instrument="{kind}"][data-model="{model}"]')


def canvas(place: Locator, name: str = ".stage > canvas") -> np.ndarray:
    """(height, width, 3): what is painted on it."""
    uri = place.locator(name).evaluate("canvas => canvas.toDataURL()")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"))


def changes(place: Locator, act: Callable[[], Any], name: str = ".stage > canvas") -> bool:
    before = canvas(place, name)
    act()
    after = canvas(place, name)
    return before.shape != after.shape or not np.array_equal(before, after)


def slide(control: Locator, value: int) -> None:
    control.fill(str(value))


def at_patches(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """(rows, columns): how light the middles of the patches are."""
    height, width = pixels.shape[:2]
    down, across = ((np.arange(count) + 0.5) / count * side for count, side in ((rows, height), (columns, width)))
    return pixels[np.ix_(down.astype(int), across.astype(int))] @ np.array([0.299, 0.587, 0.114])


@pytest.mark.parametrize(
    ("name", "drawings"),
    [
        ("pair", 7 + 3 + 1),
        ("nothing", 0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("one", 7), ("twins", 14))),
    ],
)
def test_every_section_shows_something(window: Browser, reports, name, drawings):
    with opened(window, reports[name], viewport=WIDE) as page:
        headings = page.locator("h2").all_inner_texts()
        left_out = {*TASK_SECTIONS, *(["curves", *SCORE_SECTIONS] if name == "nothing" else [])}
        assert headings == [title for section, title in TITLES.items() if section not in left_out]
        figures = page.locator("figure.drawing").evaluate_all(SIZES)
        assert len(figures) == drawings
        for figure in figures:
            assert figure["parts"] > 10
            if figure["still"]:
                assert figure["width"] == 0
            else:
                assert figure["width"] > 300
                assert figure["height"] > 100
        canvases = page.locator(".stage > canvas, .pair > canvas, .ramp").evaluate_all(PAINTED)
        instruments = page.locator("[data-instrument]").evaluate_all("all => all.map(it => it.dataset.instrument)")
        assert len(canvases) == sum({"attention": 2, "tokens": 3}[kind] for kind in instruments)
        for width, height, painted in canvases:
            assert width > 50
            assert height > 5
            assert painted
        decoded = "all => Promise.all(all.map(it => it.decode().then(() => it.naturalWidth)))"
        assert all(width > 0 for width in page.locator("img").evaluate_all(decoded))
        empty = page.locator("section .column").evaluate_all("all => all.filter(it => it.offsetHeight < 20).length")
        assert empty == 0


@pytest.mark.slow
def test_controls_of_attention_change_the_picture(window: Browser, reports):
    with opened(window, reports["one"], viewport=WIDE) as page:
        here = instrument(page, "attention")
        told = here.locator(".told")
        assert np.ptp(canvas(here).reshape(-1, 3), axis=0).min() > 50
        assert told.inner_text().startswith("Rollout up to layer 3 of 3: what reaches the class token from each patch.")
        assert here.get_by_label("Head").is_disabled()
        assert changes(here, lambda: slide(here.get_by_label("Layer", exact=True), 0))
        assert changes(here, lambda: here.get_by_label("one layer").check())
        assert changes(here, lambda: here.get_by_label("Head").select_option(label="1"))
        assert changes(here, lambda: slide(here.get_by_label("Layer", exact=True), 1))
        assert told.inner_text().startswith("Layer 2 of 3, head 1: the attention of the class token.")
        assert changes(here, lambda: here.get_by_label("Head").select_option(label="mean of all"))
        assert "mean of all heads" in told.inner_text()
        assert changes(here, lambda: here.get_by_label("patches").check())
        assert changes(here, lambda: slide(here.get_by_label("Overlay"), 20))
        assert changes(here, lambda: here.get_by_role("button", name="image-2.png").click())
        assert here.locator(".guesses li").first.inner_text().split("\n") == ["disc 2", "62.0%"]
        assert not changes(here, lambda: here.get_by_label("one layer").check())  # as it was


@pytest.mark.slow
def test_without_overlay_there_is_the_image_itself(window: Browser, reports):
    with opened(window, reports["one"], viewport=WIDE) as page:
        here = instrument(page, "attention")
        slide(here.get_by_label("Overlay"), 0)
        pixels = made_up.vit(images=3).images[0].pixels
        painted = Image.fromarray(canvas(here)).resize(pixels.shape[1::-1], Image.Resampling.NEAREST)
        assert np.abs(np.asarray(painted).astype(int) - pixels).mean() < 1


@pytest.mark.slow
def test_attention_is_lightest_where_it_is_most(window: Browser, reports):
    found = made_up.vit(images=3).attention
    with opened(window, reports["one"], viewport=WIDE) as page:
        here = instrument(page, "attention")
        slide(here.get_by_label("Overlay"), 100)
        here.get_by_label("patches").check()
        here.get_by_role("button", name="image-1.png").click()
        for layer in range(3):
            slide(here.get_by_label("Layer", exact=True), layer)
            here.get_by_label("rollout").check()
            assert in_order(at_patches(canvas(here), 4, 6), found.rollout[1, layer])
            here.get_by_label("one layer").check()
            for head in range(2):
                here.get_by_label("Head").select_option(label=str(head + 1))
                assert in_order(at_patches(canvas(here), 4, 6), found.heads[1, layer, head])
            here.get_by_label("Head").select_option(label="mean of all")
            assert in_order(at_patches(canvas(here), 4, 6), found.heads[1, layer].mean(axis=0))
        shares = found.heads_prefix[1, 2].mean(axis=0)
        each = f"class token ({shares[0]:.1%}), register 1 ({shares[1]:.1%})"
        assert f"{shares.sum():.1%} falls on what is no part of the image" in here.locator(".told").inner_text()
        assert each in here.locator(".told").inner_text()
        assert f"{found.heads[1, 2].mean(axis=0).max():.1%} on a patch" == here.locator(".high").inner_text()


def in_order(light: np.ndarray, values: np.ndarray) -> bool:
    """Whether lighter is more; what differs by less than a step of the 255 may look the same."""
    order = np.argsort(values, axis=None)
    steps, apart = np.diff(light.ravel()[order]), np.diff(values.ravel()[order]) / values.max()
    return bool((steps >= -1.5).all() and (steps[apart > 0.02] > 0).all() and np.ptp(light) > 150)


def test_a_patch_is_chosen_by_click_and_by_key(window: Browser, reports):
    found = made_up.vit(images=3).tokens.similarity[2][0]
    with opened(window, reports["one"], viewport=WIDE) as page:
        here = instrument(page, "tokens")
        photograph, told = here.locator(".photograph"), here.locator(".told")
        box = photograph.bounding_box()

        def click() -> None:
            photograph.click(position={"x": box["width"] * 1.5 / 6, "y": box["height"] * 0.5 / 4})

        assert "row 3 of 4 and column 4 of 6" in told.inner_text()
        assert changes(here, click, ".map")
        assert "row 1 of 4 and column 2 of 6" in told.inner_text()
        expected = (found[0, 1].sum() - 1) / 23
        assert f"{expected:.2f}".replace("-", "−") in told.inner_text()
        assert in_order(at_patches(canvas(here, ".map"), 4, 6), found[0, 1] - found.min())
        for key, place in (("ArrowRight", (0, 2)), ("ArrowDown", (1, 2)), ("ArrowLeft", (1, 1)), ("ArrowUp", (0, 1))):
            assert changes(here, lambda key=key: photograph.press(key), ".map"), key
            assert f"row {place[0] + 1} of 4 and column {place[1] + 1} of 6" in told.inner_text()
            assert in_order(at_patches(canvas(here, ".map"), 4, 6), found[place] - found.min())
        assert not changes(here, lambda: photograph.press("ArrowUp"), ".map")  # there is no row above
        assert changes(here, lambda: photograph.press("ArrowDown"), ".photograph")  # the mark moves
        assert changes(here, lambda: here.locator(".map").click(position={"x": 5, "y": 5}), ".map")
        assert changes(here, lambda: slide(here.get_by_label("Layer", exact=True), 0), ".map")
        assert here.locator("output").inner_text() == "block 1 (1 of 3)"
        assert changes(here, lambda: here.get_by_role("button", name="image-1.png").click(), ".map")


@pytest.mark.slow
def test_a_chosen_place_stays_where_grids_differ(window: Browser, reports):
    with opened(window, reports["pair"], viewport=WIDE) as page:
        here = instrument(page, "tokens", 1)
        here.locator(".photograph").press("ArrowRight")
        assert "row 3 of 4 and column 5 of 6" in here.locator(".told").inner_text()
        slide(here.get_by_label("Layer", exact=True), 0)
        assert "row 6 of 8 and column 10 of 12" in here.locator(".told").inner_text()


@pytest.mark.slow
def test_keys_alone_reach_and_move_everything(window: Browser, reports):
    with opened(window, reports["one"], viewport=WIDE) as page:
        here, tokens = instrument(page, "attention"), instrument(page, "tokens")
        reached = []
        for _ in range(80):
            page.keyboard.press("Tab")
            focus = page.evaluate(
                "(it => [it.dataset.sets ?? it.className ?? '', it.tagName,"
                " it.closest('[data-instrument]')?.dataset.instrument ?? ''])(document.activeElement)"
            )
            reached.append(tuple(focus))
            if focus == ["", "BUTTON", "attention"]:
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                if reached.count(("", "BUTTON", "attention")) == 2:
                    assert changes(here, lambda: page.keyboard.press("Enter"))
            elif focus == ["mode", "INPUT", "attention"]:
                assert changes(here, lambda: page.keyboard.press("ArrowRight"))
            elif focus[0] in ("layer", "strength") and focus[2] == "attention":
                assert changes(here, lambda: page.keyboard.press("ArrowLeft"))
            elif focus[0] == "head":
                assert changes(here, lambda: page.keyboard.press("ArrowDown"))
            elif focus[0] == "patches":
                assert changes(here, lambda: page.keyboard.press("Space"))
            elif focus[0] == "photograph":
                assert changes(tokens, lambda: page.keyboard.press("ArrowLeft"), ".map")
            elif focus == ["layer", "INPUT", "tokens"]:
                assert changes(tokens, lambda: page.keyboard.press("ArrowLeft"), ".map")
                break
        assert {name for name, *_ in reached} >= {"mode", "layer", "head", "strength", "patches", "photograph"}
        assert {kind for *_, kind in reached} >= {"attention", "tokens"}


@pytest.mark.slow
def test_what_is_shown_is_announced_and_labelled(window: Browser, reports):
    with opened(window, reports["twins"], viewport=WIDE) as page:
        for told in page.locator(".instrument .told").all():
            assert told.get_attribute("aria-live") == "polite"
        unnamed = page.locator("input, select, button, canvas:not([aria-hidden])").evaluate_all(
            "all => all.filter(it => !(it.labels?.[0]?.innerText || it.ariaLabel || it.querySelector('img')?.alt))"
            ".map(it => it.outerHTML)"
        )
        assert unnamed == []
        layer = instrument(page, "attention").get_by_label("Layer", exact=True)
        slide(layer, 1)
        assert layer.get_attribute("aria-valuetext") == "2 of 3"


@pytest.mark.slow
def test_linked_controls_move_together_where_they_can(window: Browser, reports):
    with opened(window, reports["twins"], viewport=WIDE) as page:
        one, other = (instrument(page, "attention", model) for model in (0, 1))
        layer = one.get_by_label("Layer", exact=True)
        assert not changes(other, lambda: slide(one.get_by_label("Overlay"), 20))
        page.locator('[data-links="attention"]').check()
        assert changes(other, lambda: slide(one.get_by_label("Overlay"), 30))
        assert changes(other, lambda: slide(layer, 0))
        assert not changes(other, lambda: slide(layer, 2))  # it has no third
        assert changes(other, lambda: one.get_by_label("one layer").check())
        assert changes(one, lambda: other.get_by_label("Head").select_option(label="2"))
        assert not changes(one, lambda: other.get_by_label("Head").select_option(label="4"))  # it has two
        assert one.get_by_label("Head").input_value() == "1"
        tokens = [instrument(page, "tokens", model) for model in (0, 1)]
        assert not changes(tokens[1], lambda: tokens[0].locator(".photograph").press("ArrowUp"), ".map")
        page.locator('[data-links="tokens"]').check()
        assert changes(tokens[1], lambda: tokens[0].locator(".photograph").press("ArrowUp"), ".map")


@pytest.mark.slow
def test_one_instrument_has_nothing_to_be_linked_to(window: Browser, reports):
    with opened(window, reports["pair"], viewport=WIDE) as page:
        assert not page.locator('[data-links="attention"]').is_visible()
        assert page.locator('[data-links="tokens"]').is_visible()


@pytest.mark.slow
def test_dark_is_dark_with_its_drawings(window: Browser, reports):
    shades = {}
    for scheme in ("light", "dark"):
        with opened(window, reports["one"], viewport=WIDE, color_scheme=scheme) as page:
            figure = page.locator("#distance .drawing").screenshot()
            shades[scheme] = [
                np.asarray(Image.open(io.BytesIO(shot)).convert("L")) for shot in (page.screenshot(), figure)
            ]
    for light, dark in zip(shades["light"], shades["dark"], strict=True):
        assert np.median(light) > 240
        assert np.median(dark) < 40
        assert dark.max() > 150  # there are words on it
        assert light.min() < 80


@pytest.mark.slow
def test_on_paper_the_drawings_stand_and_controls_do_not(window: Browser, reports):
    with opened(window, reports["twins"], viewport=WIDE, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.locator("figure.still").count() == 4
        for still in page.locator("figure.still svg").all():
            assert still.bounding_box()["height"] > 100
        for part in page.locator(".instrument, nav, details, .link").all():
            assert not part.is_visible()
        colours = page.evaluate("(it => [it.backgroundColor, it.color])(getComputedStyle(document.body))")
        assert colours == ["rgb(255, 255, 255)", "rgb(51, 51, 51)"]  # paper is light, however dark the screen
        assert len(page.pdf(format="A4")) > 10_000


def test_without_javascript_the_drawings_stand(window: Browser, reports):
    with opened(window, reports["pair"], viewport=WIDE, java_script_enabled=False) as page:
        assert page.locator("figure.still svg").count() == 3
        for still in page.locator("figure.still svg").all():
            assert still.bounding_box()["height"] > 100
        for part in page.locator(".instrument, .link").all():
            assert not part.is_visible()


def test_labels_that_would_be_code_are_only_words(window: Browser, tmp_path):
    plain = made_up.vit()
    shown = [dataclasses.replace(image, name=HOSTILE, guesses=((HOSTILE, 0.5),)) for image in plain.images]
    attention = dataclasses.replace(
        plain.attention, prefix=(HOSTILE, HOSTILE), reads=HOSTILE, layers=(HOSTILE, "2", "3")
    )
    tokens = dataclasses.replace(plain.tokens, layers=("1", "2", HOSTILE))
    hostile = made_up.vit(HOSTILE, images=shown, facts=((HOSTILE, HOSTILE),), card=HOSTILE, attention=attention,
                          tokens=tokens, positions=Absent(HOSTILE))  # fmt: skip
    with opened(window, report(tmp_path, hostile, made_up.resnet()), viewport=PHONE) as page:
        assert page.title() == f"Inside {HOSTILE}, resnet"
        here = instrument(page, "attention")
        slide(here.get_by_label("Layer", exact=True), 0)
        assert HOSTILE in here.locator(".told").inner_text()
        assert here.locator(".guesses span").first.inner_text() == HOSTILE
        assert HOSTILE in instrument(page, "tokens").locator("output").inner_text()
        assert page.locator("[onerror], [onload], img[src=x]").count() == 0
        assert page.locator("script").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "pair", "twins", "nothing"])
def test_a_phone_scrolls_only_down(window: Browser, reports, name):
    with opened(window, reports[name], viewport=PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
def test_long_names_fit_a_phone(window: Browser, tmp_path):
    name = "a-model-with-a-name-that-nobody-would-want-to-type" * 3
    image = ShownImage(name, made_up.made_images(1, (64, 96))[0].pixels, ((name, 0.9), (f"{name} again", 0.1)))
    found = made_up.vit(name, images=[image], facts=((name, name),), card=name, filters=Absent(name))
    with opened(window, report(tmp_path, found, made_up.resnet(name, images=[image])), viewport=PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
def test_models_stand_side_by_side_where_there_is_room(window: Browser, reports):
    for viewport, beside in ((WIDE, True), (PHONE, False)):
        with opened(window, reports["pair"], viewport=viewport) as page:
            boxes = page.locator("section .column").evaluate_all("all => all.map(it => it.getBoundingClientRect())")
            assert len(boxes) == 2 * (len(TITLES) - len(TASK_SECTIONS))
            for left, right in zip(boxes[::2], boxes[1::2], strict=True):
                assert (left["y"] == right["y"] and left["right"] < right["left"]) is beside
                assert (right["top"] >= left["bottom"]) is not beside


@pytest.mark.parametrize("missing", ["playwright", "chromium"])
def test_where_there_is_no_browser_the_reason_says_what_to_install(monkeypatch, missing):
    if missing == "playwright":
        monkeypatch.setattr(browser, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(shutil, "which", lambda program: None)
        monkeypatch.setattr(browser, "find_spec", lambda name: object())
    with pytest.raises(pytest.skip.Exception, match=f"install {missing}"), chromium():
        pass
