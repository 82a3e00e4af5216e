"""timm's format, and the releases with similar names: DeiT, DeiT III, DINO, DINOv2 and MAE.

It holds Vision Transformers, hybrids and BiT ResNets. Models are always written with timm's own names. timm_vit.py and
timm_resnet.py describe what a file holds and list the rules for its names; timm_config.py reads config.json,
timm_names.py says what follows from a model's name, and timm_write.py writes config.json.
"""

from __future__ import annotations

from typing import Any

from vitrail.model.architecture import Architecture, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.create import build_empty_model
from vitrail.weights.formats.base import (
    CheckpointInfo,
    FolderFiles,
    Tensors,
    WeightFormat,
    check_agreement,
    explain_backbone_refusal,
)
from vitrail.weights.formats.timm_config import read_config, read_labels
from vitrail.weights.formats.timm_resnet import describe_resnet, list_resnet_rules
from vitrail.weights.formats.timm_vit import REFUSALS, describe_vit, list_vit_rules
from vitrail.weights.formats.timm_write import choose_words, explain_vit_refusal, write_config
from vitrail.weights.tensor_rules import TensorRule, add_prefix

PREFIXES = ("", "module.", "backbone.", "module.backbone.", "model.", "encoder.", "visual.trunk.", "timm_model.")
"""Prefixes that training programs put before the names."""
MARKS = ("blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight", *REFUSALS)
"""Names of which a Vision Transformer of timm's has one."""


class TimmFormat(WeightFormat):
    """Names such as `blocks.0.attn.qkv.weight` and `stages.0.blocks.0.conv1.weight`."""

    name = "timm"

    def recognises(self, tensors: Tensors) -> bool:
        return _find_prefix(tensors) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Read sizes from the shapes; take heads, pooling and GELU from the config, else guess them."""
        prefix = _find_prefix(tensors) or ""
        own = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        config = read_config(folder_files)
        if "stem.conv.weight" in own:
            checkpoint = describe_resnet(own, config)
        else:
            checkpoint = describe_vit(own, config, folder_files.known, facebook=folder_files.wrapper_key == "model")
        checkpoint.dialect = f"{prefix}|{checkpoint.dialect}"
        checkpoint.labels = read_labels(config, checkpoint.architecture.num_classes, checkpoint.notes)
        checkpoint.licence = config.pretrained.license or folder_files.read_licence()
        checkpoint.unused_tensors = [prefix + name for name in checkpoint.unused_tensors]
        checkpoint.ignored_tensors = [prefix + name for name in checkpoint.ignored_tensors]
        checkpoint.ignored_tensors += [name for name in tensors if not name.startswith(prefix)]
        actual = {"num_classes": checkpoint.architecture.num_classes}
        check_agreement("config.json", {"num_classes": config.num_classes}, actual)
        return checkpoint

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        """Return the rules; `dialect` is `prefix|release`, with words such as `+split-qkv` behind the release."""
        prefix, _, words = dialect.partition("|")
        if isinstance(architecture, ResNetArchitecture):
            return add_prefix(list_resnet_rules(architecture), prefix)
        return add_prefix(list_vit_rules(architecture, words), prefix)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture):
            return explain_backbone_refusal(architecture.backbone)
        return explain_vit_refusal(architecture)

    def adapt_model(self, model: ImageModel) -> ImageModel:
        # In timm all tokens before the patches have a position, or none has.
        a = model.architecture
        if isinstance(a, VitArchitecture) and a.registers and a.class_token and a.position_rows == 1:
            return _add_class_position(model, a)
        return model

    def choose_dialect(self, model: ImageModel) -> str:
        return f"|{_choose_words(model)}"  # without a prefix: timm must be able to read it

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        return {"config.json": write_config(model, _choose_words(model))}


def _choose_words(model: ImageModel) -> str:
    a, origin = model.architecture, model.origin
    if not isinstance(a, VitArchitecture):
        return ""
    return choose_words(a, origin.dialect.partition("|")[2] if origin is not None and origin.format == "timm" else "")


def _find_prefix(tensors: Tensors) -> str | None:
    for prefix in PREFIXES:
        if f"{prefix}patch_embed.proj.weight" in tensors or f"{prefix}patch_embed.backbone.0.conv.weight" in tensors:
            if any(f"{prefix}{mark}" in tensors for mark in MARKS):
                return prefix
        elif f"{prefix}stem.conv.weight" in tensors and f"{prefix}stages.0.blocks.0.conv1.weight" in tensors:
            return prefix
    return None


def _add_class_position(model: ImageModel, a: VitArchitecture) -> ImageModel:
    """Return a model that computes the same, with the class token's position added to the token itself."""
    fields = {name: getattr(a, name) for name in VitArchitecture.model_fields}
    added = build_empty_model(VitArchitecture(**{**fields, "position_prefix": "none"}))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    table = state["position_embedding.0.table"]
    state |= {"class_token": state["class_token"] + table[:1], "position_embedding.0.table": table[1:]}
    added.load_state_dict(state, assign=True)
    added.preprocessing, added.labels, added.origin = model.preprocessing, model.labels, model.origin
    return added
