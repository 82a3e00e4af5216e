"""All exceptions that vitrail raises on purpose.

    VitrailError
    ├── ConfigError          a wrong name, option, value or combination        (also a ValueError)
    ├── InputError           images or tensors that a model cannot take        (also a ValueError)
    ├── NotApplicableError   a question that does not apply to this kind of model: the attention of a ResNet
    ├── DataError            images or data sets that cannot be read, or too many broken ones
    │   ├── LayoutError      a folder of images that has to be opened in another way
    │   └── TooLargeError    an image of more pixels than allowed
    ├── WeightsError         a file or folder of weights that cannot be read, trusted, understood or written
    ├── ExportError          a model that cannot be exported, or an export that does not compute the same
    ├── TrainingError        a run that cannot continue: losses that are not finite, a lost rank, a full disk
    │   ├── Diverged         a run whose gradients are no longer finite
    │   └── Stopped          a run that was asked to stop and has saved a checkpoint
    └── MissingExtraError    an optional dependency that is not installed      (also an ImportError)

A message says what was wrong, what is allowed and what to do next.
The command line prints it without a traceback: exit code 2 for ConfigError, 3 for Stopped, 1 for the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

Failure = TypeVar("Failure", bound=BaseException)


class VitrailError(Exception):
    """The base class: catch it to catch every exception that vitrail raises on purpose.

    Control characters in its message are escaped: a name from a stranger's file must not steer a terminal.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(escape_unprintable(each, "\n\t") if isinstance(each, str) else each for each in arguments))


class ConfigError(VitrailError, ValueError):
    """A wrong name, option, value or combination."""


class InputError(VitrailError, ValueError):
    """Images or tensors that do not fit the model."""


class NotApplicableError(VitrailError):
    """A question that does not apply to this kind of model: the attention of a ResNet."""


class DataError(VitrailError):
    """An image or a data set that cannot be read, or more broken images than allowed."""


class LayoutError(DataError):
    """A folder of images that has to be opened in another way: a deeper folder, or classes by the names of the files.

    Attributes:
        given: the folder that was opened.
        data: the folder to give instead, which may be the same; None if none was found.
        labels_from: where in the file names the classes stand; None if the folders tell them.
    """

    def __init__(self, message: str, given: str = "", data: str | None = None, labels_from: str | None = None) -> None:
        super().__init__(message)
        self.given, self.data, self.labels_from = given, data, labels_from


class TooLargeError(DataError):
    """An image of more pixels than allowed."""


class WeightsError(VitrailError):
    """A checkpoint that cannot be read, trusted or understood, or an architecture that a format cannot hold."""


class ExportError(VitrailError):
    """A model that cannot be exported, or an export that fails to run or differs from its model."""


class TrainingError(VitrailError):
    """A training run that cannot continue."""


class Diverged(TrainingError):
    """A run whose gradients are no longer finite: try another learning rate."""


class Stopped(TrainingError):
    """A run that a signal ended after it saved a checkpoint; the same command continues it."""


class MissingExtraError(VitrailError, ImportError):
    """An optional package is needed that is not installed."""

    def __init__(self, purpose: str, extra: str) -> None:
        super().__init__(f'{purpose} needs an extra: pip install "vitrail[{extra}]", or ".[{extra}]" in a clone')


def detach_error(error: Failure) -> Failure:
    """Return the same error without its traceback, cause and context.

    They hold the variables of every function that was left, such as a large image. Detach an error that is kept or
    handed to another thread.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def escape_unprintable(text: str, keep: str = "") -> str:
    """Return a text with unprintable characters escaped, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(wrong: object, allowed: Iterable[str]) -> str:
    """Return `", did you mean 'B/16'?"` for the most similar allowed name, or an empty string.

    Names may differ by case alone, as b/16 and B/16 do. A capital letter is typed on purpose and decides between them;
    a small one may not be, so both are offered.
    """
    text, folded = str(wrong), dict[str, list[str]]()
    for name in dict.fromkeys(allowed):
        folded.setdefault(name.casefold(), []).append(name)
    near = difflib.get_close_matches(text.casefold(), folded, n=1, cutoff=0.6)
    if not near:
        return ""
    names = sorted(folded[near[0]], key=lambda name: -difflib.SequenceMatcher(None, text, name).ratio())
    offered = names if text == text.casefold() else names[:1]
    return f", did you mean {' or '.join(map(repr, offered))}?"
