"""What the caller knows about a checkpoint and its files do not say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from vitrail.config import Config
from vitrail.errors import ConfigError, WeightsError
from vitrail.model.architecture import Epsilon, PositionResize, Positive, VitArchitecture

if TYPE_CHECKING:
    from vitrail.weights.formats.base import CheckpointInfo

NEVER_SURE = "position_resize"
"""The option that a caller may always choose: it changes nothing at the model's own size."""
TRAINING_ONLY = ("dropout", "attention_dropout", "stochastic_depth")
GUESSED = {"num_heads": "attention heads", "gelu": "form of GELU"}
"""Words of the notes about facts that were guessed, by the option that makes the guess needless."""


class KnownFacts(Config):
    """Facts that the shapes of weights do not show. None means that the caller does not know."""

    grid: tuple[Positive, Positive] | None = None
    """Rows and columns of patches of the position table, for a table that is not square."""
    num_heads: Positive | None = None
    gelu: Literal["tanh", "exact", "quick"] | None = None
    norm_eps: Epsilon | None = None
    pool: Literal["class", "average", "attention", "class+average", "distilled"] | None = None
    position_resize: PositionResize | None = None

    @classmethod
    def collect(cls, known: Any, **arguments: Any) -> Self:
        """Return the facts of the argument `known` and of the arguments that have a name of their own.

        Raises:
            ConfigError: an unknown key, a wrong value, or two values for one fact.
        """
        if known is not None and not hasattr(known, "keys"):
            raise ConfigError(f'known = {known!r}: give a dictionary such as {{"grid": (12, 42)}}')
        facts = {str(name): known[name] for name in known or ()}
        for name, value in arguments.items():
            if value is not None and facts.get(name) not in (None, value):
                raise ConfigError(f"{name} is given twice: {value}, and {facts[name]} in known")
            facts[name] = facts.get(name) if value is None else value
        return cls(**facts)

    @model_validator(mode="before")
    @classmethod
    def _read_pair(cls, values: Any) -> Any:
        grid = values.get("grid") if isinstance(values, dict) else None
        if isinstance(grid, str):
            sides = re.fullmatch(r"(\d{1,6})[x×](\d{1,6})", grid.strip())
            if not sides:
                raise ValueError(f"grid = {grid!r}: give rows and columns of patches, as in 12x42")
            values = {**values, "grid": (int(sides[1]), int(sides[2]))}
        return values

    @property
    def options(self) -> dict[str, Any]:
        """The facts that are options of the architecture, without those that the caller does not know."""
        return {name: value for name, value in self if value is not None and name != "grid"}

    def check_grid(self, architecture: Any) -> None:
        """Raise a WeightsError if the weights have another grid of patches than the caller says."""
        if self.grid is None:
            return
        if not isinstance(architecture, VitArchitecture):
            raise WeightsError("a grid can be known of a Vision Transformer alone, and this is none of vitrail's own")
        found = architecture.grid(architecture.image_size)
        if found != self.grid:
            said, real = (f"{rows}×{columns}" for rows, columns in (self.grid, found))
            raise WeightsError(f"the weights have positions for {real} patches, so the grid cannot be {said}")


def apply_known_options(checkpoint: CheckpointInfo, known: Mapping[str, Any], sure: bool) -> None:
    """Replace concluded options by those of the caller; refuse to contradict a config file (`sure`)."""
    fields = {name: getattr(checkpoint.architecture, name) for name in type(checkpoint.architecture).model_fields}
    for name, value in known.items():
        if name not in fields:
            raise ConfigError(f"this model has no option {name!r}")
        if sure and name not in (*TRAINING_ONLY, NEVER_SURE) and value != fields[name]:
            raise WeightsError(f"its config says {name} = {fields[name]}, so it cannot be {value}")
    if known:
        checkpoint.architecture = type(checkpoint.architecture)(**{**fields, **known})
        guessed = [words for name, words in GUESSED.items() if name in known]
        notes = [note for note in checkpoint.notes if not any(words in note for words in guessed)]
        shown = {n: value for n, value in known.items() if n == NEVER_SURE or (n not in TRAINING_ONLY and not sure)}
        checkpoint.notes = notes + [f"{name} = {value}, as the caller said" for name, value in shown.items()]


def parse_known(words: Iterable[str]) -> dict[str, str]:
    """Return the facts of a command line: `grid=12x42`, `num_heads=6`."""
    facts = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not value.strip():
            raise ConfigError(f"--known {word}: write it as NAME=VALUE, as in --known grid=12x42")
        facts[name.strip().replace("-", "_")] = value.strip()
    return facts
