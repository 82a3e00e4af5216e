"""The example of a task of one's own: it trains, travels with the weights, and its parts do what they say."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from task_tables import write_csv
from torch.nn import functional as F

import vitrail
from vitrail.data.open import add_task, open_data
from vitrail.errors import DataError, WeightsError
from vitrail.inference.engine import open_engine
from vitrail.objectives.supervised import Supervised
from vitrail.tasks.registry import TASKS

ROOT = Path(__file__).parents[2]
EXAMPLE, PAGE = ROOT / "examples/own_task.py", ROOT / "docs/tasks.md"


@pytest.fixture
def own() -> Iterator[ModuleType]:
    """The example as a module; afterwards its task is unknown again."""
    spec = importlib.util.spec_from_file_location("own_task", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["own_task"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_task"], TASKS["counts"]


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 150


def test_it_trains_and_travels_with_the_weights(own, tmp_path):
    own.train_counter(tmp_path / "model", steps=2)
    engine = open_engine(str(tmp_path / "model"))
    assert engine.task == own.Counts()
    pixels, _ = own.draw_squares(3, seed=1)
    values = engine.predict(pixels)
    assert values.shape == (3, 1)
    assert (values > 0).all()
    answer = json.loads(json.dumps(engine.task.answer(values[0])))
    assert answer == {"count": round(answer["expected"]), "expected": pytest.approx(float(values[0, 0]))}
    assert Supervised(vitrail.load(tmp_path / "model"), engine.task).task is engine.task
    del TASKS["counts"]
    with pytest.raises(WeightsError, match=r"task = 'counts': there are labels.*first import its file"):
        vitrail.load(tmp_path / "model")
    TASKS["counts"] = own.Counts


def test_the_loss_is_that_of_a_loop_and_unknown_counts_cost_nothing(own):
    outputs = torch.randn(4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = {own.COUNT: torch.tensor([0.0, 3, math.nan, 9], dtype=torch.float64)}
    found = own.Counts().compute_losses(outputs, targets)
    for loss, (output,), count in zip(found.tolist(), outputs.tolist(), targets[own.COUNT].tolist(), strict=True):
        probability = math.exp(-math.exp(output)) * math.exp(output) ** (0 if math.isnan(count) else count)
        assert loss == pytest.approx(0 if math.isnan(count) else -math.log(probability))
    assert torch.autograd.gradcheck(lambda each: own.Counts().compute_losses(each, targets), outputs)


def test_cells_are_counts(own):
    task = own.Counts.learn({"birds": ["3", "", 5, "many"]})
    assert task.columns == ("birds",)
    assert task.encode({"birds": "4"}) == {own.COUNT: 4.0}
    assert math.isnan(task.encode({"birds": ""})[own.COUNT])
    for wrong in ("-1", 2.5, "many"):
        with pytest.raises(DataError, match="birds is"):
            task.encode({"birds": wrong})
    for columns in ({"birds": ["", None]}, {"a": ["1"], "b": ["2"]}):
        with pytest.raises(DataError):
            own.Counts.learn(columns)


def test_a_field_may_be_a_dictionary(own, tmp_path):
    class Weighed(own.Counts):
        kind: Literal["weighed"] = "weighed"
        weights: dict[str, float] = Field(default_factory=dict)

    path = write_csv(tmp_path, "image,birds", ["0.png,3", "1.png,4"], 2)
    source = open_data(add_task(path, Weighed(column="birds", weights={"far": 2.0})))
    assert source.task.weights == {"far": 2.0}
    assert source.targets(0, 2)[own.COUNT].tolist() == [3, 4]


def test_metrics_are_those_of_the_known(own):
    values, counts = np.array([[1.5], [4.0], [7.0]]), np.array([2, 5, np.nan], np.float32)
    error, r2 = own.Counts().measure(values, {own.COUNT: counts}).measures
    assert error.estimate.value == 0.75
    assert r2.estimate.value == pytest.approx(1 - (0.25 + 1) / 4.5)
    assert own.Counts().compare(values, np.array([[1.6], [4.4], [6.4]])) == pytest.approx(2 / 3)


def test_the_drawn_images_show_as_many_squares_as_they_say(own):
    pixels, counts = own.draw_squares(20, seed=0)
    bright = (pixels[:, :1] > 100).float()
    assert (F.max_pool2d(bright, 4).sum(dim=(1, 2, 3)) == counts).all()


def test_the_python_of_the_page_runs(own, tmp_path, monkeypatch, capsys):
    """The first block is run; the second is the whole example."""
    monkeypatch.chdir(tmp_path)
    first, second, _ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(first, str(PAGE), "exec"), {})
    assert "('above 1', 'above 2')" in capsys.readouterr().out
    assert second == EXAMPLE.read_text()


@pytest.mark.slow
def test_it_learns_to_count(own, tmp_path):
    own.train_counter(tmp_path / "model", steps=300)
    engine = open_engine(str(tmp_path / "model"))
    pixels, counts = own.draw_squares(200, seed=10**6)
    measures = engine.task.measure(engine.predict(pixels).astype(np.float64), {own.COUNT: counts.numpy()}).measures
    assert {each.name: each.estimate.low for each in measures}["R²"] > 0.8
