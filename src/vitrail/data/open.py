"""From what a person names to a source: DATA is one grammar everywhere.

photos/                  a folder for each class, or train/, val/, test/ with such folders in them
tiny-imagenet-200/       as it was released: its val/ has a table of names and classes
photos/labels.csv        a CSV beside images; or a folder with one CSV in it
photos/*.parquet         a Parquet file, or a folder of them named after their splits
shards/                  tar files in the WebDataset layout, named after their splits
digits                   the data set that is always there (./digits is a folder of that name)
hf:owner/name            a data set of the hub, with the extra `datasets`
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.data.sources.folder import (
    ANNOTATED_FOLDER,
    open_annotated_folder,
    find_annotation_table,
    open_class_folders,
    list_class_folders,
    read_csv_splits,
    open_csv,
)
from vitrail.data.sources.source import SPLITS, ListSource, Source, hold_out
from vitrail.errors import ConfigError, DataError, MissingExtraError, did_you_mean

DEFAULT_HOLDOUT = 0.1
CLASS_NAMES = ("classes.txt", "labels.txt")
LOOKED_AT = 1000
"""Labels that tell whether a part has any."""


Data = str | Path | Source | Sequence[tuple[Any, int]]
Parts = dict[str, Callable[[], Source]]
"""How to open each split that is there."""


def open_data(
    data: Data,
    split: str | None = None,
    holdout: float | None = None,
    seed: int = 0,
) -> Source:
    """A data set, or a part of it.

    Args:
        data: see the top of this module; or a list of (image, label).
        split: "train", "val" or "test" (or another word for these, such as "validation"); everything if None.
        holdout: the share of every class that is set aside as "val" where the data has no such part. A tenth of data
            that has no parts at all; nothing otherwise.
        seed: chooses what is set aside.
    """
    split = next((ours for ours, names in SPLITS.items() if split in names), split)
    if split is not None and split not in SPLITS:
        raise ConfigError(f"split = {split!r}{did_you_mean(split, SPLITS) or ';'} there are {', '.join(SPLITS)}")
    with _told(data):
        return _opened(data, _parts(data), split, holdout, seed)


def _opened(data: Data, parts: Parts, split: str | None, holdout: float | None, seed: int) -> Source:
    if split is None:
        return _whole(data, parts)
    if split in parts and not (split == "train" and holdout and "val" not in parts):
        return parts[split]()
    if split == "test" or (parts and "train" not in parts) or ("val" in parts and split == "train"):
        has = ", ".join(parts) or "one part: leave the split out, or take val, a tenth that is held out"
        raise DataError(f"{data} has no split {split!r}: it has {has}")
    if parts and not holdout:
        raise DataError(
            f"{data} has no split {split!r}: it has {', '.join(parts)}; holdout={DEFAULT_HOLDOUT} would set a part of "
            "train aside"
        )
    whole = parts["train"]() if parts else _whole(data, parts)
    rest, out = hold_out(whole, holdout or DEFAULT_HOLDOUT, seed)
    return out if split == "val" else rest


def list_splits(data: Data) -> tuple[str, ...]:
    """The parts that a data set comes in; none where it is one."""
    with _told(data):
        return tuple(_parts(data))


def choose_test_split(data: Data) -> str | None:
    """What to test on, of the parts that a data set has: "test", or "val" where there is none with labels to be read;
    None where there is neither. ImageNet's own test has labels nowhere, and often lies about as it is."""
    splits = list_splits(data)
    if "test" in splits and ("val" not in splits or _labelled(data)):
        return "test"
    return "val" if "val" in splits else None


def _labelled(data: Data) -> bool:
    try:
        test = open_data(data, "test")
        return bool((test.labels(0, min(len(test), LOOKED_AT)) >= 0).any())
    except DataError:
        return False


