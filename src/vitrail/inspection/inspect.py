"""What `vitrail inspect` does: measure models, draw the figures, and write one report."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import ConfigError, DataError, NotApplicableError, VitrailError, WeightsError
from vitrail.inference.batches import Progress
from vitrail.inspection.draw.figures import draw_between, draw_findings, find_farthest
from vitrail.inspection.findings import Absent, Findings, Layers
from vitrail.inspection.images import InspectionImages, pick_from_folder, pick_from_source, pick_photographs
from vitrail.inspection.inspect_model import compare_layers, inspect_model
from vitrail.inspection.page.report import write_report
from vitrail.inspection.write_data import write_data, write_layers
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device
from vitrail.system.files import short_name
from vitrail.training import records
from vitrail.training.build import open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_folder import CONFIG_FILE
from vitrail.weights.load import load
from vitrail.weights.source import PANE, locate_weights

MOST = 128
"""Images that distances are measured on: the paper's number."""
REPORT, METRICS = "report.html", "metrics.jsonl"
WRITTEN = (".png", ".svg", ".npz", ".csv")

ImagePicker = Callable[[int, int, int], InspectionImages]
"""(channels, most images, most pixels of each) → images."""


@dataclass(frozen=True)
class InspectionResult:
    """The files that an inspection wrote."""

    report: Path
    figures: tuple[Path, ...]
    data: tuple[Path, ...]
    notes: tuple[str, ...]
    """Lines for the user, about files that could not be read."""


def inspect_models(
    models: Sequence[str],
    images: str | None = None,
    out: Path | None = None,
    *,
    most: int = MOST,
    device: str = "auto",
    progress: Progress | None = None,
) -> InspectionResult:
    """Inspect one model, or several side by side, and write the report.

    Args:
        models: anything that `vitrail.load` takes, one or more.
        images: a folder with images, an image, or a data set; by default the validation data of the first run among
            the models, or else two photographs.
        out: the report's file, or a folder for it; by default in the run's folder, or else below ./runs.
        most: the largest number of images to measure on.
        device: cpu, cuda, …; auto takes a GPU if the machine has one.
        progress: called with the number of images that are done, and of all images.

    Raises:
        ConfigError: if the report cannot be written.
        DataError: if there are no images.
    """
    path = choose_report_path(models, out)
    with _explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # fail before measuring, which may take hours
    loaded = [load(name, device=choose_device(device)) for name in models]
    return inspect_loaded(models, loaded, _choose_picker(models, images), path, most, progress)


def find_newest_run(folder: Path = Path("runs")) -> Path | None:
    """Return the folder of the run that finished last, or None if no run has finished."""
    finished = [found.parent.parent for depth in ("*", "*/*") for found in folder.glob(f"{depth}/model/config.json")]
    runs = [inspect_models for inspect_models in finished if (inspect_models / CONFIG_FILE).is_file()]
    return max(
        runs, key=lambda inspect_models: (inspect_models / "model" / "config.json").stat().st_mtime_ns, default=None
    )


def choose_report_path(names: Sequence[str], out: Path | None) -> Path:
    """Return the path of the report: `out` (a file or a folder), else in the run's folder, else below ./runs."""
    if out is None:
        alone = find_run_folder(names[0]) if len(names) == 1 else None
        return (alone or Path("runs") / "-".join(["inspect", *map(_shorten, names)])) / REPORT
    if out.is_dir():
        return out / REPORT
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: give a file that ends in .html, or an existing folder")
    return out


def find_run_folder(model: str) -> Path | None:
    """Return the run folder that contains the model, or None."""
    if model == PANE:
        return None
    path = Path(model).expanduser()
    if path.resolve().name == "model":
        path = path.parent if path.name == "model" else path.resolve().parent
    return path if (path / CONFIG_FILE).is_file() and (path / METRICS).is_file() else None


def inspect_loaded(
    names: Sequence[str],
    models: Sequence[ImageModel],
    pick: ImagePicker,
    path: Path,
    most: int,
    progress: Progress | None = None,
) -> InspectionResult:
    """Inspect models that are loaded already; `names` are the strings they were loaded by, `path` is the report's."""
    pixels = 2 * max(math.prod(model.preprocessing.resized) for model in models)
    picked = {
        channels: _try_to_pick(pick, channels, most, pixels) for channels in {model.in_channels for model in models}
    }
    runs = [_read_run_records(name) for name in names]
    findings = [
        inspect_model(
            model, title, picked[model.in_channels], card=_read_card(name), records=run.records, progress=progress
        )
        for model, name, title, run in zip(models, names, _name_models(names), runs, strict=True)
    ]
    between: Layers | Absent | None = None
    if len(models) == 2:
        first, second = models
        between = compare_layers(first, second, picked[first.in_channels], picked[second.in_channels], progress)
    broken = {name for images in picked.values() if isinstance(images, InspectionImages) for name in images.broken}
    notes = [note for run in runs for note in run.notes] + [f"left out: {name}" for name in sorted(broken)]
    return _write_files(findings, between, path, tuple(notes))


