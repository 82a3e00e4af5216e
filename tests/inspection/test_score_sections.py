"""The first sections of the report: the accuracy, the mistakes as photos, doubtful labels, confusions, classes."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import made_up
import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.sources.list_source import ListSource
from vitrail.inspection.page import scores as page_scores
from vitrail.inspection.page.report import SCORE_SECTIONS, write_report
from vitrail.inspection.page.scores import (
    show_accuracy,
    show_classes,
    show_confusions,
    show_doubtful,
    show_mistakes,
)
from vitrail.inspection.page.words import TITLES
from vitrail.inspection.scores import DoubtfulImage, ModelScores, read_score_photos, shrink_photo

HOSTILE = "</ul><img src=x onerror=alert(1)>\"'&amp;<!--"


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def written(folder: Path, *findings) -> str:
    figures = [made_up.made_figures(each, folder / f"model-{number}") for number, each in enumerate(findings)]
    return write_report(findings, figures, folder / "report.html").read_text("utf-8")


def many_classes(count: int) -> made_up.EvaluationReport:
    """Class k is right k times of `count`, and else taken for the next class."""
    confusion = np.diag(range(1, count + 1))
    confusion[range(count), np.roll(range(count), -1)] += np.arange(count)[::-1]
    return made_up.made_report(confusion.tolist(), [f"class {number}" for number in range(count)])


def jpeg(pixels: np.ndarray, turn: int = 1) -> bytes:
    image, content = Image.fromarray(pixels), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = turn
    image.save(content, "jpeg", quality=95, exif=exif)
    return content.getvalue()


def test_a_report_opens_with_what_people_came_for(tmp_path):
    sections = re.findall(r'<section id="(.*?)"', written(tmp_path, made_up.vit()))
    assert sections[:5] == ["accuracy", "mistakes", "doubtful", "confusions", "classes"]
    assert sections[5] == "attention"


def test_a_model_that_was_not_scored_has_none_of_it(tmp_path):
    sections = re.findall(r'<section id="(.*?)"', written(tmp_path, made_up.vit(scores=None)))
    assert not set(SCORE_SECTIONS) & set(sections)
    beside = written(tmp_path / "beside", made_up.vit(), made_up.resnet())
    assert beside.count("This model was not scored on images with labels.") == len(SCORE_SECTIONS)


def test_the_accuracy_has_its_interval_and_its_images():
    report = made_up.made_report()
    told = words(show_accuracy(made_up.made_scores(report)))
    low, high = report.top1.low, report.top1.high
    assert told.startswith("70.8% right, 17 of 24")
    assert f"95% interval {low:.1%} to {high:.1%}" in told
    assert "Measured on 24 photos that are made up." in told
    assert "learned" not in told


def test_a_remark_may_be_a_sentence_of_its_own():
    scores = made_up.made_scores(remark="Each photo was guessed without it.")
    assert "Each photo was guessed without it." in words(show_accuracy(scores))
    assert "Measured on" not in words(show_accuracy(scores))


def test_images_that_were_trained_on_are_told():
    scores = made_up.made_scores(replace(made_up.made_report(), was_trained_on=True))
    assert 'class="warning"' in show_accuracy(scores)
    assert 'class="warning"' not in show_accuracy(made_up.made_scores())


def test_mistakes_are_photos_with_label_guess_and_probability():
    scores = made_up.made_scores()
    items = re.findall(r"<li>.*?</li>", show_mistakes(scores))
    assert len(items) == 7
    for item, photo in zip(items, scores.mistakes, strict=True):
        assert words(item) == f"{photo.label} → {photo.guess} {photo.probability:.0%}"
        [uri] = re.findall(r'src="data:image/\w+;base64,(.*?)"', item)
        assert Image.open(io.BytesIO(base64.b64decode(uri))).size == (64, 96)
    shown = replace(scores, mistakes=scores.mistakes[:3])
    assert "7 mistakes; the 3 of which it is surest are shown." in words(show_mistakes(shown))


def test_without_a_mistake_it_says_so():
    scores = made_up.made_scores(made_up.made_report(((3, 0), (0, 3)), ("a", "b")))
    assert "<img" not in show_mistakes(scores)
    assert "none" in words(show_mistakes(scores))
    assert "<table" not in show_confusions(scores)


def test_doubtful_labels_are_photos_too_and_weak_ones_are_told():
    scores = made_up.made_scores(all_doubtful=12)
    told = show_doubtful(scores)
    assert told.count("<img") == 5
    assert "The first 5 of 12 doubtful labels." in words(told)
    assert "own mistakes" in words(told), "seventy per cent right"
    sure = made_up.made_report(((40, 1), (1, 40)), ("a", "b"))
    assert "own mistakes" not in words(show_doubtful(made_up.made_scores(sure)))


def test_the_section_of_doubtful_labels_is_there_if_there_are_any(tmp_path):
    assert 'id="doubtful"' not in written(tmp_path, made_up.vit(scores=made_up.made_scores(doubted=0)))


def test_the_matrix_has_every_count_and_marks_what_is_right():
    told = show_confusions(made_up.made_scores())
    body = re.search(r'class="matrix".*?<tbody>(.*?)</tbody>', told, re.DOTALL).group(1)
    cells = re.findall(r'<td class="(\w+)" style="--share: (.*?)">(\d*)</td>', body)
    assert [int(count or 0) for _, _, count in cells] == [7, 2, 0, 1, 8, 1, 3, 0, 2]
    assert [kind for kind, _, _ in cells] == ["right" if n % 4 == 0 else "wrong" for n in range(9)]
    assert float(cells[0][1]) == pytest.approx(7 / 9, abs=1e-3)
    assert "sky disc 3 of 5" in words(told), "the most frequent confusion"


@pytest.mark.parametrize(("count", "matrix"), [(20, True), (21, False)])
def test_a_matrix_is_for_few_classes(count, matrix):
    told = show_confusions(made_up.made_scores(many_classes(count)))
    assert ('class="matrix' in told) is matrix
    assert "rarer confusions" in told


def test_guesses_of_classes_that_the_data_does_not_have_are_a_column():
    report = made_up.made_report()
    confusion = report.confusion.copy()
    confusion[0, -1] = 4
    told = show_confusions(made_up.made_scores(replace(report, confusion=confusion)))
    assert '<th scope="col">other</th>' in told


def test_classes_are_sorted_and_many_are_folded():
    told = show_classes(made_up.made_scores(many_classes(page_scores.MOST_CLASSES + 4)))
    names = re.findall(r'class="name" dir="auto">class (\d+)<', told)
    assert names == [str(number) for number in range(24)], "the worst first"
    shown, folded = told.split("<details>")
    assert shown.count("<li>") == page_scores.MOST_CLASSES
    assert folded.count("<li>") == 4
    assert "the other 4 classes" in folded
    few = show_classes(made_up.made_scores())
    assert "<details>" not in few
    assert words(few).startswith("sky 40% 2 of 5")
    low, high = made_up.made_report().classes[2].accuracy[1:]
    assert f"--low: {low:.4f}; --high: {high:.4f}" in few
    assert f"95% interval {low:.1%} to {high:.1%}" in few


def test_calibration_is_folded():
    told = show_accuracy(made_up.made_scores())
    [folded] = re.findall(r"<details>.*?</details>", told, re.DOTALL)
    assert folded.count("<li>") == len(made_up.made_report().bins)


@pytest.mark.parametrize("share", [0.996, 0.9999])
def test_almost_certain_is_not_certain(share):
    scores = made_up.made_scores()
    [photo] = [replace(scores.mistakes[0], probability=share)]
    told = words(show_mistakes(replace(scores, mistakes=(photo,))))
    assert "100%" not in told
    assert "99." in told


def test_strangers_names_are_words_only():
    report = made_up.made_report(((2, 1), (1, 2)), (HOSTILE, f"{HOSTILE} 2"))
    scores = made_up.made_scores(report, remark=HOSTILE)
    scores = replace(scores, mistakes=tuple(replace(each, name=HOSTILE) for each in scores.mistakes))
    for show in SCORE_SECTIONS.values():
        told = show(scores)
        assert "<img src=x" not in told
        assert "onerror=alert(1)&gt;" in told


def test_photos_are_small_upright_and_whole():
    tall = np.zeros((300, 600, 3), np.uint8)
    tall[:, :300] = (250, 0, 0)
    for turn, size, red in ((1, (120, 240), np.s_[:, :100]), (6, (240, 120), np.s_[:100])):
        pixels = shrink_photo(jpeg(tall, turn), 240)
        assert pixels.shape == (*size, 3)
        assert pixels[red][..., 0].mean() > 200
        assert pixels[..., 0].mean() == pytest.approx(125, abs=6)
    small = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    assert np.array_equal(shrink_photo(torch.from_numpy(small), 240)[..., 0], small[0]), "not enlarged"
    assert shrink_photo(torch.zeros(5, 9, 9, dtype=torch.uint8), 240).shape == (9, 9, 3)


def test_photos_that_cannot_be_read_are_skipped(monkeypatch):
    monkeypatch.setattr("vitrail.inspection.scores.MOST_MISTAKES", 3)
    report = made_up.made_report()
    photo = jpeg(np.full((20, 30, 3), 90, np.uint8))
    broken = {report.mistakes[0].index, report.mistakes[2].index}
    source = ListSource([(b"no image" if index in broken else photo, "disc") for index in range(report.images)])
    doubtful = tuple(DoubtfulImage(index, "disc", "sky", 0.9 - index / 100) for index in range(8))
    read = read_score_photos(ModelScores(report, source, "photos", doubtful))
    wanted = [each for each in report.mistakes if each.index not in broken][:3]
    assert [(each.label, each.guess, each.probability) for each in read.mistakes] == [
        (each.label, each.guess, each.confidence) for each in wanted
    ]
    assert len(read.doubtful) == 5
    assert read.all_doubtful == 8
    assert [each.probability for each in read.doubtful] == sorted(each.probability for each in read.doubtful)[::-1]


def test_every_section_has_its_title_and_place():
    assert list(TITLES)[: len(SCORE_SECTIONS)] == list(SCORE_SECTIONS)
