"""Compute the features (the representation y) of every image of a data set once, and cache them on disk.

A data set's features are one file of batches, each with a digest. While the file grows it has another name, and one
process owns it. If that process is killed, the next one keeps the whole batches and continues after them.
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
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail import __version__
from vitrail.data.sources.annotated import find_bad_rows
from vitrail.data.sources.source import Source, Subset, compute_fingerprint
from vitrail.data.sources.table_cache import MAX_AGE_SECONDS, find_cache_folder
from vitrail.errors import DataError, WeightsError
from vitrail.inference.batches import InferenceOptions, open_model, require_few_broken, run_batches
from vitrail.inference.engine import Engine, Model
from vitrail.system import files
from vitrail.system.events import Progress
from vitrail.system.files import move_into_place
from vitrail.tasks.labels import LABEL
from vitrail.weights.digest import view_bytes

log = logging.getLogger("vitrail")

VERSION = 2
HASHED_IMAGES = 64
"""Images whose bytes are part of a data set's key."""
CHUNK = 1 << 16
"""Targets that are read at a time."""
SUFFIX, UNFINISHED = ".features", ".unfinished"
_HEADER = struct.Struct("<QQQ")
_DIGEST_BYTES = 16

Cache = str | Path | None
"""Where features are cached: a folder, the default folder ("auto"), or nowhere (None)."""


