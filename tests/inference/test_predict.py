"""What `vitrail predict` does: which files are meant, what comes of each, embeddings whole or not at all."""

from __future__ import annotations

import io
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import make_folder, picture

import vitrail
from samples import randomise
from vitrail.errors import ConfigError, DataError, MissingExtraError
from vitrail.inference import predict
from vitrail.inference.predict import PredictionRun, find_images, to_valid_text
from vitrail.inference.predictor import Predictor

SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32, "seed": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """One with three classes, and one without."""
    root = tmp_path_factory.mktemp("models")
    model = randomise(vitrail.create_model("Ti/4", num_classes=3, **SMALL))
    model.labels = ["cat", "n01440764", "Größe"]
    vitrail.save(model, root / "three")
    vitrail.save(randomise(vitrail.create_model("Ti/4", num_classes=0, **SMALL)), root / "none")
    return root


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def typed(monkeypatch):
    """Puts bytes into standard input."""
    return lambda content: monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def rows(predictions: PredictionRun, progress=None) -> list[predict.FilePrediction]:
    return list(predictions.predict_files(progress))


def test_files_and_folders_mixed(here):
    make_folder(here / "photos", {"b/deep": 2, "a": 1, ".hidden": 1})
    (here / "photos" / "notes.txt").write_text("no image")
    (here / "photos" / ".hidden.png").write_bytes(picture(7))
    (here / "photos" / "Z.JPG").write_bytes(picture(8, "JPEG"))
    (here / "odd.name").write_bytes(picture(9))
    assert find_images(["odd.name", "photos", "nowhere.png"]) == [
        "odd.name",
        *("photos/Z.JPG", "photos/a/0000.png", "photos/b/deep/0000.png", "photos/b/deep/0001.png"),
        "nowhere.png",
    ]


