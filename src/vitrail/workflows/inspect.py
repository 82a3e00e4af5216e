"""What `vitrail inspect` does, and what comes after every run: models looked into, and one report of it all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitrail.errors import ConfigError, NotApplicableError, VitrailError, WeightsError
from vitrail.evaluate.passes import Progress
from vitrail.inspection.figures import draw_between, draw_findings
from vitrail.inspection.findings import Absent, Distance, Findings, Layers
from vitrail.inspection.images import Picked, from_folder, from_source, photographs
from vitrail.inspection.kept import keep, keep_layers
from vitrail.inspection.look import look_between, look_inside
from vitrail.inspection.report import write_report
from vitrail.model.base import ImageModel
from vitrail.model.cost import cost
from vitrail.train import records
from vitrail.train.assemble import open_parts
from vitrail.train.config import RunConfig
from vitrail.train.distributed import chosen_device
from vitrail.train.naming import short_name
from vitrail.train.resolve import read_file, resolve
from vitrail.train.start import CONFIG, Result
from vitrail.weights.load import load
from vitrail.weights.source import locate

MOST = 128
"""Images that distances are measured on: the paper's number."""
AFTER_A_RUN = 2e12
"""Operations that a CPU spends on a pass over them after a run: some ten seconds. Whoever wants more asks for it."""
LEAST = 8
REPORT, METRICS = "report.html", "metrics.jsonl"

Pick = Callable[[int, int], Picked]
"""Channels, and how many images at most → images."""


@dataclass(frozen=True)
class Inspected:
    """A report, and what else was written."""

    report: Path
    figures: tuple[Path, ...]
    data: tuple[Path, ...]
    notes: tuple[str, ...]
    """What a person should know: files that could not be read."""


def run(
    models: Sequence[str],
    images: str | None = None,
    out: Path | None = None,
    *,
    most: int = MOST,
    device: str = "auto",
    progress: Progress | None = None,
) -> Inspected:
    """Look into one model, or into several side by side, and write the report."""
    names = list(models) or [str(newest_run())]
    path = report_path(names, out)
    loaded = [load(name, device=chosen_device(device)) for name in names]
    pick = _pick(names, images)
    return _inspected(names, loaded, pick, path, most, progress)


def newest_run(folder: Path = Path("runs")) -> Path:
    """The run in a folder that was finished last."""
    finished = [found.parent.parent for depth in ("*", "*/*") for found in folder.glob(f"{depth}/model/config.json")]
    runs = [run for run in finished if (run / CONFIG).is_file()]
    if not runs:
        raise ConfigError(
            f"no MODEL was given, and there is no finished run in {folder}/: vitrail inspect MODEL, where MODEL is a "
            "folder or file of weights, a run, hf:owner/name or timm:name"
        )
    return max(runs, key=lambda run: (run / "model" / "config.json").stat().st_mtime_ns)


def report_path(names: Sequence[str], out: Path | None) -> Path:
    """Where the report goes: a run's own folder, else one in ./runs; `out` may name a file or a folder."""
    if out is None:
        alone = run_folder(names[0]) if len(names) == 1 else None
        return (alone or Path("runs") / "-".join(["inspect", *map(short_name, names)])) / REPORT
    if out.is_dir():
        return out / REPORT
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: give a file that ends in .html, or a folder that is there")
    return out


def run_folder(model: str) -> Path | None:
    """The folder of the run that a model came of, if it lies in one."""
    path = Path(model).expanduser()
    path = path.parent if path.resolve().name == "model" else path
    return path if (path / CONFIG).is_file() and (path / METRICS).is_file() else None


def after(config: RunConfig, result: Result) -> Iterator[str]:
    """The report of a finished run, in its folder; a line that says where. Nothing here can spoil the run."""
    if not config.run.report or os.environ.get("RANK", "0") != "0":
        return
    try:
        device = chosen_device(config.run.device)
        model = load(result.model, device=device)
        fitting = MOST if device.type == "cuda" else int(AFTER_A_RUN / cost(model.architecture).flops)
        pick = _of_run(config) or photographs_of
        names = [str(result.folder)]
        done = _inspected(names, [model], pick, result.folder / REPORT, min(max(fitting, LEAST), MOST), None)
        yield f"report: {done.report}"
    except Exception as error:  # the model is there, and hours of training with it
        told = str(error) if isinstance(error, VitrailError | OSError) else f"{type(error).__name__}: {error}"
        yield f"report: none could be made ({told}); vitrail inspect {result.folder} tries again"


