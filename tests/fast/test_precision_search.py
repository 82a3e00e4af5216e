"""The search for a precision: what it chooses, what it keeps, and for what the kept answer holds."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import vitrail
from vitrail.errors import NotApplicableError
from vitrail.fast.cpu import precision_search as search
from vitrail.fast.cpu.precision_search import PrecisionChoice, find_fastest_precision

SMALL = {"image_size": 32, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 10}


class Pretended(nn.Module):
    """A model's own embedding, off by some share."""

    def __init__(self, model, distance):
        super().__init__()
        self.model, self.distance = model, distance

    def forward(self, images):
        return self.model.embed(images) * (1 + self.distance)


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """Seconds and distances as told by the test; counts the searches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = {"fp32": (3.0, 1e-6), "bf16": (2.0, 1e-2), "int8": (1.0, 2e-2)}
    made, times = [], {}

    def embedder(model, precision):
        if precision not in told:
            raise NotApplicableError("not here")
        found = Pretended(model, told[precision][1])
        made.append(precision)
        times[found] = told[precision][0]
        return found

    monkeypatch.setattr(search, "create_cpu_embedder", embedder)
    monkeypatch.setattr(search, "_time_turn", lambda candidate, images: times[candidate])
    return told, made


def small(seed=0):
    return vitrail.create_model("Ti/8", **SMALL, seed=seed).eval()


def test_the_fastest_is_chosen_and_kept(pretended):
    _, made = pretended
    found = find_fastest_precision(small(), 2)
    assert found.precision == "int8"
    assert found.seconds == {"fp32": 3.0, "bf16": 2.0, "int8": 1.0}
    assert found.distances["bf16"] == pytest.approx(1e-2, rel=1e-3)
    assert find_fastest_precision(small(), 2) == found
    assert made == ["fp32", "bf16", "int8"]


def test_what_is_too_far_off_is_not_chosen_however_fast(pretended):
    told, _ = pretended
    told["int8"] = (1.0, 0.06)
    assert find_fastest_precision(small(), 2).precision == "bf16"


def test_what_cannot_be_is_told_and_left_out(pretended):
    told, _ = pretended
    del told["int8"], told["bf16"]
    lines = []
    found = find_fastest_precision(small(), 2, lines.append)
    assert found.precision == "fp32"
    assert list(found.seconds) == ["fp32"]
    assert any(line.startswith("int8: left out, because not here") for line in lines)


def test_other_batches_weights_and_threads_are_searched_anew(pretended, monkeypatch):
    _, made = pretended
    find_fastest_precision(small(), 2)
    find_fastest_precision(small(), 3)
    find_fastest_precision(small(seed=1), 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    find_fastest_precision(small(), 2)
    assert len(made) == 4 * 3
    find_fastest_precision(small(), 2)
    assert len(made) == 4 * 3


@pytest.mark.parametrize("kept", ["no json", "[]", '{"KEY": 3}', '{"KEY": {"precision": "int9"}}', '{"KEY": {}}'])
def test_a_spoilt_cache_costs_a_search(pretended, tmp_path, kept):
    _, made = pretended
    model = small()
    folder = tmp_path / "vitrail"
    folder.mkdir()
    if "KEY" in kept:
        kept = json.dumps({search._cache_key(model, 2): next(iter(json.loads(kept).values()))})
    (folder / search.FILE).write_text(kept)
    assert find_fastest_precision(model, 2).precision == "int8"
    assert len(made) == 3
    assert search._load_choice(search._cache_key(model, 2)) == find_fastest_precision(model, 2)


def test_a_home_that_cannot_be_written_is_no_error(pretended, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find_fastest_precision(small(), 2).precision == "int8"


def test_a_real_search(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(search, "CPU_PRECISIONS", ("fp32",))
    monkeypatch.setattr(search, "SECONDS", 0.001)
    model = small().train()
    found = find_fastest_precision(model, 2)
    assert found == PrecisionChoice("fp32", found.seconds, found.distances)
    assert found.seconds["fp32"] > 0
    assert found.distances["fp32"] < 1e-5
    assert model.training
