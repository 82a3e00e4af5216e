"""The page of a model with another task than one label: its measures, the worst answers as photos, its tables."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import made_up
import numpy as np
import pytest
from PIL import Image
from tagged import NAMES, tag_model, tagged_source

import browser
import vitrail
from vitrail.data.open import add_task, open_data
from vitrail.evaluation.task_report import TaskReport, UnusedImage, WorstImage
from vitrail.inspection.findings import AnsweredPhoto, TaskScores
from vitrail.inspection.page.report import SCORE_SECTIONS, TASK_SECTIONS
from vitrail.inspection.page.task_scores import show_measures, show_tables, show_worst
from vitrail.system.intervals import Estimate
from vitrail.tasks.task import AnswerLine, Measure, TaskMeasures

HOSTILE = "</ul><img src=x onerror=alert(1)>\"'&amp;<!--"


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def task_scores(**others) -> TaskScores:
    """Scores of an age, with an error of years, and a share."""
    measures = TaskMeasures(
        (
            Measure("MAE", Estimate(3.25, 3.0, 3.5), is_share=False, more_is_better=False),
            Measure("near", Estimate(0.5, 0.4, 0.6), is_share=True),
        ),
        {"numbers": [["column", "images", "MAE"], *(["age" if k == 0 else f"age {k}", 40, 3.25] for k in range(23))]},
    )
    lines = (AnswerLine("age", "34.2"), AnswerLine("old", "20.0%", 0.2, is_chosen=False))
    pixels = made_up.made_images(1, (96, 64))[0].pixels
    report = TaskReport(
        model="m",
        data="faces",
        part=None,
        kind="numbers",
        images=40,
        left_out=(UnusedImage(3, "faces/3.jpg", "age is 'x', which is no number"),),
        measured=measures,
        worst=(WorstImage(5, "faces/5.jpg", 9.0, "age 25", lines, {"numbers": {"age": 34.2}}),),
        worst_words="the images with the largest errors",
    )
    return TaskScores(
        replace(report, **others), "40 images of faces", (AnsweredPhoto("5.jpg", pixels, lines, "age 25"),)
    )


def test_the_first_measure_is_large_and_the_others_follow():
    told = words(show_measures(task_scores()))
    assert told.startswith("3.2500 MAE 95% interval 3.0000 to 3.5000; less is better near 50.00% 40.00% to 60.00%")
    assert "Measured on 40 images of faces." in told
    assert "1 image could not be used 3.jpg: age is &#x27;x&#x27;, which is no number" in told
    assert "learned" not in told
    assert "learned from these very images" in words(show_measures(task_scores(was_trained_on=True)))


def test_only_shares_have_bars():
    html = show_measures(task_scores())
    assert html.count('class="bar" style') == 1
    assert "--share: 0.5000" in html


def test_the_worst_answers_stand_beside_the_truth():
    html = show_worst(task_scores())
    assert words(html) == "age 34.2 old 20.0% true: age 25 The images with the largest errors, the worst first."
    assert '<li class="chosen"><span dir="auto">age</span><b>34.2</b></li>' in html  # a number has no bar
    assert '<li class="other">' in html
    assert "--share: 0.2000" in html
    assert "No answer is wrong" in show_worst(task_scores(worst=()))
    assert "can be shown" in show_worst(replace(task_scores(), photos=()))


def test_long_tables_are_folded():
    html = show_tables(task_scores())
    assert html.count("<tr>") == 2 + 23  # a head each
    assert "the other 3 rows" in html
    assert '<th scope="col" class="number">images</th>' in html
    assert '<th scope="row" dir="auto">age</th>' in html


def test_names_from_strangers_stay_text():
    scores = task_scores()
    lines = (AnswerLine(HOSTILE, HOSTILE, 0.3),)
    photo = AnsweredPhoto(HOSTILE, scores.photos[0].pixels, lines, HOSTILE)
    measured = TaskMeasures(
        (Measure(HOSTILE, Estimate(0.5, 0.4, 0.6), True),) * 2, {HOSTILE: [[HOSTILE, HOSTILE], [HOSTILE, 1]]}
    )
    report = replace(
        scores.report, measured=measured, left_out=(UnusedImage(0, HOSTILE, HOSTILE),), worst_words=HOSTILE
    )
    hostile = TaskScores(report, HOSTILE, (photo,))
    for show in TASK_SECTIONS.values():
        assert "<img src=x" not in show(hostile)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Photos with a CSV of their tags, in which one row is wrong."""
    folder, source = tmp_path_factory.mktemp("tagged"), tagged_source(24)
    lines = ["image,tags"]
    for index in range(24):
        sample = source.read(index)
        Image.fromarray(np.asarray(sample.content)[0]).save(folder / f"{index:02}.png")
        lines.append(f"{index:02}.png,{source.task.describe_target(sample.targets).replace(', ', '|')}")
    lines = [line.replace("no tag", "") for line in lines]
    lines[4] = "03.png,brihgt"
    (folder / "tags.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def inspected(photos, tmp_path_factory):
    model = tag_model()
    return model, vitrail.inspect(model, images=str(photos / "tags.csv"), out=tmp_path_factory.mktemp("out"))


def test_a_model_of_tags_is_inspected_on_a_table(inspected, photos):
    model, result = inspected
    page = result.report.read_text()
    sections = re.findall(r'<section id="(.*?)"', page)
    assert sections[:4] == ["measures", "worst", "tables", "attention"]
    assert not set(SCORE_SECTIONS) & set(sections)
    source = open_data(add_task(str(photos / "tags.csv"), model.task))
    report = vitrail.evaluate(model, source, device="cpu")
    assert result.measures["model"]["mAP"] == pytest.approx(report["mAP"], abs=1e-6)
    assert result.accuracy == {}
    assert f"mAP of model  {report['mAP'].value:.2%}" in repr(result)
    assert "03.png: " in page
    assert "is no tag, did you mean" in page
    assert any("03.png" in note for note in result.notes)


def test_shown_images_have_the_answers_of_the_task(inspected):
    _, result = inspected
    shown = result.findings[0].images[0]
    assert shown.guesses == ()
    assert {line.name for line in shown.answer} == set(NAMES)
    chosen = {line.name for line in shown.answer if line.is_chosen}
    assert chosen == {line.name for line in shown.answer if line.share >= 0.5}
    assert shown.name.startswith("00.png (true: ")
    assert "answers of model" in result.tables()
    assert result.to_dict()["answers"]["model"][0]["image"] == shown.name


def test_the_numbers_are_written_beside_the_page(inspected):
    _, result = inspected
    files = {path.name: path for path in result.data_files}
    with files["measures.csv"].open() as stream:
        rows = list(csv.DictReader(stream))
    assert float(rows[0]["value"]) == result.measures["model"]["mAP"].value
    assert {"worst.csv", "tables-1.csv", "guesses.csv"} <= set(files)
    assert 'measures.csv">' in result.report.read_text()


@pytest.mark.slow
def test_images_of_another_task_are_shown_but_not_scored(tmp_path):
    pairs = [(np.full((16, 16), 10 * k, np.uint8), ("cat", "dog")[k % 2]) for k in range(12)]
    result = vitrail.inspect(tag_model(), images=pairs, out=tmp_path)
    assert result.measures == {}
    assert "measures" not in re.findall(r'<section id="(.*?)"', result.report.read_text())
    assert result.findings[0].images[0].answer


@pytest.mark.slow
def test_a_model_of_labels_beside_one_of_tags(photos, tmp_path):
    classifier = vitrail.create_model("Ti/4", in_channels=1, num_classes=2, seed=0, image_size=16, width=32, depth=1,
                                      num_heads=2, mlp_dim=32)  # fmt: skip
    result = vitrail.inspect([tag_model(), classifier], images=str(photos / "tags.csv"), out=tmp_path)
    assert list(result.measures) == ["model"]
    page = result.report.read_text()
    assert "This model was not scored on a task with such measures." in page


@pytest.mark.slow
def test_the_page_in_a_browser(inspected):
    _, result = inspected
    with browser.chromium() as running:
        for width in (1440, 380):
            with browser.opened(running, result.report, viewport={"width": width, "height": 900}) as page:
                assert page.evaluate("document.documentElement.scrollWidth") == width
                assert page.locator("#worst .photos li img").count() > 3
                told = page.locator("#attention .guesses li")
                assert told.count() == 3
                chosen = page.locator("#attention .guesses li.chosen b")
                if chosen.count():
                    assert chosen.first.evaluate("it => getComputedStyle(it).fontWeight") == "600"
