"""Compare the second output of an export, the embedding by which it tells unknown images, with the model's own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import ExportError
from vitrail.exporting.check import COSINE, EXACT
from vitrail.exporting.graphs import ExportGraph
from vitrail.inference.sessions import open_session
from vitrail.inspection.images import InspectionImages, normalise_batch

FEW = 16
"""Images to compare on: logits are compared on all, and are computed from the same features."""


def check_embedding(graph: ExportGraph, path: Path, picked: InspectionImages, is_rounded: bool) -> None:
    """Raise an ExportError if the embedding differs by more than is allowed for logits, or in int8 by its direction."""
    session = open_session(path, torch.get_num_threads())
    if not session.has_embedding:
        raise ExportError("the export gives no embedding, by which the model tells unknown images")
    images = normalise_batch(picked.measured[:FEW], graph.model)
    with torch.inference_mode():
        expected = graph.model.embed(images)
    parts = [session.run_all(images[row : row + 1].numpy())[1] for row in range(len(images))]
    found = torch.cat([torch.from_numpy(part) for part in parts])
    if not _is_close(expected, found, is_rounded):
        raise ExportError(
            "the export computes another embedding than its model, and would not tell unknown images as the model "
            "does, so nothing was written"
        )


def _is_close(expected: Tensor, found: Tensor, is_rounded: bool) -> bool:
    """Return whether embeddings agree; the comparisons are written so that NaN fails too."""
    if expected.shape != found.shape:
        return False
    if is_rounded:
        return bool(F.cosine_similarity(expected, found).min() >= COSINE)
    allowed = EXACT * max(1.0, float(expected.abs().max()) / 10)
    return bool((expected - found).abs().max() <= allowed)
