"""`load` builds a model from a checkpoint of any format."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitrail.config import Origin
from vitrail.errors import ConfigError, WeightsError, escape_unprintable
from vitrail.model.architecture import Architecture, ResNetArchitecture, TimmArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.create import build_empty_model, check_dtype
from vitrail.model.timm_model import TimmModel, import_timm
from vitrail.model.vit import VisionTransformer
from vitrail.system.device import parse_device
from vitrail.weights.files import TensorFile, TensorInfo, open_tensors
from vitrail.weights.formats.base import CheckpointInfo, FolderFiles, WeightFormat
from vitrail.weights.formats.google import GoogleFormat
from vitrail.weights.formats.huggingface import FAMILIES, HuggingFaceFormat
from vitrail.weights.formats.meta import MetaFormat
from vitrail.weights.formats.native import UNUSED_PREFIX, NativeFormat
from vitrail.weights.formats.openclip import OpenClipFormat
from vitrail.weights.formats.timm import TimmFormat
from vitrail.weights.formats.timm_built import describe_timm_network, read_arguments
from vitrail.weights.formats.torchvision import TorchvisionFormat
from vitrail.weights.known import KnownFacts, apply_known_options
from vitrail.weights.part import PartOfFile, check_one_model, describe_part, find_parts
from vitrail.weights.source import PANE, PANE_FOLDER, Which, choose_weights, locate_weights
from vitrail.weights.tensor_rules import (
    TensorMatch,
    check_complete,
    compute_file_shapes,
    find_lost_rows,
    match_tensors,
    shorten_list,
)

log = logging.getLogger("vitrail")

NATIVE_FORMAT = NativeFormat()
FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        NATIVE_FORMAT,
        MetaFormat(),
        TimmFormat(),
        TorchvisionFormat(),
        HuggingFaceFormat(),
        GoogleFormat(),
        OpenClipFormat(),
    )
}
COUNTER = "num_batches_tracked"
"""The end of the name of batch norm's counter, the only integer tensor that is read from a file."""
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
    which: Which = "last",
    num_heads: int | None = None,
    gelu: Literal["tanh", "exact", "quick"] | None = None,
    norm_eps: float | None = None,
    known: Mapping[str, Any] | None = None,
    part: str | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    stochastic_depth: float | None = None,
) -> Model:
    """Load a model from weights of any origin, ready to evaluate. No code from a file is ever run.

    Args:
        source: a folder or file of weights (vitrail, timm, torchvision, Hugging Face, Google, OpenCLIP, Meta), a run
            folder, `hf:owner/name[@revision]` from the hub, `timm:name` for any model of an installed timm (one of
            vitrail's own models if it can hold the weights, else a `TimmModel`), or `pane`, the small model inside the
            package (a folder of that name is `./pane`).
        num_classes: replace the head by a zero-initialised one for this number of classes.
        image_size: change the image size for good: the position embedding is interpolated to the new grid.
        device: where the parameters live; the CPU if None.
        dtype: type of the parameters; the file's if None, and float32 for `pane`.
        which: which weights of a run: "last", or "best", those with the best evaluation while it trained.
        num_heads: attention heads. This and the next two are facts that the shapes of the weights do not show: give
            them if the file does not say them.
        gelu: tanh approximation, exact, or "quick", the sigmoid approximation.
        norm_eps: epsilon of the norms.
        known: these and other facts that no file says, as a dictionary: `{"grid": (12, 42)}` are the rows and columns
            of patches of a position table that is not square. The keys are grid, num_heads, gelu, norm_eps, pool and
            position_resize, how positions are interpolated to other image sizes.
        part: the part of a larger file that is the model: "encoder" for tensors named `encoder.…`, or a key of a
            PyTorch file that holds several dictionaries. Without it, the error for such a file lists its parts.
        dropout: rate in [0, 1), for training. This and the next two replace what the file says.
        attention_dropout: rate in [0, 1) for attention weights, for training.
        stochastic_depth: rate in [0, 1) for the last block, for training.

    Returns:
        The model, with `preprocessing`, `labels` and `origin`. Facts that the file does not say and that were
        concluded are in `model.origin.notes`, and are logged as warnings.

    Raises:
        WeightsError: the source cannot be found, read or understood.
        ConfigError: an impossible option.
    """
    facts = KnownFacts.collect(known, num_heads=num_heads, gelu=gelu, norm_eps=norm_eps)
    rates = {"dropout": dropout, "attention_dropout": attention_dropout, "stochastic_depth": stochastic_depth}
    if not isinstance(source, str | Path):
        raise ConfigError(f"a {type(source).__name__} is no name of a model: give a folder, a file or a name")
    if source == Path(PANE) and not source.exists():
        source = PANE
    if which != "last":
        source = choose_weights(str(source), which)
    target = None if device is None else parse_device(device)
    check_dtype(dtype)
    model, _ = load_with_files(source, facts, part, rates)
    if source == PANE:
        dtype = dtype or torch.float32  # the file is in half precision for its size alone
        if Path(PANE).exists() and not Path(PANE).samefile(PANE_FOLDER):
            log.warning("%s is the model inside vitrail; what lies in this folder is ./%s", PANE, PANE)
    for note in model.origin.notes if model.origin is not None else ():
        log.warning("%s: %s", source, escape_unprintable(note))
    model.to(dtype=dtype)  # before the size changes: positions are then interpolated in this precision
    if num_classes is not None:
        model.replace_head(num_classes)
    if image_size is not None:
        model.resize(image_size)
    return model.to(device=target).eval()


