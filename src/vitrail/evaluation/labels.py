"""Match the classes of a data set with those of a model.

Names decide; without names, numbers do. Only certain matches are made: a class whose name can mean several classes of
the model is left out, and `LabelMap.explanation` says so.
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

from vitrail.data.sources.source import make_printable, read_small_text
from vitrail.errors import DataError, did_you_mean
from vitrail.inference import class_names
from vitrail.inference.class_names import NO_NAMES, OtherNames, Vocabulary, fold_name, split_words

LISTED = 5
"""Names in a sentence, at most."""
NEARLY_ALL = 0.9
"""Data without names must show at least this share of the model's classes."""
OBJECTNET_KNOWN, OBJECTNET_LEAST = 100, 10
"""Data is ObjectNet if it has this many of the 113 folders that ImageNet shares; or only such folders, and at least
this many."""
MOST_BYTES = 10_000_000
"""Largest mapping file that is read."""
MOST_CLASSES = 1_000_000
_WNID = re.compile(r"n[0-9]{8}")


@dataclass(frozen=True)
class LabelMap:
    """For each class of a data set, the classes of the model that are right."""

    accepted: tuple[tuple[int, ...], ...]
    """Numbers of the model's classes for each class of the data; () if the model has none."""
    explanation: str
    """For people: what was matched with what, and what is left out."""
    is_objectnet: bool = False
    """Whether the data is ObjectNet, whose images have a red frame that must be cut off."""

    @property
    def unmatched(self) -> tuple[int, ...]:
        """The data's classes that have no class of the model."""
        return tuple(number for number, classes in enumerate(self.accepted) if not classes)

    @cached_property
    def standing_for(self) -> dict[int, int]:
        """For each class of the model that is accepted anywhere, the first class of the data that accepts it."""
        return {guess: number for number, classes in reversed([*enumerate(self.accepted)]) for guess in classes}

    @property
    def is_identity(self) -> bool:
        """Whether every class of the data is the model's class of the same number."""
        return all(classes == (number,) for number, classes in enumerate(self.accepted))


def match_classes(
    model_labels: Sequence[str] | None, num_classes: int, data_classes: Sequence[str], data_count: int
) -> LabelMap:
    """Match a data set's classes with a model's.

    Args:
        model_labels: the names of the model's classes, if known.
        num_classes: the number of the model's classes.
        data_classes: the names of the data's classes; empty if unknown.
        data_count: the number of the data's classes if they have no names: the largest label plus one.

    Raises:
        DataError: a match would be a guess.
    """
    if not data_classes:
        return _match_numbers(model_labels, num_classes, data_count)
    if model_labels is not None and tuple(model_labels) == tuple(data_classes):
        return LabelMap(_identity(num_classes), "the same names in the same order")
    model = _ModelClasses(model_labels, num_classes)
    for match in (_match_objectnet, _match_names, _match_numeric_names):
        if (label_map := match(model, data_classes)) is not None:
            return label_map
    if model_labels is None:
        return _match_in_order(num_classes, data_classes)
    raise DataError(
        f"none of the data's {len(data_classes)} classes ({_list_first(data_classes)}) is certainly one of the model's "
        f"{num_classes} ({_list_first(model_labels)}): {_WHAT_TO_DO}"
    )


_WHAT_TO_DO = (
    "fine-tune the model on this data, use `vitrail fewshot`, which needs no common classes, or give --map FILE, "
    "a CSV or JSON that says which class is which"
)


# Matching by number


