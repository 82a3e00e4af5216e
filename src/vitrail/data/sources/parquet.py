"""Parquet in the Hugging Face layout: a column of images as {bytes, path}, a column of labels.

Parquet is read one row group at a time, so neighbours should be read together. A few groups are cached.
"""

from __future__ import annotations

import errno
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source, clip_label, make_printable
from vitrail.errors import DataError, MissingExtraError
from vitrail.system.files import describe_reason, open_regular_file

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls", "target")
MOST_OPEN = 16
MOST_LABEL_GROUPS = 1024
"""Row groups whose labels are kept."""
MOST_CACHED = 128_000_000
"""Bytes of row groups that a process caches."""


class ParquetSource(Source):
    """The rows of one or more Parquet files."""

    def __init__(self, paths: Sequence[Path], classes: tuple[str, ...] = (), needs_labels: bool = True) -> None:
        self.paths = tuple(paths)
        self._clear_cache()
        groups, largest = [], 1
        for number, path in enumerate(self.paths):
            metadata = call_pyarrow(path, "read_metadata")
            for group in range(metadata.num_row_groups):
                facts = metadata.row_group(group)
                groups.append((number, group, facts.num_rows))
                largest = max(largest, facts.total_byte_size)
        self.row_groups = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self.starts = np.r_[0, np.cumsum(self.row_groups[:, 2])]
        schema, self.label = call_pyarrow(self.paths[0], "read_schema"), ""
        self.image = find_image_column(schema, self.paths[0])
        if needs_labels:
            self.label = _find_label_column(schema, self.paths[0])
            self.classes = classes or tuple(find_names(read_features(schema).get(self.label)) or ())
        else:
            self.classes = ()
        self.cached_groups = max(MOST_CACHED // largest, 1)
        self.block = max(int(self.row_groups[:, 2].max(initial=1)), 1)
        # A block may span two groups, and all groups of a window should stay cached.
        self.window = self.block * max(self.cached_groups // 2, 1)
        self._clear_cache()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        return {**state, "_files": OrderedDict(), "_groups": OrderedDict(), "_labels": OrderedDict()}

    def read(self, index: int) -> Sample:
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        images, labels = self._read_group(group)
        row = index - int(self.starts[group])
        content = images[row].as_py()
        content = content.get("bytes") if isinstance(content, dict) else content
        if not isinstance(content, bytes):
            raise DataError("holds no bytes: an image that is only named by a path is not read")
        label = labels[row].as_py() if self.label else -1
        if not isinstance(label, int):
            raise DataError("has no label" if label is None else f"its label is {label!r}, not a number")
        return Sample(content, label)

    def name(self, index: int) -> str:
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        number = self.row_groups[group, 0]
        first = self.starts[np.searchsorted(self.row_groups[:, 0], number)]
        return f"{make_printable(self.paths[number])}:{index - first}"

    def identity(self, index: int) -> str:
        return self.name(index).rpartition("/")[2]

    def labels(self, start: int, stop: int) -> Indices:
        first, last = np.searchsorted(self.starts, [start, max(stop - 1, start)], side="right") - 1
        parts = [np.empty(0, np.int64), *map(self._read_labels, range(first, last + 1 if stop > start else first))]
        offset = start - self.starts[first]
        labels: Indices = np.concatenate(parts)[offset : offset + stop - start].astype(np.int64)
        return labels

    def _read_labels(self, group: int) -> Indices:
        """Return the labels of a row group. Those of the last groups are kept: they are small, and asked for often."""
        if group not in self._labels:
            while len(self._labels) >= MOST_LABEL_GROUPS:
                self._labels.popitem(last=False)
            table = self._read_columns(group, [self.label] if self.label else [])
            labels = table.column(0).to_pylist() if table.num_columns else [None] * int(self.row_groups[group, 2])
            self._labels[group] = np.array([clip_label(label) for label in labels], dtype=np.int64)
        self._labels.move_to_end(group)
        return self._labels[group]

    def _open_file(self, number: int) -> Any:
        if number not in self._files:
            while len(self._files) >= MOST_OPEN:
                self._files.popitem(last=False)[1].close()
            self._files[number] = call_pyarrow(self.paths[number], "ParquetFile")
        self._files.move_to_end(number)
        return self._files[number]

    def _read_group(self, group: int) -> tuple[Any, Any]:
        if group not in self._groups:
            while len(self._groups) > self.cached_groups:
                self._groups.popitem(last=False)
            names = [self.image, self.label] if self.label else [self.image]
            table = self._read_columns(group, names)
            if set(table.column_names) != set(names):
                raise DataError(f"lacks one of the columns {' and '.join(names)}")
            self._groups[group] = (table.column(self.image), table.column(names[-1]))
        self._groups.move_to_end(group)
        return self._groups[group]

    def _read_columns(self, group: int, names: list[str]) -> Any:
        number, within, _ = self.row_groups[group]
        try:
            return self._open_file(number).read_row_group(int(within), columns=names)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors
            raise DataError(f"cannot be read: {str(error).splitlines()[0]}") from None

    def _clear_cache(self) -> None:
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._groups: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._labels: OrderedDict[int, Indices] = OrderedDict()


def call_pyarrow(path: Path, function: str) -> Any:
    """Call a function of pyarrow.parquet on a file; its errors become DataErrors."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("reading Parquet", "parquet") from None
    try:
        open_regular_file(path).close()  # pyarrow would wait for the writer of a pipe
        return getattr(pq, function)(path)
    except OSError as error:
        if error.filename is not None or error.errno not in (None, errno.EINVAL):
            raise DataError(f"{make_printable(path)} cannot be opened: {describe_reason(error)}") from None
        raise DataError(f"{make_printable(path)} is not a Parquet file: {str(error).splitlines()[0]}") from None
    except pa.ArrowException as error:
        raise DataError(f"{make_printable(path)} is not a Parquet file: {str(error).splitlines()[0]}") from None


def find_image_column(schema: Any, path: Path) -> str:
    """Return the name of the column of images; raise a DataError if there is none."""
    image = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    if image is None:
        raise DataError(_explain_columns(schema, path))
    kind = str(schema.field(image).type)
    if kind.startswith(("int", "uint", "bool", "float", "double", "halffloat", "decimal", "date", "time")):
        raise DataError(f"{make_printable(path)}: the column {image} holds {kind}, not images: they are bytes")
    return image


def _find_label_column(schema: Any, path: Path) -> str:
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    if label is None:
        raise DataError(_explain_columns(schema, path))
    return label


def _explain_columns(schema: Any, path: Path) -> str:
    return (
        f"{make_printable(path)} has the columns {', '.join(schema.names)}: it needs one of "
        f"{', '.join(IMAGE_COLUMNS)} and one of {', '.join(LABEL_COLUMNS)}"
    )


def read_features(schema: Any) -> dict[str, Any]:
    """Return what the library `datasets` says of the columns; empty if it says nothing."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return features if isinstance(features, dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def find_names(feature: Any) -> Sequence[str] | None:
    """Return the names of classes that a column, or a column of lists, has in such a record; None if it has none."""
    inner = feature.get("feature", feature) if isinstance(feature, dict) else None
    names = inner.get("names") if isinstance(inner, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else None


def name_classes(cells: list[Any], names: Sequence[str] | None) -> list[Any]:
    """Return cells with the names of classes in place of their numbers."""
    if names is None:
        return cells
    return [
        name_classes(cell, names)
        if isinstance(cell, list)
        else str(names[cell])
        if isinstance(cell, int) and 0 <= cell < len(names)
        else cell
        for cell in cells
    ]
