"""Shards as files: tar in the WebDataset layout, Parquet in the Hugging Face layout; the same bytes every time."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.shards import HEADER_BYTES, RECORD_DTYPE
from vitrail.errors import MissingExtraError
from vitrail.system.files import move_into_place

ROWS_IN_GROUP = 100
"""Of Parquet, which is read a group at a time."""


class PackedSample(NamedTuple):
    """A sample as it is written."""

    content: bytes
    """The bytes of an image file."""
    extension: str
    """What the names of such files end in, without the dot."""
    label: int


class ShardWriter(Protocol):
    """One shard while it is written."""

    indexed: bool
    """Whether readers want a table of where samples lie."""

    def __init__(self, path: Path, number: int, classes: Sequence[str]) -> None: ...

    @property
    def size(self) -> int:
        """Bytes so far, about."""

    def add(self, key: str, sample: PackedSample) -> None:
        """One more sample."""

    def close(self) -> None:
        """Write what is left; without this a shard is not whole."""

    def records(self) -> NDArray[Any] | None:
        """Where samples lie (`RECORD`), in formats that are indexed."""

    @staticmethod
    def name(split: str, number: int, shards: int) -> str:
        """Of the file."""


class TarWriter:
    """`key.jpg` and `key.cls`, one after the other."""

    indexed = True

    def __init__(self, path: Path, number: int, classes: Sequence[str]) -> None:
        self._file = path.open("wb")
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self._number, self._records = number, list[tuple[int, int, int, int]]()

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._tar.offset

    def add(self, key: str, sample: PackedSample) -> None:
        """The image and its label."""
        self._records.append((self._number, self._tar.offset + HEADER_BYTES, len(sample.content), sample.label))
        self._member(f"{key}.{sample.extension}", sample.content)
        self._member(f"{key}.cls", str(sample.label).encode())

    def _member(self, name: str, content: bytes) -> None:
        """Owner, time and rights are always the same; TarInfo leaves time and owner at 0."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o644
        self._tar.addfile(member, io.BytesIO(content))

    def close(self) -> None:
        """With the mark of the end."""
        self._tar.close()
        self._file.close()

    def records(self) -> NDArray[Any] | None:
        """Of every image."""
        return np.array(self._records, dtype=RECORD_DTYPE)

    @staticmethod
    def name(split: str, number: int, shards: int) -> str:
        """`train-000000.tar`."""
        return f"{split}-{number:06}.tar"


class ParquetWriter:
    """A column `image` of {bytes, path} and a column `label`, with the names of the classes in the schema."""

    indexed = False

    def __init__(self, path: Path, number: int, classes: Sequence[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("writing Parquet", "parquet") from None
        label = {"names": list(classes), "_type": "ClassLabel"} if classes else {"dtype": "int64", "_type": "Value"}
        features = {"image": {"_type": "Image"}, "label": label}
        image = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        self._schema = pa.schema([pa.field("image", image), pa.field("label", pa.int64())], metadata=metadata)
        # Images do not get smaller by compressing them again.
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "version": "2.6"}
        self._file = pq.ParquetWriter(path, self._schema, **options)
        self._images: list[dict[str, Any]] = []
        self._labels: list[int] = []
        self.size = 0

    def add(self, key: str, sample: PackedSample) -> None:
        """A row."""
        self._images.append({"bytes": sample.content, "path": f"{key}.{sample.extension}"})
        self._labels.append(sample.label)
        self.size += len(sample.content)
        if len(self._labels) == ROWS_IN_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        table = pa.table({"image": self._images, "label": self._labels}, schema=self._schema)
        self._file.write_table(table, row_group_size=ROWS_IN_GROUP)
        self._images, self._labels = [], []

    def close(self) -> None:
        """The rows that are left, and the footer."""
        if self._labels:
            self._write_group()
        self._file.close()

    def records(self) -> NDArray[Any] | None:
        """Parquet has its own."""
        return None

    @staticmethod
    def name(split: str, number: int, shards: int) -> str:
        """`train-00000-of-00012.parquet`."""
        return f"{split}-{number:05}-of-{shards:05}.parquet"


WRITERS: dict[str, type[ShardWriter]] = {"tar": TarWriter, "parquet": ParquetWriter}


def write_index(path: Path, parts: Sequence[Path]) -> None:
    """The records of all shards of a split, put together on disk from those of each."""
    lengths = [len(np.load(part, mmap_mode="r")) for part in parts]
    draft = path.with_name(f"{path.name}.tmp")
    index = np.lib.format.open_memmap(draft, "w+", RECORD_DTYPE, (sum(lengths),))
    for part, stop, length in zip(parts, np.cumsum(lengths), lengths, strict=True):
        index[stop - length : stop] = np.load(part)
    index.flush()
    del index
    move_into_place(draft, path)