def _identity(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((number,) for number in range(count))


def _match_numbers(model_labels: Sequence[str] | None, num_classes: int, data_count: int) -> LabelMap:
    """Match data without names. The last classes may have no image, since the largest label gives their number."""
    who = "the data does not name its classes" if model_labels else "neither the model nor the data names its classes"
    if data_count and data_count == num_classes:
        return LabelMap(_identity(data_count), f"by number: {who}")
    if 0 < data_count < num_classes and data_count >= min(num_classes - 1, NEARLY_ALL * num_classes):
        short = f"and its largest label is {data_count - 1} where the model has {num_classes} classes"
        return LabelMap(_identity(data_count), f"by number: {who}, {short}")
    raise DataError(
        f"the data has {data_count} classes without names and the model {num_classes}, so their numbers do not "
        f"mean the same: name the data's classes (classes.txt beside shards), or {_WHAT_TO_DO}"
    )


def _match_in_order(num_classes: int, data_classes: Sequence[str]) -> LabelMap:
    """Match data with names to a model that has neither names nor ImageNet's number of classes."""
    if len(data_classes) != num_classes:
        raise DataError(
            f"the data has {len(data_classes)} classes ({_list_first(data_classes)}) and the model {num_classes} "
            f"without names: give the model its labels, or {_WHAT_TO_DO}"
        )
    return LabelMap(_identity(num_classes), "by number: the model does not name its classes")


def _match_numeric_names(model: _ModelClasses, data_classes: Sequence[str]) -> LabelMap | None:
    """Match folders named 0, 1, 10, 11, …: sorted as words, they are not in the order of the classes they mean."""
    numbers = [int(name) for name in data_classes if _is_number(name)]
    if not len(numbers) == len(data_classes) == model.num_classes or set(numbers) != set(range(len(numbers))):
        return None
    accepted = tuple((number,) for number in numbers)
    label_map = LabelMap(accepted, "the data's names are the numbers of the model's classes")
    if model.labels is None and not model.is_imagenet and not label_map.is_identity:
        raise DataError(
            f"the data's classes are called {_list_first(data_classes)}, in this order, and the model has no names: it "
            "is unclear whether its classes follow the numbers or this order, so give it labels, or a mapping file"
        )
    return label_map


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


# Matching by name


class _ModelClasses:
    """Finds a model's classes by their labels, and by ImageNet's names and WordNet ids if they are ImageNet's."""

    def __init__(self, labels: Sequence[str] | None, num_classes: int) -> None:
        self.labels, self.num_classes = labels, num_classes
        numbers = class_names.find_class_numbers(labels, num_classes)
        self.is_imagenet = numbers is not None
        self.by_imagenet_number = {number: ours for ours, number in enumerate(numbers or ()) if number is not None}
        names: list[tuple[str, ...]] = [(label,) for label in labels or ()]
        if numbers is not None:
            imagenet_names = class_names.list_full_names()
            names = names or [()] * num_classes
            names = [(*ours, *(() if n is None else imagenet_names[n])) for ours, n in zip(names, numbers, strict=True)]
        self.vocabulary = Vocabulary(names)

    def find(self, name: str, others: OtherNames = NO_NAMES) -> tuple[set[int], bool]:
        """Return the classes that a name can mean, and whether this is certain. Finding none is certain, too."""
        matches = self.vocabulary.find(name, others)
        if len(matches) == 1 and self.is_imagenet and not self._is_own_word(matches, name):
            # ImageNet has two classes "crane". A model with only one of them does not make the word certain, unless
            # the model's own label says "crane".
            return matches, len(class_names.build_vocabulary().find(name, others)) == 1
        return matches, len(matches) < 2

    def known_names(self) -> Sequence[str]:
        """Return the model's labels, or ImageNet's if it has none."""
        return self.labels or ([label for label, _ in class_names.list_full_names()] if self.is_imagenet else ())

    def _is_own_word(self, matches: set[int], name: str) -> bool:
        """Return whether the model's own label has the word, not only ImageNet's."""
        return self.labels is not None and bool(split_words(self.labels[min(matches)]) & split_words(name))


def _match_names(model: _ModelClasses, data_classes: Sequence[str]) -> LabelMap | None:
    others = OtherNames.from_names(data_classes)
    candidates = [model.find(name, others) for name in data_classes]
    accepted = tuple(tuple(classes) if certain else () for classes, certain in candidates)
    matched = [name for name, classes in zip(data_classes, accepted, strict=True) if classes]
    # That a model without names is ImageNet's is an assumption; at least half of the data's names must confirm it.
    if len(matched) <= (0 if model.labels is not None else len(data_classes) / 2):
        return None
    explanation = _explain_name_match(model, matched, len(data_classes))
    if uncertain := [name for name, (_, certain) in zip(data_classes, candidates, strict=True) if not certain]:
        explanation += f"; left out, since these names can stand for several classes: {_list_first(uncertain)}"
    absent = [name for name, (classes, _) in zip(data_classes, candidates, strict=True) if not classes]
    return LabelMap(accepted, explanation + _explain_left_out(absent))


def _explain_name_match(model: _ModelClasses, matched: Sequence[str], count: int) -> str:
    if model.labels is None:
        return "by ImageNet's names and WordNet ids: the model has 1000 classes without names, taken to be ImageNet's"
    if set(matched) <= set(model.labels):
        every = len(matched) == count == model.num_classes
        return "the same names in another order" if every else f"the same names, {len(matched)} of {model.num_classes}"
    if all(map(_WNID.fullmatch, matched)) or all(map(_WNID.fullmatch, model.labels)):
        return "by WordNet ids: both have classes of ImageNet"
    return "by names that are the same but for case, blanks, hyphens and synonyms"


def _match_objectnet(model: _ModelClasses, data_classes: Sequence[str]) -> LabelMap | None:
    """Match by ObjectNet's own table. Names alone would be wrong: its notebooks are made of paper."""
    table = {fold_name(folder): numbers for folder, numbers in class_names.read_objectnet().items()}
    known = sum(fold_name(name) in table for name in data_classes)
    is_part = known == len(data_classes) >= OBJECTNET_LEAST
    if not model.is_imagenet or not (known >= OBJECTNET_KNOWN or is_part):
        return None
    rows = [table.get(fold_name(name), ()) for name in data_classes]
    ours = model.by_imagenet_number
    accepted = tuple(tuple(ours[number] for number in numbers if number in ours) for numbers in rows)
    if not any(accepted):
        return None
    absent = [name for name, classes in zip(data_classes, accepted, strict=True) if not classes]
    how = f"by ObjectNet's table of the {len(table)} of its classes that are ImageNet's, of which the data has {known}"
    how += "; its images are scored without their red frames"
    return LabelMap(accepted, how + _explain_left_out(absent), is_objectnet=True)


def _explain_left_out(names: Sequence[str]) -> str:
    return f"; left out, since the model has no such class: {_list_first(names)}" if names else ""


def _list_first(names: Sequence[str]) -> str:
    """Return the first names, and how many there are in all."""
    first = ", ".join(make_printable(name[:50]) for name in names[:LISTED])
    return first if len(names) <= LISTED else f"{first}, … ({len(names)} in all)"


# Matching by a person's file


def read_label_map(
    path: str | Path,
    model_labels: Sequence[str] | None,
    num_classes: int,
    data_classes: Sequence[str],
    data_count: int | None = None,
) -> LabelMap:
    """Read a file that lists the right classes of the model for each class of the data.

    Classes are given by name or number; the model's also by WordNet id. If names are numbers themselves, a number is a
    name. Classes of the data that the file does not mention are left out.

    CSV: a line such as `crow,American crow,raven`, with or without a first line `data,model`; several lines for one
    class add up. JSON: `{"crow": ["American crow", 17]}`.

    Args:
        path: the file.
        model_labels, num_classes, data_classes: as for `match_classes`.
        data_count: the number of the data's classes if they have no names; by default as many as the file names.

    Raises:
        DataError: the file cannot be read, or names an unknown or ambiguous class.
    """
    file, model = Path(path), _ModelClasses(model_labels, num_classes)
    vocabulary, others = Vocabulary([(name,) for name in data_classes]), OtherNames.from_names(data_classes)
    count = len(data_classes) or data_count
    of_data = _ClassColumn("data", data_classes, count, lambda name: vocabulary.find(name, others))
    of_model = _ClassColumn("model", model.known_names(), num_classes, lambda name: model.find(name)[0])
    matches: dict[int, set[int]] = {}
    for where, key, values in _read_entries(file):
        if (key, values) != ("data", ["model"]) or "data" in data_classes:
            numbers = {of_model.find_number(where, value) for value in values}
            matches.setdefault(of_data.find_number(where, key), set()).update(numbers)
    if not any(matches.values()):
        raise DataError(f"{make_printable(file)} names no class of the model: write lines such as `crow,raven`")
    accepted = tuple(tuple(sorted(matches.get(number, ()))) for number in range(count or max(matches) + 1))
    names = data_classes or [str(number) for number in range(len(accepted))]
    absent = [name for name, classes in zip(names, accepted, strict=True) if not classes]
    left_out = f"; left out, since it gives no class for them: {_list_first(absent)}" if absent else ""
    return LabelMap(accepted, f"by {make_printable(file.name)}{left_out}")


class _ClassColumn:
    """One side of a mapping file: the classes of the data, or those of the model."""

    def __init__(self, whose: str, names: Sequence[str], count: int | None, find: Callable[[str], set[int]]) -> None:
        self.whose, self.names, self.count, self.find = whose, names, count, find
        self.names_are_numbers = any(map(_is_number, names))

    def find_number(self, where: str, name: str) -> int:
        """Return the number of the class that a name, an id or a number means."""
        most, matches = self.count or MOST_CLASSES, self.find(name)
        if len(matches) == 1:
            return min(matches)
        if matches:
            several = f"can stand for several classes of the {self.whose} ({', '.join(map(str, sorted(matches)))})"
            raise DataError(f"{where}: {make_printable(name[:50])!r} {several}: give the number of the right one")
        if _is_number(name) and not self.names_are_numbers and int(name) < most:
            return int(name)
        known = [*self.names, *(word for label in self.names for word in label.split(", "))]
        near = did_you_mean(name[:100], known) or ";"
        numbers = "" if self.names_are_numbers else f"numbers from 0 to {most - 1}"
        allowed = " and ".join(filter(None, [f"the names {_list_first(self.names)}" if self.names else "", numbers]))
        raise DataError(
            f"{where}: {make_printable(name[:50])!r} is no class of the {self.whose}{near} there are {allowed}"
        )


def _read_entries(file: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (place in the file, class of the data, classes of the model)."""
    text = read_small_text(file, MOST_BYTES)
    if file.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        yield from _read_json(file, text)
    else:
        yield from _read_csv(file, text)


def _read_json(file: Path, text: str) -> Iterator[tuple[str, str, list[str]]]:
    where = make_printable(file)
    try:
        content = json.loads(text, object_pairs_hook=JsonPairs)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is no JSON") from None
    if not isinstance(content, JsonPairs):
        raise DataError(f'{where} holds no JSON object: write {{"class of the data": ["class of the model"]}}')
    for name, value in content:
        values = [] if value is None else value if type(value) is list else [value]
        if not all(isinstance(one, str) or type(one) is int for one in values):
            raise DataError(f"{where}: the entry {make_printable(name[:50])!r} is no name, number or list of them")
        yield where, name, [str(one) for one in values]


def _read_csv(file: Path, text: str) -> Iterator[tuple[str, str, list[str]]]:
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in "\t,;" if mark in first), ",")
    reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
    try:
        for row in reader:
            cells, where = [cell.strip() for cell in row], f"{make_printable(file)}, line {reader.line_num}"
            if any(cells) and not cells[0]:
                raise DataError(f"{where}: there is no class of the data in the first column")
            if any(cells):
                yield where, cells[0], [cell for cell in cells[1:] if cell]
    except csv.Error as error:
        raise DataError(f"{make_printable(file)}, line {reader.line_num}, cannot be read: {error}") from None


class JsonPairs(list[tuple[str, Any]]):
    """A JSON object as a list of pairs, with repeated keys: an `object_pairs_hook`."""