@dataclass(frozen=True)
class Features:
    """The features y and the labels of the images that could be read."""

    values: Tensor
    """(N, D) float32, on the CPU, in the order of the source."""
    labels: Tensor
    """(N,) int64; −1 for all if the source has another task than labels."""
    indices: Tensor
    """(N,) int64: the image's number in the source."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Features:
        """Return the selected rows; `rows` are row numbers or a mask."""
        return Features(self.values[rows], self.labels[rows], self.indices[rows])


def features_folder() -> Path:
    """Return the default cache folder, beside the cached tables of the data; VITRAIL_CACHE changes it."""
    return find_cache_folder().parent / "features"


def extract_features(
    model: Model | Engine,
    source: Source,
    options: InferenceOptions,
    cache: Cache = "auto",
    progress: Progress | None = None,
) -> Features:
    """Return the representation of every image. Images that cannot be read are left out and named in the log.

    Finished features are read from the cache, and unfinished ones are continued. The key of an entry holds the model's
    weights, the precision and the data: its number of images, classes, all labels or other targets, the rows of a table
    that cannot be used, up to 1,000 names and the bytes of 64 evenly spread images. The key does not change if other
    images are replaced under the same names, nor with the batch size or the device, which change the rounding. Entries
    that were not used for 30 days are deleted.

    Args:
        model: any model, or an engine, which is then not opened again; its head is not used.
        source: images with labels.
        options: device, precision, batch size, worker processes.
        cache: where features are cached.
        progress: called after each batch with the number of images done and of all images.

    Raises:
        ConfigError: the model is an exported file that gives logits alone.
        DataError: no image can be read, or too many are broken.
        WeightsError: the features are not finite.
    """
    engine = open_model(model, options)
    engine.check_request(logits=False, embeddings=True)
    rows = _FeatureRows(len(source))
    if cache is None:
        _compute(engine, source, options, rows, None, progress)
        return rows.features()
    folder = features_folder() if cache == "auto" else Path(cache)
    path = folder / f"{_make_key(engine, source)}{SUFFIX}"
    if (features := _read_entry(path, len(source))) is not None:
        require_few_broken(len(source) - len(features), len(source))
        return features
    with contextlib.closing(_CacheDraft(path)) as draft:
        # Another process may have finished while this one waited.
        if (features := _read_entry(path, len(source))) is not None:
            draft.discard()
            require_few_broken(len(source) - len(features), len(source))
            return features
        for batch in draft.read_batches():
            rows.add(batch)
        if rows.done:
            log.info("%d of %d images were computed before", rows.done, len(source))
        _compute(engine, source, options, rows, draft, progress)
        features = rows.features()
        require_few_broken(len(source) - len(features), len(source))  # those that an earlier start computed count too
        draft.finish()
    return features


class _FeatureBatch(NamedTuple):
    """The features of one batch."""

    done: int
    """Images of the source that are done after this batch, readable or not."""
    values: Tensor
    labels: Tensor
    indices: Tensor


class _FeatureRows:
    """Collects batches in memory that is allocated once."""

    def __init__(self, most: int) -> None:
        self.most, self.done, self.count = most, 0, 0
        self.values = torch.empty(0, 0)
        self.labels, self.indices = torch.empty(2, most, dtype=torch.int64).unbind()

    def add(self, batch: _FeatureBatch) -> None:
        if not self.done:
            self.values = torch.empty(self.most, batch.values.shape[1])
        place = slice(self.count, self.count + len(batch.labels))
        self.values[place], self.labels[place], self.indices[place] = batch.values, batch.labels, batch.indices
        self.done, self.count = batch.done, place.stop

    def features(self) -> Features:
        if not self.count:
            raise DataError("none of the images can be read: `vitrail data check` names what is wrong")
        return Features(self.values[: self.count], self.labels[: self.count], self.indices[: self.count])


def _compute(
    engine: Engine,
    source: Source,
    options: InferenceOptions,
    rows: _FeatureRows,
    draft: _CacheDraft | None,
    progress: Progress | None,
) -> None:
    """Compute the features that `rows` does not have yet, and add them to `rows` and to `draft`."""
    start = rows.done
    if start and start == len(source):
        return
    rest = Subset(source, np.arange(start, len(source))) if start else source

    def report_progress(done: int, total: int) -> None:
        if progress is not None:
            progress(start + done, start + total)

    for batch, (_, computed) in run_batches(
        engine, rest, options, progress=report_progress, logits=False, embeddings=True
    ):
        assert computed is not None
        mask = batch.mask
        done = rows.done + int((batch.indices >= 0).sum())
        values = computed.cpu()[mask].float()
        if not torch.isfinite(values).all():
            raise WeightsError("the features are not finite: the weights are damaged, or the precision is too low")
        labels = batch.targets.get(LABEL, torch.full_like(batch.indices, -1))  # other tasks have no labels
        part = _FeatureBatch(done, values, labels[mask], batch.indices[mask] + start)
        rows.add(part)
        if draft is not None:
            draft.add(part)


def _make_key(engine: Engine, source: Source) -> str:
    key = f"{VERSION} {__version__} {engine.compute_digest()} {_digest_data(source)}"
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _digest_data(source: Source) -> str:
    """Return a digest of the fingerprint, all targets, which are cheap to read, and the bytes of some images."""
    count = len(source)
    digest = hashlib.blake2b(compute_fingerprint(source).encode(), digest_size=16)
    for start in range(0, count, CHUNK):
        place = start, min(start + CHUNK, count)
        targets = source.targets(*place)
        for values in (source.labels(*place), *(targets[name] for name in sorted(targets))):
            digest.update(np.ascontiguousarray(values).tobytes())
    digest.update(np.array(sorted(find_bad_rows(source)), np.int64).tobytes())
    for index in np.unique(np.linspace(0, max(count - 1, 0), HASHED_IMAGES).astype(np.int64))[:count].tolist():
        try:
            content = source.read(index).content
        except Exception as error:  # reported later, when the features are computed
            content = type(error).__name__.encode()
        digest.update(view_bytes(content) if isinstance(content, Tensor) else content)
    return digest.hexdigest()


def _read_entry(path: Path, count: int) -> Features | None:
    """Return the features of a finished entry; None if it is missing or damaged. A damaged entry is deleted."""
    rows = _FeatureRows(count)
    try:
        with path.open("rb") as file:
            for batch in _read_batches(file):
                rows.add(batch)
        if rows.done == count:
            with contextlib.suppress(OSError):  # the cache may be read-only
                os.utime(path)
            return rows.features()
        log.warning("%s is damaged: the features are computed anew", path)
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be read (%s): the features are computed anew", path, error.strerror or error)
    return None


class _CacheDraft:
    """An unfinished entry of the cache, locked for this process.

    If it cannot be written, a warning is logged and writing stops: a full disk is no reason to lose the features.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, path
        self.file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.place, self.file = _lock_draft(path)
        except OSError as error:
            self._give_up(error)

    def read_batches(self) -> Iterator[_FeatureBatch]:
        """Yield the batches that are whole, and cut off what follows them."""
        if self.file is not None:
            self.file.seek(0)
            yield from _read_batches(self.file)
            self._try(lambda file: file.truncate())

    def add(self, batch: _FeatureBatch) -> None:
        """Append a batch and flush it, so that it survives the process, though not a power failure."""
        self._try(lambda file: (file.write(_pack_batch(batch)), file.flush()))

    def finish(self) -> None:
        """Give the file its final name, after everything is on the disk."""
        self._try(self._rename)

    def discard(self) -> None:
        """Remove the file: another process has finished the entry."""
        self._try(self._remove)

    def close(self) -> None:
        """Close the file and leave it for the next process."""
        if self.file is not None:
            self.file.close()

    def _remove(self, file: BinaryIO) -> None:
        if files.IS_WINDOWS:
            file.close()  # Windows removes no open file
        self.place.unlink()

    def _rename(self, file: BinaryIO) -> None:
        if files.IS_WINDOWS:
            file.close()  # nor renames one
        move_into_place(self.place, self.path)
        _delete_unused(self.path.parent)

    def _try(self, action: Callable[[BinaryIO], object]) -> None:
        try:
            if self.file is not None:
                action(self.file)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the features are not kept in %s: %s", self.path.parent, error.strerror or error)
        if self.file is not None:
            if not files.IS_WINDOWS:
                with contextlib.suppress(OSError):
                    self.place.unlink()
            with contextlib.suppress(OSError):
                self.file.close()  # writes what it holds, and fails again
            with contextlib.suppress(OSError):
                self.place.unlink(missing_ok=True)
            self.file = None


