"""What a check of a data set found.

Of each image a record of some thirty bytes is kept; what there is to say is made from it when it is asked for. So a
report on millions of images is small, even where it has something to say about each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.order import Indices
from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import FORMATS, MOST_PIXELS_SERVING

FINDING_KINDS = {
    "unreadable": "no image, or none that can be used",
    "truncated": "cut short",
    "leak": "also in another split",
    "duplicate": "twice in its split",
    "classes": "splits whose classes differ",
    "extension": "not what the name says",
    "tiny": "shorter side below 32 pixels",
    "greyscale": "without colours",
    "huge": "more than 40 megapixels",
    "ignored": "files that are not taken",
}
"""What can be found, the gravest first."""
FAILING = ("unreadable", "truncated", "leak")
TINY = 32
"""Pixels of the shorter side."""
NO_FILE = 255
FACTS = np.dtype(
    [
        ("digest", "V16"),
        ("label", "<i4"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("format", "u1"),  # a place in FORMATS, or NO_FILE
        ("readable", "?"),
        ("grey", "?"),
        ("misnamed", "?"),
    ]
)
NAMED = 5
"""How many names a sentence holds."""
_CUT_SHORT = re.compile("truncated|premature|reached eof|not enough|unexpected end|end of file", re.IGNORECASE)
_COMMON = {
    "tiny": f"more than half of the images have a shorter side below {TINY} pixels: it is that kind of data set",
    "greyscale": "more than half of the images are without colours: it is that kind of data set",
}
"""What is said once where it is true of more than half of the images."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class DataFinding:
    """Something that a person should know about one sample."""

    kind: str
    """One of `KINDS`."""
    split: str
    name: str
    """Its path, or what its source calls it; on one line."""
    sentence: str


