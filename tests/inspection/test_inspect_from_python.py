"""`vitrail.inspection.inspect.inspect` as a function: what it takes, what it returns, and what it tells."""

from __future__ import annotations

import itertools
import json
import weakref

import numpy as np
import pytest
import torch
from pictures import make_folder, picture
from PIL import Image

import vitrail
from samples import randomise
from vitrail.data.sources.list_source import ListSource
from vitrail.errors import ConfigError, DataError, WeightsError
from vitrail.inference.predictor import Predictor
from vitrail.inspection.findings import Findings
from vitrail.inspection.image_choice import ImageChoice, choose_from_source
from vitrail.inspection.images import fit_images
from vitrail.inspection.inspect import inspect
from vitrail.inspection.inspect_model import predict_labels
from vitrail.inspection.result import ImageGuesses, InspectionResult

SMALL = {"image_size": 32, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}
HOSTILE = "<script>alert(1)</script>"


def make_model(name: str = "Ti/8", **options):
    model = randomise(vitrail.create_model(name, **{**SMALL, **options}))
    if model.num_classes == 5:
        model.labels = ["cat", "dog", "owl", "eel", HOSTILE]
    model.preprocessing = model.preprocessing.model_copy(
        update={"resize": "cover", "crop_fraction": 0.875, "interpolation": "bicubic"}
    )
    return model


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs in several formats, sizes and modes; some are larger than a screen."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    kinds = itertools.product(("jpg", "png", "webp", "bmp"), ((40, 30), (700, 900), (1500, 1100)), ("RGB", "L"))
    for number, (suffix, size, mode) in enumerate(kinds):
        small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        small.resize(size, Image.Resampling.BICUBIC).convert(mode).save(folder / f"{number:02}.{suffix}")
    return folder


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    """The result for a model object, with real figures, and the events on the way."""
    folder, events = tmp_path_factory.mktemp("inspected"), []
    make_folder(folder / "photos", {"cats": 2, "dogs": 2})
    (folder / "photos" / "dogs" / "9999.png").write_bytes(b"broken")
    result = inspect(
        make_model(),
        images=folder / "photos",
        out=folder / "report.html",
        most=5,
        device="cpu",
        on_event=lambda kind, values: events.append((kind, values)),
    )
    return result, events


def test_a_result_has_its_files_and_its_numbers(inspected):
    result, _ = inspected
    assert isinstance(result, InspectionResult)
    assert all(path.stat().st_size for path in (result.report, *result.figure_files, *result.data_files))
    assert {path.suffix for path in result.figures()} == {".png"}
    (findings,) = result.findings
    assert isinstance(findings, Findings)
    assert findings.name == "model"
    assert result.between is None
    (note,) = result.notes
    assert "9999.png" in note
    first, *_ = result.guesses["model"]
    assert isinstance(first, ImageGuesses)
    assert first.image == "cats/0000.png"
    assert sum(value for _, value in first.labels) == pytest.approx(1, abs=1e-5)
    distances = result.attention_distance["model"]
    assert list(distances) == list(findings.distance.layers)
    assert all(len(heads) == 2 and all(0 < each < 32 for each in heads) for heads in distances.values())


def test_events_come_in_order(inspected):
    _, events = inspected
    assert {kind for kind, _ in events} == {"progress"}
    told = {
        task: [(values["done"], values["total"]) for _, values in group]
        for task, group in itertools.groupby(events, key=lambda event: event[1]["task"])
    }
    assert list(told) == ["reading images", "looking inside"]
    assert told["reading images"] == [(done, 5) for done in range(1, 6)]
    inside = told["looking inside"]
    assert inside == sorted(inside)
    assert inside[-1][0] == inside[-1][1]


def test_a_result_can_be_printed_and_kept(inspected):
    result, _ = inspected
    assert repr(result).startswith("InspectionResult\n")
    assert str(result.report) in repr(result)
    assert len(repr(result).splitlines()) < 10
    kept = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert kept["report"] == str(result.report)
    assert kept["guesses"]["model"][0]["image"] == "cats/0000.png"
    assert kept["attention_distance"]["model"].keys() == result.attention_distance["model"].keys()


def test_in_a_notebook_there_are_tables_and_figures(inspected):
    result, _ = inspected
    page = result._repr_html_()
    assert page.count("<img") == len(result.figure_files)
    assert "first guesses of model" in page
    assert "attention distance of model" in page
    assert HOSTILE not in page
    (guesses, _) = result.tables().values()
    assert len(guesses) == 1 + 4


@pytest.mark.parametrize("channels", [3, 1])
def test_one_photo_one_answer(photos, tmp_path, channels):
    """What the report says about a photo is what predict says about it."""
    model = make_model(in_channels=channels)
    paths = sorted(photos.iterdir())
    ((fitted),) = fit_images(choose_from_source(ListSource([(path, 0) for path in paths]), "a list"), [model], show=99)
    found = predict_labels(model, [pixels for _, pixels in fitted.shown])
    expected = Predictor(model, device="cpu")(paths)
    assert len(found) == len(expected) == len(paths)
    for some, others in zip(found, expected, strict=True):
        assert [label for label, _ in some] == [label for label, _ in others]
        assert max(abs(a - b) for (_, a), (_, b) in zip(some, others, strict=True)) < 1e-5


