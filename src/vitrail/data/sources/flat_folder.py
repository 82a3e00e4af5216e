"""Images in one folder whose names tell their classes, such as Abyssinian_1.jpg.

`labels_from` says where in a name the class stands: a template such as "NAME_*", or a regular expression with a group.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vitrail.data.sources.folder import FileSource, sort_classes, warn_once, write_table
from vitrail.data.sources.image_files import IMAGE_SUFFIXES, list_images, make_printable, read_stat
from vitrail.data.sources.table_cache import load_or_build_table
from vitrail.errors import ConfigError, DataError
from vitrail.system.results import format_count

NAME = "NAME"
"""What stands for the class in a template."""
GROUP = "label"
"""The name of the group that is the class, in a regular expression with several."""
EXAMPLES = r"'NAME_*' for cat_1.jpg, or a regular expression with one group, such as '^(.+)_\d+'"


@dataclass(frozen=True)
class FlatFolder:
    """A folder of images, and where in their names the classes stand. Functions take it as DATA."""

    path: str
    labels_from: str


@dataclass(frozen=True)
class LabelPattern:
    """Finds the class in the name of a file."""

    regex: re.Pattern[str]
    group: int | str
    uses_stem: bool
    """Whether it looks at the name without its suffix."""

    def find_label(self, name: str) -> str | None:
        """Return the class of a file, or None if its name is of another form."""
        found = self.regex.search(Path(name).stem if self.uses_stem else name)
        return (make_printable(found[self.group] or "").strip() or None) if found else None


@lru_cache
def parse_labels_from(labels_from: str) -> LabelPattern:
    """Return the pattern that a `labels_from` means.

    In a template, NAME is the class, `*` is anything, and everything else is itself. Where a separator occurs several
    times in a file name, the last ones count: "NAME_*" finds great_dane in great_dane_12.jpg. A template covers the
    whole name, without the suffix unless it ends in one. A regular expression is searched for in the name with its
    suffix; its group, or the one called `label`, is the class.

    Raises:
        ConfigError: it is neither of both.
    """
    if NAME in labels_from and f"(?P<{GROUP}>" not in labels_from:
        before, *after = labels_from.split(NAME)
        if len(after) != 1:
            raise ConfigError(f"labels_from = {labels_from!r} has NAME more than once: give {EXAMPLES}")
        parts = [".*".join(map(re.escape, part.split("*"))) for part in (before, after[0])]
        regex = re.compile(rf"\A{parts[0]}(.+){parts[1]}\Z", re.DOTALL)
        return LabelPattern(regex, 1, uses_stem=not labels_from.lower().endswith(IMAGE_SUFFIXES))
    try:
        regex = re.compile(labels_from)
    except re.error as error:
        raise ConfigError(
            f"labels_from = {labels_from!r} has no {NAME}, and is no regular expression ({error}): give {EXAMPLES}"
        ) from None
    if GROUP not in regex.groupindex and regex.groups != 1:
        found = format_count(regex.groups, "group") if regex.groups else f"neither {NAME} nor a group"
        raise ConfigError(
            f"labels_from = {labels_from!r} has {found}: give {EXAMPLES}; of several groups, call one (?P<{GROUP}>…)"
        )
    return LabelPattern(regex, GROUP if GROUP in regex.groupindex else 1, uses_stem=False)


def open_flat_folder(folder: Path, labels_from: str, parts: Sequence[Path] = ()) -> FileSource:
    """Open the images that lie in a folder itself.

    Images whose names are of another form are left out, with a warning.

    Args:
        folder: the folder.
        labels_from: where in a file's name its class stands.
        parts: the folders of all splits, so that their labels agree; by default only this one.
    """
    pattern, parts = parse_labels_from(labels_from), parts or (folder,)

    def build(table: Path) -> None:
        classes = sort_classes({label for part in parts for label in find_labels(list_images(part), pattern).values()})
        numbers = {name: number for number, name in enumerate(classes)}
        names = list_images(folder)
        found = find_labels(names, pattern)
        write_table(table, ((os.fsencode(name), numbers[label]) for name, label in found.items()))
        left_out = [make_printable(name) for name in names if name not in found]
        facts = {"classes": classes, "left_out": len(left_out), "example": left_out[0] if left_out else ""}
        (table / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    times = " ".join(str(read_stat(part).st_mtime_ns) for part in parts)
    table = load_or_build_table(f"flat {folder.resolve()}", f"{times} {len(parts)} {labels_from}", build)
    facts = json.loads((table.folder / "facts.json").read_text(encoding="utf-8"))
    files = FileSource(folder, table, tuple(facts["classes"]))
    if not len(files):
        example = f", such as {facts['example']}" if facts["example"] else ""
        there = f"of its {format_count(facts['left_out'], 'image')}{example}" if example else "for it holds no images"
        raise DataError(
            f"labels_from = {labels_from!r} finds no class in {make_printable(folder)}, {there}: give {EXAMPLES}"
        )
    if facts["left_out"]:
        warn_once(
            f"{make_printable(folder)}: {format_count(facts['left_out'], 'image')} not used, such as "
            f"{facts['example']}, for labels_from = {labels_from!r} finds no class in the name"
        )
    return files


def find_labels(names: Iterable[str], pattern: LabelPattern) -> dict[str, str]:
    """Return the class of each file whose name has one."""
    labels = ((name, pattern.find_label(name)) for name in names)
    return {name: label for name, label in labels if label is not None}
