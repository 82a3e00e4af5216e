"""The door in: `load` makes a model of any checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import Origin, show_size
from vitrail.errors import ConfigError, WeightsError, did_you_mean
from vitrail.model.architecture import Architecture, ResNetArchitecture, TimmArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.create import build_empty_model, check_dtype
from vitrail.model.timm_model import TimmModel, import_timm
from vitrail.model.vit import VisionTransformer
from vitrail.system.device import parse_device
from vitrail.weights.files import TensorFile, TensorInfo, open_tensors
from vitrail.weights.formats.base import IMAGENET, CheckpointInfo, FolderFiles, WeightFormat
from vitrail.weights.formats.google import GoogleFormat
from vitrail.weights.formats.huggingface import HuggingFaceFormat
from vitrail.weights.formats.native import UNUSED_PREFIX, NativeFormat, describe_config
from vitrail.weights.formats.timm import TimmFormat
from vitrail.weights.formats.timm_config import TimmConfig, read_labels, read_preprocessing
from vitrail.weights.formats.torchvision import TorchvisionFormat
from vitrail.weights.source import PANE, PANE_FOLDER, locate_weights
from vitrail.weights.tensor_rules import TensorMatch, check_complete, compute_file_shapes, match_tensors, shorten_list

log = logging.getLogger("vitrail")

NATIVE_FORMAT = NativeFormat()
FORMATS: dict[str, WeightFormat] = {
    naming.name: naming
    for naming in (NATIVE_FORMAT, TimmFormat(), TorchvisionFormat(), HuggingFaceFormat(), GoogleFormat())
}
TRAINING_ONLY = ("dropout", "attention_dropout", "stochastic_depth")
KNOWN_OPTIONS = ("num_heads", "gelu", "norm_eps", *TRAINING_ONLY)
"""Options of a Vision Transformer that leave no trace in the shapes of its weights."""
COUNTER = "num_batches_tracked"
"""The one whole number that is learned: batch norm's."""
READERS = 2
"""Threads that read tensors: one waits for memory pages while the other copies."""
Model = VisionTransformer | BitResNet | TimmModel


def load(
    source: str | Path,
    *,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **known: Any,
) -> Model:
    """A model from weights of any origin, ready to evaluate. No code from a file is ever run.

    Args:
        source: a folder or file of weights (vitrail, timm, torchvision, Hugging Face, Google), a run folder,
            `hf:owner/name[@revision]` from the hub, `timm:name` where timm is installed: any of its models, in a
            model of our own where that can hold the weights, else in timm's network (`TimmModel`); or `pane`, the small
            model inside the package (a folder of that name is `./pane`).
        num_classes: replace the head by a zero-initialised one for so many classes.
        image_size: resize the position embedding, or whatever is made for one size, for good.
        device: where the parameters live; the CPU if None.
        dtype: of the parameters; the file's if None, and float32 for `pane`.
        known: what you know and the file may not say, such as num_heads=6 or gelu="tanh"; also the rates that act in
            training only (dropout, attention_dropout, stochastic_depth).

    Returns:
        The model, with `preprocessing`, `labels` and `origin`. What the file did not say and was concluded stands in
        `model.origin.notes`, and is logged as a warning.
    """
    target = None if device is None else parse_device(device)
    check_dtype(dtype)
    model, _ = load_with_files(source, known)
    if source == PANE:
        dtype = dtype or torch.float32  # the file is in half precision for its size alone
        if Path(PANE).exists() and not Path(PANE).samefile(PANE_FOLDER):
            log.warning("%s is the model inside vitrail; what lies in this folder is ./%s", PANE, PANE)
    for note in model.origin.notes if model.origin is not None else ():
        log.warning("%s: %s", source, note)
    if num_classes is not None:
        model.replace_head(num_classes)
    if image_size is not None:
        model.resize(image_size)
    return model.to(device=target, dtype=dtype).eval()


def load_with_files(source: str | Path, known: Mapping[str, Any] | None = None) -> tuple[Model, tuple[Path, ...]]:
    """The model as it is in its files, and those files; none for one that timm has loaded."""
    known = known or {}
    if wrong := [name for name in known if name not in KNOWN_OPTIONS]:
        allowed = ("num_classes", "image_size", "device", "dtype", *KNOWN_OPTIONS)
        hint = did_you_mean(wrong[0], allowed) or f": there are {', '.join(allowed)}"
        raise ConfigError(f"unknown option {wrong[0]!r}{hint}")
    if str(source).startswith("timm:"):
        tensors, beside = _load_from_timm(str(source))
        return _build_model(str(source), str(source), tensors, beside, known), ()
    located = locate_weights(source)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in located.files]
        together = files[0] if len(files) == 1 else _SplitCheckpoint(files)
        beside = FolderFiles(located.beside.folder, together.wrapper, ignored=located.beside.ignored)
        return _build_model(str(source), located.name, together, beside, known), located.files