def test_the_report_shows_what_was_predicted(photos, tmp_path, without_figures):
    paths = sorted(photos.glob("*.png"))
    models = [make_model(), make_model(image_size=48, seed=1)]
    result = inspect(models, images=paths, out=tmp_path, device="cpu")
    assert list(result.guesses) == ["model", "model 2"]
    for model, images in zip(models, result.guesses.values(), strict=True):
        assert [each.image for each in images] == [path.name for path in paths]
        for each, labels in zip(images, Predictor(model, device="cpu")(paths), strict=True):
            np.testing.assert_allclose([p for _, p in each.labels], [p for _, p in labels], atol=1e-5)
    assert result.between is not None


def test_camera_photos_are_not_in_memory_together():
    alive: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def read(index: int) -> tuple[str, torch.Tensor]:
        nonlocal most_alive
        pixels = torch.zeros(3, 300, 400, dtype=torch.uint8)
        alive.append(weakref.ref(pixels))
        most_alive = max(most_alive, sum(each() is not None for each in alive))
        return f"{index}", pixels

    fit_images(ImageChoice(20, read, str, str), [make_model(), make_model(image_size=48)])
    assert len(alive) == 20
    assert most_alive <= 2


@pytest.fixture
def without_figures(monkeypatch):
    """Figures are not drawn, for that takes the longest."""
    from vitrail.inspection import inspect as module

    monkeypatch.setattr(module, "draw_findings", lambda *given: {})
    monkeypatch.setattr(module, "draw_between", lambda layers, path, *others, **options: path)
    monkeypatch.setattr(module, "write_report", lambda findings, figures, path, *others: path.write_text(""))


def test_without_a_model_the_newest_run_or_pane_is_chosen(tmp_path, monkeypatch, without_figures):
    monkeypatch.chdir(tmp_path)
    events = []

    def listen(kind, values):
        events.append((kind, values))

    result = inspect(images=[picture(0)], most=1, device="cpu", on_event=listen)
    assert events[0] == ("chosen", {"model": "pane", "reason": "built in"})
    assert result.report.as_posix() == "runs/inspect-pane/report.html"
    vitrail.save(make_model(), tmp_path / "runs/mine/model")
    (tmp_path / "runs/mine/config.toml").write_text("")
    events.clear()
    result = inspect(images=[picture(0)], most=1, device="cpu", on_event=listen)
    assert events[0] == ("chosen", {"model": "runs/mine", "reason": "newest run"})
    assert list(result.guesses) == ["mine"]


def test_names_and_objects_may_be_mixed(tmp_path, without_figures):
    model = make_model(num_classes=0)
    vitrail.save(model, tmp_path / "saved")
    result = inspect([tmp_path / "saved", model], images=[(picture(0), 0)], out=str(tmp_path), device="cpu")
    assert [each.name for each in result.findings] == ["saved", "model"]
    assert result.report == tmp_path / "report.html"
    assert all(not each.labels for images in result.guesses.values() for each in images)
    assert all("first guesses" not in title for title in result.tables())
    one, other = (list(layers.values()) for layers in result.attention_distance.values())
    np.testing.assert_allclose(one, other)


def test_a_model_object_keeps_its_mode(tmp_path, without_figures):
    model = make_model().train()
    inspect(model, images=[picture(0)], out=tmp_path, device="cpu")
    assert model.training


@pytest.mark.parametrize(
    ("given", "kind", "word"),
    [
        ({"model": "nowhere"}, WeightsError, "nowhere"),
        ({"model": 3}, ConfigError, "int is no model"),
        ({"model": [None]}, ConfigError, "no model"),
        ({"model": "pane", "most": 0}, ConfigError, "most = 0"),
        ({"model": "pane", "device": "abacus"}, ConfigError, "abacus"),
        ({"model": "pane", "out": "report.pdf"}, ConfigError, r"ends in \.html"),
        ({"model": "pane", "images": "nowhere"}, DataError, "nowhere does not exist"),
        ({"model": "pane", "images": [b"broken"]}, DataError, "sample 0: not an image"),
        ({"model": "pane", "images": []}, DataError, "empty"),
    ],
)
def test_mistakes_are_exceptions(given, kind, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=word):
        inspect(**{"device": "cpu", **given})


def test_a_listener_can_stop_it(tmp_path):
    def stop(kind, values):
        if values["task"] == "looking inside":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inspect(make_model(), images=[picture(0)], out=tmp_path, device="cpu", on_event=stop)
    assert list(tmp_path.iterdir()) == [], "nothing half-written"
