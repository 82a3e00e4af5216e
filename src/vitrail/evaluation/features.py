"""The representation of every image of a data set, computed once: what few-shot, probes, neighbours and clusters use.

In the cache a data set's features are one file of batches, each with a digest. While it grows it has another name, and
belongs to one process; whoever comes after a process that was killed keeps the batches that are whole and goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail import __version__
from vitrail.data.sources.table_cache import MAX_AGE_SECONDS, find_cache_folder
from vitrail.data.sources.source import Source, Subset, compute_fingerprint
from vitrail.errors import DataError, WeightsError
from vitrail.inference.batches import InferenceOptions, Progress, single_rank, cast_half_to_float32, run_batches
from vitrail.model.base import ImageModel
from vitrail.system.files import move_into_place
from vitrail.system.precision import choose_precision
from vitrail.weights.digest import tensor_bytes, weights_digest

log = logging.getLogger("vitrail")

VERSION = 1
LOOKED_INTO = 64
"""Images whose bytes help to tell one data set from another."""
CHUNK = 1 << 16
"""Labels read at a time."""
SUFFIX, UNFINISHED = ".features", ".unfinished"
_NUMBERS = struct.Struct("<QQQ")
_DIGEST = 16


@dataclass(frozen=True)
class Features:
    """Representations y with their labels, for the images that could be read."""

    values: Tensor
    """(N, D) float32, on the CPU, in the order of the source."""
    labels: Tensor
    """(N,) int64."""
    indices: Tensor
    """(N,) int64: the images' numbers in the source."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Features:
        """Some of them, by their places here or by a mask."""
        return Features(self.values[rows], self.labels[rows], self.indices[rows])


def features_folder() -> Path:
    """Where they are kept: beside the tables of the data, which VITRAIL_CACHE moves."""
    return find_cache_folder().parent / "features"


def extract_features(
    model: ImageModel,
    source: Source,
    options: InferenceOptions,
    cache: Path | Literal["auto"] | None = "auto",
    progress: Progress | None = None,
) -> Features:
    """`model.embed` of every image. Images that cannot be read are left out, and named in the log.

    What was computed before is read from the cache (a folder; None keeps nothing), and what was begun is gone on with.
    An entry is found by the model's weights, the precision, and the data: its number of images, classes, all labels, up
    to 1,000 names and the bytes of 64 images spread evenly. So it is not noticed when other images than those are
    exchanged under their old names; nor that other batches or another device would round differently. Entries that
    nobody has used for 30 days are deleted.
    """
    cast_half_to_float32(model)
    rows = _Rows(len(source))
    if cache is None:
        _compute(model, source, options, rows, None, progress)
        return rows.features()
    folder = features_folder() if cache == "auto" else cache
    path = folder / f"{_key(model, source, options)}{SUFFIX}"
    if (found := _finished(path, len(source))) is not None:
        return found
    with contextlib.closing(_Draft(path)) as draft:
        # Another process may have finished while this one waited.
        if (found := _finished(path, len(source))) is not None:
            draft.discard()
            return found
        for part in draft.parts():
            rows.add(part)
        if rows.done:
            log.info("%d of %d images were done before", rows.done, len(source))
        _compute(model, source, options, rows, draft, progress)
        features = rows.features()
        draft.finish()
    return features


class _Part(NamedTuple):
    """What came of one batch."""

    done: int
    """Images of the source that are behind us with it, readable or not."""
    values: Tensor
    labels: Tensor
    indices: Tensor


class _Rows:
    """Parts put together in memory that is taken once."""

    def __init__(self, most: int) -> None:
        self.most, self.done, self.count = most, 0, 0
        self.values = torch.empty(0, 0)
        self.labels, self.indices = torch.empty(2, most, dtype=torch.int64).unbind()

    def add(self, part: _Part) -> None:
        """Behind those that are there."""
        if not self.done:
            self.values = torch.empty(self.most, part.values.shape[1])
        place = slice(self.count, self.count + len(part.labels))
        self.values[place], self.labels[place], self.indices[place] = part.values, part.labels, part.indices
        self.done, self.count = part.done, place.stop

    def features(self) -> Features:
        """All of them."""
        if not self.count:
            raise DataError("none of the images can be read: `vitrail data check` names what is wrong")
        return Features(self.values[: self.count], self.labels[: self.count], self.indices[: self.count])


def _compute(
    model: ImageModel, source: Source, options: InferenceOptions, rows: _Rows, draft: _Draft | None, progress: Progress | None
) -> None:
    """From where the rows end, to the end of the source."""
    start = rows.done
    if start and start == len(source):
        return
    rest = Subset(source, np.arange(start, len(source))) if start else source
    told: Progress | None = None
    if progress is not None:
        report = progress

        def told(done: int, total: int) -> None:
            report(start + done, start + total)

    for batch, computed in run_batches(model, rest, model.embed, options, progress=told):
        mask = batch.mask
        done = rows.done + int((batch.indices >= 0).sum())
        values = computed.cpu()[mask].float()
        if not torch.isfinite(values).all():
            raise WeightsError(
                "the model's features are not numbers: its weights are damaged, or the precision too low"
            )
        part = _Part(done, values, batch.labels[mask], batch.indices[mask] + start)
        rows.add(part)
        if draft is not None:
            draft.add(part)