def recognise_format(where: str, tensors: Mapping[str, TensorInfo], beside: FolderFiles | None = None) -> WeightFormat:
    """The naming of a checkpoint, from its names and shapes. That a folder of ours holds timm's, config.json tells."""
    if beside is not None and NATIVE_FORMAT.of_timm(beside):
        return NATIVE_FORMAT
    for naming in FORMATS.values():
        if naming.recognises(tensors):
            return naming
    if beside is not None and (kind := beside.json("config.json").get("model_type")):
        raise WeightsError(f"{where} is a {kind!r} of transformers; vitrail reads its vit, deit, dinov2 and vit_mae")
    if beside is not None and (kind := beside.json("config.json").get("architecture")):
        raise WeightsError(
            f"{where} is a {kind!r} of timm's, for which vitrail has no layers: timm:NAME runs timm's own"
        )
    raise WeightsError(
        f"{where} is no Vision Transformer, hybrid or BiT ResNet in any naming vitrail knows ({', '.join(FORMATS)}): "
        f"it holds {shorten_list(list(tensors)) or 'no tensors'}"
    )


def _build_model(where: str, name: str, tensors: TensorFile, beside: FolderFiles, known: Mapping[str, Any]) -> Model:
    naming = recognise_format(where, tensors.tensors, beside)
    try:
        with ThreadPoolExecutor(1) as aside:
            checked = aside.submit(naming.check, beside)  # hashing takes as long as reading, so they go side by side
            reading = naming.understand(tensors.tensors, beside)
            _apply_known_options(reading, known, sure=naming.name in ("native", "huggingface") and beside.described)
            _check_layer_count(reading.architecture, len(tensors.tensors))
            model: Model = build_empty_model(reading.architecture)
            pairs = match_tensors(model.state_dict(), naming.lines(reading.architecture, reading.dialect))
            _fill_model(where, model, tensors, reading, pairs)
            model.preprocessing = reading.preprocessing
            model.labels = reading.labels
            model.training_cost, model.learned_from = reading.training_cost, reading.learned_from
            model.origin = _describe_origin(name, naming, reading, beside)
            checked.result()
    except ConfigError as error:
        raise WeightsError(f"{where} describes a model that cannot be: {error}") from None
    except WeightsError as error:
        raise WeightsError(str(error) if where in str(error) else f"{where}: {error}") from None
    return model


def _apply_known_options(reading: CheckpointInfo, known: Mapping[str, Any], sure: bool) -> None:
    """What the caller knows replaces what was concluded; not what the files say (`sure`)."""
    fields = {name: getattr(reading.architecture, name) for name in type(reading.architecture).model_fields}
    for name, value in known.items():
        if name not in fields:
            raise ConfigError(f"this model has no option {name!r}")
        if sure and name not in TRAINING_ONLY and value != fields[name]:
            raise WeightsError(f"its config says {name} = {fields[name]}, so it cannot be {value}")
    if known:
        reading.architecture = type(reading.architecture)(**{**fields, **known})
        reading.notes = [note for note in reading.notes if "num_heads" not in known or "attention heads" not in note]
        reading.notes += [f"{n} = {v}, as it was told" for n, v in known.items() if n not in TRAINING_ONLY and not sure]


def _check_layer_count(architecture: Architecture, tensors: int) -> None:
    """No model has more layers than tensors; a config that says so would have us build without end."""
    if isinstance(architecture, TimmArchitecture):
        return  # which says no number of layers: its name does
    resnet = isinstance(architecture, ResNetArchitecture)
    layers = sum(architecture.backbone.blocks) if resnet else architecture.depth  # type: ignore[union-attr]
    if layers > tensors:
        raise WeightsError(f"its config tells of {layers} layers, and there are {tensors} tensors")


def _fill_model(
    where: str, model: ImageModel, file: TensorFile, reading: CheckpointInfo, pairs: list[TensorMatch]
) -> None:
    """All tensors into an empty model, or none: what is in the file is known before any of it is taken."""
    empty = model.state_dict()
    # Tables of indices, which some of timm's networks have, are made with the network: a file's could point anywhere.
    tables = {p for p in pairs if not empty[p.ours].is_floating_point() and not p.ours.endswith(COUNTER)}
    pairs = [pair for pair in pairs if pair not in tables]
    apart = [*reading.unused_tensors, *reading.left_out, *(name for pair in tables for name in pair.theirs)]
    check_complete(where, file.tensors, compute_file_shapes(pairs, empty), apart)
    floats = {i.dtype for p in pairs for n in p.theirs if (i := file.tensors[n]).dtype.is_floating_point}
    dtype = functools.reduce(torch.promote_types, floats)
    if len(floats) > 1:
        reading.notes.append(f"tensors of several types were brought to {dtype}")
    if reading.left_out:
        reading.notes.append(f"left out, for the model has no use for it: {shorten_list(reading.left_out, most=3)}")

    def read(pair: TensorMatch) -> tuple[str, Tensor]:
        ours = pair.rule.inward([file.read(name) for name in pair.theirs]).contiguous()
        return pair.ours, ours.to(dtype) if ours.is_floating_point() else ours

    with ThreadPoolExecutor(READERS) as readers:
        kept = {pair.ours: empty[pair.ours] for pair in tables}
        model.load_state_dict({**dict(readers.map(read, pairs)), **kept}, assign=True)
    model.unused_tensors = {name.removeprefix(UNUSED_PREFIX): file.read(name) for name in reading.unused_tensors}


