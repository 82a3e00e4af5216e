"""What packing a data set gives back: the shards, what was left out, and the contents of dataset.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.open import WHOLE
from vitrail.system.results import Result, Rows

NO_SPLITS = (
    "this data has no splits. What is held out of the shards is not what is held out of the original: use one of the "
    "two, or give the data folders train and val first"
)


class PackedShard(NamedTuple):
    """A file of a packed data set."""

    path: Path
    split: str
    samples: int
    bytes: int


class LeftOut(NamedTuple):
    """A sample that was not packed."""

    split: str
    name: str
    reason: str


@dataclass(frozen=True, repr=False)
class PackResult(Result):
    """A packed data set."""

    folder: Path
    shards: tuple[PackedShard, ...]
    samples: int
    """All samples in the shards."""
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    """Sentences about what to take care of."""
    without: int
    """How many samples were left out because a list names them."""
    manifest: dict[str, Any]
    """The contents of dataset.json."""

    @classmethod
    def of(cls, folder: Path, manifest: dict[str, Any]) -> PackResult:
        """Make a result from a folder and the contents of its dataset.json."""
        splits = manifest["splits"]
        shards = [
            PackedShard(folder / shard["name"], split, shard["samples"], shard["bytes"])
            for split, part in splits.items()
            for shard in part["shards"]
        ]
        left_out = [
            LeftOut(split, broken["name"], broken["reason"])
            for split, part in splits.items()
            for broken in part["broken"]
        ]
        notes = (NO_SPLITS,) if WHOLE in splits else ()
        without = sum(manifest.get("without", {}).values())
        samples = sum(shard.samples for shard in shards)
        return cls(folder, tuple(shards), samples, tuple(left_out), notes, without, manifest)

    def summary(self) -> Rows:
        size = sum(shard.bytes for shard in self.shards)
        return [
            ("folder", str(self.folder)),
            ("samples", f"{self.samples:,}"),
            ("shards", f"{len(self.shards):,}, {size:,} bytes"),
            ("left out", f"{len(self.left_out):,} broken, {self.without:,} named by a list"),
            *(("note", note) for note in self.notes),
        ]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        rows = [(shard.path.name, f"{shard.samples:,}", f"{shard.bytes:,}") for shard in self.shards]
        tables: dict[str, Sequence[Sequence[str]]] = {"Shards": [("file", "samples", "bytes"), *rows]}
        if self.left_out:
            tables["Left out"] = [("split", "name", "reason"), *self.left_out]
        return tables
