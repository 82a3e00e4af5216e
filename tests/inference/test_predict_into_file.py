"""Predictions in a file: the rows that are printed, whole or absent, and never computed twice after a stop."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pictures import make_folder, picture

import vitrail
from samples import randomise
from vitrail.errors import ConfigError, DataError
from vitrail.inference import predict_into_file, prediction_parts
from vitrail.inference.answers import Answer
from vitrail.inference.predict import predict
from vitrail.inference.prediction_parts import count_part_images, decode_prediction, encode_prediction
from vitrail.inference.prediction_result import FilePrediction, PredictionResult
from vitrail.inference.predictor import Predictor
from vitrail.reliability.unknown import Familiarity
from vitrail.tasks.task import AnswerLine

SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32}
IMAGES = 22
BROKEN = "photos/x/0005.png"
STRANGE = ["comma, .png", "new\nline.png", 'quote".png', "ü.png"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Two with three classes, and one without."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(["three", "other"]):
        model = randomise(vitrail.create_model("Ti/4", num_classes=3, seed=seed, **SMALL), seed=seed)
        model.labels = ["cat", "dog, wet", "Größe"]
        vitrail.save(model, root / name)
    vitrail.save(randomise(vitrail.create_model("Ti/4", num_classes=0, seed=0, **SMALL)), root / "none")
    return root


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with 22 photos, of which one is broken and some have strange names; a part is two batches of two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prediction_parts, "LEAST_IMAGES", 4)
    make_folder(tmp_path / "photos", {"x": IMAGES - len(STRANGE)})
    for number, name in enumerate(STRANGE):
        (tmp_path / "photos" / name).write_bytes(picture(100 + number))
    Path(BROKEN).write_bytes(b"no image")
    return tmp_path


@pytest.fixture
def answer(models):
    """Predicts the photos into a file with the model of three classes, unless options say otherwise."""

    def answer(**options) -> PredictionResult:
        options = {"model": models / "three", "out": "answers.jsonl", "top": 2, "batch_size": 2} | options
        return predict(options.pop("images", "photos"), device="cpu", **options)

    return answer


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """The files that were decoded."""
    names: list[str] = []
    prepare = Predictor._prepare_image

    def note(self, image):
        names.append(str(image))
        return prepare(self, image)

    monkeypatch.setattr(Predictor, "_prepare_image", note)
    return names


def stop_after(images: int):
    """A listener that stops the call at an image."""

    def stop(kind, values):
        if kind == "progress" and values["done"] >= images:
            raise KeyboardInterrupt

    return stop


def interrupt(answer, images: int = 14, **options) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(on_event=stop_after(images), **options)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.csv"])
def test_the_file_has_the_predictions_of_all_images(here, answer, name):
    plain, result = answer(out=None), answer(out=name)
    assert list(result) == list(plain)
    assert [each.file for each in result.left_out] == [BROKEN]
    assert (result.out, result.done_before) == (Path(name), 0)
    assert json.loads(json.dumps(result.to_dict()))["out"] == name
    assert names_in(here) == {"photos", name}
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        found = {row["file"]: [each["label"] for each in row["labels"]] for row in rows}
    else:
        heading, *rows = csv.reader(io.StringIO(Path(name).read_text(), newline=""))
        assert heading == ["file", "rank", "label", "probability"]
        found = {}
        for file, _, label, _ in rows:
            found.setdefault(file, []).append(label)
    assert found == {each.file: [label for label, _ in each.labels] for each in plain if each.error is None}
    assert {f"photos/{each}" for each in STRANGE} < set(found)


@pytest.mark.parametrize("stops", [[1], [7], [14], [21], [5, 10, 17]])
def test_a_stopped_call_goes_on_and_computes_nothing_twice(here, answer, computed, stops):
    answer(out="whole.jsonl")
    for images in stops:
        interrupt(answer, images)
        assert not Path("answers.jsonl").exists()
    done = {path.name for path in Path("answers.jsonl.parts").glob("part-*.jsonl")}
    assert len(done) == stops[-1] // 4
    computed.clear()
    events = []
    result = answer(on_event=lambda kind, values: events.append((kind, values)))
    assert len(computed) == IMAGES - 4 * len(done)
    assert Path("answers.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert names_in(here) == {"photos", "whole.jsonl", "answers.jsonl"}
    assert result.done_before == 4 * len(done) - (stops[-1] >= 12)  # the broken image is in the third part
    assert len(result) == IMAGES
    told = [values["done"] for kind, values in events if kind == "progress"]
    assert told == [*range(4 * len(done), IMAGES + 1)]
    assert [values for kind, values in events if kind == "prediction"] == [row.to_dict() for row in result]


def test_a_call_that_ended_before_its_folder_was_deleted_is_finished(here, answer, monkeypatch, computed):
    def stop(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prediction_parts.PredictionParts, "discard", stop)
        with pytest.raises(KeyboardInterrupt):
            answer()
    whole = Path("answers.jsonl").read_bytes()
    computed.clear()
    assert len(answer()) == IMAGES
    assert (computed, Path("answers.jsonl").read_bytes()) == ([], whole)
    assert names_in(here) == {"photos", "answers.jsonl"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "other"}, "another model"),
        ({"images": ["photos", BROKEN]}, "other images"),
        ({"images": "photos/x"}, "other images"),
        ({"top": 3}, "top = 2 there, 3 here"),
        ({"batch_size": 4}, "batch_size = 2 there, 4 here"),
        ({"embed": True}, "embeds = False there, True here"),
        ({"precision": "int8"}, "another model; precision = fp32 there, int8 here"),
    ],
)
def test_another_command_does_not_go_on(here, answer, models, options, words):
    interrupt(answer)
    before = names_in(here / "answers.jsonl.parts")
    if "model" in options:
        options = {"model": models / options["model"]}
    with pytest.raises(ConfigError, match=words) as error:
        answer(**options)
    assert "delete that folder" in str(error.value)
    assert names_in(here / "answers.jsonl.parts") == before
    assert len(answer()) == IMAGES


def test_what_was_begun_is_begun_again_after_its_plan_was_deleted(here, answer, computed):
    interrupt(answer)
    Path("answers.jsonl.parts/plan.json").unlink()
    computed.clear()
    answer(top=3)
    assert len(computed) == IMAGES


def test_a_file_that_is_there_is_not_written_over(here, answer):
    Path("answers.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="exists already: delete it"):
        answer()
    assert Path("answers.jsonl").read_text() == "mine"
    assert names_in(here) == {"photos", "answers.jsonl"}


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[]\n" * 4, b"\xff", b'{"file": "a"}\n' * 4])
def test_a_damaged_part_is_named(here, answer, content):
    interrupt(answer)
    part = Path("answers.jsonl.parts/part-000001.jsonl")
    part.write_bytes(content)
    with pytest.raises(DataError, match=r"part-000001\.jsonl is damaged: delete it"):
        answer()
    part.unlink()
    assert len(answer()) == IMAGES


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_damaged_embeddings_are_named(here, answer, content):
    interrupt(answer, embed=True)
    part = Path("answers.jsonl.parts/part-000001.npy")
    part.unlink() if content is None else part.write_bytes(content)
    with pytest.raises(DataError, match=r"part-000001\.npy is damaged: delete it and part-000001\.jsonl"):
        answer(embed=True)
    part.unlink(missing_ok=True)
    part.with_suffix(".jsonl").unlink()
    np.testing.assert_array_equal(answer(embed=True).embeddings, answer(embed=True, out=None).embeddings)


def test_files_of_others_in_the_folder_stay(here, answer):
    Path("answers.jsonl.parts").mkdir()
    Path("answers.jsonl.parts/notes.txt").write_text("mine")
    answer()
    assert names_in(here / "answers.jsonl.parts") == {"notes.txt"}


@pytest.mark.parametrize("model", ["three", "none"])
@pytest.mark.parametrize("embed", [True, "vectors.parquet", "vectors.npz"])
def test_embeddings_go_on_too(here, answer, models, model, embed):
    plain = answer(model=models / model, out=None, embed=True)
    interrupt(answer, model=models / model, embed=embed)
    result = answer(model=models / model, embed=embed)
    assert result.embeddings.dtype == np.float32
    np.testing.assert_array_equal(result.embeddings, plain.embeddings)
    if embed == "vectors.parquet":
        names = pq.read_table(embed)["file"].to_pylist()
        assert names == [each.file for each in plain if each.error is None]
    assert (Path("answers.jsonl").stat().st_size > 0) == (model == "three")
    assert names_in(here) == {"photos", "answers.jsonl", *([embed] if isinstance(embed, str) else [])}


def test_images_that_are_all_broken(here, answer):
    result = answer(images=[BROKEN], out="answers.csv", embed="vectors.npz")
    assert (len(result.left_out), result.embedding_file) == (1, None)
    assert Path("answers.csv").read_text() == "file,rank,label,probability\n"


def test_another_process_is_not_disturbed(here, answer, monkeypatch):
    def locked(path):
        raise BlockingIOError

    monkeypatch.setattr(prediction_parts, "lock_file", locked)
    with pytest.raises(ConfigError, match=r"another process writes answers\.jsonl: wait"):
        answer()


def test_a_full_disk_is_told_and_what_is_done_is_kept(here, answer, monkeypatch, computed):
    write = prediction_parts.write_whole

    def fill(path, content):
        if path.name == "part-000003.jsonl":
            raise OSError(28, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(prediction_parts, "write_whole", fill)
        with pytest.raises(ConfigError, match=r"answers\.jsonl cannot.*No space left"):
            answer()
    computed.clear()
    assert len(answer()) == IMAGES
    assert len(computed) == IMAGES - 12


def test_an_error_of_the_listener_is_not_taken_for_one_of_the_disk(here, answer):
    def fail(kind, values):
        if kind == "prediction":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        answer(on_event=fail)


def test_what_cannot_be_is_said_before_anything_is_loaded(here, answer, monkeypatch):
    (here / "folder.csv").mkdir()
    (here / "taken.csv").write_text("mine")
    for options, words in [
        ({"out": "answers.txt"}, r"answers\.txt: give a file that ends in \.jsonl or \.csv"),
        ({"out": "nowhere/answers.csv"}, "a folder that is there"),
        ({"out": "folder.csv"}, "a folder that is there"),
        ({"out": "taken.csv"}, "exists already: delete it"),
        ({"images": ["photos", picture(1)]}, r"images\[1\] is none"),
    ]:
        with pytest.raises(ConfigError, match=words):
            answer(**{"model": "nowhere"} | options)
    assert names_in(here) == {"photos", "folder.csv", "taken.csv"}


def test_standard_input_is_for_one_process(here, answer, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="standard input is for one process"):
        answer(images="-")


def test_predictions_are_kept_with_all_they_hold():
    lines = (AnswerLine("cat", "93.1%", 0.931), AnswerLine("indoor", "12%", None, False))
    answer = Answer("tags", {"tags": ["cat"], "probabilities": {"cat": 0.931}}, lines, {"cat": 0.931, "x": "y\n"})
    for prediction in (
        FilePrediction('a,\n\r"\u2028ü.png', (("cat", float(np.float32(0.1))), ("d", 1e-30))),
        FilePrediction("a.png", error="damaged"),
        FilePrediction("a.png", answer=answer, familiarity=Familiarity(np.True_, np.float64(0.125), 3.5)),
    ):
        line = encode_prediction(prediction)
        assert "\n" not in line
        assert decode_prediction(line.encode()) == prediction


@pytest.mark.parametrize("batch_size", [1, 3, 32, 64, 100, 5000])
@pytest.mark.parametrize("images", [1, 63, 1000, 123_456, 10_000_000])
def test_parts_are_whole_batches_and_not_too_many(images, batch_size):
    size = count_part_images(images, batch_size)
    assert size % batch_size == 0
    assert 64 <= size < max(64, images // 1000 + 1) + batch_size
    assert -(-images // size) <= 1000


def test_what_another_machine_wrote_may_be_late(monkeypatch):
    monkeypatch.setattr(predict_into_file, "SHARED_SECONDS", 5)
    answers = iter([False, False, True])
    assert predict_into_file._wait_until(lambda: next(answers))
    monkeypatch.setattr(predict_into_file, "SHARED_SECONDS", 0)
    assert not predict_into_file._wait_until(lambda: False)
