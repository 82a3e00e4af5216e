"""Writing a model in any naming: a folder that is whole or absent."""

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
from vitrail.weights.card import model_card
from vitrail.weights.load import NAMINGS
from vitrail.weights.naming import Naming
from vitrail.weights.native import SET_ASIDE, write_sums
from vitrail.weights.pairs import pair_up


def save(model: ImageModel, folder: str | Path) -> Path:
    """Write a model as a native folder, which `load` reads; an existing one is replaced at once."""
    folder = Path(folder)
    with whole_folder(folder, replace=True) as draft:
        write(model, NAMINGS["native"], draft)
        (draft / "README.md").write_text(model_card(model, folder.name, "native"), encoding="utf-8")
    return folder


def write(model: ImageModel, naming: Naming, folder: Path) -> None:
    """Weights and configs in a naming, without a model card."""
    refuse(model, naming)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(foreign_tensors(model, naming), folder / naming.weights_file)
    for name, content in naming.companions(model).items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if naming.name == "native":
        write_sums(folder)


def refuse(model: ImageModel, naming: Naming) -> None:
    """Raise a WeightsError where an architecture does not exist in a naming."""
    if reason := naming.refusal(model.architecture, naming.written_dialect(model)):
        raise WeightsError(f"this model cannot be written as {naming.name}: {reason}")


def foreign_tensors(model: ImageModel, naming: Naming) -> dict[str, Tensor]:
    """The model's tensors under the names and in the shapes of a naming."""
    ours = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for pair in pair_up(ours, naming.lines(model.architecture, naming.written_dialect(model))):
        parts = pair.rule.outward(ours[pair.ours])
        tensors.update((name, part.contiguous()) for name, part in zip(pair.theirs, parts, strict=True))
    if naming.name == "native":
        tensors.update((SET_ASIDE + name, tensor) for name, tensor in model.set_aside.items())
    elif model.origin is not None and model.origin.format == naming.name:
        tensors.update(model.set_aside)
    return tensors


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """By the suffix: safetensors, PyTorch's zip, or npz."""
    if path.suffix == ".safetensors":
        # Parts of one tensor share its memory, which this format does not allow.
        save_file({name: tensor.clone() if _shares(tensor) else tensor for name, tensor in tensors.items()}, path)
    elif path.suffix == ".pth":
        torch.save({name: tensor.clone() if _shares(tensor) else tensor for name, tensor in tensors.items()}, path)
    else:
        arrays: dict[str, Any] = {name: _array(name, tensor) for name, tensor in tensors.items()}
        np.savez(path, **arrays)


def _shares(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _array(name: str, tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        raise WeightsError(f"{name} is bfloat16, which .npz files cannot hold: convert the model with dtype float32")
    return np.asarray(tensor.numpy())


@contextlib.contextmanager
def whole_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """A draft beside `folder` that takes its place when the block ends well, and vanishes when it does not."""
    if folder.exists() and not replace and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} is there already: name a new folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield draft
        _publish(draft)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(old / "folder")
            draft.rename(folder)
            shutil.rmtree(old)
        else:
            draft.rename(folder)
    except OSError as error:
        raise WeightsError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(folder: Path) -> None:
    """Readable for all (safetensors writes for the owner only) and on the disk, before it gets its name."""
    folder.chmod(0o755)
    for path in [*folder.iterdir(), folder]:
        if path != folder:
            path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
