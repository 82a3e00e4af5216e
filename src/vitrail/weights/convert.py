"""`convert` writes a model in another format and checks that it computes the same."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.errors import ConfigError, WeightsError, did_you_mean
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.system.events import OnEvent, open_listener
from vitrail.system.files import sha256
from vitrail.system.hub_names import is_hub_name
from vitrail.system.results import Result, Rows
from vitrail.weights.card import Certificate, format_model_card
from vitrail.weights.known import KnownFacts
from vitrail.weights.load import FORMATS, load_with_files
from vitrail.weights.save import MODEL_CARD, draft_folder, write_model
from vitrail.weights.source import SUFFIXES, Which, choose_weights

TOLERANCE = 1e-3
"""Largest allowed difference, in standard deviations of an output. A faithful conversion has 0, one that must change
the eps of a norm about 1e-4, a wrong one 0.1 and more."""
SEED, IMAGES = 0, 2
LOST_RELIABILITY = (
    "this format has no place for what `vitrail calibrate` fitted, for sets of labels and unknown images: --to native "
    "keeps it"
)


@dataclass(frozen=True, repr=False)
class ConversionResult(Result):
    """A model in another format, and how far its outputs are from the source's."""

    folder: Path
    format: str
    max_difference: float
    """Largest absolute difference between the outputs (representation and logits)."""
    relative_difference: float
    """Largest difference divided by the standard deviation of that output."""
    preprocessing_note: str
    """Differences between the two preprocessings; empty if there are none."""
    notes: tuple[str, ...]
    """Facts about the source that were concluded, because its files do not say them; whether the format's library
    interpolates positions otherwise at other image sizes; and what the format does not keep of the model's task."""
    url: str | None = None
    """Where it was uploaded to, if it was."""

    @property
    def preprocessing_matches(self) -> bool:
        """Whether the written model prepares images as the source does."""
        return not self.preprocessing_note

    def summary(self) -> Rows:
        """Return the differences and where the files are."""
        rows = [("note", note) for note in self.notes]
        relative = f"{self.relative_difference:.3g} of an output's deviation"
        rows += [
            ("largest difference", f"{self.max_difference:.3g} ({relative})"),
            ("preprocessing", self.preprocessing_note or "matches"),
            ("written", f"{self.folder} (its README.md says how to load it)"),
        ]
        return rows if self.url is None else [*rows, ("uploaded", self.url)]


def convert(
    source: str | Path | ImageModel,
    target: str | Path,
    to: str,
    *,
    which: Which = "last",
    num_heads: int | None = None,
    gelu: Literal["tanh", "exact", "quick"] | None = None,
    norm_eps: float | None = None,
    known: Mapping[str, Any] | None = None,
    part: str | None = None,
    push: str | None = None,
    on_event: OnEvent | None = None,
) -> ConversionResult:
    """Write the model `source` into the new folder `target`, and check that it computes the same there.

    Events: `converted`, with the fields of the result, once the folder is written and before it is uploaded.

    Args:
        source: any source that `load` takes, or a loaded model.
        target: a new or empty folder.
        to: the format: native, timm, torchvision, huggingface, google, openclip or meta.
        which: which weights of a run, as in `load`.
        num_heads: attention heads. This and the next two are facts that the source may not store, as in `load`.
        gelu: tanh approximation, exact, or "quick", the sigmoid approximation.
        norm_eps: epsilon of the norms.
        known: these and other facts that the source does not store, such as `{"grid": (12, 42)}`, as in `load`.
        part: the part of a larger file that is the model, as in `load`.
        push: `hf:owner/name`, where the folder is uploaded to in the end.
        on_event: called with what happens (see vitrail/system/events.py).

    Returns:
        The folder, and the measured difference between the two models, which is also written into the model card.

    Raises:
        ConfigError: an unknown format, or an option that is impossible or does not fit the source.
        WeightsError: the format cannot hold the model, or the written model computes something else. Then nothing is
            written. Or the folder, which is written, cannot be uploaded.
    """
    if push is not None:
        parse_destination(push)  # before the work
    if to not in FORMATS:
        raise ConfigError(f"unknown format {to!r}{did_you_mean(to, FORMATS) or '.'} There are {', '.join(FORMATS)}")
    folder, weight_format = Path(target).expanduser(), FORMATS[to]
    if folder.suffix in SUFFIXES:
        raise ConfigError(f"{folder} will be a folder with {weight_format.weights_file}: drop the {folder.suffix}")
    facts = KnownFacts.collect(known, num_heads=num_heads, gelu=gelu, norm_eps=norm_eps)
    with open_listener(on_event) as listener:
        with draft_folder(folder) as draft:
            model, files = _open_source(source, which, facts, part)
            write_model(model, weight_format, draft)
            converted, converted_files = load_with_files(draft)
            certificate = replace(
                measure_difference(model.eval(), converted.eval(), files, converted_files),
                task_note=weight_format.describe_lost_task(model),
            )
            _check_certificate(certificate, to)
            (draft / MODEL_CARD).write_text(
                format_model_card(model, folder.name, to, certificate), encoding="utf-8", newline="\n"
            )
        result = ConversionResult(
            folder=folder,
            format=to,
            max_difference=certificate.max_difference,
            relative_difference=certificate.relative_difference,
            preprocessing_note=certificate.preprocessing_note,
            notes=(
                *certificate.notes,
                *filter(None, (certificate.resize_note, certificate.task_note)),
                *([LOST_RELIABILITY] if model.reliability is not None and to != "native" else []),
            ),
        )
        listener("converted", result.to_dict())
        return result if push is None else replace(result, url=push_to_hub(folder, push))