def test_nothing_found(here, typed):
    (here / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.*jpg"):
        find_images(["empty"])
    typed(b"\n \n")
    with pytest.raises(DataError, match="standard input, empty"):
        find_images(["-", "empty"])
    assert find_images(["empty", "a.png", "a" * 5000, "zero\0.png"]) == ["a.png", "a" * 5000, "zero\0.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no text")
def test_standard_input(here, typed):
    for content in (picture(1), picture(2, "JPEG"), picture(3, "WEBP"), b"\xff\xd8\0 damaged"):
        typed(content)
        assert find_images(["a.png", "-", "b.png"]) == ["a.png", content, "b.png"]
    typed(b"one.png\ntwo words.png\r\n\n  \nf\xff.png\nlast.png")
    assert find_images(["-"]) == ["one.png", "two words.png", os.fsdecode(b"f\xff.png"), "last.png"]
    with pytest.raises(ConfigError, match="more than once"):
        find_images(["-", "-"])


def test_standard_input_is_limited(typed, monkeypatch):
    monkeypatch.setattr(predict, "MOST_BYTES", 10)
    typed(b"12345678901")
    with pytest.raises(DataError, match="10 bytes"):
        find_images(["-"])


def test_names_are_text_that_any_program_reads():
    assert to_valid_text('a\t"b"\n,ü.png') == 'a\t"b"\n,ü.png'
    assert to_valid_text(os.fsdecode(b"f\xff.png")) == r"f\xff.png"
    assert to_valid_text(b"an image") == "-"


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_each_file_as_the_predictor_has_it_and_broken_ones_left_out(here, models, batch_size):
    make_folder(here / "photos", {"x": 5})
    (here / "photos/x/0002.png").write_bytes(b"no image")
    told = []
    files = ["photos", "nowhere.png"]
    predictions = PredictionRun(files, str(models / "three"), top=2, batch_size=batch_size, device="cpu")
    found = rows(predictions, lambda *state: told.append(state))
    assert [row.file for row in found] == [*(f"photos/x/000{number}.png" for number in range(5)), "nowhere.png"]
    assert [row.error for row in found if row.error] == [
        "not an image of a known kind",
        "cannot be read: No such file or directory",
    ]
    predictor = Predictor(models / "three", device="cpu")
    for row in found:
        if row.error is None:
            wanted = predictor(row.file, top=2)
            assert [label for label, _ in row.labels] == [label for label, _ in wanted]
            assert [share for _, share in row.labels] == pytest.approx([share for _, share in wanted], rel=1e-4)
    assert told == [(number, 6) for number in range(1, 7)]
    assert (predictions.done, predictions.left_out) == (4, 2)
    predictions.seconds = 1.6
    assert predictions.summary() == "4 images, 2.5 images/s, 2 left out"


def test_summaries(models):
    predictions = PredictionRun(["a.png"], str(models / "three"), device="cpu")
    assert predictions.summary() == "0 images"
    predictions.done, predictions.seconds = 1, 0.5
    assert predictions.summary() == "1 image, 2.0 images/s"
    predictions.done, predictions.left_out = 4000, 1200
    assert predictions.summary() == "4,000 images, 8,000.0 images/s, 1,200 left out"


@pytest.mark.parametrize(("name", "group"), [("out.parquet", 2), ("out.parquet", 1024), ("out.npz", 2)])
@pytest.mark.parametrize("kind", ["three", "none"])
def test_embeddings_read_back(here, models, monkeypatch, name, group, kind):
    monkeypatch.setattr(predict, "ROWS_IN_GROUP", group)
    make_folder(here / "photos", {"x": 5})
    (here / "photos/x/0001.png").write_bytes(b"")
    (here / "photos/x/a\nb.png").write_bytes(picture(30))
    Path(name).write_text("what was there before")
    found = rows(PredictionRun(["photos"], str(models / kind), embed=Path(name), batch_size=2, device="cpu"))
    good = [row.file for row in found if row.error is None]
    assert "photos/x/a\nb.png" in good
    assert [bool(row.labels) for row in found if row.error is None] == [kind == "three"] * 5
    if name == "out.npz":
        with np.load(name) as file:
            names, embeddings = file["names"].tolist(), file["embeddings"]
    else:
        table = pq.read_table(name)
        assert table.schema == pa.schema([("file", pa.string()), ("embedding", pa.list_(pa.float32()))])
        names, embeddings = table["file"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32)
    assert names == good
    assert embeddings.dtype == np.float32
    wanted = Predictor(models / kind, device="cpu").embed(good)
    np.testing.assert_allclose(embeddings, wanted, rtol=1e-4, atol=1e-5)
    assert {path.name for path in here.iterdir()} == {"photos", name}


@pytest.mark.parametrize("name", ["out.parquet", "out.npz"])
def test_embeddings_are_whole_or_as_they_were(here, models, name):
    make_folder(here / "photos", {"x": 5})
    Path(name).write_text("before")
    predictions = PredictionRun(["photos"], str(models / "three"), embed=Path(name), batch_size=1, device="cpu")
    with closing(predictions.predict_files()) as coming:
        next(coming)
        assert Path(name).read_text() == "before"
    assert {path.name for path in here.iterdir()} == {"photos", name}
    assert Path(name).read_text() == "before"
    (here / "broken.png").write_bytes(b"")
    found = rows(PredictionRun(["broken.png"], str(models / "three"), embed=Path(name), device="cpu"))
    assert [row.error for row in found] == ["empty"]
    assert Path(name).read_text() == "before", "there is nothing to write"


def test_a_disk_that_fails_is_told(here, models, monkeypatch):
    def full(draft, path):
        raise OSError(28, "No space left on device")

    make_folder(here / "photos", {"x": 1})
    monkeypatch.setattr(predict, "move_into_place", full)
    with pytest.raises(ConfigError, match=r"out\.npz.*No space left"):
        rows(PredictionRun(["photos"], str(models / "three"), embed=Path("out.npz"), device="cpu"))
    assert {path.name for path in here.iterdir()} == {"photos"}


def test_what_cannot_be_is_said_before_anything_is_loaded(here, models, monkeypatch):
    monkeypatch.setattr(predict, "Predictor", None)
    (here / "folder.npz").mkdir()
    for options, words in [
        ({"files": []}, "no images"),
        ({"top": 0}, "top = 0"),
        ({"embed": Path("out.csv")}, r"out\.csv.*\.parquet or \.npz"),
        ({"embed": Path("nowhere/out.npz")}, "folder"),
        ({"embed": Path("folder.npz")}, "--embed folder.npz"),
    ]:
        with pytest.raises(ConfigError, match=words):
            PredictionRun(**({"files": ["a.png"], "model": "m"} | options))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"vitrail\[parquet\]"):
        PredictionRun(["a.png"], "m", embed=Path("out.parquet"))


def test_a_model_without_classes_needs_somewhere_to_put_embeddings(models):
    with pytest.raises(ConfigError, match=r"--embed out\.parquet"):
        PredictionRun(["a.png"], str(models / "none"), device="cpu")
