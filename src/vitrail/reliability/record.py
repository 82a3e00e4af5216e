"""What is stored with the weights about when a model can be relied on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.reliability.sets import LabelSets
from vitrail.reliability.unknown import UnknownScore

HOW_TO_FIT = "`vitrail calibrate --model MODEL --data DATA` fits it to images that chose nothing"
VERSION = 1


class Reliability(Config):
    """What a model's answers are worth, fitted to images that neither trained nor chose anything."""

    version: Annotated[int, Field(ge=1, le=VERSION)] = VERSION
    images: Annotated[int, Field(ge=1)]
    """Images that it was fitted to."""
    data: str = ""
    """The name of the data that they came from, without folders."""
    sets: LabelSets | None = None
    """For sets of labels at a chosen coverage; None if there were too few images, or for another task than labels."""
    unknown: UnknownScore | None = None
    """For telling unknown images; None if it was not fitted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sets is None and self.unknown is None:
            raise ValueError("there are neither sets nor a score of unknown images")
        return self


def require_sets(reliability: Reliability | None) -> LabelSets:
    """Return what sets of labels need, or raise a ConfigError that says how to get it."""
    if reliability is None or reliability.sets is None:
        why = "it was fitted to too few images" if reliability is not None else "nothing was fitted for them"
        raise ConfigError(f"this model gives no sets of labels (coverage): {why}; {HOW_TO_FIT}")
    return reliability.sets


def require_unknown(reliability: Reliability | None) -> UnknownScore:
    """Return the score of unknown images, or raise a ConfigError that says how to get it."""
    if reliability is None or reliability.unknown is None:
        raise ConfigError(f"this model cannot tell unknown images: no score was fitted for it; {HOW_TO_FIT}")
    return reliability.unknown


def read_reliability(values: Mapping[str, Any], num_classes: int, has_labels: bool) -> Reliability:
    """Return the record that a file holds.

    Args:
        values: the object in the file.
        num_classes: the number of outputs of the model.
        has_labels: whether the outputs are the classes of one label.

    Raises:
        ConfigError: it is damaged, or does not fit the model.
    """
    reliability = Reliability(**values)
    if reliability.sets is not None and not (num_classes and has_labels):
        raise ConfigError("sets of labels are for models that give one label of several, and this is none")
    if (unknown := reliability.unknown) is not None and not num_classes and not unknown.needs_embeddings:
        raise ConfigError(f"the score {unknown.kind!r} is computed from logits, and this model has none")
    return reliability
