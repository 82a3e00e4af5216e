"""Where the data of a suite's sets is, and their parts.

DIR/                     an entry for each set by its name: a folder, or a .csv file; real.json
FILE.toml                cifar10 = "DATA", real = "real.json", [tasks.dsprites_location] data = "DATA", raw = true
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.open import choose_test_split, list_splits, open_data
from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source, make_printable
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.training.resolve import read_toml

SUFFIXES = (".csv",)
"""Of files that can have parts in them; Parquet and tar have them in the names of files in a folder."""
REAL, TABLE = "real", "tasks"
"""The key of the file of ReaL labels, and of a table of sets."""


@dataclass(frozen=True)
class DataLocation:
    """Where a set is."""

    data: str
    """DATA, as every command takes it."""
    raw: bool = False
    """Whether its labels are the original's annotations."""


@dataclass(frozen=True)
class SuiteData:
    """Where the sets of a suite are, of those that are anywhere."""

    sets: dict[str, DataLocation]
    real: Path | None
    """The file of ReaL labels."""
    remarks: tuple[str, ...]
    """On entries that are no sets."""


def find_suite_data(data: str, wanted: Collection[str], known: Collection[str]) -> SuiteData:
    """The places of the sets that are `wanted`, of a folder or a TOML file that may hold all that are `known`."""
    path = Path(data).expanduser()
    if path.is_dir():
        places = _in_folder(path, known)
    elif path.suffix.lower() == ".toml":
        places = _in_file(path, known)
    else:
        raise ConfigError(f"there is no folder {data!r}: give one with an entry for each set, or a TOML file")
    found = {name: places.sets[name] for name in wanted if name in places.sets}
    if not found:
        near = "".join(f"; {remark}" for remark in places.remarks)
        raise DataError(f"{data} has none of the sets {', '.join(wanted)}{near}")
    return SuiteData(found, places.real, places.remarks)


def _in_folder(folder: Path, known: Collection[str]) -> SuiteData:
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


def _in_file(path: Path, known: Collection[str]) -> SuiteData:
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
        found[name] = _place(path, name, value)
    return SuiteData(found, None if real is None else Path(_from(path.parent, real)), ())


def _place(path: Path, name: str, value: Any) -> DataLocation:
    table = {"data": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("data"), str):
        raise ConfigError(f'{path}: give {name} = "DATA", or a table with data = "DATA"')
    for key in table:
        if key not in ("data", "raw"):
            raise ConfigError(f"{path}: {name} has no key {key!r}{did_you_mean(key, ('data', 'raw'))}")
    raw = table.get("raw", False)
    if not isinstance(raw, bool):
        raise ConfigError(f"{path}: {name}.raw = {raw!r}: give true or false")
    return DataLocation(_from(path.parent, table["data"]), raw)


def _from(folder: Path, data: str) -> str:
    """A path is meant from the file's folder on; what is no path stays."""
    return data if data == "digits" or data.startswith("hf:") else str(folder / Path(data).expanduser())


# ---- Parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuiteParts:
    """Of a set's data."""

    train: Source
    val: Source | None
    """Where there is one besides the part that is tested on."""
    test: Source
    tested_on: str
    """What the data calls that part: ImageNet's public test is called val."""


def open_suite_parts(name: str, data: str) -> SuiteParts:
    """The parts of a set; a DataError that names the set where one is missing or cannot be opened."""
    try:
        splits = list_splits(data)
        tested_on = choose_test_split(data)
        if "train" not in splits or tested_on is None:
            has = (
                ", ".join(splits) or f"one part of {len(open_data(data)):,} images"
            )  # or opening it tells what is wrong
            raise DataError(f"{data} has {has}: a suite needs a part to train on and one to test on, train and test")
        train, test = open_data(data, "train"), open_data(data, tested_on)
        val = open_data(data, "val") if "val" in splits and tested_on == "test" else None
        _agree(data, train, test, tested_on)
        if val is not None:
            _agree(data, train, val, "val")
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return SuiteParts(train, val, test, tested_on)


def _agree(data: str, train: Source, other: Source, part: str) -> None:
    if not len(train) or not len(other):
        raise DataError(f"{data} has no image in {'train' if not len(train) else part}")
    if train.classes != other.classes:
        raise DataError(
            f"{data}: the classes of {part} are not those of train; `vitrail data check` tells how they differ"
        )


class PickedSamples(Source):
    """Some samples of one source or several, by their numbers there. All have the same classes."""

    def __init__(self, samples: Sequence[tuple[Source, int]]) -> None:
        self.samples, self.classes = samples, samples[0][0].classes

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        """From where it is."""
        source, number = self.samples[index]
        return source.read(number)

    def name(self, index: int) -> str:
        """Its name there."""
        source, number = self.samples[index]
        return source.name(number)

    def labels(self, start: int, stop: int) -> Indices:
        """One by one: there are few."""
        found = [int(source.labels(number, number + 1)[0]) for source, number in self.samples[start:stop]]
        return np.array(found, dtype=np.int64)


class RelabelledSource(Source):
    """Another source with labels made of its own, and classes by number."""

    def __init__(self, whole: Source, classes: int, label: Callable[[int], int] | None = None) -> None:
        """`label`: from an annotation; from what a class is called, where the source's classes have names."""
        self.whole, self.classes = whole, tuple(map(str, range(classes)))
        self.block, self.window = whole.block, whole.window
        self._label, self._known = label, dict[int, int]()

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, index: int) -> Sample:
        """From the whole, with another label."""
        sample = self.whole.read(index)
        return Sample(sample.content, self._made(sample.label))

    def name(self, index: int) -> str:
        """Its name in the whole."""
        return self.whole.name(index)

    def identity(self, index: int) -> str:
        """Its own in the whole."""
        return self.whole.identity(index)

    def labels(self, start: int, stop: int) -> Indices:
        """Made of those of the whole."""
        given = self.whole.labels(start, stop)
        kinds, places = np.unique(given, return_inverse=True)
        made: Indices = np.array([self._made(int(kind)) for kind in kinds], dtype=np.int64)[places.reshape(-1)]
        return made

    def _made(self, given: int) -> int:
        if given not in self._known:
            self._known[given] = self._from_annotation(given)
        return self._known[given]

    def _from_annotation(self, given: int) -> int:
        if given < 0 or self._label is None:
            return given  # below 0 there is none, which whoever reads it is told
        if not self.whole.classes:
            return self._label(given)
        called = self.whole.classes[given]
        if not called.isdecimal():
            raise DataError(f"raw labels are whole numbers, and a class is called {called!r}: leave raw out")
        return self._label(int(called))


def describe_count_differences(parts: Iterable[tuple[str, int, int]]) -> str:
    """What a set has, where that is not what it should have: `(what, found, expected)` of each."""
    unlike = [f"{found:,} {what} instead of {expected:,}" for what, found, expected in parts if found != expected]
    return ", ".join(unlike)
