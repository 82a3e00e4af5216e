"""Images in folders: one folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.data.sources.folder import FileSource, warn_once, write_table
from vitrail.data.sources.image_files import (
    IMAGE_SUFFIXES,
    identify_folder,
    is_dir,
    is_image_name,
    list_entries,
    list_folders,
    list_images,
    make_printable,
    read_stat,
)
from vitrail.data.sources.layout import explain_flat_folder, explain_level, explain_parts
from vitrail.data.sources.table_cache import load_or_build_table
from vitrail.errors import DataError

LabelledFolders = list[tuple[int, Path]]
"""Labels and folders."""


def open_class_folders(root: Path, classes: Sequence[str] | None = None) -> FileSource:
    """Open a folder with one subfolder per class; images may be in deeper subfolders.

    `classes` gives the class names in order, for a split that may lack classes of another split.

    Raises:
        LayoutError: the subfolders are named like parts of a data set, or the images lie in the folder itself and
            their names tell the classes.
        DataError: there are no images in class folders.
    """
    here = list_folders(root)
    names = here if classes is None else list(classes)
    problem = explain_parts(root, names)
    if problem is not None:
        raise problem
    tops = [(label, root / name) for label, name in enumerate(names) if name in here]
    walked = [(label, folder) for label, top in tops for folder in _walk_folders(top, root)]
    facts = [f"{label} {make_printable(folder)} {read_stat(folder).st_mtime_ns}" for label, folder in walked]

    def build(folder: Path) -> None:
        write_table(folder, ((path, label) for label, top in tops for path in _walk_images(root, top)))

    table = load_or_build_table(f"folder {root.resolve()}", "\n".join(facts), build)
    files = FileSource(root, table, tuple(map(make_printable, names)))
    flat = len(list_images(root))
    if not len(files) and flat:
        raise explain_flat_folder(root)
    if not len(files):
        raise DataError(
            f"{make_printable(root)} holds no images ({', '.join(IMAGE_SUFFIXES)}): expected a folder for each class "
            "with images in it, or a CSV that tells their labels"
        )
    if flat:
        warn_once(f"{make_printable(root)}: {flat:,} images lie beside the folders of the classes, and are not used")
    if classes is None:
        _warn_of_level(root, files, walked)
    return files


def _warn_of_level(root: Path, files: FileSource, walked: LabelledFolders) -> None:
    """Warn if the classes seem to lie one level deeper: in the only class, or under the same names in every class."""
    labels = files.table["labels"]  # they rise
    if labels[0] == labels[-1]:
        if (problem := explain_level(root)) is not None:
            warn_once(str(problem))
        return
    inner: dict[Path, set[str]] = {folder: set() for _, folder in walked if folder.parent == root}
    for _, folder in walked:
        if folder.parent in inner:
            inner[folder.parent].add(folder.name)
    first, *others = inner.items()
    if len(first[1]) > 1 and all(names == first[1] for _, names in others):
        held = " and ".join(map(make_printable, sorted(first[1])[:2]))
        warn_once(
            f"{make_printable(root)}: {make_printable(first[0].name)} and all other classes hold the same folders, "
            f"such as {held}; if these are the classes, give {make_printable(first[0])}"
        )


def _walk_folders(top: Path, root: Path) -> Iterator[Path]:
    """Yield a folder and its subfolders. Links are followed, but not back to a folder above."""
    return _walk_folders_below(top, (identify_folder(root),))


def _walk_folders_below(top: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    here = identify_folder(top)
    if here in above:
        return
    yield top
    for entry in list_entries(top):
        if is_dir(entry) and not entry.name.startswith("."):
            yield from _walk_folders_below(Path(entry.path), (*above, here))


def _walk_images(root: Path, top: Path) -> Iterator[bytes]:
    """Yield the names of the images of a class, relative to the root."""
    for folder in _walk_folders(top, root):
        for entry in list_entries(folder):
            if is_image_name(entry.name) and not is_dir(entry):
                yield os.fsencode(Path(entry.path).relative_to(root))
