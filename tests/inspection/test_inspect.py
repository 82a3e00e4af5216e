"""`vitrail inspect` from end to end: whatever model, whatever images, one report."""

from __future__ import annotations

import os

import numpy as np
import pytest
import runs
from pictures import make_folder, picture

import peers  # noqa: F401  timm is imported through it
import vitrail
from samples import randomise
from vitrail.errors import ConfigError, DataError
from vitrail.inspection import inspect
from vitrail.inspection.findings import Absent
from vitrail.inspection.inspect import choose_report_path, find_newest_run, find_run_folder
from vitrail.inspection.scores import MOST_MISTAKES
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.create import build_empty_model
from vitrail.training.run_training import run_training

SMALL = {"width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on digits."""
    return run_training(runs.config(tmp_path_factory.mktemp("runs") / "digits"))


@pytest.fixture
def looked(monkeypatch):
    """What was found, as it goes to the page; figures are not drawn, for that takes the longest."""
    found = []

    def write(findings, figures, path, between=None, *others):
        found.extend([*findings, between])
        path.write_text("")
        return path

    monkeypatch.setattr(inspect, "write_report", write)
    monkeypatch.setattr(inspect, "draw_findings", lambda *given: {})
    monkeypatch.setattr(inspect, "draw_between", lambda layers, path, *others, **options: path)
    return found


def saved(path, name="Ti/4", **options):
    vitrail.save(randomise(vitrail.create_model(name, **{"image_size": 16, **SMALL, **options})), path)
    return str(path)


def absent(findings) -> set[str]:
    parts = ("filters", "positions", "distance", "attention", "tokens", "layers")
    return {part for part in parts if isinstance(getattr(findings, part), Absent)}


def test_without_a_model_it_is_the_newest_run(finished, tmp_path, monkeypatch, looked):
    monkeypatch.chdir(tmp_path)
    assert find_newest_run() is None
    for number, name in enumerate(["runs/quickstart/pretrain", "runs/old"]):
        place = tmp_path / name
        (place / "model").mkdir(parents=True)
        for file in ("config.toml", "metrics.jsonl", "model/config.json"):
            (place / file).write_bytes((finished.folder / file).read_bytes())
        os.utime(place / "model/config.json", (number, number))
    assert find_newest_run().as_posix() == "runs/old"
    os.utime(tmp_path / "runs/quickstart/pretrain/model/config.json", (9, 9))
    assert find_newest_run().as_posix() == "runs/quickstart/pretrain"


def test_where_the_report_goes(finished, tmp_path):
    folder = finished.folder
    assert choose_report_path([str(folder)], None) == folder / "report.html"
    assert choose_report_path([str(folder / "model")], None) == folder / "report.html"
    # The report in the run's folder is about its last weights.
    best = str(folder / "best")
    assert choose_report_path([best], None).as_posix() == "runs/inspect-digits-best/report.html"
    assert find_run_folder(best) == folder
    assert choose_report_path(["hf:owner/name"], None).as_posix() == "runs/inspect-name/report.html"
    assert choose_report_path([str(folder), "b"], None).as_posix() == "runs/inspect-digits-b/report.html"
    assert choose_report_path(["a"], tmp_path) == tmp_path / "report.html"
    assert choose_report_path(["a"], tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(ConfigError, match=r"out .*\.html"):
        choose_report_path(["a"], tmp_path / "x.pdf")
    assert find_run_folder(str(tmp_path)) is None


def test_a_place_that_cannot_be_written(finished, tmp_path, looked):
    (tmp_path / "report_files").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        inspect.inspect(str(finished.folder), out=tmp_path / "report.html")


KINDS = {
    "class token": ({}, set()),
    "pooled, registers, not square": ({"pool": "average", "registers": 2, "image_size": (16, 24)}, set()),
    "attention pooling": ({"pool": "attention"}, set()),
    "relative": ({"position": "relative"}, {"positions"}),
    "no positions": ({"position": "none", "pool": "average"}, {"positions"}),
    "sin-cos": ({"position": "sin-cos"}, {"positions"}),
    "axial": ({"block": "axial", "pool": "average"}, set()),
    "conv stem": ({"conv_stem": [(8, 3, 2), (16, 3, 2)]}, set()),
    "no classes, grey": ({"num_classes": 0, "in_channels": 1}, set()),
    "tanh head": ({"representation_size": 16}, set()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind, tmp_path, looked):
    options, missing = KINDS[kind]
    inspect.inspect(saved(tmp_path / "model-1", **options), out=tmp_path)
    findings, between = looked
    assert absent(findings) == missing
    assert between is None
    assert findings.name == "model-1"
    assert findings.images_from == "the two photographs inside scikit-learn"
    assert [shown.name for shown in findings.images] == ["china.jpg", "flower.jpg"]
    assert all(bool(shown.guesses) == (options.get("num_classes") != 0) for shown in findings.images)


@pytest.mark.slow
def test_a_hybrid_and_a_resnet(tmp_path, looked):
    hybrid = saved(tmp_path / "hybrid", "R26+Ti/32", image_size=64)
    resnet = str(tmp_path / "bit")
    vitrail.save(randomise(vitrail.create_model("BiT-R50x1", image_size=64, num_classes=5)), resnet)
    inspect.inspect([hybrid, resnet], images=make_folder(tmp_path / "photos", {"few": 4}), out=tmp_path)
    one, other, between = looked
    assert len(one.filters) == 2, "the projection's, and the root's"
    assert absent(one) == set()
    assert absent(other) == {"positions", "distance", "attention"}
    assert between.cka.shape == (2, 16)
    assert np.isfinite(between.cka).all()


@pytest.mark.parametrize(
    ("name", "missing"), [("test_vit2", set()), ("test_resnet", {"positions", "distance", "attention"})]
)
def test_networks_of_timm(name, missing, tmp_path, looked):
    model = build_empty_model(TimmArchitecture(name=name, image_size=(32, 32), num_classes=3))
    model.load_state_dict({key: torch_like(tensor) for key, tensor in model.state_dict().items()}, assign=True)
    vitrail.save(randomise(model), tmp_path / "timm")
    inspect.inspect(str(tmp_path / "timm"), out=tmp_path)
    assert absent(looked[0]) == missing


def torch_like(tensor):
    import torch

    return torch.zeros(tensor.shape, dtype=tensor.dtype if not tensor.dtype.is_floating_point else None)


def test_five_channels_have_no_photographs_but_filters(tmp_path, looked):
    inspect.inspect(saved(tmp_path / "model-1", in_channels=5), out=tmp_path)
    findings = looked[0]
    assert absent(findings) == {"distance", "attention", "tokens", "layers"}
    assert "takes 5" in findings.distance.why
    assert not findings.images


def test_images_that_are_given(tmp_path, looked):
    folder = make_folder(tmp_path / "photos", {"cats": 6, "dogs": 5})
    (folder / "dogs" / "0000.png").write_bytes(picture(3)[:40])
    done = inspect.inspect(saved(tmp_path / "model-1"), images=str(folder), out=tmp_path, most=9)
    assert looked[0].measured_on == "8 of the 11 images of photos"
    assert [note.split(": ")[:2] for note in done.notes] == [["left out", "dogs/0000.png"]]
    with pytest.raises(DataError, match="does not exist"):
        inspect.inspect(tmp_path / "model-1", images=tmp_path / "nowhere", out=tmp_path)


def test_a_run_whose_data_is_gone_falls_back_on_photographs(tmp_path, looked):
    make_folder(tmp_path / "photos", {"cats": 6, "dogs": 6})
    config = runs.config(
        tmp_path / "run",
        model={"in_channels": 3},
        data={"source": str(tmp_path / "photos"), "batch_size": 4},
        schedule={"steps": 2, "warmup_steps": 0},
    )
    run_training(config)
    inspect.inspect(str(tmp_path / "run"))
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    inspect.inspect(str(tmp_path / "run" / "model"))
    assert looked[0].measured_on == "2 images of photos, which the run was validated on"
    assert "crops of the two photographs" in looked[2].measured_on
    assert looked[2].records


@pytest.mark.slow
def test_two_models_side_by_side(tmp_path):
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other", depth=3, seed=1)
    done = inspect.inspect([one, other], out=tmp_path / "both.html")
    assert {"one", "other", "between.png", "between.svg", "between.npz", "between.csv"} == {
        path.name for path in (tmp_path / "both_files").iterdir()
    }
    with np.load(tmp_path / "both_files/between.npz", allow_pickle=False) as kept:
        assert kept["cka"].shape == (2, 3)
    assert done.report == tmp_path / "both.html"
    assert all(path.exists() for path in (*done.figure_files, *done.data_files))


def test_the_same_model_twice_keeps_its_files_apart(tmp_path, looked):
    model = saved(tmp_path / "one")
    inspect.inspect([model, model], out=tmp_path / "both.html")
    assert {path.name for path in (tmp_path / "both_files").iterdir() if path.is_dir()} == {"one", "one-2"}
    assert [each.name for each in looked[:2]] == ["one", "one 2"]
    np.testing.assert_allclose(np.diagonal(looked[2].cka), 1, atol=1e-5)


def test_a_run_is_scored_on_what_it_was_validated_on(finished, tmp_path, looked):
    done = inspect.inspect(str(finished.folder), out=tmp_path / "report.html")
    [scores] = [each.scores for each in looked[:1]]
    assert scores.report.top1.value == pytest.approx(finished.accuracy.value)
    assert scores.report.images == finished.evaluated
    assert not scores.report.was_trained_on
    assert "validated" in scores.remark
    assert done.accuracy == {"digits": scores.report.top1}
    assert done.to_dict()["accuracy"]["digits"]["value"] == scores.report.top1.value
    assert [name for name, _ in done.describe_accuracy()] == ["accuracy of digits"]
    wrong = scores.report.images - sum(each.hits for each in scores.report.classes)
    assert len(scores.mistakes) == min(wrong, MOST_MISTAKES)


def test_images_with_labels_are_scored_and_others_are_not(finished, tmp_path, looked):
    out = {"out": tmp_path / "report.html", "most": 4}
    given = inspect.inspect([str(finished.folder), saved(tmp_path / "other")], images="digits", **out)
    assert set(given.accuracy) == {"digits"}, "the other has five classes"
    assert looked[0].scores.remark == "1,797 images of digits"
    make_folder(tmp_path / "photos", {"cat": 6, "dog": 6})
    assert inspect.inspect(str(finished.folder), images=tmp_path / "photos", **out).accuracy == {}


def test_what_a_run_left_can_be_damaged(tmp_path, looked):
    """Its configuration from a newer version, its records cut or hostile: the rest is still shown."""
    run_training(runs.config(tmp_path / "run", schedule={"steps": 2, "warmup_steps": 0}))
    (tmp_path / "run" / "config.toml").write_text("[run]\nnew_thing = 3\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": "x"}\nnonsense\n')
    done = inspect.inspect(str(tmp_path / "run"))
    assert looked[0].images_from == "the two photographs inside scikit-learn"
    assert not looked[0].records
    assert any("without training curves" in note for note in done.notes)


def test_a_dot_is_a_model_too(finished, tmp_path, looked, monkeypatch):
    monkeypatch.chdir(finished.folder / "model")
    done = inspect.inspect(".")
    assert looked[0].name == "digits"
    assert done.report.resolve() == (finished.folder / "report.html").resolve()
    assert looked[0].records
