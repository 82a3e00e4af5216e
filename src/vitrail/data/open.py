"""Open a data set. Every command and function of vitrail takes the same names:

photos/                  one folder per class, or train/, val/ and test/ with one folder per class in each; or images
                         whose names tell the classes, if `labels_from` says where, as in Abyssinian_1.jpg
tiny-imagenet-200/       Tiny-ImageNet as released: its val/ has a table of file names and classes
photos/labels.csv        a CSV next to its images, or a folder that contains one CSV
photos/labels.jsonl      a record in JSON on each line, or a list of records in a .json
photos/*.parquet         a Parquet file, or a folder of Parquet files named after their splits
shards/                  tar files in the WebDataset layout, named after their splits
digits                   the built-in data set (write ./digits for a folder of that name)
hf:owner/name            a data set on the Hugging Face hub (needs the extra `datasets`)
s3://bucket/folder       any of the folders and files above in a bucket, which is copied once (needs the extra `s3`)

From Python, functions also take images that a program has at hand, and a Source, which is open already:

[(image, label), …]                     an image is a path, the bytes of a file, a Pillow image, an array or a tensor of
                                        uint8; a label is the name of a class, or its number
{"train": [(image, label), …], …}       such a list for each split

Tables may hold other targets than labels: tags, numbers, levels or several attributes. `add_task` says which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.data.locate import (
    find_local_path,
    group_files_by_split,
    list_shard_files,
    match_all_splits,
    match_splits,
    name_by_address,
    read_class_names,
    resolve_path,
)
from vitrail.data.sources.class_folders import open_class_folders
from vitrail.data.sources.flat_folder import FlatFolder, find_labels, open_flat_folder, parse_labels_from
from vitrail.data.sources.folder import (
    ANNOTATED_FOLDER,
    find_annotation_table,
    open_annotated_folder,
    open_csv,
    read_csv_splits,
    warn_once,
)
from vitrail.data.sources.image_files import list_folders, list_images
from vitrail.data.sources.layout import explain_level
from vitrail.data.sources.list_source import ListSource, Pairs, list_class_names
from vitrail.data.sources.source import SPLITS, Source, hold_out
from vitrail.data.tables.open_table import find_stored_task
from vitrail.data.tables.text_tables import JSON_TABLES
from vitrail.data.task_data import TaskData, make_task_data, open_annotated, open_part
from vitrail.errors import ConfigError, DataError, LayoutError, MissingExtraError, did_you_mean
from vitrail.system.files import describe_reason
from vitrail.system.results import format_count
from vitrail.tasks.task import Task

DEFAULT_HOLDOUT = 0.1
WHOLE = "all"
"""The split name of a data set that has no splits."""
LABELS_TO_INSPECT = 1000
"""How many labels are read to decide whether a split has labels."""

Data = str | Path | FlatFolder | TaskData | Source | Pairs | Mapping[str, Pairs]
"""A name as listed at the top of this module, a folder with what `labels_from` says of it, data with its task, an open
Source, a list of (image, label) pairs, or a dictionary with such a list for each split."""
SplitOpeners = dict[str, Callable[[], Source]]
"""For each split that exists, a function that opens it."""


def open_data(
    data: Data,
    split: str | None = None,
    holdout: float | None = None,
    seed: int = 0,
    labels_from: str | None = None,
    task: Task | str | None = None,
    labels: str | Sequence[str] | None = None,
) -> Source:
    """Open a data set, or one split of it.

    Args:
        data: a name as listed at the top of this module, a Source, a list of (image, label) pairs, or a dictionary with
            a list for each split.
        split: "train", "val" or "test" (or a synonym such as "validation"); None opens the whole data set.
        holdout: the share of each class, between 0 and 1, that becomes "val" when the data has no such split. The
            default is a tenth for data without any splits, and nothing for data with splits.
        seed: decides which images are held out.
        labels_from: where in the names of a folder's images the class stands: "NAME_*" for cat_1.jpg, or a regular
            expression with one group (or one called `label`), such as r"^(.+)_\\d+".
        task: what is learned of a table: "labels", "tags", "numbers", "levels" or "attributes", or the task of a model.
            If neither it nor `labels` is given, the data has one label an image.
        labels: the columns of the table to learn, such as "colour,shape"; None to find them.

    Returns:
        The samples by number. Nothing is decoded yet.

    Raises:
        ConfigError: the name of the split, the share, `labels_from`, the task or the columns are not allowed.
        DataError: the data set or the split does not exist or cannot be read.
        MissingExtraError: the format needs a package that is not installed.
    """
    split = next((ours for ours, names in SPLITS.items() if split in names), split)
    if split is not None and split not in SPLITS:
        raise ConfigError(f"split = {split!r}{did_you_mean(split, SPLITS) or ';'} there are {', '.join(SPLITS)}")
    data = add_task(add_labels_from(data, labels_from), task, labels)
    with _raise_data_errors(data):
        openers = _find_splits(data)
        return _open_whole(data, openers) if split is None else _open_split(data, openers, split, holdout, seed)


def add_labels_from(data: Data, labels_from: str | None) -> Data:
    """Return the data with where in the names of its images the classes stand; as it is if that is None.

    Raises:
        ConfigError: `labels_from` cannot be understood, or the data is no folder.
    """
    if labels_from is None or (isinstance(data, FlatFolder) and data.labels_from == labels_from):
        return data
    parse_labels_from(labels_from)
    if isinstance(data, str | Path) and not str(data).startswith("hf:") and str(data) != "digits":
        with _raise_data_errors(data):
            if not find_local_path(data).is_file():
                return FlatFolder(str(data), labels_from)
    raise ConfigError(
        f"labels_from = {labels_from!r} is for a folder of images, and {name_data(data)} is none: leave it out"
    )


def add_task(data: Data, task: Task | str | None = None, labels: str | Sequence[str] | None = None) -> Data:
    """Return the data with what is learned from it; as it is if nothing is said.

    Args:
        data: anything that `open_data` accepts.
        task: "labels", "tags", "numbers", "levels" or "attributes", or the task of a model; None to recognise it.
        labels: the columns to learn, such as "colour,shape" or ("colour", "shape"); None to find them.

    Raises:
        ConfigError: there is no such task, `labels` names no column, or the data has another task already.
    """
    if task is None and labels is None:
        return data
    if isinstance(data, Source):
        if isinstance(task, Task) or task in (None, data.task.kind):
            return data
        raise ConfigError(f"task = {task!r}, and this source is open already, with the task {data.task.kind!r}")
    return make_task_data(data, task, labels)


def _open_split(data: Data, openers: SplitOpeners, split: str, holdout: float | None, seed: int) -> Source:
    if split in openers and not (split == "train" and holdout and "val" not in openers):
        return openers[split]()
    if split == "test" or (openers and "train" not in openers) or ("val" in openers and split == "train"):
        available = ", ".join(openers) or "one part: leave the split out, or take val, a tenth that is held out"
        raise DataError(f"{name_data(data)} has no split {split!r}: it has {available}")
    if openers and not holdout:
        raise DataError(
            f"{name_data(data)} has no split {split!r}: it has {', '.join(openers)}; holdout={DEFAULT_HOLDOUT} would "
            "set a part of train aside"
        )
    whole = openers["train"]() if openers else _open_whole(data, openers)
    rest, held = hold_out(whole, holdout or DEFAULT_HOLDOUT, seed)
    return held if split == "val" else rest


def open_splits(data: Data, split: str | None = None) -> dict[str, Source]:
    """Open one split, or every split if None. Data without splits is returned under the name `WHOLE`."""
    names = [split] if split else list_splits(data) or [None]
    return {name or WHOLE: open_data(data, name) for name in names}


def list_splits(data: Data) -> tuple[str, ...]:
    """Return the names of the splits that a data set has, such as ("train", "val"); empty if it has none."""
    with _raise_data_errors(data):
        return tuple(_find_splits(data))


def open_training_images(data: Data) -> Source:
    """Open the split "train", or everything if the data has no splits."""
    return open_data(data, "train") if list_splits(data) else open_data(data)


def choose_test_split(data: Data) -> str | None:
    """Return the split to test on: "test" if it has labels, otherwise "val", otherwise None.

    ImageNet's test split, for example, is published without labels.
    """
    splits = list_splits(data)
    if "test" in splits and ("val" not in splits or _has_test_labels(data)):
        return "test"
    return "val" if "val" in splits else None


def has_labelled_test(data: Data) -> bool:
    """Return whether the data has a split "test" that can be opened and has labels."""
    return "test" in list_splits(data) and _has_test_labels(data)


def _has_test_labels(data: Data) -> bool:
    try:
        test = open_data(data, "test")
        if test.task.kind != "labels":  # rows without a target are broken rows
            return True
        return bool((test.labels(0, min(len(test), LABELS_TO_INSPECT)) >= 0).any())
    except DataError:
        return False


def propose_data(data: Data) -> LayoutError | None:
    """Return an error that proposes a deeper folder, for data with too few classes; None if nothing looks right."""
    if not isinstance(data, str | Path) or not resolve_path(str(data)).is_dir() or list_splits(data):
        return None
    error = explain_level(find_local_path(data))
    return None if error is None else name_by_address(error)


def name_data(data: Data) -> str:
    """Return a short name of a data set for messages: its own name, or such as "a list of 120 images"."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, TaskData):
        return name_data(data.data)
    if isinstance(data, FlatFolder):
        return data.path
    if isinstance(data, Mapping):
        return f"a dictionary of {format_count(len(data), 'list')}"
    if isinstance(data, list | ListSource):
        return f"a list of {format_count(len(data), 'image')}"
    return f"a source of {format_count(len(data), 'image')}" if isinstance(data, Source) else f"a {type(data).__name__}"


