"""Read the columns beside the images of Parquet files, tar shards and data sets of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.sources.parquet import (
    LABEL_COLUMNS,
    ParquetSource,
    call_pyarrow,
    find_image_column,
    find_names,
    name_classes,
    read_features,
)
from vitrail.data.sources.shards import MANIFEST, TarSource, scan_tar_records
from vitrail.data.sources.source import make_printable, read_small_text
from vitrail.data.sources.table_cache import load_or_build_table
from vitrail.data.tables.row_table import MOST_CELLS, RowTable
from vitrail.data.tables.text_tables import replace_surrogates
from vitrail.errors import DataError
from vitrail.tasks.registry import read_task
from vitrail.tasks.task import Cell, Task

MOST_MANIFEST_BYTES = 500_000_000
ROWS = "rows.jsonl"
SplitFiles = Mapping[str | None, Sequence[Path]]
"""The files of each split; those of None if names do not tell splits."""


def read_stored_task(folder: Path) -> Task | None:
    """Return the task that `vitrail data pack` wrote beside shards; None for labels, or other files."""
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        record = json.loads(read_small_text(file, MOST_MANIFEST_BYTES))["task"]
    except (ValueError, KeyError, TypeError, RecursionError, DataError):  # written by another program
        return None
    return read_task(record) if isinstance(record, dict) else None


def read_parquet_table(title: str, groups: SplitFiles, keep: Sequence[str], labels_only: bool) -> RowTable | None:
    """Return the columns of Parquet files besides their images.

    Args:
        title: the name of the data in messages.
        groups: the files of each split.
        keep: the columns to keep; all that may be targets if empty.
        labels_only: whether the answer is None for files with a column of the numbers of classes, so that the columns
            of large data with one label an image are not read.
    """
    files = [path for paths in groups.values() for path in paths]
    schema = call_pyarrow(files[0], "read_schema")
    image = find_image_column(schema, files[0])
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    if label is not None and labels_only and str(schema.field(label).type).startswith(("int", "uint")):
        return None
    features = read_features(schema)
    names = [
        name
        for name in schema.names
        if name != image and (name in keep if keep else _may_be_target(str(schema.field(name).type)))
    ]
    columns: dict[str, list[Cell]] = {name: [] for name in names}
    splits, problems, count = list[str | None](), dict[int, str](), 0
    for split, paths in groups.items():
        for path in paths:
            for size, table in _read_row_groups(path, names):
                if (count + size) * max(len(names), 1) > MOST_CELLS:
                    raise DataError(f"{title} has more than {MOST_CELLS:,} cells: name the columns to learn by labels")
                for name in names:
                    cells = [None] * size if isinstance(table, str) else table.column(name).to_pylist()
                    columns[name] += name_classes(cells, find_names(features.get(name)))
                if isinstance(table, str):
                    problems |= dict.fromkeys(range(count, count + size), table)
                splits += [split] * size
                count += size
    return RowTable(
        title,
        columns,
        count,
        lambda: ParquetSource(files, needs_labels=False),
        splits=splits if set(groups) != {None} else None,
        problems=problems,
        plain_labels=(label,) if label and str(schema.field(label).type).startswith(("int", "uint")) else (),
    )


def _may_be_target(kind: str) -> bool:
    """Return whether a column of this type is text, a number or a list of them."""
    inner = kind.removeprefix("list<item: ").removeprefix("list<element: ").removeprefix("large_list<item: ")
    return inner.startswith(("string", "large_string", "int", "uint", "bool", "float", "double", "halffloat", "dict"))


def _read_row_groups(path: Path, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the number of rows of each row group, and the columns, or in their place why they cannot be read."""
    file = call_pyarrow(path, "ParquetFile")
    missing = [name for name in names if name not in file.schema_arrow.names]
    with file:
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if missing:
                yield size, f"{make_printable(path)} lacks the column {missing[0]}"
                continue
            try:
                yield size, file.read_row_group(group, columns=list(names))
            except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors
                yield size, f"cannot be read: {str(error).splitlines()[0]}"


def read_tar_table(title: str, groups: SplitFiles, keep: Sequence[str]) -> RowTable:
    """Return the records in JSON beside the images of tar shards. An image without one has nothing in any column."""
    files = [path for paths in groups.values() for path in paths]
    stamp = "\n".join(f"{path.resolve()} {(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in files)
    columns: dict[str, list[Cell]] = {}
    splits, problems, count = list[str | None](), dict[int, str](), 0
    for split, paths in groups.items():
        table = load_or_build_table(f"rows of {split} {title}", stamp, _make_writer(paths))
        with (table.folder / ROWS).open(encoding="utf-8") as lines:
            for line in lines:
                record = _read_record(line)
                if isinstance(record, str):
                    problems[count], record = record, {}
                for name in record:
                    if name not in columns and (not keep or name in keep):
                        columns[name] = [None] * count
                for name, cells in columns.items():
                    cells.append(record.get(name))
                splits.append(split)
                count += 1
                if count * max(len(columns), 1) > MOST_CELLS:
                    raise DataError(f"{title} has more than {MOST_CELLS:,} cells: name the columns to learn by labels")
    return RowTable(
        title,
        columns,
        count,
        lambda: TarSource(files, (), needs_labels=False),
        splits=splits if set(groups) != {None} else None,
        problems=problems,
    )


def _make_writer(paths: Sequence[Path]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with (folder / ROWS).open("w", encoding="utf-8") as file:
            for path in paths:
                for text in scan_tar_records(path):
                    file.write(json.dumps(text) + "\n")

    return write


def _read_record(line: str) -> dict[str, Cell] | str:
    """Return the record of an image, or why there is none."""
    text = json.loads(line)
    if not text:
        return "there is no .json beside it"
    try:
        record = replace_surrogates(json.loads(text))
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else str(error)
        return f"the .json beside it is no record ({reason[:100]})"
    return record if isinstance(record, dict) else "the .json beside it is no record: write {…}"


def has_records(path: Path) -> bool:
    """Return whether the first image of a tar has a record in JSON beside it that is more than a label."""
    text = next(scan_tar_records(path), "")
    record = _read_record(json.dumps(text)) if text else ""
    return isinstance(record, dict) and not {"label", "cls", "class"} & set(record)


def read_hub_table(source: str, splits: Mapping[str | None, str], keep: Sequence[str]) -> RowTable:
    """Return the columns of a data set of the hub; `splits` are its names of ours."""
    from vitrail.data.sources.hub import HubSource
    from vitrail.data.sources.joined import JoinedSource

    parts = {ours: HubSource.load(source, theirs, needs_labels=False) for ours, theirs in splits.items()}
    columns: dict[str, list[Cell]] = {}
    rows: list[str | None] = []
    for ours, part in parts.items():
        for name, cells in part.read_columns(keep).items():
            columns.setdefault(name, [None] * len(rows)).extend(cells)
        rows += [ours] * len(part)
        for cells in columns.values():
            cells += [None] * (len(rows) - len(cells))
    images = JoinedSource(list(parts.values()))
    return RowTable(source, columns, len(rows), lambda: images, splits=rows)
