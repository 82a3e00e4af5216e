"""The order of samples as a function of a seed and a position: nothing to keep, nothing to restore.

Training sees one endless sequence of positions 0, 1, 2, …. Position p lies in epoch p // count, and every epoch is a
permutation of its own that is computed, not stored: ten samples and ten billion cost the same memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]
ROUNDS = 8
_MASK = (1 << 64) - 1


def derive_seed(*values: int) -> int:
    """A 64-bit number that depends on every bit of every value: the key of whatever is random."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + (value & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(positions: Indices, count: int, key: int, inverse: bool = False) -> Indices:
    """Where a keyed permutation of 0 … count − 1 sends each position (or where from), in constant memory.

    A Feistel network permutes the next power of four; what lands beyond `count` goes through it again, until it does
    not. That is a permutation too.
    """
    half = max((count - 1).bit_length() + 1 >> 1, 1)
    keys = [np.uint64(derive_seed(key, count, number)) for number in range(ROUNDS)]
    through = _feistel_back if inverse else _feistel
    found = positions.astype(np.uint64)
    outside = np.ones(found.shape, dtype=bool)
    while outside.any():
        found[outside] = through(found[outside], half, keys)
        outside = found >= count
    return found.astype(np.int64)


def _feistel(values: Words, half: int, keys: list[np.uint64]) -> Words:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_hashed(right + key) & mask)
    return left << bits | right


def _feistel_back(values: Words, half: int, keys: list[np.uint64]) -> Words:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in reversed(keys):
        left, right = right ^ (_hashed(left + key) & mask), left
    return left << bits | right


def _hashed(values: Words) -> Words:
    """Every bit out depends on every bit in; arithmetic is modulo 2⁶⁴."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Order:
    """Which sample stands at a position of the endless sequence.

    Two levels. First the blocks of samples that lie side by side change places; then samples change places within a
    window of that sequence, which holds many blocks, so that a batch is not made of neighbours. With a block of 1 the
    first level alone is a whole permutation. Files that are read in strides want larger blocks.
    """

    def __init__(self, count: int, seed: int, block: int = 1, window: int = 1) -> None:
        """`block`: samples side by side; `window`: samples mixed with each other, no fewer than a block."""
        self.count, self.seed, self.block = count, seed, min(block, count)
        self.window = min(max(window, self.block), count)

    def __call__(self, positions: Indices) -> tuple[Indices, Indices]:
        """Positions of the endless sequence → (epoch, sample index) of each."""
        epochs, places = np.divmod(positions.astype(np.int64), self.count)
        return epochs, _each(epochs, places, self._in_epoch)

    def _in_epoch(self, epoch: int, places: Indices) -> Indices:
        key = derive_seed(self.seed, epoch)
        if self.block > 1:
            windows, within = np.divmod(places, self.window)
            places = windows * self.window + _each(windows, within, lambda w, p: self._in_window(key, w, p))
        return self._by_blocks(key, places)

    def _in_window(self, key: int, window: int, within: Indices) -> Indices:
        length = min(self.window, self.count - window * self.window)
        return permute(within, length, derive_seed(key, 1, window))

    def _by_blocks(self, key: int, places: Indices) -> Indices:
        """The last block may be short; what comes after the place it is sent to moves up."""
        blocks, key = -(-self.count // self.block), derive_seed(key, 0)
        short = blocks * self.block - self.count
        if short:
            (last,) = permute(np.array([blocks - 1]), blocks, key, inverse=True)
            places = places + np.where(places >= (last + 1) * self.block - short, short, 0)
        order, offset = np.divmod(places, self.block)
        return permute(order, blocks, key) * self.block + offset


def _each(groups: Indices, values: Indices, function: Callable[[int, Indices], Indices]) -> Indices:
    """A function of a group's number and its values, applied group by group; there are few in a batch."""
    found = np.empty_like(values)
    for group in np.unique(groups):
        chosen = groups == group
        found[chosen] = function(int(group), values[chosen])
    return found
