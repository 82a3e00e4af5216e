"""`convert` writes a model in another format and checks that it computes the same."""

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
"""Largest allowed difference, in standard deviations of an output. A faithful conversion has 0, one that must change
the eps of a norm about 1e-4, a wrong one 0.1 and more."""
SEED, IMAGES = 0, 2


def convert(source: str | Path, target: str | Path, to: str, **known: Any) -> Certificate:
    """Write the model `source` into the new folder `target`, and check that it computes the same there.

    Args:
        source: any source that `load` takes.
        target: a new or empty folder.
        to: the format: native, timm, torchvision, huggingface or google.
        known: options that the source may not store, as in `load`: num_heads=6, gelu="tanh".

    Returns:
        The measured difference between the two models; it is also written into the model card.

    Raises:
        WeightsError: the format cannot hold the model, or the written model computes something else. Then nothing is
            written.
    """
    if to not in FORMATS:
        raise ConfigError(f"unknown format {to!r}{did_you_mean(to, FORMATS) or '.'} There are {', '.join(FORMATS)}")
    target, weight_format = Path(target).expanduser(), FORMATS[to]
    if target.suffix in SUFFIXES:
        raise ConfigError(f"{target} will be a folder with {weight_format.weights_file}: drop the {target.suffix}")
    with draft_folder(target) as draft:
        model, files = load_with_files(source, known)
        write_model(model, weight_format, draft)
        converted, converted_files = load_with_files(draft)
        certificate = compare_models(model.eval(), converted.eval(), files, converted_files)
        if not certificate.relative_difference <= TOLERANCE:  # written this way, NaN fails too
            raise WeightsError(
                f"as {to} this model would compute something else, so nothing was written: its outputs differ by up to "
                f"{certificate.max_difference:.3g}, or {certificate.relative_difference:.3g} of their deviation"
            )
        (draft / MODEL_CARD).write_text(format_model_card(model, target.name, to, certificate), encoding="utf-8")
    return certificate


def push_to_hub(folder: str | Path, destination: str) -> str:
    """Upload a folder with its model card to `hf:owner/name`, and return its address there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    name, hub = parse_destination(destination), HfApi()
    try:
        hub.create_repo(name, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by vitrail"))
    except HFValidationError as error:
        raise ConfigError(f"{destination}: {error}") from None
    except Exception as error:  # network libraries raise many types
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{folder} cannot be uploaded to {destination}: {first}") from error


def parse_destination(destination: str) -> str:
    """Return the owner/name of hf:owner/name; raise a ConfigError if the text has another form."""
    name = destination.removeprefix("hf:")
    if not destination.startswith("hf:") or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{destination!r} is not hf:owner/name")
    return name


@torch.inference_mode()
def compare_models(
    model: ImageModel, converted: ImageModel, files: tuple[Path, ...] = (), converted_files: tuple[Path, ...] = ()
) -> Certificate:
    """Run two models on the same fixed random images in float32, and measure how far their outputs differ."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(IMAGES, model.in_channels, *model.image_size, generator=generator)
    with _use_float32(model), _use_float32(converted):
        outputs = [(model.embed(images), converted.embed(images)), (model(images), converted(images))]
    origin = model.origin
    return Certificate(
        source="fresh weights" if origin is None else origin.source,
        source_sha256={path.name: compute_sha256(path) for path in files},
        target_sha256={path.name: compute_sha256(path) for path in converted_files},
        inputs=f"{'×'.join(map(str, images.shape))} values from a normal distribution, seed {SEED}",
        max_difference=float(torch.stack([(a - b).abs().max() for a, b in outputs]).max()),
        relative_difference=float(torch.stack([_relative_difference(a, b) for a, b in outputs]).max()),
        preprocessing_note=_list_differences(model.preprocessing, converted.preprocessing),
        notes=() if origin is None else origin.notes,
    )


def _list_differences(before: Preprocessing, after: Preprocessing) -> str:
    # Some formats store the size before the crop instead of the crop fraction, so that size is compared.
    facts = ("image_size", "mean", "std", "resize", "resized", "interpolation")
    pairs = [(fact, getattr(before, fact), getattr(after, fact)) for fact in facts]
    return ", ".join(f"{fact} {old} becomes {new}" for fact, old, new in pairs if old != new)


def _relative_difference(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the largest difference in standard deviations; a constant output may not differ at all. NaN stays NaN."""
    difference = (expected - actual).abs().max()
    return difference / expected.std() if difference != 0 else difference


@contextlib.contextmanager
def _use_float32(model: ImageModel) -> Iterator[None]:
    dtype = next(model.parameters()).dtype
    model.float()
    try:
        yield
    finally:
        model.to(dtype)