@contextlib.contextmanager
def _told(data: Data) -> Iterator[None]:
    """What the system does not allow is a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{data} cannot be opened: {error.strerror or error}") from None


def _parts(data: Data) -> Parts:
    if isinstance(data, Source) or not isinstance(data, str | Path):
        return {}
    text = str(data)
    if text.startswith("hf:"):
        return _hub_parts(text)
    path = _place(text)
    if path.suffix.lower() == ".csv" and path.is_file():
        return {ours: partial(open_csv, path, theirs) for ours, theirs in _all_named(path, read_csv_splits(path))}
    if not path.is_dir():
        return {}
    if files := _shard_files(path):
        return _parts_of_files(path, files)
    folders = {child.name: child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")}
    named = _named(set(folders))
    if not any(list_class_folders(folders[theirs]) for _, theirs in named):
        return {}  # classes that happen to be called like splits, perhaps
    splits = _all_named(path, set(folders))
    tables = {theirs: table for _, theirs in splits if (table := find_annotation_table(folders[theirs])) is not None}
    if tables:  # Tiny-ImageNet as it was released: val/ has a table in place of classes, test/ has none
        splits = [(ours, theirs) for ours, theirs in splits if theirs in tables or not _unlabelled(folders[theirs])]
    named_here = (list_class_folders(folders[theirs]) for _, theirs in splits if theirs not in tables)
    classes = sorted({name for names in named_here for name in names})  # so that they agree
    return {
        ours: partial(open_annotated_folder, tables[theirs], classes)
        if theirs in tables
        else partial(open_class_folders, folders[theirs], classes)
        for ours, theirs in splits
    }


def _unlabelled(folder: Path) -> bool:
    return list_class_folders(folder) == [ANNOTATED_FOLDER]


def _parts_of_files(path: Path, files: Sequence[Path]) -> Parts:
    found: dict[str | None, list[Path]] = {}
    for file in files:
        found.setdefault(_split_of(path, file), []).append(file)
    if None in found and len(found) > 1:
        told = ", ".join(str(split) for split in found if split)
        raise DataError(f"{path} has {told}, and beside them {found[None][0].name}, which is of no split: move it")
    return {split: partial(_from_files, path, found[split]) for split in SPLITS if split in found}


def _place(text: str) -> Path:
    """The path that is meant: in a folder with one CSV, that CSV."""
    path = Path(text).expanduser()
    tables = sorted(path.glob("*.csv")) if path.is_dir() else []
    return tables[0] if len(tables) == 1 else path


def _named(found: set[str]) -> list[tuple[str, str]]:
    """Our names of splits, with the names they have here."""
    named = [(ours, theirs) for ours, names in SPLITS.items() for theirs in sorted(found) if theirs.lower() in names]
    for (ours, first), (again, second) in itertools.pairwise(named):
        if ours == again:
            raise DataError(f"{first!r} and {second!r} both mean {ours!r}: rename one, or join them")
    return named


def _all_named(path: Path, found: set[str]) -> list[tuple[str, str]]:
    """As `_named`; nothing that has another name is left out in silence."""
    named = _named(found)
    others = found - {theirs for _, theirs in named}
    if named and others:
        told = ", ".join(repr(other) for other in sorted(others))
        raise DataError(f"{path} has {', '.join(theirs for _, theirs in named)}, and beside them {told}: of no split")
    return named


def _whole(data: Any, parts: Parts) -> Source:
    if isinstance(data, Source):
        return data
    if not isinstance(data, str | Path):
        return ListSource(data)
    if parts:
        raise DataError(f"{data} comes in parts: name one of {', '.join(parts)}")
    if str(data) == "digits":
        from vitrail.data.sources.builtin import DigitsSource

        return DigitsSource()
    path = _place(str(data))
    if path.is_file():
        return _from_file(path)
    if not path.is_dir():
        kinds = "a folder, a .csv, .parquet or .tar file, hf:owner/name, or digits"
        raise DataError(f"there is no data set {str(data)!r}: give {kinds}")
    if files := _shard_files(path):
        return _from_files(path, files)
    return open_class_folders(path)


def _from_file(path: Path) -> Source:
    if path.suffix.lower() == ".csv":
        return open_csv(path)
    if path.suffix.lower() in (".parquet", ".tar"):
        return _from_files(path.parent, [path])
    raise DataError(f"{path} is no data set: give a folder, or a .csv, .parquet or .tar file")


def _shard_files(folder: Path) -> list[Path]:
    """The tar or Parquet files of a folder, directly, or in folders named after splits or `data`."""
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir() and _holds_shards(child.name)]
    places = [folder, *inner]
    for suffix in (".parquet", ".tar"):
        if found := [path for place in places for path in sorted(place.glob(f"*{suffix}"))]:
            return found
    return []


def _holds_shards(name: str) -> bool:
    return name == "data" or any(name.lower() in names for names in SPLITS.values())


def _split_of(root: Path, path: Path) -> str | None:
    """By the folder that a file is in, else by a word of its name."""
    folder = path.parent.name.lower() if path.parent != root else ""
    words = {folder} if _holds_shards(folder) and folder != "data" else set(re.split(r"[\W_]+", path.name.lower()))
    found = [ours for ours, names in SPLITS.items() if words & set(names)]
    if len(found) > 1:
        raise DataError(f"{path.name} could be of {' or '.join(found)}: rename it")
    return found[0] if found else None


def _from_files(folder: Path, files: Sequence[Path]) -> Source:
    if files[0].suffix == ".parquet":
        from vitrail.data.sources.parquet import ParquetSource

        return ParquetSource(files, _class_names(folder))
    from vitrail.data.sources.shards import TarSource

    return TarSource(files, _class_names(folder))


def _class_names(folder: Path) -> tuple[str, ...]:
    for name in CLASS_NAMES:
        if (folder / name).is_file():
            return tuple((folder / name).read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    return ()


def _hub_parts(source: str) -> Parts:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise MissingExtraError(f"loading {source}", "datasets") from None
    from vitrail.data.sources.hub import HubSource, list_hub_splits

    return {ours: partial(HubSource.load, source, theirs) for ours, theirs in _named(list_hub_splits(source))}
