"""What `vitrail predict` does: which files are meant, what comes of each, embeddings whole or not at all."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictures import make_folder, picture
from PIL import Image

import vitrail
from samples import randomise
from vitrail.errors import ConfigError, DataError, MissingExtraError
from vitrail.exporting.export import export
from vitrail.inference import embedding_files
from vitrail.inference import find_images as finding
from vitrail.inference import predict as predicting
from vitrail.inference.find_images import find_images, to_valid_text
from vitrail.inference.predict import predict
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


def found(images) -> list:
    """The images that are found, without their names."""
    return [image.content for image in find_images(images)]


def test_files_and_folders_mixed(here):
    make_folder(here / "photos", {"b/deep": 2, "a": 1, ".hidden": 1})
    (here / "photos" / "notes.txt").write_text("no image")
    (here / "photos" / ".hidden.png").write_bytes(picture(7))
    (here / "photos" / "Z.JPG").write_bytes(picture(8, "JPEG"))
    (here / "odd.name").write_bytes(picture(9))
    assert found(["odd.name", "photos", "nowhere.png"]) == [
        "odd.name",
        *("photos/Z.JPG", "photos/a/0000.png", "photos/b/deep/0000.png", "photos/b/deep/0001.png"),
        "nowhere.png",
    ]


def test_nothing_found(here, typed):
    (here / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.*jpg"):
        found(["empty"])
    typed(b"\n \n")
    with pytest.raises(DataError, match="standard input, empty"):
        found(["-", "empty"])
    assert found(["empty", "a.png", "a" * 5000, "zero\0.png"]) == ["a.png", "a" * 5000, "zero\0.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no text")
def test_standard_input(here, typed):
    for content in (picture(1), picture(2, "JPEG"), picture(3, "WEBP"), b"\xff\xd8\0 damaged"):
        typed(content)
        assert found(["a.png", "-", "b.png"]) == ["a.png", content, "b.png"]
    typed(b"one.png\ntwo words.png\r\n\n  \nf\xff.png\nlast.png")
    assert found(["-"]) == ["one.png", "two words.png", os.fsdecode(b"f\xff.png"), "last.png"]
    with pytest.raises(ConfigError, match="more than once"):
        found(["-", "-"])


def test_standard_input_is_limited(typed, monkeypatch):
    monkeypatch.setattr(finding, "MOST_BYTES", 10)
    typed(b"12345678901")
    with pytest.raises(DataError, match="10 bytes"):
        found(["-"])


def test_names_are_text_that_any_program_reads():
    assert to_valid_text('a\t"b"\n,ü.png') == 'a\t"b"\n,ü.png'
    assert to_valid_text(os.fsdecode(b"f\xff.png")) == r"f\xff.png"


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_each_file_as_the_predictor_has_it_and_broken_ones_left_out(here, models, batch_size):
    make_folder(here / "photos", {"x": 5})
    (here / "photos/x/0002.png").write_bytes(b"no image")
    events = []
    result = predict(
        ["photos", "nowhere.png"],
        models / "three",
        top=2,
        batch_size=batch_size,
        device="cpu",
        on_event=lambda kind, values: events.append((kind, values)),
    )
    names = [*(f"photos/x/000{number}.png" for number in range(5)), "nowhere.png"]
    assert [row.file for row in result] == names
    assert [(row.file, row.error) for row in result.left_out] == [
        (names[2], "not an image of a known kind"),
        (names[5], "cannot be read: No such file or directory"),
    ]
    predictor = Predictor(models / "three", device="cpu")
    for row in result:
        if row.error is None:
            wanted = predictor(row.file, top=2)
            assert [label for label, _ in row.labels] == [label for label, _ in wanted]
            assert [share for _, share in row.labels] == pytest.approx([share for _, share in wanted], rel=1e-4)
    assert events[0] == ("images", {"files": names, "labels": list(predictor.labels)})
    assert [kind for kind, _ in events[1:]] == ["progress", "prediction"] * 6
    assert [values["done"] for kind, values in events if kind == "progress"] == [1, 2, 3, 4, 5, 6]
    assert [values for kind, values in events if kind == "prediction"] == [row.to_dict() for row in result]
    assert json.loads(json.dumps(result.to_dict()))["predictions"][2]["error"]
    assert result.embeddings is None


def test_images_that_are_no_files(here, models):
    content = picture(3)
    image = Image.open(io.BytesIO(content))
    images = [content, image, np.asarray(image.convert("RGB")), torch.zeros(3, 20, 20, dtype=torch.uint8), 3.5]
    result = predict(images, vitrail.load(models / "three"), embed=True, device="cpu")
    assert [row.file for row in result] == [f"images[{number}]" for number in range(5)]
    assert result[0].labels == result[1].labels == result[2].labels
    assert len(result[:2]) == 2
    assert "float" in result[4].error
    np.testing.assert_allclose(
        result.embeddings, Predictor(models / "three", device="cpu").embed(images[:4]), rtol=1e-4, atol=1e-5
    )


def test_one_image_and_what_a_person_sees(here, models):
    model = vitrail.load(models / "three")
    model.labels = ["<b>cat</b>", "dog", "emu"]
    (here / "a&b.png").write_bytes(picture(1))
    result = predict(Path("a&b.png"), model, top=3, device="cpu")
    assert len(result) == 1
    assert len(result[0].labels) == 3
    assert result[0].labels[0][0] in repr(result)
    page = result._repr_html_()
    assert "&lt;b&gt;cat" in page
    assert "a&amp;b.png" in page
    assert "<b>cat" not in page


def test_an_exported_file_and_int8_answer_as_the_model(here, models):
    make_folder(here / "photos", {"x": 5})
    export(vitrail.load(models / "three"), here / "model.onnx", "onnx")
    exact, exported, quick = (
        predict("photos", model, top=3, device="cpu", precision=precision)
        for model, precision in ((models / "three", "fp32"), ("model.onnx", "fp32"), (models / "three", "int8"))
    )
    for wanted, same, near in zip(exact, exported, quick, strict=True):
        assert dict(same.labels) == pytest.approx(dict(wanted.labels), abs=1e-5)
        assert dict(near.labels) == pytest.approx(dict(wanted.labels), abs=0.05)


def test_an_interrupted_call_writes_nothing(here, models):
    make_folder(here / "photos", {"x": 5})

    def stop(kind, values):
        if kind == "prediction":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict("photos", models / "three", embed="out.npz", batch_size=1, device="cpu", on_event=stop)
    assert {path.name for path in here.iterdir()} == {"photos"}


def test_an_error_of_the_listener_is_not_taken_for_one_of_the_disk(here, models):
    make_folder(here / "photos", {"x": 2})

    def fail(kind, values):
        if kind == "prediction":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        predict("photos", models / "three", embed="out.npz", device="cpu", on_event=fail)


@pytest.mark.parametrize(("name", "group"), [("out.parquet", 2), ("out.parquet", 1024), ("out.npz", 2)])
@pytest.mark.parametrize("kind", ["three", "none"])
def test_embeddings_read_back(here, models, monkeypatch, name, group, kind):
    monkeypatch.setattr(embedding_files, "ROWS_IN_GROUP", group)
    make_folder(here / "photos", {"x": 5})
    (here / "photos/x/0001.png").write_bytes(b"")
    (here / "photos/x/a\nb.png").write_bytes(picture(30))
    Path(name).write_text("what was there before")
    result = predict(["photos"], models / kind, embed=name, batch_size=2, device="cpu")
    good = [row.file for row in result if row.error is None]
    assert "photos/x/a\nb.png" in good
    assert [bool(row.labels) for row in result if row.error is None] == [kind == "three"] * 5
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
    np.testing.assert_array_equal(result.embeddings, embeddings)
    assert {path.name for path in here.iterdir()} == {"photos", name}


@pytest.mark.parametrize("name", ["out.parquet", "out.npz"])
def test_embeddings_are_whole_or_as_they_were(here, models, name):
    make_folder(here / "photos", {"x": 5})
    Path(name).write_text("before")
    contents = []

    def look(kind, values):
        if kind == "prediction":
            contents.append(Path(name).read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(["photos"], models / "three", embed=name, batch_size=1, device="cpu", on_event=look)
    assert contents == ["before"]
    assert {path.name for path in here.iterdir()} == {"photos", name}
    assert Path(name).read_text() == "before"
    (here / "broken.png").write_bytes(b"")
    result = predict(["broken.png"], models / "three", embed=name, device="cpu")
    assert [row.error for row in result] == ["empty"]
    assert result.embedding_file is None
    assert Path(name).read_text() == "before", "there is nothing to write"


def test_a_disk_that_fails_is_told(here, models, monkeypatch):
    def full(draft, path):
        raise OSError(28, "No space left on device")

    make_folder(here / "photos", {"x": 1})
    monkeypatch.setattr(embedding_files, "move_into_place", full)
    with pytest.raises(ConfigError, match=r"out\.npz.*No space left"):
        predict(["photos"], models / "three", embed="out.npz", device="cpu")
    assert {path.name for path in here.iterdir()} == {"photos"}


def test_what_cannot_be_is_said_before_anything_is_loaded(here, models, monkeypatch):
    monkeypatch.setattr(predicting, "Predictor", None)
    (here / "folder.npz").mkdir()
    for options, words in [
        ({"images": []}, "no images"),
        ({"images": 3}, "no image"),
        ({"images": ["a.png", ""]}, "empty"),
        ({"top": 0}, "top = 0"),
        ({"embed": Path("out.csv")}, r"out\.csv.*\.parquet or \.npz"),
        ({"embed": "nowhere/out.npz"}, "folder"),
        ({"embed": Path("folder.npz")}, "--embed folder.npz"),
    ]:
        with pytest.raises(ConfigError, match=words):
            predict(**({"images": ["a.png"], "model": "m"} | options))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"vitrail\[parquet\]"):
        predict(["a.png"], "m", embed="out.parquet")


def test_a_model_without_classes_needs_somewhere_to_put_embeddings(here, models):
    (here / "a.png").write_bytes(picture(1))
    with pytest.raises(ConfigError, match=r"--embed out\.parquet"):
        predict(["a.png"], models / "none", device="cpu")
