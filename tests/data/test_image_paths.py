"""Images that do not lie below their CSV: absolute paths, `..`, links, and a run from another working directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pictures import make_folder

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.source import Source, compute_fingerprint

CLASSES = {"cat": 6, "dog": 6}
TINY = {"image_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16}


@pytest.fixture
def photos(tmp_path) -> Path:
    return make_folder(tmp_path / "photos", CLASSES)


def write_csv(path: Path, images: Path, prefix: str | Path) -> Path:
    """A table of the class folders in `images`, each path after a prefix."""
    rows = [f"{Path(prefix) / file.relative_to(images)},{file.parent.name}\n" for file in sorted(images.glob("*/*"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("image,label\n" + "".join(rows))
    return path


def identities(source: Source) -> list[str]:
    return [source.identity(index) for index in range(len(source))]


def test_absolute_paths_below_the_csv_are_the_relative_ones(photos):
    relative = open_data(write_csv(photos / "relative.csv", photos, ""))
    absolute = open_data(write_csv(photos / "absolute.csv", photos, photos))
    winding = open_data(write_csv(photos / "winding.csv", photos, photos / "cat" / ".."))
    assert identities(relative) == identities(absolute) == identities(winding)
    assert identities(relative)[0] == "cat/0000.png"
    assert compute_fingerprint(relative) == compute_fingerprint(absolute)


def test_paths_that_lead_elsewhere_are_names_of_their_own(photos, tmp_path):
    table = write_csv(tmp_path / "tables" / "labels.csv", photos, photos)
    source = open_data(table)
    assert identities(source)[0] == str(photos / "cat" / "0000.png")
    up = open_data(write_csv(tmp_path / "tables" / "up.csv", photos, "../photos"))
    assert identities(up)[0] == "../photos/cat/0000.png"
    assert [up.read(i) for i in range(len(up))] == [source.read(i) for i in range(len(source))]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("prefix", ["real", "linked"])
def test_what_is_held_out_depends_on_no_working_directory_and_no_link(prefix, photos, tmp_path, monkeypatch):
    (tmp_path / "linked").symlink_to(photos)
    write_csv(photos / "labels.csv", photos, photos if prefix == "real" else tmp_path / "linked")
    held, prints = [], []
    for start, data in (
        (tmp_path, "photos/labels.csv"),
        (tmp_path, str(photos / "labels.csv")),
        (tmp_path, "linked/labels.csv"),
        (photos, "labels.csv"),
        (photos / "cat", "../labels.csv"),
        (photos / "cat", ".."),
    ):
        monkeypatch.chdir(start)
        held.append(identities(open_data(data, "val")))
        prints.append(compute_fingerprint(open_data(data)))
    assert held == [held[0]] * 6
    assert prints == [prints[0]] * 6
    assert held[0] == [name for name in held[0] if not Path(name).is_absolute()]


def test_paths_from_the_working_directory_are_told_from_those_of_the_csv(photos, tmp_path, monkeypatch):
    table = write_csv(photos / "labels.csv", photos, "photos")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vitrail.DataError, match="relative to the folder of the CSV"):
        open_data(table)


@pytest.fixture
def absolute(photos, tmp_path, monkeypatch) -> Path:
    """A CSV of absolute paths outside its folder; the working directory is another one."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return write_csv(tmp_path / "tables" / "labels.csv", photos, photos)


@pytest.mark.slow
def test_a_quick_classifier_from_absolute_paths(absolute):
    model = vitrail.create_model("Ti/4", seed=0, num_classes=3, **TINY)
    result = vitrail.finetune(absolute, model, quick=True, on_event=print)
    assert result.model.labels == ("cat", "dog")
    report = vitrail.evaluate(result.model, absolute, device="cpu", on_event=print)
    assert report.was_trained_on


@pytest.mark.slow  # the report takes most of the time
def test_a_report_on_absolute_paths(absolute):
    model = vitrail.create_model("Ti/4", seed=0, num_classes=3, **TINY)
    settings = {"schedule.steps": 2, "data.batch_size": 4, "run.device": "cpu"}
    result = vitrail.finetune(absolute, model, settings=settings, on_event=print)
    assert result.report.is_file()
    scores = vitrail.evaluate(result.model, absolute, "val", folder="scores", device="cpu", on_event=print)
    assert scores.images == 2
    assert all(Path(mistake.image).is_file() for mistake in scores.mistakes)


@pytest.mark.slow
def test_training_goes_on_from_another_working_directory(absolute, tmp_path, monkeypatch):
    settings = {
        "model.name": "Ti/4",
        "model.image_size": 8,
        "model.depth": 1,
        "schedule.steps": 2,
        "data.batch_size": 4,
        "run.device": "cpu",
        "run.folder": str(tmp_path / "run"),
        "run.report": False,
    }
    config = tmp_path / "run.toml"
    config.write_text(f'[data]\nsource = "{absolute}"\n')
    first = vitrail.train(config, settings, on_event=print)
    monkeypatch.chdir(absolute.parent)
    again = vitrail.train(config, settings, on_event=print)
    assert again.accuracy == first.accuracy


def test_absolute_paths_are_checked_and_packed(absolute, photos, tmp_path):
    assert not vitrail.check_data(absolute, workers=1, on_event=print).failed
    packed = vitrail.pack_data(absolute, tmp_path / "shards", workers=1, on_event=print)
    assert packed.manifest["samples"]["all"]["number"] == 12
    assert len(open_data(tmp_path / "shards")) == 12


def test_a_pack_is_the_same_from_every_working_directory(photos, tmp_path, monkeypatch):
    write_csv(photos / "labels.csv", photos, photos)
    monkeypatch.chdir(tmp_path)
    vitrail.pack_data(photos / "labels.csv", tmp_path / "shards", workers=1, on_event=print)
    monkeypatch.chdir(photos)
    again = vitrail.pack_data("labels.csv", tmp_path / "shards", workers=1, on_event=print)
    assert again.manifest["samples"]["all"]["number"] == 12