def _open_source(
    source: str | Path | ImageModel, which: Which, known: KnownFacts, part: str | None
) -> tuple[ImageModel, tuple[Path, ...]]:
    """Return the model of a source and its files. A loaded model is copied: the check changes its type for a while."""
    if not isinstance(source, ImageModel):
        return load_with_files(source if which == "last" else choose_weights(str(source), which), known, part)
    if which != "last" or part is not None or known != KnownFacts():
        raise ConfigError(
            "which, num_heads, gelu, norm_eps, known and part are for a source on the disk: a loaded model knows them"
        )
    return copy.deepcopy(source).cpu(), ()


def _check_certificate(certificate: Certificate, to: str) -> None:
    """Raise a WeightsError if the written model computes something else."""
    if not certificate.relative_difference <= TOLERANCE:  # written this way, NaN fails too
        raise WeightsError(
            f"as {to} this model would compute something else, so nothing was written: its outputs differ by up to "
            f"{certificate.max_difference:.3g}, or {certificate.relative_difference:.3g} of their deviation"
        )


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
    if not destination.startswith("hf:") or not is_hub_name(name):
        raise ConfigError(f"{destination!r} is not hf:owner/name")
    return name


@torch.inference_mode()
def measure_difference(
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
        source_sha256={path.name: sha256(path) for path in files},
        target_sha256={path.name: sha256(path) for path in converted_files},
        inputs=f"{'×'.join(map(str, images.shape))} values from a normal distribution, seed {SEED}",
        max_difference=float(torch.stack([(a - b).abs().max() for a, b in outputs]).max()),
        relative_difference=float(torch.stack([_relative_difference(a, b) for a, b in outputs]).max()),
        preprocessing_note=_list_differences(model.preprocessing, converted.preprocessing),
        notes=() if origin is None else origin.notes,
        resize_note=_describe_other_resize(model, converted),
    )


def _describe_other_resize(model: ImageModel, converted: ImageModel) -> str:
    """Return a sentence if the format's own library interpolates positions otherwise than the model, else nothing."""
    before, after = model.architecture, converted.architecture
    if not isinstance(before, VitArchitecture) or not isinstance(after, VitArchitecture) or not before.resizes_table:
        return ""
    if before.position_resize == after.position_resize:
        return ""
    return (
        f"at other image sizes than its own, positions are interpolated by {after.position_resize}, the way of the "
        f"format's library, and no longer by {before.position_resize}"
    )


def _list_differences(before: Preprocessing, after: Preprocessing) -> str:
    # Some formats store the size before the crop instead of the crop fraction, so that size is compared.
    facts = ["image_size", "mean", "std", "resize", "resized", "interpolation"]
    if before.crops:
        facts.append("crop_rounding")
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
