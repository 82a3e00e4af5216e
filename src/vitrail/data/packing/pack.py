"""A data set as shards: mixed once, read in strides ever after.

Samples are prepared by many processes and written by this one, in an order that a seed decides. So the same data and
options give the same bytes, whatever the number of processes, and however often it was stopped and went on.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail import __version__
from vitrail.data.check.check import EXTENSIONS, Progress, file_kind
from vitrail.data.open import Data, open_splits
from vitrail.data.order import Order
from vitrail.data.packing.pack_journal import BrokenRecord, PackJournal, read_finished_pack
from vitrail.data.packing.writers import WRITERS, PackedSample, ShardWriter
from vitrail.data.parallel import map_samples, resolve_worker_count
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.shards import MANIFEST
from vitrail.data.sources.source import Source, make_printable
from vitrail.data.transforms.decode import decode_to_pillow
from vitrail.errors import ConfigError, DataError, did_you_mean

AT_ONCE = 16
"""Samples that a process prepares together."""
HASHED_AT_ONCE = 4096
QUALITY = 95
LARGEST_JPEG = 65_500
"""Pixels of a side."""
LISTED = 50
"""Broken samples that an error names."""


def pack_data(
    data: Data,
    out: str | Path,
    *,
    split: str | None = None,
    format: str = "tar",
    shard_mb: float = 100,
    resize: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    skip_broken: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a data set as shards; what its dataset.json holds comes back.

    Args:
        data: as `open_data` takes it.
        out: a new or empty folder; or one where the same was begun, or done, before.
        split: one split; every one that is there if None.
        format: "tar", as WebDataset has it; or "parquet", as Hugging Face does.
        shard_mb: about so many megabytes in a shard.
        resize: images whose shorter side is longer become JPEGs with a shorter side of so many pixels. All others stay
            as they are, byte for byte.
        shuffle: mix the samples, so that a shard is not made of one class.
        seed: of the mixing.
        skip_broken: leave out samples that cannot be read, and list them in dataset.json. Otherwise they are an error.
        workers: processes; one for each core if None.
        progress: told how far it is.
    """
    if format not in WRITERS:
        raise ConfigError(f"format = {format!r}{did_you_mean(format, WRITERS) or ';'} there are {', '.join(WRITERS)}")
    if shard_mb <= 0 or (resize is not None and resize < 1):
        raise ConfigError(f"shard_mb = {shard_mb}, resize = {resize}: give numbers above 0")
    workers, out, folder = resolve_worker_count(workers), Path(out).expanduser(), _folder(data)
    if folder and Path(str(data)).expanduser().is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{out} lies inside of {data}, and would become a part of it: give another folder")
    sources = open_splits(data, split)
    plan = {
        "vitrail": __version__,
        "source": _title(data),
        "options": {"format": format, "shard_mb": float(shard_mb), "resize": resize, "seed": seed if shuffle else None},
        "classes": _classes(sources),
        "samples": {name: _identity(source, folder) for name, source in sources.items()},
        "sizes": {name: _sizes(source) for name, source in sources.items()},
    }
    try:
        if (out / MANIFEST).exists():
            manifest = read_finished_pack(out, plan)
            _refuse({split: part["broken"] for split, part in manifest["splits"].items()}, skip_broken)
            return manifest
        with PackJournal(out, plan) as work:
            before, total = 0, sum(map(len, sources.values()))
            for name, source in sources.items():
                order = Order(len(source), seed, source.block, source.window) if shuffle else None
                jobs = _jobs(order, work.position(name), len(source))
                crew = min(workers, max(-(-len(source) // AT_ONCE), 1))
                with closing(map_samples(partial(_prepared, resize=resize), source, jobs, crew)) as prepared:
                    named = _named(prepared, source, folder)
                    for done in _write(work, name, named, int(shard_mb * 1_000_000), skip_broken):
                        if progress:
                            progress(before + done, total)
                before += len(source)
            _refuse(work.broken, skip_broken)
            return work.finish()
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}; the same command will go on") from error


def _jobs(order: Order | None, start: int, count: int) -> Iterator[list[int]]:
    """The samples from a place in the order on, some at a time."""
    for first in range(start, count, AT_ONCE):
        places = np.arange(first, min(first + AT_ONCE, count))
        yield (order(places)[1] if order else places).tolist()


def _named(
    prepared: Iterator[tuple[Sequence[int], list[PackedSample | str]]], source: Source, folder: Path | None
) -> Iterator[list[PackedSample | BrokenRecord]]:
    """What cannot be used has a name beside the reason."""
    for job, answers in prepared:
        yield [
            {"name": _short(source.display_name(index), folder), "reason": answer}
            if isinstance(answer, str)
            else answer
            for index, answer in zip(job, answers, strict=True)
        ]


def _write(
    work: PackJournal, split: str, prepared: Iterator[list[PackedSample | BrokenRecord]], most: int, skip_broken: bool
) -> Iterator[int]:
    """The shards of a split that are not there yet; after each handful of samples, how many are done."""
    position, key, broken = work.position(split), work.samples(split), work.broken[split]
    writer: ShardWriter | None = None
    try:
        for samples in prepared:
            for sample in samples:
                if isinstance(sample, dict):
                    broken.append(sample)
                elif skip_broken or not broken:  # else the rest is only looked at: all are named, and can be mended
                    if writer and writer.size + len(sample.content) > most:
                        work.keep(writer, split, key - work.samples(split), position)
                        writer = None
                    writer = writer or work.begin(split)
                    writer.add(f"{key:09}", sample)
                    key += 1
                position += 1
            yield position
        if writer and (skip_broken or not broken):
            work.keep(writer, split, key - work.samples(split), position)
            writer = None
    finally:
        if writer:
            writer.close()


def _prepared(source: Source, index: int, resize: int | None) -> PackedSample:
    """A sample as it will be written. It is decoded even where its bytes stay, so that nothing broken is packed."""
    sample = source.read_checked(index)
    content = sample.content
    if isinstance(content, Tensor):
        image, kind = _image(content), ""
    else:
        image, kind = decode_to_pillow(content), file_kind(content)[0]
    if resize is not None and min(image.size) > resize:
        image = _smaller(image, resize)
        kind = "JPEG" if max(image.size) <= LARGEST_JPEG else "PNG"
        content = _encoded(image, kind)
    elif isinstance(content, Tensor):
        kind = "PNG"
        content = _encoded(image, kind)
    return PackedSample(content, EXTENSIONS[kind][0], sample.label)


def _image(pixels: Tensor) -> Image.Image:
    """(1 or 3, height, width) uint8 → grey or RGB."""
    if pixels.shape[0] not in (1, 3):
        raise DataError(f"{pixels.shape[0]} channels: 1 or 3 can be packed")
    values = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(values[..., 0] if values.shape[2] == 1 else values))


def _smaller(image: Image.Image, shorter: int) -> Image.Image:
    """With a shorter side of so many pixels, in the same shape; Pillow's filters are wide enough not to alias."""
    scaled = [max((2 * side * shorter // min(image.size) + 1) // 2, shorter) for side in image.size]
    return image.resize((scaled[0], scaled[1]), Image.Resampling.BICUBIC)


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Colours at full resolution: halving them would cost more than the quality says.
    image.save(buffer, kind, **({"quality": QUALITY, "subsampling": 0} if kind == "JPEG" else {}))
    return buffer.getvalue()


def _classes(sources: dict[str, Source]) -> list[str]:
    """One list for all splits, or the labels would not mean the same."""
    lists = {source.classes for source in sources.values()}
    if len(lists) > 1:
        raise DataError(
            f"{', '.join(sources)} have different classes, so their labels do not agree: `vitrail data check` tells "
            "how; or pack one split at a time"
        )
    return list(lists.pop())


def _identity(source: Source, folder: Path | None) -> dict[str, Any]:
    """Which samples: their number, and a hash of their names and labels."""
    digest = hashlib.sha256()
    for start in range(0, len(source), HASHED_AT_ONCE):
        stop = min(start + HASHED_AT_ONCE, len(source))
        names = (_short(source.display_name(index), folder) for index in range(start, stop))
        digest.update(source.labels(start, stop).astype("<i8").tobytes() + "\n".join(names).encode())
    return {"number": len(source), "sha256": digest.hexdigest()}


def _sizes(source: Source) -> str:
    """A hash of the sizes of the files: tells whether they are still those that were packed."""
    digest = hashlib.sha256()
    paths = map(source.path, range(len(source))) if isinstance(source, FileSource) else getattr(source, "paths", ())
    for path in paths:
        digest.update(f"{_size(path)} ".encode())
    return digest.hexdigest()


def _size(path: Path) -> int:
    """Bytes; −1 where it cannot be told."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _folder(data: Data) -> Path | None:
    """What the names of samples begin with, where they are paths."""
    if not isinstance(data, str | Path):
        return None
    path = Path(data).expanduser()
    try:
        return path if path.is_dir() else path.parent if path.is_file() else None
    except OSError:  # which opening it will tell
        return None


def _short(name: str, folder: Path | None) -> str:
    """A name without the folder that the data happens to lie in."""
    return name.removeprefix(f"{make_printable(folder)}/") if folder else name


def _title(data: Data) -> str:
    """The name of a data set, on whatever machine it lies."""
    if isinstance(data, str | Path):
        return make_printable(Path(data).expanduser().resolve().name) if _folder(data) else str(data)
    return type(data).__name__


def _refuse(broken: dict[str, list[BrokenRecord]], skip_broken: bool) -> None:
    """An error that names what is broken, unless it may be left out."""
    found = [sample for samples in broken.values() for sample in samples]
    if not found or skip_broken:
        return
    samples = "1 sample" if len(found) == 1 else f"{len(found)} samples"
    lines = [f"{samples} cannot be packed; --skip-broken (skip_broken=True) would leave them out:"]
    lines += [f"  {sample['name']}: {sample['reason']}" for sample in found[:LISTED]]
    if len(found) > LISTED:
        lines.append(f"  and {len(found) - LISTED} more; `vitrail data check` names all")
    raise DataError("\n".join(lines))
