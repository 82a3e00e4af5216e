"""Which of a model's classes are right for each class of a data set.

Names decide, and where there are none, numbers. What is not certain is not matched: a word that stands for several
classes leaves its class out, and `LabelMap.how` says so.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.data.sources.source import read_file, make_printable
from vitrail.errors import DataError, did_you_mean
from vitrail.inference import class_names as imagenet
from vitrail.inference.class_names import NO_NAMES, OtherNames, Vocabulary, fold_name, split_words

SHOWN = 5
"""Names in a sentence."""
NEARLY_ALL = 0.9
"""Of a model's classes must be seen in data without names."""
OBJECTNET_KNOWN, OBJECTNET_LEAST = 100, 10
"""Data is ObjectNet if it has so many of its 113 folders that are ImageNet's; or only these, and at least so many."""
MOST_BYTES = 10_000_000
"""Of a mapping file."""
MOST_CLASSES = 1_000_000
_WNID = re.compile(r"n[0-9]{8}")


@dataclass(frozen=True)
class LabelMap:
    """For each class of a data set, the model's classes that are right."""

    accepted: tuple[tuple[int, ...], ...]
    """Numbers of the model's classes for each class of the data; () where the model has none."""
    how: str
    """What was matched with what, and what is left out, for the person to read."""

    @property
    def unmatched(self) -> tuple[int, ...]:
        """The data's classes that the model has no class for."""
        return tuple(number for number, classes in enumerate(self.accepted) if not classes)

    @cached_property
    def standing_for(self) -> dict[int, int]:
        """For each of the model's classes that is right for some, the first class of the data that it is right for."""
        return {guess: number for number, classes in reversed([*enumerate(self.accepted)]) for guess in classes}

    @property
    def is_identity(self) -> bool:
        """Whether every class of the data is the model's class of the same number."""
        return all(classes == (number,) for number, classes in enumerate(self.accepted))


def match_classes(
    model_labels: Sequence[str] | None, num_classes: int, data_classes: Sequence[str], data_count: int
) -> LabelMap:
    """Match a data set's classes with a model's; a DataError where that would be a guess.

    Args:
        model_labels: the names of the model's classes, where known.
        num_classes: of the model.
        data_classes: the names of the data's classes; empty where unknown.
        data_count: how many classes the data has, where it does not name them: its largest label and one.
    """
    if not data_classes:
        return _by_number(model_labels, num_classes, data_count)
    if model_labels is not None and tuple(model_labels) == tuple(data_classes):
        return LabelMap(_same(num_classes), "the same names in the same order")
    model = _Model(model_labels, num_classes)
    found = (
        _as_objectnet(model, data_classes)
        or _by_name(model, data_classes)
        or _by_names_that_are_numbers(model, data_classes)
    )
    if found is not None:
        return found
    if model_labels is None:
        return _in_order(num_classes, data_classes)
    raise DataError(
        f"none of the data's {len(data_classes)} classes ({_some(data_classes)}) is certainly one of the model's "
        f"{num_classes} ({_some(model_labels)}): {_WHAT_TO_DO}"
    )


_WHAT_TO_DO = (
    "fine-tune the model on this data, use `vitrail fewshot`, which needs no common classes, or give --map FILE, "
    "a CSV or JSON that says which class is which"
)


# By number


