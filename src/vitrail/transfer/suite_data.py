"""Find and open the data sets of a suite.

DIR/                     an entry for each data set, by its name: a folder or a .csv file; real.json
FILE.toml                cifar10 = "DATA", real = "real.json", [tasks.dsprites_location] data = "DATA", raw = true
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.locate import find_local_path
from vitrail.data.open import choose_test_split, list_splits, open_data
from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source, make_printable, require_labels
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.system.remote import is_address
from vitrail.training.resolve import read_toml

SUFFIXES = (".csv",)
"""Kinds of single files that can hold several splits."""
REAL, TABLE = "real", "tasks"
"""Keys of the TOML file: the file of ReaL labels, and the table of data sets."""


@dataclass(frozen=True)
class DataLocation:
    """Where a data set is."""

    data: str
    """DATA, in the form that every command takes."""
    raw: bool = False
    """Whether the labels are annotations of the original data set."""


@dataclass(frozen=True)
class SuiteData:
    """The data sets of a suite that were found."""

    sets: dict[str, DataLocation]
    real: Path | None
    """The file of ReaL labels."""
    remarks: tuple[str, ...]
    """Sentences about entries that are no data set of any suite."""


def find_suite_data(data: str, wanted: Collection[str], known: Collection[str]) -> SuiteData:
    """Find the `wanted` data sets in a folder or a TOML file, which may hold all that are `known`."""
    path = find_local_path(data)
    if path.is_dir():
        places = _search_folder(path, known)
    elif path.suffix.lower() == ".toml":
        places = _read_locations(path, known)
    else:
        raise ConfigError(f"there is no folder {data!r}: give one with an entry for each set, or a TOML file")
    found = {name: places.sets[name] for name in wanted if name in places.sets}
    if not found:
        near = "".join(f"; {remark}" for remark in places.remarks)
        raise DataError(f"{data} has none of the sets {', '.join(wanted)}{near}")
    return SuiteData(found, places.real, places.remarks)


def _search_folder(folder: Path, known: Collection[str]) -> SuiteData:
    found: dict[str, DataLocation] = {}
    real, remarks = None, []
    for entry in sorted(folder.iterdir()):
        name = entry.stem if entry.suffix.lower() in SUFFIXES and entry.is_file() else entry.name
        if entry.name.startswith("."):
            continue
        if entry.name == f"{REAL}.json":
            real = entry
        elif name not in known:
            remarks.append(f"{make_printable(entry)} is no set{did_you_mean(name, known)}")
        elif name in found:
            raise DataError(f"{make_printable(entry)} and {found[name].data} are both {name}: take one away")
        else:
            found[name] = DataLocation(str(entry))
    return SuiteData(found, real, tuple(remarks))


def _read_locations(path: Path, known: Collection[str]) -> SuiteData:
    tree = read_toml(path)
    real = tree.pop(REAL, None)
    tables = tree.pop(TABLE, {})
    if not isinstance(tables, dict) or not (real is None or isinstance(real, str)):
        raise ConfigError(f'{path}: give {REAL} = "FILE", and {TABLE} as tables such as [{TABLE}.cifar10]')
    found: dict[str, DataLocation] = {}
    for name, value in (*tree.items(), *tables.items()):
        if name not in known:
            hint = did_you_mean(name, (*known, REAL, TABLE)) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown set {name!r}{hint}")
        if name in found:
            raise ConfigError(f"{path}: {name} is there twice")
        found[name] = _read_location(path, name, value)
    return SuiteData(found, None if real is None else Path(_resolve_path(path.parent, real)), ())


def _read_location(path: Path, name: str, value: Any) -> DataLocation:
    table = {"data": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("data"), str):
        raise ConfigError(f'{path}: give {name} = "DATA", or a table with data = "DATA"')
    for key in table:
        if key not in ("data", "raw"):
            raise ConfigError(f"{path}: {name} has no key {key!r}{did_you_mean(key, ('data', 'raw'))}")
    raw = table.get("raw", False)
    if not isinstance(raw, bool):
        raise ConfigError(f"{path}: {name}.raw = {raw!r}: give true or false")
    return DataLocation(_resolve_path(path.parent, table["data"]), raw)


def _resolve_path(folder: Path, data: str) -> str:
    """Make a path relative to the TOML file's folder; leave other kinds of DATA as they are."""
    is_path = data != "digits" and not data.startswith("hf:") and not is_address(data)
    return data if not is_path else str(folder / Path(data).expanduser())


