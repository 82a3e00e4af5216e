"""Folders of Hugging Face's transformers: plain encoders and vision towers, alone or beside a text tower.

The families stand in huggingface_vits.py, huggingface_towers.py and huggingface_beit.py.
"""

from __future__ import annotations

from typing import Any

from vitrail.errors import WeightsError, escape_unprintable
from vitrail.model.architecture import Architecture, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import Tags
from vitrail.weights.formats.base import (
    CheckpointInfo,
    FolderFiles,
    Tensors,
    WeightFormat,
    describe_left_out_labels,
)
from vitrail.weights.formats.huggingface_beit import Beit, Data2VecVision
from vitrail.weights.formats.huggingface_family import IGNORED, Family, TransformersConfig
from vitrail.weights.formats.huggingface_processor import read_preprocessor, write_preprocessor
from vitrail.weights.formats.huggingface_towers import PROJECTION, Aimv2Tower, ClipTower, Siglip2Tower, SiglipTower
from vitrail.weights.formats.huggingface_vits import Deit, Dinov2, Dinov2WithRegisters, Dinov3, IJepa, Vit
from vitrail.weights.tensor_rules import TensorRule, add_prefix

PROBLEM_TYPES = {"tags": "multi_label_classification", "numbers": "regression"}
"""What config.json of transformers calls the kinds of tasks that it knows."""
FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        Data2VecVision(),
        Beit(),
        Dinov2WithRegisters(),
        Dinov2(),
        Deit(),
        IJepa(),
        Vit(),
        Dinov3(),
        ClipTower(),
        SiglipTower(),
        Siglip2Tower(),
        Aimv2Tower(),
    )
}
"""By `model_type`, in the order in which they are tried: those with something of their own before ViT."""


class HuggingFaceFormat(WeightFormat):
    """transformers' format, with names such as `vit.encoder.layer.0.attention.attention.query.weight`."""

    name = "huggingface"

    def recognises(self, tensors: Tensors) -> bool:
        return _find_family(tensors, TransformersConfig()) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        config = TransformersConfig.read(folder_files)
        found = _find_family(tensors, config) or _find_family(tensors, TransformersConfig())
        assert found is not None
        family, prefix = found
        own = {name.removeprefix(prefix): info for name, info in tensors.items()}
        notes: list[str] = []
        architecture = family.read_architecture(own, config, folder_files.known, notes)
        if not architecture.num_classes and any("ForImageClassification" in name for name in config.architectures):
            raise WeightsError(f"config.json says {config.architectures[0]}, but the weights have no classifier")
        unused = tuple(family.list_unused(own, architecture))
        if PROJECTION in tensors:
            notes.append("its projection into the space of texts is kept and not applied: features are those before it")
        return CheckpointInfo(
            architecture,
            read_preprocessor(folder_files, architecture, family.choose_statistics(config), notes),
            dialect=f"{family.kind}|{prefix}",
            labels=(labels := _read_labels(config, architecture.num_classes, notes)),
            task=Tags(names=labels) if labels and config.problem_type == PROBLEM_TYPES["tags"] else None,
            licence=folder_files.read_licence(),
            unused_tensors=[
                name
                for name in tensors
                if name.removeprefix(prefix).startswith(unused) or name.endswith(family.computed)
            ],
            ignored_tensors=[name for name in tensors if name.startswith(IGNORED)],
            notes=notes,
        )

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        assert isinstance(architecture, VitArchitecture)
        kind, _, prefix = dialect.partition("|") if "|" in dialect else (_find_closest_kind(architecture), "", dialect)
        family = FAMILIES[kind]
        return family.list_outer_rules(architecture) + add_prefix(family.list_inner_rules(architecture), prefix)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture) or architecture.backbone is not None:
            return "vitrail writes plain Vision Transformers for transformers, no ResNets and no hybrids"
        if any(family.explain_refusal(architecture) is None for family in FAMILIES.values()):
            return None
        return FAMILIES[_find_closest_kind(architecture)].explain_refusal(architecture)

    def choose_dialect(self, model: ImageModel) -> str:
        family, origin = choose_family(model), model.origin
        prefix = family.choose_prefix(model)
        if origin is not None and origin.format == self.name and origin.dialect == prefix:
            return prefix  # native folders from before there were many families have no word for the family
        return f"{family.kind}|{prefix}"

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        a = model.architecture
        assert isinstance(a, VitArchitecture)
        family = choose_family(model)
        config = family.make_config(model, a)
        config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
        if a.num_classes:
            labels = model.labels or [f"LABEL_{index}" for index in range(a.num_classes)]
            config["id2label"] = {str(index): label for index, label in enumerate(labels)}
            config["label2id"] = {label: index for index, label in enumerate(labels)}
        if model.stored_task is not None and model.stored_task.kind in PROBLEM_TYPES:
            config["problem_type"] = PROBLEM_TYPES[model.stored_task.kind]
        processor = {**write_preprocessor(model), **family.list_processor_keys(a)}
        return {"config.json": config, "preprocessor_config.json": processor}

    def describe_lost_task(self, model: ImageModel) -> str:
        task = model.stored_task
        if isinstance(task, Tags):
            lost = ["the thresholds of the tags: 0.5 holds for all"] if task.thresholds else []
            lost += ["groups of tags: take the softmax of their outputs, not sigmoids"] if task.groups else []
            return f"config.json has no place for {', nor for '.join(lost)}" if lost else ""
        if isinstance(task, Numbers):
            columns = zip(task.names, task.means, task.deviations, strict=True)
            scales = ", ".join(f"{name} is {mean:g} + {deviation:g} × output" for name, mean, deviation in columns)
            return f"config.json has no place for the units of the numbers: {escape_unprintable(scales)}"
        return super().describe_lost_task(model)


