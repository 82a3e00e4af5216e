"""The folder in which a pack is made, so that it can be stopped at any moment and goes on from there.

A journal lists the shards that are whole. Only when all are do they move out of this folder to their places, so half a
data set is never taken for one. dataset.json comes last: where it is, everything is.
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

FOLDER, JOURNAL, PLAN, LOCK = ".unfinished", "journal.jsonl", "plan.json", "lock"
CLASSES, SUMS = "classes.txt", "SHA256SUMS"
COMPARED = ("options", "classes", "samples")
"""What makes two plans the same, however they were made and by whom."""

Plan = dict[str, Any]
"""What dataset.json says before anything is written: options, classes, and which samples."""
BrokenRecord = dict[str, str]
"""The `name` of a sample, and the `reason` why it cannot be used."""


@dataclass(frozen=True)
class FinishedShard:
    """A line of the journal: a shard that is whole."""

    split: str
    number: int
    bytes: int
    sha256: str
    samples: int
    next: int
    """The place in the order of samples after its last."""
    broken: list[BrokenRecord]
    """Found since the shard before."""


class PackJournal:
    """What there is of a pack, and how it grows."""

    def __init__(self, out: Path, plan: Plan) -> None:
        self.out, self.plan, self.folder = out, plan, out / FOLDER
        self.writer: type[ShardWriter] = WRITERS[plan["options"]["format"]]
        self.shards: dict[str, list[FinishedShard]] = {split: [] for split in plan["samples"]}
        self.broken: dict[str, list[BrokenRecord]] = {split: [] for split in plan["samples"]}

    def __enter__(self) -> PackJournal:
        """Take the folder, which is new, empty, or holds the beginning of the same thing."""
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file: give a new folder")
        self.out.mkdir(parents=True, exist_ok=True)
        begun = (self.folder / PLAN).exists()
        if not begun and any(path.name != FOLDER for path in self.out.iterdir()):
            raise ConfigError(f"{self.out} is not empty, and no pack was begun in it: give a new folder")
        if begun:
            check_same_pack(self.out, json.loads((self.folder / PLAN).read_bytes()), self.plan)
        self.folder.mkdir(exist_ok=True)
        self._lock = _locked(self.folder / LOCK)
        try:
            if not begun:
                write_whole(self.folder / PLAN, encode_json(self.plan))
            self._go_on()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def _go_on(self) -> None:
        """Keep the shards that the journal lists, up to the first of a split that is not as it was."""
        found = list(_lines(self.folder / JOURNAL))
        totals = Counter(shard.split for shard in found)
        for shard in found:
            before = self.shards[shard.split]
            places = self._draft(shard), self._place(shard, totals[shard.split])
            if shard.number == len(before) and any(_is_whole(path, shard.bytes, shard.sha256) for path in places):
                before.append(shard)
                self.broken[shard.split] += shard.broken
        write_whole(self.folder / JOURNAL, b"".join(_line(shard) for kept in self.shards.values() for shard in kept))

    def position(self, split: str) -> int:
        """The place in the order of samples at which to go on."""
        return self.shards[split][-1].next if self.shards[split] else 0

    def samples(self, split: str) -> int:
        """Samples in shards that are whole."""
        return sum(shard.samples for shard in self.shards[split])

    def begin(self, split: str) -> ShardWriter:
        """The next shard of a split."""
        return self.writer(self._temporary(split), len(self.shards[split]), self.plan["classes"])

    def keep(self, writer: ShardWriter, split: str, samples: int, position: int) -> None:
        """A shard is whole: give it its name, then write it into the journal."""
        writer.close()
        before, temporary = self.shards[split], self._temporary(split)
        broken = self.broken[split][sum(len(shard.broken) for shard in before) :]
        size = temporary.stat().st_size
        shard = FinishedShard(split, len(before), size, sha256(temporary), samples, position, broken)
        records = writer.records()
        if records is not None:
            np.save(self._records(shard), records)
            flush_to_disk(self._records(shard))
        move_into_place(temporary, self._draft(shard))
        with (self.folder / JOURNAL).open("ab") as journal:
            journal.write(_line(shard))
            journal.flush()
            os.fsync(journal.fileno())
        before.append(shard)

    def finish(self) -> Plan:
        """Everything to its place; the plan and what came of it are dataset.json."""
        empty = [split for split, shards in self.shards.items() if not shards]
        if empty:
            raise DataError(f"there is nothing to write: no sample of {', '.join(empty)} can be read")
        sums: dict[str, str] = {}
        splits = {}
        for split, shards in self.shards.items():
            splits[split] = {
                "samples": self.samples(split),
                "shards": [self._settle(shard, len(shards), sums) for shard in shards],
                "index": self._settle_index(split, sums) if self.writer.indexed else None,
                "broken": self.broken[split],
            }
        if self.plan["classes"]:
            names = "".join(f"{make_printable(name)}\n" for name in self.plan["classes"])
            write_whole(self.out / CLASSES, names.encode())
            sums[CLASSES] = sha256(self.out / CLASSES)
        write_whole(self.out / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode())
        manifest = {**self.plan, "splits": splits}
        write_whole(self.out / MANIFEST, encode_json(manifest))
        shutil.rmtree(self.folder)
        return manifest

    def _settle(self, shard: FinishedShard, total: int, sums: dict[str, str]) -> dict[str, Any]:
        """A shard to its place, unless it went there before a stop; what dataset.json says about it."""
        place = self._place(shard, total)
        if self._draft(shard).exists():
            move_into_place(self._draft(shard), place)
        sums[place.name] = shard.sha256
        return {"name": place.name, "bytes": shard.bytes, "sha256": shard.sha256, "samples": shard.samples}

    def _settle_index(self, split: str, sums: dict[str, str]) -> str:
        """One table of where all samples of a split lie, so that nobody has to look through its shards."""
        place = self.out / f"index-{split}.npy"
        write_index(place, [self._records(shard) for shard in self.shards[split]])
        sums[place.name] = sha256(place)
        return place.name

    def _temporary(self, split: str) -> Path:
        """Where a shard is written."""
        return self.folder / f"{split}.tmp"

    def _draft(self, shard: FinishedShard) -> Path:
        """Where a shard lies until all are whole."""
        return self.folder / f"{shard.split}-{shard.number}"

    def _records(self, shard: FinishedShard) -> Path:
        return self.folder / f"{shard.split}-{shard.number}.npy"

    def _place(self, shard: FinishedShard, total: int) -> Path:
        return self.out / self.writer.name(shard.split, shard.number, total)


def read_finished_pack(out: Path, plan: Plan) -> Plan:
    """What dataset.json says, where it is about the same thing and every file is as it was written."""
    try:
        manifest: Plan = json.loads((out / MANIFEST).read_bytes())
        shards = [shard for part in manifest["splits"].values() for shard in part["shards"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{out / MANIFEST} is not by `vitrail data pack`: give a new folder") from None
    check_same_pack(out, manifest, plan)
    if manifest.get("sizes") != plan["sizes"]:
        raise ConfigError(f"{out} holds these files as they were before they changed: give a new folder, or delete it")
    for shard in shards:
        if not _is_whole(out / shard["name"], shard["bytes"], shard["sha256"]):
            raise DataError(f"{out / shard['name']} is not as it was written: delete {out} and pack again")
    shutil.rmtree(out / FOLDER, ignore_errors=True)  # a stop just before the very end leaves it
    return manifest


def check_same_pack(out: Path, found: Any, plan: Plan) -> None:
    """Refuse a folder that holds something else."""
    # As JSON has it: there, a tuple is a list.
    found, wanted = (found if isinstance(found, dict) else {}), json.loads(json.dumps(plan))
    if all(found.get(key) == wanted[key] for key in COMPARED):
        return
    theirs = found.get("options") or {}
    told = [f"{name} = {theirs.get(name)} there, {value} here" for name, value in wanted["options"].items()]
    unlike = [
        line for line, (name, value) in zip(told, wanted["options"].items(), strict=True) if theirs.get(name) != value
    ]
    why = "; ".join(unlike) or "other samples or classes"
    raise ConfigError(f"{out} holds a pack of something else ({why}): give a new folder, or delete it")


def encode_json(value: Any) -> bytes:
    """The same bytes every time."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _is_whole(path: Path, size: int, digest: str) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256(path) == digest


def _line(shard: FinishedShard) -> bytes:
    return (json.dumps(asdict(shard)) + "\n").encode()


def _lines(journal: Path) -> Iterator[FinishedShard]:
    """What a journal lists; a last line that the machine stopped in is none."""
    for line in journal.read_bytes().splitlines() if journal.exists() else []:
        try:
            yield FinishedShard(**json.loads(line))
        except (ValueError, TypeError):
            return


def _locked(path: Path) -> BinaryIO:
    """A file that only one process has, until it closes it or ends; where the system can do that."""
    file = path.open("wb")
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process is packing into {path.parent.parent}: wait for it, or stop it") from None
    except OSError:  # a file system without locks
        pass
    return file
