"""Typed configuration: the strict base class, and what travels with a model's weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vitrail.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """A frozen record of options. An unknown key or a wrong value is a ConfigError in one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None


def explain(error: ValidationError, config: type[BaseModel]) -> str:
    """Pydantic's findings as a sentence a person can act on, the nearest key named for an unknown one."""
    sentences = []
    for finding in error.errors(include_url=False):
        where = ".".join(str(part) for part in finding["loc"])
        if finding["type"] == "extra_forbidden":
            allowed = list(config.model_fields)
            hint = did_you_mean(where, allowed) or f"; the options are {', '.join(allowed)}"
            sentences.append(f"unknown option {where!r}{hint}")
        elif finding["type"] == "missing":
            sentences.append(f"{where} is required")
        elif finding["type"] == "value_error":
            # Our own validators write whole sentences; those of a part do not know what they are part of.
            nested = f"{where}: " if len(finding["loc"]) > 1 else ""
            sentences.append(f"{nested}{finding['ctx']['error']}")
        else:
            sentences.append(f"{where} = {finding['input']!r}: {finding['msg'][:1].lower()}{finding['msg'][1:]}")
    return "; ".join(sentences)


def _pair(value: object) -> object:
    sides = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"image_size = {value!r}: give a number of pixels above 0, or (height, width)")
    return sides


ImageSize = Annotated[tuple[int, int], BeforeValidator(_pair)]
"""Height and width in pixels; a single number stands for a square."""


def show_size(size: tuple[int, int]) -> str:
    """224 for a square, 96×160 (height × width) otherwise."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}×{size[1]}"


class Preprocessing(Config):
    """How an image file becomes a model's input. It travels with the weights: a wrong mean costs points in silence."""

    image_size: ImageSize
    """Height and width the model sees, in pixels."""
    mean: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = (0.5, 0.5, 0.5)
    """Subtracted from pixels in [0, 1], one value for each channel."""
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = (0.5, 0.5, 0.5)
    """Divided by after that. The defaults map pixels to [−1, 1], as in the paper."""
    resize: Literal["squash", "cover"] = "squash"
    """`squash`: to the exact size whatever the shape, as the released code does. `cover`: keep the shape, so that the
    size is just covered (the shorter side fits)."""
    crop_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Resize to `image_size` / this, then crop the centre."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Filter of the resize, always with antialias."""

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width before the crop: rounded down, as everyone does."""
        height, width = (int(side / self.crop_fraction + 1e-6) for side in self.image_size)
        return height, width

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}")
        return self


class TrainingCost(Config):
    """What it took to train weights, from fresh ones on, as far as is known. It travels with them."""

    flops: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Multiplications and additions of forward and backward passes."""
    device_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds times devices."""
    devices: tuple[str, ...]
    """What they were."""
    complete: bool = True
    """Whether it counts from fresh weights on; those of another origin do not tell what they cost."""

    @property
    def exaflops(self) -> float:
        """10¹⁸ operations."""
        return self.flops / 1e18

    @property
    def device_hours(self) -> float:
        """The unit that people pay for."""
        return self.device_seconds / 3600

    def after(self, earlier: TrainingCost | None) -> TrainingCost:
        """With what came before; where that is unknown, this is not all."""
        if earlier is None:
            return self.model_copy(update={"complete": False})
        return TrainingCost(
            flops=earlier.flops + self.flops,
            device_seconds=earlier.device_seconds + self.device_seconds,
            devices=tuple(dict.fromkeys([*earlier.devices, *self.devices])),
            complete=earlier.complete,
        )


class Origin(Config):
    """Where weights came from. It travels with them."""

    source: str
    """As it was given to `load`."""
    format: str
    """The naming they were in: native, timm, torchvision, huggingface, google."""
    dialect: str = ""
    """Which form of that naming, so that a way back gives the same keys."""
    licence: str | None = None
    notes: tuple[str, ...] = ()
    """What could not be read from the file and was concluded."""
