"""Tar shards in the WebDataset layout: `key.jpg` beside `key.cls`, many samples to a file.

An index of where each image starts is built once; then images are read by offset, in any order.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.image_files import IMAGE_SUFFIXES
from vitrail.data.sources.source import MOST_BYTES, Sample, Source, make_printable, read_file
from vitrail.data.sources.table_cache import MappedTable, load_or_build_table
from vitrail.errors import DataError
from vitrail.system.files import describe_reason, is_out_of_handles, open_regular_file

RECORD_DTYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<i4")])
NO_LABEL = -1
HEADER_BYTES = 512
MOST_TEXT_BYTES = 1 << 20
"""What is read of a .cls or .json."""
MOST_OPEN = 64
INDEX = "index"
MANIFEST = "dataset.json"
"""The file that `vitrail data pack` writes beside shards; it names their index, so that they need not be scanned."""


class TarSource(Source):
    """Images inside tar files, read by offset."""

    block, window = 64, 4096

    def __init__(self, paths: Sequence[Path], classes: tuple[str, ...], needs_labels: bool = True) -> None:
        self.paths, self.classes, self.needs_labels = tuple(paths), classes, needs_labels
        self.table, self.column = open_packed_index(self.paths) or (self._scan_shards(), INDEX)
        self._open: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def _scan_shards(self) -> MappedTable:
        what = "\n".join(str(path.resolve()) for path in self.paths)
        sizes = "\n".join(f"{(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in self.paths)
        fingerprint = json.dumps([sizes, self.classes])
        return load_or_build_table(
            f"tar {what}", fingerprint, lambda folder: _build_index(self.paths, self.classes, folder)
        )

    def __len__(self) -> int:
        return len(self.table[self.column])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            file.close()

    def read(self, index: int) -> Sample:
        record = self._record(index)
        content = self._read(int(record["shard"]), int(record["offset"]), int(record["length"]))
        if record["label"] == NO_LABEL and self.needs_labels:
            raise DataError("has no label: expected a .cls or .json beside it")
        return Sample(content, int(record["label"]))

    def name(self, index: int) -> str:
        """Return the shard and the name in it, which is in the header before the image."""
        record = self._record(index)
        path = self.paths[record["shard"]]
        header = self._read(int(record["shard"]), int(record["offset"]) - HEADER_BYTES, 100)
        return f"{make_printable(path)}:{make_printable(os.fsdecode(header.split(bytes(1))[0]))}"

    def identity(self, index: int) -> str:
        return self.name(index).rpartition("/")[2]

    def labels(self, start: int, stop: int) -> Indices:
        labels: Indices = self.table[self.column]["label"][start:stop].astype(np.int64)
        return labels

    def _record(self, index: int) -> Any:
        record = self.table[self.column][index]
        if record["shard"] >= len(self.paths) or record["offset"] < HEADER_BYTES:
            raise DataError("the index beside the shards is damaged: delete it, and it will be rebuilt")
        return record

    def _read(self, shard: int, offset: int, length: int) -> bytes:
        if length > MOST_BYTES:
            raise DataError(f"{length:,} bytes, more than the {MOST_BYTES:,} allowed")
        try:
            file = self._open_file(shard)
            file.seek(offset)
            content: bytes = file.read(length)
        except OSError as error:
            if is_out_of_handles(error):  # the shard may well be whole
                raise
            raise DataError(f"cannot be read: {describe_reason(error)}") from None
        if len(content) != length:
            raise DataError(f"{make_printable(self.paths[shard])} has become shorter")
        return content

    def _open_file(self, shard: int) -> Any:
        """Return an open file of this process: processes must not share positions. Few files stay open."""
        key = shard, os.getpid()
        if key not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[key] = open_regular_file(self.paths[shard], buffering=0)
        self._open.move_to_end(key)
        return self._open[key]


def open_packed_index(paths: Sequence[Path]) -> tuple[MappedTable, str] | None:
    """Return the table and column that `vitrail data pack` wrote, if they are about exactly these shards."""
    folder = paths[0].parent
    try:
        parts = json.loads(read_file(folder / MANIFEST))["splits"].values()
        sizes = {folder / shard["name"]: shard["bytes"] for part in parts for shard in part["shards"]}
        names = {part["index"]: [folder / shard["name"] for shard in part["shards"]] for part in parts}
        column = next((Path(index).stem for index, shards in names.items() if index and shards == list(paths)), None)
        if column is None or any(path.stat().st_size != sizes[path] for path in paths):
            return None
        table = MappedTable(folder)
        return (table, column) if table[column].dtype == RECORD_DTYPE and table[column].ndim == 1 else None
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        DataError,
    ):  # written by another program
        return None


def _build_index(paths: Sequence[Path], classes: tuple[str, ...], folder: Path) -> None:
    """Write the index shard by shard, so that only one shard's records are in memory."""
    numbers = {name: number for number, name in enumerate(classes)}
    with (folder / "records").open("wb") as file:
        for shard, path in enumerate(paths):
            records = [(shard, offset, length, label) for offset, length, label in scan_tar(path, numbers)]
            np.array(records, dtype=RECORD_DTYPE).tofile(file)
    size = (folder / "records").stat().st_size
    records_on_disk = np.memmap(folder / "records", RECORD_DTYPE, "r") if size else np.empty(0, RECORD_DTYPE)
    np.save(folder / f"{INDEX}.npy", records_on_disk)
    del records_on_disk
    (folder / "records").unlink()