def _write_files(
    findings: list[Findings], between: Layers | Absent | None, path: Path, notes: tuple[str, ...]
) -> InspectionResult:
    """Write figures and data to a folder beside the report, with a folder inside for each of several models."""
    root = path.with_name(f"{path.stem}_files")
    with _explain_write_errors(path):
        folders = (
            [root]
            if len(findings) == 1
            else [root / _shorten(name) for name in _name_models([f.name for f in findings])]
        )
        for folder in {root, *folders}:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():  # files of an earlier inspection must not be mistaken for this one's
                if old.suffix in WRITTEN and old.is_file():
                    old.unlink()
        top = 1.05 * max(map(find_farthest, findings)) if len(findings) > 1 else None
        figures = [draw_findings(each, folder, top) for each, folder in zip(findings, folders, strict=True)]
        data = [file for each, folder in zip(findings, folders, strict=True) for file in write_data(each, folder)]
        between_figure = None
        if isinstance(between, Layers):
            between_figure = draw_between(between, root / "between.png", findings[1].name, findings[0].name)
            data += write_layers(between, root, "between")
        write_report(findings, figures, path, between, between_figure)
    drawings = [file for each in figures for file in each.values()] + ([between_figure] if between_figure else [])
    return InspectionResult(path, tuple(drawings), tuple(data), notes)


@contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another place by --out") from None


def _shorten(name: str) -> str:
    """Return the last part of a path, also of a path like "."; other names in a form that suits a file name."""
    return short_name(name if _is_no_path(name) else str(Path(name).expanduser().resolve()))


def _is_no_path(name: str) -> bool:
    return name == PANE or name.startswith(("hf:", "timm:"))


def _name_models(names: Sequence[str]) -> list[str]:
    """Name the models for the report: without paths, because strangers may read it, and without repetition."""
    titles: list[str] = []
    for name in names:
        base = name if _is_no_path(name) else _shorten(name)
        taken = {_shorten(other) for other in titles}
        numbered = (f"{base} {number}" for number in itertools.count(2))
        titles.append(next(each for each in itertools.chain([base], numbered) if _shorten(each) not in taken))
    return titles


def _try_to_pick(pick: ImagePicker, channels: int, most: int, pixels: int) -> InspectionImages | Absent:
    try:
        return pick(channels, most, pixels)
    except NotApplicableError as error:  # such as five channels: much can be measured without images
        return Absent(str(error))


def _choose_picker(names: Sequence[str], images: str | None) -> ImagePicker:
    """Choose the given images, else the validation data of the first run among the models, else photographs."""
    if images is not None:
        place = images
        return lambda channels, most, pixels: pick_from_folder(place, channels, most, pixels=pixels)
    for name in names:
        folder = find_run_folder(name)
        try:
            picker = None if folder is None else make_run_picker(resolve(read_toml(folder / CONFIG_FILE)))
        except VitrailError:  # a newer version may have written the configuration
            picker = None
        if picker is not None:
            return picker
    return pick_default_images


def pick_default_images(channels: int, most: int, pixels: int) -> InspectionImages:
    """Pick crops of two photographs, which are always available; `pixels` is not needed for them."""
    return pick_photographs(channels, most)


def make_run_picker(config: RunConfig) -> ImagePicker | None:
    """Return what picks the images that a run was validated on, or else trained on; None if they cannot be opened."""
    try:
        parts = open_training_data(config.data)
    except (VitrailError, OSError):
        return None
    source, part = (parts.training, "trained on") if parts.evaluation is None else (parts.evaluation, "validated on")
    name = f"{_shorten(config.data.source)}, which the run was {part}"
    return lambda channels, most, pixels: pick_from_source(source, name, channels, most, pixels=pixels)


def _read_card(name: str) -> str:
    """Return the README.md beside the weights without the run's configuration, which has paths of this machine."""
    if name.startswith("timm:"):
        return ""
    try:
        card = locate_weights(name).folder_files.text("README.md") or ""
    except WeightsError:  # too large, or not text: a report can do without the card
        return ""
    return re.sub(r"^```toml\n.*?^```\n?", "", card, flags=re.MULTILINE | re.DOTALL).rstrip() + "\n" if card else ""


class _RunRecords(NamedTuple):
    """The measurements of a run, or a note if they cannot be read."""

    records: Sequence[records.Record] = ()
    notes: tuple[str, ...] = ()


def _read_run_records(name: str) -> _RunRecords:
    folder = find_run_folder(name)
    try:
        return _RunRecords() if folder is None else _RunRecords(tuple(records.read_records(folder / METRICS)))
    except (DataError, OSError) as error:
        return _RunRecords(notes=(f"without training curves: {error}",))