@dataclass
class SplitFacts:
    """What is known about the samples of one split."""

    split: str
    source: Source
    facts: NDArray[Any]
    """`FACTS` of each sample; zeros where it cannot be used."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why samples cannot be used."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """Files that are there and not taken, and why."""

    @property
    def readable(self) -> Mask:
        """Of each sample."""
        found: Mask = self.facts["readable"]
        return found

    def name(self, index: int) -> str:
        """What to call a sample, even where its file has gone."""
        return self.source.display_name(index)

    def class_name(self, label: int) -> str:
        """Of a label; its number where it has no name."""
        return self.source.classes[label] if self.source.classes else str(label)

    def balance(self) -> dict[str, Any]:
        """Images, readable ones, how many of each class, and the smallest, the largest and the empty classes."""
        labels, counts = np.unique(self.facts["label"][self.readable], return_counts=True)
        classes = Counter(dict.fromkeys(self.source.classes, 0))
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            classes[self.class_name(label)] += count
        by_size = sorted((count, name) for name, count in classes.items() if count)
        return {
            "images": len(self.facts),
            "readable": int(self.readable.sum()),
            "classes": len(classes),
            "smallest": by_size[0][1] if by_size else None,
            "largest": by_size[-1][1] if by_size else None,
            "empty": [name for name, count in classes.items() if not count],
            "counts": dict(classes),
        }


@dataclass
class DataReport:
    """Everything that was found."""

    parts: list[SplitFacts]

    @property
    def failed(self) -> bool:
        """Whether something would spoil a training: images that cannot be read, or that stand in two splits."""
        return any(self.counts[kind] for kind in FAILING)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each kind."""
        found = Counter(_kind(reason) for part in self.parts for reason in part.reasons.values())
        found.update({kind: len(pairs) for kind, pairs in self._twins.items()}, classes=len(self._unlike()))
        for part in self.parts:
            found.update({kind: len(indices) for kind, (indices, _) in self._marked(part).items()})
            found.update(ignored=len(part.ignored))
        return {kind: found[kind] for kind in FINDING_KINDS}

    @property
    def notes(self) -> list[str]:
        """What is true of so many images that it is said once."""
        return [_COMMON[kind] for kind in self._common]

    @property
    def classes(self) -> dict[str, dict[str, Any]]:
        """The balance of classes in each split."""
        return {part.split: part.balance() for part in self.parts}

    @cached_property
    def sizes(self) -> dict[str, dict[str, float]]:
        """The least, the middle and the largest width and height of readable images."""
        found = {}
        for side in ("width", "height"):
            values = np.concatenate([part.facts[side][part.readable] for part in self.parts])
            if len(values):
                middle = float(np.median(values))
                found[side] = {"min": int(values.min()), "median": middle, "max": int(values.max())}
        return found

    def findings(self, kind: str | None = None) -> Iterator[DataFinding]:
        """One after the other, the gravest kinds first; or those of one kind."""
        if kind is None:
            for each in FINDING_KINDS:
                yield from self.findings(each)
        elif kind in ("unreadable", "truncated"):
            for part in self.parts:
                found = (index for index, reason in sorted(part.reasons.items()) if _kind(reason) == kind)
                yield from (DataFinding(kind, part.split, part.name(i), part.reasons[i]) for i in found)
        elif kind in ("leak", "duplicate"):
            yield from (self._twin(kind, *pair) for pair in self._twins[kind].tolist())
        elif kind == "classes":
            yield from self._unlike()
        elif kind == "ignored":
            yield from (DataFinding(kind, part.split, *ignored) for part in self.parts for ignored in part.ignored)
        else:
            for part in self.parts:
                indices, sentence = self._marked(part).get(kind, ([], str))
                yield from (DataFinding(kind, part.split, part.name(i), sentence(part.facts[i])) for i in indices)

    def summary(self) -> Iterator[str]:
        """A few lines for a person."""
        for split, facts in self.classes.items():
            yield f"{split}: {facts['images']:,} images, {facts['readable']:,} readable, {facts['classes']:,} classes"
            if facts["smallest"] is not None:
                sides = [f"{name} ({facts['counts'][name]:,})" for name in (facts["smallest"], facts["largest"])]
                yield f"{split}: from {sides[0]}, the smallest class, to {sides[1]}, the largest"
            if facts["empty"]:
                yield f"{split}: no images of {_few(facts['empty'])}"
        for side, values in self.sizes.items():
            yield f"{side}: {values['min']} to {values['max']} pixels, median {values['median']:g}"
        yield from self.notes
        found = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items() if count)
        yield f"found: {found or 'nothing'}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "counts": self.counts,
            "findings": [asdict(finding) for finding in self.findings()],
            "classes": self.classes,
            "sizes": self.sizes,
            "notes": self.notes,
        }

    @cached_property
    def _common(self) -> list[str]:
        readable = sum(int(part.readable.sum()) for part in self.parts)
        masks = {"tiny": _tiny, "greyscale": _grey}
        return [kind for kind, mask in masks.items() if 2 * sum(mask(p.facts).sum() for p in self.parts) > readable]

    def _marked(self, part: SplitFacts) -> dict[str, tuple[Indices, Callable[[Any], str]]]:
        """Samples for which a look at their record is enough, and what to say of each."""
        found: dict[str, tuple[Mask, Callable[[Any], str]]] = {
            "extension": (part.facts["misnamed"], lambda fact: f"is {FORMATS[fact['format']]}, unlike its name"),
            "tiny": (_tiny(part.facts), _size),
            "greyscale": (_grey(part.facts), lambda fact: "has no colours"),
            "huge": (_huge(part.facts), _size),
        }
        return {kind: (np.flatnonzero(mask), say) for kind, (mask, say) in found.items() if kind not in self._common}

    @cached_property
    def _twins(self) -> dict[str, Indices]:
        """(part, index, part, index) of samples and an earlier one with the same content."""
        places = np.concatenate([np.flatnonzero(part.readable) for part in self.parts])
        owners = np.repeat(np.arange(len(self.parts)), [part.readable.sum() for part in self.parts])
        digests = np.concatenate([part.facts["digest"][part.readable] for part in self.parts])
        words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))  # what is equal stays in its order
        words, owners, places = words[order], owners[order], places[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (words[1:] != words[:-1]).any(axis=1)
        new_here = new.copy()
        new_here[1:] |= owners[1:] != owners[:-1]
        firsts, firsts_here = _first_of_group(new), _first_of_group(new_here)
        found = {}
        for kind, mask, first in (("leak", owners != owners[firsts], firsts), ("duplicate", ~new_here, firsts_here)):
            pairs = np.stack([owners, places, owners[first], places[first]], axis=1)[mask]
            found[kind] = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        return found

    def _twin(self, kind: str, owner: int, index: int, other_owner: int, other_index: int) -> DataFinding:
        part, other = self.parts[owner], self.parts[other_owner]
        here = part.class_name(int(part.facts["label"][index]))
        there = other.class_name(int(other.facts["label"][other_index]))
        sentence = f"the same content as {other.name(other_index)}" + (f" of {other.split}" if kind == "leak" else "")
        conflict = f", and conflicting labels: {here} here, {there} there" if here != there else ""
        return DataFinding(kind, part.split, part.name(index), sentence + conflict)

    def _unlike(self) -> list[DataFinding]:
        """A label means the same in all splits only where their classes are the same, in the same order."""
        found, first = [], self.parts[0]
        for part in self.parts[1:]:
            ours, theirs = part.source.classes, first.source.classes
            if ours != theirs:
                missing = [name for name in theirs if name not in ours]
                extra = [name for name in ours if name not in theirs]
                told = [f"{word} {_few(names)}" for word, names in (("without", missing), ("with", extra)) if names]
                how = " and ".join(told) or "in another order"
                sentence = f"its classes are not those of {first.split}: {how}, so that labels do not agree"
                found.append(DataFinding("classes", part.split, part.split, sentence))
        return found


def _kind(reason: str) -> str:
    return "truncated" if reason.startswith("damaged") and _CUT_SHORT.search(reason) else "unreadable"


def _tiny(facts: NDArray[Any]) -> Mask:
    found: Mask = facts["readable"] & (np.minimum(facts["height"], facts["width"]) < TINY)
    return found


def _grey(facts: NDArray[Any]) -> Mask:
    found: Mask = facts["grey"]
    return found


def _huge(facts: NDArray[Any]) -> Mask:
    found: Mask = facts["height"].astype(np.int64) * facts["width"] > MOST_PIXELS_SERVING
    return found


def _size(fact: Any) -> str:
    return f"{fact['width']}×{fact['height']} pixels"


def _first_of_group(new: Mask) -> Indices:
    """For each place the first place of its group, given where groups begin."""
    found: Indices = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
