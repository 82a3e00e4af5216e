"""What `vitrail predict` does: files, folders and standard input through a model, and embeddings into a file."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from vitrail.data.sources.folder import SUFFIXES, files_below
from vitrail.data.sources.source import MOST_BYTES, shown
from vitrail.data.transforms.decode import opened_image
from vitrail.errors import ConfigError, DataError, MissingExtraError
from vitrail.inference.batches import Progress
from vitrail.inference.predictor import TOP, Outcome, Predictor, Row, check_top
from vitrail.system.files import move_into_place

STANDARD_INPUT = "-"
ROWS_IN_GROUP = 1024
"""Of Parquet: so many embeddings are in memory at a time."""

Keep = Callable[[str, Row], None]


@dataclass(frozen=True)
class Predicted:
    """What came of one file."""

    file: str
    """Its name as it was given or found, and "-" for standard input. Bytes that are no text are told as \\xff."""
    labels: tuple[tuple[str, float], ...] = ()
    """The best, with their probabilities; none where only embeddings are wanted."""
    error: str | None = None
    """Why it was left out."""


class Predictions:
    """Images that were found, and a model that is ready for them; what came of them so far."""

    def __init__(
        self,
        files: Sequence[str],
        model: str,
        *,
        top: int = TOP,
        embed: Path | None = None,
        batch_size: int = 32,
        device: str = "auto",
        precision: str = "fp32",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """What is wrong with a command is said here, before anything is computed.

        Args:
            files: files, folders with images at any depth, and "-" for standard input, which is an image or a list of
                file names.
            model: whatever `vitrail.load` takes.
            top: how many labels of each image.
            embed: where representations go, .parquet or .npz.
            batch_size: images at a time.
            device: cpu, cuda, …; a GPU where there is one, for auto.
            precision: fp32; or faster and less exact, of which `tell` is told.
        """
        if not files:
            raise ConfigError("no images were given: vitrail predict photo.jpg")
        check_top(top)
        check_embed(embed)
        self.images = found_images(files)
        batch_size = min(batch_size, max(len(self.images), 1))  # what is fastest may depend on it
        self.predictor = Predictor(model, device=device, batch_size=batch_size, precision=precision, tell=tell)
        self.top, self.embed = top, embed
        self.done, self.left_out, self.seconds = 0, 0, 0.0
        if not self.labels and embed is None:
            raise ConfigError("the model has no classes, so there are no labels to tell: --embed out.parquet keeps y")

    @property
    def labels(self) -> tuple[str, ...]:
        """The model's classes in words; none where it has none."""
        return self.predictor.labels

    def rows(self, progress: Progress | None = None) -> Generator[Predicted, None, None]:
        """What came of each file, in their order, as soon as it is there.

        Embeddings are in their place after the last row, and not at all where it is closed before.
        """
        started, total = time.perf_counter(), len(self.images)
        wanted = {"probabilities": bool(self.labels), "embeddings": self.embed is not None}
        keeping = nullcontext(None) if self.embed is None else embeddings_kept(self.embed)
        with keeping as keep, closing(self.predictor.stream(self.images, **wanted)) as outcomes:
            for outcome in outcomes:
                row = self._predicted(outcome, keep)
                self.done, self.left_out = self.done + (row.error is None), self.left_out + (row.error is not None)
                self.seconds = time.perf_counter() - started
                if progress is not None:
                    progress(outcome.index + 1, total)
                yield row

    def summary(self) -> str:
        """ "132 images, 45.2 images/s, 1 left out"."""
        parts = [f"{self.done:,} image" + ("" if self.done == 1 else "s")]
        if self.done:
            parts.append(f"{self.done / max(self.seconds, 1e-9):,.1f} images/s")
        if self.left_out:
            parts.append(f"{self.left_out:,} left out")
        return ", ".join(parts)

    def _predicted(self, outcome: Outcome, keep: Keep | None) -> Predicted:
        file = file_name(self.images[outcome.index])
        if outcome.error is not None:
            return Predicted(file, error=str(outcome.error))
        if keep is not None and outcome.embedding is not None:
            keep(file, outcome.embedding)
        if outcome.probabilities is None:
            return Predicted(file)
        return Predicted(file, tuple(self.predictor.ranked(outcome.probabilities, self.top)))