def _same(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((number,) for number in range(count))


def _by_number(model_labels: Sequence[str] | None, num_classes: int, data_count: int) -> LabelMap:
    """Data without names. What it has is told by its largest label, so the last classes may merely have no image."""
    who = "the data does not name its classes" if model_labels else "neither the model nor the data names its classes"
    if data_count and data_count == num_classes:
        return LabelMap(_same(data_count), f"by number: {who}")
    if 0 < data_count < num_classes and data_count >= min(num_classes - 1, NEARLY_ALL * num_classes):
        short = f"and its largest label is {data_count - 1} where the model has {num_classes} classes"
        return LabelMap(_same(data_count), f"by number: {who}, {short}")
    raise DataError(
        f"the data has {data_count} classes without names and the model {num_classes}, so their numbers do not "
        f"mean the same: name the data's classes (classes.txt beside shards), or {_WHAT_TO_DO}"
    )


def _in_order(num_classes: int, data_classes: Sequence[str]) -> LabelMap:
    """A model without names that is not ImageNet's."""
    if len(data_classes) != num_classes:
        raise DataError(
            f"the data has {len(data_classes)} classes ({_some(data_classes)}) and the model {num_classes} without "
            f"names: give the model its labels, or {_WHAT_TO_DO}"
        )
    return LabelMap(_same(num_classes), "by number: the model does not name its classes")


def _by_names_that_are_numbers(model: _Model, data_classes: Sequence[str]) -> LabelMap | None:
    """Folders called 0, 1, 10, 11, …: sorted as words, they are not in the order of the classes that they mean."""
    numbers = [int(name) for name in data_classes if _is_number(name)]
    if not len(numbers) == len(data_classes) == model.num_classes or set(numbers) != set(range(len(numbers))):
        return None
    found = LabelMap(tuple((number,) for number in numbers), "the data's names are the numbers of the model's classes")
    if model.labels is None and not model.is_imagenet and not found.is_identity:
        raise DataError(
            f"the data's classes are called {_some(data_classes)}, in this order, and the model has no names: whether "
            "its classes follow the numbers or this order cannot be told, so give it labels, or a mapping file"
        )
    return found


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


# By name


class _Model:
    """A model's classes by their labels, and by ImageNet's names and ids where they are ImageNet's."""

    def __init__(self, labels: Sequence[str] | None, num_classes: int) -> None:
        self.labels, self.num_classes = labels, num_classes
        numbers = imagenet.find_class_numbers(labels, num_classes)
        self.is_imagenet = numbers is not None
        self.by_number = {number: ours for ours, number in enumerate(numbers or ()) if number is not None}
        names: list[tuple[str, ...]] = [(label,) for label in labels or ()]
        if numbers is not None:
            theirs = imagenet.list_full_names()
            names = names or [()] * num_classes
            names = [(*ours, *(() if n is None else theirs[n])) for ours, n in zip(names, numbers, strict=True)]
        self.vocabulary = Vocabulary(names)

    def find(self, name: str, others: OtherNames = NO_NAMES) -> tuple[set[int], bool]:
        """The classes that a name can stand for, and whether it is certain; none at all is certain, too."""
        found = self.vocabulary.find(name, others)
        if len(found) == 1 and self.is_imagenet and not self._says(found, name):
            # "crane" is not certain though a model has only one of the two, unless that is what it calls it.
            return found, len(imagenet.build_vocabulary().find(name, others)) == 1
        return found, len(found) < 2

    def known_names(self) -> Sequence[str]:
        """Its labels, or ImageNet's in their place."""
        return self.labels or ([label for label, _ in imagenet.list_full_names()] if self.is_imagenet else ())

    def _says(self, found: set[int], name: str) -> bool:
        """Whether the model's own label has the name, not only ImageNet's."""
        return self.labels is not None and bool(split_words(self.labels[min(found)]) & split_words(name))


def _by_name(model: _Model, data_classes: Sequence[str]) -> LabelMap | None:
    beside = OtherNames.from_names(data_classes)
    found = [model.find(name, beside) for name in data_classes]
    accepted = tuple(tuple(classes) if certain else () for classes, certain in found)
    matched = [name for name, classes in zip(data_classes, accepted, strict=True) if classes]
    # That a model without names is ImageNet's is an assumption, which the data has to bear out.
    if len(matched) <= (0 if model.labels is not None else len(data_classes) / 2):
        return None
    how = _told_by_name(model, matched, len(data_classes))
    if uncertain := [name for name, (_, certain) in zip(data_classes, found, strict=True) if not certain]:
        how += f"; left out, since these names can stand for several classes: {_some(uncertain)}"
    absent = [name for name, (classes, _) in zip(data_classes, found, strict=True) if not classes]
    return LabelMap(accepted, how + _left_out(absent))


def _told_by_name(model: _Model, matched: Sequence[str], count: int) -> str:
    if model.labels is None:
        return "by ImageNet's names and WordNet ids: the model has 1000 classes without names, taken to be ImageNet's"
    if set(matched) <= set(model.labels):
        every = len(matched) == count == model.num_classes
        return "the same names in another order" if every else f"the same names, {len(matched)} of {model.num_classes}"
    if all(map(_WNID.fullmatch, matched)) or all(map(_WNID.fullmatch, model.labels)):
        return "by WordNet ids: both have classes of ImageNet"
    return "by names that are the same but for case, blanks, hyphens and synonyms"


def _as_objectnet(model: _Model, data_classes: Sequence[str]) -> LabelMap | None:
    """By ObjectNet's own table. Names alone would be wrong: its notebooks are of paper, its napkins no diapers."""
    table = {fold_name(folder): numbers for folder, numbers in imagenet.read_objectnet().items()}
    known = sum(fold_name(name) in table for name in data_classes)
    is_part = known == len(data_classes) >= OBJECTNET_LEAST
    if not model.is_imagenet or not (known >= OBJECTNET_KNOWN or is_part):
        return None
    numbers = [table.get(fold_name(name), ()) for name in data_classes]
    accepted = tuple(tuple(model.by_number[n] for n in some if n in model.by_number) for some in numbers)
    if not any(accepted):
        return None
    out = [name for name, classes in zip(data_classes, accepted, strict=True) if not classes]
    how = f"by ObjectNet's table of the {len(table)} of its classes that are ImageNet's, of which the data has {known}"
    return LabelMap(accepted, how + _left_out(out))


def _left_out(names: Sequence[str]) -> str:
    return f"; left out, since the model has no such class: {_some(names)}" if names else ""


def _some(names: Sequence[str]) -> str:
    """The first names, and how many there are."""
    first = ", ".join(make_printable(name[:50]) for name in names[:SHOWN])
    return first if len(names) <= SHOWN else f"{first}, … ({len(names)} in all)"


# By a file


def read_label_map(
    path: str | Path,
    model_labels: Sequence[str] | None,
    num_classes: int,
    data_classes: Sequence[str],
    data_count: int | None = None,
) -> LabelMap:
    """From a person's file: for a class of the data, by name or number, the model's by names, WordNet ids or numbers.

    CSV: `crow,American crow,raven` on a line, below a line `data,model` or not; more lines for a class add to it. JSON:
    `{"crow": ["American crow", 17]}`. Where names are themselves numbers, a number is a name. A class of the data that
    is not in the file, or has nothing beside it, is left out.

    `data_count`: how many classes the data has, where it does not name them; as many as the file names if None.
    """
    file, model, vocabulary = Path(path), _Model(model_labels, num_classes), Vocabulary([(n,) for n in data_classes])
    beside = OtherNames.from_names(data_classes)
    theirs = _Side("data", data_classes, len(data_classes) or data_count, lambda name: vocabulary.find(name, beside))
    ours = _Side("model", model.known_names(), num_classes, lambda name: model.find(name)[0])
    found: dict[int, set[int]] = {}
    for where, key, values in _entries(file):
        if (key, values) != ("data", ["model"]) or "data" in data_classes:
            found.setdefault(theirs.number(where, key), set()).update(ours.number(where, value) for value in values)
    if not any(found.values()):
        raise DataError(f"{make_printable(file)} names no class of the model: write lines such as `crow,raven`")
    accepted = tuple(tuple(sorted(found.get(number, ()))) for number in range(theirs.count or max(found) + 1))
    called = data_classes or [str(number) for number in range(len(accepted))]
    out = [name for name, classes in zip(called, accepted, strict=True) if not classes]
    told = f"; left out, since it gives no class for them: {_some(out)}" if out else ""
    return LabelMap(accepted, f"by {make_printable(file.name)}{told}")


class _Side:
    """The classes that a column of a mapping file speaks of."""

    def __init__(self, whose: str, names: Sequence[str], count: int | None, find: Callable[[str], set[int]]) -> None:
        self.whose, self.names, self.count, self.find = whose, names, count, find
        self.names_are_numbers = any(map(_is_number, names))

    def number(self, where: str, name: str) -> int:
        """Of the class that a name, an id or a number means."""
        most, found = self.count or MOST_CLASSES, self.find(name)
        if len(found) == 1:
            return min(found)
        if found:
            told = f"can stand for several classes of the {self.whose} ({', '.join(map(str, sorted(found)))})"
            raise DataError(f"{where}: {make_printable(name[:50])!r} {told}: give the number of the one that is meant")
        if _is_number(name) and not self.names_are_numbers and int(name) < most:
            return int(name)
        known = [*self.names, *(word for label in self.names for word in label.split(", "))]
        near = did_you_mean(name[:100], known) or ";"
        numbers = "" if self.names_are_numbers else f"numbers from 0 to {most - 1}"
        allowed = " and ".join(filter(None, [f"the names {_some(self.names)}" if self.names else "", numbers]))
        raise DataError(f"{where}: {make_printable(name[:50])!r} is no class of the {self.whose}{near} there are {allowed}")


def _entries(file: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Where it stands, a class of the data, and the model's classes for it."""
    text = read_small_text(file, MOST_BYTES)
    if file.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        yield from _from_json(file, text)
    else:
        yield from _from_csv(file, text)


def _from_json(file: Path, text: str) -> Iterator[tuple[str, str, list[str]]]:
    try:
        read = json.loads(text, object_pairs_hook=JsonPairs)
    except (ValueError, RecursionError):
        raise DataError(f"{make_printable(file)} is no JSON") from None
    if not isinstance(read, JsonPairs):
        raise DataError(f'{make_printable(file)} holds no JSON object: write {{"class of the data": ["class of the model"]}}')
    for name, value in read:
        values = [] if value is None else value if type(value) is list else [value]
        if not all(isinstance(one, str) or type(one) is int for one in values):
            raise DataError(
                f"{make_printable(file)}: what it holds for {make_printable(name[:50])!r} is no name, no number and no list of them"
            )
        yield make_printable(file), name, [str(one) for one in values]


def _from_csv(file: Path, text: str) -> Iterator[tuple[str, str, list[str]]]:
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in "\t,;" if mark in first), ",")
    reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells) and not cells[0]:
                raise DataError(
                    f"{make_printable(file)}, line {reader.line_num}: there is no class of the data in the first column"
                )
            if any(cells):
                yield f"{make_printable(file)}, line {reader.line_num}", cells[0], [cell for cell in cells[1:] if cell]
    except csv.Error as error:
        raise DataError(f"{make_printable(file)}, line {reader.line_num}, cannot be read: {error}") from None


class JsonPairs(list[tuple[str, Any]]):
    """A JSON object as it was written, with what it holds twice: an `object_pairs_hook`."""


def read_small_text(file: Path, most_bytes: int) -> str:
    """A whole text file; a DataError where it is none, or larger than makes sense."""
    try:
        if (size := file.stat().st_size) > most_bytes:
            raise DataError(f"{size:,} bytes, more than the {most_bytes:,} allowed")
        return read_file(file).decode("utf-8-sig")
    except (OSError, ValueError, DataError) as error:
        told = "no UTF-8 text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        raise DataError(f"{make_printable(file)} cannot be read: {told}") from None
