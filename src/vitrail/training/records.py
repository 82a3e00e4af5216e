"""metrics.jsonl: what a run measured, one JSON object a line, in the order of measurement.

    {"kind": "train", "step": 150, "epoch": 1.2, "loss": 1.25, "accuracy": 0.56, "learning_rate": 0.001,
     "gradient_norm": 0.8, "skipped": 0, "clock": {"seconds": 31.5, "images_per_second": 1234.0, …}}
    {"kind": "evaluation", "step": 150, "part": "val", "loss": 1.5, "accuracy": 0.52, "clock": {"seconds": 2.1, …}}
    {"kind": "fewshot", "step": 150, "part": "10-shot", "accuracy": 0.41, "deviation": 0.02, "clock": {"seconds": 1.3}}

All that depends on time is under "clock": without it, two runs of one configuration have the same lines. JSON has no
word for values that are not finite; they are written as "nan", "inf" or "-inf" and read as floats again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vitrail.errors import DataError
from vitrail.system.files import flush_to_disk, write_whole

Record = dict[str, Any]

TEXT = ("kind", "part")
"""The fields that hold text. Text in any other field is one of NOT_NUMBERS."""
NOT_NUMBERS = ("nan", "inf", "-inf")


class Records:
    """The metrics file that a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Append a line, and hand it to the system before returning.

        Raises:
            OSError: The line could not be written, for example to a full disk. The file is unchanged.
        """
        line = memoryview(_line(record))
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]  # an almost full disk writes only a part
            except OSError:
                os.ftruncate(file.fileno(), before)  # the next record must not follow half of this one
                raise

    def keep_until(self, step: int, owed: Collection[str] = ()) -> None:
        """Remove every record after `step`, and an incomplete last line, before a run goes on from `step`.

        The other lines stay byte for byte. If the machine stops meanwhile, the file is the old one or the new one.

        Args:
            owed: Kinds of evaluations of `step` that will be repeated; their records are removed too.
        """
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        lines = _whole_lines(content)
        remaining = []
        for number, line in enumerate(lines, start=1):
            record = _parse(self.path, number, line)
            is_owed = record["kind"] in owed and record["step"] == step
            if record["step"] <= step and not is_owed:
                remaining.append(line)
        if b"".join(remaining) != content:
            write_whole(self.path, b"".join(remaining))

    def bring_to_disk(self) -> None:
        """Flush the file to the disk. Done before each checkpoint, so that no record before it can be lost."""
        if self.path.exists():
            flush_to_disk(self.path)


def read_records(path: Path) -> list[Record]:
    """Return all records of a file, without an incomplete last line.

    Raises:
        DataError: A line is not a record.
    """
    return [_parse(path, number, line) for number, line in enumerate(_whole_lines(path.read_bytes()), start=1)]


def _whole_lines(content: bytes) -> list[bytes]:
    """Return the lines with their ends. A last line without an end is incomplete, even if it can be parsed."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _line(record: Record) -> bytes:
    return json.dumps(_encode(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _parse(path: Path, number: int, line: bytes) -> Record:
    """Parse a line of a metrics file."""
    try:
        record = json.loads(line)
    except ValueError as error:  # of JSON or of UTF-8
        raise _no_record(path, number, str(error)) from None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("kind"), str):
        raise _no_record(path, number, 'it is no object with a "kind" and a whole "step"')
    return {key: value if key in TEXT else _decode(value) for key, value in record.items()}


def _no_record(path: Path, number: int, reason: str) -> DataError:
    return DataError(f"{path}, line {number}, is no record of a run: {reason}; fix or delete this line")


def _encode(value: Any) -> Any:
    """Replace numbers that are not finite, at any depth, by words."""
    if isinstance(value, dict):
        return {key: _encode(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def _decode(value: Any) -> Any:
    """Undo `_encode`."""
    if isinstance(value, dict):
        return {key: _decode(inner) for key, inner in value.items()}
    return float(value) if value in NOT_NUMBERS else value
