"""The file of a benchmark: written whole after every case, so that a stop loses only the case that is measured."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from vitrail.benchmark.report import BenchmarkReport
from vitrail.errors import ConfigError
from vitrail.system.processor import cache_folder

CACHED_FILE = "bench.json"


class ReportFile:
    """Where the report of a benchmark goes.

    Args:
        out: The file that was asked for; None: one in vitrail's cache, which the next benchmark replaces.
    """

    def __init__(self, out: Path | None) -> None:
        self.path, self._was_asked_for = out, out is not None
        if out is None:
            with suppress(RuntimeError):  # there is no home folder
                self.path = cache_folder() / CACHED_FILE

    def check(self) -> None:
        """Refuse, before minutes of measuring, a file that could not be written."""
        if self._was_asked_for:
            check_output("--out", self.path)

    def write(self, report: BenchmarkReport) -> Path | None:
        """Write the report, and return the file; None if it is the cache that cannot be written."""
        if self.path is None:
            return None
        try:
            if not self._was_asked_for:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            report.write(self.path)
        except OSError:
            if self._was_asked_for:
                raise
            return None
        return self.path

    def read_stopped(self, new: BenchmarkReport) -> BenchmarkReport | None:
        """Return the report in the file if it is of the same benchmark as a new one, which was stopped."""
        commit = new.machine["commit"]
        if self.path is None or (commit is not None and commit.endswith("-dirty")):
            return None
        try:
            old = BenchmarkReport.read(self.path)
        except ConfigError:
            return None
        machine = json.loads(json.dumps(new.machine))
        is_same = (old.machine, old.asked, old.notes) == (machine, new.asked, new.notes)
        return old if is_same and old.measured is not None else None


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, because it is a folder or its folder is not there."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{option} {path}: {problem}; give a file in a folder that is there")
