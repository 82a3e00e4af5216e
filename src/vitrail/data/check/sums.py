"""Compare the files of a data set with the hashes in the SHA256SUMS beside them, as `data pack` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vitrail.data.check.finding import DataFinding
from vitrail.data.packing.pack_journal import SUMS
from vitrail.data.sources.image_files import make_printable
from vitrail.data.sources.source import read_small_text
from vitrail.errors import DataError
from vitrail.system.events import Progress
from vitrail.system.files import sha256

MOST_BYTES = 1 << 24
"""A larger file of hashes is not read: it would be of more than 100,000 files."""
CHANGED = "changed"
_LINE = re.compile(r"(?P<hash>[0-9a-fA-F]{64}) [ *](?P<name>[^/\\]+)")


def find_changed_files(folder: Path, progress: Progress) -> list[DataFinding]:
    """Return a finding for each file of a folder that is not as its SHA256SUMS says.

    The names in it are those of files in this folder: nothing outside of it is read.

    Args:
        folder: with the file SHA256SUMS; nothing is found without it.
        progress: called with the number of files that were read, and of all.
    """
    if not (folder / SUMS).is_file():
        return []
    try:
        lines = [line for line in read_small_text(folder / SUMS, MOST_BYTES).splitlines() if line.strip()]
    except DataError as error:
        return [DataFinding(CHANGED, "all", SUMS, str(error))]
    found: list[DataFinding] = []
    progress(0, len(lines))
    for number, line in enumerate(lines, start=1):
        found += _check_line(folder, number, line)
        progress(number, len(lines))
    return found


def _check_line(folder: Path, number: int, line: str) -> Iterator[DataFinding]:
    match = _LINE.fullmatch(line)
    if match is None or match["name"] in (".", ".."):
        yield DataFinding(CHANGED, "all", SUMS, f"line {number} is not the hash and the name of a file in this folder")
        return
    name = make_printable(match["name"])
    try:
        if not (folder / match["name"]).is_file():  # a pipe or a device would be read for ever
            yield DataFinding(CHANGED, "all", name, f"is missing, or no file: {SUMS} names it")
        elif sha256(folder / match["name"]) != match["hash"].lower():
            yield DataFinding(CHANGED, "all", name, f"is not the file that {SUMS} was written for")
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        yield DataFinding(CHANGED, "all", name, f"cannot be read: {getattr(error, 'strerror', None) or error}")
