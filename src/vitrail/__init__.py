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
    from vitrail.config import Preprocessing
    from vitrail.errors import ConfigError, InputError, MissingExtraError, VitrailError
    from vitrail.model.bit import BitResNet
    from vitrail.model.create import create_model
    from vitrail.model.positions import resize_position_embedding
    from vitrail.model.recording import record_attention
    from vitrail.model.vit import VisionTransformer

_HOMES = {
    "BitResNet": "vitrail.model.bit",
    "ConfigError": "vitrail.errors",
    "InputError": "vitrail.errors",
    "MissingExtraError": "vitrail.errors",
    "Preprocessing": "vitrail.config",
    "VisionTransformer": "vitrail.model.vit",
    "VitrailError": "vitrail.errors",
    "create_model": "vitrail.model.create",
    "record_attention": "vitrail.model.recording",
    "resize_position_embedding": "vitrail.model.positions",
}

__all__ = [
    "BitResNet",
    "ConfigError",
    "InputError",
    "MissingExtraError",
    "Preprocessing",
    "VisionTransformer",
    "VitrailError",
    "create_model",
    "record_attention",
    "resize_position_embedding",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
