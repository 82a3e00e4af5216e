"""torchvision's Vision Transformers, also those with a convolutional stem."""

from __future__ import annotations

from typing import Any

from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, ConvLayer, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import (
    IMAGENET,
    CheckpointInfo,
    CompanionFile,
    FolderFiles,
    Tensors,
    WeightFormat,
    build_preprocessing,
    find_unsupported_options,
    guess_num_heads,
    infer_grid,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.tensor_rules import ADD_BATCH_AXIS, UNCHANGED, TensorRule, to_patch_kernel

OLD_DIALECT = "linear"
"""The dialect of files from before 2022, which name the layers of the MLP linear_1 and linear_2."""
LAYER = "encoder.layers.encoder_layer_{i}."
STEM = "conv_proj.conv_bn_relu_{i}."


class TorchvisionFormat(WeightFormat):
    """torchvision's format, with names such as `encoder.layers.encoder_layer_0.self_attention.in_proj_weight`."""

    name = "torchvision"
    weights_file = "model.pth"

    def recognises(self, tensors: Tensors) -> bool:
        return "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" in tensors and "class_token" in tensors

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Read the sizes from the shapes; GELU is the exact form, and mean and std are ImageNet's."""
        notes: list[str] = []
        companion = CompanionFile.read(folder_files)
        width = read_shape(tensors, "class_token", 3)[2]
        stem: tuple[ConvLayer, ...] | None = None
        if "conv_proj.weight" in tensors:
            kernel = read_shape(tensors, "conv_proj.weight", 4)
            channels, side = kernel[1], read_patch_size(kernel, (2, 3))
        else:
            channels, side, stem = _stem(tensors, notes)
        rows = read_shape(tensors, "encoder.pos_embedding", 3)[1]
        grid, _ = infer_grid(rows, {"class": 1}, folder_files.known.grid)
        dialect = "" if "encoder.layers.encoder_layer_0.mlp.0.weight" in tensors else OLD_DIALECT
        architecture = VitArchitecture(
            image_size=(grid[0] * side, grid[1] * side),
            in_channels=channels,
            patch_size=side,
            width=width,
            depth=_layers(tensors),
            mlp_dim=read_shape(tensors, f"encoder.layers.encoder_layer_0.mlp.{_mlp(dialect)[0]}.weight", 2)[0],
            num_heads=folder_files.known.num_heads or companion.num_heads or guess_num_heads(width, notes),
            num_classes=read_size(tensors, "heads.head.weight", 2) or 0,
            representation_size=read_size(tensors, "heads.pre_logits.weight", 2),
            conv_stem=stem,
            position_resize="bicubic-corners",
            gelu="exact",
        )
        notes.append("images are resized, cropped and scaled as for torchvision's ViT-B/16: its files do not say")
        preprocessing = build_preprocessing(
            architecture.image_size,
            channels,
            IMAGENET,
            resize="cover",
            crop_fraction=0.875,
            crop_rounding="even",
            interpolation="bilinear",
        )
        licence = folder_files.read_licence()
        checkpoint = CheckpointInfo(architecture, preprocessing, dialect=dialect, licence=licence, notes=notes)
        return companion.complete(checkpoint)

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        assert isinstance(architecture, VitArchitecture)
        first, second = _mlp(dialect)
        last = "conv_proj.conv_last" if architecture.conv_stem else "conv_proj"
        kernel = UNCHANGED
        if not architecture.conv_stem:
            kernel = to_patch_kernel(architecture.in_channels, architecture.patch_size)
        return [
            TensorRule("patch_embed.projection.weight", f"{last}.weight", kernel),
            TensorRule("patch_embed.projection.bias", f"{last}.bias"),
            TensorRule("patch_embed.layers.{i}.0.*", STEM + "0.*"),
            TensorRule("patch_embed.layers.{i}.1.*", STEM + "1.*"),
            *(
                TensorRule(f"patch_embed.layers.{{i}}.1.{name}", f"{STEM}1.{name}")
                for name in ("running_mean", "running_var", "num_batches_tracked")
            ),
            TensorRule("class_token", "class_token", ADD_BATCH_AXIS),
            TensorRule("position_embedding.0.table", "encoder.pos_embedding", ADD_BATCH_AXIS),
            TensorRule("encoder.blocks.{i}.norm1.*", LAYER + "ln_1.*"),
            TensorRule("encoder.blocks.{i}.attention.qkv.*", LAYER + "self_attention.in_proj_*"),
            TensorRule("encoder.blocks.{i}.attention.out.*", LAYER + "self_attention.out_proj.*"),
            TensorRule("encoder.blocks.{i}.norm2.*", LAYER + "ln_2.*"),
            TensorRule("encoder.blocks.{i}.mlp.fc1.*", f"{LAYER}mlp.{first}.*"),
            TensorRule("encoder.blocks.{i}.mlp.fc2.*", f"{LAYER}mlp.{second}.*"),
            TensorRule("encoder.norm.*", "encoder.ln.*"),
            TensorRule("head.hidden.*", "heads.pre_logits.*"),
            TensorRule("head.linear.*", "heads.head.*"),
            TensorRule("head.*", "heads.head.*"),
        ]

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture) or architecture.backbone is not None:
            return "torchvision has neither BiT ResNets nor hybrids"
        if architecture.gelu != "exact":
            return f"torchvision computes the exact GELU, and this model was trained with the {architecture.gelu} form"
        if beyond := find_unsupported_options(architecture, "conv_stem"):
            return f"torchvision's Vision Transformer has no option for this model's {beyond}"
        if architecture.image_size[0] != architecture.image_size[1]:
            return "torchvision's Vision Transformer takes square images only"
        stem = [(layer.norm, layer.activation, layer.stride) for layer in architecture.conv_stem or ()]
        if stem != [("batch", "relu", 2)] * len(stem):
            return "torchvision's files do not describe a stem: stride 2, batch norm and ReLU are assumed"
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        return model.origin.dialect if model.origin is not None and model.origin.format == self.name else ""

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        return CompanionFile.describe_model(model)


def _mlp(dialect: str) -> tuple[str, str]:
    return ("linear_1", "linear_2") if dialect == OLD_DIALECT else ("0", "3")


def _layers(tensors: Tensors) -> int:
    start = "encoder.layers.encoder_layer_"
    return len({name[len(start) :].split(".")[0] for name in tensors if name.startswith(start)})


def _stem(tensors: Tensors, notes: list[str]) -> tuple[int, int, tuple[ConvLayer, ...]]:
    """Return the channels, the total stride and the layers of the stem; every published stem has stride 2."""
    layers = []
    count = len({name.split(".")[1] for name in tensors if name.startswith("conv_proj.conv_bn_relu_")})
    channels = read_shape(tensors, "conv_proj.conv_bn_relu_0.0.weight", 4)[1]
    for index in range(count):
        out, _, kernel, _ = read_shape(tensors, f"conv_proj.conv_bn_relu_{index}.0.weight", 4)
        layers.append(ConvLayer(channels=out, kernel=kernel, stride=2))
    if not layers:
        raise WeightsError("the convolutional stem has no layers")
    notes.append("each layer of the convolutional stem halves the image: the file does not say")
    return channels, 2 ** len(layers), tuple(layers)
