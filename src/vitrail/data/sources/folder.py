"""Images in folders: one folder per class, or a table with the label of each file."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source, make_printable, read_file
from vitrail.data.sources.table_cache import MappedTable, load_or_build_table
from vitrail.errors import DataError
from vitrail.system.files import open_regular_file

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
IMAGE_COLUMNS = ("image", "file_name", "filename", "file", "path", "image_path")
LABEL_COLUMNS = ("label", "class", "category", "target", "species")
ANNOTATED_FOLDER = "images"
"""The folder of the images that an annotation table lists."""


log = logging.getLogger("vitrail")


class FileSource(Source):
    """Image files below a folder, with a table of their names and labels."""

    def __init__(self, root: Path, table: MappedTable, classes: tuple[str, ...]) -> None:
        self.root, self.table, self.classes = root, table, classes

    def __len__(self) -> int:
        return len(self.table["labels"])

    def path(self, index: int) -> Path:
        start, stop = self.table["starts"][index : index + 2]
        return self.root / os.fsdecode(self.table["names"][start:stop].tobytes())

    def read(self, index: int) -> Sample:
        return Sample(read_file(self.path(index)), int(self.table["labels"][index]))

    def name(self, index: int) -> str:
        return make_printable(self.path(index))

    def identity(self, index: int) -> str:
        return self.path(index).relative_to(self.root).as_posix()

    def labels(self, start: int, stop: int) -> Indices:
        labels: Indices = self.table["labels"][start:stop].astype(np.int64)
        return labels


def open_class_folders(root: Path, classes: Sequence[str] | None = None) -> FileSource:
    """Open a folder with one subfolder per class; images may be in deeper subfolders.

    `classes` gives the class names in order, for a split that may lack classes of another split.
    """
    here, classes = list_class_folders(root), list_class_folders(root) if classes is None else list(classes)
    folders = [(label, root / name) for label, name in enumerate(classes) if name in here]
    facts = [
        f"{label} {make_printable(f)} {_read_stat(f).st_mtime_ns}"
        for label, top in folders
        for f in _walk_folders(top, root)
    ]

    def build(folder: Path) -> None:
        _write_table(folder, ((path, label) for label, top in folders for path in _walk_images(root, top)))

    table = load_or_build_table(f"folder {root.resolve()}", "\n".join(facts), build)
    files = FileSource(root, table, tuple(map(make_printable, classes)))
    flat = sum(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in _list_entries(root))
    if flat and len(files):
        log.warning("%s: %d images lie beside the folders of the classes, and are not used", root, flat)
    if not len(files):
        problem = (
            f"{flat} images lie in {root} itself" if flat else f"{root} holds no images ({', '.join(IMAGE_SUFFIXES)})"
        )
        raise DataError(
            f"{problem}: expected a folder for each class with images in it, or a CSV that tells their labels"
        )
    return files


def list_class_folders(root: Path) -> list[str]:
    """Return the sorted names of the subfolders that are not hidden."""
    return [entry.name for entry in _list_entries(root) if _is_dir(entry) and not entry.name.startswith(".")]


def find_annotation_table(root: Path) -> Path | None:
    """Return the annotation table of a split such as Tiny-ImageNet's val/, which has images/ and a table; else None."""
    table = root / f"{root.name}_annotations.txt"
    return table if (root / ANNOTATED_FOLDER).is_dir() and table.is_file() else None


def open_annotated_folder(table: Path, classes: Sequence[str]) -> FileSource:
    """Open the images of an annotation table, whose lines hold a name, a class and more, separated by tabs."""
    stat, numbers = _read_stat(table), {name: number for number, name in enumerate(classes)}

    def rows() -> Iterator[tuple[bytes, int]]:
        for number, line in enumerate(read_file(table).decode(errors="replace").splitlines(), start=1):
            name, _, rest = line.partition("\t")
            label = rest.partition("\t")[0]
            if name != Path(name).name:
                raise DataError(
                    f"{make_printable(table)}, line {number}: {name!r} is not the name of a file in {ANNOTATED_FOLDER}"
                )
            if label not in numbers:
                raise DataError(
                    f"{make_printable(table)}, line {number}: the class {label!r} has no folder in the other splits"
                )
            yield os.fsencode(f"{ANNOTATED_FOLDER}/{name}"), numbers[label]

    facts = f"{stat.st_size} {stat.st_mtime_ns} {' '.join(classes)}"

    def build(folder: Path) -> None:
        _write_table(folder, rows())

    index = load_or_build_table(f"annotated {table.resolve()}", facts, build)
    return FileSource(table.parent, index, tuple(map(make_printable, classes)))


