"""Find names that are probably misspelt: rare ones that differ from a frequent one by a letter, or by their case."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping

SHORTEST, LONGEST = 4, 100
"""Letters of names that are compared."""
SHORTEST_SWAPPED = 3
"""Letters of names that are compared for two that are swapped, such as dog and dgo."""
TIMES_RARER = 10
"""How many times rarer than its neighbour a name is that differs by a letter."""
_SPACES = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])")


def find_misspelt(counts: Mapping[str, int]) -> dict[str, str]:
    """Return for each name that is probably misspelt the more frequent one that was probably meant.

    Args:
        counts: how often each name occurs. A name that differs from another by its case, or by spaces, hyphens and
            underscores between letters alone, is misspelt if it is rarer; of two that are as frequent, and have
            four letters or more, the one that sorts last is. One that differs by a letter (one more, one less,
            another, or two swapped) is misspelt if it is at least 10 times rarer and has four letters or more, or
            three of which two are swapped.
            Names that differ by a digit or by other punctuation, such as room1 and room2 or C and C++, are not
            misspelt, and neither are numbers.
    """
    by_trace: dict[str, list[str]] = {}
    for name, count in counts.items():
        if count:
            for trace in set(_list_traces(_fold(name))):
                by_trace.setdefault(trace, []).append(name)
    found: dict[str, str] = {}
    for name in counts:
        near = {other for trace in _list_traces(_fold(name)) for other in by_trace.get(trace, ()) if other != name}
        meant = [other for other in near if _is_misspelt(name, other, counts)]
        if meant:
            found[name] = min(meant, key=lambda other: (-counts[other], other))
    return {name: meant for name, meant in found.items() if meant not in found}


def _fold(name: str) -> str:
    """Return a name without case, and without spaces, hyphens and underscores between letters."""
    return (_SPACES.sub("", name.casefold().strip()) or name)[:LONGEST]


def _list_traces(name: str) -> Iterator[str]:
    """Yield a name, and it without each of its letters: two names that differ by a letter share one of these."""
    yield name
    if len(name) >= SHORTEST_SWAPPED:
        yield from (name[:place] + name[place + 1 :] for place in range(len(name)))


def _is_misspelt(name: str, other: str, counts: Mapping[str, int]) -> bool:
    if _is_number(name) and _is_number(other):
        return False
    ours, theirs = _fold(name), _fold(other)
    if ours == theirs:
        is_last = counts[name] == counts[other] and name > other and len(ours) >= SHORTEST
        return counts[name] < counts[other] or is_last
    if counts[name] * TIMES_RARER > counts[other]:
        return False
    shortest = min(len(ours), len(theirs))
    # Equal letters at both ends leave at most one letter each, or two that are swapped.
    while ours and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    is_swapped = len(ours) == 2 and ours == theirs[::-1] and shortest >= SHORTEST_SWAPPED
    is_near = is_swapped or (max(len(ours), len(theirs)) <= 1 and shortest >= SHORTEST)
    return is_near and all(unicodedata.category(letter)[0] in "LM" for letter in ours + theirs)


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
