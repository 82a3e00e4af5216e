"""The 19 tasks of VTAB (Zhai and others, arXiv 1910.04867): where they come from, what their labels are.

The tasks themselves are data, in vtab_tasks.toml. VTAB takes images and annotations from TensorFlow Datasets, hence
their names there; the original data sets are named beside them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from vitrail.transfer import vtab_labels

GROUPS = ("natural", "specialised", "structured")


@dataclass(frozen=True, kw_only=True)
class VtabTask:
    """One of the 19 tasks."""

    name: str
    title: str
    group: str
    classes: int
    origin: str
    """The original data set."""
    url: str
    tfds: str
    """Name in TensorFlow Datasets, with the version that VTAB uses."""
    images: tuple[int, int, int]
    """Number of images in train, val and test."""
    paper: tuple[float, float, float]
    """Top-1 in per cent of the first three models of `suite_table.PAPER_MODELS` (the paper's table 9)."""
    parts: str
    """How VTAB makes these parts."""
    annotation: str = "the class"
    """What the label is computed from."""
    label: Callable[[Any], int] | None = None
    """Computes the label from an annotation (in vtab_labels); None if the classes are the labels."""
    whole: bool = True
    """Whether an annotation is one whole number, so that data can hold it as a label (`raw = true`)."""
    crop: bool = True
    """Whether a crop keeps the label. This is our choice; VTAB does not say."""
    mirror: bool = True
    """Whether a mirror image keeps the label. Our choice, too."""


def _read_tasks() -> dict[str, VtabTask]:
    tree = tomllib.loads(resources.files(__package__).joinpath("vtab_tasks.toml").read_text(encoding="utf-8"))
    tasks = {}
    for group in GROUPS:
        for name, values in tree[group].items():
            label = getattr(vtab_labels, values.pop("label")) if "label" in values else None
            images, paper = tuple(values.pop("images")), tuple(values.pop("paper"))
            tasks[name] = VtabTask(name=name, group=group, images=images, paper=paper, label=label, **values)
    return tasks


TASKS = _read_tasks()
"""Tasks by name, in the order of the groups."""