def file_name(image: str | bytes) -> str:
    """As text that any program can read, and otherwise as it is."""
    if isinstance(image, bytes):
        return STANDARD_INPUT
    return image.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def found_images(files: Sequence[str]) -> list[str | bytes]:
    """The files that are meant, in order; the content of standard input where that is an image."""
    if files.count(STANDARD_INPUT) > 1:
        raise ConfigError(f"{STANDARD_INPUT} was given more than once, and there is one standard input")
    found = list[str | bytes]()
    for name in files:
        if not name:
            raise ConfigError("a file has no name: is a variable empty that should hold it?")
        if name == STANDARD_INPUT:
            found += _from_standard_input()
        elif _is_folder(Path(name)):
            found += sorted(file for file in _listed(name) if file.lower().endswith(SUFFIXES))
        else:
            found.append(name)
    if not found:
        told = ", ".join("standard input" if name == STANDARD_INPUT else shown(name) for name in files)
        raise DataError(f"no images in {told}: give image files, or folders with images ({', '.join(SUFFIXES)})")
    return found


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or in a folder that is closed to us
        return False


def _listed(folder: str) -> list[str]:
    try:
        return list(files_below(Path(folder)))
    except OSError as error:
        raise DataError(f"{shown(folder)} cannot be listed: {error.strerror}") from None


def _from_standard_input() -> list[str | bytes]:
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(f"standard input holds more than the {MOST_BYTES:,} bytes allowed")
    if _is_image(content):
        return [content]
    return [os.fsdecode(line) for line in content.replace(b"\r\n", b"\n").split(b"\n") if line.strip()]


def _is_image(content: bytes) -> bool:
    """Whether to take it for one: no name of a file has a zero byte, and a damaged image should be called so."""
    if b"\0" in content:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened_image(content)
    except DataError:
        return False
    return True


# Embeddings in a file


class Table(Protocol):
    """Names and embeddings on their way into a file."""

    def __init__(self, file: BinaryIO) -> None: ...

    def add(self, name: str, embedding: Row) -> None:
        """A row."""

    def close(self) -> None:
        """What is left is written."""


class ParquetTable:
    """Columns `file` and `embedding`, a list of float32."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema = pa.schema([("file", pa.string()), ("embedding", pa.list_(pa.float32()))])
        self._writer = pq.ParquetWriter(file, self._schema)
        self._rows = list[tuple[str, Row]]()

    def add(self, name: str, embedding: Row) -> None:
        """Written when there are enough."""
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
        """The last group, and the footer."""
        try:
            if self._rows:
                self._write_group()
        finally:
            self._writer.close()


class NpzTable:
    """Arrays `names` and `embeddings`, (N, D) float32."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._names, self._embeddings = file, list[str](), list[Row]()

    def add(self, name: str, embedding: Row) -> None:
        """Kept in memory: the format has no other way."""
        self._names.append(name)
        self._embeddings.append(embedding)

    def close(self) -> None:
        """All of it."""
        found = np.array(self._embeddings, np.float32).reshape(len(self._names), -1 if self._names else 0)
        np.savez(self._file, names=np.array(self._names, np.str_), embeddings=found)


TABLES: dict[str, type[Table]] = {".parquet": ParquetTable, ".npz": NpzTable}


def check_embed(path: Path | None) -> None:
    """Refuse a place for embeddings that they could not be written to in the end."""
    if path is None:
        return
    if path.suffix.lower() not in TABLES:
        raise ConfigError(f"--embed {shown(path)}: give a file that ends in {' or '.join(TABLES)}")
    if _is_folder(path) or not _is_folder(path.absolute().parent):
        raise ConfigError(f"--embed {shown(path)}: give the name of a file in a folder that is there")
    if path.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise MissingExtraError("writing Parquet", "parquet") from None


@contextmanager
def embeddings_kept(path: Path) -> Iterator[Keep]:
    """Takes names and embeddings; the file is in its place at the end, whole, or it is as it was before.

    Where no image came through, there is nothing to write.
    """
    draft, kept = path.with_name(f".{path.name}.{os.getpid()}.tmp"), 0

    def keep(name: str, embedding: Row) -> None:
        nonlocal kept
        table.add(name, embedding)
        kept += 1

    try:
        with draft.open("wb") as file, closing(TABLES[path.suffix.lower()](file)) as table:
            yield keep
        if kept:
            move_into_place(draft, path)
    except OSError as error:
        told = error.strerror or error
        raise ConfigError(f"--embed {shown(path)} cannot be written ({told}): give another place") from None
    finally:
        with suppress(OSError):  # a disk that cannot be written has been told of already
            draft.unlink(missing_ok=True)
