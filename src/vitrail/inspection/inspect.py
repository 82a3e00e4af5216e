"""Inspect models: measure them, draw the figures, and write one report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vitrail.data.open import Data
from vitrail.errors import ConfigError, DataError, VitrailError, WeightsError
from vitrail.inference.engine import Model, get_model, open_engine
from vitrail.inspection.draw.charts import find_farthest
from vitrail.inspection.draw.figures import draw_between, draw_findings
from vitrail.inspection.findings import Absent, Findings, Layers
from vitrail.inspection.image_choice import (
    ImageChoice,
    Images,
    choose_from_source,
    choose_images,
    choose_photographs,
)
from vitrail.inspection.images import MOST, InspectionImages, fit_images
from vitrail.inspection.inspect_model import compare_layers, inspect_model
from vitrail.inspection.page.report import write_report
from vitrail.inspection.result import InspectionResult
from vitrail.inspection.score_images import LabelledImages, open_labelled_images, score_images
from vitrail.inspection.scores import AnyScores, read_score_photos
from vitrail.inspection.write_data import SCORE_TABLES, TASK_TABLES, write_data, write_layers
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, ignore_event, open_listener, send_progress
from vitrail.system.files import describe_reason, short_name
from vitrail.training import records
from vitrail.training.build import open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_folder import CONFIG_FILE
from vitrail.weights.source import BEST_FOLDER, LAST_FOLDER, PANE, locate_weights

REPORT, METRICS = "report.html", "metrics.jsonl"
TABLES = {*SCORE_TABLES, *TASK_TABLES}
"""Stems of tables without a figure, which the page links to; a number may follow."""
WRITTEN = (".png", ".svg", ".npz", ".csv")
UNNAMED = "model"
"""The name of a model that was given as an object."""


def inspect(
    model: Model | Sequence[Model] | None = None,
    *,
    images: Images | None = None,
    out: str | Path | None = None,
    most: int = MOST,
    device: str = "auto",
    on_event: OnEvent | None = None,
) -> InspectionResult:
    """Look inside a model, or several side by side, and write the report.

        result = vitrail.inspect("runs/pets", images="photos/")
        result.guesses["pets"][0]                   # an image, and what the model says about it
        result.attention_distance["pets"]           # in pixels, by layer and head

    Args:
        model: a loaded model, anything that `vitrail.load` takes, or a list of these. None takes the run below ./runs
            that finished last, or else pane. A model object is not changed.
        images: a folder with images, an image, a data set, or a list of images or (image, label) pairs; None takes the
            validation data of the first run among the models, or else two photographs.
        out: the file of the report, or a folder for it; by default in the run's folder, or else below ./runs.
        most: the largest number of images to measure on.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        on_event: called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        chosen: model, reason ("newest run" or "built in"), if no model was given.
        progress: task "evaluating" for each model if the images have labels that it knows, "reading images", then
            "looking inside" for each model.

    Returns:
        The files that were written, and the numbers behind them.

    Raises:
        ConfigError: if an option is not valid, or the report cannot be written.
        WeightsError: if a model cannot be loaded.
        NotApplicableError: if a model is an exported file.
        DataError: if there are no images.
    """
    if most < 1:
        raise ConfigError(f"most = {most}: give 1 or more")
    with open_listener(on_event) as listener:
        models = _list_models(model) or [_choose_model(listener)]
        names = [None if isinstance(each, ImageModel) else str(each) for each in models]
        path = choose_report_path(names, None if out is None else Path(out))
        place = choose_device(device)
        loaded = [get_model(open_engine(each, device=place)) for each in models]
        run = _open_default_images(names) if images is None else None
        first = next((each.task for each in loaded if each.task.kind != "labels"), None)
        choice = choose_images(images, first) if images is not None else run.choice if run else choose_photographs()
        labelled = [
            open_labelled_images(images, each.task) if images is not None else run.labelled if run else None
            for each in loaded
        ]
        with _explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)  # fail before measuring, which may take hours
        scores = [
            None if own is None else score_images(each, own, title, on_event=listener)
            for each, own, title in zip(loaded, labelled, name_models(names), strict=True)
        ]
        return inspect_loaded(names, loaded, choice, path, most, listener, scores)


def inspect_loaded(
    names: Sequence[str | None],
    models: Sequence[ImageModel],
    choice: ImageChoice,
    path: Path,
    most: int = MOST,
    on_event: OnEvent = ignore_event,
    scores: Sequence[AnyScores | None] | None = None,
    titles: Sequence[str] | None = None,
) -> InspectionResult:
    """Inspect models that are loaded already.

    Args:
        names: what they were loaded by; None for a model that was given as an object.
        models: the models, on any device.
        choice: the images to choose from.
        path: the file of the report.
        most: the largest number of images to measure on.
        on_event: called with `progress` events.
        scores: how good each model is, for the top of the report; None for a model that was not scored.
        titles: the models' names in the report; by default they follow from `names`.
    """
    titles = name_models(names) if titles is None else titles
    scored = [None if each is None else read_score_photos(each) for each in scores or [None] * len(models)]
    picked = fit_images(choice, models, most, progress=send_progress(on_event, "reading images"))
    progress = send_progress(on_event, "looking inside")
    runs = [_read_run_records(name) for name in names]
    findings = [
        replace(
            inspect_model(model, title, own, card=_read_card(name), records=run.records, progress=progress),
            scores=score,
        )
        for model, name, title, own, run, score in zip(models, names, titles, picked, runs, scored, strict=True)
    ]
    between: Layers | Absent | None = None
    if len(models) == 2:
        between = compare_layers(models[0], models[1], picked[0], picked[1], progress)
    broken = {name for images in picked if isinstance(images, InspectionImages) for name in images.broken}
    notes = [note for run in runs for note in run.notes] + [f"left out: {name}" for name in sorted(broken)]
    return _write_files(findings, between, path, tuple(notes))


def find_newest_run(folder: Path = Path("runs")) -> Path | None:
    """Return the folder of the run that finished last, or None if no run has finished."""
    finished = [found.parent.parent for depth in ("*", "*/*") for found in folder.glob(f"{depth}/model/config.json")]
    runs = [run for run in finished if (run / CONFIG_FILE).is_file()]
    return max(runs, key=lambda run: (run / "model" / "config.json").stat().st_mtime_ns, default=None)


def choose_report_path(names: Sequence[str | None], out: Path | None) -> Path:
    """Return the path of the report: `out` (a file or a folder), else in the run's folder, else below ./runs."""
    if out is None:
        alone = find_run_folder(names[0]) if len(names) == 1 else None
        if alone is not None and Path(str(names[0])).name == BEST_FOLDER:
            alone = None  # the report in the run's folder is about its last weights
        return (alone or Path("runs") / "-".join(["inspect", *map(_shorten, names)])) / REPORT
    if out.is_dir():
        return out / REPORT
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"out = {out}: give a file that ends in .html, or an existing folder")
    return out


