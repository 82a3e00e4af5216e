"""The commit that vitrail runs from, for results that others are to repeat."""

from __future__ import annotations

import subprocess
from pathlib import Path

import vitrail


def read_commit() -> str | None:
    """Return the commit of the checkout that vitrail runs from, with `-dirty` if it has changes; None if installed."""
    root = Path(vitrail.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "-C", str(root)]
    command += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return text or None
