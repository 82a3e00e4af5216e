"""finetune, train and quickstart as functions: models, lists and callbacks go in, results come out."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from striped import stripes

import vitrail
from vitrail.data.open import open_data
from vitrail.errors import ConfigError, Stopped
from vitrail.recipes import find_recipe
from vitrail.training.result import TrainingResult
from vitrail.training.run_folder import START_FOLDER
from vitrail.weights import load as loading
from vitrail.weights.digest import compute_weights_digest
from vitrail.workflows import quickstart as quickstarting
from vitrail.workflows.finetune import finetune
from vitrail.workflows.finetune_result import FinetuneResult
from vitrail.workflows.quickstart import quickstart
from vitrail.workflows.train import train

pytestmark = pytest.mark.slow  # whole trainings

SHORT = {"schedule.steps": 6, "run.trackers": (), "run.report": False, "run.deterministic": True, "run.log_every": 1}
OPTIONS = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stripes(tmp_path_factory.mktemp("data") / "stripes", classes=3, images=8)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def model():
    return vitrail.create_model("Ti/4", seed=0, **OPTIONS)


def assert_same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def interrupt_at(kind, number=1):
    """A listener that interrupts at the event of that kind with that number."""
    left = [number]

    def listen(found, values):
        left[0] -= found == kind
        if found == kind and left[0] == 0:
            raise KeyboardInterrupt

    return listen


# ---- What goes in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sweep": True}], ids=["alone", "sweep"])
def test_the_model_is_loaded_once(folder, model, monkeypatch, options):
    monkeypatch.setattr("vitrail.workflows.train_classifier.LEARNING_RATES", (0.003, 0.01))
    vitrail.save(model, "saved")
    loaded, load = [], loading.load_with_files

    def count(source, *given, **options):
        loaded.append(source)
        return load(source, *given, **options)

    monkeypatch.setattr(loading, "load_with_files", count)
    settings = {**SHORT, "run.report": True, "schedule.steps": 2, "model.stochastic_depth": 0.1}
    result = finetune(folder, "saved", settings=settings, **options)
    assert loaded == ["saved"]
    assert result.report.is_file()
    assert result.model.architecture.stochastic_depth == 0.1


def test_a_loaded_model_stays_as_it_is_and_its_run_goes_on(folder, model):
    before = compute_weights_digest(model)
    with pytest.raises(Stopped):
        finetune(folder, model, folder="mine", settings=SHORT, on_event=interrupt_at("step", 3))
    assert compute_weights_digest(model) == before
    assert_same_weights(vitrail.load(f"mine/{START_FOLDER}"), model)
    resumed = finetune(folder, model, folder="mine", settings=SHORT)
    whole = finetune(folder, model, folder="whole", settings=SHORT)
    assert_same_weights(resumed.model, whole.model)
    assert runs.records(Path("mine")) == runs.records(Path("whole"))
    # The command goes on with it too, from the weights that lie in the folder.
    assert_same_weights(train("mine/config.toml").model, whole.model)
    other = vitrail.create_model("Ti/4", seed=1, **OPTIONS)
    with pytest.raises(ConfigError, match="other weights"):
        finetune(folder, other, folder="mine", settings=SHORT)
    assert_same_weights(vitrail.load(f"mine/{START_FOLDER}"), model)


def test_a_loaded_model_is_not_written_among_other_files(folder, model, here):
    (here / "mine").mkdir()
    (here / "mine/letter.txt").write_text("")
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        finetune(folder, model, folder="mine", settings=SHORT)
    assert [path.name for path in (here / "mine").iterdir()] == ["letter.txt"]


def test_a_quick_head_on_a_loaded_model(folder, model):
    before = compute_weights_digest(model)
    result = finetune(folder, model, quick=True)
    assert compute_weights_digest(model) == before
    assert (model.num_classes, result.model.num_classes) == (5, 3)
    assert result.folder == Path("runs/stripes-quick-from-model")
    assert_same_weights(vitrail.load(result.folder), result.model)


def test_images_without_a_name(folder, model):
    source = open_data(folder)
    pairs = [(source.read(index).content, int(source.labels(index, index + 1)[0])) for index in range(len(source))]
    for data, kind in ((pairs, "list"), (source, "source")):
        result = finetune(data, model, folder=kind, settings=SHORT)
        assert result.config.data.source == f"a {kind} of 24 images"
        assert (result.model.num_classes, result.evaluated) == (3, 6)
    quick = finetune(pairs, model, quick=True)
    assert quick.folder == Path("runs/a-list-of-24-images-quick-from-model")
    assert quick.accuracy.value > 0.5


def test_the_report_of_images_without_a_name_shows_them(folder, model):
    settings = {**SHORT, "run.report": True, "schedule.steps": 2}
    result = finetune(open_data(folder), model, folder="mine", settings=settings)
    assert "validated on" in result.report.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quick": True, "sweep": True}, "sweep"),
        ({"quick": True, "model": "scratch"}, "trained model"),
        ({"quick": True, "model": None}, "trained model"),
        ({"model": "scrach"}, "did you mean 'scratch'"),
        ({"model": 3}, "int is no model"),
        ({"settings": {"model.weights": "pane"}}, "in place of"),
        ({"folder": "mine", "settings": {"run.folder": "yours"}}, "twice"),
        ({"sweep": True, "settings": {"optimizer.learning_rate": 1.0}}, "leave optimizer.learning_rate out"),
        ({"sweep": True, "settings": {"data.validate_on": "none"}}, "held out"),
        ({"settings": {"schedule.stepps": 3}}, "did you mean 'steps'"),
        ({"settings": {"schedule": {"stepps": 3}}}, "did you mean 'steps'"),
        ({"settings": {"data.source": "digits"}}, "twice"),
        ({"folder": "mine", "settings": {"run": {"folder": "yours"}}}, "twice"),
        ({"sweep": True, "settings": {"optimizer": {"learning_rate": 1.0}}}, "leave optimizer.learning_rate out"),
        ({"quick": True, "settings": {"schedule": {"steps": 3}}}, "schedule.steps"),
        ({"settings": "schedule.steps=3"}, "dictionary"),
        ({"settings": {3: 4}}, "schedule.steps"),
    ],
)
def test_wrong_options_are_exceptions(folder, here, options, words):
    with pytest.raises(ConfigError, match=words):
        finetune(folder, **options)
    assert not (here / "runs").exists()


# ---- What comes out --------------------------------------------------------------------------------------------------


def test_the_result_of_a_training(folder):
    result = finetune(folder, "scratch", settings={**SHORT, "model.depth": 1})
    assert isinstance(result, FinetuneResult)
    assert not result.model.training
    assert_same_weights(result.model, vitrail.load(result.weights))
    assert result.accuracy.low <= result.accuracy.value <= result.accuracy.high
    assert result.accuracy.value * result.evaluated == round(result.accuracy.value * result.evaluated)
    assert result.config.schedule.steps == 6
    plain = result.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert "model" not in plain
    assert plain["config"]["schedule"]["steps"] == 6
    assert str(result.weights) in repr(result)
    assert "<img" in result._repr_html_(), "the learning curves"
    again = finetune(folder, "scratch", settings={**SHORT, "model.depth": 1})
    assert again == result, "it was finished"


def test_names_in_a_result_are_no_html(model, here):
    stripes(here / "photos", classes=2, images=20)
    (here / "photos/colour-0").rename(here / "photos/<b>cat")
    for number in range(2):
        (here / f"photos/<b>cat/0{number}.png").rename(here / f"photos/colour-1/cat-{number}.png")
    result = finetune("photos", model, quick=True)
    assert result.suspects
    assert "<b>" not in result._repr_html_()


# ---- Interrupted -----------------------------------------------------------------------------------------------------


def test_interrupted_in_a_sweep_it_goes_on(folder, model, monkeypatch):
    monkeypatch.setattr("vitrail.workflows.train_classifier.LEARNING_RATES", (0.003, 0.01))
    vitrail.save(model, "saved")
    whole = finetune(folder, "saved", sweep=True, folder="whole", settings=SHORT)
    with pytest.raises(Stopped):
        finetune(folder, "saved", sweep=True, folder="mine", settings=SHORT, on_event=interrupt_at("step", 9))
    with pytest.raises(KeyboardInterrupt):
        finetune(folder, "saved", sweep=True, folder="mine", settings=SHORT, on_event=interrupt_at("chosen"))
    resumed = finetune(folder, "saved", sweep=True, folder="mine", settings=SHORT)
    assert [(trial.rate, trial.accuracy) for trial in resumed.trials] == [
        (trial.rate, trial.accuracy) for trial in whole.trials
    ]
    assert_same_weights(resumed.model, whole.model)


def test_interrupted_while_features_are_computed_it_goes_on(folder, model):
    with pytest.raises(KeyboardInterrupt):
        finetune(folder, model, quick=True, on_event=interrupt_at("progress"))
    assert finetune(folder, model, quick=True).accuracy is not None


@pytest.mark.parametrize(("kind", "number"), [("training", 1), ("step", 3), ("trained", 1), ("progress", 1)])
def test_an_error_of_the_listener_arrives_as_it_is_and_the_run_goes_on(folder, kind, number):
    full, left = OSError(28, "No space left on device", "my.log"), [number]

    def listen(found, values):
        left[0] -= found == kind
        if left[0] <= 0:
            raise full if found == kind else ValueError("a later event")

    settings = {**SHORT, "run.report": True, "model.depth": 1}
    with pytest.raises(OSError, match=r"my\.log") as caught:
        finetune(folder, "scratch", settings=settings, on_event=listen)
    assert caught.value is full
    assert finetune(folder, "scratch", settings={**settings, "run.report": False}).config.schedule.steps == 6


# ---- Around it -------------------------------------------------------------------------------------------------------


def global_state() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "random": random.getstate(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "warnings": list(warnings.filters),
    }


@pytest.mark.parametrize("quick", [False, True], ids=["trained", "quick"])
def test_it_works_in_a_thread_and_changes_nothing_around_it(folder, model, quick, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = global_state()
    settings = {} if quick else {**SHORT, "run.report": True, "run.threads": 1, "schedule.steps": 2}
    found = {}
    for place in ("main", "thread"):

        def work(place=place):
            found[place] = finetune(folder, model, quick=quick, folder=place, settings=settings)

        if place == "main":
            work()
        else:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert global_state() == before, place
    assert_same_weights(found["main"].model, found["thread"].model)


def test_it_trains_where_gradients_are_off_and_torch_only_warns(folder):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = global_state()
        with torch.no_grad():
            finetune(folder, "scratch", settings={**SHORT, "model.depth": 1, "schedule.steps": 2})
        assert global_state() == before
    finally:
        torch.use_deterministic_algorithms(False)


# ---- train -----------------------------------------------------------------------------------------------------------


def small_tree(folder):
    return runs.config(folder, schedule={"steps": 4, "warmup_steps": 0}, run={"report": False})


def test_train_takes_a_recipe_a_file_or_a_configuration(here):
    config = small_tree("first")
    result = train(config)
    assert isinstance(result, TrainingResult)
    assert (result.folder, result.steps, result.evaluated) == (Path("first"), 4, 179)
    assert result.accuracy.value == pytest.approx(result.evaluation["accuracy"])
    assert_same_weights(result.model, vitrail.load("first"))
    assert "accuracy" in repr(result)
    assert json.dumps(result.to_dict())
    assert "<img" in result._repr_html_()
    (here / "mine.toml").write_text(Path("first/config.toml").read_text())
    again = train("mine.toml", {"run.folder": "second"})
    assert_same_weights(again.model, result.model)
    small = {"model.depth": 1, "schedule.steps": 2, "schedule.warmup_steps": 0, "run.trackers": (), "data.workers": 0}
    by_recipe = train("quickstart", {**small, "run.report": False}, data="digits")
    assert by_recipe.config.run.folder == Path("runs/quickstart")
    assert by_recipe.accuracy is None, "the recipe leaves the test part alone"


def test_train_takes_images_without_a_name(folder):
    settings = {"model.in_channels": 3, "data.batch_size": 4, "run.report": True}
    events = []
    result = train(
        small_tree("mine"),
        {**settings, "data.source": open_data(folder)},
        on_event=lambda kind, values: events.append((kind, values)),
    )
    assert result.config.data.source == "a source of 24 images"
    assert result.model.labels == ("colour-0", "colour-1", "colour-2")
    kinds = [kind for kind, _ in events if kind != "progress"]
    assert (kinds[0], kinds[-2:]) == ("training", ["trained", "report"])
    assert events[-1][1]["path"] == str(result.report)
    assert json.dumps(events)
    with pytest.raises(ConfigError, match="twice"):
        train(small_tree("mine"), {"data.source": "digits"}, data=open_data(folder))


def test_train_says_what_the_command_says(here):
    for recipe, settings, words in (
        ("quickstrat", None, "did you mean 'quickstart'"),
        ("cifar10-scratch", None, "needs data.source"),
        ("quickstart", ["steps"], "is not key=value"),
        ("nowhere.toml", None, r"nowhere\.toml"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(recipe, settings)
    assert not (here / "runs").exists()


def test_interrupted_training_goes_on():
    whole = train(small_tree("whole"))
    with pytest.raises(Stopped):
        train(small_tree("mine"), on_event=interrupt_at("train", 2))
    assert_same_weights(train(small_tree("mine")).model, whole.model)


# ---- quickstart ------------------------------------------------------------------------------------------------------


@pytest.fixture
def miniature(monkeypatch):
    """The quickstart in three steps a stage."""
    small = {"schedule.steps": 3, "schedule.warmup_steps": 0, "run.trackers": (), "data.workers": 0}
    resolve = quickstarting.resolve
    monkeypatch.setattr(quickstarting, "resolve", lambda tree, settings: resolve(tree, {**settings, **small}))


@pytest.mark.slow
def test_the_quickstart(miniature, model):
    events = []
    result = quickstart("here", model, on_event=lambda kind, values: events.append((kind, values)))
    kept = [(kind, values) for kind, values in events if kind in ("stage", "tested", "report", "trained")]
    stage_1, stage_2, stage_3 = (
        ["stage", "trained", "tested"],
        ["stage", "trained", "tested"],
        ["stage", "report", "report"],
    )
    assert [kind for kind, _ in kept] == [*stage_1, *stage_2, *stage_3, "stage", "trained", "tested"]
    assert [values["number"] for kind, values in kept if kind == "stage"] == [1, 2, 3, 4]
    tested = {values["run"]: values for kind, values in kept if kind == "tested"}
    assert list(tested) == ["pretrain", "finetune", "transfer"]
    assert tested["finetune"]["accuracy"] == result.accuracy._asdict()
    assert tested["pretrain"]["accuracy"] == result.pretrained_accuracy._asdict()
    assert (result.images, result.folder) == (359, Path("here/finetune"))
    assert result.report == result.folder / "report.html"
    assert_same_weights(result.model, vitrail.load("here/finetune"))
    assert [row.start for row in result.rows] == ["scratch", "model"]
    batches = [find_recipe(name).batch_size for name in ("quickstart", "quickstart-finetune")]
    assert result.rows[0].images == 3 * sum(batches)
    assert json.dumps(events)
    assert json.dumps(result.to_dict())
    assert "Handwritten digits" in result._repr_html_()
    assert quickstart("here", model) == result, "all of it was finished"


def test_an_interrupted_quickstart_goes_on(miniature, monkeypatch):
    monkeypatch.setattr(quickstarting, "write_run_report", lambda result, **options: result)
    with pytest.raises(Stopped):
        quickstart("here", on_event=interrupt_at("step", 4))
    assert quickstart("here").rows == ()
    with pytest.raises(vitrail.WeightsError, match="nowhere"):
        quickstart("there", "nowhere")
    assert not Path("there").exists()
