"""The door out: `convert` writes a model in another naming and proves that it is the same model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.errors import ConfigError, WeightsError, did_you_mean
from vitrail.model.base import ImageModel
from vitrail.weights.card import Certificate, format_model_card
from vitrail.weights.formats.native import compute_sha256
from vitrail.weights.load import FORMATS, load_with_files
from vitrail.weights.save import MODEL_CARD, draft_folder, write_model
from vitrail.weights.source import HUB_NAME, SUFFIXES

TOLERANCE = 1e-3
"""Of an output's deviation. A faithful conversion differs by nothing; one that must change the eps of a norm, by some
1e-4; a wrong one by 0.1 and more."""
SEED, IMAGES = 0, 2


def convert(source: str | Path, target: str | Path, to: str, **known: Any) -> Certificate:
    """Write the model `source` into the new folder `target` in the naming `to`.

    `known`: what the source may not say, as in `load`: num_heads=6, gelu="tanh".

    The folder is loaded back and both models run on the same inputs. Where they differ the folder is removed and a
    WeightsError raised; where they agree the measurement stands in its model card, and is returned.
    """
    if to not in FORMATS:
        raise ConfigError(f"unknown format {to!r}{did_you_mean(to, FORMATS) or '.'} There are {', '.join(FORMATS)}")
    target, weight_format = Path(target).expanduser(), FORMATS[to]
    if target.suffix in SUFFIXES:
        raise ConfigError(
            f"{target} would be a folder that holds {weight_format.weights_file}: name it without {target.suffix}"
        )
    with draft_folder(target) as draft:
        model, files = load_with_files(source, known)
        write_model(model, weight_format, draft)
        again, written = load_with_files(draft)
        certificate = compare_models(model.eval(), again.eval(), files, written)
        if not certificate.relative_difference <= TOLERANCE:  # so that NaN fails too
            raise WeightsError(
                f"as {to} this model would compute something else, so nothing was written: its outputs differ by up to "
                f"{certificate.max_difference:.3g}, or {certificate.relative_difference:.3g} of their deviation"
            )
        (draft / MODEL_CARD).write_text(format_model_card(model, target.name, to, certificate), encoding="utf-8")
    return certificate


def push_to_hub(folder: str | Path, destination: str) -> str:
    """Upload a folder with its model card to `hf:owner/name`; the address it then has."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    name, hub = parse_destination(destination), HfApi()
    try:
        hub.create_repo(name, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by vitrail"))
    except HFValidationError as error:
        raise ConfigError(f"{destination}: {error}") from None
    except Exception as error:  # whatever the network's libraries raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{folder} cannot be uploaded to {destination}: {first}") from error


def parse_destination(destination: str) -> str:
    """owner/name, from hf:owner/name."""
    name = destination.removeprefix("hf:")
    if not destination.startswith("hf:") or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{destination!r} is not hf:owner/name")
    return name


@torch.inference_mode()
def compare_models(
    model: ImageModel, again: ImageModel, files: tuple[Path, ...] = (), written: tuple[Path, ...] = ()
) -> Certificate:
    """Run two models on the same fixed inputs in float32, and hold each output's difference against its deviation."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(IMAGES, model.in_channels, *model.image_size, generator=generator)
    with _in_float32(model), _in_float32(again):
        outputs = [(model.embed(images), again.embed(images)), (model(images), again(images))]
    origin = model.origin
    return Certificate(
        source="fresh weights" if origin is None else origin.source,
        source_sha256={path.name: compute_sha256(path) for path in files},
        target_sha256={path.name: compute_sha256(path) for path in written},
        inputs=f"{'×'.join(map(str, images.shape))} values from a normal distribution, seed {SEED}",
        max_difference=float(torch.stack([(a - b).abs().max() for a, b in outputs]).max()),
        relative_difference=float(torch.stack([_relative(a, b) for a, b in outputs]).max()),
        preprocessing_note=_differences(model.preprocessing, again.preprocessing),
        notes=() if origin is None else origin.notes,
    )


def _differences(before: Preprocessing, after: Preprocessing) -> str:
    """Told by the size that a crop is cut from, for some formats store that instead of a fraction."""
    facts = ("image_size", "mean", "std", "resize", "resized", "interpolation")
    pairs = [(fact, getattr(before, fact), getattr(after, fact)) for fact in facts]
    return ", ".join(f"{fact} {old} becomes {new}" for fact, old, new in pairs if old != new)


def _relative(expected: Tensor, found: Tensor) -> Tensor:
    """NaN stays NaN; what must be constant must be the same constant."""
    difference = (expected - found).abs().max()
    return difference / expected.std() if difference != 0 else difference


@contextlib.contextmanager
def _in_float32(model: ImageModel) -> Iterator[None]:
    dtype = next(model.parameters()).dtype
    model.float()
    try:
        yield
    finally:
        model.to(dtype)
