"""Few-shot accuracy and suites need one label an image, and say so; similar images need none."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from tagged import SMALL, tag_model, tagged_source

import vitrail
from vitrail.data.task_data import TaskData
from vitrail.errors import DataError
from vitrail.transfer.suite_data import open_suite_parts


def test_few_shot_accuracy_needs_labels():
    needs = "has tags, and a measurement of few-shot accuracy needs one label an image: give a folder for each class"
    with pytest.raises(DataError, match=needs):
        vitrail.fewshot(tag_model(), tagged_source(), device="cpu")


def test_a_suite_needs_labels(tmp_path):
    rows = []
    for number, split in enumerate(("train", "train", "test")):
        Image.new("L", (8, 8), 80 * number).save(tmp_path / f"{number}.png")
        rows.append(json.dumps({"image": f"{number}.png", "tags": ["dark", "grey"][:number], "split": split}))
    (tmp_path / "all.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"all\.jsonl has tags, and a suite needs one label an image"):
        open_suite_parts("all", str(tmp_path / "all.jsonl"))


def test_similar_images_are_told_with_their_tags(tmp_path):
    model, source = tag_model(), tagged_source()
    image = source.read(7).content
    found = vitrail.find_similar(model, source, image, 3, device="cpu", cache=None)
    assert found[0].name == "sample 7"
    assert found[0].similarity == pytest.approx(1)
    assert found[0].label == source.task.describe_target(source.read(7).targets)
    labelled = vitrail.create_model("Ti/4", in_channels=1, num_classes=0, seed=0, **SMALL)
    (one,) = vitrail.find_similar(labelled, [(image, "cat"), (source.read(8).content, "dog")], image, 1, cache=None)
    assert one.label == "cat"


def test_a_table_with_a_column_of_classes_is_measured(tmp_path):
    """With its columns named, the same table has labels."""
    lines = ["image,kind,size"]
    for number in range(8):
        Image.new("L", (16, 16), 30 * number).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'dark' if number < 4 else 'light'},{number}")
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    model = vitrail.create_model("Ti/4", in_channels=1, num_classes=2, seed=0, **SMALL)
    model.labels = ["dark", "light"]
    report = vitrail.evaluate(model, str(tmp_path / "all.csv"), labels="kind", device="cpu")
    assert (report.images, report.top1.value) == (8, 0.5)  # a new head says the first class of all
    wrong = TaskData(str(tmp_path / "all.csv"), "numbers", ("size",))
    with pytest.raises(DataError, match="the model answers with labels, and the data has numbers"):
        vitrail.evaluate(model, wrong, device="cpu")
