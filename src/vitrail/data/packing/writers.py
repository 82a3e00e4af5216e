"""Write shards: tar files in the WebDataset layout or Parquet in the Hugging Face layout, always the same bytes."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.data.packing.typed_cells import find_cell_kind
from vitrail.data.sources.shards import HEADER_BYTES, RECORD_DTYPE
from vitrail.errors import MissingExtraError
from vitrail.system.files import move_into_place
from vitrail.tasks.task import Cell, Task

ROWS_IN_GROUP = 100
"""Rows in a group of Parquet, which is read one group at a time."""


class PackedSample(NamedTuple):
    """A sample in the form in which it is written."""

    content: bytes
    """The bytes of an image file."""
    extension: str
    """The ending of the file name, without the dot."""
    label: int
    cells: Mapping[str, Cell] | None = None
    """What a table says about it, by column, as `type_cells` returns it; None if the label says all."""


class ShardWriter(Protocol):
    """Writes one shard."""

    has_index: bool
    """Whether the format needs an index of where samples start."""

    def __init__(self, path: Path, number: int, classes: Sequence[str], task: Task | None = None) -> None: ...

    @property
    def size(self) -> int:
        """Bytes so far, approximately."""

    def add(self, key: str, sample: PackedSample) -> None:
        """Add a sample under a key that is unique in the split."""

    def close(self) -> None:
        """Write what is left; without this the shard is incomplete."""

    def records(self) -> NDArray[Any] | None:
        """Return the index (`RECORD_DTYPE`), or None if the format has none."""

    @staticmethod
    def name(split: str, number: int, shards: int) -> str:
        """Return the file name of a shard."""


class TarWriter:
    """Writes `key.jpg` and `key.cls` for each sample; for another task than labels, `key.json` with its cells."""

    has_index = True

    def __init__(self, path: Path, number: int, classes: Sequence[str], task: Task | None = None) -> None:
        self._file = path.open("wb")
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self._number, self._records = number, list[tuple[int, int, int, int]]()

    @property
    def size(self) -> int:
        return self._tar.offset

    def add(self, key: str, sample: PackedSample) -> None:
        self._records.append((self._number, self._tar.offset + HEADER_BYTES, len(sample.content), sample.label))
        self._add_file(f"{key}.{sample.extension}", sample.content)
        if sample.cells is None:
            self._add_file(f"{key}.cls", str(sample.label).encode())
        else:
            self._add_file(f"{key}.json", json.dumps(sample.cells, ensure_ascii=False, allow_nan=False).encode())

    def _add_file(self, name: str, content: bytes) -> None:
        """Add a file with fixed owner, time and rights; TarInfo sets owner and time to 0."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o644
        self._tar.addfile(member, io.BytesIO(content))

    def close(self) -> None:
        self._tar.close()
        self._file.close()

    def records(self) -> NDArray[Any] | None:
        return np.array(self._records, dtype=RECORD_DTYPE)

    @staticmethod
    def name(split: str, number: int, shards: int) -> str:
        return f"{split}-{number:06}.tar"


class ParquetWriter:
    """Writes a column `image` of {bytes, path} and a column `label`; the schema names the classes.

    For another task than labels, the columns of the task take the place of `label`.
    """

    has_index = False

    def __init__(self, path: Path, number: int, classes: Sequence[str], task: Task | None = None) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("writing Parquet", "parquet") from None
        image = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
        if task is None:
            label = {"names": list(classes), "_type": "ClassLabel"} if classes else {"dtype": "int64", "_type": "Value"}
            features: dict[str, Any] = {"label": label}
            fields = [pa.field("label", pa.int64())]
        else:
            kinds = {column: find_cell_kind(task, column) for column in task.columns}
            values = {name: {"dtype": kind.removeprefix("list "), "_type": "Value"} for name, kind in kinds.items()}
            features = {
                name: {"feature": values[name], "_type": "List"} if kind.startswith("list ") else values[name]
                for name, kind in kinds.items()
            }
            fields = [pa.field(name, _find_arrow_type(kind)) for name, kind in kinds.items()]
        info = {"info": {"features": {"image": {"_type": "Image"}, **features}}}
        self._schema = pa.schema([pa.field("image", image), *fields], metadata={"huggingface": json.dumps(info)})
        # Compressing images again would not make them smaller.
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "version": "2.6"}
        self._file = pq.ParquetWriter(path, self._schema, **options)
        self._names = [field.name for field in fields]
        self._rows: list[dict[str, Any]] = []
        self.size = 0

    def add(self, key: str, sample: PackedSample) -> None:
        cells = {"label": sample.label} if sample.cells is None else sample.cells
        self._rows.append({"image": {"bytes": sample.content, "path": f"{key}.{sample.extension}"}, **cells})
        self.size += len(sample.content)
        if len(self._rows) == ROWS_IN_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        columns = {name: [row[name] for row in self._rows] for name in ("image", *self._names)}
        self._file.write_table(pa.table(columns, schema=self._schema), row_group_size=ROWS_IN_GROUP)
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._write_group()
        self._file.close()

    def records(self) -> NDArray[Any] | None:
        return None

    @staticmethod
    def name(split: str, number: int, shards: int) -> str:
        return f"{split}-{number:05}-of-{shards:05}.parquet"


def _find_arrow_type(kind: str) -> Any:
    import pyarrow as pa

    return pa.list_(_find_arrow_type(kind.removeprefix("list "))) if kind.startswith("list ") else getattr(pa, kind)()


WRITERS: dict[str, type[ShardWriter]] = {"tar": TarWriter, "parquet": ParquetWriter}


def write_index(path: Path, parts: Sequence[Path]) -> None:
    """Join the records of all shards of a split into one index, on disk."""
    lengths = [len(np.load(part, mmap_mode="r")) for part in parts]
    draft = path.with_name(f"{path.name}.tmp")
    index = np.lib.format.open_memmap(draft, "w+", RECORD_DTYPE, (sum(lengths),))
    for part, stop, length in zip(parts, np.cumsum(lengths), lengths, strict=True):
        index[stop - length : stop] = np.load(part)
    index.flush()
    del index
    move_into_place(draft, path)
