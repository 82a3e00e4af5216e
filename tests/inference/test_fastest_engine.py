"""The fastest precision that is near enough, on the images themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.source import Subset
from vitrail.inference import fastest_engine
from vitrail.inference.batches import InferenceOptions
from vitrail.inference.fastest_engine import open_fastest_engine

CPU = InferenceOptions(device="cpu")
SMALL = {"image_size": 16, "in_channels": 1, "width": 64, "depth": 2, "num_heads": 2, "mlp_dim": 128}


@pytest.fixture(scope="module")
def digits():
    return Subset(open_data("digits"), np.arange(200))


@pytest.fixture
def model():
    return vitrail.create_model("Ti/4", seed=0, num_classes=10, **SMALL)


def test_what_is_chosen_is_near(model, digits, monkeypatch):
    monkeypatch.setattr(fastest_engine, "LEAST_GAIN", 0.0)  # int8 even if it is slower here
    engine = open_fastest_engine(model, digits, CPU)
    assert engine.precision == "int8"
    pixels = torch.randint(0, 255, (5, 1, 16, 16), dtype=torch.uint8)
    exact = vitrail.inference.batches.open_model(model, CPU).embed(pixels)
    assert 0 < np.linalg.norm(engine.embed(pixels) - exact) / np.linalg.norm(exact) < fastest_engine.MOST_DISTANCE


def test_what_is_not_near_is_not_chosen(model, digits, monkeypatch):
    monkeypatch.setattr(fastest_engine, "MOST_DISTANCE", 0.0)
    messages = []
    assert open_fastest_engine(model, digits, CPU, messages.append).precision == "fp32"
    assert "int8 changes" in messages[0]


def test_what_is_not_faster_is_not_chosen(model, digits, monkeypatch):
    monkeypatch.setattr(fastest_engine, "LEAST_GAIN", 1e9)
    assert open_fastest_engine(model, digits, CPU).precision == "fp32"


def test_what_is_not_possible_is_told(digits):
    resnet = vitrail.create_model("BiT-R50x1", image_size=32, in_channels=1, num_classes=3, seed=0)
    messages = []
    engine = open_fastest_engine(resnet, digits, CPU, messages.append)
    assert engine.precision in ("fp32", "int8")
    assert engine.precision == "int8" or messages
