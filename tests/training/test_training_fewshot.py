"""Few-shot accuracy while a model trains: its value, what it chooses, and that it changes nothing else."""

from __future__ import annotations

import json
import math
import signal

import numpy as np
import pytest
import runs
import torch
from pictures import make_folder

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.source import Subset
from vitrail.errors import ConfigError, DataError, Stopped
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.least_squares import score_few_shot
from vitrail.evaluation.training_fewshot import TrainingFewshot, open_training_fewshot
from vitrail.inference.batches import InferenceOptions
from vitrail.system.ranks import Ranks
from vitrail.training import loop
from vitrail.training.checkpoint_folder import read_weights
from vitrail.training.fewshot import gather_features
from vitrail.training.run_training import run_training
from vitrail.training.sweep import run_trials
from vitrail.training.trained_model import build_trained_model

pytestmark = pytest.mark.slow  # whole trainings

EVERY = {"fewshot_every": 5, "fewshot_shots": 3}
MASKED = {"objective": runs.MASKED, "model": {"num_classes": 0}}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(folder, *, on_event=None, **sections):
    sections = {**sections, "run": {**EVERY, **sections.get("run", {})}}
    return run_training(runs.config(folder, **sections), fewshot=open_training_fewshot, on_event=on_event)


def fewshots(folder) -> dict[int, float]:
    return {record["step"]: record["accuracy"] for record in runs.records(folder) if record["kind"] == "fewshot"}


