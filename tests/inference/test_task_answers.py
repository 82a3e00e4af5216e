"""Answers of every task: the predictor, vitrail.predict, and the command as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import make_folder
from typer.testing import CliRunner

import vitrail
from task_models import OTHERS, TASKS, make_task_model
from vitrail.cli import app
from vitrail.data.transforms.preprocess import prepare
from vitrail.errors import ConfigError
from vitrail.inference.answers import list_cell_names
from vitrail.inference.predictor import Predictor


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with models by their kinds, and with photos."""
    root = tmp_path_factory.mktemp("answers")
    for kind in TASKS:
        vitrail.save(make_task_model(kind), root / kind)
    make_folder(root / "photos", {"": 3})
    return root


def list_photos(place: Path) -> list[str]:
    return sorted(str(path) for path in (place / "photos").rglob("*.png"))


@torch.no_grad()
def compute_values(kind: str, photos: list[str]) -> np.ndarray:
    model = make_task_model(kind)
    images = torch.stack([prepare(photo, model.preprocessing) for photo in photos])
    return TASKS[kind].activate(model(images)).numpy()


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_values_are_those_of_the_task(place, kind):
    photos, predictor = list_photos(place), Predictor(place / kind, device="cpu")
    expected = compute_values(kind, photos)
    assert expected.std(axis=0).max() > 1e-3, "the model tells images apart"
    np.testing.assert_allclose(predictor.values(photos), expected, rtol=1e-4, atol=1e-5)
    assert predictor.values([]).shape == (0, len(TASKS[kind].value_names))
    assert predictor.task == TASKS[kind]
    streamed = [outcome.values for outcome in predictor.stream(photos)]
    np.testing.assert_allclose(streamed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OTHERS)
def test_an_image_gets_the_answer_of_the_task(place, kind):
    photos, predictor = list_photos(place), Predictor(place / kind, device="cpu")
    one, many = predictor(photos[0]), predictor(photos, top=2)
    assert set(one) == set(TASKS[kind].answer(predictor.values(photos[0])[0]))
    assert len(many) == 3
    assert json.loads(json.dumps(many)) == many
    for answer, row in zip(predictor.answers(photos), predictor.values(photos), strict=True):
        assert answer.task == kind
        assert [line.name for line in answer.lines] == [line.name for line in TASKS[kind].describe(row)]
        assert tuple(answer.cells) == list_cell_names(TASKS[kind])
        assert answer.to_dict().keys() == {"task", "answer", "lines"}
    with pytest.raises(ConfigError, match="top = 0"):
        predictor(photos[0], top=0)


def test_labels_are_ranked_as_ever(place):
    photos, predictor = list_photos(place), Predictor(place / "labels", device="cpu")
    ranked = predictor(photos[0], top=2)
    (values,) = predictor.values(photos[0])
    assert ranked == [(predictor.labels[k], float(values[k])) for k in np.argsort(-values)[:2]]
    assert predictor.answers(photos[0], 2)[0].content["labels"][0]["label"] == ranked[0][0]
    assert repr(predictor) == "Predictor(3 classes, fp32 by PyTorch on cpu)"


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_probabilities_are_given_where_they_are_some(place, kind):
    photos, predictor = list_photos(place), Predictor(place / kind, device="cpu")
    if TASKS[kind].gives_probabilities:
        found = predictor.probabilities(photos)
        assert found.min() >= 0
        assert found.max() <= 1
    else:
        with pytest.raises(ConfigError, match=r"no probabilities: use predictor\.values"):
            predictor.probabilities(photos)


@pytest.mark.parametrize("kind", OTHERS)
def test_predict_gives_answers_that_print_well(place, kind):
    events = []
    result = vitrail.predict(place / "photos", place / kind, device="cpu", on_event=lambda *event: events.append(event))
    found = dict(events)["images"]
    assert found["task"] == kind
    assert found["columns"] == list(list_cell_names(TASKS[kind]))
    first = result[0]
    assert first.labels == ()
    assert first.answer is not None
    assert first.answer.to_words() in repr(result)
    ((title, rows),) = result.tables().items()
    assert (title, rows[0]) == ("Predictions", ("file", "answer", "value"))
    chosen = [line.name for each in result for line in each.answer.lines if line.is_chosen]
    assert [row[1] for row in rows[1:]] == chosen
    assert f"<td>{chosen[0]}</td>" in result._repr_html_()
    plain = json.loads(json.dumps(result.to_dict()))["predictions"][0]
    assert plain["answer"] == first.answer.content
    assert plain["task"] == kind


