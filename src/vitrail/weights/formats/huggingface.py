"""Folders of Hugging Face's transformers: ViT, DeiT, DINOv2 (with and without registers) and the encoder of ViTMAE."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from vitrail.config import Preprocessing
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import (
    HALF,
    IMAGENET,
    CheckpointInfo,
    FolderFiles,
    ForeignConfig,
    Tensors,
    WeightFormat,
    build_preprocessing,
    check_agreement,
    compute_mlp_ratio,
    count_blocks,
    describe_left_out_labels,
    find_unsupported_options,
    guess_num_heads,
    infer_grid,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.known import KnownFacts
from vitrail.weights.tensor_rules import ADD_BATCH_AXIS, TensorRule, add_prefix, split_into, to_patch_kernel

PREFIXES = {"vit": "vit.", "deit": "deit.", "dinov2": "dinov2.", "dinov2_with_registers": "dinov2_with_registers."}
CLASSES = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
REGISTERS = {"deit": "distillation_token", "dinov2_with_registers": "register_tokens"}
GELUS = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "quick_gelu": "quick"}
RESAMPLE = {2: "bilinear", 3: "bicubic"}
QKV = ("query", "key", "value")
LAYER = "encoder.layer.{i}."


class _Size(ForeignConfig):
    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_numbers(cls, value: Any) -> Any:
        if isinstance(value, int):
            return {"height": value, "width": value}
        return dict(zip(("height", "width"), value, strict=False)) if isinstance(value, list | tuple) else value


class _Preprocessor(ForeignConfig):
    do_resize: bool = True
    do_rescale: bool = True
    size: _Size = Field(default_factory=_Size)
    resample: int = 2
    do_center_crop: bool = False
    crop_size: _Size = Field(default_factory=_Size)
    do_normalize: bool = True
    image_mean: float | tuple[float, ...] | None = None
    image_std: float | tuple[float, ...] | None = None


class _ModelConfig(ForeignConfig):
    model_type: str = ""
    architectures: list[str] = Field(default_factory=list)
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float | None = None
    image_size: int | tuple[int, int] | None = None
    layerscale_value: float = 1.0
    id2label: dict[int, Any] = Field(default_factory=dict)


class HuggingFaceFormat(WeightFormat):
    """transformers' format, with names such as `vit.encoder.layer.0.attention.attention.query.weight`."""

    name = "huggingface"

    def recognises(self, tensors: Tensors) -> bool:
        return _prefix_of(tensors) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        prefix = _prefix_of(tensors) or ""
        own = {name.removeprefix(prefix): info for name, info in tensors.items()}
        config: _ModelConfig = _ModelConfig.parse(folder_files.json("config.json"), "config.json")
        notes: list[str] = []
        architecture = _architecture(own, config, folder_files.known, notes)
        classifies = bool(architecture.num_classes)
        if not classifies and any("ForImageClassification" in name for name in config.architectures):
            raise WeightsError(f"config.json says {config.architectures[0]}, but the weights have no classifier")
        unused = [f"{prefix}embeddings.mask_token"]
        unused += [name for name in tensors if "pooler." in name] if classifies else []
        return CheckpointInfo(
            architecture,
            _preprocessing(folder_files, architecture, config.model_type or _kind(own), notes),
            dialect=prefix,
            labels=_labels(config, architecture.num_classes, notes),
            licence=folder_files.read_licence(),
            unused_tensors=[name for name in unused if name in tensors],
            ignored_tensors=[name for name in tensors if name.startswith("decoder")],
            notes=notes,
        )

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        assert isinstance(architecture, VitArchitecture)
        a, kind = architecture, _kind_to_write(architecture)
        before, after, fc1, fc2 = _layer_names(kind)
        projection = "embeddings.patch_embeddings.projection."
        kernel = to_patch_kernel(a.in_channels, a.patch_size)
        qkv = [f"{LAYER}attention.attention.{part}.*" for part in QKV]
        inner = [
            TensorRule("patch_embed.projection.weight", f"{projection}weight", kernel),
            TensorRule("patch_embed.projection.bias", f"{projection}bias"),
            TensorRule("class_token", "embeddings.cls_token", ADD_BATCH_AXIS),
            TensorRule("registers", f"embeddings.{REGISTERS.get(kind, '')}", ADD_BATCH_AXIS),
            TensorRule("position_embedding.0.table", "embeddings.position_embeddings", ADD_BATCH_AXIS),
            TensorRule("encoder.blocks.{i}.norm1.*", f"{LAYER}{before}.*"),
            TensorRule("encoder.blocks.{i}.attention.qkv.*", qkv, split_into(3)),
            TensorRule("encoder.blocks.{i}.attention.out.*", f"{LAYER}attention.output.dense.*"),
            TensorRule("encoder.blocks.{i}.scale1.factor", f"{LAYER}layer_scale1.lambda1"),
            TensorRule("encoder.blocks.{i}.norm2.*", f"{LAYER}{after}.*"),
            TensorRule("encoder.blocks.{i}.mlp.fc1.*", f"{LAYER}{fc1}.*"),
            TensorRule("encoder.blocks.{i}.mlp.fc2.*", f"{LAYER}{fc2}.*"),
            TensorRule("encoder.blocks.{i}.scale2.factor", f"{LAYER}layer_scale2.lambda1"),
            TensorRule("encoder.norm.*", "layernorm.*"),
            TensorRule("head.hidden.*", "pooler.dense.*"),
        ]
        outer = [
            TensorRule("head.linear.*", "cls_classifier.*"),
            TensorRule("head.distilled.*", "distillation_classifier.*"),
            TensorRule("head.*", "classifier.*"),
        ]
        return add_prefix(inner, dialect) + outer

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture) or architecture.backbone is not None:
            return "vitrail writes plain Vision Transformers for transformers, no ResNets and no hybrids"
        kind = _kind_to_write(architecture)
        allowed = ("pool", "registers", "position_prefix", "layer_scale", "qkv_bias")
        if beyond := find_unsupported_options(architecture, *allowed):
            return f"transformers' {CLASSES[kind]} has no option for this model's {beyond}"
        if architecture.representation_size is not None and architecture.num_classes:
            return "transformers has no classifier with a tanh layer before it"
        if architecture.registers and architecture.position_prefix != ("all" if kind == "deit" else "class"):
            return f"transformers' {CLASSES[kind]} gives positions to other tokens than this model"
        if kind == "deit" and architecture.registers != 1:
            return "transformers has registers only in DINOv2, which has layer scale, and one in DeiT"
        if kind.startswith("dinov2") and architecture.mlp_dim % architecture.width:
            return "transformers' DINOv2 has an MLP that is a whole multiple of its width"
        pools = ["class+average"] if kind.startswith("dinov2") else ["class", "distilled"]
        if architecture.num_classes and architecture.pool not in pools:
            return f"transformers' {CLASSES[kind]} classifies from {' or '.join(pools)}, not {architecture.pool}"
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        if isinstance(model.architecture, ResNetArchitecture) or not model.num_classes:
            return ""
        return PREFIXES[_kind_to_write(model.architecture)]

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        assert isinstance(model.architecture, VitArchitecture)
        return {"config.json": _config(model, model.architecture), "preprocessor_config.json": _preprocessor(model)}