def load_with_files(
    source: str | Path,
    known: KnownFacts | None = None,
    part: str | None = None,
    rates: Mapping[str, float | None] | None = None,
) -> tuple[Model, tuple[Path, ...]]:
    """Load the model as it is stored; return it and its files (no files for `timm:name`).

    Args:
        source: as in `load`.
        known: what the caller knows and no file says.
        part: the part of a larger file that is the model.
        rates: dropout and the like, for training; None keeps what the file says.
    """
    known = known or KnownFacts()
    options = {**known.options, **{name: rate for name, rate in (rates or {}).items() if rate is not None}}
    if part is not None and (not part.strip("./") or str(source).startswith("timm:")):
        raise ConfigError(f"part = {part!r}: give a part of a file, such as encoder; timm:NAME has none")
    if str(source).startswith("timm:"):
        tensors, folder_files = _load_from_timm(str(source))
        folder_files = dataclasses.replace(folder_files, known=known)
        return _build_model(str(source), str(source), tensors, folder_files, options), ()
    located = locate_weights(source)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path, part or "")) for path in located.files]
        together = files[0] if len(files) == 1 else _SplitCheckpoint(files)
        folder_files = dataclasses.replace(located.folder_files, wrapper_key=together.wrapper_key, known=known)
        if part is not None:
            together, folder_files = PartOfFile(together, part), describe_part(folder_files, part)
        return _build_model(str(source), located.name, together, folder_files, options), located.files


def build_from_config(config: dict[str, Any]) -> Model:
    """Build the model that a native config.json describes: on the meta device, without memory or values."""
    folder_files = FolderFiles(contents={"config.json": config})
    described = NATIVE_FORMAT.describe_checkpoint({}, folder_files)
    model: Model = build_empty_model(described.architecture)
    model.preprocessing, model.labels = described.preprocessing, described.labels
    model.stored_task = described.task
    model.origin = NATIVE_FORMAT.read_origin(folder_files)
    return model


def recognise_format(
    where: str, tensors: Mapping[str, TensorInfo], folder_files: FolderFiles | None = None
) -> WeightFormat:
    """Return the format of a checkpoint, found by the names and shapes of its tensors.

    Only config.json shows that a native folder holds a network of timm's.
    """
    if folder_files is not None and NATIVE_FORMAT.holds_timm_network(folder_files):
        return NATIVE_FORMAT
    foreign = [weight_format for weight_format in FORMATS.values() if weight_format is not NATIVE_FORMAT]

    def is_foreign_model(part: Mapping[str, TensorInfo]) -> bool:
        return any(weight_format.recognises(part) for weight_format in foreign)

    for weight_format in FORMATS.values():
        if weight_format.recognises(tensors):
            if weight_format is not NATIVE_FORMAT:
                check_one_model(where, tensors, is_foreign_model)
            return weight_format
    if parts := find_parts(tensors, is_foreign_model):
        raise WeightsError(
            f"{where} holds a model inside a larger one, under {shorten_list(parts)}: load it with part={parts[0]!r} "
            f"(convert: --part {parts[0]})"
        )
    if folder_files is not None and (kind := folder_files.json("config.json").get("model_type")):
        raise WeightsError(f"{where} is a {kind!r} of transformers; vitrail reads its {', '.join(sorted(FAMILIES))}")
    if folder_files is not None and (kind := folder_files.json("config.json").get("architecture")):
        raise WeightsError(f"{where} is timm's {kind!r}, whose layers vitrail does not have: load timm:NAME instead")
    raise WeightsError(
        f"{where} is no Vision Transformer, hybrid or BiT ResNet in any format vitrail knows ({', '.join(FORMATS)}): "
        f"it holds {shorten_list(list(tensors)) or 'no tensors'}"
    )


