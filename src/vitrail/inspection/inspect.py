"""What `vitrail inspect` does, and what comes after every run: models looked into, and one report of it all."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import ConfigError, DataError, NotApplicableError, VitrailError, WeightsError
from vitrail.inference.batches import Progress
from vitrail.inspection.draw.figures import draw_between, draw_findings, farthest
from vitrail.inspection.findings import Absent, Findings, Layers
from vitrail.inspection.images import Picked, from_folder, from_source, photographs
from vitrail.inspection.inspect_model import look_between, look_inside
from vitrail.inspection.page.report import write_report
from vitrail.inspection.write_data import keep, keep_layers
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.system.device import choose_device
from vitrail.system.files import short_name
from vitrail.training import records
from vitrail.training.build import open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_training import CONFIG_FILE, TrainingResult
from vitrail.weights.load import load
from vitrail.weights.source import PANE, locate

MOST = 128
"""Images that distances are measured on: the paper's number."""
AFTER_A_RUN = 2e12
"""Operations that a CPU spends on a pass over them after a run: some ten seconds. Whoever wants more asks for it."""
LEAST = 8
REPORT, METRICS = "report.html", "metrics.jsonl"
WRITTEN = (".png", ".svg", ".npz", ".csv")

Pick = Callable[[int, int, int], Picked]
"""Channels, how many images at most, and how many pixels each → images."""


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
    path = report_path(models, out)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # before hours of measuring, not after
    loaded = [load(name, device=choose_device(device)) for name in models]
    return _inspected(models, loaded, _pick(models, images), path, most, progress)


def newest_run(folder: Path = Path("runs")) -> Path | None:
    """The run in a folder that was finished last; None where none was."""
    finished = [found.parent.parent for depth in ("*", "*/*") for found in folder.glob(f"{depth}/model/config.json")]
    runs = [run for run in finished if (run / CONFIG_FILE).is_file()]
    return max(runs, key=lambda run: (run / "model" / "config.json").stat().st_mtime_ns, default=None)


def report_path(names: Sequence[str], out: Path | None) -> Path:
    """Where the report goes: a run's own folder, else one in ./runs; `out` may name a file or a folder."""
    if out is None:
        alone = run_folder(names[0]) if len(names) == 1 else None
        return (alone or Path("runs") / "-".join(["inspect", *map(_short, names)])) / REPORT
    if out.is_dir():
        return out / REPORT
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: give a file that ends in .html, or a folder that is there")
    return out


def run_folder(model: str) -> Path | None:
    """The folder of the run that a model came of, if it lies in one."""
    if model == PANE:
        return None
    path = Path(model).expanduser()
    if path.resolve().name == "model":
        path = path.parent if path.name == "model" else path.resolve().parent
    return path if (path / CONFIG_FILE).is_file() and (path / METRICS).is_file() else None


def after(config: RunConfig, result: TrainingResult) -> Iterator[str]:
    """The report of a finished run, in its folder; a line that says where. Nothing here can spoil the run."""
    if not config.run.report or os.environ.get("RANK", "0") != "0":
        return
    again = f"vitrail inspect {result.folder}"
    try:
        device = choose_device(config.run.device)
        model = load(result.model, device=device)
        fitting = MOST if device.type == "cuda" else int(AFTER_A_RUN / compute_cost(model.architecture).flops)
        pick = _of_run(config) or _photographs
        names = [str(result.folder)]
        done = _inspected(names, [model], pick, result.folder / REPORT, min(max(fitting, LEAST), MOST), None)
        yield f"report: {done.report}"
    except KeyboardInterrupt:
        yield f"report: stopped; {again} makes it"
    except Exception as error:  # the model is there, and hours of training with it
        told = str(error) if isinstance(error, VitrailError | OSError) else f"{type(error).__name__}: {error}"
        yield f"report: none could be made ({told}); {again} tries again"


def _inspected(
    names: Sequence[str],
    models: Sequence[ImageModel],
    pick: Pick,
    path: Path,
    most: int,
    progress: Progress | None,
) -> Inspected:
    pixels = 2 * max(math.prod(model.preprocessing.resized) for model in models)
    picked = {channels: _picked(pick, channels, most, pixels) for channels in {model.in_channels for model in models}}
    read = [_records(name) for name in names]
    found = [
        look_inside(model, called, picked[model.in_channels], card=_card(name), records=kept.records, progress=progress)
        for model, name, called, kept in zip(models, names, _called(names), read, strict=True)
    ]
    between: Layers | Absent | None = None
    if len(models) == 2:
        first, second = models
        between = look_between(first, second, picked[first.in_channels], picked[second.in_channels], progress)
    broken = {name for images in picked.values() if isinstance(images, Picked) for name in images.broken}
    notes = [note for kept in read for note in kept.notes] + [f"left out: {name}" for name in sorted(broken)]
    return _written(found, between, path, tuple(notes))


