"""Everything vitrail raises on purpose.

    VitrailError
    ├── ConfigError          a wrong name, option, value or combination        (also a ValueError)
    ├── InputError           images or tensors that a model cannot take        (also a ValueError)
    ├── NotApplicableError   a question that a model of that kind has no answer to: the attention of a ResNet
    ├── DataError            images or data sets that cannot be read, or too many broken ones
    │   └── TooLargeError    an image of more pixels than allowed
    ├── WeightsError         a file or folder of weights that cannot be read, trusted, understood or written
    ├── ExportError          a model that cannot be exported, or an export that does not compute the same
    ├── TrainingError        a run that cannot go on: losses that are no numbers, a lost rank, a full disk
    │   ├── Diverged         one whose gradients are no numbers any more
    │   └── Stopped          one that was asked to stop, and has saved where it was
    └── MissingExtraError    an optional dependency that is not installed      (also an ImportError)

A message says what was wrong, what is allowed and what to do next, in one sentence where one is enough.
The command line prints it without a traceback: exit code 2 for ConfigError, 3 for Stopped, 1 for the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrailError(Exception):
    """The root: catch this to catch whatever vitrail raises on purpose."""


class ConfigError(VitrailError, ValueError):
    """A name, an option, a value or a combination that cannot be."""


class InputError(VitrailError, ValueError):
    """Images or tensors that do not fit the model they were given to."""


class NotApplicableError(VitrailError):
    """A question to a model that has nothing of the kind: the attention of a ResNet."""


class DataError(VitrailError):
    """An image or a data set that cannot be read, or more broken images than allowed."""


class TooLargeError(DataError):
    """An image of more pixels than allowed."""


class WeightsError(VitrailError):
    """A checkpoint that cannot be read, trusted or understood, or an architecture that a format cannot hold."""


class ExportError(VitrailError):
    """A model that cannot be exported, or an export that fails to run or differs from its model."""


class TrainingError(VitrailError):
    """A run that cannot go on."""


class Diverged(TrainingError):
    """A run whose gradients are no numbers any more: another learning rate may lead further."""


class Stopped(TrainingError):
    """A run that a signal ended after it had saved a checkpoint; the same command goes on from there."""


class MissingExtraError(VitrailError, ImportError):
    """Something needs a package that the plain installation leaves out."""

    def __init__(self, purpose: str, extra: str) -> None:
        super().__init__(f'{purpose} needs an extra: pip install "vitrail[{extra}]", or ".[{extra}]" in a clone')


def did_you_mean(wrong: str, allowed: Iterable[str]) -> str:
    """`", did you mean 'B/16'?"` for the nearest of `allowed`, or nothing when none is near."""
    folded = {name.casefold(): name for name in allowed}
    near = difflib.get_close_matches(wrong.casefold(), folded, n=1, cutoff=0.6)
    return f", did you mean {folded[near[0]]!r}?" if near else ""
