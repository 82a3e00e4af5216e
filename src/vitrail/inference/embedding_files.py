"""Files of embeddings: Parquet or .npz, written row by row, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from vitrail.data.sources.source import make_printable
from vitrail.errors import ConfigError, MissingExtraError
from vitrail.inference.engine import FloatArray
from vitrail.system.files import is_folder, move_into_place

ROWS_IN_GROUP = 1024
"""Rows of a Parquet row group: so many embeddings are in memory at a time."""

AddEmbedding = Callable[[str, FloatArray], None]


class EmbeddingTable(Protocol):
    """Writes file names and embeddings to a file; `close` writes the rest."""

    def __init__(self, file: BinaryIO) -> None: ...

    def add(self, name: str, embedding: FloatArray) -> None: ...

    def close(self) -> None: ...


class ParquetTable:
    """Writes the columns `file` and `embedding`, a list of float32."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema = pa.schema([("file", pa.string()), ("embedding", pa.list_(pa.float32()))])
        self._writer = pq.ParquetWriter(file, self._schema)
        self._rows = list[tuple[str, FloatArray]]()

    def add(self, name: str, embedding: FloatArray) -> None:
        self._rows.append((name, embedding))
        if len(self._rows) == ROWS_IN_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        columns: dict[str, list[Any]] = {
            "file": [name for name, _ in self._rows],
            "embedding": [embedding for _, embedding in self._rows],
        }
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        try:
            if self._rows:
                self._write_group()
        finally:
            self._writer.close()


class NpzTable:
    """Writes the arrays `names` and `embeddings`, (N, D) float32. They stay in memory until the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._names, self._embeddings = file, list[str](), list[FloatArray]()

    def add(self, name: str, embedding: FloatArray) -> None:
        self._names.append(name)
        self._embeddings.append(embedding)

    def close(self) -> None:
        embeddings = np.array(self._embeddings, np.float32).reshape(len(self._names), -1 if self._names else 0)
        np.savez(self._file, names=np.array(self._names, np.str_), embeddings=embeddings)


TABLES: dict[str, type[EmbeddingTable]] = {".parquet": ParquetTable, ".npz": NpzTable}


def check_embedding_path(path: Path | None) -> None:
    """Raise a ConfigError or a MissingExtraError if embeddings cannot be written there."""
    if path is None:
        return
    if path.suffix.lower() not in TABLES:
        raise ConfigError(f"--embed {make_printable(path)}: give a file that ends in {' or '.join(TABLES)}")
    if is_folder(path) or not is_folder(path.absolute().parent):
        raise ConfigError(f"--embed {make_printable(path)}: give a file name in an existing folder")
    if path.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise MissingExtraError("writing Parquet", "parquet") from None


@contextmanager
def write_embeddings(path: Path) -> Iterator[AddEmbedding]:
    """Yield a function that adds an embedding under a file name; at the end, put the finished file in its place.

    After an error, or if no embedding was added, the path stays as it was.
    """
    draft, count = path.with_name(f".{path.name}.{os.getpid()}.tmp"), 0

    def add(name: str, embedding: FloatArray) -> None:
        nonlocal count
        with _explain_disk_errors(path):
            table.add(name, embedding)
        count += 1

    outside: BaseException | None = None
    try:
        with _explain_disk_errors(path, lambda: outside):
            with draft.open("wb") as file, closing(TABLES[path.suffix.lower()](file)) as table:
                try:
                    yield add
                except BaseException as error:  # an error of the caller's, such as a closed pipe
                    outside = error
                    raise
            if count:
                move_into_place(draft, path)
    finally:
        with suppress(OSError):  # an error about the disk was already raised
            draft.unlink(missing_ok=True)


@contextmanager
def _explain_disk_errors(path: Path, get_other: Callable[[], BaseException | None] = lambda: None) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the file, unless it is the other error, which is not the disk's."""
    try:
        yield
    except OSError as error:
        if error is get_other():
            raise
        reason = error.strerror or error
        raise ConfigError(f"--embed {make_printable(path)} cannot be written ({reason}): give another place") from None


def read_embeddings(path: Path) -> FloatArray:
    """Return the embeddings, (N, D) float32, of a file that `write_embeddings` wrote."""
    if path.suffix.lower() == ".npz":
        with np.load(path) as arrays:
            rows: FloatArray = arrays["embeddings"]
            return rows
    import pyarrow.parquet as pq

    column = pq.read_table(path, columns=["embedding"])["embedding"].combine_chunks()
    values: FloatArray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1)