def _build_model(
    where: str, name: str, tensors: TensorFile, folder_files: FolderFiles, options: Mapping[str, Any]
) -> Model:
    weight_format = recognise_format(where, tensors.tensors, folder_files)
    try:
        with ThreadPoolExecutor(1) as aside:
            # Hashing the file takes as long as loading it, so both go on at the same time.
            checked = aside.submit(weight_format.check_integrity, folder_files)
            checkpoint = weight_format.describe_checkpoint(tensors.tensors, folder_files)
            has_full_config = weight_format.name in ("native", "huggingface") and folder_files.has_config
            folder_files.known.check_grid(checkpoint.architecture)
            apply_known_options(checkpoint, options, sure=has_full_config)
            if isinstance(tensors, PartOfFile):
                checkpoint.notes.append(tensors.note)
            _check_layer_count(checkpoint.architecture, len(tensors.tensors))
            model: Model = build_empty_model(checkpoint.architecture)
            rules = weight_format.list_tensor_rules(checkpoint.architecture, checkpoint.dialect)
            matches = match_tensors(model.state_dict(), rules)
            _fill_model(where, model, tensors, checkpoint, matches)
            model = cast(Model, weight_format.finish_model(model, checkpoint.notes))
            model.preprocessing = checkpoint.preprocessing
            model.labels, model.stored_task = checkpoint.labels, checkpoint.task
            model.reliability = checkpoint.reliability
            model.training_cost = checkpoint.training_cost
            model.learned_from, model.chosen_by = checkpoint.learned_from, checkpoint.chosen_by
            model.origin = _describe_origin(name, weight_format, checkpoint, folder_files)
            checked.result()
    except ConfigError as error:
        raise WeightsError(f"{where} describes a model that cannot be: {error}") from None
    except WeightsError as error:
        raise WeightsError(str(error) if where in str(error) else f"{where}: {error}") from None
    return model


def _check_layer_count(architecture: Architecture, tensors: int) -> None:
    """Raise a WeightsError if the config names more layers than there are tensors: building would never end."""
    if isinstance(architecture, TimmArchitecture):
        return  # its name decides the number of layers
    layers = 0 if isinstance(architecture, ResNetArchitecture) else architecture.depth
    layers += sum(architecture.backbone.blocks) if architecture.backbone else 0
    if layers > tensors:
        raise WeightsError(f"its config says {layers} layers, but there are only {tensors} tensors")


def _fill_model(
    where: str, model: ImageModel, file: TensorFile, checkpoint: CheckpointInfo, matches: list[TensorMatch]
) -> None:
    """Read all tensors into an empty model. Names and shapes are checked before the first one is read."""
    empty = model.state_dict()
    # Index tables of timm's networks are computed when the network is built: those of a file could point anywhere.
    tables = {p for p in matches if not empty[p.ours].is_floating_point() and not p.ours.endswith(COUNTER)}
    matches = [match for match in matches if match not in tables]
    table_names = [name for match in tables for name in match.theirs]
    others = [*checkpoint.unused_tensors, *checkpoint.ignored_tensors, *table_names]
    check_complete(where, file.tensors, compute_file_shapes(matches, empty), others)
    floats = {i.dtype for p in matches for n in p.theirs if (i := file.tensors[n]).dtype.is_floating_point}
    dtype = functools.reduce(torch.promote_types, floats)
    if len(floats) > 1:
        checkpoint.notes.append(f"tensors of several types were converted to {dtype}")
    if checkpoint.ignored_tensors:
        ignored = shorten_list(checkpoint.ignored_tensors, most=3)
        checkpoint.notes.append(f"left out, because the model does not need it: {ignored}")

    not_finite: list[str] = []

    shared = {name: file.read(name) for name in {name for m in matches if m.rows for name in m.theirs}}

    def read(match: TensorMatch) -> tuple[str, Tensor]:
        parts = [shared[name] if name in shared else file.read(name) for name in match.theirs]
        ours = match.to_ours(parts).contiguous()
        if not _is_finite(ours):
            not_finite.append(match.ours)
        return match.ours, ours.to(dtype) if ours.is_floating_point() else ours

    with ThreadPoolExecutor(READERS) as readers:
        built = {match.ours: empty[match.ours] for match in tables}
        model.load_state_dict({**dict(readers.map(read, matches)), **built}, assign=True)
    if lost := find_lost_rows(matches, shared):
        checkpoint.notes.append(
            f"rows that the model does not need are not 0, and would be written back as 0: {shorten_list(lost, most=3)}"
        )
    if not_finite:
        names = shorten_list(sorted(not_finite), most=3)
        checkpoint.notes.append(f"values that are not finite (NaN or infinite): {names}")
    model.unused_tensors = {name.removeprefix(UNUSED_PREFIX): file.read(name) for name in checkpoint.unused_tensors}


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity. A sum shows that in one pass, unless it overflows."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


