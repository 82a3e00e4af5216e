"""BiT ResNets in timm's format, and the ResNets inside its hybrids."""

from __future__ import annotations

from vitrail.errors import WeightsError
from vitrail.model.architecture import NORM_GROUPS, Backbone, ResNetArchitecture
from vitrail.weights.formats.base import (
    HALF,
    CheckpointInfo,
    Tensors,
    count_blocks,
    list_residual_units,
    read_shape,
    read_size,
)
from vitrail.weights.formats.timm_config import TimmConfig, read_preprocessing
from vitrail.weights.tensor_rules import TensorRule, Transform

HEAD_OF_RESNET = Transform(lambda parts: parts[0].flatten(1), lambda ours: [ours[:, :, None, None]])
IN_HYBRID = "patch_embed.backbone."
"""What stands before the names of a hybrid's ResNet."""


def describe_resnet(own: Tensors, config: TimmConfig) -> CheckpointInfo:
    """Describe a BiT ResNet from the shapes of its tensors."""
    notes: list[str] = []
    if config.pretrained.input_size is None:
        notes.append("image size 448, BiT's own: the file does not say")
    architecture = ResNetArchitecture(
        image_size=(config.pretrained.input_size or (3, 448, 448))[1:],
        in_channels=read_shape(own, "stem.conv.weight", 4)[1],
        num_classes=read_size(own, "head.fc.weight", 4) or 0,
        backbone=read_backbone(own, "", "bit"),
    )
    return CheckpointInfo(architecture, read_preprocessing(config, architecture, HALF, notes), notes=notes)


def read_backbone(own: Tensors, prefix: str, form: str) -> Backbone:
    """Return the ResNet whose names begin with `prefix`: any number of stages, down to the root alone."""
    stem = find_stem(own, prefix)
    channels = read_size(own, f"{stem}conv.weight", 4)
    normed = f"{stem}norm.weight" in own
    if channels is None or channels % NORM_GROUPS or (form == "hybrid") != normed:
        raise WeightsError("its ResNet is neither a hybrid's of the paper nor BiT's")
    stages = range(count_blocks(own, f"{prefix}stages."))
    return Backbone(
        blocks=tuple(count_blocks(own, f"{prefix}stages.{stage}.blocks.") for stage in stages),
        width_factor=1 if channels % 64 else channels // 64,
        stage_channels=channels if channels % 64 else 64,
        form=form,
        norm_eps=1e-5,
        standardise_by="variance",
        standardise_eps=1e-8,
    )


def find_stem(own: Tensors, prefix: str) -> str:
    """Return what stands before the names of the root: timm has no word for it in a hybrid without stages."""
    return prefix if f"{prefix}conv.weight" in own else f"{prefix}stem."


def list_resnet_rules(a: ResNetArchitecture) -> list[TensorRule]:
    """Return the rules for a BiT ResNet."""
    return [
        *list_backbone_rules(a.backbone, ""),
        TensorRule("norm.*", "norm.*"),
        TensorRule("head.weight", "head.fc.weight", HEAD_OF_RESNET),
        TensorRule("head.bias", "head.fc.bias"),
    ]


def list_backbone_rules(backbone: Backbone, prefix: str) -> list[TensorRule]:
    """Return the rules for a ResNet whose names begin with `prefix`."""
    stem = f"{prefix}stem." if backbone.blocks else prefix
    rules = [
        TensorRule("backbone.root.weight", f"{stem}conv.weight"),
        TensorRule("backbone.root_norm.*", f"{stem}norm.*"),
    ]
    for ours, stage, block in list_residual_units(backbone):
        theirs = f"{prefix}stages.{stage}.blocks.{block}"
        for part in (1, 2, 3):
            rules.append(TensorRule(f"{ours}.conv{part}.weight", f"{theirs}.conv{part}.weight"))
            rules.append(TensorRule(f"{ours}.norm{part}.*", f"{theirs}.norm{part}.*"))
        rules += [
            TensorRule(f"{ours}.shortcut.weight", f"{theirs}.downsample.conv.weight"),  # BiT's
            TensorRule(f"{ours}.shortcut.0.weight", f"{theirs}.downsample.conv.weight"),
            TensorRule(f"{ours}.shortcut.1.*", f"{theirs}.downsample.norm.*"),
        ]
    return rules
