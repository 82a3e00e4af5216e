"""transformers' BEiT (also BEiT v2, whose files have its names) and data2vec-vision: relative biases, keys without."""

from __future__ import annotations

from typing import Any, ClassVar

from vitrail.errors import WeightsError
from vitrail.model.architecture import VitArchitecture
from vitrail.weights.formats.base import HALF, Tensors, infer_relative_grid, read_shape
from vitrail.weights.formats.huggingface_family import Family, TensorNames, TransformersConfig
from vitrail.weights.tensor_rules import TensorRule

TABLE = "relative_position_bias.relative_position_bias_table"
OWN_TABLE = "attention.attention." + TABLE
SHARED_TABLE = "encoder." + TABLE


class Beit(Family):
    """BEiT. `embed` gives the average of the patches after the pooler's norm, or the class token (config)."""

    kind, title, prefixes = "beit", "Beit", ("", "beit.")
    names = TensorNames(scales=("lambda_1", "lambda_2"), pool_norm="pooler.layernorm")
    statistics = HALF
    position_resize = "bilinear"
    computed: ClassVar[tuple[str, ...]] = ("relative_position_index",)
    square_only = True  # of a table that is not square, transformers exchanges rows and columns
    free: ClassVar[tuple[str, ...]] = (
        "position",
        "position_at",
        "layer_scale",
        "pool",
        "norm_after_pool",
        "final_norm",
    )
    poolings: ClassVar[tuple[tuple[str, bool, bool], ...]] = (("average", True, True), ("class", False, True))
    """Pooling, whether a norm follows it, and whether there is a last norm."""

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        first, (query, key, _) = self.names.first, self.names.qkv
        biased = first(f"{query}.bias") in own and first(f"{key}.bias") not in own
        return biased and config.model_type in ("", self.kind)

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"key_bias": False, "class_token": True}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        scaled = self.names.first(self.names.scales[0]) in own
        options: dict[str, Any] = {"layer_scale": config.layer_scale_init_value if scaled else None}
        if "pooler.layernorm.weight" in own:
            return {**options, "pool": "average", "norm_after_pool": True}
        if "lm_head.weight" in own:  # pre-training: the norm of the head that predicts visual words is the last one
            return {**options, "pool": "average"}
        if "layernorm.weight" in own:
            return {**options, "pool": "class"}
        notes.append("it has no last norm: features are averaged over the patches as they are")
        return {**options, "pool": "average", "final_norm": False}

    def read_positions(
        self, own: Tensors, config: TransformersConfig, side: int, hint: tuple[int, int] | None, notes: list[str]
    ) -> dict[str, Any]:
        tables = {
            "input": self.names.position in own,
            "every-layer": self.names.first(OWN_TABLE) in own,
            "shared": SHARED_TABLE in own,
        }
        if sum(tables.values()) != 1:
            raise WeightsError("it has position tables of several kinds, or none: vitrail has one kind at a time")
        if tables["input"]:
            return {**super().read_positions(own, config, side, hint, notes), "position_resize": "bicubic"}
        name = SHARED_TABLE if tables["shared"] else self.names.first(OWN_TABLE)
        grid = infer_relative_grid(read_shape(own, name, 2)[0], True, hint)
        at = "shared" if tables["shared"] else "every-layer"
        return {"image_size": (grid[0] * side, grid[1] * side), "position": "relative-bias", "position_at": at}

    def list_inner_rules(self, a: VitArchitecture) -> list[TensorRule]:
        return [
            TensorRule("encoder.blocks.{i}.attention.relative_bias.table", self.names.layer + OWN_TABLE),
            TensorRule("relative_bias.table", SHARED_TABLE),
            *super().list_inner_rules(a),
        ]

    def list_outer_rules(self, a: VitArchitecture) -> list[TensorRule]:
        pretraining = a.pool == "average" and not a.norm_after_pool
        return [
            *([TensorRule("encoder.norm.*", "layernorm.*")] if pretraining else []),
            *super().list_outer_rules(a),
        ]

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        tables = [("learned-1d", "input"), ("relative-bias", "every-layer"), ("relative-bias", "shared")]
        if (a.position, a.position_at) not in tables:
            return f'transformers\' {self.title} has no position embedding "{a.position}" at "{a.position_at}"'
        if (a.pool, a.norm_after_pool, a.final_norm) not in self.poolings:
            return f"transformers' {self.title} pools by average with a norm after it, or by class token"
        return super().explain_refusal(a)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        config = super().make_vision_config(a)
        return config | {
            "hidden_dropout_prob": a.dropout,
            "attention_probs_dropout_prob": a.attention_dropout,
            "drop_path_rate": a.stochastic_depth,
            "layer_scale_init_value": 0.0 if a.layer_scale is None else a.layer_scale,
            "use_absolute_position_embeddings": a.position == "learned-1d",
            "use_relative_position_bias": a.position_at == "every-layer",
            "use_shared_relative_position_bias": a.position_at == "shared",
            "use_mean_pooling": a.pool == "average",
            "use_mask_token": False,
        }


class Data2VecVision(Beit):
    """data2vec-vision: BEiT under another name."""

    kind, title, prefixes = "data2vec-vision", "Data2VecVision", ("", "data2vec_vision.")
    poolings = (*Beit.poolings, ("average", False, False))
