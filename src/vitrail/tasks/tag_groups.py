"""Find groups of tags of which every image has exactly one, such as day and night, or the breeds of a pet.

Such tags exclude each other, so a model that sees one of them knows that it does not see the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

LEAST_IMAGES = 100
"""Fewer images do not tell that tags exclude each other."""
LEAST_OF_EACH = 10
"""Fewer images with a tag do not tell either: among many rare tags, some complete each other by chance."""
MOST_TAGS = 1_000
MOST_STEPS = 10_000
"""Choices of a tag that a search may try; one that takes longer ends without a group."""


def find_tag_groups(images: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more tags of which each of these images has exactly one. No tag is in two groups.

    Frequent tags are tried first: cat and dog, rather than cat and all breeds of dogs.

    Args:
        images: the tags of each image. Fewer than `LEAST_IMAGES` images have no groups; nor has a tag that fewer than
            `LEAST_OF_EACH` of them have.
    """
    counts = Counter(frozenset(tags) for tags in images)
    frequencies = Counter[str]()
    for row, count in counts.items():
        frequencies.update(dict.fromkeys(row, count))
    if counts.total() < LEAST_IMAGES or not all(counts) or len(frequencies) > MOST_TAGS:
        return ()
    rows, groups = list(counts), list[tuple[str, ...]]()
    rows_of = _list_rows(rows)
    left = {tag for tag in frequencies if LEAST_OF_EACH <= frequencies[tag] < counts.total()}
    while left and (group := _find_group(rows, rows_of, left, frequencies)):
        groups.append(tuple(sorted(group)))
        left.difference_update(group)
    return tuple(groups)


def _list_rows(rows: list[frozenset[str]]) -> dict[str, int]:
    """Return for each tag the rows that have it, as the bits of a number: rows that have two tags are bits of both."""
    bits = dict[str, bytearray]()
    for place, row in enumerate(rows):
        for tag in row:
            if tag not in bits:
                bits[tag] = bytearray(len(rows) // 8 + 1)
            bits[tag][place // 8] |= 1 << place % 8
    return {tag: int.from_bytes(each, "little") for tag, each in bits.items()}


def _find_group(
    rows: list[frozenset[str]], rows_of: dict[str, int], tags: set[str], frequencies: Counter[str]
) -> tuple[str, ...]:
    """Return tags that cover every row exactly once, or nothing: a search in depth, the most frequent tags first."""
    everything = (1 << len(rows)) - 1
    paths: list[tuple[tuple[str, ...], int]] = [((), 0)]
    for _ in range(MOST_STEPS):
        if not paths:
            break
        chosen, covered = paths.pop()
        if covered == everything:
            return chosen
        open_rows = everything & ~covered
        first = (open_rows & -open_rows).bit_length() - 1
        candidates = [tag for tag in rows[first] & tags if not rows_of[tag] & covered]
        candidates.sort(key=lambda tag: (frequencies[tag], tag))  # the last is tried first
        paths += [((*chosen, tag), covered | rows_of[tag]) for tag in candidates]
    return ()
