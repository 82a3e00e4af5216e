"""Arrays of numbers inside a JSON file: their bytes in base64, checked when they are read."""

from __future__ import annotations

import base64
import binascii
import math
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from vitrail.config import Config

MOST_NUMBERS = 4_000_000
"""Numbers in one array: a file of strangers must not fill the memory."""
Kind = Literal["float16", "float32"]


class PackedArray(Config):
    """An array of finite numbers, as text."""

    kind: Kind
    shape: tuple[int, ...] = Field(min_length=1, max_length=2)
    data: str = Field(max_length=4 * MOST_NUMBERS * 4 // 3 + 4)
    """The numbers row by row, little-endian, in base64."""

    @classmethod
    def pack(cls, values: NDArray[Any], kind: Kind) -> Self:
        """Return an array of one or two dimensions as text; numbers are rounded to the kind."""
        rounded = np.ascontiguousarray(values, dtype=_little_endian(kind))
        return cls(kind=kind, shape=values.shape, data=base64.b64encode(rounded.tobytes()).decode("ascii"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedArray) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.kind, self.shape, self.data

    @cached_property
    def values(self) -> NDArray[Any]:
        """The array in float64. It cannot be written to."""
        content = base64.b64decode(self.data, validate=True)
        values = np.frombuffer(content, _little_endian(self.kind)).reshape(self.shape).astype(np.float64)
        values.flags.writeable = False
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.shape) < 1 or math.prod(self.shape) > MOST_NUMBERS:
            raise ValueError(f"shape = {self.shape}: an array has from 1 to {MOST_NUMBERS:,} numbers")
        try:
            length = len(base64.b64decode(self.data, validate=True))
        except (binascii.Error, ValueError):
            raise ValueError("data is not base64") from None
        if length != math.prod(self.shape) * _little_endian(self.kind).itemsize:
            raise ValueError(f"data has {length} bytes, which is not an array of shape {self.shape} of {self.kind}")
        if not np.isfinite(self.values).all():
            raise ValueError("data has numbers that are not finite")
        return self


def _little_endian(kind: Kind) -> np.dtype[Any]:
    return np.dtype(kind).newbyteorder("<")