def _lock_draft(path: Path) -> tuple[Path, BinaryIO]:
    """Open the unfinished entry once no other process owns it; a private one on systems without locks."""
    place = path.with_suffix(UNFINISHED)
    while True:
        file = place.open("a+b")
        try:
            _lock(file, path)
        except (ImportError, OSError):
            file.close()
            with contextlib.suppress(OSError):
                if not place.stat().st_size:
                    place.unlink()
            place = path.with_suffix(f".{secrets.token_hex(4)}{UNFINISHED}")
            return place, place.open("a+b")
        # The former owner may have finished: then the file was renamed or deleted, and the lock is on another file.
        if place.exists() and os.path.samestat(place.stat(), os.fstat(file.fileno())):
            return place, file
        file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock a file until the process ends, in whatever way. A flock also excludes other threads."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process computes the same features (%s): waiting for it", path.name)
        fcntl.flock(file, fcntl.LOCK_EX)


def _pack_batch(batch: _FeatureBatch) -> bytes:
    """Return the bytes of a batch: a header of three numbers, a digest of all the rest, indices, labels and values."""
    numbers = _HEADER.pack(batch.done, *batch.values.shape)
    body = b"".join(view_bytes(tensor) for tensor in (batch.indices, batch.labels, batch.values))
    return numbers + hashlib.blake2b(numbers + body, digest_size=_DIGEST_BYTES).digest() + body


def _read_batches(file: BinaryIO) -> Iterator[_FeatureBatch]:
    """Yield batches up to the first that is torn or damaged, and leave the file at its start."""
    size = os.fstat(file.fileno()).st_size
    while True:
        start = file.tell()
        head = file.read(_HEADER.size + _DIGEST_BYTES)
        numbers, digest = head[: _HEADER.size], head[_HEADER.size :]
        done, rows, width = _HEADER.unpack(numbers) if len(digest) == _DIGEST_BYTES else (0, 0, 0)
        length = rows * (16 + 4 * width)
        body = bytearray(file.read(length) if length <= size - file.tell() else b"")
        if not done or hashlib.blake2b(numbers + body, digest_size=_DIGEST_BYTES).digest() != digest:
            file.seek(start)
            return
        indices, labels = torch.from_numpy(np.frombuffer(body, np.int64, 2 * rows).reshape(2, rows))
        values = torch.from_numpy(np.frombuffer(body, np.float32, rows * width, 16 * rows).reshape(rows, width))
        yield _FeatureBatch(done, values, labels, indices)


def _delete_unused(folder: Path) -> None:
    """Delete entries that no process has used for a long time."""
    for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{UNFINISHED}")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
                path.unlink()
