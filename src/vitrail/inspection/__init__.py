"""The paper's figures for any model: embedding filters, position embeddings, attention; and a report of them."""

from __future__ import annotations

from vitrail.inspection.measure.attention import (
    attention_rollout,
    head_attention,
    mean_attention_distance,
    rollout_by_layer,
)
from vitrail.inspection.measure.components import patch_components, patch_features
from vitrail.inspection.measure.filters import embedding_filters
from vitrail.inspection.measure.positions import neighbour_test, position_similarity
from vitrail.inspection.measure.similarity import layer_similarity, token_similarity

__all__ = [
    "attention_rollout",
    "embedding_filters",
    "head_attention",
    "layer_similarity",
    "mean_attention_distance",
    "neighbour_test",
    "patch_components",
    "patch_features",
    "position_similarity",
    "rollout_by_layer",
    "token_similarity",
]
