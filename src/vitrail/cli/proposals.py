"""The command to give instead, when the images of a folder have to be opened in another way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import LayoutError
from vitrail.system.commands import quote_word

LABELS_FROM = "--labels-from"
TAKING_LABELS = {"finetune", "evaluate", "fewshot", "data"}
"""The verbs that have this option; `train` has a key of the configuration."""


def print_proposal(error: Exception, words: Sequence[str]) -> None:
    """Print the command of the user with other data or `--labels-from`, if the error proposes these."""
    if isinstance(error, LayoutError) and error.data is not None:
        command = propose_command(words, error.given, error.data, error.labels_from)
        if command is not None:
            print(f"try: {command}", file=sys.stderr)


def propose_command(words: Sequence[str], given: str, data: str, labels_from: str | None) -> str | None:
    """Return a command with other data, quoted for a shell; None if the words do not name the data, or cannot.

    Args:
        words: the command as it was given, without `vitrail`.
        given: the folder in it.
        data: the folder to give instead.
        labels_from: the value of `--labels-from`, if one is needed.
    """
    changed = [_replace_folder(word, given, data) for word in words]
    if not any(map(_names_folder, words, [given] * len(words))):
        return None
    if labels_from is not None and words[0] == "train":
        changed.append(f"data.labels_from={labels_from}")
    elif labels_from is not None and (words[0] not in TAKING_LABELS or "--suite" in words):
        return None
    elif labels_from is not None:
        changed += [LABELS_FROM, labels_from]
    return " ".join(map(quote_word, ["vitrail", *changed]))


def _names_folder(word: str, folder: str) -> bool:
    return any(text and Path(text).expanduser() == Path(folder) for text in (word, word.partition("=")[2]))


def _replace_folder(word: str, folder: str, other: str) -> str:
    """Return the word with another folder if it names this one, alone or after `--data=` or `data.source=`."""
    if not _names_folder(word, folder) or other == folder:
        return word
    key, equals, _ = word.partition("=") if Path(word).expanduser() != Path(folder) else ("", "", "")
    return f"{key}{equals}{other}"