def open_csv(path: Path, split: str | None = None) -> FileSource:
    """Open a CSV with a column of image paths (relative to its folder), one of labels, and optionally one of splits."""
    stat = _read_stat(path)

    def build(folder: Path) -> None:
        words = {label for _, label in _read_csv_rows(path, None)}  # of all splits, so that labels agree
        classes = sorted(words, key=int) if all(word.isdecimal() for word in words) else sorted(words)
        numbers = {word: number for number, word in enumerate(classes)}
        _write_table(folder, ((os.fsencode(name), numbers[label]) for name, label in _read_csv_rows(path, split)))
        (folder / "classes.json").write_text(json.dumps(classes), encoding="utf-8")

    table = load_or_build_table(f"csv {split} {path.resolve()}", f"{stat.st_size} {stat.st_mtime_ns}", build)
    files = FileSource(
        path.parent, table, tuple(json.loads((table.folder / "classes.json").read_text(encoding="utf-8")))
    )
    if not len(files):
        raise DataError(f"{path} lists no images" + (f" in the split {split!r}" if split else ""))
    return files


def read_csv_splits(path: Path) -> set[str]:
    """Return the values of the column `split`; empty if there is no such column."""
    with _open_csv_reader(path) as reader:
        return {row["split"] or "" for row in reader} if "split" in (reader.fieldnames or ()) else set()


def walk_files(root: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, except hidden ones. Links are followed, each folder once."""
    entered = set[tuple[int, int]]()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise_data_error):
        here = _identify_folder(Path(folder))
        if here in entered:
            folders.clear()
            continue
        entered.add(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (f"{folder}{os.sep}{name}" for name in names if not name.startswith("."))


def _raise_data_error(error: OSError) -> None:
    raise DataError(f"{make_printable(error.filename)} cannot be listed: {error.strerror}")


def _read_csv_rows(path: Path, split: str | None) -> Iterator[tuple[str, str]]:
    """Yield the image path and the label of each row."""
    with _open_csv_reader(path) as reader:
        names = list(reader.fieldnames or ())
        image, label = (
            next((name for name in names if name.lower() in known), None) for known in (IMAGE_COLUMNS, LABEL_COLUMNS)
        )
        if image is None or label is None:
            raise DataError(
                f"{path} has the columns {', '.join(names) or 'none'}: it needs one of {', '.join(IMAGE_COLUMNS)} "
                f"and one of {', '.join(LABEL_COLUMNS)}"
            )
        for row in reader:
            if not row[image] or not row[label]:
                raise DataError(f"{path}, line {reader.line_num}: there is no {label if row[image] else image}")
            if split is None or row.get("split") == split:
                yield row[image], row[label]


@contextlib.contextmanager
def _open_csv_reader(path: Path) -> Iterator[csv.DictReader[str]]:
    try:
        with open_regular_file(path) as file:
            yield csv.DictReader(io.TextIOWrapper(file, newline="", encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _write_table(folder: Path, rows: Iterator[tuple[bytes, int]]) -> None:
    """Write three columns: all names in one array of bytes, where each name starts, and the labels."""
    starts, labels = array("q", [0]), array("i")
    with (folder / "names").open("wb") as file:
        for name, label in rows:
            file.write(name)
            starts.append(starts[-1] + len(name))
            labels.append(label)
    names = np.memmap(folder / "names", np.uint8, "r") if starts[-1] else np.empty(0, np.uint8)
    for column, values in {"names": names, "starts": np.asarray(starts), "labels": np.asarray(labels)}.items():
        np.save(folder / f"{column}.npy", values)
    del names
    (folder / "names").unlink()


def _read_stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{make_printable(path)} cannot be read: {error.strerror}") from None


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {error.strerror}") from None


def _walk_folders(top: Path, root: Path) -> Iterator[Path]:
    """Yield a folder and its subfolders. Links are followed, but not back to a folder above."""
    return _walk_folders_below(top, (_identify_folder(root),))


def _walk_folders_below(top: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    here = _identify_folder(top)
    if here in above:
        return
    yield top
    for entry in _list_entries(top):
        if _is_dir(entry) and not entry.name.startswith("."):
            yield from _walk_folders_below(Path(entry.path), (*above, here))


def _identify_folder(folder: Path) -> tuple[int, int]:
    stat = _read_stat(folder)
    return stat.st_dev, stat.st_ino


def _walk_images(root: Path, top: Path) -> Iterator[bytes]:
    """Yield the names of the images of a class, relative to the root."""
    for folder in _walk_folders(top, root):
        for entry in _list_entries(folder):
            name = entry.name
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".") and not _is_dir(entry):
                yield os.fsencode(Path(entry.path).relative_to(root))


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
