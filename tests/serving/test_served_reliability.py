"""Sets of labels and unknown images behind the server, and on the page."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from page_visit import PLACES, card, find_overlaps, give, opened, photo, unfold
from PIL import Image
from running import command_line
from stand_in import Model, StandIn

from browser import chromium
from calibrated import calibrated_model, draw_noise, make_model
from vitrail.inference.predictor import Predictor
from vitrail.serving.app import build_app
from vitrail.serving.reference import describe_api
from vitrail.serving.serve import open_served_model
from vitrail.serving.service import Service
from vitrail.serving.settings import ServerSettings
from vitrail.weights.save import save

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PNG = {"content-type": "image/png"}
WIDTHS = {"wide": 1100, "phone": 400}


def to_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


KNOWN = draw_noise(3, seed=8)[0][0]
STRANGE = np.zeros((16, 16, 3), np.uint8)


def ask(*requests: tuple[str, bytes | None]) -> list[httpx.Response]:
    """Return the answers of a server with a calibrated and a plain model."""

    async def talk() -> list[httpx.Response]:
        models = {"sure": calibrated_model(), "plain": make_model()}
        service = Service({name: open_served_model(name, each) for name, each in models.items()}, ServerSettings())
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await service.start()
            answers = [
                await (client.get(path) if body is None else client.post(path, content=body, headers=PNG))
                for path, body in requests
            ]
            await service.close()
        return answers

    return asyncio.run(talk())


def test_answers_tell_sets_and_unknown_images():
    predictor = Predictor(calibrated_model(), device="cpu")
    classified, predicted, strange, plain = (
        answer.json()
        for answer in ask(
            ("/v1/classify?coverage=0.99", to_png(KNOWN)),
            ("/v1/predict?coverage=0.99&top=1", to_png(KNOWN)),
            ("/v1/classify?top=2", to_png(STRANGE)),
            ("/v1/classify?model=plain", to_png(KNOWN)),
        )
    )
    expected = [name for name, _ in predictor.sets(KNOWN, coverage=0.99)]
    familiarity = predictor.unknown(KNOWN)
    assert [row["label"] for row in classified["labels"]] == expected
    assert [row["label"] for row in predicted["set"]] == expected
    assert len(predicted["answer"]["labels"]) == 1
    for answer in (classified, predicted):
        assert answer["coverage"] == 0.99
        assert answer["unknown"] is familiarity.is_unknown
        assert answer["known_share"] == pytest.approx(familiarity.share, abs=0.005)
    assert strange["unknown"] is True
    assert len(strange["labels"]) == 2
    assert "coverage" not in strange
    assert {"unknown", "known_share", "coverage"}.isdisjoint(plain)


def test_what_cannot_be_asked_is_told():
    answers = ask(
        ("/v1/classify?coverage=95", to_png(KNOWN)),
        ("/v1/classify?coverage=nan", to_png(KNOWN)),
        ("/v1/classify?coverage=much", to_png(KNOWN)),
        ("/v1/classify?coverage=0.9&model=plain", to_png(KNOWN)),
        ("/v1/embed?coverage=0.9", to_png(KNOWN)),
        ("/v1/models", None),
    )
    assert [answer.status_code for answer in answers] == [422] * 5 + [200]
    words = [answer.json()["error"]["message"] for answer in answers[:5]]
    assert all("give a share between 0 and 1" in each for each in words[:3])
    assert "vitrail calibrate" in words[3]
    told = {model["name"]: (model["coverage"], model["unknown"]) for model in answers[5].json()["models"]}
    assert told == {"sure": (True, True), "plain": (False, False)}


def test_the_reference_has_the_option():
    paths = describe_api(ServerSettings())["paths"]
    names = {path: str(methods["post"]["parameters"]) for path, methods in paths.items() if "post" in methods}
    assert [path for path, options in names.items() if "'coverage'" in options] == ["/v1/classify", "/v1/predict"]


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.slow
def test_the_page_says_what_it_does_not_know_and_shows_the_set(window: Browser):
    models = (
        Model("strange", classes=5, set_size=2, is_unknown=True),
        Model("sure", classes=5, set_size=1, is_unknown=False),
        Model("plain", classes=5),
    )
    with StandIn(models).running() as stand, opened(window, stand) as page:
        give(page, ("a.png", photo()))
        shown = {}
        for model in models:
            page.locator("#model").select_option(model.name)
            here = card(page, "a.png")
            here.locator(".look[aria-busy=false]").wait_for()
            shown[model.name] = (here.locator(".strange").is_visible(), here.locator(".set").inner_text())
            assert here.locator(".set").is_visible() == (model.name != "plain")
            if model.name == "strange":
                said = page.locator("#announced").inner_text()
                assert "a.png: does not look like anything the model was trained on; " in said
        words = "for 95 of 100 images like those known, such a set holds the right label."
        assert shown["strange"] == (True, f"tabby cat, Egyptian cat: {words}")
        assert shown["sure"] == (False, f"tabby cat: {words}")
        assert shown["plain"][0] is False
        queries = [seen.query.get("coverage") for seen in stand.asked("/v1/predict")]
        assert queries == ["0.95", "0.95", None]


def wait_for_answers(page: Page, count: int) -> None:
    """Wait until so many answers are shown, and none is on its way."""
    page.wait_for_function(
        "count => document.querySelectorAll('.look').length === count && !document.querySelector('[aria-busy=true]')",
        arg=count,
    )


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("is_unknown", [False, True], ids=["known", "unknown"])
def test_nothing_of_an_answer_lies_over_another_part(window: Browser, is_unknown: bool, width: int):
    names = tuple(f"a cat with a rather long name, number {number}" for number in range(9))
    models = (
        Model("calibrated", classes=5, set_size=1, is_unknown=is_unknown),
        Model("plain", classes=5),
        Model("close", classes=9, labels=names, shares=(0.2, *[0.1] * 8), set_size=9, is_unknown=is_unknown),
    )
    viewport = {"width": width, "height": 900}
    with StandIn(models).running() as stand, opened(window, stand, viewport=viewport) as page:
        stand.open.clear()
        give(page, ("a.png", photo()), ("b.png", photo(seed=1)))
        card(page, "b.png").get_by_text("Looking…").wait_for()
        places = page.evaluate(PLACES)
        stand.open.set()
        wait_for_answers(page, 2)
        assert is_unknown or np.allclose(page.evaluate(PLACES), places, atol=0.5)  # room was kept for the set
        assert page.locator(".strange").first.is_visible() is is_unknown
        assert page.locator(".set").first.is_visible()
        assert find_overlaps(page) == []
        for other in ("plain", "close"):
            page.get_by_label("Compare with").select_option(other)
            wait_for_answers(page, 4)
            assert find_overlaps(page) == []
        unfold(card(page, "a.png"))
        wait_for_answers(page, 4)
        assert find_overlaps(page) == []


@pytest.mark.slow
def test_nothing_lies_over_another_part_with_a_calibrated_model(window: Browser, tmp_path: Path):
    sure, plain = save(calibrated_model(), tmp_path / "sure"), save(make_model(), tmp_path / "plain")
    with command_line("--model", f"sure={sure}", "--model", f"plain={plain}", "--threads", "1") as server:
        behind = SimpleNamespace(address=server.url, open=threading.Event())
        with opened(window, behind) as page:
            give(page, ("known.png", to_png(KNOWN)), ("strange.png", to_png(STRANGE)))
            for name in ("known", "strange"):
                here = card(page, f"{name}.png")
                here.get_by_text("for 95 of 100 images").wait_for()
                assert here.locator(".strange").is_visible() is (name == "strange")
            for width in WIDTHS.values():
                page.set_viewport_size({"width": width, "height": 900})
                assert find_overlaps(page) == []
            page.get_by_label("Compare with").select_option("plain")
            wait_for_answers(page, 4)
            for width in WIDTHS.values():
                page.set_viewport_size({"width": width, "height": 900})
                assert find_overlaps(page) == []
