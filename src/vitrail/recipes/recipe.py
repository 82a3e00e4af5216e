"""A recipe: the values of a run configuration, with its command, cost and expected accuracy."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, dict[str, Any]]
"""Values for `vitrail.training.config.RunConfig`, by section."""

INCEPTION_CROP_AND_FLIP: dict[str, Any] = {"crop_area": (0.05, 1.0), "crop_ratio": (3 / 4, 4 / 3), "flip": 0.5}
"""The authors' augmentation. Written out, so that a recipe does not change when a default does."""

UNITS = (("exaFLOPs", 1.0), ("petaFLOPs", 1e-3), ("teraFLOPs", 1e-6), ("gigaFLOPs", 1e-9))


def make_data_settings(holdout: float, batch_size: int) -> dict[str, Any]:
    """Return the section `data` of a run with the authors' augmentation; `holdout`: share to validate on."""
    return {
        "validate_on": "val",
        "holdout": holdout,
        "batch_size": batch_size,
        "workers": 8,
        "augmentation": INCEPTION_CROP_AND_FLIP,
    }


@dataclass(frozen=True)
class DataSet:
    """The data set that a recipe was written for; the recipe's steps and cost are counted on it."""

    name: str
    images: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named run, as data: nothing is built or read before the run starts."""

    name: str
    summary: str
    """What it trains, in one line."""
    settings: Settings
    """Every section of the configuration, without run.folder. Use the copy in `config`."""
    data_set: DataSet
    expected: str
    """The accuracy to expect, and where that number comes from."""
    source: str = "ours"
    """Where the settings come from."""
    typical_model: str | None = None
    """For fine-tuning, the model that the cost is counted for."""
    typical_options: dict[str, Any] = field(default_factory=dict)
    """Architecture options of the typical model that differ from its name's."""
    typical_weights: str | None = None
    """What the typical weights are called, if not by their architecture."""
    learning_rates: tuple[float, ...] = ()
    """The rates that the paper tried, for a sweep; empty if it gives one rate."""
    holdout: float | None = None
    """Share of the training set on which the learning rate is chosen."""
    paper_exaflops: int | None = None
    """The cost that the paper gives, in 10¹⁸ operations."""
    time: str = ""
    """How long it took, and on which machine."""

    @property
    def config(self) -> Settings:
        """A fresh copy of the settings, with run.folder added."""
        config = copy.deepcopy(self.settings)
        config.setdefault("run", {})["folder"] = f"runs/{self.name}"
        return config

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys that the user must set: model.weights, data.source, both or none."""
        weights = () if "name" in self.settings["model"] else ("model.weights",)
        source = () if "source" in self.settings["data"] else ("data.source",)
        return (*weights, *source)

    @property
    def command(self) -> str:
        """The command to type; the user replaces MODEL and DATA."""
        placeholders = {"model.weights": "MODEL", "data.source": "DATA"}
        return " ".join(["vitrail train", self.name, *(f"{key}={placeholders[key]}" for key in self.needs)])

    @property
    def model(self) -> str:
        """The name of the model, or for fine-tuning of the typical one."""
        name = self.settings["model"].get("name", self.typical_model)
        assert isinstance(name, str)  # every recipe has one of the two; a test checks it
        return name

    @property
    def steps(self) -> int:
        """Optimizer steps on the data set that the recipe was written for."""
        schedule = self.settings["schedule"]
        if "steps" in schedule:
            return int(schedule["steps"])
        return math.ceil(float(schedule["epochs"]) * self.data_set.images / self.batch_size)

    @property
    def batch_size(self) -> int:
        """Images in one optimizer step."""
        return int(self.settings["data"]["batch_size"])

    @property
    def exaflops(self) -> float:
        """The cost of the whole training in 10¹⁸ operations, counted as in the paper's table 6."""
        # Imported here, so that listing recipes stays fast.
        from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
        from vitrail.model.variants import make_architecture

        options = {"num_classes": self.data_set.classes, **self.typical_options, **self.settings["model"]}
        options.pop("name", None)
        forward = compute_cost(make_architecture(self.model, **options)).flops
        return FORWARD_AND_BACKWARD * forward * self.steps * self.batch_size / 1e18

    @property
    def cost(self) -> str:
        """The operations, the paper's own count and the time, as text."""
        weights = self.typical_weights or self.typical_model
        start = f" from {weights}" if weights else ""
        paper = f" (the paper: {self.paper_exaflops:,})" if self.paper_exaflops else ""
        time = f"; {self.time}" if self.time else ""
        return f"{_format_operations(self.exaflops)}{start}{paper}{time}"


def _format_operations(exaflops: float) -> str:
    """Return three digits with the largest unit that fits."""
    unit, size = next((unit for unit in UNITS if exaflops >= unit[1]), UNITS[-1])
    amount = exaflops / size
    return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"
