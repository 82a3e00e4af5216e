"""The journal of a pack, so that packing can be stopped at any moment and continued.

Shards are made in a hidden folder, whose journal lists those that are complete. They move to their final places when
all are complete, so half a data set is never taken for a whole one. dataset.json is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.packing.writers import WRITERS, ShardWriter, write_index
from vitrail.data.sources.shards import MANIFEST
from vitrail.data.sources.source import make_printable
from vitrail.errors import ConfigError, DataError
from vitrail.system.files import flush_to_disk, move_into_place, sha256, write_whole
from vitrail.system.locks import lock_file
from vitrail.tasks.registry import read_task

FOLDER, JOURNAL, PLAN, LOCK = ".unfinished", "journal.jsonl", "plan.json", "lock"
CLASSES, SUMS = "classes.txt", "SHA256SUMS"
COMPARED = ("options", "classes", "samples", "task")
"""The keys that must be equal for two plans to be the same."""

Plan = dict[str, Any]
"""The part of dataset.json that is known beforehand: options, classes, and which samples."""
BrokenRecord = dict[str, str]
"""The `name` of a broken sample and the `reason` why it cannot be used."""


@dataclass(frozen=True)
class FinishedShard:
    """A line of the journal: a shard that is complete."""

    split: str
    number: int
    bytes: int
    sha256: str
    samples: int
    next: int
    """The position in the order after its last sample."""
    broken: list[BrokenRecord]
    """Broken samples since the shard before."""


class PackJournal:
    """The state of a pack: complete shards and broken samples of each split."""

    def __init__(self, out: Path, plan: Plan) -> None:
        self.out, self.plan, self.folder = out, plan, out / FOLDER
        self.writer: type[ShardWriter] = WRITERS[plan["options"]["format"]]
        self.shards: dict[str, list[FinishedShard]] = {split: [] for split in plan["samples"]}
        self.broken: dict[str, list[BrokenRecord]] = {split: [] for split in plan["samples"]}

    def __enter__(self) -> PackJournal:
        """Lock the folder, which must be new, empty, or hold an unfinished pack of the same plan."""
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file: give a new folder")
        self.out.mkdir(parents=True, exist_ok=True)
        is_resumed = (self.folder / PLAN).exists()
        if not is_resumed and any(path.name != FOLDER for path in self.out.iterdir()):
            raise ConfigError(f"{self.out} is not empty, and no pack was begun in it: give a new folder")
        if is_resumed:
            check_same_pack(self.out, json.loads((self.folder / PLAN).read_bytes()), self.plan)
        self.folder.mkdir(exist_ok=True)
        self._lock = _lock_file(self.folder / LOCK)
        try:
            if not is_resumed:
                write_whole(self.folder / PLAN, encode_json(self.plan))
            self._restore()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def _restore(self) -> None:
        """Restore the shards that the journal lists, up to the first damaged one of each split."""
        listed = list(_read_journal(self.folder / JOURNAL))
        totals = Counter(shard.split for shard in listed)
        for shard in listed:
            before = self.shards[shard.split]
            places = self._draft_path(shard), self._final_path(shard, totals[shard.split])
            if shard.number == len(before) and any(_is_intact(path, shard.bytes, shard.sha256) for path in places):
                before.append(shard)
                self.broken[shard.split] += shard.broken
        write_whole(
            self.folder / JOURNAL, b"".join(_encode_line(shard) for shards in self.shards.values() for shard in shards)
        )

    def next_position(self, split: str) -> int:
        """Return the position in the order at which to continue."""
        return self.shards[split][-1].next if self.shards[split] else 0

    def count_samples(self, split: str) -> int:
        """Return the number of samples in complete shards."""
        return sum(shard.samples for shard in self.shards[split])

    def start_shard(self, split: str) -> ShardWriter:
        """Return a writer for the next shard of a split."""
        task = read_task(self.plan["task"]) if "task" in self.plan else None
        return self.writer(self._temporary_path(split), len(self.shards[split]), self.plan["classes"], task)

    def add_shard(self, writer: ShardWriter, split: str, samples: int, position: int) -> None:
        """Complete a shard: close it, rename it, and add it to the journal."""
        writer.close()
        before, temporary = self.shards[split], self._temporary_path(split)
        broken = self.broken[split][sum(len(shard.broken) for shard in before) :]
        size = temporary.stat().st_size
        shard = FinishedShard(split, len(before), size, sha256(temporary), samples, position, broken)
        records = writer.records()
        if records is not None:
            np.save(self._records_path(shard), records)
            flush_to_disk(self._records_path(shard))
        move_into_place(temporary, self._draft_path(shard))
        with (self.folder / JOURNAL).open("ab") as journal:
            journal.write(_encode_line(shard))
            journal.flush()
            os.fsync(journal.fileno())
        before.append(shard)

    def finish(self) -> Plan:
        """Move all shards to their places and write dataset.json; return its contents."""
        empty = [split for split, shards in self.shards.items() if not shards]
        if empty:
            raise DataError(f"there is nothing to write: no sample of {', '.join(empty)} can be read")
        sums: dict[str, str] = {}
        splits = {}
        for split, shards in self.shards.items():
            splits[split] = {
                "samples": self.count_samples(split),
                "shards": [self._move_shard(shard, len(shards), sums) for shard in shards],
                "index": self._write_split_index(split, sums) if self.writer.has_index else None,
                "broken": self.broken[split],
            }
        if self.plan["classes"]:
            names = "".join(f"{make_printable(name)}\n" for name in self.plan["classes"])
            write_whole(self.out / CLASSES, names.encode())
            sums[CLASSES] = sha256(self.out / CLASSES)
        write_whole(self.out / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode())
        manifest = {**self.plan, "splits": splits}
        write_whole(self.out / MANIFEST, encode_json(manifest))
        self._lock.close()  # Windows removes no open file; whoever comes now sees a finished pack
        shutil.rmtree(self.folder)
        return manifest

    def _move_shard(self, shard: FinishedShard, total: int, sums: dict[str, str]) -> dict[str, Any]:
        """Move a shard to its place, unless that is done already; return its entry for dataset.json."""
        place = self._final_path(shard, total)
        if self._draft_path(shard).exists():
            move_into_place(self._draft_path(shard), place)
        sums[place.name] = shard.sha256
        return {"name": place.name, "bytes": shard.bytes, "sha256": shard.sha256, "samples": shard.samples}

    def _write_split_index(self, split: str, sums: dict[str, str]) -> str:
        """Write one index of all samples of a split, so that readers need not scan its shards."""
        place = self.out / f"index-{split}.npy"
        write_index(place, [self._records_path(shard) for shard in self.shards[split]])
        sums[place.name] = sha256(place)
        return place.name

    def _temporary_path(self, split: str) -> Path:
        return self.folder / f"{split}.tmp"

    def _draft_path(self, shard: FinishedShard) -> Path:
        """Return where a complete shard stays until all are complete."""
        return self.folder / f"{shard.split}-{shard.number}"

    def _records_path(self, shard: FinishedShard) -> Path:
        return self.folder / f"{shard.split}-{shard.number}.npy"

    def _final_path(self, shard: FinishedShard, total: int) -> Path:
        return self.out / self.writer.name(shard.split, shard.number, total)


def read_finished_pack(out: Path, plan: Plan) -> Plan:
    """Return dataset.json of a finished pack; raise an error if the plan differs or a file has changed."""
    try:
        manifest: Plan = json.loads((out / MANIFEST).read_bytes())
        shards = [shard for part in manifest["splits"].values() for shard in part["shards"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{out / MANIFEST} was not written by `vitrail data pack`: give a new folder") from None
    check_same_pack(out, manifest, plan)
    if manifest.get("sizes") != plan["sizes"]:
        raise ConfigError(f"{out} holds the files from before they changed: give a new folder, or delete it")
    for shard in shards:
        if not _is_intact(out / shard["name"], shard["bytes"], shard["sha256"]):
            raise DataError(f"{out / shard['name']} has changed since it was written: delete {out} and pack again")
    shutil.rmtree(out / FOLDER, ignore_errors=True)  # it remains if packing was stopped just before the end
    return manifest


def check_same_pack(out: Path, existing: Any, plan: Plan) -> None:
    """Raise a ConfigError if the folder holds a pack with another plan."""
    existing = existing if isinstance(existing, dict) else {}
    plan = json.loads(json.dumps(plan))  # as JSON: there, a tuple is a list
    if all(existing.get(key) == plan.get(key) for key in COMPARED):
        return
    theirs, ours = existing.get("options") or {}, plan["options"]
    differences = [
        "another list --without" if key == "without" else f"{key} = {theirs.get(key)} there, {ours.get(key)} here"
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key)
    ]
    why = "; ".join(differences) or "other samples or classes"
    raise ConfigError(f"{out} holds a pack of something else ({why}): give a new folder, or delete it")


def encode_json(value: Any) -> bytes:
    """Return JSON bytes that are the same every time."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _is_intact(path: Path, size: int, digest: str) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256(path) == digest


def _encode_line(shard: FinishedShard) -> bytes:
    return (json.dumps(asdict(shard)) + "\n").encode()


def _read_journal(journal: Path) -> Iterator[FinishedShard]:
    """Yield the shards that a journal lists; an incomplete last line is ignored."""
    for line in journal.read_bytes().splitlines() if journal.exists() else []:
        try:
            yield FinishedShard(**json.loads(line))
        except (ValueError, TypeError):
            return


def _lock_file(path: Path) -> BinaryIO:
    """Open a file with a lock that one process at a time can hold, if the file system supports locks."""
    try:
        return lock_file(path)
    except BlockingIOError:
        raise ConfigError(f"another process is packing into {path.parent.parent}: wait for it, or stop it") from None
    except OSError:  # a file system without locks
        return path.open("ab")
