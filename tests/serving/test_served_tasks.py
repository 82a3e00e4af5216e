"""Models of other tasks than labels behind the server: /v1/predict, what else they refuse, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from page_visit import PHONE, WIDE, card, give, opened, photo
from running import command_line, image
from stand_in import Model, StandIn

import vitrail
from browser import chromium
from task_models import TASKS, make_task_model
from vitrail.inference.predictor import Predictor
from vitrail.serving.app import build_app
from vitrail.serving.serve import open_served_model
from vitrail.serving.served_model import ImageRequest
from vitrail.serving.service import Service
from vitrail.serving.settings import ServerSettings
from vitrail.tasks.task import AnswerLine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

PNG = {"content-type": "image/png"}
TAGGED = (
    AnswerLine("cat", "93.1%", 0.931, True),
    AnswerLine("indoor", "48.0%", 0.48, True),
    AnswerLine("night", "30.5%", 0.305, False),
)
MEASURED = (AnswerLine("age", "34.2"), AnswerLine("weight", "0.0031"))
DESCRIBED = (AnswerLine("colour: red", "93.1%", 0.931), AnswerLine("shape: round", "55.0%", 0.55))
GRADED = (AnswerLine("good", "41.0%", 0.41, True), AnswerLine("fair", "39.0%", 0.39, False))
MODELS = (
    Model("tags", classes=0, task="tags", lines=TAGGED),
    Model("bare", classes=0, task="tags", lines=tuple(line._replace(is_chosen=False) for line in TAGGED)),
    Model("numbers", classes=0, task="numbers", lines=MEASURED),
    Model("attributes", classes=0, task="attributes", lines=DESCRIBED),
    Model("levels", classes=0, task="levels", lines=GRADED),
)


def ask(names: list[str], *requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    """Return the answers of a server with these tasks' models to requests, each a path and how it is sent."""

    async def talk() -> list[httpx.Response]:
        models = {name: open_served_model(name, make_task_model(name)) for name in names}
        service = Service(models, ServerSettings(threads=1))
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await service.start()
            answers = [await client.request("POST" if how else "GET", path, **how) for path, how in requests]
            await service.close()
        return answers

    return asyncio.run(talk())


def send(path: str, content: bytes | None = None) -> tuple[str, dict[str, Any]]:
    return path, {"content": image() if content is None else content, "headers": PNG}


def test_predict_answers_for_every_task():
    content = image(3)
    answers = ask(list(TASKS), *(send(f"/v1/predict?model={kind}", content) for kind in TASKS))
    for kind, answer in zip(TASKS, answers, strict=True):
        (expected,) = Predictor(make_task_model(kind), device="cpu").answers(content)
        told = answer.json()
        assert told.keys() == {"model", "task", "answer", "lines", "timing"}
        assert (told["model"], told["task"]) == (kind, kind)
        assert told["answer"].keys() == expected.content.keys()
        for line, ours in zip(told["lines"], expected.lines, strict=True):
            assert line.keys() == {"name", "text", "share", "is_chosen"}
            assert (line["name"], line["is_chosen"]) == (ours.name, ours.is_chosen)
            assert line["share"] == pytest.approx(ours.share, abs=1e-5)


def test_several_images_have_a_row_each():
    files = [("files", ("a.png", image(1))), ("files", ("b.txt", b"no image")), ("files", ("c.png", image(2)))]
    (answer,) = ask(["tags"], ("/v1/predict?top=2", {"files": files}))
    first, second, third = answer.json()["images"]
    assert second.keys() == {"name", "error"}
    assert first["task"] == third["task"] == "tags"
    assert first["lines"] != third["lines"]
    for answer in (first["answer"], third["answer"]):  # the two likeliest tags, and all that the image has
        assert answer["probabilities"].keys() >= set(answer["tags"])
        assert len(answer["probabilities"]) == max(2, len(answer["tags"]))


def test_classify_and_embed_name_the_right_endpoint():
    answers = ask(["tags", "numbers"], send("/v1/classify"), send("/v1/classify?model=numbers"), send("/v1/embed"))
    for answer, words in zip(answers, ("4 tags", "2 numbers"), strict=False):
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "no_labels"
        assert f"gives {words} and no labels: use /v1/predict" in answer.json()["error"]["message"]
    assert len(answers[-1].json()["embedding"]) == 32


def test_the_list_of_models_names_the_tasks():
    (answer, metrics) = ask(["attributes", "labels", "levels"], ("/v1/models", {}), ("/metrics", {}))
    rows = [[model[name] for name in ("task", "answers", "classes", "lines")] for model in answer.json()["models"]]
    assert rows == [
        ["attributes", "2 attributes", 0, 2],
        ["labels", "3 classes", 3, 3],
        ["levels", "4 levels", 0, 4],
    ]
    assert 'vitrail_queue_length{model="attributes"} 0.0' in metrics.text


def test_labels_classify_as_they_predict():
    classified, predicted = ask(["labels"], send("/v1/classify"), send("/v1/predict"))
    expected = [(row["label"], pytest.approx(row["probability"], abs=1e-6)) for row in classified.json()["labels"]]
    assert [tuple(row.values()) for row in predicted.json()["answer"]["labels"]] == expected


