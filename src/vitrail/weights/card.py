"""Write the model card (README.md), with the certificate of a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import vitrail
from vitrail.config import TrainingCost, show_size
from vitrail.errors import escape_unprintable
from vitrail.model.architecture import Backbone, TimmArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.tasks.task import Task
from vitrail.weights.formats.huggingface import choose_family

LIBRARIES = {
    "native": "vitrail",
    "timm": "timm",
    "huggingface": "transformers",
    "torchvision": "torchvision",
    "openclip": "open_clip",
}
MOST_ANSWER = 80
"""Characters of an answer that is shown as an example."""
FLOP_UNITS = (("exaFLOPs", 1e18), ("petaFLOPs", 1e15), ("teraFLOPs", 1e12), ("gigaFLOPs", 1e9))
TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
LOADING = {
    "native": 'import vitrail\n\nmodel = vitrail.load("{name}")',
    "timm": 'import timm\nmodel = timm.create_model("local-dir:{name}", pretrained=True)',
    "huggingface": (
        "from transformers import AutoImageProcessor, {cls}\n"
        'model = {cls}.from_pretrained("{name}"{options})\nprocessor = AutoImageProcessor.from_pretrained("{name}")'
    ),
    "torchvision": (
        "import torch, torchvision\nmodel = torchvision.models.VisionTransformer({options})\n"
        'model.load_state_dict(torch.load("{name}/model.pth", weights_only=True))'
    ),
    "google": 'import vitrail\nmodel = vitrail.load("{name}/model.npz")',
    "openclip": 'import vitrail\nmodel = vitrail.load("{name}")  # model.pth has OpenCLIP\'s names',
    "meta": 'import vitrail\nmodel = vitrail.load("{name}")  # model.pth has the names of Meta\'s own code',
}


@dataclass(frozen=True)
class Certificate:
    """The result of a conversion's check: both models were run on the same inputs."""

    source: str
    source_sha256: dict[str, str]
    target_sha256: dict[str, str]
    inputs: str
    max_difference: float
    """Largest absolute difference between the outputs (representation and logits)."""
    relative_difference: float
    """Largest difference divided by the standard deviation of that output."""
    preprocessing_note: str
    """Differences between the two preprocessings; empty if there are none."""
    notes: tuple[str, ...]
    """Facts about the source that were concluded, because its files do not say them."""
    resize_note: str = ""
    """What changes at other image sizes than the model's own; empty if nothing does."""
    task_note: str = ""
    """What the format does not keep of the model's task; empty if it keeps all."""

    @property
    def preprocessing_matches(self) -> bool:
        return not self.preprocessing_note


def format_model_card(
    model: ImageModel, name: str, format_name: str, certificate: Certificate | None = None, notes: str = ""
) -> str:
    """Return the text of README.md, with the YAML heading that the Hugging Face hub reads."""
    origin = model.origin
    heading = ["---", f"library_name: {LIBRARIES.get(format_name, 'vitrail')}"]
    task = model.stored_task
    if model.num_classes and (task is None or task.gives_probabilities):
        heading.append("pipeline_tag: image-classification")
    if origin is not None and origin.licence:
        heading.append(f"license: {escape_unprintable(origin.licence)}")
    family = "timm" if isinstance(model.architecture, TimmArchitecture) else "vision-transformer"
    heading += ["tags:", f"- {family}", "- vitrail", "---"]
    cls = "AutoModelForImageClassification" if model.num_classes else "AutoModel"
    loading = LOADING[format_name].format(name=name, cls=cls, options=_options(model, format_name))
    if task is not None and format_name == "native":
        loading += f'\nvitrail.Predictor(model)("photo.jpg")  # {_show_answer(task)}'
    parts = ["\n".join(heading), f"# {name}", f"```python\n{loading}\n```", "## Model", _table(list_facts(model))]
    if origin is not None:
        concluded = "".join(f"\n- {escape_unprintable(note)}" for note in origin.notes)
        sentence = f"Weights from `{origin.source}`, in the format of {origin.format}."
        parts += ["## Origin", escape_unprintable(sentence) + concluded]
    if notes:
        parts += ["## Training", notes]
    if certificate is not None:
        parts += ["## Certificate of conversion", _certificate(certificate)]
    return "\n\n".join(parts) + "\n"


def _show_answer(task: Task) -> str:
    """Return what an answer of a task looks like, shortened to fit behind a line of code."""
    answer = escape_unprintable(str(task.answer(task.make_example(), 2)))
    return answer if len(answer) <= MOST_ANSWER else f"{answer[:MOST_ANSWER]}…"


def _options(model: ImageModel, format_name: str) -> str:
    """Return the options with which the other library builds this model, as Python text."""
    a = model.architecture
    if not isinstance(a, VitArchitecture):
        return ""
    if format_name == "huggingface":
        bare = not a.num_classes and a.representation_size is None and choose_family(model).kind in ("vit", "deit")
        return ", add_pooling_layer=False" if bare else ""
    options = {
        "image_size": a.image_size[0],
        "patch_size": a.patch_size,
        "num_layers": a.depth,
        "num_heads": a.num_heads,
        "hidden_dim": a.width,
        "mlp_dim": a.mlp_dim,
        "num_classes": a.num_classes,
        "representation_size": a.representation_size,
    }
    words = [f"{key}={value}" for key, value in options.items() if value is not None]
    if a.conv_stem:
        config = "torchvision.models.vision_transformer.ConvStemConfig"
        layers = [f"{config}({layer.channels}, {layer.kernel}, {layer.stride})" for layer in a.conv_stem]
        words.append(f"conv_stem_configs=[{', '.join(layers)}]")
    return ", ".join(words)


