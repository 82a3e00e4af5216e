"""What an export carries beside its weights: enough to prepare an image and to name what came out."""

from __future__ import annotations

import json

from vitrail import __version__
from vitrail.inference.predictor import labels_of
from vitrail.model.base import ImageModel


def carried(model: ImageModel) -> dict[str, str]:
    """Keys and texts; labels and licence only where they are known."""
    facts = {
        "vitrail": __version__,
        "architecture": model.architecture.model_dump_json(exclude_defaults=True),
        "preprocessing": model.preprocessing.model_dump_json(),
    }
    if model.labels is not None:
        facts["labels"] = json.dumps(labels_of(model), ensure_ascii=False)
        if labels_of(model) != tuple(model.labels):
            facts["classes"] = json.dumps(model.labels, ensure_ascii=False)
    if model.origin is not None and model.origin.licence is not None:
        facts["licence"] = model.origin.licence
    return facts
