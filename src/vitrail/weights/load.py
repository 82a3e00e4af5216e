"""The door in: `load` makes a model of any checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Origin
from vitrail.errors import ConfigError, MissingExtraError, WeightsError
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.create import build
from vitrail.model.vit import VisionTransformer
from vitrail.weights.files import TensorFile, TensorInfo, open_tensors
from vitrail.weights.google import GoogleNaming
from vitrail.weights.huggingface import HuggingFaceNaming
from vitrail.weights.naming import Beside, Naming, Reading
from vitrail.weights.native import SET_ASIDE, NativeNaming, check_sums
from vitrail.weights.pairs import Pair, check_complete, expected_shapes, listed, pair_up
from vitrail.weights.source import locate
from vitrail.weights.timm import TimmNaming
from vitrail.weights.torchvision import TorchvisionNaming

log = logging.getLogger("vitrail")

NAMINGS: dict[str, Naming] = {
    naming.name: naming
    for naming in (NativeNaming(), TimmNaming(), TorchvisionNaming(), HuggingFaceNaming(), GoogleNaming())
}
READERS = 2
"""Threads that read tensors: more of them wait for memory pages than for the disk."""


def load(
    source: str | Path,
    *,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> VisionTransformer | BitResNet:
    """A model from weights of any origin, ready to evaluate. No code from a file is ever run.

    Args:
        source: a folder or file of weights (vitrail, timm, torchvision, Hugging Face, Google), a run folder,
            `hf:owner/name[@revision]` from the hub, or `timm:name` where timm is installed.
        num_classes: replace the head by a zero-initialised one for so many classes.
        image_size: resize the position embedding for good.
        device: where the parameters live; the CPU if None.
        dtype: of the parameters; the file's if None.

    Returns:
        The model, with `preprocessing`, `labels` and `origin`. What the file did not say and was concluded stands in
        `model.origin.notes`, and is logged.
    """
    if str(source).startswith("timm:"):
        with _from_timm(str(source)) as (tensors, beside):
            model = _model(str(source), tensors, beside)
    else:
        located = locate(source)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open_tensors(path)) for path in located.files]
            tensors = files[0] if len(files) == 1 else _Together(files)
            model = _model(str(source), tensors, Beside(located.beside.folder, tensors.wrapper))
    if num_classes is not None:
        model.replace_head(num_classes)
    if image_size is not None:
        model.resize(image_size)
    return model.to(device=device, dtype=dtype).eval()


def recognise(where: str, tensors: Mapping[str, TensorInfo]) -> Naming:
    """The naming of a checkpoint, from its names and shapes."""
    for naming in NAMINGS.values():
        if naming.recognises(tensors):
            return naming
    raise WeightsError(
        f"{where} is no Vision Transformer, hybrid or BiT ResNet in any naming vitrail knows ({', '.join(NAMINGS)}): "
        f"it holds {listed(list(tensors)) or 'no tensors'}"
    )


def _model(where: str, tensors: TensorFile, beside: Beside) -> VisionTransformer | BitResNet:
    naming = recognise(where, tensors.tensors)
    try:
        with ThreadPoolExecutor(1) as aside:
            # Hashing and reading take the same time, so they go side by side.
            checked = aside.submit(check_sums, beside.folder) if naming.name == "native" and beside.folder else None
            reading = naming.understand(tensors.tensors, beside)
            model = build(reading.architecture)
            pairs = pair_up(model.state_dict(), naming.lines(reading.architecture, reading.dialect))
            _fill(where, model, tensors, reading, pairs)
            if checked is not None:
                checked.result()
    except ConfigError as error:
        raise WeightsError(f"{where} describes a model that cannot be: {error}") from None
    except WeightsError as error:
        raise WeightsError(str(error) if where in str(error) else f"{where}: {error}") from None
    model.preprocessing = reading.preprocessing
    model.labels = reading.labels
    model.origin = _origin(where, naming, reading, beside)
    for note in reading.notes:
        log.info("%s: %s", where, note)
    return model


def _fill(where: str, model: ImageModel, file: TensorFile, reading: Reading, pairs: list[Pair]) -> None:
    """All tensors into an empty model, or none: what is in the file is known before any of it is read."""
    empty = model.state_dict()
    check_complete(where, file.tensors, expected_shapes(pairs, empty), [*reading.set_aside, *reading.left_out])
    floats = {i.dtype for p in pairs for n in p.theirs if (i := file.tensors[n]).dtype.is_floating_point}
    dtype = functools.reduce(torch.promote_types, floats)
    if len(floats) > 1:
        reading.notes.append(f"tensors of several types were brought to {dtype}")
    if reading.left_out:
        reading.notes.append(f"left out, for the model has no use for it: {listed(reading.left_out, most=3)}")

    def read(pair: Pair) -> tuple[str, Tensor]:
        ours = pair.rule.inward([file.read(name) for name in pair.theirs]).contiguous()
        return pair.ours, ours.to(dtype) if ours.is_floating_point() else ours

    with ThreadPoolExecutor(READERS) as readers:
        model.load_state_dict(dict(readers.map(read, pairs)), assign=True)
    model.requires_grad_(True)
    model.set_aside = {name.removeprefix(SET_ASIDE): file.read(name) for name in reading.set_aside}


def _origin(where: str, naming: Naming, reading: Reading, beside: Beside) -> Origin:
    """Where the numbers first came from: a native folder remembers it."""
    earlier = naming.origin(beside) if isinstance(naming, NativeNaming) else None
    if earlier is not None:
        return earlier
    return Origin(
        source=where,
        format=naming.name,
        dialect=reading.dialect,
        licence=reading.licence,
        notes=tuple(reading.notes),
    )


class _Together(TensorFile):
    """Several files of one checkpoint."""

    def __init__(self, files: list[TensorFile]) -> None:
        self.owners = {name: file for file in files for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self.owners.items()}

    def read(self, name: str) -> Tensor:
        """From the file that holds it."""
        return self.owners[name].read(name)


class _InMemory(TensorFile):
    """Tensors that another library has loaded."""

    def __init__(self, contents: Mapping[str, Tensor]) -> None:
        self.contents = dict(contents)
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.contents.items()}

    def read(self, name: str) -> Tensor:
        """Handed over."""
        return self.contents.pop(name)


@contextlib.contextmanager
def _from_timm(source: str) -> Iterator[tuple[TensorFile, Beside]]:
    """Let timm load one of its pretrained models, and take the weights over."""
    try:
        import timm
    except ImportError:
        raise MissingExtraError(f"loading {source}", "timm") from None
    try:
        model: Any = timm.create_model(source.removeprefix("timm:"), pretrained=True)
    except (RuntimeError, OSError) as error:
        raise WeightsError(f"timm cannot load {source}: {error}") from None
    heads = {"num_heads": model.blocks[0].attn.num_heads} if hasattr(model, "blocks") else {}
    config = {"architecture": model.pretrained_cfg["architecture"], "pretrained_cfg": model.pretrained_cfg}
    config |= {"global_pool": getattr(model, "global_pool", None), "model_args": heads}
    yield _InMemory(model.state_dict()), Beside(given={"config.json": config})
