"""Images whose names tell their classes: templates and regular expressions, splits, and the verbs that take them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pictures import picture

import vitrail
from vitrail.data.open import add_labels_from, list_splits, open_data, open_splits
from vitrail.data.sources.flat_folder import parse_labels_from
from vitrail.training.saved_run import Run

TINY = {"image_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16}


def write_images(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        (folder / name).write_bytes(picture(number))
    return folder


def number_images(form: str, classes=("cat", "dog"), count: int = 6) -> list[str]:
    """Names such as cat_1.png for the form "{}_{}.png"."""
    return [form.format(name, number) for name in classes for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("labels_from", "name", "label"),
    [
        ("NAME_*", "Abyssinian_1.jpg", "Abyssinian"),
        ("NAME_*", "great_dane_12.jpg", "great_dane"),
        ("NAME_*", "cat.jpg", None),
        ("NAME_*", "_1.jpg", None),
        ("NAME_*.jpg", "cat_1.jpg", "cat"),
        ("NAME_*.jpg", "cat_1.png", None),
        ("NAME.*", "cat.0.jpg", "cat"),
        ("NAME.*", "cat.jpg", None),
        ("NAME (*)", "cat (1).jpg", "cat"),
        ("NAME(*)", "cat (1).jpg", "cat"),
        ("*_NAME", "0001_cat.jpg", "cat"),
        ("NAME_*_*", "cat_1_left.jpg", "cat"),
        (r"^(.+)_\d+", "great_dane_12.jpg", "great_dane"),
        (r"^([^_]+)_", "great_dane_12.jpg", "great"),
        (r"(cat|dog)", "a dog here.jpg", "dog"),
        (r"(?P<label>[a-z]+)-(\d+)", "cat-1.jpg", "cat"),
        (r"(a)?b", "b.jpg", None),
        (r"^(.+)_\d+", "cat.jpg", None),
        ("NAME_*", "new\nline_1.jpg", r"new\nline"),
    ],
)
def test_where_the_class_stands(labels_from, name, label):
    assert parse_labels_from(labels_from).find_label(name) == label


@pytest.mark.parametrize("labels_from", ["cat", "", "(a)(b)", "(", "NAME_NAME", "*_*"])
def test_what_cannot_be_understood(labels_from, tmp_path):
    with pytest.raises(vitrail.ConfigError, match=re.escape(repr(labels_from))):
        open_data(tmp_path, labels_from=labels_from)


def test_classes_from_names(tmp_path, caplog):
    folder = write_images(tmp_path / "flat", [*number_images("{}_{}.png"), "readme.png", ".hid_1.png"])
    (folder / "notes.txt").write_text("no image")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "cow_1.png").write_bytes(picture(99))
    source = open_data(folder, labels_from="NAME_*")
    assert source.classes == ("cat", "dog")
    assert source.labels(0, 12).tolist() == [0] * 6 + [1] * 6
    assert source.identity(0) == "cat_1.png"
    assert "readme.png" in caplog.text
    (folder / "emu_1.png").write_bytes(picture(50))
    assert open_data(folder, labels_from="NAME_*").classes == ("cat", "dog", "emu")


def test_numbers_are_in_the_order_of_numbers(tmp_path):
    folder = write_images(tmp_path / "flat", number_images("{}_{}.png", ("10", "9", "2"), 1))
    assert open_data(folder, labels_from="NAME_*").classes == ("2", "9", "10")


def test_a_table_beside_the_images_gives_way(tmp_path):
    folder = write_images(tmp_path / "flat", number_images("{}_{}.png"))
    (folder / "labels.csv").write_text("image,label\ncat_1.png,other\n")
    assert open_data(folder).classes == ("other",)
    assert open_data(folder, labels_from="NAME_*").classes == ("cat", "dog")


def test_flat_splits_agree_on_their_classes(tmp_path):
    write_images(tmp_path / "train", number_images("{}_{}.png", ("cat", "dog")))
    write_images(tmp_path / "valid", number_images("{}_{}.png", ("dog", "emu")))
    write_images(tmp_path / "test", ["1.png", "2.png"])
    data = add_labels_from(tmp_path, "NAME_*")
    assert list_splits(data) == ("train", "val")  # the names of test tell nothing
    parts = open_splits(data)
    assert {part.classes for part in parts.values()} == {("cat", "dog", "emu")}
    assert sorted(set(parts["val"].labels(0, 12).tolist())) == [1, 2]


def test_nothing_that_fits(tmp_path):
    folder = write_images(tmp_path / "flat", ["a.png", "b.png"])
    with pytest.raises(vitrail.DataError, match=r"'NAME_\*' finds no class.*a\.png"):
        open_data(folder, labels_from="NAME_*")
    with pytest.raises(vitrail.DataError, match="no data set"):
        open_data(tmp_path / "absent", labels_from="NAME_*")


@pytest.mark.parametrize("data", ["digits", "hf:owner/name", [("a.png", "cat")], "labels.csv"])
def test_only_a_folder_has_labels_in_names(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("labels.csv").write_text("image,label\n")
    with pytest.raises(vitrail.ConfigError, match="is for a folder"):
        open_data(data, labels_from="NAME_*")


@pytest.fixture
def flat(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_images(tmp_path / "flat", [*number_images("{}_{}.png"), "odd.png"])


def test_check_and_pack(flat, tmp_path):
    report = vitrail.check_data(flat, labels_from="NAME_*", workers=1, on_event=print)
    assert report.classes["all"]["counts"] == {"cat": 6, "dog": 6}
    assert [Path(finding.name).name for finding in report.findings("ignored")] == ["odd.png"]
    vitrail.pack_data(flat, tmp_path / "shards", labels_from="NAME_*", workers=1, on_event=print)
    packed = open_data(tmp_path / "shards")
    assert (len(packed), packed.classes) == (12, ("cat", "dog"))
    with pytest.raises(vitrail.ConfigError, match="inside"):
        vitrail.pack_data(flat, flat / "shards", labels_from="NAME_*", workers=1, on_event=print)


@pytest.mark.slow
def test_quick_fewshot_and_evaluation(flat):
    model = vitrail.create_model("Ti/4", seed=0, num_classes=3, **TINY)
    quick = vitrail.finetune(flat, model, quick=True, labels_from="NAME_*", on_event=print)
    assert quick.model.labels == ("cat", "dog")
    held = vitrail.evaluate(quick.model, flat, "val", labels_from="NAME_*", device="cpu", on_event=print)
    assert held.images == 2
    few = vitrail.fewshot(
        model, flat, labels_from="NAME_*", shots=[1], seeds=[0], methods=["least-squares"], cache=None, on_event=print
    )
    assert few.classes == 2
    table = vitrail.compare_models([quick.model], flat, labels_from="NAME_*", device="cpu", on_event=print)
    assert table.rows[0].images == 12


def test_a_run_opens_its_data_the_same_way_again(flat):
    model = vitrail.create_model("Ti/4", seed=0, num_classes=3, **TINY)
    settings = {"schedule.steps": 2, "data.batch_size": 4, "run.device": "cpu", "run.report": False}
    first = vitrail.finetune(flat, model, labels_from="NAME_*", folder="run", settings=settings, on_event=print)
    config = Run("run").config
    assert config.data.labels_from == "NAME_*"
    again = vitrail.train(config, on_event=print)  # finished: what is recorded is enough to open the data
    assert again.accuracy == first.accuracy
    with pytest.raises(vitrail.ConfigError, match=r"data\.labels_from"):
        vitrail.train(config, {"data.labels_from": r"^(.+)_\d"}, on_event=print)
    with pytest.raises(vitrail.ConfigError, match="--labels-from"):
        vitrail.finetune(flat, model, settings={"data.labels_from": "NAME_*"}, on_event=print)