@contextlib.contextmanager
def _raise_data_errors(data: Data) -> Iterator[None]:
    """Turn an error of the operating system into a DataError."""
    try:
        yield
    except DataError as error:
        raise name_by_address(error) from None
    except OSError as error:
        raise DataError(f"{name_data(data)} cannot be opened: {describe_reason(error)}") from None


def _find_splits(data: Data) -> SplitOpeners:
    data = _add_missing_task(data)
    if isinstance(data, TaskData):
        found = open_annotated(data)
        return _find_splits(data.data) if found is None else {name: partial(open_part, data, name) for name in found[1]}
    if isinstance(data, Mapping):
        return _find_listed_splits(data)
    if isinstance(data, FlatFolder):
        return _find_flat_splits(data)
    if not isinstance(data, str | Path):
        return {}
    text = str(data)
    if text.startswith("hf:"):
        return _find_hub_splits(text)
    path = resolve_path(text)
    if path.suffix.lower() == ".csv" and path.is_file():
        return {ours: partial(open_csv, path, theirs) for ours, theirs in match_all_splits(path, read_csv_splits(path))}
    if not path.is_dir():
        return {}
    if files := list_shard_files(path):
        return _group_by_split(path, files)
    return _find_split_folders(path)


def _find_listed_splits(data: Mapping[str, Pairs]) -> SplitOpeners:
    names = {str(name) for name in data}
    splits = match_all_splits(name_data(data), names)
    if not splits:
        raise DataError(f"the names of the lists are {', '.join(sorted(names)) or 'missing'}: give train, val or test")
    for name, samples in data.items():
        _check_is_list(samples, f"{name} is")
    classes = list_class_names(data.values())  # one list, so that labels agree
    return {ours: partial(ListSource, data[theirs], classes) for ours, theirs in splits}


