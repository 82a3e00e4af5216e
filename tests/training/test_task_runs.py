"""A run learns whatever task its data has: its configuration, its weights, its choices, and going on with it."""

from __future__ import annotations

import math

import pytest
import runs
import torch
from annotated import digits_for

import vitrail
from vitrail.errors import ConfigError, DataError, Stopped
from vitrail.system.ranks import Ranks
from vitrail.training.build import TrainingData, build_model, check_run, open_training_data
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_training import run_training
from vitrail.training.task import set_task
from vitrail.training.validation import get_metric

ONE = Ranks(0, 1, torch.device("cpu"))
QUIET = {
    "model": {"dropout": 0.0, "stochastic_depth": 0.0},
    "optimizer": {"learning_rate": 0.01},
    "run": {"checkpoint_every": 100, "evaluate_every": 100},
}
SHORT = {"steps": 6, "warmup_steps": 1}


@pytest.fixture(scope="module")
def tagged():
    return digits_for("tags")


def test_the_task_is_written_into_the_configuration(tagged, tmp_path):
    config = set_task(runs.config(tmp_path), tagged.task)
    assert (config.data.task, config.objective.kind, get_metric(config)) == ("tags", "task", "loss")
    labels = runs.config(tmp_path)
    assert set_task(labels, open_training_data(labels.data).training.task) is labels, "labels stay as they are"
    with pytest.raises(ConfigError, match="label_smoothing means nothing"):
        set_task(runs.config(tmp_path, objective={"label_smoothing": 0.1}), tagged.task)
    with pytest.raises(ConfigError, match=r"data\.task = 'labels', but the task of digits is 'tags'"):
        set_task(runs.config(tmp_path, data={"task": "labels"}), tagged.task)
    with pytest.raises(ConfigError, match=r"task = 'tag'.*'tags'"):
        runs.config(tmp_path, data={"task": "tag"})
    masked = runs.config(tmp_path, objective=runs.MASKED)
    assert set_task(masked, tagged.task) is masked, "which learns without targets"


def test_columns_are_a_text_or_a_list(tmp_path):
    assert runs.config(tmp_path, data={"labels": ["colour", "shape"]}).data.labels == "colour,shape"
    assert resolve(runs.tree(tmp_path), ["data.labels=colour,shape"]).data.labels == "colour,shape"


def test_a_run_on_tags(tagged, tmp_path):
    changed = {"schedule": {**SHORT, "result": "best"}, "run": {"evaluate_every": 2}}
    events = []
    config = runs.config(tmp_path / "run", data={"divide_validation": "halves"}, **changed)
    result = run_training(config, source=tagged, on_event=lambda *event: events.append(event))
    evaluations = [entry for entry in runs.records(tmp_path / "run") if entry["kind"] == "evaluation"]
    assert result.evaluation.keys() == {"loss", "tag-accuracy"}
    best = min(evaluations, key=lambda entry: entry["halves"][0]["loss"])
    assert result.choosing == {name: best["halves"][0][name] for name in result.choosing}, "the first half chooses"
    assert result.accuracy is None
    described = next(values for kind, values in events if kind == "training")
    assert (described["task"], described["outputs"], described["classes"]) == ("tags", "even, large, round", None)
    model = vitrail.load(tmp_path / "run")
    assert model.task == tagged.task == vitrail.Run(tmp_path / "run").load("best").task
    assert (model.num_classes, model.labels) == (3, ("even", "large", "round"))
    written = read_toml(tmp_path / "run" / "config.toml")
    assert (written["data"]["task"], written["objective"]["kind"]) == ("tags", "task")
    assert "objective task" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["tags", "numbers", "levels", "attributes"])
def test_every_task_is_learned(kind, tmp_path):
    source = digits_for(kind)
    config = runs.config(tmp_path, schedule={"steps": 30, "warmup_steps": 2}, **QUIET)
    run_training(config, source=source)
    losses = runs.losses(tmp_path)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert vitrail.load(tmp_path).task == source.task


