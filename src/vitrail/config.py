"""Typed configuration: the strict base class, and the records that are stored with a model's weights."""

from __future__ import annotations

from numbers import Integral
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vitrail.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """A frozen record of options. An unknown key or a wrong value is a ConfigError in one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None


def explain(error: ValidationError, config: type[BaseModel]) -> str:
    """Return Pydantic's findings as one sentence; for an unknown key it names the nearest valid one."""
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
            # Our own validators write whole sentences, but do not know the name of the section they are in.
            nested = f"{where}: " if len(finding["loc"]) > 1 else ""
            sentences.append(f"{nested}{finding['ctx']['error']}")
        else:
            sentences.append(f"{where} = {finding['input']!r}: {finding['msg'][:1].lower()}{finding['msg'][1:]}")
    return "; ".join(sentences)


LARGEST_SIDE = 16_384
"""Pixels: beyond it no model's tokens fit any machine, and numbers overflow in places that cannot explain it."""


def _pair(value: object) -> object:
    sides = (value, value) if isinstance(value, Integral) else tuple(value) if isinstance(value, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise ValueError(f"image_size = {value!r}: give a number of pixels above 0, or (height, width)")
    if max(sides) > LARGEST_SIDE:
        raise ValueError(f"image_size = {value!r}: give at most {LARGEST_SIDE} pixels a side")
    return tuple(map(int, sides))


ImageSize = Annotated[tuple[int, int], BeforeValidator(_pair)]
"""Height and width in pixels; a single number stands for a square."""


def show_size(size: tuple[int, int]) -> str:
    """Return "224" for a square, else "96×160" (height × width)."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}×{size[1]}"


class Preprocessing(Config):
    """How an image becomes a model's input. It is stored with the weights: a wrong mean silently costs accuracy."""

    image_size: ImageSize
    """Height and width of the model's input, in pixels."""
    mean: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = (0.5, 0.5, 0.5)
    """Subtracted from pixels in [0, 1], one value for each channel."""
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = (0.5, 0.5, 0.5)
    """Divides the result, one value for each channel. The defaults map pixels to [−1, 1], as in the paper."""
    resize: Literal["squash", "cover"] = "squash"
    """`squash`: resize to the exact size and ignore the shape, as the released code does. `cover`: keep the shape and
    fit the shorter side."""
    crop_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Resize to `image_size` / `crop_fraction`, then crop the centre to `image_size`."""
    crop_rounding: Literal["down", "even"] = "down"
    """How half of an odd margin is rounded, above and left of the crop. `down`: as in Google's code and transformers.
    `even`: to the even neighbour, as in torchvision and timm."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Filter of the resize, always with antialias."""

    @property
    def crops(self) -> bool:
        """Whether anything of an image may be cropped away."""
        return self.crop_fraction < 1 or self.resize == "cover"

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width before the crop, rounded down as in other libraries."""
        height, width = (int(side / self.crop_fraction + 1e-6) for side in self.image_size)
        return height, width

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}")
        return self


class TrainingCost(Config):
    """What a model cost in all, as far as known: this training, and those before it. It is stored with the weights."""

    flops: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Number of multiplications and additions in forward and backward passes."""
    device_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Training time in seconds, multiplied by the number of devices."""
    devices: tuple[str, ...]
    """Names of the devices."""
    complete: bool = True
    """Whether everything is counted; False if training began with weights of unknown cost."""
    own_devices: tuple[str, ...] = ()
    """Names of the devices of the last training, if there were earlier ones."""
    kind: Literal["training", "linear head"] = "training"
    """What was done last: all weights were trained, or a head was fitted to features."""
    earlier: TrainingCost | None = None
    """The part that the weights had cost which training began with; None if there were none, or it is unknown."""

    @property
    def own(self) -> TrainingCost:
        """The cost of the last training alone."""
        if self.earlier is None:
            return self
        return self.model_copy(
            update={
                "flops": max(self.flops - self.earlier.flops, 0.0),
                "device_seconds": max(self.device_seconds - self.earlier.device_seconds, 0.0),
                "devices": self.own_devices or self.devices,
                "earlier": None,
            }
        )

    @property
    def stages(self) -> tuple[TrainingCost, ...]:
        """The cost of each training alone, the first one first."""
        return (*(() if self.earlier is None else self.earlier.stages), self.own)

    @property
    def exaflops(self) -> float:
        return self.flops / 1e18

    @property
    def device_hours(self) -> float:
        return self.device_seconds / 3600

    def after(self, earlier: TrainingCost | None) -> TrainingCost:
        """Return the sum with an earlier cost; it is marked incomplete if the earlier cost is None."""
        if earlier is None:
            return self.model_copy(update={"complete": False})
        return TrainingCost(
            flops=earlier.flops + self.flops,
            device_seconds=earlier.device_seconds + self.device_seconds,
            devices=tuple(dict.fromkeys([*earlier.devices, *self.devices])),
            complete=earlier.complete,
            own_devices=self.devices,
            kind=self.kind,
            earlier=earlier,
        )


class Origin(Config):
    """Where weights came from. It is stored with them."""

    source: str
    """The source that `load` was called with, without paths of this machine."""
    format: str
    """The format of the source: native, timm, torchvision, huggingface, google, openclip or meta."""
    dialect: str = ""
    """The variant of the format's names, so that a conversion back gives the same names."""
    licence: str | None = None
    notes: tuple[str, ...] = ()
    """Facts that were concluded, because the files do not say them."""