def test_one_pass_serves_both_questions():
    model = open_served_model("labels", make_task_model("labels"))
    sizes = []
    predict = model.engine.predict
    model.engine.predict = lambda pixels: (sizes.append(len(pixels)), predict(pixels))[1]
    both = [model.decode(ImageRequest(name, image())) for name in ("classify", "predict", "embed")]
    ranked, answer, _ = model.compute(both)
    assert sizes == [2]
    assert [label for label, _ in ranked] == [line.name for line in answer.lines]


@pytest.mark.slow
def test_the_command_serves_an_exported_file_of_a_task(tmp_path):
    model, content = make_task_model("numbers"), image(5)
    vitrail.save(model, tmp_path / "model")
    vitrail.export(model, tmp_path / "numbers.onnx")
    (expected,) = Predictor(model, device="cpu").values(content)
    parts = ("--model", f"model={tmp_path / 'model'}", "--model", f"exported={tmp_path / 'numbers.onnx'}")
    with command_line(*parts, "--threads", "1") as server:
        assert "serving model (2 numbers), exported (2 numbers) at" in "".join(server.said)
        for name in ("model", "exported"):
            told = httpx.post(f"{server.url}/v1/predict?model={name}", content=content, headers=PNG).json()
            assert list(told["answer"]["numbers"].values()) == pytest.approx(expected.tolist(), rel=1e-3)


# The page


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(window: Browser) -> Iterator[Page]:
    with StandIn(MODELS).running() as stand, opened(window, stand) as page:
        give(page, ("a.png", photo()))
        yield page


def choose(page: Page, name: str) -> Locator:
    """Choose a model, and return the photo's card once it has answered."""
    page.locator("#model").select_option(name)
    here = card(page, "a.png")
    here.locator(".look[aria-busy=false]").first.wait_for()
    return here


def list_parts(here: Locator) -> list[list[str]]:
    """Return the words of each line, with those for screen readers."""
    items = here.locator(".parts li")
    return [[text for text in items.nth(k).locator("> *").all_text_contents() if text] for k in range(items.count())]


@pytest.mark.slow
def test_tags_are_ticked_and_the_others_said_to_be_not_chosen(page: Page):
    here = choose(page, "tags")
    assert list_parts(here) == [
        ["\u2713", "cat", "93.1%"],
        ["\u2713", "indoor", "48.0%"],
        ["not chosen: ", "night", "30.5%"],
    ]
    assert here.locator(".parts .tick").first.get_attribute("aria-hidden") == "true"
    widths = [here.locator(".parts .bar").nth(k).evaluate("it => it.style.getPropertyValue('--share')") for k in (0, 2)]
    assert widths == ["0.931", "0.305"]
    assert not here.locator(".ranked").is_visible()
    assert "a.png: cat, 93.1%; indoor, 48.0%" in page.locator("#announced").inner_text()
    assert page.locator("#command").inner_text().endswith("/v1/predict")


@pytest.mark.slow
def test_without_any_tag_the_page_says_so(page: Page):
    here = choose(page, "bare")
    assert here.get_by_text("None of these is likely enough.").is_visible()
    assert "a.png: none is likely enough" in page.locator("#announced").inner_text()
    here = choose(page, "tags")
    assert not here.get_by_text("None of these is likely enough.").is_visible()


@pytest.mark.slow
def test_numbers_have_no_bars_and_attributes_have(page: Page):
    here = choose(page, "numbers")
    assert list_parts(here) == [["age", "34.2"], ["weight", "0.0031"]]
    assert here.locator(".parts .bar").count() == 2
    assert not here.locator(".parts .bar").first.is_visible()
    assert page.locator(".facts").inner_text().startswith("224 × 224 pixels · numbers")
    here = choose(page, "attributes")
    assert list_parts(here) == [["colour: red", "93.1%"], ["shape: round", "55.0%"]]
    assert here.locator(".parts .bar").first.is_visible()


@pytest.mark.slow
def test_levels_are_ranked_without_being_unsure_of_a_neighbour(page: Page):
    here = choose(page, "levels")
    assert here.locator(".best").inner_text().split() == ["good", "41.0%"]
    assert not here.locator(".unsure").is_visible()
    assert not here.locator(".parts").is_visible()


@pytest.mark.slow
def test_two_models_are_compared_by_what_they_chose(page: Page):
    choose(page, "tags")
    page.get_by_label("Compare with").select_option("bare")
    here = card(page, "a.png")
    here.get_by_text("They differ.").wait_for()
    choose(page, "numbers")
    assert not here.locator(".verdict").is_visible(), "another question"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["wide", "phone"])
def test_axe_finds_nothing_grave_in_any_answer(window: Browser, scheme: str, size: str):
    pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    from test_page_accessibility import find_grave

    view = PHONE if size == "phone" else WIDE
    with StandIn(MODELS).running() as stand, opened(window, stand, viewport=view, color_scheme=scheme) as page:
        give(page, ("a.png", photo()))
        for model in MODELS:
            choose(page, model.name)
            assert find_grave(page) == [], model.name
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