def test_stopping_and_going_on_change_nothing(tagged, tmp_path):
    whole, broken = (runs.config(tmp_path / name, schedule=SHORT) for name in ("whole", "broken"))
    run_training(whole, source=tagged)

    def stop(kind, values):
        if kind == "step" and values["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        run_training(broken, source=tagged, on_event=stop)
    run_training(broken, source=tagged)
    runs.assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_other_targets_are_another_run(tagged, tmp_path):
    config = runs.config(tmp_path / "run", schedule={"steps": 1, "warmup_steps": 0})
    run_training(config, source=tagged)
    other = digits_for("tags")
    other.arrays["tags"][:] = 1 - other.arrays["tags"]
    with pytest.raises(ConfigError, match="other images"):
        run_training(config, source=other)
    with pytest.raises(ConfigError, match=r"data.task = 'tags', not None|objective.kind = 'task'"):
        run_training(config)


@pytest.mark.parametrize("place", ["in_memory", "on_device"])
def test_pixels_in_memory_learn_the_same_targets(tagged, tmp_path, place):
    result = run_training(runs.config(tmp_path, data={place: True}, schedule=SHORT), source=tagged)
    assert math.isfinite(result.evaluation["loss"])
    parts = open_training_data(runs.config(tmp_path, data={place: True}).data, tagged)
    assert parts.training.task == parts.evaluation.task == tagged.task


def test_what_only_labels_have_is_refused(tagged, tmp_path):
    data = open_training_data(runs.config(tmp_path).data, tagged)

    def check(**sections):
        check_run(set_task(runs.config(tmp_path, **sections), tagged.task), data, ONE)

    check()
    check(run={"fewshot_every": 2, "fewshot_data": "digits"})
    with pytest.raises(ConfigError, match="few-shot accuracy needs one class an image, and the task is tags"):
        check(run={"fewshot_every": 2})
    with pytest.raises(ConfigError, match='give "halves" or "no"'):
        check(data={"divide_validation": "cross-fit"})
    other = digits_for("tags")
    other._task = other.task.model_copy(update={"names": ("a", "b", "c")})
    with pytest.raises(DataError, match="the tags of val are not those of train"):
        check_run(set_task(runs.config(tmp_path), tagged.task), TrainingData(data.training, other), ONE)
    with pytest.raises(ConfigError, match="mixup"):
        run_training(runs.config(tmp_path, data={"mixing": {"mixup": 0.2}}), source=tagged)


def build(weights, source, **model):
    """The model of a run that starts from weights."""
    tree = runs.tree("unused")
    tree["model"] = {"weights": str(weights), **model}
    return build_model(set_task(resolve(tree), source.task), source)


def rename(count):
    """Tagged digits with so many other tags."""
    source = digits_for("tags")
    source._task = source.task.model_copy(update={"names": tuple(f"tag {number}" for number in range(count))})
    return source


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of a classifier of ten digits."""
    options = {name: value for name, value in runs.MODEL.items() if name != "name"}
    return vitrail.save(
        vitrail.create_model("Ti/4", num_classes=10, **options), tmp_path_factory.mktemp("w") / "labels"
    )


def test_weights_get_a_new_head(tagged, weights, tmp_path):
    fresh = build(weights, tagged)
    assert (fresh.task, fresh.labels) == (tagged.task, tagged.task.names)
    assert not fresh.head.weight.any()
    again = build(vitrail.save(fresh, tmp_path / "tags"), rename(3))
    assert again.task.names == ("tag 0", "tag 1", "tag 2"), "though the head has as many outputs"
    digits = open_training_data(runs.config(tmp_path).data).training
    back = build(tmp_path / "tags", digits)
    assert (back.stored_task, back.num_classes) == (None, 10)


def test_a_head_that_is_kept_goes_with_its_own_task(tagged, weights, tmp_path):
    model = build(weights, tagged)
    model.head.weight.data.fill_(0.5)
    model.stored_task = model.task.model_copy(update={"thresholds": (0.2, 0.3, 0.4)})
    kept = build(vitrail.save(model, tmp_path / "tags"), tagged, keep_head=True)
    assert torch.equal(kept.head.weight, model.head.weight)
    assert kept.task == model.task
    with pytest.raises(
        ConfigError, match=r"the head is for labels \(.*\), and the data has tags \(tag 0, tag 1, .* \(10 in all\)\)"
    ):
        build(weights, rename(10), keep_head=True)
    with pytest.raises(ConfigError, match=r"the head is for tags \(even, large, round\)"):
        build(tmp_path / "tags", rename(3), keep_head=True)