def list_facts(model: ImageModel) -> list[tuple[str, str]]:
    """Return the rows (name, value) of a model card: size, classes, preprocessing, training cost."""
    a, p = model.architecture, model.preprocessing
    rows = [("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}")]
    if isinstance(a, VitArchitecture):
        size = f"{a.depth} layers, width {a.width}, MLP {a.mlp_dim}, {a.num_heads} heads, {a.stride}-pixel patches"
        rows += [
            ("size", size),
            ("pooling", a.pool),
            ("position embedding", a.position if a.rotary is None else f"{a.position}, rotary"),
            ("GELU", a.gelu) if a.mlp == "gelu" else ("MLP", "SwiGLU"),
        ]
        rows += [] if a.backbone is None else [("ResNet", _describe_backbone(a.backbone))]
    elif isinstance(a, TimmArchitecture):
        rows += [("network of timm", a.name)]
    else:
        rows += [("ResNet", _describe_backbone(a.backbone))]
    crop = f", then the central {p.crop_fraction:.4g}" if p.crop_fraction < 1 else ""
    shape = "squashed" if p.resize == "squash" else "shape kept"
    rows += [
        ("image size", show_size(a.image_size)),
        _describe_outputs(model),
        ("resize", f"to {show_size(p.image_size)}, {shape}{crop}, {p.interpolation}"),
        ("mean, deviation", f"{p.mean}, {p.std}"),
    ]
    return [*rows, *list_costs(model.training_cost)]


def _describe_outputs(model: ImageModel) -> tuple[str, str]:
    """Return the row about classes, or about another task."""
    if model.stored_task is not None:
        return "task", f"{model.stored_task.summarise()}: {shorten_labels(model.stored_task.value_names)}"
    names = "" if model.labels is None else f": {shorten_labels(model.labels)}"
    return "classes", f"{model.num_classes}{names}"


def _describe_backbone(backbone: Backbone) -> str:
    channels = "" if backbone.stage_channels == 64 else f", {backbone.stage_channels} channels in the first stage"
    root = "" if backbone.root == "large" else f", a {backbone.root} root"
    return f"blocks {backbone.blocks}, width ×{backbone.width_factor}{channels}{root}"


def list_costs(cost: TrainingCost | None) -> list[tuple[str, str]]:
    """Return the rows of a model card about costs: pre-training, and each fine-tuning after it, apart."""
    if cost is None:
        return []
    stages = [_describe_cost(stage) for stage in cost.stages]
    kinds = [stage.kind for stage in cost.stages]
    if not cost.complete:
        stages, kinds = ["unknown", *stages], ["training", *kinds]
    if len(stages) == 1:
        return [("training cost" if kinds[0] == "training" else "cost of the linear head", stages[0])]
    names = ["cost of pre-training"]
    for number, kind in enumerate(kinds[1:], start=1):
        again = f", number {number}" if kinds[1:].count(kind) > 1 else ""
        names.append(f"cost of {'fine-tuning' if kind == 'training' else 'the linear head'}{again}")
    return list(zip(names, stages, strict=True))


def _describe_cost(cost: TrainingCost) -> str:
    """Return the cost of one training as text, such as "26.7 petaFLOPs, 7.9 minutes on NVIDIA H200"."""
    operations = _choose_unit(cost.flops, FLOP_UNITS)
    return f"{operations}, {_choose_unit(cost.device_seconds, TIME_UNITS)} on {', '.join(cost.devices)}"


def _choose_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a value in the largest unit of which there is one, with three digits; `units`: the largest first."""
    name, size = next((unit for unit in units if value >= unit[1]), units[-1])
    return f"{value / size:,.0f} {name}" if value >= 100 * size else f"{value / size:.3g} {name}"


def shorten_labels(labels: Sequence[str], most: int = 10) -> str:
    """Return the first `most` labels as one line of printable text."""
    return escape_unprintable(", ".join(labels[:most])) + (" …" if len(labels) > most else "")


def _certificate(certificate: Certificate) -> str:
    difference = f"{certificate.max_difference:.3g} ({certificate.relative_difference:.3g} of an output's deviation)"
    rows = [
        ("source", f"`{certificate.source}`"),
        *((f"SHA-256 of the source's {name}", f"`{digest}`") for name, digest in certificate.source_sha256.items()),
        *((f"SHA-256 of {name}", f"`{digest}`") for name, digest in certificate.target_sha256.items()),
        ("inputs", certificate.inputs),
        ("largest difference", difference),
        ("preprocessing", certificate.preprocessing_note or "matches"),
        *([("other image sizes", certificate.resize_note)] if certificate.resize_note else []),
        *([("task", certificate.task_note)] if certificate.task_note else []),
        ("written by", f"vitrail {vitrail.__version__}"),
    ]
    return "The target was loaded back and run beside the source.\n\n" + _table(rows)


def _table(rows: list[tuple[str, str]]) -> str:
    cells = [
        [escape_unprintable(cell).replace("|", "\\|") for cell in row] for row in rows
    ]  # a bare | would end the cell
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
