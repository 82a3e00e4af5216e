"""The report of a data check.

It keeps about thirty bytes per image and makes the findings from them on demand. So a report on millions of images is
small, even with a finding for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.check.finding import DataFinding as DataFinding
from vitrail.data.check.overlap import Overlap
from vitrail.data.check.targets import TargetReport, describe_cells, list_untaught
from vitrail.data.order import Indices
from vitrail.data.sources.annotated import LABELS, find_row_place
from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import FORMATS, MOST_PIXELS_SERVING
from vitrail.system.results import Result, Rows

FINDING_KINDS = {
    "unreadable": "no image, or none that can be used",
    "truncated": "cut short",
    "changed": "not the file that SHA256SUMS was written for",
    "row": "a row that is no target",
    "leak": "also in another split",
    "repeated": "also in the data to compare with",
    "duplicate": "twice in its split",
    "classes": "splits whose classes differ",
    "untaught": "what no image to train on has",
    "joined": "several tags in a cell that are read as one",
    "misspelt": "a rare name that is nearly a frequent one",
    "outlier": "a number far from all others",
    "empty": "a row with nothing to learn",
    "missing": "columns with empty cells",
    "constant": "what is the same everywhere",
    "extension": "not what the name says",
    "tiny": "shorter side below 32 pixels",
    "greyscale": "without colours",
    "huge": "more than 40 megapixels",
    "ignored": "files that are not taken",
}
"""The kinds of findings, the most serious first."""
FAILING_KINDS = ("unreadable", "truncated", "changed", "row", "leak", "repeated")
TARGET_KINDS = ("untaught", "joined", "misspelt", "outlier", "empty", "missing", "constant")
"""The kinds of findings about targets."""
MOST_ROWS = 30
"""Rows of a table that people are shown."""
TINY = 32
"""An image with a shorter side below this many pixels is tiny."""
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
NAMES_SHOWN = 5
"""How many names a sentence lists."""
_CUT_SHORT = re.compile("truncated|premature|reached eof|not enough|unexpected end|end of file", re.IGNORECASE)
_COMMON = {
    "tiny": f"more than half of the images have a shorter side below {TINY} pixels: it is that kind of data set",
    "greyscale": "more than half of the images are without colours: it is that kind of data set",
}
"""Notes that replace single findings when they apply to more than half of the images."""

Mask = NDArray[np.bool_]


@dataclass
class SplitFacts:
    """The facts about the samples of one split."""

    split: str
    source: Source
    facts: NDArray[Any]
    """`FACTS` of each sample; zeros if it cannot be used."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why samples cannot be used, by their numbers."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """Files that are not used, with the reasons."""
    bad_rows: frozenset[int] = frozenset()
    """The numbers of samples whose rows are no targets."""

    @property
    def has_labels(self) -> bool:
        """Whether the task is one label an image."""
        return self.source.task.kind == LABELS

    def classify(self, index: int) -> str:
        """Return the kind of finding about a sample that cannot be used."""
        return "row" if index in self.bad_rows else _classify(self.reasons[index])

    def describe_target(self, index: int) -> str:
        """Return what is to be learned of a sample, in words."""
        if self.has_labels:
            return self.class_name(int(self.facts["label"][index]))
        return describe_cells(self.source.task, self.source.cells(index))

    @property
    def readable(self) -> Mask:
        """(samples,) bool."""
        mask: Mask = self.facts["readable"]
        return mask

    def name(self, index: int) -> str:
        return self.source.display_name(index)

    def class_name(self, label: int) -> str:
        """Return the name of a label, or its number if there are no names."""
        return self.source.classes[label] if self.source.classes else str(label)

    def count_classes(self) -> dict[str, Any]:
        """Count the images, the readable ones and those of each class; name the smallest, largest and empty classes."""
        taken = self.readable if self.has_labels else np.zeros(len(self.facts), bool)
        labels, counts = np.unique(self.facts["label"][taken], return_counts=True)
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


