"""Names of samples that do not depend on where a data set is stored. Packs are identified by them; lists hold them."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from vitrail.data.locate import find_local_path
from vitrail.data.open import Data, name_data
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.flat_folder import FlatFolder
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import Source, Subset, make_printable
from vitrail.data.task_data import TaskData


def find_data_folder(data: Data) -> Path | None:
    """Return the folder that sample names start with, if they are paths."""
    if isinstance(data, TaskData):
        return find_data_folder(data.data)
    if not isinstance(data, str | Path | FlatFolder):
        return None
    try:
        path = find_local_path(name_data(data))
        return path if path.is_dir() else path.parent if path.is_file() else None
    except OSError:  # opening the data will raise it
        return None


def identify_sample(source: Source, index: int, folder: Path | None) -> str:
    """Return the name of a sample without the folder of the data set; of an image in memory, a hash."""
    whole = source
    while isinstance(whole, Subset | AnnotatedSource):
        whole = whole.whole if isinstance(whole, Subset) else whole.images
    is_list = isinstance(whole, ListSource)
    return source.identity(index) if is_list else shorten_name(source.display_name(index), folder)


def shorten_name(name: str, folder: Path | None) -> str:
    """Return a name without the folder of the data set, however the folder was given, the same on every system."""
    prefixes = _list_prefixes(folder) if folder else ()
    short = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
    return short.replace(os.sep, "/") if folder else short


@lru_cache
def _list_prefixes(folder: Path) -> tuple[str, ...]:
    return tuple(f"{make_printable(place)}{os.sep}" for place in (folder, folder.absolute(), folder.resolve()))
