"""Finetune for tags, numbers, levels and attributes: only a head, a whole training, and what a person reads."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from annotated import COLUMNS, digits_for, write_table

import vitrail
from commands import runner
from vitrail.cli.tasks import describe_task
from vitrail.data.sources.source import Subset, compute_fingerprint
from vitrail.errors import ConfigError, DataError, Stopped
from vitrail.evaluation.answered_images import AnsweredImages, answer_all
from vitrail.inference.batches import InferenceOptions, open_model, single_rank
from vitrail.system.events import ignore_event
from vitrail.system.files import write_whole
from vitrail.tasks.levels import Levels
from vitrail.tasks.tags import Tags
from vitrail.training.build import divide_validation, open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import change_config, to_toml
from vitrail.workflows.finetune import finetune
from vitrail.workflows.finetune_request import FinetuneRequest
from vitrail.workflows.finetune_result import TaskResult
from vitrail.workflows.start_model import open_start
from vitrail.workflows.task_measures import choose_judging_images
from vitrail.workflows.train_task import _prepare_start

CPU = InferenceOptions(device="cpu")
KINDS = ["tags", "numbers", "levels", "attributes"]
SMALL = {"image_size": 16, "in_channels": 1, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64}
QUIET = {"run.report": False}
SHORT = {**QUIET, "run.trackers": (), "schedule.steps": 12, "data.batch_size": 32, "run.evaluate_every": 4}


def answer_images(model, source) -> AnsweredImages:
    return answer_all(open_model(model, CPU), source, CPU, single_rank(CPU))


@pytest.fixture(scope="module")
def start():
    """A model that has learned nothing: brightness is seen all the same."""
    return vitrail.create_model("Ti/4", seed=0, pool="average", num_classes=0, **SMALL)


def configure(**data):
    return RunConfig(model={"name": "Ti/4"}, data={"source": "x", **data}, schedule={"steps": 1})


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def follow(events):
    return lambda kind, values: events.append((kind, values)) if kind != "progress" else None


FLOORS = {
    "tags": ("mAP", 0.8),
    "numbers": ("R² of value", 0.4),
    "levels": ("quadratic kappa", 0.5),
    "attributes": ("mean accuracy", 0.6),
}


def test_the_column_of_labels_that_was_found_is_told(start, here):
    table = write_table(here / "photos", "labels")
    events = []
    vitrail.save(vitrail.create_model("Ti/4", **{**SMALL, "in_channels": 3, "num_classes": 0}), here / "start")
    finetune(table, here / "start", quick=True, settings=QUIET, on_event=follow(events))
    (told,) = [values for kind, values in events if kind == "task"]
    assert list(describe_task(told)) == [
        "task: labels, size of 60 images: large, middle, small; --task and --labels choose others"
    ]


def test_a_quick_head_replaces_no_model_for_something_else(start, here):
    first = finetune(digits_for("tags"), start, quick=True, settings=QUIET, folder="head")
    again = finetune(digits_for("tags"), start, quick=True, settings=QUIET, folder="head")
    assert again.measures == first.measures
    with pytest.raises(
        ConfigError, match=r"head holds a model for other tags, even, large, round: give a new folder=…"
    ):
        finetune(digits_for("numbers"), start, quick=True, settings=QUIET, folder="head")
    with pytest.raises(ConfigError, match="head holds a model for other tags"):
        finetune([(np.zeros((16, 16), np.uint8), n % 2) for n in range(20)], start, quick=True, folder="head")
    assert vitrail.load("head").task == again.model.task


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_seconds(kind, start, here):
    source, events = digits_for(kind), []
    result = finetune(source, start, quick=True, settings=QUIET, on_event=follow(events))
    assert [name for name, _ in events] == ["task", "features", "measures"]
    assert isinstance(result, TaskResult)
    assert (result.model.task.kind, result.config, result.accuracy) == (kind, None, None)
    name, floor = FLOORS[kind]
    assert result.measures[name].value > floor
    assert 10 < result.evaluated < 40, "half of what is held out"
    loaded = vitrail.load(result.folder)
    assert loaded.task == result.model.task == result.judgement.task
    values = answer_images(loaded, source)
    assert np.isfinite(values.values).all()
    written = json.loads((result.folder / "measures.json").read_text())
    assert written["measures"] == events[-1][1]["measures"]
    assert "Measured on " in (result.weights / "README.md").read_text()
    assert loaded.learned_from == compute_fingerprint(source), "held-out images are learned in the end"
    assert "Measured on" in repr(result)
    json.dumps(result.to_dict())
    assert result.to_dict()["measures"] == json.loads(json.dumps(written["measures"]))


def test_thresholds_are_chosen_by_other_images_than_are_measured(start, here):
    source = digits_for("tags")
    result = finetune(source, start, quick=True, settings=QUIET)
    thresholds = result.model.task.thresholds
    assert len(thresholds) == 3
    assert set(thresholds) != {0.5}
    config = configure(holdout=0.2, divide_validation="halves")
    parts = open_training_data(config.data, source)
    images = choose_judging_images(config, parts.evaluation, None)
    names = [{each.name(i) for i in range(len(each))} for each in (parts.training, images.tuning, images.measured)]
    assert not names[0] & names[1] | names[1] & names[2] | names[0] & names[2]
    assert len(images.measured) == result.evaluated
    assert not images.flatters


def test_a_test_split_reports_and_the_whole_rest_is_used(start, here):
    whole = digits_for("numbers", 240)
    test = Subset(whole, np.arange(180, 240))
    images = choose_judging_images(configure(divide_validation="halves"), Subset(whole, np.arange(100, 180)), test)
    assert (len(images.tuning), len(images.measured), images.flatters) == (80, 60, False)
    undivided = choose_judging_images(configure(divide_validation="no"), test, None)
    assert undivided.flatters
    assert "may flatter" in undivided.remark
    nothing = choose_judging_images(configure(divide_validation="halves"), None, None)
    assert (nothing.tuning, nothing.measured) == (None, None)


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """A whole training on tags, and its events."""
    events = []
    folder = tmp_path_factory.mktemp("runs") / "run"
    return finetune(digits_for("tags"), start, settings=SHORT, folder=folder, on_event=follow(events)), events


def test_a_whole_training(trained):
    result, events = trained
    assert result.config.data.divide_validation == "halves"
    assert (result.config.objective.kind, result.config.data.task) == ("task", "tags")
    assert result.config.optimizer.kind == "adamw"
    kinds = [name for name, _ in events]
    assert kinds[:3] == ["task", "data", "choices"]
    assert kinds[-1] == "measures"
    evaluations = [values for name, values in events if name == "evaluation"]
    assert evaluations[0]["step"] == 0, "the fitted head is the first that can be chosen"
    best = min(evaluations, key=lambda each: each["halves"][0]["loss"])
    assert result.evaluation["loss"] == best["loss"]
    assert result.evaluated == evaluations[0]["halves"][1]["images"]
    remark = json.loads((result.folder / "measures.json").read_text())["remark"]
    assert remark == result.judgement.remark == "Measured on 20 images that neither trained nor chose anything."
    card = (result.weights / "README.md").read_text()
    assert f"objective task, seed {result.config.run.seed}" in card
    assert "Measured on " in card


def test_the_measures_are_those_of_the_saved_model(trained):
    result, _ = trained
    loaded = vitrail.load(result.folder)
    assert loaded.task == result.model.task == result.judgement.task
    halves = divide_validation(result.config, open_training_data(result.config.data, digits_for("tags")).evaluation)
    tuned, measured = (answer_images(loaded, half) for half in halves)
    found = {each.name: each.estimate.value for each in loaded.task.measure(measured.values, measured.targets).measures}
    assert found == pytest.approx({name: each.value for name, each in result.measures.items()})
    assert loaded.task.tune(tuned.values, tuned.targets) == loaded.task


@pytest.mark.slow
def test_the_same_call_returns_the_result_of_a_finished_run(trained, start):
    result, _ = trained
    events = []
    again = finetune(digits_for("tags"), start, settings=SHORT, folder=result.folder, on_event=follow(events))
    assert again.measures == result.measures
    assert [kind for kind, _ in events] == ["task", "data", "choices", "training", "trained", "measures"]


@pytest.mark.slow
def test_a_training_that_is_stopped_goes_on(start, here):
    source = digits_for("tags")
    whole = finetune(source, start, settings=SHORT, folder="whole")

    def stop(kind, values):
        if kind == "step" and values["step"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        finetune(source, start, settings=SHORT, folder="broken", on_event=stop)
    result = finetune(source, start, settings=SHORT, folder="broken")
    assert result.measures == whole.measures
    theirs = whole.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in result.model.state_dict().items())


def test_a_training_goes_on_in_a_process_of_several(start, here, monkeypatch):
    """It keeps the head that one process has fitted; a run of several ranks began without one, and keeps that."""
    source = digits_for("tags")
    result = finetune(source, start, settings=SHORT, folder="one")
    request = FinetuneRequest(source, start, False, None, "one", SHORT)
    asked = result.config.model_copy(update={"model": result.config.model.model_copy(update={"keep_head": False})})
    for ranks in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        config, model = _prepare_start(asked, request, start, ignore_event)
        assert config.model.keep_head
        assert torch.equal(model.head.weight, open_start("one/start").head.weight)
    asked = change_config(asked, {"run": {}}, "several")
    config, model = _prepare_start(asked, request, start, ignore_event)
    assert not config.model.keep_head
    write_whole(config.run.folder / "config.toml", to_toml(config).encode())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not _prepare_start(asked, request, start, ignore_event)[0].model.keep_head


def test_from_nothing(here):
    architecture = {f"model.{key}": value for key, value in SMALL.items()}
    result = finetune(digits_for("levels"), "scratch", settings={**SHORT, **architecture}, folder="run")
    assert math.isfinite(result.evaluation["loss"])
    assert result.model.task.kind == "levels"


@pytest.mark.slow
def test_a_sweep_chooses_by_the_loss(start, here):
    events = []
    result = finetune(digits_for("tags"), start, sweep=True, settings=SHORT, folder="run", on_event=follow(events))
    chosen = next(values for kind, values in events if kind == "chosen")
    assert chosen["loss"] == min(trial.loss for trial in result.trials)
    assert "learning rates" in result.tables()


@pytest.mark.slow
def test_too_little_time_fits_a_head(start, here):
    result = finetune(digits_for("tags"), start, minutes=0.05, settings=QUIET)
    assert isinstance(result, TaskResult)
    assert result.config is None


@pytest.mark.parametrize("quick", [False, True])
def test_levels_whose_names_tell_no_order(start, here, quick):
    names = ("poor", "fair", "good")
    pairs = [(np.full((16, 16), 80 * (n % 3) + n, np.uint8), {"state": names[n % 3]}) for n in range(60)]
    with pytest.raises(DataError, match=r"vitrail\.finetune\(…, task=Levels\(names=\('poor', 'fair'\), column='state'"):
        finetune(pairs, start, task="levels", quick=True)
    options = {"quick": True, "settings": QUIET} if quick else {"settings": SHORT}
    result = finetune(pairs, start, task=Levels(names=names, column="state"), folder="run", **options)
    assert result.model.task.names == names
    assert vitrail.load("run").task == result.model.task


def test_what_is_refused(start, here):
    with pytest.raises(ConfigError, match="--task"):
        finetune(digits_for("tags"), start, settings={"data.task": "tags"})
    with pytest.raises(ConfigError, match="numbers"):
        finetune(digits_for("tags"), start, task="numbers")
    with pytest.raises(ConfigError, match="quick trains nothing"):
        finetune(digits_for("tags"), start, quick=True, settings={"schedule.steps": 3})


def test_tags_that_exclude_each_other_are_one_question(start, here):
    bright = np.random.default_rng(0).integers(0, 2, 120)
    pairs = [
        (
            np.full((16, 16), 150 * is_bright + n % 50, np.uint8),
            {"tags": ["day" if is_bright else "night"] + ["odd"] * (n % 2)},
        )
        for n, is_bright in enumerate(bright)
    ]
    events = []
    result = finetune(pairs, start, task="tags", quick=True, settings=QUIET, on_event=follow(events))
    (told,) = [values for kind, values in events if kind == "task"]
    assert told["remark"] == "every training image has exactly one of day, night: their probabilities sum to 1"
    assert told["remark"] in describe_task(told)
    assert result.measures["mAP"].value > 0.6
    loaded = vitrail.load(result.folder)
    assert loaded.task.groups == (("day", "night"),)
    values = answer_images(loaded, digits_for("tags")).values
    np.testing.assert_allclose(values[:, :2].sum(axis=1), 1, atol=1e-5)
    assert not np.allclose(values[:, 2], 1)
    given = Tags(names=("day", "night", "odd"), column="tags")
    assert finetune(pairs, start, task=given, quick=True, settings=QUIET).model.task.groups == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_from_a_table_in_the_terminal(kind, here, monkeypatch, capsys):
    vitrail_command = runner(monkeypatch, capsys)
    table = write_table(here / "photos", kind)
    vitrail.save(vitrail.create_model("Ti/4", **{**SMALL, "in_channels": 3, "num_classes": 0}), here / "start")
    options = ["--from", str(here / "start"), "--task", kind, "--labels", ",".join(COLUMNS[kind])]
    settings = ["schedule.steps=6", "batch_size=16", "run.trackers=[]"]
    for extra in (["--quick", "folder=quick"], [*settings, "folder=run"]):
        code, out, err = vitrail_command("finetune", "--data", str(table), *options, *extra)
        assert code == 0, err
        assert f"task: {kind}, " in out
        assert "\nMeasured on " in out
        assert "report.html" in out
    assert (here / "run" / "report.html").is_file()
    changed = [
        "run.folder=again",
        "schedule.steps=2",
        "run.report=false",
        "model.weights=start",
        "model.keep_head=false",
    ]
    code, out, err = vitrail_command("train", "run/config.toml", *changed)
    assert code == 0, err
    assert f"task: {kind}, " in out + err
