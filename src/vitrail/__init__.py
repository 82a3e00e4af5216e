"""vitrail: the Vision Transformer paper as software.

    import vitrail

    result = vitrail.finetune("photos/")              # a classifier for your own images
    result.model, result.accuracy, result.folder
    vitrail.predict("cat.jpg", result.model)
    vitrail.evaluate(result.model, "photos/", split="val")
    vitrail.inspect(result.model, images="photos/")
    vitrail.export(result.model, "photos.onnx")

Every command of the command line is a function here. It returns its result, which reads well when printed and in a
notebook, and tells what happens through `on_event` (see vitrail/system/events.py).

The names below load what they need (torch among it) when they are first used, so importing vitrail is quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if sys.platform == "darwin":
    # What Apple's GPU lacks, the CPU computes. torch asks once, when it is imported.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

if TYPE_CHECKING:
    from vitrail import inspection as inspection
    from vitrail import studies as studies
    from vitrail.benchmark.bench import bench
    from vitrail.config import Preprocessing
    from vitrail.data.check.check import check_data
    from vitrail.data.loader import EvaluationLoader, TrainingLoader
    from vitrail.data.open import open_data
    from vitrail.data.packing.pack import pack_data
    from vitrail.data.transforms.augment import Augmentation
    from vitrail.data.transforms.preprocess import prepare
    from vitrail.errors import (
        ConfigError,
        DataError,
        Diverged,
        ExportError,
        InputError,
        MissingExtraError,
        NotApplicableError,
        Stopped,
        TrainingError,
        VitrailError,
        WeightsError,
    )
    from vitrail.evaluation.calibrate import calibrate
    from vitrail.evaluation.compare import compare_models
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.fewshot import fewshot
    from vitrail.evaluation.neighbours import find_similar
    from vitrail.exporting.export import export
    from vitrail.inference.optimize import optimize
    from vitrail.inference.predict import predict
    from vitrail.inference.predictor import Predictor
    from vitrail.inspection.inspect import inspect
    from vitrail.model.bit import BitResNet
    from vitrail.model.catalogue import list_models
    from vitrail.model.create import create_model
    from vitrail.model.positions import resize_position_embedding
    from vitrail.model.recording import record_attention
    from vitrail.model.timm_model import TimmModel
    from vitrail.model.vit import VisionTransformer
    from vitrail.serving.serve import serve
    from vitrail.studies.run_study import study
    from vitrail.system.doctor import examine_machine
    from vitrail.training.saved_run import Run
    from vitrail.transfer.suite import run_suite
    from vitrail.weights.convert import convert
    from vitrail.weights.load import load
    from vitrail.weights.save import save
    from vitrail.workflows.finetune import finetune
    from vitrail.workflows.quickstart import quickstart
    from vitrail.workflows.train import train

_HOMES = {
    "Augmentation": "vitrail.data.transforms.augment",
    "BitResNet": "vitrail.model.bit",
    "ConfigError": "vitrail.errors",
    "DataError": "vitrail.errors",
    "Diverged": "vitrail.errors",
    "EvaluationLoader": "vitrail.data.loader",
    "ExportError": "vitrail.errors",
    "InputError": "vitrail.errors",
    "MissingExtraError": "vitrail.errors",
    "NotApplicableError": "vitrail.errors",
    "Predictor": "vitrail.inference.predictor",
    "Preprocessing": "vitrail.config",
    "Run": "vitrail.training.saved_run",
    "Stopped": "vitrail.errors",
    "TimmModel": "vitrail.model.timm_model",
    "TrainingError": "vitrail.errors",
    "TrainingLoader": "vitrail.data.loader",
    "VisionTransformer": "vitrail.model.vit",
    "VitrailError": "vitrail.errors",
    "WeightsError": "vitrail.errors",
    "bench": "vitrail.benchmark.bench",
    "calibrate": "vitrail.evaluation.calibrate",
    "check_data": "vitrail.data.check.check",
    "compare_models": "vitrail.evaluation.compare",
    "convert": "vitrail.weights.convert",
    "create_model": "vitrail.model.create",
    "evaluate": "vitrail.evaluation.evaluate",
    "examine_machine": "vitrail.system.doctor",
    "export": "vitrail.exporting.export",
    "fewshot": "vitrail.evaluation.fewshot",
    "find_similar": "vitrail.evaluation.neighbours",
    "finetune": "vitrail.workflows.finetune",
    "inspect": "vitrail.inspection.inspect",
    "list_models": "vitrail.model.catalogue",
    "load": "vitrail.weights.load",
    "open_data": "vitrail.data.open",
    "optimize": "vitrail.inference.optimize",
    "pack_data": "vitrail.data.packing.pack",
    "predict": "vitrail.inference.predict",
    "prepare": "vitrail.data.transforms.preprocess",
    "quickstart": "vitrail.workflows.quickstart",
    "record_attention": "vitrail.model.recording",
    "resize_position_embedding": "vitrail.model.positions",
    "run_suite": "vitrail.transfer.suite",
    "save": "vitrail.weights.save",
    "serve": "vitrail.serving.serve",
    "study": "vitrail.studies.run_study",
    "train": "vitrail.workflows.train",
}
"""The module of each public name."""

_ROOMS = ("inspection", "studies")
"""Modules that are reached through the package: `vitrail.inspection.attention_rollout(model, images)`."""

__all__ = [
    "Augmentation",
    "BitResNet",
    "ConfigError",
    "DataError",
    "Diverged",
    "EvaluationLoader",
    "ExportError",
    "InputError",
    "MissingExtraError",
    "NotApplicableError",
    "Predictor",
    "Preprocessing",
    "Run",
    "Stopped",
    "TimmModel",
    "TrainingError",
    "TrainingLoader",
    "VisionTransformer",
    "VitrailError",
    "WeightsError",
    "bench",
    "calibrate",
    "check_data",
    "compare_models",
    "convert",
    "create_model",
    "evaluate",
    "examine_machine",
    "export",
    "fewshot",
    "find_similar",
    "finetune",
    "inspect",
    "list_models",
    "load",
    "open_data",
    "optimize",
    "pack_data",
    "predict",
    "prepare",
    "quickstart",
    "record_attention",
    "resize_position_embedding",
    "run_suite",
    "save",
    "serve",
    "study",
    "train",
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
