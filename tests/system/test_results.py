"""Results read well when printed, in a notebook and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.config import Preprocessing
from vitrail.system.intervals import estimate_share
from vitrail.system.results import Result, format_value, to_plain


@dataclass(frozen=True, repr=False)
class Measured(Result):
    folder: Path
    accuracy: float
    model: torch.nn.Module
    notes: tuple[str, ...] = ()

    def tables(self):
        return {"Notes <b>": [("note",), *((note,) for note in self.notes)]}

    def figures(self):
        return [self.folder / "curve.png", self.folder / "absent.png"]


@pytest.fixture
def measured(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "curve.png")
    return Measured(tmp_path, 0.5, torch.nn.Linear(1, 1), ("<script>alert(1)</script>",))


def test_a_printed_result_has_a_line_for_each_value(measured):
    first, *lines = repr(measured).splitlines()
    assert first == "Measured"
    assert [line.split()[0] for line in lines] == ["folder", "accuracy", "model", "notes"]


def test_a_notebook_shows_tables_and_figures_and_runs_nothing(measured):
    html = measured._repr_html_()
    assert "data:image/png;base64," in html
    assert html.count("<img") == 1
    assert "<script" not in html
    assert "<b>" not in html


def test_plain_data_leaves_the_model_out(measured):
    plain = measured.to_dict()
    assert plain == {"folder": str(measured.folder), "accuracy": 0.5, "notes": list(measured.notes)}
    json.dumps(plain)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.nan, None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (torch.tensor(2.0), 2.0),
        (True, True),
        (Path("a/b"), "a/b"),
        ({1: (2, None)}, {"1": [2, None]}),
        (estimate_share(1, 1)._replace(low=0.5), {"value": 1.0, "low": 0.5, "high": 1.0}),
        (b"raw", "b'raw'"),
    ],
)
def test_what_json_gets(value, plain):
    assert to_plain(value) == plain
    json.dumps(to_plain(value))


def test_configurations_are_plain_too():
    assert to_plain(Preprocessing(image_size=32))["image_size"] == [32, 32]


def test_values_on_one_line():
    assert format_value(1234567) == "1,234,567"
    assert format_value(list(range(10))) == "10 entries"
    assert format_value({"loss": 0.123456}) == "loss 0.1235"
