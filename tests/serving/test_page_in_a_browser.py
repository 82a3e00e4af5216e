"""The server's page as a person has it: in a real browser, against made-up answers, with mouse, keys and finger."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from page_visit import (
    PHONE,
    PLACES,
    answered,
    canvas,
    card,
    give,
    guesses,
    opened,
    overlaid,
    photo,
    seen,
    unfold,
    wait,
)
from PIL import Image
from running import command_line, expected, make_model
from stand_in import COLUMNS, ROWS, Model, StandIn, made_map

from browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<img src=x onerror=alert(1)><svg onload=alert(2)>"
UPRIGHT = 6  # EXIF: to be turned by a quarter


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def stand() -> Iterator[StandIn]:
    with StandIn().running() as running:
        yield running


@pytest.mark.slow
def test_with_the_real_server_behind_it(window: Browser, tmp_path: Path):
    """What the page asks for is what the server gives: labels, timing, and the map of each layer."""
    folder, content = make_model(tmp_path / "tiny"), photo()
    with command_line("--model", f"tiny={folder}", "--threads", "1") as server:
        behind = SimpleNamespace(address=server.url, open=threading.Event())
        with opened(window, behind) as page:
            give(page, ("one.png", content), ("none.png", b"nothing"))
            place = card(page, "one.png")
            unfold(place)
            place.locator(".stage canvas").wait_for()
            best = np.sort(expected(folder, content))[::-1]
            assert [float(share.rstrip("%")) for _, share in guesses(place)] == pytest.approx(100 * best[:5], abs=0.06)
            assert "ms in all" in place.locator(".timing").inner_text().replace("\u00a0", " ")
            before = canvas(place)
            place.get_by_role("slider").nth(1).press("ArrowLeft")
            wait(page, lambda: not np.array_equal(canvas(place), before))
            card(page, "none.png").get_by_text("cannot be read").wait_for()


def test_a_dropped_photo_gets_labels_timing_and_overlay(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        facts = page.locator(".facts")
        facts.get_by_text("vit · 224 × 224 pixels · 1,000 classes · 4 layers").wait_for()
        assert not page.locator(".choices").is_visible()
        assert "are not kept" in page.locator(".drop").inner_text()
        stages = give(page, ("cat.png", photo()))
        assert stages == [[False, True], [True, True], [True, False]]  # lit while over it; the browser opens nothing
        here = card(page, "cat.png")
        overlaid(here)
        assert guesses(here) == [["tabby cat", "62.0%"], ["Egyptian cat", "20.0%"], ["lynx", "5.1%"],
                                 ["window screen", "0.4%"], ["Persian cat", "0.01%"]]  # fmt: skip
        bars = here.locator(".bar").evaluate_all("all => all.map(it => it.style.getPropertyValue('--share'))")
        assert bars == ["0.62", "0.2", "0.0514", "0.0042", "0.0001"]
        timing = here.locator(".timing").inner_text().replace("\u00a0", " ")
        assert timing == "Decoded in 3 ms, waited 0.4 ms, computed in 12 ms; 20 ms in all."
        assert here.locator(".high").inner_text() == "8.8% on a patch"
        assert "tabby cat, 62.0%" in page.locator("#announced[aria-live=polite]").inner_text()
        (asked,), (map_asked,) = stand.asked("/v1/predict"), stand.asked("/v1/attention")
        assert asked.query == {"model": "vit", "top": "5"}
        assert map_asked.query == {"model": "vit", "layer": "4"}
        assert asked.content_type == map_asked.content_type == "image/png"
        assert asked.size == map_asked.size == len(photo())


@pytest.mark.parametrize("how", ["paste", "beside"])
def test_pasted_or_dropped_beside_the_window_is_taken_too(window: Browser, stand: StandIn, how):
    with opened(window, stand) as page:
        give(page, ("image.png", photo()), how=how)
        answered(card(page, "image.png"))


@pytest.mark.slow
def test_picked_photos_stand_above_earlier_ones_and_can_be_closed_and_removed(
    window: Browser, stand: StandIn, tmp_path: Path
):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(photo(seed=number))
    with opened(window, stand) as page:
        for names in (["0.png"], ["1.png", "2.png"]):
            with page.expect_file_chooser() as chooser:
                page.locator(".drop").click()
            assert chooser.value.is_multiple()
            chooser.value.set_files([tmp_path / name for name in names])
        for number in range(3):
            overlaid(card(page, f"{number}.png"))
        assert page.locator("h2").all_inner_texts() == ["1.png", "2.png", "0.png"]
        assert page.evaluate("living") == 3
        page.get_by_role("button", name="Close 1.png").click()
        assert page.locator("h2").all_inner_texts() == ["2.png", "0.png"]
        assert page.evaluate("living") == 3  # it may be opened again
        page.locator(".thumbnail").first.hover()
        page.get_by_role("button", name="Remove 1.png").click()
        assert page.evaluate("living") == 2
        assert page.locator(".drop input").get_attribute("accept") == "image/*"


@pytest.mark.slow
def test_the_strength_changes_what_is_seen_and_nothing_is_the_photo(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        give(page, ("cat.png", photo(300, 200)))
        here = card(page, "cat.png")
        overlaid(here)
        strength = here.get_by_label("Overlay")
        some = seen(here)
        strength.fill("100")
        most = seen(here)
        strength.fill("0")
        none = seen(here)
        here.locator(".stage canvas").evaluate("canvas => canvas.remove()")
        assert np.array_equal(none, seen(here))
        assert np.abs(some - none).mean() > 10
        assert np.abs(most - none).mean() > 1.3 * np.abs(some - none).mean()
        assert len(stand.asked("/v1/attention")) == 1


@pytest.mark.slow
def test_each_layer_is_fetched_once_and_painted_as_it_is(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        overlaid(here)
        layer, painted = here.get_by_label("Layer"), {4: canvas(here)}
        for number in (2, 1):
            before = canvas(here)
            layer.fill(str(number))
            wait(page, lambda before=before: not np.array_equal(before, canvas(here)))
            painted[number] = canvas(here)
            assert here.locator(".told").inner_text() == f"Attention rollout up to layer {number}."
            assert layer.get_attribute("aria-valuetext") == f"{number} of 4"
        for number in (4, 2, 1):
            layer.fill(str(number))
            assert np.array_equal(canvas(here), painted[number])
            height, width = painted[number].shape[:2]
            middles = painted[number][height // ROWS // 2 :: height // ROWS, width // COLUMNS // 2 :: width // COLUMNS]
            light = middles[..., :3] @ np.array([0.299, 0.587, 0.114])
            values = made_map(number).astype(int)
            order = np.argsort(values, axis=None)
            steps, apart = np.diff(light.ravel()[order]), np.diff(values.ravel()[order])
            assert (steps[apart > 5] > 0).all()  # lighter where there is more
            assert (np.abs(steps[apart == 0]) < 4).all()  # half a point beside the middle
            assert np.ptp(light) > 150
        assert [asked.query["layer"] for asked in stand.asked("/v1/attention")] == ["4", "2", "1"]


@pytest.mark.slow
def test_the_overlay_lies_on_what_the_model_saw_of_the_upright_photo(window: Browser):
    exif = Image.Exif()
    exif[0x0112] = UPRIGHT
    turned = photo(300, 200, kind="JPEG", exif=exif)  # upright, it is 200 wide and 300 high
    with StandIn((Model(cover=True),)).running() as stand, opened(window, stand) as page:
        give(page, ("turned.jpg", turned), ("wide.png", photo(300, 200)))
        for name, ratio, box in (
            ("turned.jpg", 2 / 3, (0, 1 / 6, 1, 2 / 3)),
            ("wide.png", 3 / 2, (1 / 6, 0, 2 / 3, 1)),
        ):
            here = card(page, name)
            overlaid(here)
            whole, part = (here.locator(f".stage {it}").bounding_box() for it in ("img", "canvas"))
            assert whole["width"] / whole["height"] == pytest.approx(ratio, rel=0.01)
            found = ((part["x"] - whole["x"]) / whole["width"], (part["y"] - whole["y"]) / whole["height"],
                     part["width"] / whole["width"], part["height"] / whole["height"])  # fmt: skip
            assert found == pytest.approx(box, abs=0.003)
            assert here.locator(".told").inner_text().endswith("layer 4, within the frame.")


@pytest.mark.slow
def test_many_go_a_few_at_a_time_and_nothing_moves_when_results_come(window: Browser, stand: StandIn):
    stand.open.clear()
    with opened(window, stand) as page:
        give(page, *((f"{number}.png", photo(seed=number)) for number in range(7)))
        wait(page, lambda: len(stand.asked("/v1/predict")) == 3)
        page.locator(".card").nth(6).wait_for()
        unfold(card(page, "3.png"))
        page.wait_for_timeout(100)
        assert len(stand.asked("/v1/predict")) == 3
        assert "Waiting for its turn" in card(page, "6.png").locator(".status").inner_text()
        assert "Looking" in card(page, "0.png").locator(".status").inner_text()
        places = page.evaluate(PLACES)
        page.get_by_role("button", name="Close 5.png").evaluate("button => button.focus({ preventScroll: true })")
        assert stand.most_at_once == 3  # later, one that is answered may still be counted when the next one comes
        stand.open.set()
        for number in range(7):
            answered(card(page, f"{number}.png"))
        overlaid(card(page, "3.png"))
        assert np.allclose(page.evaluate(PLACES), places, atol=0.5)


@pytest.mark.slow
def test_a_closed_photo_is_not_asked_for_and_makes_way(window: Browser, stand: StandIn):
    stand.open.clear()
    with opened(window, stand) as page:
        give(page, *((f"{number}.png", photo(seed=number)) for number in range(5)))
        wait(page, lambda: len(stand.asked("/v1/predict")) == 3)
        page.get_by_role("button", name="Close 4.png").click()  # waits for its turn
        page.get_by_role("button", name="Close 0.png").click()  # is on its way
        wait(page, lambda: len(stand.asked("/v1/predict")) == 4)
        stand.open.set()
        for number in (1, 2, 3):
            answered(card(page, f"{number}.png"))
        assert len(stand.asked("/v1/predict")) == 4


def test_what_the_server_cannot_use_is_told_on_its_card(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        give(page, ("notes.txt", b"no image"), ("huge.png", photo(400, 300)), ("cat.png", photo()))
        overlaid(card(page, "cat.png"))
        for name, message in (("notes.txt", "This is not an image that can be read: <b>damaged</b>."),
                              ("huge.png", "The body has more than 200,000 bytes.")):  # fmt: skip
            here = card(page, name)
            here.get_by_text(message).wait_for()
            assert not here.get_by_role("button", name="Try again").is_visible()  # it would not help
            assert message in page.locator("#announced").inner_text()
        assert "No preview" in card(page, "notes.txt").inner_text()
        assert not page.get_by_role("alert").is_visible()


@pytest.mark.slow
def test_a_busy_server_is_asked_again_when_it_says(window: Browser, stand: StandIn):
    stand.busy.extend(["1"])
    with opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        here.get_by_text("The server is busy. Trying again in 1 s…").wait_for()
        assert len(stand.asked("/v1/predict")) == 1
        overlaid(here)
        assert len(stand.asked("/v1/predict")) == 2
        assert guesses(here)[0] == ["tabby cat", "62.0%"]


def test_a_server_that_gives_up_is_asked_again_only_by_the_person(window: Browser, stand: StandIn):
    stand.stopping = True
    with opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        here.get_by_text("The server is shutting down.").wait_for()
        stand.stopping = False
        here.get_by_role("button", name="Try again").click()
        overlaid(here)
        assert len(stand.asked("/v1/predict")) == 2
        assert not here.get_by_role("button", name="Try again").is_visible()


@pytest.mark.slow
def test_a_server_that_is_gone_can_be_tried_again(window: Browser):
    stand = StandIn()
    with stand.running():
        opening = opened(window, stand)
        page = opening.__enter__()
        page.get_by_text("1,000 classes").wait_for()
    with opening_closed(opening):
        give(page, ("one.png", photo()), ("two.png", photo(seed=1)))
        notice = page.get_by_role("alert")
        notice.get_by_text("The server does not answer.").wait_for()
        for name in ("one.png", "two.png"):
            card(page, name).get_by_text("The server does not answer.").wait_for()
        with stand.running():
            notice.get_by_role("button", name="Try again").click()
            overlaid(card(page, "one.png"))
            overlaid(card(page, "two.png"))
            assert not notice.is_visible()


@contextmanager
def opening_closed(opening: Any) -> Iterator[None]:
    """Leaves a page that has outlived its server, with all that is asserted of it then."""
    try:
        yield
    finally:
        opening.__exit__(None, None, None)


def test_a_token_is_asked_for_and_kept_for_the_tab(window: Browser):
    with StandIn(token="s3cret").running() as stand, opened(window, stand) as page:
        field, said = page.get_by_label("This server asks for a token."), page.locator("#token-said")
        field.wait_for()
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        here.get_by_text("Enter it above").wait_for()
        field.fill("wrong")
        field.press("Enter")
        said.get_by_text("The server did not accept this token.").wait_for()
        field.fill("pâté")
        page.get_by_role("button", name="Use it").click()
        assert "plain letters" in said.inner_text()
        field.fill("s3cret")
        field.press("Enter")
        overlaid(here)
        assert not field.is_visible()
        page.reload()
        page.get_by_text("1,000 classes").wait_for()
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        stand.token = "another"
        give(page, ("cat.png", photo()))
        field.wait_for()
        field.fill("another")
        field.press("Enter")
        overlaid(card(page, "cat.png"))


@pytest.mark.slow
def test_models_differ_and_what_one_lacks_is_said(window: Browser):
    models = (Model(), Model("convolutions", attention=False, layers=None, labels=("dog", "wolf"), classes=2),
              Model("a/b & c", classes=0))  # fmt: skip
    with StandIn(models).running() as stand, opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here, choice = card(page, "cat.png"), page.get_by_role("combobox", name="Model", exact=True)
        overlaid(here)
        choice.select_option("convolutions")
        here.get_by_text("wolf", exact=True).wait_for()
        assert guesses(here) == [["dog", "62.0%"], ["wolf", "20.0%"]]
        assert "This model shows no attention" in here.inner_text()
        assert not here.locator(".stage canvas").is_visible()
        assert not here.get_by_label("Overlay").is_visible()
        choice.select_option("a/b & c")
        here.get_by_text("This model has no classes: it gives 384 numbers.").wait_for()
        here.locator(".stage canvas").wait_for()
        assert stand.asked("/v1/embed")[0].query == {"model": "a/b & c"}
        before = len(stand.seen)
        choice.select_option("vit")
        assert guesses(here)[0] == ["tabby cat", "62.0%"]
        overlaid(here)
        page.wait_for_timeout(50)
        assert len(stand.seen) == before  # what is known is not asked for again


def test_keys_alone_lead_from_start_to_result(window: Browser, stand: StandIn, tmp_path: Path):
    (tmp_path / "cat.png").write_bytes(photo())
    with opened(window, stand) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.type") == "file"
        assert page.locator(".drop").evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter")
        chooser.value.set_files(tmp_path / "cat.png")
        here = card(page, "cat.png")
        answered(here)
        assert not here.locator(".stage canvas").is_visible()
        reached = []
        for _ in range(4):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.tagName") == "SUMMARY":
                page.keyboard.press("Enter")
                overlaid(here)
            reached.append(page.evaluate("document.activeElement.className"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            if reached[-1] in ("strength", "layer"):
                before = seen(here)
                page.keyboard.press("Home")
                wait(page, lambda before=before: not np.array_equal(before, seen(here)) or reached[-1] == "layer")
        assert reached == ["close quiet", "", "strength", "layer"]
        wait(page, lambda: [asked.query["layer"] for asked in stand.asked("/v1/attention")] == ["4", "1"])
        for _ in range(3):
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        assert page.locator(".card").count() == 0
        assert page.evaluate("document.activeElement.ariaLabel") == "Open cat.png again"
        page.keyboard.press("Delete")
        assert page.locator(".thumbnail").count() == 0
        assert page.evaluate("document.activeElement.type") == "file"


@pytest.mark.slow
def test_everything_has_a_name(window: Browser):
    with StandIn((Model(), Model("other"))).running() as stand, opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        overlaid(card(page, "cat.png"))
        unnamed = page.locator("input, select, button, canvas, img, article").evaluate_all(
            "all => all.filter(it => !(it.labels?.[0]?.textContent.trim() || it.ariaLabel || it.alt"
            " || it.innerText || it.closest('[aria-hidden=true]'))).map(it => it.outerHTML)"
        )
        assert unnamed == []


@pytest.mark.slow
def test_dark_is_dark_and_light_is_light(window: Browser, stand: StandIn):
    shades = {}
    for scheme in ("light", "dark"):
        with opened(window, stand, color_scheme=scheme) as page:
            give(page, ("cat.png", photo()))
            overlaid(card(page, "cat.png"))
            shot = page.locator(".side").screenshot()
            shades[scheme] = np.asarray(Image.open(io.BytesIO(shot)).convert("L"))
    assert np.median(shades["light"]) > 240
    assert shades["light"].min() < 80
    assert np.median(shades["dark"]) < 40
    assert shades["dark"].max() > 200


@pytest.mark.slow
def test_a_phone_scrolls_only_down_and_offers_its_camera(window: Browser):
    name = "a-name-that-nobody-would-want-to-type" * 5
    models = (Model(name, labels=(name, HOSTILE)), Model("other"))
    with (
        StandIn(models).running() as stand,
        opened(window, stand, viewport=PHONE, has_touch=True, is_mobile=True) as page,
    ):
        page.get_by_text("1,000 classes").wait_for()
        assert "Take or choose a photo" in page.locator(".drop").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        give(page, (f"{name}.png", photo()), ("tall.png", photo(20, 400)), ("broken.png", b"?"))
        overlaid(card(page, f"{name}.png"))
        overlaid(card(page, "tall.png"))
        card(page, "broken.png").get_by_text("not an image").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_names_and_labels_that_would_be_code_are_only_words(window: Browser):
    models = (Model(HOSTILE, labels=(HOSTILE, "cat")), Model("other"))
    with StandIn(models).running() as stand, opened(window, stand) as page:
        give(page, (f"{HOSTILE}.png", photo()), ("notes", b"no image"))
        here = card(page, f"{HOSTILE}.png")
        overlaid(here)
        assert here.locator("h2").inner_text() == f"{HOSTILE}.png"
        assert guesses(here)[0] == [HOSTILE, "62.0%"]
        card(page, "notes").get_by_text("<b>damaged</b>").wait_for()
        assert page.locator("#model option").all_inner_texts() == [HOSTILE, "other"]
        assert page.locator("[onerror], [onload], img[src=x], .trouble b").count() == 0
        assert stand.asked("/v1/predict")[0].query["model"] == HOSTILE