@dataclass(frozen=True, repr=False)
class DataReport(Result):
    """All findings of a check, with counts, classes and sizes."""

    parts: list[SplitFacts]
    overlap: Overlap | None = None
    """The images that repeat one of another data set, if there was one to compare with."""
    targets: TargetReport | None = None
    """What a table says of the images, if there is one."""
    changed: Sequence[DataFinding] = ()
    """Files that are not as the SHA256SUMS beside them says."""

    @property
    def failed(self) -> bool:
        """Whether an image or a row cannot be used, a file has changed, or an image is in another split or data set."""
        return any(self.counts[kind] for kind in FAILING_KINDS)

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of findings of each kind."""
        counts = Counter(part.classify(index) for part in self.parts for index in part.reasons)
        counts.update(finding.kind for finding in self._target_findings)
        counts.update({kind: len(pairs) for kind, pairs in self._twins.items()}, classes=len(self._compare_classes()))
        counts.update(changed=len(self.changed))
        counts.update(repeated=0 if self.overlap is None else len(self.overlap))
        for part in self.parts:
            counts.update({kind: len(indices) for kind, (indices, _) in self._select_samples(part).items()})
            counts.update(ignored=len(part.ignored))
        return {kind: counts[kind] for kind in FINDING_KINDS}

    @property
    def notes(self) -> list[str]:
        """Remarks that apply to more than half of the images, and on images that could not be compared."""
        targets = [] if self.targets is None else self.targets.notes
        overlap = [] if self.overlap is None else self.overlap.notes
        return [*(_COMMON[kind] for kind in self._common), *targets, *overlap]

    @property
    def classes(self) -> dict[str, dict[str, Any]]:
        """The class counts of each split."""
        return {part.split: part.count_classes() for part in self.parts}

    @cached_property
    def sizes(self) -> dict[str, dict[str, float]]:
        """The smallest, median and largest width and height of readable images."""
        sizes = {}
        for side in ("width", "height"):
            values = np.concatenate([part.facts[side][part.readable] for part in self.parts])
            if len(values):
                middle = float(np.median(values))
                sizes[side] = {"min": int(values.min()), "median": middle, "max": int(values.max())}
        return sizes

    def findings(self, kind: str | None = None) -> Iterator[DataFinding]:
        """Yield all findings, the most serious kinds first; or only those of one kind."""
        if kind is None:
            for name in FINDING_KINDS:
                yield from self.findings(name)
        elif kind in ("unreadable", "truncated", "row"):
            for part in self.parts:
                broken = (index for index in sorted(part.reasons) if part.classify(index) == kind)
                for index in broken:
                    name = part.name(index)
                    yield DataFinding(kind, part.split, name, part.reasons[index].removeprefix(f"{name}: "))
        elif kind in ("leak", "duplicate"):
            yield from (self._describe_twin(kind, *pair) for pair in self._twins[kind].tolist())
        elif kind == "changed":
            yield from self.changed
        elif kind == "repeated":
            repeats = () if self.overlap is None else self.overlap.repeats()
            yield from (DataFinding(kind, repeat.split, repeat.name, repeat.sentence) for repeat in repeats)
        elif kind in TARGET_KINDS:
            yield from (finding for finding in self._target_findings if finding.kind == kind)
        elif kind == "classes":
            yield from self._compare_classes()
        elif kind == "ignored":
            yield from (DataFinding(kind, part.split, *ignored) for part in self.parts for ignored in part.ignored)
        else:
            for part in self.parts:
                indices, sentence = self._select_samples(part).get(kind, ([], str))
                yield from (DataFinding(kind, part.split, part.name(i), sentence(part.facts[i])) for i in indices)

    def lines(self) -> Iterator[str]:
        """Yield a few lines for a person to read."""
        for split, facts in self.classes.items():
            classes = f", {facts['classes']:,} classes" if self._has_labels else ""
            yield f"{split}: {facts['images']:,} images, {facts['readable']:,} readable{classes}"
            if facts["smallest"] is not None:
                sides = [f"{name} ({facts['counts'][name]:,})" for name in (facts["smallest"], facts["largest"])]
                yield f"{split}: from {sides[0]}, the smallest class, to {sides[1]}, the largest"
            if facts["empty"]:
                yield f"{split}: no images of {_join_names(facts['empty'])}"
        yield from () if self.targets is None else self.targets.lines
        for side, values in self.sizes.items():
            yield f"{side}: {values['min']} to {values['max']} pixels, median {values['median']:g}"
        if self.overlap is not None:
            yield from self.overlap.lines()
        yield from self.notes
        found = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items() if count)
        yield f"found: {found or 'nothing'}"

    def summary(self) -> Rows:
        facts = [line.partition(": ") for line in self.lines() if line not in self.notes]
        return [*((name, text) for name, _, text in facts), *(("note", note) for note in self.notes)]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        rows = []
        for kind, examples in self.examples().items():
            sentences = "; ".join(f"{finding.name}: {finding.sentence}" for finding in examples)
            rows.append((kind, FINDING_KINDS[kind], f"{self.counts[kind]:,}", sentences))
        findings = [("kind", "what it means", "number", "for example"), *rows]
        return {**({"Findings": findings} if rows else {}), **self.target_tables()}

    def target_tables(self, most: int = MOST_ROWS) -> dict[str, list[list[str]]]:
        """Return how often each tag or value occurs, the rarest first, and the range of each number, as text."""
        tables = {}
        for title, (head, *rows) in ({} if self.targets is None else self.targets.tables).items():
            more = [[f"and {len(rows) - most:,} more", *[""] * (len(head) - 1)]] if len(rows) > most else []
            shown = [[_format_cell(cell) for cell in row] for row in rows[:most]]
            tables[title] = [[str(name) for name in head], *shown, *more]
        return tables

    def examples(self, most: int = 3) -> dict[str, list[DataFinding]]:
        """Return the first findings of each kind that was found, the most serious kinds first."""
        return {kind: list(islice(self.findings(kind), most)) for kind in FINDING_KINDS if self.counts[kind]}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "counts": self.counts,
            "findings": [asdict(finding) for finding in self.findings()],
            "classes": self.classes,
            "sizes": self.sizes,
            "notes": self.notes,
            **({} if self.targets is None else {"targets": self.targets.tables}),
            **({} if self.overlap is None else {"against": self.overlap.to_dict()}),
        }

    @property
    def _has_labels(self) -> bool:
        return all(part.has_labels for part in self.parts)

    @cached_property
    def _target_findings(self) -> Sequence[DataFinding]:
        return self._list_untaught_classes() if self.targets is None else self.targets.findings

    def _list_untaught_classes(self) -> list[DataFinding]:
        """Return a finding for each class that other splits have images of, and the one to train on has none."""
        parts = {part.split: part.count_classes()["counts"] for part in self.parts}
        if "train" not in parts or not self._has_labels:
            return []
        classes = dict.fromkeys(name for counts in parts.values() for name in counts)
        counts = {name: Counter({split: part.get(name, 0) for split, part in parts.items()}) for name in classes}
        return list_untaught("the class", counts, list(parts))

    @cached_property
    def _common(self) -> list[str]:
        readable = sum(int(part.readable.sum()) for part in self.parts)
        masks = {"tiny": _is_tiny, "greyscale": _is_grey}
        return [kind for kind, mask in masks.items() if 2 * sum(mask(p.facts).sum() for p in self.parts) > readable]

    def _select_samples(self, part: SplitFacts) -> dict[str, tuple[Indices, Callable[[Any], str]]]:
        """Return, for each kind that depends on one record alone, the samples and a function that describes one."""
        kinds: dict[str, tuple[Mask, Callable[[Any], str]]] = {
            "extension": (part.facts["misnamed"], lambda fact: f"is {FORMATS[fact['format']]}, unlike its name"),
            "tiny": (_is_tiny(part.facts), _format_size),
            "greyscale": (_is_grey(part.facts), lambda fact: "has no colours"),
            "huge": (_is_huge(part.facts), _format_size),
        }
        return {kind: (np.flatnonzero(mask), say) for kind, (mask, say) in kinds.items() if kind not in self._common}

    @cached_property
    def _twins(self) -> dict[str, Indices]:
        """(part, index, part, index) of each sample and an earlier one with the same content."""
        places = np.concatenate([np.flatnonzero(part.readable) for part in self.parts])
        owners = np.repeat(np.arange(len(self.parts)), [part.readable.sum() for part in self.parts])
        digests = np.concatenate([part.facts["digest"][part.readable] for part in self.parts])
        words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))  # equal rows stay in order
        words, owners, places = words[order], owners[order], places[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (words[1:] != words[:-1]).any(axis=1)
        new_here = new.copy()
        new_here[1:] |= owners[1:] != owners[:-1]
        firsts, firsts_here = _first_of_group(new), _first_of_group(new_here)
        twins = {}
        for kind, mask, first in (("leak", owners != owners[firsts], firsts), ("duplicate", ~new_here, firsts_here)):
            pairs = np.stack([owners, places, owners[first], places[first]], axis=1)[mask]
            twins[kind] = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        return twins

    def _describe_twin(self, kind: str, owner: int, index: int, other_owner: int, other_index: int) -> DataFinding:
        part, other = self.parts[owner], self.parts[other_owner]
        here, there = part.describe_target(index), other.describe_target(other_index)
        sentence = f"the same content as {other.name(other_index)}" + (f" of {other.split}" if kind == "leak" else "")
        rows = [find_row_place(part.source, index), find_row_place(other.source, other_index)]
        if all(rows):
            sentence += f" ({rows[0]} and {rows[1].removeprefix(rows[0].rpartition(', ')[0] + ', ')})"
        conflict = f", and conflicting labels: {here} here, {there} there" if here != there else ""
        return DataFinding(kind, part.split, part.name(index), sentence + conflict)

    def _compare_classes(self) -> list[DataFinding]:
        """Find splits whose classes differ from those of the first; labels then do not mean the same."""
        findings, first = [], self.parts[0]
        for part in self.parts[1:]:
            ours, theirs = part.source.classes, first.source.classes
            if ours != theirs:
                missing = [name for name in theirs if name not in ours]
                extra = [name for name in ours if name not in theirs]
                differences = [
                    f"{word} {_join_names(names)}" for word, names in (("without", missing), ("with", extra)) if names
                ]
                how = " and ".join(differences) or "in another order"
                sentence = f"its classes are not those of {first.split}: {how}, so that labels do not agree"
                findings.append(DataFinding("classes", part.split, part.split, sentence))
        return findings


def _format_cell(cell: Any) -> str:
    return f"{cell:,.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)


def _classify(reason: str) -> str:
    return "truncated" if reason.startswith("damaged") and _CUT_SHORT.search(reason) else "unreadable"


def _is_tiny(facts: NDArray[Any]) -> Mask:
    result: Mask = facts["readable"] & (np.minimum(facts["height"], facts["width"]) < TINY)
    return result


def _is_grey(facts: NDArray[Any]) -> Mask:
    result: Mask = facts["grey"]
    return result


def _is_huge(facts: NDArray[Any]) -> Mask:
    result: Mask = facts["height"].astype(np.int64) * facts["width"] > MOST_PIXELS_SERVING
    return result


def _format_size(fact: Any) -> str:
    return f"{fact['width']}×{fact['height']} pixels"


def _first_of_group(new: Mask) -> Indices:
    """Return for each row the first row of its group, given where groups begin."""
    result: Indices = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    return result


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )
