"""Recognise how people's images lie: classes in file names, or one level deeper than the folder that was given.

Nothing is guessed silently: what is recognised is told in an error or a warning, with what to give instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.data.sources.flat_folder import find_labels, parse_labels_from
from vitrail.data.sources.image_files import identify_folder, list_folders, list_images, make_printable
from vitrail.data.sources.source import SPLITS
from vitrail.errors import DataError, LayoutError
from vitrail.system.results import format_count

FORMS = {
    "NAME_*": re.compile(r".+_\d+"),
    "NAME-*": re.compile(r".+-\d+"),
    "NAME (*)": re.compile(r".+ \(\d+\)"),
    "NAME.*": re.compile(r".+\.\d+"),
    "NAME *": re.compile(r".+ \d+"),
    r"^(.*\D)\d+\.": re.compile(r".*\D\d+"),
}
"""For each `labels_from` that is proposed, the file names without suffix that it is proposed for."""
MOST_FIT = 0.9
"""Share of the images that must fit, and be of classes with two images or more."""
UNTELLING = {
    *("img", "dsc", "dscn", "dscf", "pxl", "mvimg", "gopr", "pict", "dji", "wa", "wp", "vid", "p", "imgwa"),
    *("image", "photo", "picture", "pic", "frame", "scan", "screenshot", "file", "untitled", "sample", "s"),
}
"""Words before the number that cameras and programs write: they tell no class."""
IMAGE_FOLDERS = {"images", "image", "imgs", "img", "jpegimages", "jpegs", "jpgs", "pngs", "photos", "data", "dataset"}
OTHER_FOLDERS = {
    *("annotations", "annotation", "labels", "masks", "trimaps", "xmls", "xml", "json", "bboxes", "boxes"),
    *("segmentations", "segmentation", "segmentationclass", "segmentationobject", "imagesets", "groundtruth", "gt"),
}
"""Folders of data sets that hold something else than the images to learn from."""
SPLIT_WORDS = {word for words in SPLITS.values() for word in words}
DEEPEST = 3
"""How many levels below the given folder are looked at."""
MOST_FOLDERS = 2000
"""How many folders are looked at."""
TABLES_NAMED = 5
"""How many tables of a folder an error names."""


class Proposal(NamedTuple):
    """Another way to open the images: by a deeper folder, by their names, or both."""

    folder: Path
    labels_from: str | None
    counts: Counter[str]
    """The number of images of each class."""

    def describe(self) -> str:
        """Return what would be found: "37 classes, such as Abyssinian (200)"."""
        name, count = self.counts.most_common(1)[0]
        return f"{format_count(len(self.counts), 'class')}, such as {name} ({count:,})"

    def explain(self, given: Path) -> str:
        """Return what to give instead of a folder, in words."""
        place, is_other = make_printable(self.folder), self.folder != given
        if self.labels_from is None:
            return f"{place} holds {self.describe()}: give this folder"
        where = f"the names of the images in {place}" if is_other else "their names"
        this = "this folder and " if is_other else ""
        return f"{where} tell {self.describe()}: give {this}labels_from={self.labels_from!r}"


def propose_labels(folder: Path) -> Proposal | None:
    """Return the `labels_from` that fits the names of a folder's images, if they are of a common form."""
    names = list_images(folder)
    for labels_from, form in FORMS.items():
        fitting = sum(form.fullmatch(Path(name).stem) is not None for name in names)
        if not names or fitting < MOST_FIT * len(names):
            continue
        counts = Counter(find_labels(names, parse_labels_from(labels_from)).values())
        several = {name: count for name, count in counts.items() if count > 1}
        if len(several) > 1 and sum(several.values()) >= MOST_FIT * len(names) and _tell_classes(several):
            return Proposal(folder, labels_from, Counter(dict(sorted(counts.items()))))
    return None


def _tell_classes(labels: Iterable[str]) -> bool:
    """Return whether labels may be classes, rather than dates or the words of a camera."""
    words = [_reduce_to_word(label) for label in labels]
    return all(words) and not all(word in UNTELLING for word in words)


