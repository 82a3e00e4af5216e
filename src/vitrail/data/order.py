"""Shuffle samples without a list: the order is a function of a seed and a position, so there is no state to save.

Training sees one endless sequence of positions 0, 1, 2, …. Position p belongs to epoch p // count, and each epoch has
a permutation of its own that is computed, not stored. Ten samples and ten billion need the same memory.
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
    """Return a 64-bit seed that depends on every bit of every value, such as (seed, epoch, sample index)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + (value & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(positions: Indices, count: int, key: int, inverse: bool = False) -> Indices:
    """Return where a keyed permutation of 0 … count − 1 (or its inverse) sends each position, in constant memory.

    A Feistel network permutes the numbers below the next power of four. A result of `count` or more goes through the
    network again until it is below `count`; the whole is still a permutation.
    """
    half = max((count - 1).bit_length() + 1 >> 1, 1)
    keys = [np.uint64(derive_seed(key, count, number)) for number in range(ROUNDS)]
    network = _feistel_back if inverse else _feistel
    results = positions.astype(np.uint64)
    outside = np.ones(results.shape, dtype=bool)
    while outside.any():
        results[outside] = network(results[outside], half, keys)
        outside = results >= count
    return results.astype(np.int64)


def _feistel(values: Words, half: int, keys: list[np.uint64]) -> Words:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_hash_words(right + key) & mask)
    return left << bits | right


def _feistel_back(values: Words, half: int, keys: list[np.uint64]) -> Words:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in reversed(keys):
        left, right = right ^ (_hash_words(left + key) & mask), left
    return left << bits | right


def _hash_words(values: Words) -> Words:
    """Every output bit depends on every input bit; the arithmetic is modulo 2⁶⁴."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Order:
    """Tells which sample is at a position of the endless training sequence.

    The shuffle has two levels. First, blocks of neighbouring samples change places. Then samples change places within
    a window that spans many blocks, so that a batch does not consist of neighbours. With a block of 1 the first level
    alone is a full shuffle; files that are read in large pieces need larger blocks.
    """

    def __init__(self, count: int, seed: int, block: int = 1, window: int = 1) -> None:
        """
        Args:
            count: samples in an epoch.
            seed: decides the order.
            block: neighbouring samples that stay together in the first level.
            window: samples that are mixed with each other in the second level; at least one block.
        """
        self.count, self.seed, self.block = count, seed, min(block, count)
        self.window = min(max(window, self.block), count)

    def __call__(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the epoch and the sample index of each position."""
        epochs, places = np.divmod(positions.astype(np.int64), self.count)
        return epochs, _apply_by_group(epochs, places, self._shuffle_epoch)

    def _shuffle_epoch(self, epoch: int, places: Indices) -> Indices:
        key = derive_seed(self.seed, epoch)
        if self.block > 1:
            windows, within = np.divmod(places, self.window)
            shuffled = _apply_by_group(windows, within, lambda w, p: self._shuffle_window(key, w, p))
            places = windows * self.window + shuffled
        return self._shuffle_blocks(key, places)

    def _shuffle_window(self, key: int, window: int, within: Indices) -> Indices:
        length = min(self.window, self.count - window * self.window)
        return permute(within, length, derive_seed(key, 1, window))

    def _shuffle_blocks(self, key: int, places: Indices) -> Indices:
        """The last block may be short; every place after it then moves up by the samples it lacks."""
        blocks, key = -(-self.count // self.block), derive_seed(key, 0)
        lacking = blocks * self.block - self.count
        if lacking:
            (last,) = permute(np.array([blocks - 1]), blocks, key, inverse=True)
            places = places + np.where(places >= (last + 1) * self.block - lacking, lacking, 0)
        order, offset = np.divmod(places, self.block)
        return permute(order, blocks, key) * self.block + offset


def _apply_by_group(groups: Indices, values: Indices, function: Callable[[int, Indices], Indices]) -> Indices:
    """Apply a function of (group number, values of the group) to each group; a batch has few groups."""
    results = np.empty_like(values)
    for group in np.unique(groups):
        members = groups == group
        results[members] = function(int(group), values[members])
    return results