def find_run_folder(model: str | None) -> Path | None:
    """Return the run folder that contains the model, its last or its best, or None."""
    if model is None or model == PANE:
        return None
    path, inner = Path(model).expanduser(), (LAST_FOLDER, BEST_FOLDER)
    if path.resolve().name in inner:
        path = path.parent if path.name in inner else path.resolve().parent
    return path if (path / CONFIG_FILE).is_file() and (path / METRICS).is_file() else None


def _write_files(
    findings: list[Findings], between: Layers | Absent | None, path: Path, notes: tuple[str, ...]
) -> InspectionResult:
    """Write figures and data to a folder beside the report, with a folder inside for each of several models."""
    root = path.with_name(f"{path.stem}_files")
    with _explain_write_errors(path):
        folders = (
            [root]
            if len(findings) == 1
            else [root / _shorten(name) for name in name_models([f.name for f in findings])]
        )
        for folder in {root, *folders}:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():  # files of an earlier inspection must not be mistaken for this one's
                if old.suffix in WRITTEN and old.is_file():
                    old.unlink()
        top = 1.05 * max(map(find_farthest, findings)) if len(findings) > 1 else None
        figures = [draw_findings(each, folder, top) for each, folder in zip(findings, folders, strict=True)]
        tables = [write_data(each, folder) for each, folder in zip(findings, folders, strict=True)]
        data = [file for each in tables for file in each]
        between_figure = None
        if isinstance(between, Layers):
            between_figure = draw_between(between, root / "between.png", findings[1].name, findings[0].name)
            data += write_layers(between, root, "between")
        with TemporaryDirectory() as place:
            narrow, across = _draw_narrow(findings, between, Path(place), top)
            scored = [{file.stem: file for file in each if file.stem.partition("-")[0] in TABLES} for each in tables]
            linked = [drawn | more for drawn, more in zip(figures, scored, strict=True)]
            write_report(findings, linked, path, between, between_figure, narrow, across)
    drawings = [file for each in figures for file in each.values()] + ([between_figure] if between_figure else [])
    return InspectionResult(path, tuple(drawings), tuple(data), notes, tuple(findings), between)