def _describe_origin(
    name: str, weight_format: WeightFormat, checkpoint: CheckpointInfo, folder_files: FolderFiles
) -> Origin:
    """Return where the weights first came from; a native folder records it."""
    earlier = weight_format.read_origin(folder_files)
    if earlier is not None:
        new = [note for note in checkpoint.notes if note not in earlier.notes]
        return earlier.model_copy(update={"notes": (*earlier.notes, *new)}) if new else earlier
    if folder_files.config_not_used:
        checkpoint.notes.append(f"the config.json in its folder was not used: {folder_files.config_not_used}")
    return Origin(
        source=name,
        format=weight_format.name,
        dialect=checkpoint.dialect,
        licence=checkpoint.licence,
        notes=tuple(checkpoint.notes),
    )


class _SplitCheckpoint(TensorFile):
    """A checkpoint that is split into several files."""

    def __init__(self, files: list[TensorFile]) -> None:
        self.path = files[0].path
        self.owners = {name: file for file in files for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self.owners.items()}

    def _read(self, name: str) -> Tensor:
        return self.owners[name].read(name)


class _LoadedTensors(TensorFile):
    """Tensors that another library has already loaded; reading one removes it."""

    def __init__(self, path: Path, contents: Mapping[str, Tensor]) -> None:
        self.path, self.contents = path, dict(contents)
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.contents.items()}

    def _read(self, name: str) -> Tensor:
        return self.contents.pop(name)


def _load_from_timm(source: str) -> tuple[TensorFile, FolderFiles]:
    """Let timm load a pretrained model; return its tensors and a config that describes them.

    If none of vitrail's models can hold the tensors, the config is that of a native folder with a network of timm's.
    """
    timm = import_timm(f"loading {source}")
    try:
        model: Any = timm.create_model(source.removeprefix("timm:"), pretrained=True)
    except (RuntimeError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"timm cannot load {source}: {first}") from None
    pretrained = dict(model.pretrained_cfg)
    name, arguments = pretrained.get("architecture", ""), read_arguments(model)
    config = {"architecture": name, "pretrained_cfg": pretrained, "model_args": arguments}
    tensors = _LoadedTensors(Path(source), model.state_dict())
    folder_files = FolderFiles(contents={"config.json": config})
    if _fits_own_model(source, tensors, folder_files):
        return tensors, folder_files
    config = describe_timm_network(source, pretrained, getattr(model, "num_classes", 0))
    return tensors, FolderFiles(contents={"config.json": config})


def _fits_own_model(source: str, file: TensorFile, folder_files: FolderFiles) -> bool:
    """Return whether one of vitrail's own models can hold all tensors of a checkpoint."""
    try:
        weight_format = recognise_format(source, file.tensors)
        checkpoint = weight_format.describe_checkpoint(file.tensors, folder_files)
        empty = build_empty_model(checkpoint.architecture).state_dict()
        matches = match_tensors(empty, weight_format.list_tensor_rules(checkpoint.architecture, checkpoint.dialect))
        others = [*checkpoint.unused_tensors, *checkpoint.ignored_tensors]
        check_complete(source, file.tensors, compute_file_shapes(matches, empty), others)
    except (ConfigError, WeightsError):
        return False
    return True
