"""The command that goes on after `vitrail finetune --quick`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.system.commands import quote_word

KEPT_OPTIONS = ("task", "labels", "labels_from")
FOLDER_KEYS = ("folder", "run.folder")


def describe_next_step(
    folder: Path, data: str, model: str, options: Mapping[str, Any], settings: Sequence[str] = ()
) -> str:
    """Return a line with the commands that use a quick model, and that train all of it on the same data.

    Args:
        folder: of the quick model; the other training gets its own.
        data: what was learned from.
        model: the start.
        options: of the command that was given, by their names in Python.
        settings: of the command that was given, as key=value.
    """
    words = ["vitrail", "finetune", "--data", data]
    for name in KEPT_OPTIONS:
        if options.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", options[name]]
    words += ["--from", model, "--minutes", "10"]
    words += [setting for setting in settings if setting.partition("=")[0].strip() not in FOLDER_KEYS]
    again = " ".join(map(quote_word, words))
    return (
        f"next: vitrail predict PHOTO --model {quote_word(str(folder))}; or train all of it, which takes minutes and "
        f"is often better: {again}"
    )
