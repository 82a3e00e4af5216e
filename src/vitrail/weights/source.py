"""From what a person names to files: a folder or file, a run, `hf:owner/name@revision`, `timm:name`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import ConfigError, WeightsError
from vitrail.weights.naming import Beside

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
PREFERRED = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.pth", "model.npz")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DESCRIPTIONS = ("*.json", "README.md", "SHA256SUMS")


@dataclass(frozen=True)
class Located:
    """Weights on this machine."""

    files: tuple[Path, ...]
    """More than one where a checkpoint is split."""
    beside: Beside


def locate(source: str | Path) -> Located:
    """Find the files of a source; from the hub they are downloaded once, with progress, and kept."""
    text = str(source)
    if text.startswith("hf:"):
        return _in_folder(download(text))
    path = Path(source).expanduser()
    if path.is_dir():
        # A run keeps its model in a folder of its own.
        return _in_folder(path / "model" if (path / "model" / "config.json").is_file() else path)
    if path.is_file():
        return Located((path,), Beside(path.parent if _describes(path) else None))
    raise WeightsError(
        f"there is no model {text!r}: give a folder, a file ({', '.join(SUFFIXES)}), hf:owner/name or timm:name"
    )


def _describes(path: Path) -> bool:
    """Whether a config.json in the file's folder speaks of this file: it does where the file has the usual name."""
    return path.name in PREFERRED and (path.parent / "config.json").is_file()


def _in_folder(folder: Path) -> Located:
    for name in PREFERRED:
        if (folder / name).is_file():
            return Located(_shards(folder, name), Beside(folder))
    others = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(others) == 1:
        return Located((others[0],), Beside(folder))
    if others:
        raise WeightsError(f"{folder} holds several files of weights: name one, e.g. {others[0]}")
    raise WeightsError(f"{folder} holds no weights: expected one of {', '.join(PREFERRED)}")


def _shards(folder: Path, name: str) -> tuple[Path, ...]:
    if not name.endswith(".index.json"):
        return (folder / name,)
    weight_map = Beside(folder).json(name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{folder / name} has no weight_map")
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        if Path(file).name != file or file.startswith("."):
            raise WeightsError(f"{folder / name} names {file!r}, which is not a file of its own folder")
    return tuple(folder / file for file in files)


def download(source: str) -> Path:
    """The snapshot of `hf:owner/name[@revision]`: safetensors where there are any, never a file that runs code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = source.removeprefix("hf:").partition("@")
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{source!r} is not hf:owner/name or hf:owner/name@revision")

    def fetch(patterns: Sequence[str]) -> Path:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=[*DESCRIPTIONS, *patterns]))

    try:
        folder = fetch(["*.safetensors"])
        if not any(folder.glob("*.safetensors")):
            folder = fetch(["*.bin", "*.pth", "*.npz"])
        return folder
    except LocalEntryNotFoundError:
        raise WeightsError(
            f"{source} is not in the cache, and the hub cannot be reached or HF_HUB_OFFLINE is set: load it once online"
        ) from None
    except HFValidationError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{source} cannot be downloaded: {first}") from None
