"""preprocessor_config.json of transformers, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from vitrail.config import Preprocessing
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import FolderFiles, ForeignConfig, build_preprocessing

RESAMPLE = {2: "bilinear", 3: "bicubic"}


class _Size(ForeignConfig):
    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_numbers(cls, value: Any) -> Any:
        if isinstance(value, int):
            return {"height": value, "width": value}
        return dict(zip(("height", "width"), value, strict=False)) if isinstance(value, list | tuple) else value


class _Preprocessor(ForeignConfig):
    image_processor_type: str = ""
    feature_extractor_type: str = ""
    do_resize: bool = True
    do_rescale: bool = True
    size: _Size = Field(default_factory=_Size)
    resample: int = 2
    do_center_crop: bool = False
    crop_size: _Size = Field(default_factory=_Size)
    do_normalize: bool = True
    image_mean: float | tuple[float, ...] | None = None
    image_std: float | tuple[float, ...] | None = None


def read_preprocessor(
    folder_files: FolderFiles, a: VitArchitecture, default: Mapping[str, Any], notes: list[str]
) -> Preprocessing:
    """Return the preprocessing that a folder describes; without a file for it, mean and std are the `default`."""
    values = folder_files.json("preprocessor_config.json")
    if not values:  # processors of models with two towers are written into another file since transformers 5
        nested = folder_files.json("processor_config.json").get("image_processor")
        values = nested if isinstance(nested, dict) else {}
    if not values:
        notes.append(f"pixels are scaled as {default['origin']}'s are: there is no preprocessor_config.json")
        return build_preprocessing(a.image_size, a.in_channels, default)
    processor: _Preprocessor = _Preprocessor.parse(values, "preprocessor_config.json")
    if not processor.do_resize or not processor.do_rescale:
        notes.append("preprocessor_config.json leaves images unscaled or at their own size, which vitrail does not")
    if processor.resample not in RESAMPLE:
        notes.append(f"the filter {processor.resample} of the resize is replaced by bicubic")
    mean, std = (_repeat_number(value, a.in_channels) for value in (processor.image_mean, processor.image_std))
    if not processor.do_normalize:
        mean, std = (0.0,) * a.in_channels, (1.0,) * a.in_channels
    resized, crop = processor.size, processor.crop_size
    kind = processor.image_processor_type + processor.feature_extractor_type
    if "CLIP" in kind and isinstance(
        values.get("size"), int
    ):  # a number is the shorter side for CLIP's processor alone
        resized = _Size(shortest_edge=values["size"])
    target = (
        resized.height or resized.shortest_edge or a.image_size[0],
        resized.width or resized.shortest_edge or a.image_size[1],
    )
    size, fraction = target, 1.0
    if processor.do_center_crop and (side := crop.height or crop.shortest_edge):
        size = (side, crop.width or side)
        fraction = min(size[0] / target[0], 1.0)
    return build_preprocessing(
        size,
        a.in_channels,
        default,
        mean,
        std,
        resize="cover" if resized.shortest_edge else "squash",
        crop_fraction=fraction,
        interpolation=RESAMPLE.get(processor.resample, "bicubic"),
    )


def _repeat_number(value: float | tuple[float, ...] | None, channels: int) -> tuple[float, ...] | None:
    return (value,) * channels if isinstance(value, int | float) else value


def write_preprocessor(model: ImageModel) -> dict[str, Any]:
    """Return the content of preprocessor_config.json for a model."""
    p = model.preprocessing
    height, width = p.image_size
    cropped = p.crops
    exact_size = {"height": p.resized[0], "width": p.resized[1]}
    config: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor" if cropped else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": min(p.resized)} if p.resize == "cover" else exact_size,
        "resample": next(number for number, name in RESAMPLE.items() if name == p.interpolation),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
        "do_center_crop": cropped,
    }
    if cropped:
        config["crop_size"] = {"height": height, "width": width}
        config["do_convert_rgb"] = True
    return config