def _prefix_of(tensors: Tensors) -> str | None:
    for prefix in ("", *PREFIXES.values()):
        marks = ("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.attention.attention.query.weight")
        if all(prefix + mark in tensors for mark in marks):
            return prefix
    return None


def _kind(own: Tensors) -> str:
    """Return transformers' model type, judged by the names of the tensors."""
    if "embeddings.distillation_token" in own:
        return "deit"
    if "encoder.layer.0.layer_scale1.lambda1" in own:
        return "dinov2_with_registers" if "embeddings.register_tokens" in own else "dinov2"
    return "vit"


def _kind_to_write(a: VitArchitecture) -> str:
    if a.layer_scale is not None:
        return "dinov2_with_registers" if a.registers else "dinov2"
    return "deit" if a.registers else "vit"


def _layer_names(kind: str) -> tuple[str, str, str, str]:
    if kind.startswith("dinov2"):
        return "norm1", "norm2", "mlp.fc1", "mlp.fc2"
    return "layernorm_before", "layernorm_after", "intermediate.dense", "output.dense"


def _architecture(own: Tensors, config: _ModelConfig, known: KnownFacts, notes: list[str]) -> VitArchitecture:
    """Read the sizes from the shapes; those that the config names must agree."""
    kind = _kind(own)
    dinov2 = kind.startswith("dinov2")
    kernel = read_shape(own, "embeddings.patch_embeddings.projection.weight", 4)
    width, channels, side = kernel[0], kernel[1], read_patch_size(kernel, (2, 3))
    if "encoder.layer.0.mlp.weights_in.weight" in own:
        raise WeightsError("its MLP is a SwiGLU, which vitrail does not have")
    depth = count_blocks(own, "encoder.layer.")
    mlp_dim = read_shape(own, f"encoder.layer.0.{_layer_names(kind)[2]}.weight", 2)[0]
    sizes = {"hidden_size": width, "num_hidden_layers": depth}
    check_agreement("config.json", config.model_dump(), sizes if dinov2 else {**sizes, "intermediate_size": mlp_dim})
    registers = read_size(own, f"embeddings.{REGISTERS[kind]}", 3, axis=1) or 0 if kind in REGISTERS else 0
    owner = "all" if kind == "deit" else "class"
    size = (config.image_size, config.image_size) if isinstance(config.image_size, int) else config.image_size
    hint = (size[0] // side, size[1] // side) if size else None
    rows = read_shape(own, "embeddings.position_embeddings", 3)[1]
    grid, _ = infer_grid(rows, {owner: 1 + registers if owner == "all" else 1}, known.grid or hint)
    classifier = next((name for name in ("classifier", "cls_classifier") if f"{name}.weight" in own), None)
    if config.hidden_act not in GELUS:
        raise WeightsError(f"config.json: hidden_act {config.hidden_act!r} is none of {', '.join(GELUS)}")
    return VitArchitecture(
        image_size=(grid[0] * side, grid[1] * side),
        in_channels=channels,
        patch_size=side,
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=config.num_attention_heads or known.num_heads or guess_num_heads(width, notes),
        num_classes=read_size(own, f"{classifier}.weight", 2) or 0,
        pool=_pool(classifier, dinov2),
        registers=registers,
        position_prefix=owner,
        position_resize="bicubic-antialias" if kind == "dinov2_with_registers" else "bicubic",
        representation_size=None if classifier else read_size(own, "pooler.dense.weight", 2),
        layer_scale=config.layerscale_value if dinov2 else None,
        gelu=GELUS[config.hidden_act],
        norm_eps=config.layer_norm_eps or (1e-6 if dinov2 else 1e-12),
        qkv_bias="encoder.layer.0.attention.attention.query.bias" in own,
    )


def _pool(classifier: str | None, dinov2: bool) -> str:
    if classifier == "cls_classifier":
        return "distilled"
    return "class+average" if classifier and dinov2 else "class"


def _labels(config: _ModelConfig, classes: int, notes: list[str]) -> tuple[str, ...] | None:
    """Return the labels, or None if there are none or they do not fit the classes; add a note if they do not fit."""
    names = {index: str(name) for index, name in config.id2label.items()}
    if not classes or all(name == f"LABEL_{i}" for i, name in names.items()):
        return None
    if sorted(names) != list(range(classes)):
        notes.append(describe_left_out_labels(len(names), classes))
        return None
    return tuple(names[i] for i in range(classes))


def _preprocessing(folder_files: FolderFiles, a: VitArchitecture, model_type: str, notes: list[str]) -> Preprocessing:
    values, default = folder_files.json("preprocessor_config.json"), HALF if model_type == "vit" else IMAGENET
    if not values:
        notes.append(f"pixels are scaled as {default['origin']}'s are: there is no preprocessor_config.json")
        return build_preprocessing(a.image_size, a.in_channels, default)
    processor: _Preprocessor = _Preprocessor.parse(values, "preprocessor_config.json")
    if not processor.do_resize or not processor.do_rescale:
        notes.append("preprocessor_config.json leaves images unscaled or at their own size, which vitrail does not")
    if processor.resample not in RESAMPLE:
        notes.append(f"the filter {processor.resample} of the resize is replaced by bicubic")
    mean, std = (_statistic(value, a.in_channels) for value in (processor.image_mean, processor.image_std))
    if not processor.do_normalize:
        mean, std = (0.0,) * a.in_channels, (1.0,) * a.in_channels
    resized, crop = processor.size, processor.crop_size
    target = (
        resized.height or resized.shortest_edge or a.image_size[0],
        resized.width or resized.shortest_edge or a.image_size[1],
    )
    size, fraction = target, 1.0
    if processor.do_center_crop and (side := crop.height or crop.shortest_edge):
        size = (side, crop.width or side)
        fraction = min(size[0] / target[0], 1.0)
    return build_preprocessing(
        size,
        a.in_channels,
        default,
        mean,
        std,
        resize="cover" if resized.shortest_edge else "squash",
        crop_fraction=fraction,
        interpolation=RESAMPLE.get(processor.resample, "bicubic"),
    )


def _statistic(value: float | tuple[float, ...] | None, channels: int) -> tuple[float, ...] | None:
    return (value,) * channels if isinstance(value, int | float) else value


def _config(model: ImageModel, a: VitArchitecture) -> dict[str, Any]:
    kind = _kind_to_write(a)
    classifier = "ForImageClassificationWithTeacher" if a.pool == "distilled" else "ForImageClassification"
    suffix = classifier if a.num_classes else "Model"
    height, width = a.image_size
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind] + suffix],
        "model_type": kind,
        "hidden_size": a.width,
        "num_hidden_layers": a.depth,
        "num_attention_heads": a.num_heads,
        "hidden_act": next(theirs for theirs, ours in GELUS.items() if ours == a.gelu),
        "hidden_dropout_prob": a.dropout,
        "attention_probs_dropout_prob": a.attention_dropout,
        "layer_norm_eps": a.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": a.patch_size,
        "num_channels": a.in_channels,
        "qkv_bias": a.qkv_bias,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    if kind.startswith("dinov2"):
        config |= {"mlp_ratio": compute_mlp_ratio(a.mlp_dim, a.width), "layerscale_value": a.layer_scale}
        config["use_swiglu_ffn"] = False
        config |= {"num_register_tokens": a.registers} if a.registers else {}
    else:
        config["intermediate_size"] = a.mlp_dim
    if a.representation_size is not None:
        config["pooler_output_size"] = a.representation_size
    if a.num_classes:
        labels = model.labels or [f"LABEL_{index}" for index in range(a.num_classes)]
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    return config


def _preprocessor(model: ImageModel) -> dict[str, Any]:
    p = model.preprocessing
    height, width = p.image_size
    cropped = p.crops
    exact_size = {"height": p.resized[0], "width": p.resized[1]}
    config: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor" if cropped else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": min(p.resized)} if p.resize == "cover" else exact_size,
        "resample": next(number for number, name in RESAMPLE.items() if name == p.interpolation),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
        "do_center_crop": cropped,
    }
    if cropped:
        config["crop_size"] = {"height": height, "width": width}
        config["do_convert_rgb"] = True
    return config