def _draw_narrow(
    findings: Sequence[Findings], between: Layers | Absent | None, folder: Path, top: float | None
) -> tuple[list[dict[str, Path]], Path | None]:
    """Draw the figures for a phone: of each model, and between two. Only the page needs them."""
    figures = [draw_findings(each, folder / str(number), top, True) for number, each in enumerate(findings)]
    if not isinstance(between, Layers):
        return figures, None
    return figures, draw_between(between, folder / "between.svg", findings[1].name, findings[0].name, narrow=True)


@contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({describe_reason(error)}): give another place as out") from None


def _shorten(name: str | None) -> str:
    """Return the last part of a path, also of a path like "."; other names in a form that suits a file name."""
    if name is None:
        return UNNAMED
    return short_name(name if _is_no_path(name) else str(Path(name).expanduser().resolve()))


def _is_no_path(name: str) -> bool:
    return name == PANE or name.startswith(("hf:", "timm:"))


def name_models(names: Sequence[str | None]) -> list[str]:
    """Name the models for the report: without paths, because strangers may read it, and without repetition."""
    titles: list[str] = []
    for name in names:
        base = name if name is not None and _is_no_path(name) else _shorten(name)
        taken = {_shorten(other) for other in titles}
        numbered = (f"{base} {number}" for number in itertools.count(2))
        titles.append(next(each for each in itertools.chain([base], numbered) if _shorten(each) not in taken))
    return titles


def _list_models(model: Model | Sequence[Model] | None) -> list[Model]:
    given: list[Any] = [] if model is None else list(model) if isinstance(model, list | tuple) else [model]
    for each in given:
        if not isinstance(each, ImageModel | str | Path):
            kind = type(each).__name__
            raise ConfigError(f"a {kind} is no model: give one of vitrail's, or what vitrail.load takes")
    return given


def _choose_model(listener: OnEvent) -> str:
    """Choose the newest run, or else pane, and tell the listener."""
    newest = find_newest_run()
    name, reason = (PANE, "built in") if newest is None else (str(newest), "newest run")
    listener("chosen", {"model": name, "reason": reason})
    return name


class RunImages(NamedTuple):
    """The images of a run, for its report."""

    choice: ImageChoice
    labelled: LabelledImages | None
    """Images that the run can be scored on; None if it trained on all of them, or learned no classes."""


def _open_default_images(names: Sequence[str | None]) -> RunImages | None:
    """Open the validation data of the first run among the models; None if there is none that can be opened."""
    for name in names:
        folder = find_run_folder(name)
        try:
            images = None if folder is None else open_run_images(resolve(read_toml(folder / CONFIG_FILE)))
        except VitrailError:  # a newer version may have written the configuration
            images = None
        if images is not None:
            return images
    return None


def open_run_images(config: RunConfig, given: Data | None = None) -> RunImages | None:
    """Open the images that a run was validated on, or else trained on; None if they cannot be opened.

    `given` images take the place of `data.source`.
    """
    try:
        parts = open_training_data(config.data, given)
    except (VitrailError, OSError):
        return None
    name = _shorten(config.data.source)
    if parts.evaluation is None:
        return RunImages(choose_from_source(parts.training, f"{name}, which the run was trained on"), None)
    words = f"{name}, which the run was validated on"
    classifies = config.objective.kind in ("classification", "task")
    labelled = (
        LabelledImages(parts.evaluation, f"{name}, on which the run was validated, not trained") if classifies else None
    )
    return RunImages(choose_from_source(parts.evaluation, words), labelled)


def _read_card(name: str | None) -> str:
    """Return the README.md beside the weights without the run's configuration, which has paths of this machine."""
    if name is None or name.startswith("timm:"):
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


def _read_run_records(name: str | None) -> _RunRecords:
    folder = find_run_folder(name)
    try:
        return _RunRecords() if folder is None else _RunRecords(tuple(records.read_records(folder / METRICS)))
    except (DataError, OSError) as error:
        return _RunRecords(notes=(f"without training curves: {error}",))
