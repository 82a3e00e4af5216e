"""Write a model in any format. A folder is written completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.base import ImageModel
from vitrail.model.timm_model import TimmModel
from vitrail.reliability.record import Reliability
from vitrail.system.files import flush_to_disk, rename_when_free
from vitrail.weights.card import format_model_card
from vitrail.weights.formats.base import FolderFiles, WeightFormat
from vitrail.weights.formats.native import CHECKSUM_FILE, CHECKSUMMED_FILES, FORMAT, RELIABILITY_FILE
from vitrail.weights.load import FORMATS
from vitrail.weights.source import PANE, locate_weights
from vitrail.weights.tensor_rules import convert_to_theirs, match_tensors

MODEL_CARD = "README.md"


def save(model: ImageModel, folder: str | Path, notes: str = "") -> Path:
    """Write a model as a native folder, which `load` reads, and return the folder.

    Args:
        model: the model to write.
        folder: a new or empty folder, or a native folder, which is replaced.
        notes: text about the training, for the model card.
    """
    folder = Path(folder).expanduser()
    with draft_folder(folder, replace=_is_native(folder)) as draft:
        write_model(model, FORMATS["native"], draft)
        (draft / MODEL_CARD).write_text(
            format_model_card(model, folder.name, "native", notes=notes), encoding="utf-8", newline="\n"
        )
    return folder


def _is_native(folder: Path) -> bool:
    """Return whether `save` has written a folder, and nothing else lies in it."""
    expected = {*CHECKSUMMED_FILES, RELIABILITY_FILE, CHECKSUM_FILE, MODEL_CARD}
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - expected:
        return False
    try:
        return FolderFiles(folder).json("config.json").get("format") == FORMAT
    except WeightsError:
        return False


def find_native_folder(source: str | Path) -> Path | None:
    """Return the native folder that a name means, such as the model of a run; None if it is of another kind, of the
    hub, or inside this package, where nothing may be written."""
    if str(source) == PANE or str(source).startswith(("hf:", "timm:")):
        return None
    (first, *_) = locate_weights(source).files
    return first.parent if _is_native(first.parent) else None


def add_reliability(folder: Path, reliability: Reliability) -> None:
    """Write into a native folder what was fitted for its model, in place of what was there. The folder is replaced as a
    whole; its other files stay as they are."""
    with draft_folder(folder, replace=True) as draft:
        for path in folder.iterdir():
            if path.name not in (RELIABILITY_FILE, CHECKSUM_FILE):
                _link_or_copy(path, draft / path.name)
        write_json(draft / RELIABILITY_FILE, reliability.model_dump(mode="json"))
        FORMATS["native"].finish_folder(draft)


def _link_or_copy(path: Path, copy: Path) -> None:
    """Give a file a second name, or copy it where that is not possible."""
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file for people and programs."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def write_model(model: ImageModel, weight_format: WeightFormat, folder: Path) -> None:
    """Write weights and config files in a format, without a model card."""
    if isinstance(model, TimmModel) and weight_format.name != "native":
        raise WeightsError(
            f"this model cannot be written as {weight_format.name}: it is timm's own network "
            f"{model.architecture.name}, which only the format native can hold"
        )
    if reason := weight_format.explain_refusal(model.architecture):
        raise WeightsError(f"this model cannot be written as {weight_format.name}: {reason}")
    model = weight_format.adapt_model(model)
    config_files = weight_format.make_config_files(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = convert_tensors(model, weight_format, weight_format.choose_dialect(model))
    write_tensors(tensors, folder / weight_format.weights_file)
    for name, content in config_files.items():
        write_json(folder / name, content)
    weight_format.finish_folder(folder)


def convert_tensors(model: ImageModel, weight_format: WeightFormat, dialect: str) -> dict[str, Tensor]:
    """Return the model's tensors under the names and in the shapes of a format."""
    ours = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    matches = match_tensors(ours, weight_format.list_tensor_rules(model.architecture, dialect))
    tensors = {name: tensor.contiguous() for name, tensor in convert_to_theirs(matches, ours).items()}
    origin = model.origin
    has_same_format = origin is not None and (origin.format, origin.dialect) == (weight_format.name, dialect)
    if has_same_format or weight_format.name == "native":
        tensors |= {weight_format.name_unused_tensor(name): tensor for name, tensor in model.unused_tensors.items()}
    return tensors


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of tensors; the suffix decides the kind: safetensors, npz, or PyTorch's zip."""
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: _to_numpy(tensor) for name, tensor in tensors.items()}
        np.savez(path, **arrays)
        return
    # Parts of one tensor share its memory: safetensors refuses that, and PyTorch would write all of it each time.
    separate = {name: tensor.clone() if _shares_memory(tensor) else tensor for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(separate, path)
    else:
        torch.save(separate, path)


def _shares_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _to_numpy(tensor: Tensor) -> Any:
    # NumPy has no bfloat16: Google's files store it as two bytes without a type.
    return tensor.view(torch.int16).numpy().view("V2") if tensor.dtype == torch.bfloat16 else tensor.numpy()


@contextlib.contextmanager
def draft_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` when the block succeeds, and is deleted when it fails."""
    folder = folder.resolve()  # follow a link, so that the link itself stays
    if folder.exists() and not replace and not (folder.is_dir() and not any(folder.iterdir())):
        raise WeightsError(f"{folder} is there already: name a new folder, or remove it first")
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield draft
        _publish(draft)
        _move_into_place(draft, folder)
    except OSError as error:
        raise WeightsError(f"{folder} cannot be written: {error}") from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _move_into_place(draft: Path, folder: Path) -> None:
    """Rename the draft; an earlier folder is moved away first, and moved back if that fails."""
    if not folder.exists():
        rename_when_free(draft, folder)
    else:
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent)) / "folder"
        rename_when_free(folder, aside)
        try:
            rename_when_free(draft, folder)
        except OSError:
            rename_when_free(aside, folder)
            raise
        finally:
            shutil.rmtree(aside.parent, ignore_errors=True)
    flush_to_disk(folder.parent)


def _publish(folder: Path) -> None:
    """Give files the usual permissions (safetensors lets only the owner read) and flush them to the disk."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)
        flush_to_disk(path)
    folder.chmod(0o777 & ~mask)
    flush_to_disk(folder)
