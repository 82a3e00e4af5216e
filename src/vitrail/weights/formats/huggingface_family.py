"""What the families of transformers' Vision Transformers share. A family is a class with a table of names.

To add a family: subclass `Family` in one of the files huggingface_*.py and list it in `FAMILIES` of huggingface.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from vitrail.errors import WeightsError
from vitrail.model.architecture import Positive, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import (
    IMAGENET,
    FolderFiles,
    ForeignConfig,
    Tensors,
    check_agreement,
    count_blocks,
    guess_num_heads,
    infer_grid,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.known import KnownFacts
from vitrail.weights.tensor_rules import ADD_BATCH_AXIS, UNCHANGED, TensorRule, Transform, split_into, to_patch_kernel

GELUS = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "quick_gelu": "quick"}
IGNORED = ("decoder", "text_model.", "text_projection", "logit_scale", "logit_bias", "lm_head.")
"""Beginnings of the names of other parts of a model: the decoder of MAE, the text towers."""
UNUSED = ("embeddings.mask_token", "embeddings.position_ids", "visual_projection.")
"""Beginnings of the names of tensors that belong to the encoder and are not needed for its features."""
SIZES = ("image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes")
ALWAYS_FREE = (
    *(*SIZES, "dropout", "attention_dropout", "stochastic_depth", "gelu", "norm_eps"),
    "position_resize",  # changes nothing at the model's own size, and a conversion notes a difference
    "position_prefix",  # `position_rows` is compared instead
)


class TransformersConfig(ForeignConfig):
    """config.json of transformers, or the part of it that describes the vision tower."""

    model_type: str = ""
    architectures: list[str] = Field(default_factory=list)
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    hidden_act: str | None = None
    layer_norm_eps: float | None = None
    rms_norm_eps: float | None = None
    image_size: int | tuple[int, int] | None = None
    patch_size: int | tuple[int, int] | None = None
    num_channels: Positive = 3
    layerscale_value: float = 1.0
    layer_scale_init_value: float = 0.1
    id2label: dict[int, Any] = Field(default_factory=dict)
    rope_theta: float = 100.0
    pos_embed_shift: float | None = None
    pos_embed_jitter: float | None = None
    pos_embed_rescale: float | None = None
    is_native: bool = False
    problem_type: str = ""

    @classmethod
    def read(cls, folder_files: FolderFiles) -> TransformersConfig:
        """Read config.json; of a model with two towers, the part about images, with its labels."""
        values = dict(folder_files.json("config.json"))
        vision = values.get("vision_config")
        if isinstance(vision, dict):
            outer = {key: value for key, value in values.items() if key in ("architectures", "id2label")}
            values = {**vision, **outer, "model_type": vision.get("model_type") or values.get("model_type")}
        config: TransformersConfig = cls.parse(values, "config.json")
        return config


@dataclass(frozen=True)
class TensorNames:
    """The names of a family's tensors, without the prefix of the model; those in blocks, without the block's prefix.

    The defaults are ViT's.
    """

    patch: str = "embeddings.patch_embeddings.projection"
    class_token: str = "embeddings.cls_token"
    registers: str = ""
    position: str = "embeddings.position_embeddings"
    patch_norm: str = ""
    input_norm: str = ""
    norm: str = "layernorm"
    """The last norm, over all tokens."""
    pool_norm: str = ""
    classifiers: tuple[str, ...] = ("classifier",)
    """Possible names of the classifier; the first one there is counts."""

    layer: str = "encoder.layer.{i}."
    qkv: tuple[str, str, str] = (
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
    )
    out: str = "attention.output.dense"
    norm1: str = "layernorm_before"
    norm2: str = "layernorm_after"
    fc1: str = "intermediate.dense"
    fc2: str = "output.dense"
    gated: tuple[str, ...] = ()
    """The first layer of a SwiGLU: gate and value, or one name if they are stored together."""
    gated_fc2: str = ""
    scales: tuple[str, str] = ("layer_scale1.lambda1", "layer_scale2.lambda1")

    def first(self, name: str) -> str:
        """Return the full name of a tensor in the first block."""
        return self.layer.format(i=0) + name

    def list_marks(self) -> tuple[str, str]:
        """Return the names by which a family is recognised."""
        return f"{self.patch}.weight", self.first(f"{self.qkv[0]}.weight")


class Family:
    """One family of models in transformers: how it names tensors, and what its config says."""

    kind: ClassVar[str]
    """`model_type` in the config of a folder with this model alone."""
    title: ClassVar[str]
    """The beginning of its classes' names in transformers."""
    names: ClassVar[TensorNames] = TensorNames()
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    """What may stand before all names; the second one is written with a classifier."""
    statistics: ClassVar[Mapping[str, Any]] = IMAGENET
    """Mean and std of pixels where no file says them."""
    default_heads: ClassVar[int] = 12
    default_act: ClassVar[str] = "gelu"
    default_eps: ClassVar[float] = 1e-12
    eps_key: ClassVar[str] = "layer_norm_eps"
    position_resize: ClassVar[str] = "bicubic"
    free: ClassVar[tuple[str, ...]] = ()
    """Options of the architecture that may have any value, because files of this family say them."""
    computed: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of tensors that follow from sizes; they are kept and not used."""
    square_only: ClassVar[bool] = False
    """Whether transformers builds this family for square images only."""

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        """Return whether tensors, without their prefix, that have this family's marks are of this family."""
        return True

    def list_options(self, classifies: bool) -> dict[str, Any]:
        """Return the options that all models of this family have, with or without a classifier, beside the paper's."""
        return {}

    def find_prefix(self, tensors: Tensors, config: TransformersConfig) -> str | None:
        """Return the prefix of a checkpoint's names if it is of this family, else None."""
        for prefix in self.prefixes:
            if all(prefix + mark in tensors for mark in self.names.list_marks()):
                own = {name.removeprefix(prefix): info for name, info in tensors.items()}
                return prefix if self.fits(own, config) else None
        return None

    # Reading

    def choose_statistics(self, config: TransformersConfig) -> Mapping[str, Any]:
        """Return the mean and std for a checkpoint without a config of its preprocessing."""
        return self.statistics

    def read_architecture(
        self, own: Tensors, config: TransformersConfig, known: KnownFacts, notes: list[str]
    ) -> VitArchitecture:
        """Read the sizes from the shapes; those that the config names must agree."""
        names = self.names
        width, channels, side = self.read_patches(own, config)
        depth = count_blocks(own, names.layer.split("{i}")[0])
        swiglu = bool(names.gated) and names.first(f"{names.gated[0]}.weight") in own
        fc2 = names.gated_fc2 if swiglu else names.fc2
        mlp_dim = read_shape(own, names.first(f"{fc2}.weight"), 2)[1]
        check_agreement("config.json", config.model_dump(), self.list_sizes(width, depth, mlp_dim))
        classifier = next((f"{name}.weight" for name in names.classifiers if f"{name}.weight" in own), "")
        classes = read_size(own, classifier, 2) or 0
        hint = known.grid or self._read_grid(config, side)
        options: dict[str, Any] = {
            "position_resize": self.position_resize,
            "mlp": "swiglu" if swiglu else "gelu",
            "gelu": self.read_gelu(config, swiglu),
            "norm_eps": getattr(config, self.eps_key) or self.default_eps,
            **self._read_biases(own, fc2),
            **self.list_options(bool(classes)),
            **self.read_positions(own, config, side, hint, notes),
            **self.read_options(own, config, notes),
        }
        return VitArchitecture(
            in_channels=channels,
            patch_size=side,
            width=width,
            depth=depth,
            mlp_dim=mlp_dim,
            num_heads=self._read_num_heads(config, known, width, notes),
            num_classes=classes,
            **options,
        )

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        """Return the options in which models of this family differ."""
        return {}

    def read_gelu(self, config: TransformersConfig, swiglu: bool) -> str:
        """Return the form of GELU; with a SwiGLU, where there is none, check that its gate has a SiLU."""
        allowed = {"silu": "exact"} if swiglu else GELUS
        hidden_act = config.hidden_act or ("silu" if swiglu else self.default_act)
        if hidden_act not in allowed:
            raise WeightsError(f"config.json: hidden_act {hidden_act!r} is none of {', '.join(allowed)}")
        return allowed[hidden_act]

    def read_patches(self, own: Tensors, config: TransformersConfig) -> tuple[int, int, int]:
        """Return the width, the channels and the patch size."""
        kernel = read_shape(own, f"{self.names.patch}.weight", 4)
        return kernel[0], kernel[1], read_patch_size(kernel, (2, 3))

    def list_sizes(self, width: int, depth: int, mlp_dim: int) -> dict[str, int]:
        """Return the sizes under their names in the config."""
        return {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": mlp_dim}

    def read_positions(
        self, own: Tensors, config: TransformersConfig, side: int, hint: tuple[int, int] | None, notes: list[str]
    ) -> dict[str, Any]:
        """Return the image size and the kind of positions; here, a learned table."""
        name = self.names.position
        rows = own[name].shape[-2] if name in own and len(own[name].shape) >= 2 else read_shape(own, name, 2)[0]
        prefix = int(self.list_options(False).get("class_token", True))
        grid, _ = infer_grid(rows, {"class": prefix}, hint)
        return {"image_size": (grid[0] * side, grid[1] * side)}

    def _read_grid(self, config: TransformersConfig, side: int) -> tuple[int, int] | None:
        size = config.image_size
        size = (size, size) if isinstance(size, int) else size
        return (size[0] // side, size[1] // side) if size else None

    def _read_biases(self, own: Tensors, fc2: str) -> dict[str, bool]:
        first, (query, key, value) = self.names.first, self.names.qkv
        has = {part: first(f"{part}.bias") in own for part in (query, key, value, self.names.out, fc2)}
        if has[query] != has[value] or (has[key] and not has[query]):
            raise WeightsError("its queries, keys and values have biases in a combination that vitrail does not have")
        return {
            "qkv_bias": has[query],
            "key_bias": has[key] or not has[query],
            "out_bias": has[self.names.out],
            "mlp_bias": has[fc2],
        }

    def _read_num_heads(self, config: TransformersConfig, known: KnownFacts, width: int, notes: list[str]) -> int:
        # Configs of two towers often leave out what is the default.
        default = self.default_heads if config.model_type else None
        return config.num_attention_heads or known.num_heads or default or guess_num_heads(width, notes)

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        """Return the beginnings of names, without the prefix, of tensors that are kept and not used."""
        return list(UNUSED)

    # Names

    def list_inner_rules(self, a: VitArchitecture) -> list[TensorRule]:
        """Return the rules for tensors whose names the prefix stands before."""
        names, layer, block = self.names, self.names.layer, "encoder.blocks.{i}."
        qkv = [layer + part for part in names.qkv]
        table = UNCHANGED if names.position.endswith(".weight") else ADD_BATCH_AXIS
        rules = [
            TensorRule("patch_embed.projection.weight", f"{names.patch}.weight", self.make_kernel_transform(a)),
            TensorRule("patch_embed.projection.bias", f"{names.patch}.bias"),
            TensorRule("class_token", names.class_token, self.make_class_transform()),
            TensorRule("registers", names.registers, ADD_BATCH_AXIS),
            TensorRule("position_embedding.0.table", names.position, table),
            TensorRule("patch_norm.*", f"{names.patch_norm}.*"),
            TensorRule("input_norm.*", f"{names.input_norm}.*"),
            TensorRule(f"{block}norm1.*", f"{layer}{names.norm1}.*"),
            TensorRule(f"{block}attention.qkv.*", [f"{part}.*" for part in qkv], split_into(3)),
            TensorRule(f"{block}attention.q_bias", f"{qkv[0]}.bias"),
            TensorRule(f"{block}attention.v_bias", f"{qkv[2]}.bias"),
            TensorRule(f"{block}attention.out.*", f"{layer}{names.out}.*"),
            TensorRule(f"{block}scale1.factor", layer + names.scales[0]),
            TensorRule(f"{block}norm2.*", f"{layer}{names.norm2}.*"),
            TensorRule(f"{block}scale2.factor", layer + names.scales[1]),
            TensorRule("encoder.norm.*", f"{names.norm}.*"),
            TensorRule("pool_norm.*", f"{names.pool_norm}.*"),
        ]
        if a.mlp == "swiglu":
            gated = [f"{layer}{name}.*" for name in names.gated]
            rules.append(TensorRule(f"{block}mlp.fc1.*", gated, split_into(len(gated))))
        else:
            rules.append(TensorRule(f"{block}mlp.fc1.*", f"{layer}{names.fc1}.*"))
        fc2 = names.gated_fc2 if a.mlp == "swiglu" else names.fc2
        return [*rules, TensorRule(f"{block}mlp.fc2.*", f"{layer}{fc2}.*")]

    def list_outer_rules(self, a: VitArchitecture) -> list[TensorRule]:
        """Return the rules for tensors without the prefix: the classifier's."""
        return [TensorRule("head.*", f"{self.names.classifiers[0]}.*")]

    def make_kernel_transform(self, a: VitArchitecture) -> Transform:
        """Return how the patch projection is stored."""
        return to_patch_kernel(a.in_channels, a.patch_size)

    def make_class_transform(self) -> Transform:
        """Return how the class token is stored."""
        return ADD_BATCH_AXIS

    # Writing

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        """Return why a model cannot be written as one of this family, or None if it can."""
        expected = self.list_options(bool(a.num_classes))
        fixed = [name for name in VitArchitecture.model_fields if name not in (*ALWAYS_FREE, *self.free)]
        defaults = {name: VitArchitecture.model_fields[name].default for name in fixed} | expected
        if beyond := [name for name in fixed if getattr(a, name) != defaults[name]]:
            return f"transformers' {self.title} has no option for this model's {', '.join(beyond)}"
        if a.position == "learned-1d" and a.position_rows != self.count_position_rows(a):
            return f"transformers' {self.title} gives positions to other tokens than this model"
        if self.square_only and a.image_size[0] != a.image_size[1]:
            return f"transformers' {self.title} takes square images only"
        return None

    def count_position_rows(self, a: VitArchitecture) -> int:
        """Return the number of tokens before the patches that have a row in the position table."""
        return int(a.class_token)

    def choose_prefix(self, model: ImageModel) -> str:
        """Return the prefix to write a model with."""
        return self.prefixes[1] if model.num_classes else ""

    def name_class(self, a: VitArchitecture) -> str:
        """Return the class of transformers that reads what is written."""
        return f"{self.title}ForImageClassification" if a.num_classes else f"{self.title}Model"

    def make_config(self, model: ImageModel, a: VitArchitecture) -> dict[str, Any]:
        """Return the content of config.json, without labels."""
        return {**self.make_vision_config(a), "architectures": [self.name_class(a)], "model_type": self.kind}

    def list_processor_keys(self, a: VitArchitecture) -> dict[str, Any]:
        """Return what preprocessor_config.json says for this family beside what it says for all."""
        return {}

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        """Return the sizes and options under transformers' names."""
        height, width = a.image_size
        act = next(theirs for theirs, ours in GELUS.items() if ours == a.gelu)
        return {
            **self.list_sizes(a.width, a.depth, a.mlp_dim),
            "num_attention_heads": a.num_heads,
            "hidden_act": "silu" if a.mlp == "swiglu" else act,
            self.eps_key: a.norm_eps,
            "image_size": height if height == width else [height, width],
            "patch_size": a.patch_size,
            "num_channels": a.in_channels,
        }
