"""What a recipe is: values of a run configuration, and what a person wants to know before starting it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, dict[str, Any]]
"""Values for `vitrail.training.config.RunConfig`, by section."""

INCEPTION_CROP_AND_FLIP: dict[str, Any] = {"crop_area": (0.05, 1.0), "crop_ratio": (3 / 4, 4 / 3), "flip": 0.5}
"""The authors' augmentation, in pre-training and in fine-tuning. Written out: a recipe does not move with defaults."""

UNITS = (("exaFLOPs", 1.0), ("petaFLOPs", 1e-3), ("teraFLOPs", 1e-6), ("gigaFLOPs", 1e-9))


@dataclass(frozen=True)
class DataSet:
    """What a recipe was written for: its length and its cost are counted for so many images."""

    name: str
    images: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named run. It is data: nothing is built or read before the run is started."""

    name: str
    summary: str
    """One line."""
    settings: Settings
    """All but run.folder. `config` is the copy to use."""
    data_set: DataSet
    expected: str
    """The number, and where it is from."""
    source: str
    """Where the settings are from."""
    typical_model: str | None = None
    """Where the model comes with the weights: the one that the cost is counted for."""
    typical_options: dict[str, Any] = field(default_factory=dict)
    """Of its architecture, where they are not the name's."""
    typical_weights: str | None = None
    """What it is called, where it has another name than its architecture."""
    learning_rates: tuple[float, ...] = ()
    """Those that the paper tried, for a sweep; none where it settled on one."""
    holdout: float | None = None
    """Share of the training set that the learning rate is chosen on, before all of it is trained on."""
    paper_exaflops: int | None = None
    """The cost, as the paper counts it."""
    time: str = ""
    """How long it takes, and on what."""

    @property
    def config(self) -> Settings:
        """A fresh copy of the settings, with the folder that the run is kept in."""
        config = copy.deepcopy(self.settings)
        config.setdefault("run", {})["folder"] = f"runs/{self.name}"
        return config

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys that a person must give."""
        weights = () if "name" in self.settings["model"] else ("model.weights",)
        source = () if "source" in self.settings["data"] else ("data.source",)
        return (*weights, *source)

    @property
    def command(self) -> str:
        """What to type; MODEL and DATA stand for one's own."""
        placeholders = {"model.weights": "MODEL", "data.source": "DATA"}
        return " ".join(["vitrail train", self.name, *(f"{key}={placeholders[key]}" for key in self.needs)])

    @property
    def model(self) -> str:
        """Its name, or that of a typical one."""
        name = self.settings["model"].get("name", self.typical_model)
        assert isinstance(name, str)  # a recipe has either; a test looks
        return name

    @property
    def steps(self) -> int:
        """On the data set it was written for."""
        schedule = self.settings["schedule"]
        if "steps" in schedule:
            return int(schedule["steps"])
        return math.ceil(float(schedule["epochs"]) * self.data_set.images / self.batch_size)

    @property
    def batch_size(self) -> int:
        """Images in a step."""
        return int(self.settings["data"]["batch_size"])

    @property
    def exaflops(self) -> float:
        """10¹⁸ operations of the whole training, counted from the architecture as the paper's table 6 does."""
        # Here and not above: to list recipes must cost nothing.
        from vitrail.model.cost import FORWARD_AND_BACKWARD, cost
        from vitrail.model.variants import architecture

        options = {"num_classes": self.data_set.classes, **self.typical_options, **self.settings["model"]}
        options.pop("name", None)
        forward = cost(architecture(self.model, **options)).flops
        return FORWARD_AND_BACKWARD * forward * self.steps * self.batch_size / 1e18

    @property
    def cost(self) -> str:
        """A sentence: operations, the paper's own count of them, and time."""
        weights = self.typical_weights or self.typical_model
        whose = f" from {weights}" if weights else ""
        paper = f" (the paper: {self.paper_exaflops:,})" if self.paper_exaflops else ""
        time = f"; {self.time}" if self.time else ""
        return f"{_operations(self.exaflops)}{whose}{paper}{time}"


def _operations(exaflops: float) -> str:
    """Three digits, in a unit that suits them."""
    unit, size = next((unit for unit in UNITS if exaflops >= unit[1]), UNITS[-1])
    amount = exaflops / size
    return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"