def explain_flat_folder(folder: Path) -> DataError:
    """Return the error for a folder whose images lie in no class folder, with what to give instead if that is known."""
    found, count = propose_labels(folder), len(list_images(folder))
    lie = f"{format_count(count, 'image')} {'lies' if count == 1 else 'lie'}"
    problem = f"{lie} in {make_printable(folder)} itself"
    if found is None:
        return DataError(
            f"{problem}: expected a folder for each class with images in it, or a CSV that tells their labels; if the "
            "names of the images tell them, give labels_from (--labels-from), such as 'NAME_*' for cat_1.jpg"
        )
    return LayoutError(f"{problem}; {found.explain(folder)}", str(folder), str(folder), found.labels_from)


def explain_parts(root: Path, names: Sequence[str]) -> LayoutError | None:
    """Return an error if the folders of all classes are named like parts of a data set: images/, annotations/, …"""
    if not names or not all(map(is_part_name, names)):
        return None
    listed = " and ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))
    kind = "a part of a data set, no class" if len(names) == 1 else "parts of a data set, no classes"
    problem = f"{make_printable(root)} holds {listed}: {kind}"
    found, tables = find_deeper(root), sorted(root.glob("*.csv"))
    if found is None and len(tables) > 1:
        listed = ", ".join(make_printable(table) for table in tables[:TABLES_NAMED])
        more = f" (or one of {len(tables) - TABLES_NAMED} more)" if len(tables) > TABLES_NAMED else ""
        return LayoutError(f"{problem}; give the table that tells what to learn: {listed}{more}", str(root))
    if found is None:
        return LayoutError(
            f"{problem}; give the folder that has one for each class, or a CSV that tells the labels. If they are your "
            "classes, rename one of the folders",
            str(root),
        )
    if found.labels_from is not None and all(name.lower() in SPLIT_WORDS for name in names):
        found = found._replace(folder=root)  # with labels_from, splits may be flat
    rename = ""
    if found.labels_from is None and sum(map(_is_split_name, names)) > 1:
        rename = f"; or rename the parts train, val or test, and give {make_printable(root)}"
    return LayoutError(f"{problem}; {found.explain(root)}{rename}", str(root), str(found.folder), found.labels_from)


def explain_level(root: Path) -> LayoutError | None:
    """Return an error that names a deeper folder whose folders look like the classes; None if there is none."""
    found = find_deeper(root)
    if found is None or (found.folder == root and found.labels_from is None):
        return None
    problem = f"{make_printable(root)} has fewer than two classes"
    return LayoutError(f"{problem}; {found.explain(root)}", str(root), str(found.folder), found.labels_from)


def is_part_name(name: str) -> bool:
    """Return whether a folder is named like a part of a data set: images, annotations, train2017, test_set, …"""
    return _reduce_to_word(name) in IMAGE_FOLDERS | OTHER_FOLDERS or _is_split_name(name)


def _is_split_name(name: str) -> bool:
    return re.sub(r"(set|data|images|imgs)$", "", _reduce_to_word(name)) in SPLIT_WORDS


def _reduce_to_word(name: str) -> str:
    """Return the letters of a name: "jpegimages" for JPEGImages, "train" for train2017."""
    return "".join(filter(str.isalpha, name.casefold()))


def find_deeper(root: Path) -> Proposal | None:
    """Return the folder with classes that lies least deep below the root, or is the root; of several the largest."""
    level, seen = [root], {identify_folder(root)}
    for _ in range(DEEPEST + 1):
        found = [proposal for folder in level if (proposal := _propose_folder(folder)) is not None]
        if found:
            return max(found, key=lambda proposal: proposal.counts.total())
        below = [folder / name for folder in level for name in list_folders(folder)]
        below = [folder for folder in below if _reduce_to_word(folder.name) not in OTHER_FOLDERS]
        level = []
        for folder in below:
            if len(seen) < MOST_FOLDERS and (here := identify_folder(folder)) not in seen:
                seen.add(here)
                level.append(folder)
    return None


def _propose_folder(folder: Path) -> Proposal | None:
    """Return the classes of a folder: folders with images in them, or else the names of its own images."""
    names = list_folders(folder)
    counts = Counter({make_printable(name): count for name in names if (count := len(list_images(folder / name)))})
    if len(counts) > 1 and not all(map(is_part_name, counts)):
        return Proposal(folder, None, counts)
    if names and all(name.lower() in SPLIT_WORDS for name in names):
        parts = [part for name in names if (part := _propose_folder(folder / name)) is not None]
        if any(part.labels_from is None for part in parts):
            return Proposal(folder, None, max((part.counts for part in parts), key=Counter.total))
    return propose_labels(folder)