def _key(model: ImageModel, source: Source, options: InferenceOptions) -> str:
    precision = choose_precision(options.precision, single_rank(options).device)
    told = f"{VERSION} {__version__} {weights_digest(model)} {precision} {_data_digest(source)}"
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _data_digest(source: Source) -> str:
    """Beyond the fingerprint all labels, which cost little, and some of the images themselves."""
    count = len(source)
    told = hashlib.blake2b(compute_fingerprint(source).encode(), digest_size=16)
    for start in range(0, count, CHUNK):
        told.update(np.ascontiguousarray(source.labels(start, min(start + CHUNK, count)), dtype=np.int64).data)
    for index in np.unique(np.linspace(0, max(count - 1, 0), LOOKED_INTO).astype(np.int64))[:count].tolist():
        try:
            content = source.read(index).content
        except Exception as error:  # whatever is wrong with it, computing will tell
            content = type(error).__name__.encode()
        told.update(tensor_bytes(content) if isinstance(content, Tensor) else content)
    return told.hexdigest()


def _finished(path: Path, count: int) -> Features | None:
    """An entry of the cache, if it is there and as it was written."""
    rows = _Rows(count)
    try:
        with path.open("rb") as file:
            for part in _whole_parts(file):
                rows.add(part)
        if rows.done == count:
            with contextlib.suppress(OSError):  # a cache may be there to be read only
                os.utime(path)
            return rows.features()
        log.warning("%s is damaged: the features are computed anew", path)
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be read (%s): the features are computed anew", path, error.strerror or error)
    return None


class _Draft:
    """An entry of the cache that is not finished, and that nobody else writes. Without a place to write, it is none:
    a full disk is no reason to lose what was computed."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, path
        self.file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.place, self.file = _taken(path)
        except OSError as error:
            self._give_up(error)

    def parts(self) -> Iterator[_Part]:
        """Those that are whole; what comes after them is cut off."""
        if self.file is not None:
            self.file.seek(0)
            yield from _whole_parts(self.file)
            self._try(lambda file: file.truncate())

    def add(self, part: _Part) -> None:
        """Behind the others. Handed to the system at once: only the machine's end can lose it, not the process's."""
        self._try(lambda file: (file.write(_written(part)), file.flush()))

    def finish(self) -> None:
        """Its lasting name, once all of it is on the disk."""
        self._try(self._name)

    def discard(self) -> None:
        """It is not needed."""
        self._try(lambda file: self.place.unlink())

    def close(self) -> None:
        """Leave it to whoever comes next."""
        if self.file is not None:
            self.file.close()

    def _name(self, file: BinaryIO) -> None:
        if os.name == "nt":
            file.close()  # Windows renames no open file
        move_into_place(self.place, self.path)
        _forget_unused(self.path.parent)

    def _try(self, action: Callable[[BinaryIO], object]) -> None:
        try:
            if self.file is not None:
                action(self.file)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the features are not kept in %s: %s", self.path.parent, error.strerror or error)
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.place.unlink()
            with contextlib.suppress(OSError):
                self.file.close()  # writes what it holds, and fails again
            self.file = None


def _taken(path: Path) -> tuple[Path, BinaryIO]:
    """The unfinished entry, once no other process has it; one of our own where the system knows no locks."""
    place = path.with_suffix(UNFINISHED)
    while True:
        file = place.open("a+b")
        try:
            _lock(file, path)
        except (ImportError, OSError):
            file.close()
            place = path.with_suffix(f".{secrets.token_hex(4)}{UNFINISHED}")
            return place, place.open("a+b")
        # Whoever had it may have finished: then the file is called otherwise by now, or is gone.
        if place.exists() and os.path.samestat(place.stat(), os.fstat(file.fileno())):
            return place, file
        file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    """Let go by the system when the process ends, however that is. A flock: threads exclude each other too."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process computes the same features (%s): waiting for it", path.name)
        fcntl.flock(file, fcntl.LOCK_EX)


def _written(part: _Part) -> bytes:
    """Three numbers, a digest of all the rest, then indices, labels and values."""
    numbers = _NUMBERS.pack(part.done, *part.values.shape)
    body = b"".join(tensor_bytes(tensor) for tensor in (part.indices, part.labels, part.values))
    return numbers + hashlib.blake2b(numbers + body, digest_size=_DIGEST).digest() + body


def _whole_parts(file: BinaryIO) -> Iterator[_Part]:
    """From the start of a file to the first part that is torn or damaged, where the file is left."""
    size = os.fstat(file.fileno()).st_size
    while True:
        start = file.tell()
        head = file.read(_NUMBERS.size + _DIGEST)
        numbers, digest = head[: _NUMBERS.size], head[_NUMBERS.size :]
        done, rows, width = _NUMBERS.unpack(numbers) if len(digest) == _DIGEST else (0, 0, 0)
        length = rows * (16 + 4 * width)
        body = bytearray(file.read(length) if length <= size - file.tell() else b"")
        if not done or hashlib.blake2b(numbers + body, digest_size=_DIGEST).digest() != digest:
            file.seek(start)
            return
        indices, labels = torch.from_numpy(np.frombuffer(body, np.int64, 2 * rows).reshape(2, rows))
        values = torch.from_numpy(np.frombuffer(body, np.float32, rows * width, 16 * rows).reshape(rows, width))
        yield _Part(done, values, labels, indices)


def _forget_unused(folder: Path) -> None:
    """Entries that nobody has read or gone on with for long."""
    for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{UNFINISHED}")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
                path.unlink()
