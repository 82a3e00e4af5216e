"""Check every image of a data set: which are broken, duplicated, misnamed, tiny, grey or huge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.check.report import FACTS, NO_FILE, DataReport, SplitFacts
from vitrail.data.open import Data, add_labels_from, open_splits
from vitrail.data.parallel import map_samples, resolve_worker_count
from vitrail.data.sources.flat_folder import FlatFolder, parse_labels_from
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.image_files import IMAGE_SUFFIXES, is_image_name
from vitrail.data.sources.source import Source, make_printable
from vitrail.data.transforms.decode import EXTENSIONS, FORMATS, decode_to_pillow, read_format
from vitrail.errors import DataError
from vitrail.system.events import OnEvent, open_listener, send_progress
from vitrail.system.files import check_out_file, write_out_file

JOB_SIZE = 32
"""Samples in a job of a process, at least."""
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")


def check_data(
    data: Data,
    *,
    labels_from: str | None = None,
    workers: int | None = None,
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> DataReport:
    """Decode every image of every split and report what is wrong.

    Events: progress of the task "checking".

    Args:
        data: anything that `open_data` accepts.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        workers: processes; one per core if None.
        out: a JSON file for the report.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Returns:
        A report of all findings; `report.failed` tells whether training should not start.

    Raises:
        ConfigError: `workers` is less than 1, `out` cannot be written, or `labels_from` cannot be understood.
        DataError: the data set cannot be opened.
    """
    workers, out = resolve_worker_count(workers), None if out is None else Path(out)
    check_out_file(out)
    data = add_labels_from(data, labels_from)
    sources = open_splits(data)
    total, done, parts = sum(map(len, sources.values())), 0, []
    with open_listener(on_event) as listener:
        progress = send_progress(listener, "checking")
        for split, source in sources.items():
            part = SplitFacts(split, source, np.zeros(len(source), FACTS), ignored=list(_find_ignored(data, source)))
            parts.append(part)
            for number in _fill_facts(part, workers):
                done += number
                progress(done, total)
    report = DataReport(parts)
    if out is not None:
        write_out_file(out, report.to_dict())
    return report


def _fill_facts(part: SplitFacts, workers: int) -> Iterator[int]:
    """Check the samples of a split in many processes; yield how many are new after each job."""
    source = part.source
    step = max(source.block, JOB_SIZE)
    jobs = (range(start, min(start + step, len(source))) for start in range(0, len(source), step))
    processes = min(workers, max(-(-len(source) // step), 1))
    with closing(map_samples(_collect_facts, source, jobs, processes)) as results:
        for job, facts in results:
            for index, fact in zip(job, facts, strict=True):
                if isinstance(fact, str):
                    part.reasons[index] = fact
                else:
                    part.facts[index] = fact
            yield len(job)


def _collect_facts(source: Source, index: int) -> tuple[Any, ...]:
    """Decode a sample and return a record of `FACTS`."""
    sample = source.read_checked(index)
    content = sample.content
    if isinstance(content, Tensor):
        pixels = content.numpy()
        digest = _digest(repr(pixels.shape).encode() + pixels.tobytes())
        grey = bool((pixels[:1] == pixels).all())
        return digest, sample.label, *pixels.shape[1:], NO_FILE, True, grey, False
    kind, mode = read_format(content)
    image = decode_to_pillow(content)
    suffix = source.name(index).lower().rpartition(".")[2]
    misnamed = f".{suffix}" in IMAGE_SUFFIXES and suffix not in EXTENSIONS[kind]
    grey = mode.split(";")[0] in _GREY_MODES or _looks_grey(image)
    return _digest(content), sample.label, image.height, image.width, FORMATS.index(kind), True, grey, misnamed


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _looks_grey(image: Image.Image) -> bool:
    """Tell whether red, green and blue are equal everywhere, strip by strip: the first usually decides."""
    rows = max((1 << 18) // image.width, 1)
    for top in range(0, image.height, rows):
        strip = np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        if (strip[..., :1] != strip).any():
            return False
    return True


def _find_ignored(data: Data, source: Source) -> Iterator[tuple[str, str]]:
    """Yield each file in a folder that is not used, with the reason."""
    if isinstance(data, FlatFolder) and isinstance(source, FileSource):
        yield from _find_unlabelled(source.root, data.labels_from)
        return
    if (
        not isinstance(source, FileSource)
        or Path(str(data)).expanduser().is_file()
        or len(list(source.root.glob("*.csv"))) == 1
    ):
        return
    for path in _list_entries(source.root):
        if path.is_dir():
            yield from _find_ignored_below(path, (_identify_folder(source.root),))
        elif path.name.lower().endswith(IMAGE_SUFFIXES):
            yield make_printable(path), "lies in no class folder"


def _find_unlabelled(folder: Path, labels_from: str) -> Iterator[tuple[str, str]]:
    """Yield what is not used of a folder whose images' names tell their classes."""
    pattern = parse_labels_from(labels_from)
    for path in _list_entries(folder):
        if path.is_dir():
            yield make_printable(path), "a folder, and labels_from takes the images in the folder itself"
        elif not is_image_name(path.name):
            yield make_printable(path), f"its name ends in none of {', '.join(IMAGE_SUFFIXES)}"
        elif pattern.find_label(path.name) is None:
            yield make_printable(path), f"its name does not fit labels_from = {labels_from!r}"


def _find_ignored_below(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    here = _identify_folder(folder)
    if here in above:
        yield make_printable(folder), "a link that leads back to a folder above it"
        return
    for path in _list_entries(folder):
        if path.is_dir():
            yield from _find_ignored_below(path, (*above, here))
        elif not path.name.lower().endswith(IMAGE_SUFFIXES):
            yield make_printable(path), f"its name ends in none of {', '.join(IMAGE_SUFFIXES)}"


def _list_entries(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder that are not hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {error.strerror}") from None


def _identify_folder(folder: Path) -> tuple[int, int]:
    stat = folder.stat()
    return stat.st_dev, stat.st_ino
