"""Image files that a table lists with their labels: a CSV, or the annotations beside a split's images."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.csv_text import explain_encoding, read_csv_lines
from vitrail.data.sources.image_files import make_printable, read_stat
from vitrail.data.sources.source import Sample, Source, read_file
from vitrail.data.sources.split_columns import SplitColumnFinder, refuse_split_columns
from vitrail.data.sources.table_cache import MappedTable, load_or_build_table
from vitrail.errors import DataError
from vitrail.system.files import open_regular_file

IMAGE_COLUMNS = ("image", "file_name", "filename", "file", "path", "image_path")
LABEL_COLUMNS = ("label", "class", "category", "target", "species")
ANNOTATED_FOLDER = "images"
"""The folder of the images that an annotation table lists."""


log = logging.getLogger("vitrail")


class FileSource(Source):
    """Image files with a table of their names and labels. A name is relative to a folder, or, from a CSV, absolute."""

    reads_in_threads = True

    def __init__(self, root: Path, table: MappedTable | Mapping[str, Any], classes: tuple[str, ...]) -> None:
        self.root, self.table, self.classes = root, table, classes
        self._real_root = os.path.realpath(root)

    def __len__(self) -> int:
        return len(self.table["labels"])

    def path(self, index: int) -> Path:
        return self.root / self.stored_name(index)

    def stored_name(self, index: int) -> str:
        """Return the path as the table has it."""
        start, stop = self.table["starts"][index : index + 2]
        return os.fsdecode(self.table["names"][start:stop].tobytes())

    def read(self, index: int) -> Sample:
        return Sample(read_file(self.path(index)), int(self.table["labels"][index]))

    def name(self, index: int) -> str:
        return make_printable(self.path(index))

    def identity(self, index: int) -> str:
        """Return the path relative to the folder; of an absolute path that leads elsewhere, the path itself.

        It is the same from every working directory, and whichever way the folder is reached.
        """
        path = Path(self.stored_name(index))
        if path.is_absolute():
            path = _shorten_absolute(os.path.normpath(path), self._real_root)
        return path.as_posix()

    def labels(self, start: int, stop: int) -> Indices:
        labels: Indices = self.table["labels"][start:stop].astype(np.int64)
        return labels


def _shorten_absolute(path: str, root: str) -> Path:
    """Return a path relative to a folder without links if it is in there, perhaps by links; otherwise as it is."""
    folder, name = os.path.split(path)
    for place in (folder, _resolve_folder(folder)):
        if Path(place).is_relative_to(root):
            return Path(place).relative_to(root) / name
    return Path(path)


@lru_cache(maxsize=4096)
def _resolve_folder(folder: str) -> str:
    return os.path.realpath(folder)


def find_annotation_table(root: Path) -> Path | None:
    """Return the annotation table of a split such as Tiny-ImageNet's val/, which has images/ and a table; else None."""
    table = root / f"{root.name}_annotations.txt"
    return table if (root / ANNOTATED_FOLDER).is_dir() and table.is_file() else None


def open_annotated_folder(table: Path, classes: Sequence[str]) -> FileSource:
    """Open the images of an annotation table, whose lines hold a name, a class and more, separated by tabs."""
    stat, numbers = read_stat(table), {name: number for number, name in enumerate(classes)}

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
        write_table(folder, rows())

    index = load_or_build_table(f"annotated {table.resolve()}", facts, build)
    return FileSource(table.parent, index, tuple(map(make_printable, classes)))


def open_csv(path: Path, split: str | None = None) -> FileSource:
    """Open a CSV with a column of image paths, one of labels, and optionally one of splits.

    A path is absolute, or relative to the folder of the CSV.
    """
    stat = read_stat(path)

    def build(folder: Path) -> None:
        words = {label for _, label in _read_csv_rows(path, None)}  # of all splits, so that labels agree
        classes = sort_classes(words)
        numbers = {word: number for number, word in enumerate(classes)}
        write_table(folder, ((os.fsencode(name), numbers[label]) for name, label in _read_csv_rows(path, split)))
        (folder / "classes.json").write_text(json.dumps(classes), encoding="utf-8")

    table = load_or_build_table(f"csv {split} {path.resolve()}", f"{stat.st_size} {stat.st_mtime_ns}", build)
    files = FileSource(
        path.parent, table, tuple(json.loads((table.folder / "classes.json").read_text(encoding="utf-8")))
    )
    if not len(files):
        raise DataError(f"{path} lists no images" + (f" in the split {split!r}" if split else ""))
    check_base(path, files)
    return files


def check_base(path: Path, files: FileSource) -> None:
    """Raise a DataError if the paths of a CSV seem to be relative to the working directory."""
    name = Path(files.stored_name(0))
    if not name.is_absolute() and not os.path.lexists(files.path(0)) and os.path.lexists(name):
        raise DataError(
            f"{make_printable(path)} lists {make_printable(name)}, which is found from the working directory, but "
            f"paths in a CSV are relative to the folder of the CSV: move the CSV to {make_printable(Path.cwd())}, or "
            "write absolute paths"
        )


def read_csv_splits(path: Path) -> set[str]:
    """Return the values of the column `split`; empty if there is no such column."""
    with _open_csv_reader(path) as reader:
        names = list(reader.fieldnames or ())
        column = find_split_column(names)
        if column is not None:
            return {row[column] or "" for row in reader}
        image, label = _find_columns(names)
        others = [name for name in names if name not in (image, label)]
        finder = SplitColumnFinder()
        for row in reader if label is not None else ():
            if finder.has_excluded(others):
                break
            finder.add({name: row[name] for name in others})
        refuse_split_columns(make_printable(path), finder.find(), ())
        return set()


def find_split_column(names: Sequence[str]) -> str | None:
    """Return the column that tells which split a row is of; None if there is none."""
    return next((name for name in names if name.lower() == "split"), None)


def _find_columns(names: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the columns of images and of labels; None for one that is not there."""
    image, label = (
        next((name for name in names if name.lower() in known), None) for known in (IMAGE_COLUMNS, LABEL_COLUMNS)
    )
    return image, label


def _read_csv_rows(path: Path, split: str | None) -> Iterator[tuple[str, str]]:
    """Yield the image path and the label of each row."""
    with _open_csv_reader(path) as reader:
        names = list(reader.fieldnames or ())
        column = find_split_column(names)
        image, label = _find_columns(names)
        if image is None or label is None:
            raise DataError(
                f"{path} has the columns {', '.join(names) or 'none'}: it needs one of {', '.join(IMAGE_COLUMNS)} "
                f"and one of {', '.join(LABEL_COLUMNS)}; say which to learn if it has another name, as --labels NAME"
            )
        for row in reader:
            if not row[image] or not row[label]:
                raise DataError(f"{path}, line {reader.line_num}: there is no {label if row[image] else image}")
            if split is None or (column is not None and row[column] == split):
                yield row[image], row[label]


@contextlib.contextmanager
def _open_csv_reader(path: Path) -> Iterator[csv.DictReader[str]]:
    try:
        with open_regular_file(path) as file:
            yield csv.DictReader(read_csv_lines(file, make_printable(path)))
    except UnicodeDecodeError:
        raise DataError(explain_encoding(path, make_printable(path))) from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def sort_classes(names: set[str]) -> list[str]:
    """Return the names of classes in order: as numbers if all are numbers."""
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)


@lru_cache
def warn_once(text: str) -> None:
    """Warn, but not again when the same data is opened once more."""
    log.warning("%s", text)


def write_table(folder: Path, rows: Iterator[tuple[bytes, int]]) -> None:
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