def test_results_of_labels_have_no_new_parts(place):
    result = vitrail.predict(place / "photos", place / "labels", device="cpu", on_event=lambda *event: None)
    assert result[0].answer is None
    assert result.to_dict()["predictions"][0].keys() == {"file", "labels", "error"}


def run_predict(place: Path, kind: str, *options: str) -> list[str]:
    """Return the lines on standard output of the command on the photos and on a file that is no image."""
    (place / "broken.png").write_bytes(b"no image")
    files = [*list_photos(place), str(place / "broken.png")]
    outcome = CliRunner().invoke(app, ["predict", *files, "--model", str(place / kind), "--device", "cpu", *options])
    assert outcome.exit_code == 1, outcome.output  # one was left out
    assert "left out" in outcome.stderr
    return outcome.stdout.splitlines()


@pytest.mark.parametrize("kind", OTHERS)
def test_the_command_prints_text_json_and_csv(place, kind):
    answers = Predictor(place / kind, device="cpu").answers(list_photos(place))
    text = [line.split("\t") for line in run_predict(place, kind)]
    for (file, *cells), photo, answer in zip(text, list_photos(place), answers, strict=True):
        assert file == photo
        assert cells == [cell for line in answer.lines if line.is_chosen for cell in (line.name, line.text)]
    objects = [json.loads(line) for line in run_predict(place, kind, "--json")]
    for row, answer in zip(objects, answers, strict=True):
        assert row.keys() == {"file", "task", "answer"}
        assert row["task"] == kind
        assert row["answer"].keys() == answer.content.keys()
    rows = list(csv.DictReader(io.StringIO("\n".join(run_predict(place, kind, "--csv")))))
    assert tuple(rows[0]) == ("file", *list_cell_names(TASKS[kind]))
    for row, photo, answer in zip(rows, list_photos(place), answers, strict=True):
        assert row["file"] == photo
        for name, cell in answer.cells.items():
            if isinstance(cell, float):
                assert float(row[name]) == pytest.approx(cell, rel=1e-5)
            else:
                assert row[name] == cell


def test_a_table_marks_what_was_chosen():
    from vitrail.cli.predict import _make_table

    heading, lines = _make_table(["a.png"], ["cat", "indoor"], has_answers=True)
    parts = [
        {"name": "cat", "text": "93.1%", "is_chosen": True},
        {"name": "indoor", "text": "2.0%", "is_chosen": False},
    ]
    shown = list(lines({"file": "a.png", "labels": [], "lines": parts}))
    assert heading.split() == ["file", "answer", "value"]
    assert [line.split() for line in shown] == [["a.png", "*", "cat", "93.1%"], ["indoor", "2.0%"]]
    assert len({len(line) for line in (heading, *shown)}) == 1, "columns are aligned"


def test_the_block_on_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "predicting.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "give_task" in block]
    place: dict[str, Any] = {}
    exec(block, place)
    assert place["predictor"](place["photo"])["probabilities"] == {"cat": 0.5, "indoor": 0.5}
    assert place["result"][0].answer.cells == {"tags": "cat|indoor", "cat": 0.5, "indoor": 0.5}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("form", "ending"), [("--json", "jsonl"), ("--csv", "csv")])
def test_a_file_has_the_answers_that_are_printed(place, tmp_path, kind, form, ending):
    words = ["predict", str(place / "photos"), "--model", str(place / kind), "--device", "cpu"]
    printed = CliRunner().invoke(app, [*words, form])
    out = tmp_path / f"answers.{ending}"
    assert CliRunner().invoke(app, [*words, "--out", str(out)]).exit_code == 0
    assert out.read_text() == printed.stdout
    result = vitrail.predict(place / "photos", place / kind, out=tmp_path / f"again.{ending}", device="cpu")
    assert tuple(result) == tuple(vitrail.predict(place / "photos", place / kind, device="cpu"))
