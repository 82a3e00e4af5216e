"""What holds for every task: records travel as JSON, unknown targets cost nothing, answers are plain data."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vitrail
from samples import small_vit
from vitrail.errors import ConfigError, DataError, WeightsError
from vitrail.tasks.attributes import Attributes
from vitrail.tasks.labels import Labels
from vitrail.tasks.levels import Levels
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.registry import TASKS, find_task, read_task, register_task
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Task, to_tensors

EXAMPLES: dict[str, tuple[Task, list[dict[str, Any]]]] = {
    "labels": (
        Labels(names=("cat", "dog", "owl"), column="breed"),
        [{"breed": each} for each in ("owl", "cat", "dog")],
    ),
    "tags": (
        Tags(names=("cat", "indoor"), column="tags", thresholds=(0.4, 0.6)),
        [{"tags": "cat"}, {"tags": "indoor|cat"}, {"tags": ""}],
    ),
    "numbers": (
        Numbers(names=("age", "price"), means=(40.0, 3000.0), deviations=(12.0, 800.0)),
        [{"age": 30, "price": 2000}, {"age": 50, "price": ""}, {"age": "41", "price": 3500}],
    ),
    "levels": (Levels(names=("1", "2", "3", "4"), column="stars"), [{"stars": 2}, {"stars": "4"}, {"stars": ""}]),
    "attributes": (
        Attributes(names=("colour", "shape"), values=(("blue", "red"), ("ring", "square"))),
        [{"colour": "red", "shape": "ring"}, {"colour": "", "shape": "square"}, {"colour": "blue", "shape": "ring"}],
    ),
}
"""For each kind a task, and rows that are targets of it."""
MORE_EXAMPLES: dict[str, tuple[Task, list[dict[str, Any]]]] = {
    **EXAMPLES,
    "tags in groups": (
        Tags(names=("day", "night", "cat"), column="tags", groups=(("day", "night"),)),
        [{"tags": "day"}, {"tags": "night|cat"}, {"tags": ["cat", "day"]}],
    ),
}
TASK_AND_ROWS = [pytest.param(*example, id=kind) for kind, example in MORE_EXAMPLES.items()]
TASKS_ALONE = [pytest.param(task, id=kind) for kind, (task, _) in MORE_EXAMPLES.items()]


def fill(task: Task, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    targets = task.allocate(len(rows))
    for index, row in enumerate(rows):
        for name, value in task.encode(row).items():
            targets[name][index] = value
    return targets


def draw_outputs(task: Task, count: int) -> Tensor:
    return torch.randn(count, len(task.output_names), generator=torch.Generator().manual_seed(4))


def test_every_task_of_the_registry_is_tested_here():
    assert EXAMPLES.keys() == TASKS.keys()
    for kind, (task, _) in EXAMPLES.items():
        assert task.kind == kind
        assert find_task(kind) is type(task)


# Records

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=5, unique=True).map(tuple)
NUMBER, POSITIVE = st.floats(-1e30, 1e30), st.floats(1e-30, 1e30)


def draw_numbers(names: tuple[str, ...]) -> st.SearchStrategy[Numbers]:
    size = {"min_size": len(names), "max_size": len(names)}
    return st.builds(
        Numbers, names=st.just(names), means=st.lists(NUMBER, **size), deviations=st.lists(POSITIVE, **size)
    )


def draw_attributes(names: tuple[str, ...]) -> st.SearchStrategy[Attributes]:
    values = st.lists(NAMES, min_size=len(names), max_size=len(names))
    return st.builds(Attributes, names=st.just(names), values=values)


def draw_tags(names: tuple[str, ...]) -> st.SearchStrategy[Tags]:
    shares = st.lists(st.floats(0, 1), min_size=len(names), max_size=len(names))
    return st.builds(
        Tags,
        names=st.just(names),
        column=st.none() | st.text(),
        thresholds=st.just(()) | shares,
        groups=st.sampled_from([(), (names[:2],), (names,)]),
    )


RECORDS = {
    "labels": st.builds(Labels, names=NAMES, column=st.text()),
    "tags": NAMES.flatmap(draw_tags),
    "numbers": NAMES.flatmap(draw_numbers),
    "levels": st.builds(Levels, names=NAMES, column=st.text()),
    "attributes": NAMES.flatmap(draw_attributes),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_records_travel_as_json(kind):
    @settings(max_examples=15, deadline=None)
    @given(RECORDS[kind])
    def check(task: Task) -> None:
        read = read_task(json.loads(json.dumps(task.model_dump(mode="json"), allow_nan=False)))
        assert read == task
        assert hash(read) == hash(task)

    check()


def test_records_that_are_no_tasks_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'tags'\\? there are labels, tags"):
        read_task({"kind": "tag", "names": ["a"]})
    with pytest.raises(ConfigError, match="a task has no kind"):
        read_task({"names": ["a"]})
    with pytest.raises(ConfigError, match="unknown option 'mean'"):
        read_task({**EXAMPLES["numbers"][0].model_dump(), "mean": 3})


# Targets


@pytest.mark.parametrize(("task", "rows"), TASK_AND_ROWS)
def test_what_is_learned_from_rows_can_encode_them(task, rows):
    learned = type(task).learn({name: [row[name] for row in rows] for name in task.columns})
    targets = fill(learned, rows)
    assert learned.columns == task.columns
    for name, array in task.allocate(3).items():
        assert targets[name].dtype == array.dtype
    groups = learned.stratify(targets)
    assert groups.shape == (3,)
    assert groups.dtype == np.int64
    assert (groups >= -1).all()


@pytest.mark.parametrize(("task", "rows"), TASK_AND_ROWS)
def test_the_loss_of_an_image_does_not_depend_on_its_batch(task, rows):
    targets, outputs = to_tensors(fill(task, rows)), draw_outputs(task, 3)
    losses = task.compute_losses(outputs, targets)
    counted = task.count(outputs, targets)
    assert losses.shape == (3,)
    for index in range(3):
        one = slice(index, index + 1)
        alone = {name: each[one] for name, each in targets.items()}
        torch.testing.assert_close(task.compute_losses(outputs[one], alone), losses[one])
        for name, values in task.count(outputs[one], alone).items():
            torch.testing.assert_close(values, counted[name][one], equal_nan=True)


UNKNOWN = [
    ("numbers", [{"age": "", "price": 2500}], [0]),
    ("numbers", [{"age": None, "price": ""}], [0, 1]),
    ("levels", [{"stars": ""}], [0, 1, 2]),
    ("attributes", [{"colour": "", "shape": "ring"}], [0, 1]),
    ("attributes", [{}], [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("kind", "rows", "free"), UNKNOWN)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_unknown_targets_cost_nothing(kind, rows, free, seed):
    """Outputs for what is not known change neither the loss nor the gradient; all unknown costs zero."""
    task = EXAMPLES[kind][0]
    targets = to_tensors(fill(task, rows))
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(1, len(task.output_names), generator=generator)
    moved = outputs.clone()
    moved[:, free] += 5 * torch.randn(1, len(free), generator=generator)
    losses, gradients = [], []
    for each in (outputs.requires_grad_(), moved.requires_grad_()):
        losses.append(task.compute_losses(each, targets))
        losses[-1].sum().backward()
        gradients.append(each.grad)
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
    assert not gradients[0][:, free].any()
    if len(free) == len(task.output_names):
        assert losses[0] == 0


def test_a_label_must_be_there():
    task = EXAMPLES["labels"][0]
    for row in ({"breed": ""}, {"breed": None}, {}):
        with pytest.raises(DataError, match="there is no breed"):
            task.encode(row)
    with pytest.raises(DataError, match="breed is 'dgo', which is no class, did you mean 'dog'"):
        task.encode({"breed": "dgo"})
    assert Labels.learn({"y": [2, "1", 1.0, "", None]}).names == ("1", "2")
    for columns, sentence in (({"a": [""]}, "no label in any row"), ({"a": ["1"], "b": ["2"]}, "learn attributes")):
        with pytest.raises(DataError, match=sentence):
            Labels.learn(columns)


# Answers


@pytest.mark.parametrize("task", TASKS_ALONE)
def test_answers_are_plain_data_with_the_same_columns_for_all_images(task):
    values = task.activate(draw_outputs(task, 6)).numpy()
    assert values.shape == (6, len(task.value_names))
    assert values.dtype == np.float32
    torch.testing.assert_close(task.activate(draw_outputs(task, 6)[None])[0].numpy(), values)  # any shape before
    flat = [task.flatten(row) for row in values]
    assert len({tuple(each) for each in flat}) == 1
    for row, columns in zip(values, flat, strict=True):
        answer = task.answer(row)
        assert json.loads(json.dumps(answer, allow_nan=False)) == answer
        assert json.loads(json.dumps(columns, allow_nan=False)) == columns
        lines = task.describe(row)
        assert lines
        for line in lines:
            assert isinstance(line.text, str)
            assert line.share is None or 0 <= line.share <= 1
        assert any(line.is_chosen for line in lines) or task.kind == "tags"


@pytest.mark.parametrize(("task", "rows"), TASK_AND_ROWS)
def test_metrics_do_not_depend_on_the_order_of_images(task, rows):
    values = task.activate(draw_outputs(task, 60)).double().numpy()
    targets, order = fill(task, rows * 20), np.random.default_rng(0).permutation(60)
    found = task.measure(values, targets)
    other = task.measure(values[order], {name: each[order] for name, each in targets.items()})
    assert [measure.name for measure in other.measures] == [measure.name for measure in found.measures]
    for ours, theirs in zip(found.measures, other.measures, strict=True):
        assert ours.estimate.value == pytest.approx(theirs.estimate.value, nan_ok=True)
        assert ours.estimate.low <= ours.estimate.value <= ours.estimate.high
    for title, table in found.tables.items():
        for row, theirs in zip(table, other.tables[title], strict=True):
            assert row == [each if isinstance(each, str) else pytest.approx(each, nan_ok=True) for each in theirs]


@pytest.mark.parametrize("task", TASKS_ALONE)
def test_the_same_values_agree_and_other_answers_do_not(task):
    values = task.activate(4 * draw_outputs(task, 40)).numpy()
    assert task.compare(values, values) == 1
    assert task.compare(values, values[::-1].copy()) < 1


@pytest.mark.parametrize("task", TASKS_ALONE)
def test_the_record_travels_with_the_weights(task, tmp_path):
    model = small_vit().give_task(task)
    vitrail.save(model, tmp_path / "model")
    assert vitrail.load(tmp_path / "model").task == model.task


@pytest.mark.parametrize("task", TASKS_ALONE)
def test_values_can_be_traced_for_any_number_of_images(task):
    class Activation(torch.nn.Module):
        def forward(self, outputs: Tensor) -> Tensor:
            return task.activate(outputs)

    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.export.export(Activation(), (draw_outputs(task, 2),), dynamic_shapes=(batch,)).module()
    for count in (1, 5):
        torch.testing.assert_close(program(draw_outputs(task, count)), task.activate(draw_outputs(task, count)))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS_ALONE)
def test_onnx_gives_the_values_of_the_model(task, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from vitrail.exporting.graphs import build_graph
    from vitrail.exporting.onnx import open_onnx, write_onnx

    model = small_vit(depth=1).give_task(task)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    graph = build_graph(model, with_preprocessing=True)
    assert graph.output == ("probabilities" if task.kind == "labels" else "values")
    write_onnx(graph, tmp_path / "model.onnx")
    pixels = torch.randint(0, 256, (3, 30, 40, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    with torch.inference_mode():
        expected = graph.module(pixels)
    assert expected.shape == (3, len(task.value_names))
    torch.testing.assert_close(open_onnx(tmp_path / "model.onnx")(pixels), expected, rtol=1e-3, atol=1e-4)


# Tasks of one's own


@pytest.fixture
def registry(monkeypatch):
    known = dict(TASKS)
    yield TASKS
    TASKS.clear()
    TASKS.update(known)


def test_a_task_of_your_own_is_found_once_it_is_registered(registry, tmp_path):
    class Moods(Labels):
        kind: Literal["moods"] = "moods"  # type: ignore[assignment]

    task = Moods(names=("calm", "merry"))
    vitrail.save(small_vit().give_task(task), tmp_path / "model")
    with pytest.raises(WeightsError, match=r"first import its file, which calls .*register_task"):
        vitrail.load(tmp_path / "model")
    assert register_task(Moods) is Moods
    assert register_task(Moods) is Moods  # the cell of a notebook runs again
    assert vitrail.load(tmp_path / "model").task == task


def test_a_task_needs_a_kind_of_its_own(registry):
    class Nameless(Labels):
        kind: str  # type: ignore[assignment]

    class Tagging(Labels):
        kind: Literal["tags"] = "tags"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="Nameless has no kind"):
        register_task(Nameless)
    with pytest.raises(ConfigError, match="the kind 'tags' of Tagging is taken by Tags"):
        register_task(Tagging)
    assert registry["tags"] is Tags
