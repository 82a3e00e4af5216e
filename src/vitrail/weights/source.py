"""Find the files of a source: a folder, a file, a run, `hf:owner/name@revision` or `pane`."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vitrail.errors import ConfigError, WeightsError, did_you_mean
from vitrail.system.files import short_name
from vitrail.system.hub_names import split_hub_name
from vitrail.weights.existing_runs import describe_runs, list_runs
from vitrail.weights.files import check_link, convert_read_errors
from vitrail.weights.formats.base import FolderFiles

EXPORTED = (".onnx", ".xml")
"""Suffixes of exported files. They run (see vitrail/inference/engine.py), but hold no weights to load."""
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
INDEX = ".index.json"
"""The end of the name of the file that lists the parts of a split checkpoint."""
PREFERRED = (
    *("model.safetensors", f"model.safetensors{INDEX}"),
    *("pytorch_model.bin", f"pytorch_model.bin{INDEX}", "model.pth", "model.npz"),
)
_LIKE_HUB = re.compile(r"(?:HF:|https://huggingface\.co/)?([A-Za-z][\w.-]*/[A-Za-z][\w.-]*)/?")
_LIKE_NAME = re.compile(r"(?:\w+\+)?\w+/\d+|BiT-\w+")
DESCRIPTIONS = ("*.json", "README.md", "SHA256SUMS")
PANE = "pane"
"""The name of the small model inside the package; a folder of that name is `./pane`."""
PANE_FOLDER = Path(__file__).parent.parent / PANE
LAST_FOLDER, BEST_FOLDER, BEST_FILE = "model", "best", "best.json"
"""In a run: its last weights, its best weights if those are others, and which of the two are the best."""
Which = Literal["last", "best"]
"""Which weights of a run: those of its last step, or those with the best evaluation."""


@dataclass(frozen=True)
class WeightsLocation:
    name: str
    """A name that may be published: it contains no path of this machine."""
    files: tuple[Path, ...]
    """The weights; several files if the checkpoint is split."""
    folder_files: FolderFiles


def locate_weights(source: str | Path) -> WeightsLocation:
    """Find the files of a source. Files of the hub are downloaded once, with progress, and cached."""
    text = str(source)
    if source == PANE:
        if not PANE_FOLDER.is_dir():
            raise WeightsError(f"this vitrail has no {PANE} inside: install it again, or name another model")
        return _locate_in_folder(PANE, PANE_FOLDER)
    if text.startswith("hf:"):
        folder = download_snapshot(text)
        # The folder of a snapshot is named after its commit, which is more exact than a branch.
        return _locate_in_folder(f"{text.partition('@')[0]}@{folder.name}", folder)
    path = Path(source).expanduser()
    if text and path.is_dir():
        # A run has its model in an inner folder.
        inner = path / LAST_FOLDER
        if (path / "checkpoints").is_dir() and not inner.is_dir():
            raise WeightsError(f"{path} is a run that is not finished: give its command again to go on with it")
        return _locate_in_folder(short_name(str(path.resolve())), inner if (inner / "config.json").is_file() else path)
    if path.suffix.lower() in EXPORTED:
        raise WeightsError(f"{path} is an exported file: for this, give the model that it was made from")
    if path.is_file():
        return _locate_file(path)
    if text and path.exists():
        raise WeightsError(f"{path} is neither a file nor a folder: models are not read from pipes and devices")
    kinds = f"a folder, a file ({', '.join(SUFFIXES)}), hf:owner/name, timm:name or {PANE}"
    there = describe_runs(path) if text else ""
    raise WeightsError(f"there is no model {text!r}{_suggest_source(text, path) or ':'} give {kinds}{there}")


def choose_weights(model: str, which: str = "last") -> str:
    """Return the MODEL to load for the last or the best weights of a run.

    Args:
        model: MODEL; for "best" the folder of a finished run.
        which: "last", which returns the model as it is, or "best".

    Raises:
        ConfigError: another word, or "best" for a model that is no run.
        WeightsError: the run is not finished, or has no best weights.
    """
    if which not in get_args(Which):
        raise ConfigError(f"which = {which!r}{did_you_mean(which, get_args(Which)) or ':'} there are last and best")
    if which == "last":
        return model
    path = Path(model).expanduser()
    if model == PANE or not (path / "checkpoints").is_dir():
        there = describe_runs(path) if not path.exists() else ""
        raise ConfigError(f"only a run has best weights, and {model} is no run folder: leave out which=best{there}")
    if not (path / LAST_FOLDER).is_dir():
        raise WeightsError(
            f"{model} is a run that is not finished: give its command again to go on with it, or read its checkpoint "
            f'in Python with vitrail.Run("{model}").load("best")'
        )
    best = FolderFiles(path).json(BEST_FILE)
    if not best:
        raise WeightsError(
            f"{model} has no {BEST_FILE}: either nothing was evaluated while it trained, or an earlier vitrail wrote "
            f'it; for the latter there is vitrail.Run("{model}").load("best") in Python'
        )
    if best.get("folder") not in (LAST_FOLDER, BEST_FOLDER):
        raise WeightsError(f"{path / BEST_FILE} is not as it was written: it names no folder of the run")
    return model if best["folder"] == LAST_FOLDER else str(Path(model) / BEST_FOLDER)


def _suggest_source(text: str, path: Path) -> str:
    """Return what a wrong name may mean: a similar file, a run, `pane`, a model of the hub, or an architecture."""
    neighbours: list[str] = []
    if path.parent != Path():
        with contextlib.suppress(OSError):
            neighbours = os.listdir(path.parent)  # noqa: PTH208 (names are wanted)
    if near := difflib.get_close_matches(path.name, neighbours, n=1):
        return f", did you mean {str(path.parent / near[0])!r}?"
    if near_pane := did_you_mean(text, [PANE]):
        return near_pane
    runs, is_near = list_runs(path)
    if is_near:
        return f", did you mean {str(runs[0])!r}?"
    if neighbours:  # it is a path, and no name of the hub
        return ""
    if match := _LIKE_HUB.fullmatch(text):
        return f", did you mean hf:{match.group(1)}?"
    return f", did you mean vitrail.create_model({text!r})?" if _LIKE_NAME.fullmatch(text) else ""


def _locate_file(path: Path) -> WeightsLocation:
    """Locate a single file. The config.json of its folder is used unless other weights lie there too."""
    if path.name in PREFERRED or len(_list_weight_files(path.parent)) <= 1:
        return WeightsLocation(path.name, _list_parts(path), FolderFiles(path.parent))
    why = "the folder holds other weights too" if (path.parent / "config.json").is_file() else ""
    return WeightsLocation(path.name, _list_parts(path), FolderFiles(None, config_not_used=why))


def _locate_in_folder(name: str, folder: Path) -> WeightsLocation:
    preferred = [folder / name for name in PREFERRED if (folder / name).is_file()]
    paths = preferred[:1] or _list_weight_files(folder)
    if len(paths) == 1:
        files = _list_parts(paths[0])
        for path in files:
            check_link(path)
        return WeightsLocation(name, files, FolderFiles(folder))
    if paths:
        raise WeightsError(f"{folder} holds several files of weights: name one, e.g. {paths[0]}")
    raise WeightsError(f"{folder} holds no weights: expected one of {', '.join(PREFERRED)}")


def _list_weight_files(folder: Path) -> list[Path]:
    with convert_read_errors(folder):
        return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)


def _list_parts(path: Path) -> tuple[Path, ...]:
    """Return the file itself, or the files that an index lists; they must lie in the same folder."""
    if not path.name.endswith(INDEX):
        return (path,)
    weight_map = FolderFiles(path.parent).json(path.name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or name.startswith("."):
            raise WeightsError(f"{path} names {name!r}, which is not a file of its own folder")
    return tuple(path.parent / name for name in names)


def download_snapshot(source: str) -> Path:
    """Download `hf:owner/name[@revision]` and return its folder: safetensors if it has any, never code."""
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, revision = split_hub_name(source)

    def fetch(patterns: Sequence[str]) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*DESCRIPTIONS, *patterns]))

    try:
        folder = fetch(["*.safetensors"])
        if not any(folder.glob("*.safetensors")):
            folder = fetch(["*.bin", "*.pth", "*.pt", "*.npz"])
        return folder
    except LocalEntryNotFoundError:
        why, first = "the hub cannot be reached", ""
        if is_offline_mode():
            why, first = "HF_HUB_OFFLINE is set", "unset it and "
        raise WeightsError(
            f"{source} is not in the cache, and {why}: {first}load it once with a network, after which it is kept; or "
            f"name a folder with its files; or {PANE}, the small model inside vitrail, which is always there"
        ) from None
    except HFValidationError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{source} cannot be downloaded: {first}") from None
