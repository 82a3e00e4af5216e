"""What `vitrail predict` does: run a model on files, folders or standard input, and write embeddings to a file."""

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

from vitrail.data.sources.folder import IMAGE_SUFFIXES, walk_files
from vitrail.data.sources.source import MOST_BYTES, make_printable
from vitrail.data.transforms.decode import open_image
from vitrail.errors import ConfigError, DataError, MissingExtraError
from vitrail.inference.engine import FloatArray
from vitrail.inference.predictor import TOP, Prediction, Predictor, check_top
from vitrail.system.events import Progress
from vitrail.system.files import move_into_place

STANDARD_INPUT = "-"
ROWS_IN_GROUP = 1024
"""Rows of a Parquet row group: so many embeddings are in memory at a time."""

AddEmbedding = Callable[[str, FloatArray], None]


@dataclass(frozen=True)
class FilePrediction:
    """The result for one file: labels, or the reason why the file was left out."""

    file: str
    """The name as given or found; "-" for standard input. Bytes that are not valid text appear as \\xff."""
    labels: tuple[tuple[str, float], ...] = ()
    """The best labels with their probabilities; () for a model without classes."""
    error: str | None = None


class PredictionRun:
    """The images of one `vitrail predict` command, the model for them, and the counts so far."""

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
        on_message: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Find the images and load the model. Mistakes in the command raise an error here, before any prediction.

        Args:
            files: files, folders with images at any depth, and "-" for standard input, which holds an image or a list
                of file names.
            model: anything that `vitrail.load` takes.
            top: the number of labels for each image, at least 1.
            embed: the .parquet or .npz file for representations, if any.
            batch_size: images that run at a time.
            device: cpu, cuda, …; auto takes a GPU if the machine has one.
            precision: as for `Predictor`.
            on_message: as for `Predictor`.

        Raises:
            ConfigError: if an option is not valid, or nothing is requested that the model can give.
            DataError: if there are no images.
        """
        if not files:
            raise ConfigError("no images were given: vitrail predict photo.jpg")
        check_top(top)
        check_embedding_path(embed)
        self.images = find_images(files)
        batch_size = min(batch_size, max(len(self.images), 1))  # the fastest precision may depend on it
        self.predictor = Predictor(
            model, device=device, batch_size=batch_size, precision=precision, on_message=on_message
        )
        self.top, self.embed = top, embed
        self.done, self.left_out, self.seconds = 0, 0, 0.0
        if not self.labels and embed is None:
            raise ConfigError(
                "the model has no classes, and therefore no labels: write embeddings with --embed out.parquet"
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes in words; () for a model without classes."""
        return self.predictor.labels

    def predict_files(self, progress: Progress | None = None) -> Generator[FilePrediction, None, None]:
        """Yield the result for each file, in order, as soon as it is computed.

        The file of embeddings appears after the last result. If the generator is closed early, it is not written.
        """
        started, total = time.perf_counter(), len(self.images)
        outputs = {"probabilities": bool(self.labels), "embeddings": self.embed is not None}
        embeddings = nullcontext(None) if self.embed is None else write_embeddings(self.embed)
        with embeddings as add, closing(self.predictor.stream(self.images, **outputs)) as predictions:
            for prediction in predictions:
                row = self._take(prediction, add)
                self.done, self.left_out = self.done + (row.error is None), self.left_out + (row.error is not None)
                self.seconds = time.perf_counter() - started
                if progress is not None:
                    progress(prediction.index + 1, total)
                yield row

    def summary(self) -> str:
        """Return counts and speed in words: "132 images, 45.2 images/s, 1 left out"."""
        parts = [f"{self.done:,} image" + ("" if self.done == 1 else "s")]
        if self.done:
            parts.append(f"{self.done / max(self.seconds, 1e-9):,.1f} images/s")
        if self.left_out:
            parts.append(f"{self.left_out:,} left out")
        return ", ".join(parts)

    def _take(self, prediction: Prediction, add: AddEmbedding | None) -> FilePrediction:
        """Add the embedding to its file, if there is one, and return the labels or the error."""
        file = to_valid_text(self.images[prediction.index])
        if prediction.error is not None:
            return FilePrediction(file, error=str(prediction.error))
        if add is not None and prediction.embedding is not None:
            add(file, prediction.embedding)
        if prediction.probabilities is None:
            return FilePrediction(file)
        return FilePrediction(file, tuple(self.predictor.rank_labels(prediction.probabilities, self.top)))


def to_valid_text(image: str | bytes) -> str:
    """Return the name of an image as valid text: bytes that are not UTF-8 become \\xff, standard input becomes "-"."""
    if isinstance(image, bytes):
        return STANDARD_INPUT
    return image.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def find_images(files: Sequence[str]) -> list[str | bytes]:
    """Return the image files that the arguments mean, in order; for standard input, its content if it is an image.

    Raises:
        ConfigError: if a name is empty, or "-" is given twice.
        DataError: if there are no images, or a folder or standard input cannot be read.
    """
    if files.count(STANDARD_INPUT) > 1:
        raise ConfigError(f"{STANDARD_INPUT} was given more than once, but there is only one standard input")
    images = list[str | bytes]()
    for name in files:
        if not name:
            raise ConfigError("a file name is empty: is a shell variable empty?")
        if name == STANDARD_INPUT:
            images += _read_standard_input()
        elif _is_folder(Path(name)):
            images += sorted(file for file in _list_files(name) if file.lower().endswith(IMAGE_SUFFIXES))
        else:
            images.append(name)
    if not images:
        places = ", ".join("standard input" if name == STANDARD_INPUT else make_printable(name) for name in files)
        raise DataError(
            f"no images in {places}: give image files, or folders with images ({', '.join(IMAGE_SUFFIXES)})"
        )
    return images


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or its folder cannot be read
        return False


def _list_files(folder: str) -> list[str]:
    try:
        return list(walk_files(Path(folder)))
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {error.strerror}") from None


def _read_standard_input() -> list[str | bytes]:
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(f"standard input holds more than the {MOST_BYTES:,} bytes allowed")
    if _is_image(content):
        return [content]
    return [os.fsdecode(line) for line in content.replace(b"\r\n", b"\n").split(b"\n") if line.strip()]


def _is_image(content: bytes) -> bool:
    """Return whether standard input is an image, even a damaged one: no list of file names has a zero byte."""
    if b"\0" in content:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            open_image(content)
    except DataError:
        return False
    return True


# Embeddings in a file


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
    if _is_folder(path) or not _is_folder(path.absolute().parent):
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
        table.add(name, embedding)
        count += 1

    try:
        with draft.open("wb") as file, closing(TABLES[path.suffix.lower()](file)) as table:
            yield add
        if count:
            move_into_place(draft, path)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--embed {make_printable(path)} cannot be written ({reason}): give another place") from None
    finally:
        with suppress(OSError):  # an error about the disk was already raised
            draft.unlink(missing_ok=True)
