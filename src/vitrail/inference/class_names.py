"""The names of ImageNet-1k's classes and ObjectNet's folders, and the search for the class that a name means.

Class numbers are those of nearly every model: the positions of the WordNet ids in sorted order.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from vitrail.model.base import ImageModel

NEARLY_ALL = 0.9
"""A model counts as an ImageNet model if at least this share of its labels are ImageNet's."""


def list_wnids() -> tuple[str, ...]:
    """Return the WordNet ids of classes 0 to 999: n01440764, …"""
    return tuple(wnid for wnid, _ in _read_table("imagenet_classes.tsv"))


def list_class_words() -> tuple[tuple[str, ...], ...]:
    """Return all of WordNet's words for each class, the usual word first.

    Classes can share a word: two are called "crane", and "missile" is also a second word for "projectile".
    """
    return tuple(tuple(words.split(", ")) for _, words in _read_table("imagenet_classes.tsv"))


def read_objectnet() -> dict[str, tuple[int, ...]]:
    """Return the 113 of ObjectNet's 313 folders that show ImageNet classes, each with the numbers of its classes."""
    return {folder: tuple(map(int, numbers.split(","))) for folder, numbers in _read_table("objectnet.tsv")}


@cache
def _read_table(table: str) -> tuple[tuple[str, str], ...]:
    lines = files("vitrail.inference").joinpath(table).read_text(encoding="utf-8").splitlines()
    return tuple((first, second) for first, _, second in (line.partition("\t") for line in lines))


# Which classes a name can mean


def fold_name(name: str) -> str:
    """Remove the differences between spellings: case, underscores, hyphens, blanks, composed letters."""
    text = unicodedata.normalize("NFKC", name).casefold()
    return " ".join(text.replace("_", " ").replace("-", " ").split()) or name


def split_words(name: str) -> set[str]:
    """Return the folded words of a name like "tench, Tinca tinca"; each word may stand alone for the class."""
    return {fold_name(part) for part in name.split(",") if part.strip()} or {name}


class OtherNames(NamedTuple):
    """The names used together with the name that is searched for. They help to tell similar classes apart."""

    exact: frozenset[str] = frozenset()
    folded: frozenset[str] = frozenset()

    @classmethod
    def from_names(cls, names: Sequence[str]) -> OtherNames:
        """Take all names of a data set or a model; the searched name itself may be among them."""
        return cls(frozenset(names), frozenset(map(fold_name, names)))


NO_NAMES = OtherNames()


class Vocabulary:
    """Finds classes by any of their names: by "tench, Tinca tinca" as a whole and by each of the two words."""

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        """Take the names of each class, in class order; the first name is the label."""
        self.labels = [class_names[0] if class_names else None for class_names in names]
        self.full_names = [set(map(fold_name, class_names)) for class_names in names]
        self.words = [{word for name in class_names for word in split_words(name)} for class_names in names]
        self.classes_by_word: dict[str, set[int]] = {}
        for number, words in enumerate(self.words):
            for word in words:
                self.classes_by_word.setdefault(word, set()).add(number)

    def find(self, name: str, others: OtherNames = NO_NAMES) -> set[int]:
        """Return the classes that a name can mean: none, one, or several if it is ambiguous.

        If several classes match, the exact label or the full name wins, provided `others` holds the competing names:
        next to "maillot, tank suit", "maillot" means the other class. Between labels that differ only in case
        ("a" and "A"), the exact one always wins.
        """
        words = split_words(name)
        matches = [self.classes_by_word[word] for word in words if word in self.classes_by_word]
        if not matches:
            return set()
        candidates = set.intersection(*matches) or set.union(*matches)
        if len(candidates) == 1 and not any(
            words <= self.words[number] or self.words[number] <= words for number in candidates
        ):
            return set()  # "dog, large" is not "dog, small": each has a word that the other lacks
        exact = {number for number in candidates if self.labels[number] == name}
        if len(exact) == 1 and all(
            len(self.words[number]) == 1 or self.labels[number] in others.exact for number in candidates - exact
        ):
            return exact
        full = {number for number in candidates if fold_name(name) in self.full_names[number]}
        if len(full) == 1 and all(self.full_names[number] & others.folded for number in candidates - full):
            return full
        return candidates


@cache
def build_vocabulary() -> Vocabulary:
    """Return the vocabulary of ImageNet's classes: their words and WordNet ids."""
    return Vocabulary(list_full_names())


@cache
def list_full_names() -> tuple[tuple[str, str], ...]:
    """Return two names of each ImageNet class: all of its words in one string, and its WordNet id."""
    return tuple((", ".join(words), wnid) for words, wnid in zip(list_class_words(), list_wnids(), strict=True))


def find_class_numbers(labels: Sequence[str] | None, num_classes: int) -> tuple[int | None, ...] | None:
    """Return the ImageNet-1k number of each of a model's classes, or None if they are not ImageNet's classes.

    A thousand classes without labels are taken to be ImageNet's. A class whose label is ambiguous or unknown is None.
    """
    thousand = len(list_wnids())
    if labels is None:
        return tuple(range(thousand)) if num_classes == thousand else None
    others = OtherNames.from_names(labels)
    candidates = [build_vocabulary().find(label, others) for label in labels]
    # Many models shorten or improve WordNet's names. If more than half are in their places, all are.
    if len(candidates) == thousand and sum(k in numbers for k, numbers in enumerate(candidates)) > thousand / 2:
        return tuple(range(thousand))
    certain = tuple(min(numbers) if len(numbers) == 1 else None for numbers in candidates)
    known = sum(number is not None for number in certain)
    return certain if known and known >= NEARLY_ALL * len(certain) else None


# What classes are called when they are shown


def get_display_labels(model: ImageModel) -> tuple[str, ...]:
    """Return the names of the model's classes in words, in class order; () for a model without classes."""
    return make_display_labels(model.labels, model.num_classes)


def make_display_labels(names: Sequence[str] | None, num_classes: int) -> tuple[str, ...]:
    """Turn class names into words that people can read.

    A WordNet id of ImageNet becomes its usual word. The id is added where several classes share that word:
    "crane (n02012849)". Other names stay as they are. Without names, a thousand classes are taken to be ImageNet's,
    and any other number of classes is called "class 0", "class 1", …
    """
    if names is None:
        names = list_wnids() if num_classes == len(list_wnids()) else [f"class {k}" for k in range(num_classes)]
    words = [translate_wnid(name) for name in names]
    count = Counter(words)
    pairs = zip(words, names, strict=True)
    return tuple(word if word == name or count[word] == 1 else f"{word} ({name})" for word, name in pairs)


def translate_wnid(name: str) -> str:
    """Return the usual word for one of ImageNet's WordNet ids, and any other name unchanged."""
    number = _number_wnids().get(name)
    return name if number is None else list_class_words()[number][0]


def annotate_wnid(name: str) -> str:
    """Return one of ImageNet's WordNet ids followed by its usual word, and any other name unchanged."""
    word = translate_wnid(name)
    return name if word == name else f"{name} {word}"


@cache
def _number_wnids() -> dict[str, int]:
    return {wnid: number for number, wnid in enumerate(list_wnids())}
