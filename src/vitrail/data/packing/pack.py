"""Write a data set as shards, which are shuffled once and then read in large pieces.

Many processes prepare samples, and this one writes them, in an order that a seed decides. So the same data and options
give the same bytes, for any number of processes and after any number of stops.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail import __version__
from vitrail.data.locate import find_local_path
from vitrail.data.open import Data, add_labels_from, add_task, name_data, open_splits
from vitrail.data.order import Order
from vitrail.data.packing.pack_journal import BrokenRecord, PackJournal, Plan, read_finished_pack
from vitrail.data.packing.pack_result import PackResult
from vitrail.data.packing.typed_cells import type_cells
from vitrail.data.packing.without_list import hash_list, leave_out, read_list
from vitrail.data.packing.writers import WRITERS, PackedSample, ShardWriter
from vitrail.data.parallel import map_samples, resolve_worker_count
from vitrail.data.sample_names import find_data_folder, identify_sample, shorten_name
from vitrail.data.sources.annotated import LABELS, AnnotatedSource
from vitrail.data.sources.flat_folder import FlatFolder
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.shards import MANIFEST
from vitrail.data.sources.source import Source, Subset, make_printable
from vitrail.data.task_data import TaskData, recognise_data
from vitrail.data.transforms.decode import EXTENSIONS, decode_to_pillow, read_format
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.system.events import OnEvent, open_listener, send_progress
from vitrail.system.files import describe_reason
from vitrail.tasks.task import Task

JOB_SIZE = 16
"""Samples in a job of a process."""
HASH_CHUNK = 4096
JPEG_QUALITY = 95
LARGEST_JPEG = 65_500
"""The longest side of a JPEG in pixels."""
BROKEN_SHOWN = 50
"""How many broken samples an error lists."""


def pack_data(
    data: Data,
    out: str | Path,
    *,
    split: str | None = None,
    labels_from: str | None = None,
    task: Task | str | None = None,
    labels: str | Sequence[str] | None = None,
    format: str = "tar",
    shard_mb: float = 100,
    resize: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    skip_broken: bool = False,
    without: str | Path | None = None,
    workers: int | None = None,
    on_event: OnEvent | None = None,
) -> PackResult:
    """Write a data set as shards. If it was stopped before, it continues; if it was finished, it only checks.

    Events: progress of the task "packing".

    Args:
        data: anything that `open_data` accepts.
        out: a new or empty folder, or one in which the same data set was packed before.
        split: one split; None packs all.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        task: "labels", "tags", "numbers", "levels" or "attributes"; None to recognise it.
        labels: the columns to learn, such as "colour,shape"; None to find them.
        format: "tar" (WebDataset layout) or "parquet" (Hugging Face layout).
        shard_mb: the approximate size of a shard in megabytes.
        resize: an image with a longer shorter side becomes a JPEG with a shorter side of this many pixels. All other
            images keep their bytes.
        shuffle: mix the samples, so that a shard does not consist of one class.
        seed: decides the order.
        skip_broken: leave out samples that cannot be read, and list them in dataset.json, instead of failing.
        without: a file with the names of samples to leave out, one per line: what `check_data` writes as `names`.
        workers: processes; one per core if None.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Returns:
        The shards, what was left out, and the contents of dataset.json.

    Raises:
        ConfigError: an option is wrong, `without` names a sample that the data does not have, or `out` holds something
            else.
        DataError: a sample cannot be read and `skip_broken` is False, or the shards cannot be written.
    """
    _check_options(format, shard_mb, resize)
    data = recognise_data(add_task(add_labels_from(data, labels_from), task, labels))
    workers, out, folder = resolve_worker_count(workers), Path(out).expanduser(), find_data_folder(data)
    if folder and find_local_path(name_data(data)).is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{out} lies inside {name_data(data)} and would become a part of it: give another folder")
    names = None if without is None else read_list(Path(without).expanduser())
    whole = open_splits(data, split)
    sources = whole if names is None else leave_out(data, whole, names, Path(without or "").name)
    options = {"format": format, "shard_mb": float(shard_mb), "resize": resize, "seed": seed if shuffle else None}
    plan = _make_plan(data, sources, folder, options if names is None else {**options, "without": hash_list(names)})
    plan["sizes"] = {name: _hash_sizes(source) for name, source in whole.items()}
    if names is not None:
        plan["without"] = {name: len(whole[name]) - len(source) for name, source in sources.items()}
    try:
        if (out / MANIFEST).exists():
            manifest = read_finished_pack(out, plan)
            _raise_if_broken({split: part["broken"] for split, part in manifest["splits"].items()}, skip_broken)
            return PackResult.of(out, manifest)
        with open_listener(on_event) as listener, PackJournal(out, plan) as journal:
            progress = send_progress(listener, "packing")
            finished, total = 0, sum(map(len, sources.values()))
            progress(finished, total)
            for name, source in sources.items():
                for done in _pack_split(journal, name, source, folder, skip_broken, workers):
                    progress(finished + done, total)
                finished += len(source)
            _raise_if_broken(journal.broken, skip_broken)
            return PackResult.of(out, journal.finish())
    except OSError as error:
        raise DataError(f"{out} cannot be written: {describe_reason(error)}; the same command will go on") from error


def _check_options(format: str, shard_mb: float, resize: int | None) -> None:
    if format not in WRITERS:
        raise ConfigError(f"format = {format!r}{did_you_mean(format, WRITERS) or ';'} there are {', '.join(WRITERS)}")
    if shard_mb <= 0 or (resize is not None and resize < 1):
        raise ConfigError(f"shard_mb = {shard_mb}, resize = {resize}: give numbers above 0")


def _make_plan(data: Data, sources: dict[str, Source], folder: Path | None, options: dict[str, Any]) -> Plan:
    plan = {
        "vitrail": __version__,
        "source": _choose_title(data),
        "options": options,
        "classes": _agree_on_classes(sources),
        "samples": {name: _identify_samples(source, folder) for name, source in sources.items()},
    }
    task = _agree_on_task(sources)
    return plan if task is None else {**plan, "task": task.model_dump(mode="json")}


def _pack_split(
    journal: PackJournal, split: str, source: Source, folder: Path | None, skip_broken: bool, workers: int
) -> Iterator[int]:
    """Prepare samples in many processes and write them in this one; yield how many are done."""
    options = journal.plan["options"]
    seed, most_bytes = options["seed"], int(options["shard_mb"] * 1_000_000)
    order = None if seed is None else Order(len(source), seed, source.block, source.window)
    jobs = _list_jobs(order, journal.next_position(split), len(source))
    processes = min(workers, max(-(-len(source) // JOB_SIZE), 1))
    prepare = partial(_prepare_sample, resize=options["resize"])
    with closing(map_samples(prepare, source, jobs, processes)) as results:
        yield from _write_shards(journal, split, _name_broken(results, source, folder), most_bytes, skip_broken)


def _list_jobs(order: Order | None, start: int, count: int) -> Iterator[list[int]]:
    """Yield the sample numbers from a position in the order on, some at a time."""
    for first in range(start, count, JOB_SIZE):
        places = np.arange(first, min(first + JOB_SIZE, count))
        yield (order(places)[1] if order else places).tolist()


def _name_broken(
    results: Iterator[tuple[Sequence[int], list[PackedSample | str]]], source: Source, folder: Path | None
) -> Iterator[list[PackedSample | BrokenRecord]]:
    """Yield the samples of each job; a broken one is a record of its name and the reason."""
    for job, samples in results:
        yield [
            {
                "name": shorten_name(source.display_name(index), folder),
                "reason": sample.removeprefix(f"{source.display_name(index)}: "),
            }
            if isinstance(sample, str)
            else sample
            for index, sample in zip(job, samples, strict=True)
        ]


def _write_shards(
    journal: PackJournal,
    split: str,
    prepared: Iterator[list[PackedSample | BrokenRecord]],
    most_bytes: int,
    skip_broken: bool,
) -> Iterator[int]:
    """Write the missing shards of a split; after each job, yield how many samples are done."""
    position, key, broken = journal.next_position(split), journal.count_samples(split), journal.broken[split]
    writer: ShardWriter | None = None
    try:
        for samples in prepared:
            for sample in samples:
                if isinstance(sample, dict):
                    broken.append(sample)
                elif skip_broken or not broken:  # otherwise the rest is only checked, to list all that is broken
                    if writer and writer.size + len(sample.content) > most_bytes:
                        journal.add_shard(writer, split, key - journal.count_samples(split), position)
                        writer = None
                    writer = writer or journal.start_shard(split)
                    writer.add(f"{key:09}", sample)
                    key += 1
                position += 1
            yield position
        if writer and (skip_broken or not broken):
            journal.add_shard(writer, split, key - journal.count_samples(split), position)
            writer = None
    finally:
        if writer:
            writer.close()


def _prepare_sample(source: Source, index: int, resize: int | None) -> PackedSample:
    """Return a sample as it will be written; it is always decoded, so that nothing broken is packed."""
    sample = source.read_checked(index)
    content = sample.content
    if isinstance(content, Tensor):
        image, kind = _to_pillow(content), ""
    else:
        image, kind = decode_to_pillow(content), read_format(content)[0]
    if resize is not None and min(image.size) > resize:
        image = _shrink(image, resize)
        kind = "JPEG" if max(image.size) <= LARGEST_JPEG else "PNG"
        content = _encode(image, kind)
    elif isinstance(content, Tensor):
        kind = "PNG"
        content = _encode(image, kind)
    cells = None if source.task.kind == LABELS else type_cells(source.task, source.cells(index))
    return PackedSample(content, EXTENSIONS[kind][0], sample.label, cells)


def _to_pillow(pixels: Tensor) -> Image.Image:
    """Convert (1 or 3, height, width) uint8 pixels to a grey or RGB image."""
    if pixels.shape[0] not in (1, 3):
        raise DataError(f"{pixels.shape[0]} channels: 1 or 3 can be packed")
    values = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(values[..., 0] if values.shape[2] == 1 else values))


def _shrink(image: Image.Image, shorter: int) -> Image.Image:
    """Resize to a shorter side of `shorter` pixels; Pillow's filters do not alias."""
    scaled = [max((2 * side * shorter // min(image.size) + 1) // 2, shorter) for side in image.size]
    return image.resize((scaled[0], scaled[1]), Image.Resampling.BICUBIC)


def _encode(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Colours at full resolution: halving them would lose more than the JPEG quality does.
    image.save(buffer, kind, **({"quality": JPEG_QUALITY, "subsampling": 0} if kind == "JPEG" else {}))
    return buffer.getvalue()


def _agree_on_classes(sources: dict[str, Source]) -> list[str]:
    """Return the classes, which must be the same for all splits, or labels would not agree."""
    lists = {source.classes for source in sources.values()}
    if len(lists) > 1:
        raise DataError(
            f"{', '.join(sources)} have different classes, so their labels do not agree: `vitrail data check` tells "
            "how; or pack one split at a time"
        )
    return list(lists.pop())


def _agree_on_task(sources: dict[str, Source]) -> Task | None:
    """Return the task of all splits; None for one label an image."""
    tasks = [source.task for source in sources.values()]
    if any(task.kind != tasks[0].kind or (task.kind != LABELS and task != tasks[0]) for task in tasks):
        raise DataError(f"{', '.join(sources)} have different tasks: pack one split at a time")
    return None if tasks[0].kind == LABELS else tasks[0]


def _identify_samples(source: Source, folder: Path | None) -> dict[str, Any]:
    """Return the number of samples and a hash of their names and labels."""
    digest = hashlib.sha256()
    for start in range(0, len(source), HASH_CHUNK):
        stop = min(start + HASH_CHUNK, len(source))
        names = (identify_sample(source, index, folder) for index in range(start, stop))
        digest.update(source.labels(start, stop).astype("<i8").tobytes() + "\n".join(names).encode())
        if source.task.kind != LABELS:
            for name, values in sorted(source.targets(start, stop).items()):
                digest.update(name.encode() + values.astype(values.dtype.newbyteorder("<")).tobytes())
    return {"number": len(source), "sha256": digest.hexdigest()}


def _hash_sizes(source: Source) -> str:
    """Return a hash of the file sizes, which shows whether the files have changed."""
    digest = hashlib.sha256()
    for path in _list_files(source):
        digest.update(f"{_read_size(path)} ".encode())
    return digest.hexdigest()


def _list_files(source: Source) -> Iterable[Path]:
    if isinstance(source, Subset) and isinstance(source.whole, AnnotatedSource):
        source = source.whole
    source = source.images if isinstance(source, AnnotatedSource) else source
    return map(source.path, range(len(source))) if isinstance(source, FileSource) else getattr(source, "paths", ())


def _read_size(path: Path) -> int:
    """Return the bytes of a file, or −1 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _choose_title(data: Data) -> str:
    """Return a name of the data set that is the same on every machine."""
    if isinstance(data, TaskData):
        return _choose_title(data.data)
    if isinstance(data, str | Path | FlatFolder):
        name = name_data(data)
        return make_printable(Path(name).expanduser().resolve().name) if find_data_folder(data) else name
    return type(data).__name__ if isinstance(data, Source) else name_data(data)


def _raise_if_broken(broken: dict[str, list[BrokenRecord]], skip_broken: bool) -> None:
    """Raise a DataError that lists the broken samples, unless they may be skipped."""
    records = [sample for samples in broken.values() for sample in samples]
    if not records or skip_broken:
        return
    samples = "1 sample" if len(records) == 1 else f"{len(records)} samples"
    lines = [f"{samples} cannot be packed; --skip-broken (skip_broken=True) would leave them out:"]
    lines += [f"  {sample['name']}: {sample['reason']}" for sample in records[:BROKEN_SHOWN]]
    if len(records) > BROKEN_SHOWN:
        lines.append(f"  and {len(records) - BROKEN_SHOWN} more; `vitrail data check` names all")
    raise DataError("\n".join(lines))
