"""The door out: `convert` writes a model in another naming and proves that it is the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vitrail.errors import ConfigError, WeightsError, did_you_mean
from vitrail.model.base import ImageModel
from vitrail.weights.card import Certificate, model_card
from vitrail.weights.load import NAMINGS, load
from vitrail.weights.native import sha256
from vitrail.weights.save import whole_folder, write
from vitrail.weights.source import SUFFIXES, locate

TOLERANCE = 1e-3
"""Of the representation's deviation. A faithful conversion differs by nothing; one that must change the eps of a norm,
by some 1e-4; a wrong one by 0.1 and more."""
SEED, IMAGES = 0, 2


def convert(source: str | Path, target: str | Path, to: str) -> Certificate:
    """Write the model `source` into the new folder `target` in the naming `to`.

    The folder is loaded back and both models run on the same inputs. Where they differ the folder is removed and a
    WeightsError raised; where they agree the measurement stands in its model card, and is returned.
    """
    if to not in NAMINGS:
        raise ConfigError(f"unknown format {to!r}{did_you_mean(to, NAMINGS)} There are {', '.join(NAMINGS)}")
    target, naming = Path(target), NAMINGS[to]
    if target.suffix in SUFFIXES:
        raise ConfigError(
            f"{target} would be a folder that holds {naming.weights_file}: name it without {target.suffix}"
        )
    model = load(source)
    with whole_folder(target) as draft:
        write(model, naming, draft)
        again = load(draft)
        certificate = compare(model, again, source, draft / naming.weights_file)
        if not certificate.relative <= TOLERANCE:
            raise WeightsError(
                f"as {to} this model would compute something else, so nothing was written: the largest difference is "
                f"{certificate.max_difference:.3g}, or {certificate.relative:.3g} of its outputs' deviation"
            )
        (draft / "README.md").write_text(model_card(model, target.name, to, certificate), encoding="utf-8")
    return certificate


def push(folder: str | Path, destination: str) -> str:
    """Upload a folder with its model card to `hf:owner/name`; the address it then has."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name = destination.removeprefix("hf:")
    if not destination.startswith("hf:") or name.count("/") != 1:
        raise ConfigError(f"{destination!r} is not hf:owner/name")
    hub = HfApi()
    try:
        hub.create_repo(name, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by vitrail"))
    except HFValidationError as error:
        raise ConfigError(f"{destination}: {error}") from None
    except (HfHubHTTPError, OSError) as error:
        raise WeightsError(f"{folder} cannot be uploaded to {destination}: {error}") from None


@torch.inference_mode()
def compare(model: ImageModel, again: ImageModel, source: str | Path, weights: Path) -> Certificate:
    """Run two models on the same fixed inputs in float32."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(IMAGES, model.in_channels, *model.image_size, generator=generator)
    first, second = (_outputs(m, images) for m in (model, again))
    # The crop by the size that it is cut from: some formats store that instead of a fraction.
    facts = ("image_size", "mean", "std", "resize", "resized", "interpolation")
    differing = [fact for fact in facts if getattr(model.preprocessing, fact) != getattr(again.preprocessing, fact)]
    size = "×".join(str(side) for side in images.shape)
    return Certificate(
        source=str(source),
        source_sha256=_hashes(source),
        target_sha256={weights.name: sha256(weights)},
        inputs=f"{size} values from a normal distribution, seed {SEED}",
        max_difference=max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)),
        scale=float(first[0].std()),
        preprocessing_matches=not differing,
        preprocessing_note=", ".join(differing),
        notes=() if model.origin is None else model.origin.notes,
    )


def _outputs(model: ImageModel, images: torch.Tensor) -> Sequence[torch.Tensor]:
    dtype = next(model.parameters()).dtype
    model = model.float()
    outputs = [model.embed(images), model(images)]
    model.to(dtype)
    return outputs


def _hashes(source: str | Path) -> dict[str, str]:
    if str(source).startswith("timm:"):
        return {}
    return {path.name: sha256(path) for path in locate(source).files}