# ---- Parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuiteParts:
    """The opened parts of a data set."""

    train: Source
    val: Source | None
    """The validation part, unless it is used for testing."""
    test: Source
    tested_on: str
    """The split's name in the data: ImageNet is tested on val."""


def open_suite_parts(name: str, data: str) -> SuiteParts:
    """Open the parts of a data set. A DataError that names the set says what is missing or cannot be opened."""
    try:
        splits = list_splits(data)
        tested_on = choose_test_split(data)
        if "train" not in splits or tested_on is None:
            # Opening data without splits raises an error if something else is wrong with it.
            has = ", ".join(splits) or f"one part of {len(open_data(data)):,} images"
            raise DataError(f"{data} has {has}: a suite needs a part to train on and one to test on, train and test")
        train, test = open_data(data, "train"), open_data(data, tested_on)
        val = open_data(data, "val") if "val" in splits and tested_on == "test" else None
        require_labels(train, data, "a suite")
        _check_part(data, train, test, tested_on)
        if val is not None:
            _check_part(data, train, val, "val")
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return SuiteParts(train, val, test, tested_on)


def _check_part(data: str, train: Source, other: Source, part: str) -> None:
    if not len(train) or not len(other):
        raise DataError(f"{data} has no image in {'train' if not len(train) else part}")
    if train.classes != other.classes:
        raise DataError(
            f"{data}: the classes of {part} are not those of train; `vitrail data check` tells how they differ"
        )


class PickedSamples(Source):
    """Selected samples of one or more sources with the same classes."""

    def __init__(self, samples: Sequence[tuple[Source, int]]) -> None:
        self.samples, self.classes = samples, samples[0][0].classes

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        source, number = self.samples[index]
        return source.read(number)

    def name(self, index: int) -> str:
        source, number = self.samples[index]
        return source.name(number)

    def labels(self, start: int, stop: int) -> Indices:
        found = [int(source.labels(number, number + 1)[0]) for source, number in self.samples[start:stop]]
        return np.array(found, dtype=np.int64)


class RelabelledSource(Source):
    """A source whose labels are computed from those of another; its classes are numbers."""

    def __init__(self, whole: Source, classes: int, label: Callable[[int], int] | None = None) -> None:
        """`label` maps an annotation to a label: the original's label, or the class name if classes have names."""
        self.whole, self.classes = whole, tuple(map(str, range(classes)))
        self.block, self.window = whole.block, whole.window
        self._label, self._known = label, dict[int, int]()

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, index: int) -> Sample:
        sample = self.whole.read(index)
        return Sample(sample.content, self._relabel(sample.label))

    def name(self, index: int) -> str:
        return self.whole.name(index)

    def identity(self, index: int) -> str:
        return self.whole.identity(index)

    def labels(self, start: int, stop: int) -> Indices:
        annotations = self.whole.labels(start, stop)
        kinds, places = np.unique(annotations, return_inverse=True)
        made: Indices = np.array([self._relabel(int(kind)) for kind in kinds], dtype=np.int64)[places.reshape(-1)]
        return made

    def _relabel(self, annotation: int) -> int:
        if annotation not in self._known:
            self._known[annotation] = self._convert(annotation)
        return self._known[annotation]

    def _convert(self, annotation: int) -> int:
        if annotation < 0 or self._label is None:
            return annotation  # a negative label means none; reading the sample reports it
        if not self.whole.classes:
            return self._label(annotation)
        name = self.whole.classes[annotation]
        if not name.isdecimal():
            raise DataError(f"raw labels are whole numbers, and a class is called {name!r}: leave raw out")
        return self._label(int(name))


def list_data_notes(parts: SuiteParts, counts: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Return a sentence if the data has no part test, and one for all (what, count, expected) that differ."""
    notes = [] if parts.tested_on == "test" else [f"there is no part test: scored on {parts.tested_on}"]
    unlike = [f"{count:,} {what} instead of {expected:,}" for what, count, expected in counts if count != expected]
    return (*notes, ", ".join(unlike)) if unlike else tuple(notes)
