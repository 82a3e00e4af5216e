"""One finding of a data check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFinding:
    """One problem of one sample, file or split."""

    kind: str
    """One of `FINDING_KINDS`."""
    split: str
    name: str
    """The path of the sample, or its name in the source, on one line."""
    sentence: str
