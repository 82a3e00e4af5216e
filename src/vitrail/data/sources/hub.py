"""Data sets on the Hugging Face hub, read with the library `datasets`, which downloads and caches them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.parquet import IMAGE_COLUMNS, LABEL_COLUMNS, name_classes
from vitrail.data.sources.source import Sample, Source, clip_label, read_file
from vitrail.errors import DataError
from vitrail.system.hub_names import split_hub_name


class HubSource(Source):
    """The rows of a `datasets.Dataset`, which is memory-mapped and can be sent to workers."""

    def __init__(self, rows: Any, name: str, needs_labels: bool = True) -> None:
        import datasets

        self.source, self.label = name, ""
        self.image = _find_column(rows, IMAGE_COLUMNS, name)
        if needs_labels:
            self.label = _find_column(rows, LABEL_COLUMNS, name)
        # Without labels, the other columns stay for `read_columns`.
        kept = rows.select_columns([self.image, self.label]) if needs_labels else rows
        self.rows = kept.cast_column(self.image, datasets.Image(decode=False))
        self.classes = tuple(getattr(rows.features[self.label], "names", None) or ()) if needs_labels else ()

    @classmethod
    def load(cls, source: str, split: str, needs_labels: bool = True) -> HubSource:
        """Load one split of `hf:owner/name[@revision]`; raise a DataError if that fails."""
        import datasets

        name, revision = split_hub_name(source)
        try:
            rows = datasets.load_dataset(name, split=split, revision=revision)
            return cls(rows, f"{source}/{split}", needs_labels)
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{source} cannot be loaded: {(str(error).splitlines() or [''])[0]}") from None

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Sample:
        row = self.rows[index]
        image, label = row[self.image], row[self.label] if self.label else -1
        if not isinstance(image, dict) or not (image.get("bytes") or image.get("path")):
            raise DataError("has no image")
        if not isinstance(label, int):
            raise DataError("has no label" if label is None else f"its label is {label!r}, not a number")
        # If `datasets` has unpacked the files, it gives their paths.
        return Sample(image["bytes"] or read_file(Path(image["path"])), label)

    def name(self, index: int) -> str:
        return f"{self.source}:{index}"

    def read_columns(self, keep: Sequence[str] = ()) -> dict[str, list[Any]]:
        """Return the cells of the other columns, of all if none are named; classes have their names."""
        cells = {}
        for name, feature in self.rows.features.items():
            if name == self.image or (name not in keep if keep else type(feature).__name__ in ("Image", "Audio")):
                continue
            names = getattr(getattr(feature, "feature", feature), "names", None)
            cells[name] = name_classes(list(self.rows.select_columns([name])[:][name]), names)
        return cells

    def labels(self, start: int, stop: int) -> Indices:
        if not self.label:
            return np.full(stop - start, -1, np.int64)
        labels = self.rows.select_columns([self.label])[start:stop][self.label]
        return np.array([clip_label(label) for label in labels], dtype=np.int64)


def list_hub_splits(source: str) -> set[str]:
    """Return the split names of `hf:owner/name[@revision]`; raise a DataError if the hub has no such data set."""
    import datasets

    name, revision = split_hub_name(source)
    try:
        return set(datasets.get_dataset_split_names(name, revision=revision))
    except (OSError, ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise DataError(f"{source} cannot be loaded from the hub and is not in the cache: {why}") from None


def _find_column(rows: Any, known: tuple[str, ...], source: str) -> str:
    column = next((name for name in known if name in rows.column_names), None)
    if column is None:
        raise DataError(f"{source} has the columns {', '.join(rows.column_names)}: it needs one of {', '.join(known)}")
    return column
