"""What the page says of an answer: how sure it is, where the model looked, what two models say, why it is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from page_visit import PHONE, answered, card, give, guesses, opened, overlaid, photo, unfold, wait
from stand_in import Model, StandIn

from browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CLOSE = Model("close", labels=("Egyptian cat", "tabby cat"), shares=(0.55, 0.45), classes=2)
LONG_WAIT = 29
"""Seconds that a busy server asks for: more than any test waits."""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def stand() -> Iterator[StandIn]:
    with StandIn().running() as running:
        yield running


def enter(page: Page, token: str) -> None:
    page.locator("#token").fill(token)
    page.locator("#token").press("Enter")


def corner(place: Locator) -> tuple[float, float]:
    box = place.bounding_box()
    assert box is not None
    return box["x"], box["y"]


def test_the_boundary_of_unsure(window: Browser, stand: StandIn):
    cases = {
        (0.55, 0.45): True,
        (0.599, 0.4): True,
        (0.6, 0.4): False,  # a lead of 20 points, though 0.6 - 0.4 is less than 0.2 in floating point
        (0.601, 0.399): False,
        (0.15, 0.02, 0.01): True,
        (0.3, 0.1): False,
        (1.0,): False,
        (): False,
    }
    with opened(window, stand) as page:
        for shares, expected in cases.items():
            found = page.evaluate(
                """async (shares) => (await import("/words.js")).isUnsure(shares.map((it) => ({ share: it })))""",
                list(shares),
            )
            assert found is expected, shares


def test_an_unsure_answer_says_so_to_all(window: Browser):
    with StandIn((CLOSE, Model())).running() as stand, opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        here.get_by_text("unsure").wait_for()
        assert guesses(here) == [["Egyptian cat", "55.0%"], ["tabby cat", "45.0%"]]
        assert here.locator(".unsure").text_content() == "unsure: tabby cat is almost as likely"
        assert "cat.png: unsure: Egyptian cat, 55.0%; tabby" in page.locator("#announced").inner_text()
        size, other = (
            here.locator(it).evaluate("it => parseFloat(getComputedStyle(it).fontSize)")
            for it in (".best .label", ".guesses span")
        )
        assert size > 1.5 * other
        page.locator("#model").select_option("vit")
        answered(here)
        assert not here.locator(".unsure").is_visible()


def test_attention_is_pending_until_it_is_there(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        answered(here)
        assert here.locator("details[open]").count() == 0
        assert not here.get_by_label("Overlay").is_visible()
        page.wait_for_timeout(50)
        assert stand.asked("/v1/attention") == []  # nobody wants to see it yet
        stand.open.clear()
        unfold(here)
        here.locator(".told", has_text="Working out where it looked…").wait_for()
        assert here.locator(".badge").is_visible()
        assert here.locator("details").get_attribute("aria-busy") == "true"
        assert not here.get_by_label("Overlay").is_visible()
        assert not here.locator(".stage canvas").is_visible()
        stand.open.set()
        overlaid(here)
        assert here.get_by_label("Overlay").input_value() == "35"
        assert here.locator(".stage canvas").evaluate("it => getComputedStyle(it).opacity") == "0.35"
        assert not here.locator(".badge").is_visible()
        assert here.locator("details").get_attribute("aria-busy") == "false"
        assert "cat.png: where it looked is shown" in page.locator("#announced").inner_text()
        here.locator("summary").click()
        assert not here.locator(".stage canvas").is_visible()  # folded, the photo is bare again
        overlaid(here)
        assert len(stand.asked("/v1/attention")) == 1


def test_a_map_that_fails_is_told_where_it_would_be(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        answered(here)
        stand.stopping = True
        unfold(here)
        here.get_by_text("No map: The server is shutting down.").wait_for()
        assert not here.get_by_label("Overlay").is_visible()
        assert not here.locator(".badge").is_visible()
        assert guesses(here)[0] == ["tabby cat", "62.0%"]  # the answer stands
        stand.stopping = False
        here.get_by_role("button", name="Try again").click()
        overlaid(here)
        assert len(stand.asked("/v1/predict")) == 1


def test_without_the_token_nothing_pretends_to_wait(window: Browser):
    with StandIn(token="s3cret").running() as stand, opened(window, stand) as page:
        page.locator("#token").wait_for()
        assert page.evaluate("document.activeElement.id") == "token"
        give(page, *((f"{number}.png", photo(seed=number)) for number in range(5)))
        for number in range(5):
            here = card(page, f"{number}.png")
            here.get_by_text("This server asks for a token. Enter it above").wait_for()
            assert here.locator("[aria-busy=true]").count() == 0
        assert page.get_by_text("Waiting").count() + page.get_by_text("Looking…").count() == 0
        assert stand.asked("/v1/predict") == []
        enter(page, "wrong")
        page.get_by_text("The server did not accept this token.").wait_for()
        assert page.evaluate("document.activeElement.id") == "token"
        card(page, "0.png").get_by_text("Enter it above").wait_for()
        enter(page, "s3cret")
        for number in range(5):
            answered(card(page, f"{number}.png"))
        assert not page.locator("#token").is_visible()


def test_a_401_on_the_way_ends_every_wait_and_the_token_continues_them(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        stand.busy.append(str(LONG_WAIT))
        give(page, ("patient.png", photo()))
        card(page, "patient.png").get_by_text(f"Trying again in {LONG_WAIT} s").wait_for()
        give(page, ("done.png", photo()))
        answered(card(page, "done.png"))
        stand.token = "new"
        before = len(stand.asked("/v1/predict"))
        give(page, *((f"{number}.png", photo(seed=number)) for number in range(8)))
        names = ["patient.png", *(f"{number}.png" for number in range(8))]
        for name in names:
            card(page, name).get_by_text("Enter it above").wait_for()
        assert page.locator("[aria-busy=true]").count() == 0
        assert page.get_by_text("Waiting").count() + page.get_by_text("Trying again").count() == 0
        assert page.evaluate("document.activeElement.id") == "token"
        assert len(stand.asked("/v1/predict")) - before <= 3  # those that were in the air; the others were not sent
        unfold(card(page, "done.png"))
        card(page, "done.png").get_by_text("No map: This server asks for a token.").wait_for()
        enter(page, "new")
        for name in names:
            answered(card(page, name))
        card(page, "done.png").locator(".stage canvas").wait_for()


@pytest.mark.slow
def test_a_server_that_comes_back_with_other_models(window: Browser):
    stand = StandIn()
    with stand.running(), opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        answered(card(page, "cat.png"))
        stand.token, stand.models = "new", (CLOSE,)
        give(page, ("dog.png", photo()))
        page.locator("#token").wait_for()
        enter(page, "new")
        for name in ("cat.png", "dog.png"):
            card(page, name).locator(".best b", has_text="55.0%").wait_for()


def test_two_models_answer_side_by_side(window: Browser):
    with StandIn((Model(), CLOSE)).running() as stand, opened(window, stand) as page:
        first, second = (page.get_by_role("combobox", name=name, exact=True) for name in ("Model", "Compare with"))
        second.locator("option").nth(1).wait_for(state="attached")  # the page has asked which models there are
        assert second.locator("option").all_inner_texts() == ["nothing", "close"]
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        answered(here)
        second.select_option("close")
        left, right = here.get_by_role("group", name="vit"), here.get_by_role("group", name="close")
        right.get_by_text("unsure").wait_for()
        assert guesses(left)[0] == ["tabby cat", "62.0%"]
        assert guesses(right)[0] == ["Egyptian cat", "55.0%"]
        assert here.locator("h3").all_inner_texts() == ["vit", "close"]
        assert here.locator(".verdict").inner_text() == "They differ."
        assert "cat.png, close: unsure: Egyptian cat" in page.locator("#announced").inner_text()
        (x, y), (other_x, other_y) = corner(left), corner(right)
        assert other_x > x + 300
        assert other_y == y
        unfold(here)
        for look in (left, right):
            look.locator(".stage canvas").wait_for()
        assert sorted(asked.query["model"] for asked in stand.asked("/v1/attention")) == ["close", "vit"]
        page.set_viewport_size(PHONE)
        (x, y), (other_x, other_y) = corner(left), corner(right)
        assert other_x == x
        assert other_y > y + 300
        first.select_option("close")  # which stands on the other side: they change places
        assert here.locator("h3").all_inner_texts() == ["close", "vit"]
        assert second.input_value() == "vit"
        second.select_option("nothing")
        assert here.locator(".look").count() == 1
        assert guesses(here)[0] == ["Egyptian cat", "55.0%"]
        assert not here.locator("h3").is_visible()
        page.wait_for_timeout(50)
        assert len(stand.asked("/v1/predict")) == 2  # what is known is not asked for again


@pytest.mark.slow
def test_two_models_that_agree(window: Browser):
    with StandIn((Model(), Model("other"))).running() as stand, opened(window, stand) as page:
        page.get_by_label("Compare with").select_option("other")
        give(page, ("cat.png", photo()))
        card(page, "cat.png").get_by_text("Both say tabby cat.").wait_for()


def test_the_strip_leads_back_to_every_photo(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        strip = page.get_by_role("toolbar", name="Recent photos")
        give(page, ("0.png", photo()))
        answered(card(page, "0.png"))
        assert not strip.is_visible()  # it would show what is there
        give(page, *((f"{number}.png", photo(90, 60 * number, seed=number)) for number in (1, 2, 3)))
        for number in (1, 2, 3):
            answered(card(page, f"{number}.png"))
        shown = strip.locator(".show")
        assert shown.evaluate_all("all => all.map(it => it.ariaLabel)") == [f"Go to {it}.png" for it in (1, 2, 3, 0)]
        shown.nth(2).click()
        wait(page, lambda: -5 < corner(card(page, "3.png"))[1] < 200)
        assert page.evaluate("document.activeElement.textContent") == "3.png"
        before = len(stand.seen)
        page.get_by_role("button", name="Close 2.png").click()
        assert page.locator("h2").all_inner_texts() == ["1.png", "3.png", "0.png"]
        assert page.evaluate("document.activeElement.ariaLabel") == "Close 3.png"
        strip.get_by_role("button", name="Open 2.png again").click()
        assert page.locator("h2").all_inner_texts() == ["1.png", "2.png", "3.png", "0.png"]
        assert guesses(card(page, "2.png"))[0] == ["tabby cat", "62.0%"]
        page.wait_for_timeout(50)
        assert len(stand.seen) == before
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]  # this tab, and not for long


def test_the_strip_by_keyboard(window: Browser, stand: StandIn):
    with opened(window, stand) as page:
        give(page, *((f"{number}.png", photo(seed=number)) for number in range(3)))
        for number in range(3):
            answered(card(page, f"{number}.png"))
        focused = "document.activeElement.ariaLabel"
        page.locator(".drop input").focus()
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Go to 0.png"
        for key, name in (("ArrowRight", "Remove 0.png"), ("ArrowRight", "Go to 1.png"), ("End", "Remove 2.png"),
                          ("ArrowRight", "Remove 2.png"), ("Home", "Go to 0.png"), ("ArrowLeft", "Go to 0.png"),
                          ("ArrowRight", "Remove 0.png")):  # fmt: skip
            page.keyboard.press(key)
            assert page.evaluate(focused) == name
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        assert page.locator("h2").all_inner_texts() == ["1.png", "2.png"]
        assert page.evaluate(focused) == "Go to 1.png"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Close 1.png"  # one stop for all thumbnails
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Delete")
        assert page.locator("h2").all_inner_texts() == ["2.png"]
        assert page.evaluate("living") == 1
        assert page.evaluate("document.activeElement.type") == "file"  # a single open photo has no strip


@pytest.mark.slow
def test_a_closed_photo_that_was_not_answered_is_asked_for_when_it_comes_back(window: Browser, stand: StandIn):
    stand.open.clear()
    with opened(window, stand) as page:
        give(page, ("cat.png", photo()))
        wait(page, lambda: len(stand.asked("/v1/predict")) == 1)
        page.get_by_role("button", name="Close cat.png").click()
        stand.open.set()
        page.get_by_role("button", name="Open cat.png again").click()
        answered(card(page, "cat.png"))
        assert len(stand.asked("/v1/predict")) == 2


@pytest.mark.slow
def test_closed_and_opened_again_at_once_nothing_is_left_waiting(window: Browser, stand: StandIn):
    """The end of the first request comes after the second has begun, on the way, in the queue, and for a map."""
    blink = """(name) => {
        document.querySelector(`[aria-label="Close ${name}"]`).click();
        document.querySelector(`[aria-label="Open ${name} again"]`).click();
    }"""
    stand.open.clear()
    with opened(window, stand) as page:
        give(page, *((f"{number}.png", photo(seed=number)) for number in range(5)))
        wait(page, lambda: len(stand.asked("/v1/predict")) == 3)
        for name in ("0.png", "4.png"):
            page.evaluate(blink, name)
        stand.open.set()
        for number in range(5):
            answered(card(page, f"{number}.png"))
        stand.open.clear()
        unfold(card(page, "1.png"))
        wait(page, lambda: len(stand.asked("/v1/attention")) == 1)
        page.evaluate(blink, "1.png")
        stand.open.set()
        overlaid(card(page, "1.png"))


@pytest.mark.slow
def test_a_card_made_while_the_server_was_gone_can_be_tried_again(window: Browser):
    stand = StandIn()
    with stand.running(), opened(window, stand) as page:
        page.get_by_text("1,000 classes").wait_for()
        page.route("**/v1/*", lambda route: route.abort())
        page.reload()
        page.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
        give(page, ("cat.png", photo()))
        here = card(page, "cat.png")
        here.get_by_text("The server does not answer.").wait_for()
        assert here.locator("[aria-busy=true]").count() == 0
        here.get_by_role("button", name="Try again").click()
        page.wait_for_timeout(100)
        assert here.get_by_text("Waiting").count() == 0
        page.unroute("**/v1/*")
        here.get_by_role("button", name="Try again").click()
        answered(here)
