"""`calibrate`: fit what a model's answers are worth, and store it with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitrail.data.locate import find_local_path
from vitrail.data.open import Data, add_labels_from, choose_test_split, list_splits, name_data, open_data
from vitrail.data.sources.source import Source, Subset
from vitrail.data.task_data import recognise_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluate import has_learned_from, open_scored_part, was_chosen_by
from vitrail.evaluation.labels import LabelMap, read_label_map
from vitrail.evaluation.reliability import SetCheck, fit_reliability, list_scores
from vitrail.evaluation.score_task import read_as_task
from vitrail.inference.batches import InferenceOptions
from vitrail.inference.engine import Engine, Model, check_model, is_exported, open_engine
from vitrail.inference.find_images import require_images
from vitrail.model.base import ImageModel
from vitrail.model.create import share_model
from vitrail.reliability.record import Reliability
from vitrail.reliability.sets import LEAST_IMAGES
from vitrail.reliability.unknown import LEAST_IMAGES as LEAST_KNOWN
from vitrail.system.events import OnEvent, open_listener, send_messages, send_progress
from vitrail.system.files import hide_folders
from vitrail.system.ranks import require_one_process
from vitrail.system.results import Result, Rows
from vitrail.tasks.labels import Labels
from vitrail.weights.load import load
from vitrail.weights.save import add_reliability, find_native_folder, save


@dataclass(frozen=True, repr=False)
class CalibrationResult(Result):
    """A model with what its answers are worth."""

    model: ImageModel = field(compare=False)
    """The model, with `reliability`, on the CPU."""
    reliability: Reliability = field(compare=False)
    images: int
    """Images that it was fitted to."""
    score: str
    """How unknown images are told: softmax, energy or neighbours."""
    aurocs: Mapping[str, float]
    """For each score, the probability that an unlike image looks stranger than a known one; empty without such."""
    checks: tuple[SetCheck, ...]
    """What sets of labels do, over 20 random halvings of the images; empty if there are too few."""
    folder: Path | None
    """Where it is stored; None for a loaded model without `out`."""

    def summary(self) -> Rows:
        """Return the images, what was fitted, and where it is stored."""
        rows = [("images", f"{self.images:,}")]
        if self.checks:
            rows += [
                (f"sets at {check.coverage:.0%}", f"{check.size:.2f} labels, {check.reached:.1%} hold the right one")
                for check in self.checks
            ]
        else:
            rows.append(("sets", "none"))
        rows.append(("unknown images", f"by {self.score}{_describe_auroc(self.aurocs, self.score)}"))
        return [*rows, ("stored", "nowhere: give out=…" if self.folder is None else str(self.folder))]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the checks of the sets, and the scores that were compared."""
        tables: dict[str, Sequence[Sequence[str]]] = {}
        if self.checks:
            rows = [(f"{c.coverage:.0%}", f"{c.reached:.2%}", f"{c.size:.2f}", f"{c.alone:.1%}") for c in self.checks]
            tables["Sets of labels"] = [
                ("coverage", "right label inside", "labels in a set", "sets of one label"),
                *rows,
            ]
        if self.aurocs:
            tables["Scores of unknown images"] = [
                ("score", "AUROC"),
                *((name, f"{value:.2%}") for name, value in self.aurocs.items()),
            ]
        return tables


