"""Check every image of a data set: which are broken, duplicated, misnamed, tiny, grey or huge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.check.overlap import LOOKS, LookedSplit, compare_looks, make_look
from vitrail.data.check.overlap_page import make_page
from vitrail.data.check.report import FACTS, NO_FILE, DataReport, SplitFacts
from vitrail.data.check.sums import find_changed_files
from vitrail.data.check.targets import check_targets
from vitrail.data.locate import find_local_path
from vitrail.data.open import Data, add_labels_from, add_task, name_data, open_splits
from vitrail.data.parallel import map_samples, resolve_worker_count
from vitrail.data.sample_names import find_data_folder, identify_sample
from vitrail.data.sources.annotated import find_bad_rows
from vitrail.data.sources.flat_folder import FlatFolder, parse_labels_from
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.image_files import IMAGE_SUFFIXES, is_image_name
from vitrail.data.sources.source import Source, make_printable
from vitrail.data.task_data import recognise_data
from vitrail.data.transforms.decode import EXTENSIONS, FORMATS, decode_to_pillow, read_format
from vitrail.errors import ConfigError, DataError
from vitrail.system.events import OnEvent, Progress, open_listener, send_progress
from vitrail.system.files import check_out_file, describe_reason, write_out_file, write_out_text
from vitrail.tasks.task import Task

JOB_SIZE = 32
"""Samples in a job of a process, at least."""
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")


def check_data(
    data: Data,
    *,
    split: str | None = None,
    labels_from: str | None = None,
    task: Task | str | None = None,
    labels: str | Sequence[str] | None = None,
    against: Data | None = None,
    against_split: str | None = None,
    against_labels_from: str | None = None,
    page: str | Path | None = None,
    names: str | Path | None = None,
    workers: int | None = None,
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> DataReport:
    """Decode every image and report what is wrong; with `against`, also which images another data set has too.

    Events: progress of the task "checking"; with `against`, also of "reading the others" and "comparing".

    Args:
        data: anything that `open_data` accepts.
        split: one split; None checks all.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        task: "labels", "tags", "numbers", "levels" or "attributes", or the task of a model, which knows the names that
            are allowed; None to recognise it.
        labels: the columns to learn, such as "colour,shape"; None to find them.
        against: other data, such as a test set. Images of `data` that repeat one of it are found: those with the same
            pixels in any file format, and those that are nearly the same (resized, recompressed, slightly cropped,
            brighter, darker or mirrored).
        against_split: one split of `against`, such as "test"; None takes all.
        against_labels_from: as `labels_from`, for `against`.
        page: an HTML file for the pairs that `against` finds, side by side.
        names: a text file for the names of the images that repeat one of `against`, one per line; `pack_data` leaves
            these out with `without`.
        workers: processes; one per core if None.
        out: a JSON file for the report.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Returns:
        A report of all findings; `report.failed` tells whether training should not start.

    Raises:
        ConfigError: `workers` is less than 1, a file cannot be written, `labels_from` cannot be understood, or an
            option needs `against`.
        DataError: a data set cannot be opened.
    """
    workers = resolve_worker_count(workers)
    out, page, names = (None if place is None else Path(place) for place in (out, page, names))
    for place, option in ((out, "--out"), (page, "--page"), (names, "--names")):
        check_out_file(place, option)
    if against is None and any(each is not None for each in (page, names, against_split, against_labels_from)):
        raise ConfigError("page, names, against_split and against_labels_from go with against: name the other data too")
    data = recognise_data(add_task(add_labels_from(data, labels_from), task, labels), allows_joined_tags=True)
    sources, others = open_splits(data, split), dict[str, Source]()
    if against is not None:
        against = recognise_data(add_labels_from(against, against_labels_from), allows_joined_tags=True)
        others = open_splits(against, against_split)
        _check_other_data(data, sources, against, others)
    parts = [
        SplitFacts(
            name,
            source,
            np.zeros(len(source), FACTS),
            ignored=list(_find_ignored(data, source)),
            bad_rows=find_bad_rows(source),
        )
        for name, source in sources.items()
    ]
    with open_listener(on_event) as listener:
        folder = find_data_folder(data)
        changed = [] if folder is None else find_changed_files(folder, send_progress(listener, "comparing hashes"))
        looks = _examine_all(parts, workers, send_progress(listener, "checking"), with_looks=against is not None)
        overlap = None
        if against is not None:
            looked = [LookedSplit(part.split, part.source, look) for part, look in zip(parts, looks, strict=True)]
            compared = [SplitFacts(name, source, np.zeros(len(source), FACTS)) for name, source in others.items()]
            reading = send_progress(listener, "reading the others")
            looks = _examine_all(compared, workers, reading, with_looks=True, needs_labels=False)
            other = [LookedSplit(part.split, part.source, look) for part, look in zip(compared, looks, strict=True)]
            overlap = compare_looks(looked, other, send_progress(listener, "comparing"))
        report = DataReport(parts, overlap, check_targets(sources), changed)
        if names is not None and overlap is not None:
            lines = (
                identify_sample(parts[part].source, index, folder) for part, index in overlap.pairs[:, :2].tolist()
            )
            write_out_text(names, "".join(f"{line}\n" for line in lines), "--names")
        if page is not None and overlap is not None and against is not None:
            write_out_text(page, make_page(overlap, data, against), "--page")
    if out is not None:
        write_out_file(out, report.to_dict())
    return report


def _check_other_data(data: Data, sources: dict[str, Source], against: Data, others: dict[str, Source]) -> None:
    """Raise a ConfigError if data is compared with itself: every image would repeat itself."""
    places = [find_data_folder(each) and find_local_path(name_data(each)).resolve() for each in (data, against)]
    is_same = data is against or (isinstance(data, str) and data == against)
    if (is_same or (places[0] is not None and places[0] == places[1])) and sources.keys() & others.keys():
        raise ConfigError(
            f"{name_data(data)} would be compared with itself: give other data, or other splits of it, such as split "
            "train and against_split test"
        )


def _examine_all(
    parts: Sequence[SplitFacts], workers: int, progress: Progress, *, with_looks: bool, needs_labels: bool = True
) -> list[NDArray[Any]]:
    """Check the samples of all splits in many processes; return `LOOKS` of each split, if they are wanted."""
    total, done = sum(len(part.source) for part in parts), 0
    looks = [np.zeros(len(part.source) if with_looks else 0, LOOKS) for part in parts]
    progress(done, total)
    for part, look in zip(parts, looks, strict=True):
        source = part.source
        step = max(source.block, JOB_SIZE)
        jobs = (range(start, min(start + step, len(source))) for start in range(0, len(source), step))
        processes = min(workers, max(-(-len(source) // step), 1))
        examine = partial(_examine, with_look=with_looks, needs_label=needs_labels)
        with closing(map_samples(examine, source, jobs, processes)) as results:
            for job, found in results:
                for index, each in zip(job, found, strict=True):
                    if isinstance(each, str):
                        part.reasons[index] = each
                        continue
                    part.facts[index], seen = each
                    if seen is not None:
                        look[index] = seen
                done += len(job)
                progress(done, total)
    return looks


def _examine(
    source: Source, index: int, with_look: bool, needs_label: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """Decode a sample; return a record of `FACTS`, and one of `LOOKS` if it is wanted."""
    sample = source.read_checked(index) if needs_label else source.read(index)
    content, label = sample.content, sample.label if needs_label else 0
    if isinstance(content, Tensor):
        pixels = content.numpy()
        digest = _digest(repr(pixels.shape).encode() + pixels.tobytes())
        grey = bool((pixels[:1] == pixels).all())
        facts = digest, label, *pixels.shape[1:], NO_FILE, True, grey, False
        return facts, make_look(content, None) if with_look else None
    kind, mode = read_format(content)
    image = decode_to_pillow(content)
    suffix = source.name(index).lower().rpartition(".")[2]
    misnamed = f".{suffix}" in IMAGE_SUFFIXES and suffix not in EXTENSIONS[kind]
    grey = mode.split(";")[0] in _GREY_MODES or _looks_grey(image)
    facts = _digest(content), label, image.height, image.width, FORMATS.index(kind), True, grey, misnamed
    return facts, make_look(content, image) if with_look else None


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
        or find_local_path(str(data)).is_file()
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
        raise DataError(f"{make_printable(folder)} cannot be listed: {describe_reason(error)}") from None


def _identify_folder(folder: Path) -> tuple[int, int]:
    stat = folder.stat()
    return stat.st_dev, stat.st_ino
