"""Names of folders that tell what is in them, the same for the same command."""

from __future__ import annotations

import re
from pathlib import Path


def short_name(text: str) -> str:
    """The last word of a model's or a data set's name, in letters that a folder's name may have.

    A run's folder says more than the `model` in it.
    """
    path = Path(text.removeprefix("hf:").removeprefix("timm:"))
    if path.name == "model" and path.parent.name:
        path = path.parent
    return re.sub(r"[^\w.+-]+", "-", path.name).strip("-.") or "data"