def _describe_origin(name: str, naming: WeightFormat, reading: CheckpointInfo, beside: FolderFiles) -> Origin:
    """Where the numbers first came from: a native folder remembers it."""
    earlier = naming.earlier_origin(beside)
    if earlier is not None:
        return earlier
    if beside.ignored:
        reading.notes.append("the config.json in its folder was not used, for there are other weights beside it")
    return Origin(
        source=name, format=naming.name, dialect=reading.dialect, licence=reading.licence, notes=tuple(reading.notes)
    )


class _SplitCheckpoint(TensorFile):
    """Several files of one checkpoint."""

    def __init__(self, files: list[TensorFile]) -> None:
        self.path = files[0].path
        self.owners = {name: file for file in files for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self.owners.items()}

    def _read(self, name: str) -> Tensor:
        """From the file that holds it."""
        return self.owners[name].read(name)


class _LoadedTensors(TensorFile):
    """Tensors that another library has loaded."""

    def __init__(self, path: Path, contents: Mapping[str, Tensor]) -> None:
        self.path, self.contents = path, dict(contents)
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.contents.items()}

    def _read(self, name: str) -> Tensor:
        """Handed over."""
        return self.contents.pop(name)


def _load_from_timm(source: str) -> tuple[TensorFile, FolderFiles]:
    """Let timm load one of its pretrained models, and take the weights over. Where no model of ours can hold them, they
    are described as they would be in a native folder, as a network of timm's."""
    timm = import_timm(f"loading {source}")
    try:
        model: Any = timm.create_model(source.removeprefix("timm:"), pretrained=True)
    except (RuntimeError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"timm cannot load {source}: {first}") from None
    arguments: dict[str, Any] = {"pos_embed": "none" if getattr(model, "pos_embed", None) is None else None}
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        arguments["num_heads"] = getattr(getattr(blocks[0], "attn", None), "num_heads", None)
        arguments["pool_include_prefix"] = getattr(model, "pool_include_prefix", None)
    pretrained = dict(model.pretrained_cfg)
    config = {"architecture": pretrained.get("architecture", ""), "pretrained_cfg": pretrained, "model_args": arguments}
    config["global_pool"] = getattr(model, "global_pool", None)
    tensors, beside = _LoadedTensors(Path(source), model.state_dict()), FolderFiles(given={"config.json": config})
    if not _fits_own_model(source, tensors, beside):
        beside = FolderFiles(
            given={"config.json": describe_timm_network(source, pretrained, getattr(model, "num_classes", 0))}
        )
    return tensors, beside


def _fits_own_model(source: str, file: TensorFile, beside: FolderFiles) -> bool:
    """Whether a model of ours can hold all tensors of a checkpoint."""
    try:
        naming = recognise_format(source, file.tensors)
        reading = naming.understand(file.tensors, beside)
        empty = build_empty_model(reading.architecture).state_dict()
        pairs = match_tensors(empty, naming.lines(reading.architecture, reading.dialect))
        set_aside = [*reading.unused_tensors, *reading.left_out]
        check_complete(source, file.tensors, compute_file_shapes(pairs, empty), set_aside)
    except (ConfigError, WeightsError):
        return False
    return True


def describe_timm_network(source: str, pretrained: Mapping[str, Any], num_classes: int) -> dict[str, Any]:
    """What a native folder's config.json says of a network of timm's, from what timm says of its weights.

    Images are taken at timm's size for tests, where that is another than for training: at that size timm measures.
    """
    name = f"{pretrained['architecture']}.{pretrained.get('tag') or ''}".rstrip(".")
    if source.removeprefix("timm:").partition(".")[0] != pretrained["architecture"]:
        raise ConfigError(f"{source}: timm's own networks are found by a plain name, as in timm:{name}")
    channels, *size = pretrained.get("test_input_size") or pretrained["input_size"]
    architecture = TimmArchitecture(name=name, image_size=size, in_channels=channels, num_classes=num_classes)
    crop = pretrained.get("test_crop_pct") or pretrained["crop_pct"]
    config: TimmConfig = TimmConfig.of({"pretrained": {**pretrained, "crop_pct": crop}}, source)
    notes: list[str] = []
    trained = tuple(pretrained["input_size"][1:])
    if architecture.image_size != trained:
        notes.append(
            f"images are taken at {show_size(architecture.image_size)} pixels, timm's size for tests; it was trained "
            f"at {show_size(trained)}"
        )
    preprocessing = read_preprocessing(config, architecture, IMAGENET, notes)  # type: ignore[arg-type]  # sizes alone
    origin = Origin(source=source, format="timm", licence=config.pretrained.license, notes=tuple(notes))
    return describe_config(architecture, preprocessing, read_labels(config, num_classes), origin)