def calibrate(
    model: Model,
    data: Data,
    split: str | None = None,
    *,
    unlike: Data | None = None,
    sets: bool = True,
    labels: str | Sequence[str] | None = None,
    labels_from: str | None = None,
    mapping: str | Path | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> CalibrationResult:
    """Fit sets of labels and a score of unknown images to images that chose nothing, and store both with the weights.

        vitrail.calibrate("runs/photos", "more-photos/")
        predictor = vitrail.Predictor("runs/photos")
        predictor.sets("cat.jpg", coverage=0.95)       # labels that hold the right one in 95% of images
        predictor.unknown("cat.jpg").is_unknown        # whether it looks like nothing that the model knows

    The images must be like those that the model will see, and must neither have trained it nor chosen anything.

    Events: `message` (text) while a faster precision is prepared, and the progress of the task "calibrating", over the
    images and then over the unlike ones.

    Args:
        model: a loaded model, which stays as it is, or anything that `vitrail.load` takes.
        data: anything that `open_data` takes, with labels if the model gives labels.
        split: train, val or test; by default test, else val, else everything.
        unlike: images of other things, which choose the score of unknown images: the one with the largest AUROC; by
            default neighbours, which is best on average.
        sets: whether to fit sets of labels, for which 1,000 images are needed; a score of unknown images needs 100.
        labels: the column of the data that holds the label, if it is not called so.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        mapping: a CSV or JSON file that says which classes of the model are right for which of the data.
        batch_size: images at a time.
        workers: processes that read images; 0 reads them in this process.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        precision: fp32, or faster and less exact; what it will predict in is best.
        out: a new folder for the model with what was fitted; by default it is added to the model's own folder.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an argument is wrong, the model is known to have learned from these images, or it has no folder of
            its own and `out` is not given.
        DataError: there are too few images, or they cannot be read or matched with the model's classes.
        WeightsError: the model cannot be read, or computes values that are not finite.
    """
    require_one_process("calibrate")
    options = InferenceOptions(batch_size, workers, device, precision)
    check_model(model)
    if is_exported(model):
        raise ConfigError(f"{model} is an exported file: calibrate the model that it was made from, and export that")
    data = add_labels_from(data, labels_from)
    place = _choose_place(model, out)
    with open_listener(on_event) as listener:
        loaded = share_model(model) if isinstance(model, ImageModel) else load(model)
        engine = open_engine(
            loaded, device=device, precision=precision, batch=batch_size, on_message=send_messages(listener)
        )
        if engine.task.kind == "labels" or labels is not None:
            data = read_as_task(data, engine.task, labels)
        else:
            data = recognise_data(data)  # targets are not needed, so those of any task will do
        source, part = open_scored_part(data, split)
        source = drop_repeated(source)
        where = name_data(data) if part is None else f"the split {part} of {name_data(data)}"
        if has_learned_from(engine, source, data):
            raise ConfigError(
                f"the model has learned from {where}, so it is surer there than on new images: give images that "
                "neither trained it nor chose anything"
            )
        if was_chosen_by(engine, source):
            raise ConfigError(
                f"{where} chose the best weights of the training, so the model is surer there than on new images: give "
                "images that neither trained it nor chose anything"
            )
        if not list_scores(engine):
            raise ConfigError("this model gives neither labels nor representations: there is nothing to fit")
        needs_sets = sets and engine.num_classes > 0 and isinstance(engine.task, Labels)
        _check_count(len(source), where, needs_sets)
        fitted = fit_reliability(
            engine,
            source,
            unlike=None if unlike is None else open_unlike(unlike),
            sets=sets,
            options=options,
            labels=None if mapping is None else _read_map(mapping, engine, source),
            data=hide_folders(name_data(data)),
            progress=send_progress(listener, "calibrating"),
        )
        _check_count(0 if fitted is None else fitted.reliability.images, f"the readable part of {where}", needs_sets)
    assert fitted is not None
    unknown = fitted.reliability.unknown
    assert unknown is not None
    loaded = loaded.cpu()
    loaded.reliability = fitted.reliability
    if out is not None:
        save(loaded, out, notes=f"Calibrated on {fitted.reliability.images:,} images of {fitted.reliability.data}.")
    elif place is not None:
        add_reliability(place, fitted.reliability)
    return CalibrationResult(
        model=loaded,
        reliability=fitted.reliability,
        images=fitted.reliability.images,
        score=unknown.kind,
        aurocs=fitted.aurocs,
        checks=fitted.checks,
        folder=place,
    )


def drop_repeated(source: Source) -> Source:
    """Return a source without images that a table lists again: the same image twice says nothing new."""
    first: dict[str, int] = {}
    for index in range(len(source)):
        first.setdefault(source.identity(index), index)
    return source if len(first) == len(source) else Subset(source, np.fromiter(first.values(), np.int64, len(first)))


def open_unlike(data: Data) -> Source:
    """Open images of other things, whose labels mean nothing: a data set, or a folder with images at any depth.

    Of a data set with several parts, the one for testing is taken.
    """
    try:
        splits = list_splits(data)
        return open_data(data, choose_test_split(data) or splits[0]) if splits else open_data(data)
    except DataError:
        if not isinstance(data, str | Path) or not find_local_path(data).is_dir():
            raise
        return open_data([(image.content, "unlike") for image in require_images(str(find_local_path(data)))])


def _choose_place(model: Model, out: str | Path | None) -> Path | None:
    """Return the folder that the result is stored in; None for a loaded model, if no folder is given.

    Raises:
        ConfigError: the model has no native folder that belongs to the user.
    """
    if out is not None:
        place = Path(out).expanduser()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(
                f"out = {place} is there already: name a new folder, or leave it out to add to the model's"
            )
        return place
    if isinstance(model, ImageModel):
        return None
    folder = find_native_folder(model)
    if folder is None:
        raise ConfigError(f"{model} is not in a folder of vitrail's own format: give a new folder, out=… (--out)")
    return folder


def _check_count(images: int, where: str, needs_sets: bool) -> None:
    """Raise a DataError if there are too few images."""
    fits_score = images >= LEAST_KNOWN
    advice = ", or fit only the score of unknown images: sets=False (--no-sets)" if fits_score else ""
    if needs_sets and images < LEAST_IMAGES:
        raise DataError(
            f"sets of labels need at least {LEAST_IMAGES:,} images that chose nothing, and {where} has {images:,}: "
            "give more" + advice
        )
    if images < LEAST_KNOWN:
        raise DataError(
            f"a score of unknown images needs at least {LEAST_KNOWN} images that chose nothing, and {where} has "
            f"{images}"
        )


def _read_map(mapping: str | Path, engine: Engine, source: Source) -> LabelMap:
    path = Path(mapping)
    return read_label_map(path, engine.class_names, engine.num_classes, source.classes, source.num_classes)


def _describe_auroc(aurocs: Mapping[str, float], score: str) -> str:
    return f", AUROC {aurocs[score]:.1%} against the unlike images" if score in aurocs else ""