def _find_flat_splits(data: FlatFolder) -> SplitOpeners:
    """Return the splits that are folders of images. One whose names tell no classes, such as test/, is left out."""
    root, pattern = _require_folder(find_local_path(data.path), data.path), parse_labels_from(data.labels_from)
    names = set(list_folders(root))
    if list_images(root) or not match_splits(names):
        return {}
    folders = {ours: root / theirs for ours, theirs in match_all_splits(root, names)}
    labelled = {ours: folder for ours, folder in folders.items() if find_labels(list_images(folder), pattern)}
    parts = list(labelled.values())
    for folder in set(folders.values()) - set(parts):
        warn_once(f"{folder} is left out: labels_from = {data.labels_from!r} finds no class in the names of its images")
    return {ours: partial(open_flat_folder, folder, data.labels_from, parts) for ours, folder in labelled.items()}


def _find_split_folders(path: Path) -> SplitOpeners:
    folders = {child.name: child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")}
    if not any(list_folders(folders[theirs]) for _, theirs in match_splits(set(folders))):
        return {}  # the folders may be classes that have the same names as splits
    splits = match_all_splits(path, set(folders))
    tables = {theirs: table for _, theirs in splits if (table := find_annotation_table(folders[theirs])) is not None}
    if tables:  # Tiny-ImageNet: val/ has a table instead of class folders; test/ has neither and is left out
        splits = [(ours, theirs) for ours, theirs in splits if theirs in tables or not _is_unlabelled(folders[theirs])]
    class_lists = (list_folders(folders[theirs]) for _, theirs in splits if theirs not in tables)
    classes = sorted({name for names in class_lists for name in names})  # one list, so that labels agree
    return {
        ours: partial(open_annotated_folder, tables[theirs], classes)
        if theirs in tables
        else partial(open_class_folders, folders[theirs], classes)
        for ours, theirs in splits
    }


def _is_unlabelled(folder: Path) -> bool:
    return list_folders(folder) == [ANNOTATED_FOLDER]


def _group_by_split(path: Path, files: Sequence[Path]) -> SplitOpeners:
    groups = group_files_by_split(path, files)
    return {split: partial(_open_shards, path, parts) for split, parts in groups.items() if split}


def _open_whole(data: Any, openers: SplitOpeners) -> Source:
    data = _add_missing_task(data)
    if isinstance(data, Source):
        return data
    if openers:
        raise DataError(f"{name_data(data)} has several splits: name one of {', '.join(openers)}")
    if isinstance(data, TaskData):
        return _open_whole(data.data, openers) if open_annotated(data) is None else open_part(data)
    if isinstance(data, FlatFolder):
        return open_flat_folder(_require_folder(find_local_path(data.path), data.path), data.labels_from)
    if not isinstance(data, str | Path):
        _check_is_list(data, "this is")
        return ListSource(data)
    if str(data) == "digits":
        from vitrail.data.sources.builtin import DigitsSource

        return DigitsSource()
    path = resolve_path(str(data))
    if path.is_file():
        return _open_file(path)
    _require_folder(path, str(data))
    if files := list_shard_files(path):
        return _open_shards(path, files)
    return open_class_folders(path)


def _add_missing_task(data: Data) -> Data:
    """Return data that only opens with its task as such data: records in JSON, and shards that were packed with one."""
    if not isinstance(data, str | Path):
        return data
    is_json = Path(data).suffix.lower() in JSON_TABLES and find_local_path(data).is_file()
    return TaskData(data) if is_json or find_stored_task(data) else data


def _require_folder(path: Path, name: str) -> Path:
    """Return the path of a folder; raise a DataError if it is none."""
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder: data is not read from pipes and devices")
    if not path.is_dir():
        kinds = "a folder, a .csv, .jsonl, .parquet or .tar file, s3://bucket/folder, hf:owner/name, or digits"
        raise DataError(f"there is no data set {name!r}: give {kinds}")
    return path


def _check_is_list(data: Any, subject: str) -> None:
    if not isinstance(data, list):
        raise DataError(
            f"{subject} a {type(data).__name__}: give a list of (image, label) pairs, or the name of a data set"
        )


def _open_file(path: Path) -> Source:
    if path.suffix.lower() == ".csv":
        return open_csv(path)
    if path.suffix.lower() in (".parquet", ".tar"):
        return _open_shards(path.parent, [path])
    raise DataError(f"{path} is no data set: give a folder, or a .csv, .parquet or .tar file")


def _open_shards(folder: Path, files: Sequence[Path]) -> Source:
    if files[0].suffix == ".parquet":
        from vitrail.data.sources.parquet import ParquetSource

        return ParquetSource(files, read_class_names(folder))
    from vitrail.data.sources.shards import TarSource

    return TarSource(files, read_class_names(folder))


def _find_hub_splits(name: str) -> SplitOpeners:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise MissingExtraError(f"loading {name}", "datasets") from None
    from vitrail.data.sources.hub import HubSource, list_hub_splits

    return {ours: partial(HubSource.load, name, theirs) for ours, theirs in match_splits(list_hub_splits(name))}
