"""vitrail: the Vision Transformer paper as software.

import vitrail
model = vitrail.create_model("B/16")

The names below load what they need (torch among it) when they are first used, so importing vitrail is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitrail import inspection as inspection
    from vitrail.config import Preprocessing
    from vitrail.data.loader import EvaluationLoader, TrainingLoader
    from vitrail.data.open import open_data
    from vitrail.data.transforms.augment import Augmentation
    from vitrail.data.transforms.preprocess import prepare
    from vitrail.errors import ConfigError, DataError, InputError, MissingExtraError, VitrailError, WeightsError
    from vitrail.inference.predictor import Predictor
    from vitrail.model.bit import BitResNet
    from vitrail.model.create import create_model
    from vitrail.model.positions import resize_position_embedding
    from vitrail.model.recording import record_attention
    from vitrail.model.timm_model import TimmModel
    from vitrail.model.vit import VisionTransformer
    from vitrail.weights.convert import convert
    from vitrail.weights.load import load
    from vitrail.weights.save import save

_HOMES = {
    "Augmentation": "vitrail.data.transforms.augment",
    "BitResNet": "vitrail.model.bit",
    "ConfigError": "vitrail.errors",
    "DataError": "vitrail.errors",
    "EvaluationLoader": "vitrail.data.loader",
    "InputError": "vitrail.errors",
    "MissingExtraError": "vitrail.errors",
    "Predictor": "vitrail.inference.predictor",
    "Preprocessing": "vitrail.config",
    "TimmModel": "vitrail.model.timm_model",
    "TrainingLoader": "vitrail.data.loader",
    "VisionTransformer": "vitrail.model.vit",
    "VitrailError": "vitrail.errors",
    "WeightsError": "vitrail.errors",
    "convert": "vitrail.weights.convert",
    "create_model": "vitrail.model.create",
    "load": "vitrail.weights.load",
    "open_data": "vitrail.data.open",
    "prepare": "vitrail.data.transforms.preprocess",
    "record_attention": "vitrail.model.recording",
    "resize_position_embedding": "vitrail.model.positions",
    "save": "vitrail.weights.save",
}

_ROOMS = ("inspection",)
"""Modules that are reached through the package: `vitrail.inspection.attention_rollout(model, images)`."""

__all__ = [
    "Augmentation",
    "BitResNet",
    "ConfigError",
    "DataError",
    "EvaluationLoader",
    "InputError",
    "MissingExtraError",
    "Predictor",
    "Preprocessing",
    "TimmModel",
    "TrainingLoader",
    "VisionTransformer",
    "VitrailError",
    "WeightsError",
    "convert",
    "create_model",
    "load",
    "open_data",
    "prepare",
    "record_attention",
    "resize_position_embedding",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"vitrail.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