def plant(monkeypatch, accuracies: dict[int, float]) -> None:
    """Replace the few-shot accuracies by these, at their steps, and by 0.1 elsewhere."""

    def measure(run, state):
        return {"part": "3-shot", "accuracy": accuracies.get(state.progress.step, 0.1), "deviation": 0.0}

    monkeypatch.setattr(loop, "measure_fewshot", measure)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Runs with few-shot accuracy: a classifier, and masked patches."""
    root = tmp_path_factory.mktemp("measured")
    train(root / "classes", run={"keep": 20, "checkpoint_every": 5})
    train(root / "masked", run={"keep": 20, "checkpoint_every": 5}, **MASKED)
    return root


# ---- The value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["classes", "masked"])
def test_the_value_is_that_of_the_saved_model(measured, name):
    """Of the averaged weights, on the images that the run holds out, by the rule of `vitrail.fewshot`."""
    found = fewshots(measured / name)
    assert list(found) == [5, 10, 15, 20]
    assert len(set(found.values())) > 1
    options, trained = InferenceOptions(device="cpu"), vitrail.load(measured / name)
    parts = [open_data("digits", part, 0.1) for part in ("train", "val")]
    for checkpoint in vitrail.Run(measured / name).checkpoints:
        if checkpoint.step in found:
            model = build_trained_model(trained, read_weights(checkpoint.path))
            rows = score_few_shot(*(extract_features(model, part, options, None) for part in parts), 10, shots=[3])
            assert found.pop(checkpoint.step) == pytest.approx(np.mean([row.accuracy for row in rows]), abs=1e-9)
    assert not found


def test_other_data_gives_what_the_command_gives(tmp_path):
    """At the last step, on data that is divided as `vitrail fewshot` divides it."""
    make_folder(tmp_path / "photos", {"cat": 12, "dog": 12, "eel": 12})
    result = train(tmp_path / "run", run={"fewshot_data": str(tmp_path / "photos"), "fewshot_every": 50})
    report = vitrail.fewshot(
        result.model, str(tmp_path / "photos"), shots=[3], methods="least-squares", device="cpu", cache=None
    )
    assert list(fewshots(tmp_path / "run")) == [20]
    assert result.fewshot == fewshots(tmp_path / "run")[20]
    assert result.fewshot == pytest.approx(report.summaries()[0].accuracy, abs=1e-9)
    card = (tmp_path / "run/model/README.md").read_text()
    assert "3-shot accuracy on `photos`" in card
    assert str(tmp_path) not in card


def test_images_are_prepared_once(tmp_path, monkeypatch):
    """Only those that are drawn or scored, and not again for the next measurement."""
    make_folder(tmp_path / "photos", {"cat": 30, "dog": 30})
    opened, reads, ordinary = [], [], Subset.read

    def open_counted(training, validation, **options):
        opened.append(open_training_fewshot(training, validation, **options))
        return opened[-1]

    def read(source, index):
        if opened and source in opened[0].sources:
            reads.append((opened[0].sources.index(source), index))
        return ordinary(source, index)

    monkeypatch.setattr(Subset, "read", read)

    config = runs.config(tmp_path / "run", run={**EVERY, "fewshot_data": str(tmp_path / "photos"), "fewshot_images": 7})
    run_training(config, fewshot=open_counted)
    drawn, scored = opened[0].sources
    assert len(scored) == 7
    assert 6 <= len(drawn) <= 18, "three draws of three images of two classes"
    assert len(fewshots(tmp_path / "run")) == 4
    assert len(reads) == len(set(reads)) == len(drawn) + len(scored)


def test_the_images_to_score_are_always_the_same():
    digits = open_data("digits")
    one, other = (TrainingFewshot(digits, digits, 2, 100) for _ in range(2))
    assert [*one.sources[1].indices] == [*other.sources[1].indices]
    assert len(set(one.sources[1].indices)) == 100
    assert TrainingFewshot(digits, digits, 2, len(digits)).sources[1] is digits


def test_unlabelled_images_are_not_drawn():
    pixels = torch.zeros(1, 4, 4, dtype=torch.uint8)
    source = open_data([(pixels, label) for label in [0, 1] * 4])
    labels = np.array([0, 1, -1, -1, 0, 1, 0, 1])
    source.labels = lambda start, stop: labels[start:stop]
    drawn, _ = TrainingFewshot(source, source, 2, 100).sources
    assert not {2, 3} & {*drawn.indices.tolist()}


def test_features_that_are_no_numbers_are_never_the_best():
    digits = open_data("digits")
    task = TrainingFewshot(digits, digits, 1, 10)
    drawn, scored = (len(source) for source in task.sources)
    parts = [
        (torch.full((count, 4), math.nan), torch.zeros(count, dtype=torch.int64), torch.arange(count))
        for count in (drawn, scored)
    ]
    assert math.isnan(task.score(parts)["accuracy"])


def test_gathered_features_are_in_the_order_of_the_source():
    batches = [
        (torch.tensor([[3.0], [1.0]]), torch.tensor([3, 1]), torch.tensor([3, 1]), torch.tensor([True, True])),
        (torch.tensor([[0.0], [9.0]]), torch.tensor([0, 0]), torch.tensor([0, -1]), torch.tensor([True, False])),
    ]
    found = gather_features(batches, Ranks(0, 1, torch.device("cpu")))
    assert found.values.flatten().tolist() == [0, 1, 3]
    assert found.indices.tolist() == found.labels.tolist() == [0, 1, 3]


# ---- It changes nothing else -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [{}, MASKED], ids=["classes", "masked"])
def test_the_weights_of_a_run_are_the_same_with_and_without_it(tmp_path, measured, sections):
    folder = measured / ("masked" if sections else "classes")
    run_training(runs.config(tmp_path, run={"keep": 20, "checkpoint_every": 5}, **sections))
    ours, theirs = (runs.tensors(runs.checkpoints(place)[-1]) for place in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert runs.records(tmp_path) == [record for record in runs.records(folder) if record["kind"] != "fewshot"]


BOTH = {"run": {"evaluate_every": 10}, "schedule": {"result": "best"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, **BOTH)
    return folder


@pytest.mark.parametrize("at", ["step", "fewshot", "evaluation"])
def test_a_run_that_is_stopped_is_the_same_run(tmp_path, whole, monkeypatch, at):
    """Stopped in a step with a measurement, in a few-shot measurement, and in an evaluation before one."""
    ordinary, stops = loop.compute_batches, [10]

    def compute(run, state, loader, task, function):
        if task == {"fewshot": "3-shot features", "evaluation": "evaluating"}.get(at) and state.progress.step in stops:
            stops.remove(state.progress.step)
            signal.raise_signal(signal.SIGTERM)
        return ordinary(run, state, loader, task, function)

    def interrupt(kind, values):
        if at == "step" and kind == "step" and values["step"] in stops:
            stops.remove(values["step"])
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "compute_batches", compute)
    with pytest.raises(Stopped, match="step 10 of 20"):
        train(tmp_path / "stopped", on_event=interrupt, **BOTH)
    owed = runs.state(runs.checkpoints(tmp_path / "stopped")[-1])["owed"]
    assert owed == (["fewshot"] if at == "fewshot" else ["evaluation", "fewshot"])
    train(tmp_path / "stopped", **BOTH)
    runs.assert_same_run(whole, tmp_path / "stopped")
    assert not stops


def test_what_was_measured_before_the_first_step_is_not_there_twice(tmp_path, monkeypatch):
    """If the process dies before the first checkpoint."""
    start = {"run": {"evaluate_start": True}, "data": {"validate_on": "none", "holdout": 0.1}}
    start["run"]["fewshot_data"] = "digits"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", lambda run, state: (_ for _ in ()).throw(RuntimeError("dead")))
        with pytest.raises(RuntimeError, match="dead"):
            train(tmp_path, **start)
    assert [*fewshots(tmp_path)] == [0]
    train(tmp_path, **start)
    steps = [record["step"] for record in runs.records(tmp_path) if record["kind"] == "fewshot"]
    assert steps == [0, 5, 10, 15, 20]


# ---- What it chooses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [{}, MASKED], ids=["classes", "masked"])
def test_a_run_ends_and_takes_its_weights_by_few_shot_accuracy(tmp_path, monkeypatch, sections):
    plant(monkeypatch, {2: 0.5, 4: 0.75, 6: 0.5})
    schedule = {"patience": 2, "result": "best", "choose_by": "fewshot"}
    result = train(tmp_path, schedule=schedule, run={"fewshot_every": 2, "evaluate_every": 5}, **sections)
    assert result.steps == 8, "two measurements after step 4"
    assert result.fewshot == 0.75
    run = vitrail.Run(tmp_path)
    assert (run.best.step, run.best.metric, run.best.value) == (4, "few-shot accuracy", 0.75)
    (checkpoint,) = [path for path in runs.checkpoints(tmp_path) if path.name == "step-00000004"]
    kept = runs.tensors(checkpoint)
    for name, tensor in vitrail.load(tmp_path).state_dict().items():
        assert torch.equal(tensor, kept[f"average/model.{name}"]), name
    evaluated = [record["step"] for record in runs.records(tmp_path) if record["kind"] == "evaluation"]
    assert evaluated == [5, 8], "and the last weights are evaluated on the validation images too"
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = train(tmp_path, schedule=schedule, run={"fewshot_every": 2, "evaluate_every": 5}, **sections)
    assert (again.steps, again.fewshot) == (8, 0.75)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_stop_in_the_evaluation_at_an_early_end_does_not_make_the_run_longer(tmp_path, monkeypatch):
    plant(monkeypatch, {2: 0.5})
    ordinary = loop.measure

    def measure(run, state, loader):
        if state.progress.step == 6 and not runs.checkpoints(tmp_path / "stopped")[-1].name.endswith("06"):
            signal.raise_signal(signal.SIGTERM)
        return ordinary(run, state, loader)

    sections = {
        "schedule": {"patience": 2, "choose_by": "fewshot"},
        "run": {"fewshot_every": 2, "evaluate_every": None, "checkpoint_every": 1},
    }
    assert train(tmp_path / "whole", **sections).steps == 6
    monkeypatch.setattr(loop, "measure", measure)
    with pytest.raises(Stopped, match="step 6 of 20"):
        train(tmp_path / "stopped", **sections)
    assert train(tmp_path / "stopped", **sections).steps == 6
    assert runs.records(tmp_path / "stopped") == runs.records(tmp_path / "whole")


def test_by_default_validation_chooses(tmp_path, monkeypatch):
    """A few-shot accuracy that only falls neither ends the run nor has a say in what is the best."""
    plant(monkeypatch, {5: 0.9})
    result = train(tmp_path, schedule={"patience": 1, "result": "best"}, run={"evaluate_every": 20})
    assert result.steps == 20
    assert vitrail.Run(tmp_path).best.step == 20


def test_best_weights_beside_the_last_ones(tmp_path, monkeypatch):
    plant(monkeypatch, {10: 0.9})
    train(tmp_path, schedule={"choose_by": "fewshot"})
    told = json.loads((tmp_path / "best.json").read_text())
    assert told == {"folder": "best", "step": 10, "metric": "few-shot accuracy", "value": 0.9}
    assert "few-shot accuracy was the best" in (tmp_path / "best/README.md").read_text()


# ---- What is wrong ---------------------------------------------------------------------------------------------------


def test_wrong_configurations_say_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"vitrail\.train"):
        run_training(runs.config(tmp_path / "a", run=EVERY))
    with pytest.raises(ConfigError, match=r"run\.fewshot_every"):
        run_training(runs.config(tmp_path / "b", schedule={"choose_by": "fewshot"}))
    with pytest.raises(ConfigError, match="divide_validation"):
        train(tmp_path / "c", schedule={"choose_by": "fewshot"}, data={"divide_validation": "halves"})
    with pytest.raises(ConfigError, match=r"data\.holdout.*run\.fewshot_data"):
        train(tmp_path / "d", data={"validate_on": "none"})
    with pytest.raises(ConfigError, match="sweep"):
        next(run_trials(runs.config(tmp_path / "e", schedule={"choose_by": "fewshot"}), [1e-3]))
    make_folder(tmp_path / "photos", {"all": 12})
    with pytest.raises(DataError, match=r"run\.fewshot_data.*two or more classes"):
        train(tmp_path / "f", run={"fewshot_data": str(tmp_path / "photos")})
    assert {path.name for path in tmp_path.iterdir()} == {"photos"}, "nothing was written"


def test_other_few_shot_images_are_another_run(tmp_path):
    """Wherever they lie; but few-shot accuracy may be left out, and measured more or less often."""
    make_folder(tmp_path / "photos", {"cat": 12, "dog": 12})
    short = {"schedule": {"steps": 2, "warmup_steps": 0}}
    train(tmp_path / "run", run={"fewshot_data": str(tmp_path / "photos")}, **short)
    (tmp_path / "photos").rename(tmp_path / "moved")
    moved = {"fewshot_data": str(tmp_path / "moved")}
    train(tmp_path / "run", run={**moved, "fewshot_every": 1}, **short)
    run_training(runs.config(tmp_path / "run", **short))
    with pytest.raises(ConfigError, match=r"few-shot images.*fewshot_shots=2"):
        train(tmp_path / "run", run={**moved, "fewshot_shots": 2}, **short)
    with pytest.raises(ConfigError, match=r"few-shot images"):
        train(tmp_path / "run", **short)


# ---- What people see -------------------------------------------------------------------------------------------------


def test_events_trackers_and_the_run_that_is_read_back(tmp_path):
    events = []
    train(
        tmp_path,
        run={"trackers": ("tensorboard",)},
        on_event=lambda kind, values: events.append((kind, values)),
    )
    told = {values["step"]: values["accuracy"] for kind, values in events if kind == "fewshot"}
    assert told == fewshots(tmp_path)
    begun = next(values for kind, values in events if kind == "training")
    assert (begun["fewshot"]["shots"], begun["fewshot"]["every"]) == (3, 5)
    assert 30 <= begun["fewshot"]["drawn"] <= 90
    passes = {values["task"] for kind, values in events if kind == "progress"}
    assert "3-shot features" in passes
    assert b"3-shot/accuracy" in b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    run = vitrail.Run(tmp_path)
    assert run.metrics["fewshot"]["accuracy"] == [*told.values()]
    assert len(run.tables()["Few-shot accuracy"]) == 5
    assert "3-shot, best" in (tmp_path / "curves.svg").read_text()
    json.dumps([values for _, values in events])


def test_the_verb_measures_it(tmp_path):
    """`vitrail.train` hands its runs what they need."""
    config = runs.config(tmp_path, run={**EVERY, "report": False}, schedule={"steps": 5, "warmup_steps": 0})
    result = vitrail.train(config, on_event=lambda kind, values: None)
    assert result.fewshot == fewshots(tmp_path)[5]
    assert dict(result.summary())["3-shot accuracy"] == f"{result.fewshot:.1%}"


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"on_device": True}, "run": {"graphs": True, "compile": False}},
        {"run": {"compile": True}},
        {**MASKED, "run": {"compile": True}},
    ],
    ids=["graphs", "compiled", "masked and compiled"],
)
def test_on_a_gpu_the_weights_are_the_same_too(tmp_path, sections):
    """CUDA graphs hold addresses of tensors, and compiled code is compiled anew for other shapes."""
    sections = {**sections, "run": {"device": "cuda", **sections["run"]}}
    run_training(runs.config(tmp_path / "plain", **sections))
    train(tmp_path / "measured", **sections)
    ours, theirs = (runs.tensors(runs.checkpoints(tmp_path / name)[-1]) for name in ("plain", "measured"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(fewshots(tmp_path / "measured")) == 4
