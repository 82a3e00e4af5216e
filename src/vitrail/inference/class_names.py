"""ImageNet-1k's classes by their WordNet ids and names; which of them a name can stand for, and which ObjectNet shows.

Class numbers are those of nearly every model: the places of the WordNet ids in sorted order.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

NEARLY_ALL = 0.9
"""Of a model's labels must be ImageNet's, for the model to be so."""


def wnids() -> tuple[str, ...]:
    """The WordNet ids of the classes 0 to 999: n01440764, …"""
    return tuple(wnid for wnid, _ in _rows("imagenet_classes.tsv"))


def names() -> tuple[tuple[str, ...], ...]:
    """All of WordNet's words for each class, the usual one first.

    A word is not always one class: two are called "crane", and "missile" is also a second word for "projectile".
    """
    return tuple(tuple(words.split(", ")) for _, words in _rows("imagenet_classes.tsv"))


def objectnet() -> dict[str, tuple[int, ...]]:
    """ObjectNet's folders that show classes of ImageNet (113 of 313), with the numbers of these classes."""
    return {folder: tuple(map(int, numbers.split(","))) for folder, numbers in _rows("objectnet.tsv")}


@cache
def _rows(table: str) -> tuple[tuple[str, str], ...]:
    lines = files("vitrail.inference").joinpath(table).read_text(encoding="utf-8").splitlines()
    return tuple((first, second) for first, _, second in (line.partition("\t") for line in lines))


# What names can stand for


def folded(name: str) -> str:
    """A name without what spellings differ in: case, underscores, hyphens, blanks, composed letters."""
    text = unicodedata.normalize("NFKC", name).casefold()
    return " ".join(text.replace("_", " ").replace("-", " ").split()) or name


def spellings(name: str) -> set[str]:
    """The folded words of "tench, Tinca tinca", each of which may be used alone."""
    return {folded(part) for part in name.split(",") if part.strip()} or {name}


class Beside(NamedTuple):
    """The names that stand beside a name."""

    spelled: frozenset[str] = frozenset()
    folded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Sequence[str]) -> Beside:
        """All names of a data set or a model; that a name stands beside itself changes nothing."""
        return cls(frozenset(names), frozenset(map(folded, names)))


NOTHING = Beside()


class Vocabulary:
    """Classes by whatever they are called: "tench, Tinca tinca" as a whole, and by each of the two words."""

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        """`names`: of each class, its label first."""
        self.labels = [called[0] if called else None for called in names]
        self.wholes = [set(map(folded, called)) for called in names]
        self.words = [{word for name in called for word in spellings(name)} for called in names]
        self.owners: dict[str, set[int]] = {}
        for number, words in enumerate(self.words):
            for word in words:
                self.owners.setdefault(word, set()).add(number)

    def find(self, name: str, beside: Beside = NOTHING) -> set[int]:
        """The classes that a name can stand for: none, one, or several where it is not certain.

        Whoever says "maillot" beside "maillot, tank suit", or "a" beside "A", does not mean the other. The latter need
        not stand beside it, if case is all that the two differ in.
        """
        said = set(spellings(name))
        known = [self.owners[word] for word in said if word in self.owners]
        if not known:
            return set()
        found = set.intersection(*known) or set.union(*known)
        if len(found) == 1 and not any(said <= self.words[number] or self.words[number] <= said for number in found):
            return set()  # "dog, large" is not "dog, small": each has a word that the other lacks
        spelled = {number for number in found if self.labels[number] == name}
        if len(spelled) == 1 and all(
            len(self.words[number]) == 1 or self.labels[number] in beside.spelled for number in found - spelled
        ):
            return spelled
        whole = {number for number in found if folded(name) in self.wholes[number]}
        if len(whole) == 1 and all(self.wholes[number] & beside.folded for number in found - whole):
            return whole
        return found


def in_words(name: str) -> str:
    """A WordNet id of ImageNet's with the word for it; any other name as it is."""
    word = as_word(name)
    return name if word == name else f"{name} {word}"


def as_word(name: str) -> str:
    """The word for a WordNet id of ImageNet's; any other name as it is."""
    number = _numbers().get(name)
    return name if number is None else names()[number][0]


@cache
def _numbers() -> dict[str, int]:
    return {wnid: number for number, wnid in enumerate(wnids())}


@cache
def full_names() -> tuple[tuple[str, str], ...]:
    """Two names of each class: all of its words, and its WordNet id."""
    return tuple((", ".join(words), wnid) for words, wnid in zip(names(), wnids(), strict=True))


@cache
def vocabulary() -> Vocabulary:
    """ImageNet's classes by their words and ids."""
    return Vocabulary(full_names())


def numbers_of(labels: Sequence[str] | None, num_classes: int) -> tuple[int | None, ...] | None:
    """The number in ImageNet-1k of each of a model's classes; None if they are not ImageNet's.

    A thousand classes without labels are taken to be ImageNet's. A class is None where its label leaves it open.
    """
    thousand = len(wnids())
    if labels is None:
        return tuple(range(thousand)) if num_classes == thousand else None
    beside = Beside.of(labels)
    found = [vocabulary().find(label, beside) for label in labels]
    # Short or improved names are often not WordNet's, but where half of them are in their places, all are.
    if len(found) == thousand and sum(place in numbers for place, numbers in enumerate(found)) > thousand / 2:
        return tuple(range(thousand))
    certain = tuple(min(numbers) if len(numbers) == 1 else None for numbers in found)
    known = sum(number is not None for number in certain)
    return certain if known and known >= NEARLY_ALL * len(certain) else None
