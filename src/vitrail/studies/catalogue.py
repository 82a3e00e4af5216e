"""The names of all studies. A study's file is imported when it is asked for."""

from __future__ import annotations

import importlib

from vitrail.errors import ConfigError, did_you_mean
from vitrail.studies.study import Study

NAMES = (
    "data-size",
    "compute",
    "resolution",
    "positions",
    "pooling",
    "shape",
    "optimizer",
    "axial",
    "self-supervision",
    "attention-distance",
    "attention-focus",
)


def find_study(name: str) -> Study:
    """Return the study with a name; raise a ConfigError that lists them if there is none."""
    if name not in NAMES:
        raise ConfigError(f"unknown study {name!r}{did_you_mean(name, NAMES)}: there are {', '.join(NAMES)}")
    study: Study = importlib.import_module(f"vitrail.studies.{name.replace('-', '_')}").STUDY
    return study


def list_studies() -> list[Study]:
    """Return all studies, in the order of the paper."""
    return [find_study(name) for name in NAMES]
