"""Random numbers that are computed from what they are for, not drawn from a state.

A number is a function of a key, the number of a sample and a column. So it is the same bits on every device, and
neither ranks nor the parts that a batch is computed in change it.

Shapes: B samples. Arithmetic is on int64, modulo 2⁶⁴.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.order import derive_seed


def _signed(word: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return word - (1 << 64) if word >> 63 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def uniform(key: int, samples: Tensor, count: int) -> Tensor:
    """(B,) int64 sample numbers → (B, count) float32, uniform in [0, 1): multiples of 2⁻²⁴."""
    return _shifted(words(key, samples, count), 40).float() * 2.0**-24


def integers(key: int, samples: Tensor, count: int, below: int) -> Tensor:
    """(B,) int64 sample numbers → (B, count) int64, uniform in 0 … below − 1; all 0 where `below` is 0 or 1.

    From the same words as `uniform`: two things that are to be independent need two keys.
    """
    return _shifted(words(key, samples, count), 32) * below >> 32


def words(key: int, samples: Tensor, count: int) -> Tensor:
    """(B,) int64 sample numbers → (B, count) int64, of which every bit is random.

    `key`: any whole number. Neighbouring keys, samples and columns have nothing in common.
    """
    columns = torch.arange(1, count + 1, device=samples.device) * _STEP
    starts = _scrambled(samples ^ _signed(derive_seed(key)))
    # Once is enough for most purposes; twice leaves nothing of the even steps between columns.
    return _scrambled(_scrambled(starts[:, None] + columns))


def _scrambled(values: Tensor) -> Tensor:
    """One to one; every bit out depends on every bit in (the finaliser of SplitMix64)."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """To the right with zeros moving in: torch's own shift repeats the sign."""
    return values >> places & (1 << 64 - places) - 1