def _written(found: list[Findings], between: Layers | Absent | None, path: Path, notes: tuple[str, ...]) -> Inspected:
    """Figures and data in a folder beside the report that bears its name; with several models one inside for each."""
    root = path.with_name(f"{path.stem}_files")
    with _writing(path):
        folders = [root] if len(found) == 1 else [root / _short(name) for name in _called([f.name for f in found])]
        for folder in {root, *folders}:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():  # of another model, perhaps: nothing of it may be taken for this one's
                if old.suffix in WRITTEN and old.is_file():
                    old.unlink()
        top = 1.05 * max(map(farthest, found)) if len(found) > 1 else None
        figures = [draw_findings(each, folder, top) for each, folder in zip(found, folders, strict=True)]
        data = [file for each, folder in zip(found, folders, strict=True) for file in keep(each, folder)]
        across = None
        if isinstance(between, Layers):
            across = draw_between(between, root / "between.png", found[1].name, found[0].name)
            data += keep_layers(between, root, "between")
        write_report(found, figures, path, between, across)
    drawn = [file for each in figures for file in each.values()] + ([across] if across else [])
    return Inspected(path, tuple(drawn), tuple(data), notes)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another place by --out") from None


def _short(name: str) -> str:
    """Of a path, its last part, also where that is a dot."""
    return short_name(name if _is_no_path(name) else str(Path(name).expanduser().resolve()))


def _is_no_path(name: str) -> bool:
    return name == PANE or name.startswith(("hf:", "timm:"))


def _called(names: Sequence[str]) -> list[str]:
    """Models in the report, which may go to strangers: without paths, and none of them twice."""
    called: list[str] = []
    for name in names:
        base = name if _is_no_path(name) else _short(name)
        taken = {_short(other) for other in called}
        numbered = (f"{base} {number}" for number in itertools.count(2))
        called.append(next(each for each in itertools.chain([base], numbered) if _short(each) not in taken))
    return called


def _picked(pick: Pick, channels: int, most: int, pixels: int) -> Picked | Absent:
    try:
        return pick(channels, most, pixels)
    except NotApplicableError as error:  # five channels, say: there is still much to see without images
        return Absent(str(error))


def _pick(names: Sequence[str], images: str | None) -> Pick:
    """The images that were given; else those that the first run among the models was validated on; else photographs."""
    if images is not None:
        given = images
        return lambda channels, most, pixels: from_folder(given, channels, most, pixels=pixels)
    for name in names:
        folder = run_folder(name)
        try:
            found = None if folder is None else _of_run(resolve(read_toml(folder / CONFIG_FILE)))
        except VitrailError:  # a newer version's, perhaps
            found = None
        if found is not None:
            return found
    return _photographs


def _photographs(channels: int, most: int, pixels: int) -> Picked:
    return photographs(channels, most)


def _of_run(config: RunConfig) -> Pick | None:
    """Images that a run was validated on, or else trained on; None where they are gone, or are none of the kind."""
    try:
        parts = open_training_data(config.data)
    except (VitrailError, OSError):
        return None
    source, part = (parts.training, "trained on") if parts.evaluation is None else (parts.evaluation, "validated on")
    told = f"{_short(config.data.source)}, which the run was {part}"
    return lambda channels, most, pixels: from_source(source, told, channels, most, pixels=pixels)


def _card(name: str) -> str:
    """README.md beside the weights, without the configuration of a run, which tells paths of this machine."""
    if name.startswith("timm:"):
        return ""
    try:
        card = locate(name).beside.text("README.md") or ""
    except WeightsError:  # too large, or no text: it is only a card
        return ""
    return re.sub(r"^```toml\n.*?^```\n?", "", card, flags=re.MULTILINE | re.DOTALL).rstrip() + "\n" if card else ""


class _Kept(NamedTuple):
    """Of a run."""

    records: Sequence[records.Record] = ()
    notes: tuple[str, ...] = ()


def _records(name: str) -> _Kept:
    folder = run_folder(name)
    try:
        return _Kept() if folder is None else _Kept(tuple(records.read_records(folder / METRICS)))
    except (DataError, OSError) as error:
        return _Kept(notes=(f"without training curves: {error}",))
