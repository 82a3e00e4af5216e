"""Images in folders: one folder for each class, or a CSV that says which is what."""

from __future__ import annotations

import contextlib
import csv
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

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
IMAGE_COLUMNS = ("image", "file_name", "filename", "file", "path", "image_path")
LABEL_COLUMNS = ("label", "class", "category", "target", "species")
ANNOTATED_FOLDER = "images"
"""The folder of images whose classes a table tells."""


log = logging.getLogger("vitrail")


class FileSource(Source):
    """Files below a folder, with a table of their names and labels."""

    def __init__(self, root: Path, table: MappedTable, classes: tuple[str, ...]) -> None:
        self.root, self.table, self.classes = root, table, classes

    def __len__(self) -> int:
        return len(self.table["labels"])

    def path(self, index: int) -> Path:
        """Of one file."""
        start, stop = self.table["starts"][index : index + 2]
        return self.root / os.fsdecode(self.table["names"][start:stop].tobytes())

    def read(self, index: int) -> Sample:
        """The bytes of a file."""
        return Sample(read_file(self.path(index)), int(self.table["labels"][index]))

    def name(self, index: int) -> str:
        """Its path."""
        return make_printable(self.path(index))

    def identity(self, index: int) -> str:
        """Its path from the folder on."""
        return self.path(index).relative_to(self.root).as_posix()

    def labels(self, start: int, stop: int) -> Indices:
        """From the table."""
        found: Indices = self.table["labels"][start:stop].astype(np.int64)
        return found


def open_class_folders(root: Path, classes: Sequence[str] | None = None) -> FileSource:
    """A folder whose folders are classes; images may lie deeper within them.

    `classes`: the names of the classes in order, where other parts of the data set have more than this one.
    """
    here, classes = list_class_folders(root), list_class_folders(root) if classes is None else list(classes)
    folders = [(label, root / name) for label, name in enumerate(classes) if name in here]
    facts = [
        f"{label} {make_printable(f)} {_stat(f).st_mtime_ns}" for label, top in folders for f in _folders(top, root)
    ]

    def build(folder: Path) -> None:
        _write(folder, ((path, label) for label, top in folders for path in _images(root, top)))

    table = load_or_build_table(f"folder {root.resolve()}", "\n".join(facts), build)
    files = FileSource(root, table, tuple(map(make_printable, classes)))
    flat = sum(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in _entries(root))
    if flat and len(files):
        log.warning("%s: %d images lie beside the folders of the classes, and are not used", root, flat)
    if not len(files):
        told = (
            f"{flat} images lie in {root} itself" if flat else f"{root} holds no images ({', '.join(IMAGE_SUFFIXES)})"
        )
        raise DataError(f"{told}: expected a folder for each class with images in it, or a CSV that tells their labels")
    return files


def list_class_folders(root: Path) -> list[str]:
    """The folders in a folder."""
    return [entry.name for entry in _entries(root) if _is_dir(entry) and not entry.name.startswith(".")]


def find_annotation_table(root: Path) -> Path | None:
    """Of a part as Tiny-ImageNet's val/ is, with images/ and a table of their classes: that table."""
    table = root / f"{root.name}_annotations.txt"
    return table if (root / ANNOTATED_FOLDER).is_dir() and table.is_file() else None


def open_annotated_folder(table: Path, classes: Sequence[str]) -> FileSource:
    """The images that such a table names, with a tab between the name, the class and what else there is."""
    stat, numbers = _stat(table), {name: number for number, name in enumerate(classes)}

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
                    f"{make_printable(table)}, line {number}: the class {label!r} has no folder in other parts"
                )
            yield os.fsencode(f"{ANNOTATED_FOLDER}/{name}"), numbers[label]

    facts = f"{stat.st_size} {stat.st_mtime_ns} {' '.join(classes)}"

    def build(folder: Path) -> None:
        _write(folder, rows())

    found = load_or_build_table(f"annotated {table.resolve()}", facts, build)
    return FileSource(table.parent, found, tuple(map(make_printable, classes)))


def open_csv(path: Path, split: str | None = None) -> FileSource:
    """A CSV with a column of image paths, relative to its own folder, and one of labels; perhaps one of splits."""
    stat = _stat(path)

    def build(folder: Path) -> None:
        words = {label for _, label in _rows(path, None)}  # of all splits, so that they agree
        classes = sorted(words, key=int) if all(word.isdecimal() for word in words) else sorted(words)
        numbers = {word: number for number, word in enumerate(classes)}
        _write(folder, ((os.fsencode(name), numbers[label]) for name, label in _rows(path, split)))
        (folder / "classes.json").write_text(json.dumps(classes))

    table = load_or_build_table(f"csv {split} {path.resolve()}", f"{stat.st_size} {stat.st_mtime_ns}", build)
    files = FileSource(path.parent, table, tuple(json.loads((table.folder / "classes.json").read_text())))
    if not len(files):
        raise DataError(f"{path} lists no images" + (f" in the split {split!r}" if split else ""))
    return files


def read_csv_splits(path: Path) -> set[str]:
    """The splits that a CSV names."""
    with _table(path) as reader:
        return {row["split"] or "" for row in reader} if "split" in (reader.fieldnames or ()) else set()


def walk_files(root: Path) -> Iterator[str]:
    """The files in a folder and in those within it, without hidden ones. Links are followed, but nowhere twice."""
    entered = set[tuple[int, int]]()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_refuse):
        here = _identity(Path(folder))
        if here in entered:
            folders.clear()
            continue
        entered.add(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (f"{folder}{os.sep}{name}" for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise DataError(f"{make_printable(error.filename)} cannot be listed: {error.strerror}")


def _rows(path: Path, split: str | None) -> Iterator[tuple[str, str]]:
    """The image and the label of each row."""
    with _table(path) as reader:
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
def _table(path: Path) -> Iterator[csv.DictReader[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield csv.DictReader(file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _write(folder: Path, rows: Iterator[tuple[bytes, int]]) -> None:
    """The names one after the other in one file, where each starts, and the labels."""
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


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{make_printable(path)} cannot be read: {error.strerror}") from None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {error.strerror}") from None


def _folders(top: Path, root: Path) -> Iterator[Path]:
    """A folder below the root and those within it. Links are followed, but not back to a folder above."""
    return _folders_below(top, (_identity(root),))


def _folders_below(top: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    here = _identity(top)
    if here in above:
        return
    yield top
    for entry in _entries(top):
        if _is_dir(entry) and not entry.name.startswith("."):
            yield from _folders_below(Path(entry.path), (*above, here))


def _identity(folder: Path) -> tuple[int, int]:
    stat = _stat(folder)
    return stat.st_dev, stat.st_ino


def _images(root: Path, top: Path) -> Iterator[bytes]:
    """The names of the images of a class, relative to the root."""
    for folder in _folders(top, root):
        for entry in _entries(folder):
            name = entry.name
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".") and not _is_dir(entry):
                yield os.fsencode(Path(entry.path).relative_to(root))


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
