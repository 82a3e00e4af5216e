"""metrics.jsonl: what a run measured, one JSON object a line, in the order in which it was measured.

    {"kind": "train", "step": 150, "epoch": 1.2, "loss": 1.25, "accuracy": 0.56, "learning_rate": 0.001,
     "gradient_norm": 0.8, "skipped": 0, "clock": {"seconds": 31.5, "images_per_second": 1234.0, …}}
    {"kind": "evaluation", "step": 150, "part": "val", "loss": 1.5, "accuracy": 0.52, "clock": {"seconds": 2.1, …}}

All that the clock decides is under "clock": without it, two runs of one configuration have the same lines. JSON has no
word for what is not a number; it is written as "nan", "inf" or "-inf" and read as a float again.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from vitrail.errors import DataError
from vitrail.system.files import flush_to_disk, write_whole

Record = dict[str, Any]

TEXT = ("kind", "part")
"""The fields that are words, whatever they say; a word anywhere else is one of those for what is not a number."""
NOT_NUMBERS = ("nan", "inf", "-inf")


class Records:
    """The file as a run writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """One more line, handed to the system before this returns.

        Where the disk is full the file is as before and the OSError goes on to the caller.
        """
        line = memoryview(_line(record))
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]  # a disk that is almost full takes a part
            except OSError:
                os.ftruncate(file.fileno(), before)  # the next record must not be glued to half of this one
                raise

    def keep_until(self, step: int, owes_evaluation: bool = False) -> None:
        """Drop every record after `step`, and half a line that a killed run left: what a resumed run starts from.

        `owes_evaluation`: that of `step` itself is still to come, and goes too.

        The other lines stay byte for byte. The file is the new one or the old one whenever the machine stops.
        """
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        lines = _whole_lines(content)
        kept = []
        for number, line in enumerate(lines, start=1):
            record = _parsed(self.path, number, line)
            owed = owes_evaluation and record["kind"] == "evaluation" and record["step"] == step
            if record["step"] <= step and not owed:
                kept.append(line)
        if b"".join(kept) != content:
            write_whole(self.path, b"".join(kept))

    def bring_to_disk(self) -> None:
        """Out of the system's memory: before a checkpoint is whole, so that no record is older than it and lost."""
        if self.path.exists():
            flush_to_disk(self.path)


def read_records(path: Path) -> list[Record]:
    """All records of a file. Half a line at the end is left out; anything else that is no record is an error."""
    return [_parsed(path, number, line) for number, line in enumerate(_whole_lines(path.read_bytes()), start=1)]


def _whole_lines(content: bytes) -> list[bytes]:
    """With their ends. A line without one is torn, even where it reads well: more of it may be missing."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _line(record: Record) -> bytes:
    return json.dumps(_written(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _parsed(path: Path, number: int, line: bytes) -> Record:
    """A line as a record."""
    try:
        record = json.loads(line)
    except ValueError as error:  # of JSON or of UTF-8
        raise _no_record(path, number, str(error)) from None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("kind"), str):
        raise _no_record(path, number, 'it is no object with a "kind" and a whole "step"')
    return {key: value if key in TEXT else _read(value) for key, value in record.items()}


def _no_record(path: Path, number: int, reason: str) -> DataError:
    return DataError(f"{path}, line {number}, is no record of a run: {reason}; mend or delete this line")


def _written(value: Any) -> Any:
    """With words for what JSON cannot say."""
    if isinstance(value, dict):
        return {key: _written(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def _read(value: Any) -> Any:
    """The other way around."""
    if isinstance(value, dict):
        return {key: _read(inner) for key, inner in value.items()}
    return float(value) if value in NOT_NUMBERS else value
