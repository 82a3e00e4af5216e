"""What `vitrail evaluate` does with one model: opens everything, scores, and writes the report and its figures."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.open import open_data, splits_of, tested_part
from vitrail.data.sources.source import Source, fingerprint
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluation import evaluate
from vitrail.evaluation.figures import draw_report
from vitrail.evaluation.labels import read_map
from vitrail.evaluation.report import Report
from vitrail.inference.batches import How, Progress
from vitrail.model.base import ImageModel
from vitrail.system.files import short_name, write_whole
from vitrail.system.ranks import join_ranks
from vitrail.weights.load import load

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others."""


@dataclass(frozen=True)
class Written:
    """A report, and the files that hold it."""

    report: Report
    files: tuple[Path, ...]
    first: bool
    """Whether this process is the one that speaks."""
    seen: bool
    """Whether the model is known to have learned from these images."""


def run(
    model: str,
    data: str,
    split: str | None = None,
    *,
    real: Path | None = None,
    mapping: Path | None = None,
    among: bool = False,
    how: How | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Written:
    """Evaluate, on all ranks that there are; the first writes report.json and the figures."""
    how = how or How()
    source, part = scored_on(data, split)
    loaded = load(model)
    labels = None
    if mapping is not None:
        labels = read_map(mapping, loaded.labels, loaded.num_classes, source.classes, source.num_classes)
    name = "-".join(["evaluate", short_name(data), *([part] if part else []), short_name(model)])
    folder = folder or Path("runs") / name
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file: give a folder")
    try:
        if os.environ.get("RANK", "0") == "0":
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): give another folder by --out") from None
    names = (model, data, part)
    with join_ranks(how.device, TIMEOUT) as ranks:
        shown = progress if ranks.first else None
        seen = learned_from_these(loaded, source, data)
        report, scored = evaluate(
            loaded, source, how=how, ranks=ranks, labels=labels, among=among, real=real, names=names, progress=shown
        )
        files = _write(report, scored, folder) if ranks.first else ()
        return Written(report, files, ranks.first, seen)


def learned_from_these(model: ImageModel, source: Source, data: str) -> bool:
    """Whether the images are known to be those that a model was trained on, or a part of them."""
    if model.learned_from is None:
        return False
    whole = [] if splits_of(data) else [open_data(data)]
    return model.learned_from in {fingerprint(each) for each in (source, *whole)}


def scored_on(data: str, split: str | None) -> tuple[Source, str | None]:
    """The part that was asked for; else what the data has to test on, else everything."""
    split = split or tested_part(data) or ("train" if "train" in splits_of(data) else None)
    return open_data(data, split), split


def _write(report: Report, source: Source, folder: Path) -> tuple[Path, ...]:
    path = folder / "report.json"
    write_whole(path, (json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n").encode())
    return (path, *draw_report(report, source, folder))
