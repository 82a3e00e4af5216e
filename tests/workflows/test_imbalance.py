"""What the sizes of classes call for: a pure choice, what finetune makes of it, and that the user's settings win."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitrail
from vitrail.cli.finetune import _describe_event
from vitrail.data.sources.list_source import ListSource
from vitrail.training.resolve import resolve
from vitrail.workflows.finetune import finetune
from vitrail.workflows.imbalance import LEAST_RATIO, apply_balance, choose_balance, get_head_balance
from vitrail.workflows.linear_head import fit_linear_head

TREE = {"model": {"weights": "pane"}, "data": {"source": "given"}, "schedule": {"steps": 10}}
COUNTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=30)
SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "pool": "average", "num_classes": 2}


def make_images(sizes: list[int]) -> ListSource:
    """Classes that differ in brightness, but not so that every image is plain."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = [np.clip(rng.normal(90 + 30 * label, 30, (16, 16, 3)), 0, 255).astype(np.uint8) for label in labels]
    return ListSource([(image, f"class-{label}") for image, label in zip(images, labels.tolist(), strict=True)])


def listen():
    events = []
    return (lambda kind, values: events.append((kind, values)) if kind == "balance" else None), events


# ---- The choice ------------------------------------------------------------------------------------------------------


@given(counts=COUNTS, data=st.data())
def test_the_choice_depends_on_the_largest_and_the_smallest_class_alone(counts, data):
    choice = choose_balance(counts)
    present = [count for count in counts if count]
    ratio = max(present) / min(present) if len(present) > 1 else 1.0
    assert choice.ratio == ratio
    assert choice.balance == ("none" if ratio < LEAST_RATIO else "logits")
    mixed = choose_balance(data.draw(st.permutations(counts)))
    assert (mixed.ratio, mixed.balance) == (choice.ratio, choice.balance)


@given(count=st.integers(1, 10**6), classes=st.integers(1, 30))
def test_equal_classes_are_left_alone(count, classes):
    assert choose_balance([count] * classes).balance == "none"


def test_the_sentence_names_classes_numbers_and_the_way_out():
    why = choose_balance([5000, 300, 50], ["cat", "dog", "yak"]).why
    assert why.startswith("yak has 50 images and cat 5,000, 100 times as many: ")
    assert "objective.balance=none" in why
    assert choose_balance([20, 1]).why.startswith("class 1 has 1 image and class 0 20, 20 times")
    assert "1.5 times" in choose_balance([30, 20]).why


# ---- In the settings of a training -----------------------------------------------------------------------------------


def test_a_training_on_rare_classes_is_balanced_and_says_so():
    config, (on_event, events) = resolve(TREE), listen()
    balanced = apply_balance(config, make_images([40, 4]), set(), on_event)
    assert balanced.objective.balance == "logits"
    assert balanced.data.balance == 0.5
    assert balanced.model_copy(update={"objective": config.objective, "data": config.data}) == config
    assert balanced.data.model_copy(update={"balance": 0.0}) == config.data, "nothing else changes"
    ((kind, values),) = events
    assert (values["ratio"], values["choice"], values["share"]) == (10, "logits", 0.5)
    assert list(_describe_event(kind, values, {})) == [values["why"]]
    assert values["why"].startswith("class-1 has 4 images and class-0 40, 10 times as many: ")


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ([40, 40], []),
        ([39, 4], []),
        ([40, 2], ["objective.balance=none"]),
        ([40, 2], ["objective.balance=loss"]),
        ([40, 2], ["data.balance=0"]),
        ([40, 2], ["objective.loss=sigmoid"]),
    ],
)
def test_nothing_is_said_or_changed_for_even_classes_or_against_the_user(sizes, settings):
    config, (on_event, events) = resolve(TREE, settings), listen()
    given = {setting.partition("=")[0].rpartition(".")[2] for setting in settings}
    assert apply_balance(config, make_images(sizes), given, on_event) is config
    assert events == []


def test_a_strength_alone_stays_with_what_is_chosen():
    config = resolve(TREE, ["objective.balance_strength=0.5"])
    balanced = apply_balance(config, make_images([40, 2]), {"balance_strength"}, listen()[0])
    assert (balanced.objective.balance, balanced.objective.balance_strength) == ("logits", 0.5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], 0.0),
        (["objective.balance=logits"], 1.0),
        (["objective.balance=logits", "objective.balance_strength=0.5"], 0.5),
        (["objective.balance=loss"], 1.0),
        (["data.balance=0.25"], 0.25),
    ],
)
def test_a_head_to_start_from_is_as_balanced_as_its_training(settings, expected):
    assert get_head_balance(resolve(TREE, settings)) == expected


# ---- From end to end -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_finetune_trains_with_what_it_chose_and_goes_on_with_it(tmp_path):
    options = {"run.trackers": (), "run.report": False, "schedule.steps": 4, "schedule.warmup_steps": 0}
    model, (on_event, events) = vitrail.create_model("Ti/4", seed=0, **SMALL), listen()
    images = make_images([60, 6])
    result = finetune(images, model, folder=tmp_path / "run", settings=options, on_event=on_event)
    assert result.config.objective.balance == "logits"
    assert len(events) == 1
    metrics = vitrail.Run(tmp_path / "run").metrics["evaluation"]
    assert all(0 <= value <= 1 for value in metrics["balanced_accuracy"])
    again = finetune(images, model, folder=tmp_path / "run", settings=options)
    assert again.config == result.config
    plain = finetune(images, model, folder=tmp_path / "plain", settings={**options, "objective.balance": "none"})
    assert plain.config.objective.balance == "none"
    assert "balanced_accuracy" not in vitrail.Run(tmp_path / "plain").metrics["evaluation"]


@pytest.mark.parametrize("setting", [None, "none"])
def test_a_quick_head_expects_rare_classes_as_often_and_says_so(tmp_path, setting):
    settings = {"run.report": False, **({} if setting is None else {"objective.balance": setting})}
    model, (on_event, events) = vitrail.create_model("Ti/4", seed=0, **SMALL), listen()
    result = fit_linear_head(make_images([60, 5]), model, folder=tmp_path / "run", settings=settings, on_event=on_event)
    other = {"run.report": False, "objective.balance": "logits" if setting else "none"}
    opposite = fit_linear_head(make_images([60, 5]), model, folder=tmp_path / "other", settings=other)
    assert len(events) == (setting is None)
    bias = [float((each.model.head.bias[1] - each.model.head.bias[0]).detach()) for each in (result, opposite)]
    assert (bias[0] > bias[1]) == (setting is None), "the rare class gains"