def _inspected(
    names: Sequence[str],
    models: Sequence[ImageModel],
    pick: Pick,
    path: Path,
    most: int,
    progress: Progress | None,
) -> Inspected:
    picked = [_picked(pick, model.in_channels, most) for model in models]
    found = [
        look_inside(model, called, images, card=_card(name), records=_records(name), progress=progress)
        for model, name, called, images in zip(models, names, _called(names), picked, strict=True)
    ]
    between: Layers | Absent | None = None
    if len(models) == 2:
        between = look_between(models[0], models[1], picked[0], picked[1])
    broken = [name for images in picked[:1] if isinstance(images, Picked) for name in images.broken]
    return _written(found, between, path, tuple(broken))


def _written(found: list[Findings], between: Layers | Absent | None, path: Path, broken: tuple[str, ...]) -> Inspected:
    """Figures and data in a folder beside the report that bears its name; with several models one inside for each."""
    root = path.with_suffix("")
    try:
        folders = [root] if len(found) == 1 else [root / name for name in _different([each.name for each in found])]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        farthest = [float(np.nanmax(each.distance.pixels)) for each in found if isinstance(each.distance, Distance)]
        top = 1.05 * max(farthest) if len(farthest) > 1 else None
        figures = [draw_findings(each, folder, top) for each, folder in zip(found, folders, strict=True)]
        data = [file for each, folder in zip(found, folders, strict=True) for file in keep(each, folder)]
        across = None
        if isinstance(between, Layers):
            across = draw_between(between, root / "between.png", found[1].name, found[0].name)
            data += keep_layers(between, root, "between")
        write_report(found, figures, path, between, across)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another place by --out") from None
    drawn = [file for each in figures for file in each.values()] + ([across] if across else [])
    return Inspected(path, tuple(drawn), tuple(data), tuple(f"left out: {name}" for name in broken))


def _picked(pick: Pick, channels: int, most: int) -> Picked | Absent:
    try:
        return pick(channels, most)
    except NotApplicableError as error:  # five channels, say: there is still much to see without images
        return Absent(str(error))


def _called(names: Sequence[str]) -> list[str]:
    """Models in the report, which may go to strangers: without their paths, unless only these tell them apart."""
    short = [name if name.startswith(("hf:", "timm:")) else short_name(name) for name in names]
    return short if len(set(short)) == len(short) else list(names)


def _different(names: Sequence[str]) -> list[str]:
    """Short names for folders, none of them twice."""
    short = [short_name(name) for name in names]
    return [f"{name}-{number}" if short.count(name) > 1 else name for number, name in enumerate(short, start=1)]


def _pick(names: Sequence[str], images: str | None) -> Pick:
    """The images that were given; else those that the first run among the models was validated on; else photographs."""
    if images is not None:
        return partial(_given, images)
    for name in names:
        folder = run_folder(name)
        if folder is not None and (found := _of_run(resolve(read_file(folder / CONFIG)))) is not None:
            return found
    return photographs_of


def _given(images: str, channels: int, most: int) -> Picked:
    return from_folder(images, channels, most)


def photographs_of(channels: int, most: int) -> Picked:
    """Of scikit-learn."""
    return photographs(channels, most)


def _of_run(config: RunConfig) -> Pick | None:
    """Images that a run was validated on, or else trained on; None where they are gone, or are none of the kind."""
    try:
        parts = open_parts(config.data)
    except (VitrailError, OSError):
        return None
    source, part = (parts.training, "trained on") if parts.evaluation is None else (parts.evaluation, "validated on")
    told = f"{short_name(config.data.source)}, which the run was {part}"
    return lambda channels, most: from_source(source, told, channels, most)


def _card(name: str) -> str:
    """README.md beside the weights."""
    if name.startswith("timm:"):
        return ""
    try:
        return locate(name).beside.text("README.md") or ""
    except WeightsError:  # too large, or no text: it is only a card
        return ""


def _records(name: str) -> list[records.Record]:
    folder = run_folder(name)
    return [] if folder is None else records.read(folder / METRICS)
