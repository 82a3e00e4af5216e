"""Random numbers that are a function of a key, a sample number and a column, without a generator's state.

They have the same bits on every device, and neither the number of ranks nor the split of a batch changes them.

Shapes: B samples. Arithmetic is on int64, modulo 2⁶⁴.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.order import derive_seed


def _to_signed(word: int) -> int:
    """Return the same 64 bits as a signed integer, as torch's int64 holds them."""
    return word - (1 << 64) if word >> 63 else word


_STEP = _to_signed(0x9E3779B97F4A7C15)
_FIRST = _to_signed(0xBF58476D1CE4E5B9)
_SECOND = _to_signed(0x94D049BB133111EB)


def draw_uniform(key: int, samples: Tensor, count: int) -> Tensor:
    """Return (B, count) float32, uniform in [0, 1) in multiples of 2⁻²⁴, for (B,) int64 sample numbers."""
    return _shift_right(draw_words(key, samples, count), 40).float() * 2.0**-24


def draw_integers(key: int, samples: Tensor, count: int, below: int) -> Tensor:
    """Return (B, count) int64, uniform in 0 … below − 1 (all 0 if `below` is 0 or 1), for (B,) int64 sample numbers.

    They come from the same words as `draw_uniform`: use two keys for independent numbers.
    """
    return _shift_right(draw_words(key, samples, count), 32) * below >> 32


def draw_words(key: int, samples: Tensor, count: int) -> Tensor:
    """Return (B, count) int64 with 64 random bits each, for (B,) int64 sample numbers.

    `key` is any whole number. Neighbouring keys, samples and columns give unrelated words.
    """
    columns = torch.arange(1, count + 1, device=samples.device) * _STEP
    starts = _scramble(samples ^ _to_signed(derive_seed(key)))
    # One round suffices for most purposes; the second removes all traces of the even steps between columns.
    return _scramble(_scramble(starts[:, None] + columns))


def _scramble(values: Tensor) -> Tensor:
    """Map the values one to one so that every output bit depends on every input bit (SplitMix64's finaliser)."""
    values = (values ^ _shift_right(values, 30)) * _FIRST
    values = (values ^ _shift_right(values, 27)) * _SECOND
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift repeats the sign bit."""
    return values >> places & (1 << 64 - places) - 1