def scan_tar(path: Path, numbers: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (offset, length, label) of each image in a tar; raise a DataError if the tar is damaged."""
    for offset, length, texts in _scan_samples(path):
        label = NO_LABEL
        for suffix, text in texts:
            label = _read_label(text, suffix, numbers)
        yield offset, length, label


def scan_tar_records(path: Path) -> Iterator[str]:
    """Yield the text of the .json beside each image in a tar, in the order of `scan_tar`; empty if there is none."""
    for _, _, texts in _scan_samples(path):
        yield next((text for suffix, text in texts if suffix == "json"), "")


def _scan_samples(path: Path) -> Iterator[tuple[int, int, list[tuple[str, str]]]]:
    """Yield (offset, length, texts) of each image in a tar; texts are those of its .cls and .json, with the suffix."""
    try:
        with open_regular_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            key, image, texts, end = None, None, list[tuple[str, str]](), 0
            for member in tar:
                end = member.offset_data + -(-member.size // HEADER_BYTES) * HEADER_BYTES
                if not member.isfile():
                    continue
                member_key, suffix = _split_name(member.name)
                if member_key != key:
                    if image is not None:
                        yield *image, texts
                    key, image, texts = member_key, None, []
                if f".{suffix}" in IMAGE_SUFFIXES and image is None:  # key.seg.png is not the image of key
                    image = (member.offset_data, min(member.size, MOST_BYTES + 1))
                elif suffix in ("cls", "json"):
                    texts.append((suffix, _read_text(tar, member)))
            if image is not None:
                yield *image, texts
        _check_tar_end(path, end)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{make_printable(path)} is not a whole tar file: {error}") from None


def _check_tar_end(path: Path, end: int) -> None:
    """Check that only zeros follow the last member; tarfile takes a damaged header for the end."""
    with open_regular_file(path) as file:
        file.seek(end)
        rest = 0
        while chunk := file.read(1 << 20):
            rest += len(chunk)
            if chunk.count(0) != len(chunk):
                raise DataError(f"{make_printable(path)} is damaged, or several tars in one, at byte {end:,}")
    if rest < HEADER_BYTES:
        raise DataError(f"{make_printable(path)} is cut short: it ends without an end mark")


def _split_name(name: str) -> tuple[str, str]:
    """Return the name up to its first dot, and the rest, as WebDataset does."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}/{stem}", suffix.lower()


def _read_text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return file.read(MOST_TEXT_BYTES).decode("utf-8", "replace").strip() if file else ""


def _read_label(text: str, suffix: str, numbers: dict[str, int]) -> int:
    """Return the label of a file with a number or a class name; `NO_LABEL` for anything else."""
    if suffix == "json":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return NO_LABEL
        text = (
            str(next((value[key] for key in ("label", "cls", "class") if key in value), ""))
            if isinstance(value, dict)
            else ""
        )
    return int(text) if text.isdecimal() and len(text) < 10 else numbers.get(text, NO_LABEL)