def _find_family(tensors: Tensors, config: TransformersConfig) -> tuple[Family, str] | None:
    """Return the family of a checkpoint and the prefix of its names, or None if it is of no family."""
    for family in FAMILIES.values():
        if (prefix := family.find_prefix(tensors, config)) is not None:
            return family, prefix
    return None


def choose_family(model: ImageModel) -> Family:
    """Return the family to write a model as: the one it came from if that can hold it, else the closest that can."""
    a, origin = model.architecture, model.origin
    assert isinstance(a, VitArchitecture)
    kinds = [_find_closest_kind(a), "vit", *FAMILIES]
    if origin is not None and origin.format == "huggingface":
        kinds.insert(0, origin.dialect.partition("|")[0])
    able = [kind for kind in kinds if kind in FAMILIES and FAMILIES[kind].explain_refusal(a) is None]
    return FAMILIES[able[0] if able else kinds[-1]]


def _find_closest_kind(a: VitArchitecture) -> str:
    """Return the kind of model that is most like an architecture, able to hold it or not."""
    marks = {
        "dinov3_vit": a.rotary is not None,
        "beit": a.position == "relative-bias" or not a.key_bias,
        "aimv2_vision_model": a.norm == "rms",
        "clip_vision_model": a.input_norm,
        "siglip_vision_model": a.pool == "attention",
        "dinov2_with_registers": a.layer_scale is not None and a.registers > 0,
        "dinov2": a.layer_scale is not None,
        "deit": a.registers > 0,
        "ijepa": not a.class_token,
    }
    return next((kind for kind, marked in marks.items() if marked), "vit")


def _read_labels(config: TransformersConfig, classes: int, notes: list[str]) -> tuple[str, ...] | None:
    """Return the labels, or None if there are none or they do not fit the classes; add a note if they do not fit."""
    names = {index: str(name) for index, name in config.id2label.items()}
    if not classes or all(name == f"LABEL_{i}" for i, name in names.items()):
        return None
    if sorted(names) != list(range(classes)):
        notes.append(describe_left_out_labels(len(names), classes))
        return None
    return tuple(names[i] for i in range(classes))
