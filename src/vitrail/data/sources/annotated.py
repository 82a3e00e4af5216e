"""Images with the targets of a task: tags, numbers, or whatever the task is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source, Subset
from vitrail.errors import DataError
from vitrail.tasks.labels import LABEL
from vitrail.tasks.task import Cell, Targets, Task

LABELS = "labels"
"""The kind of a task with one label an image."""


class AnnotatedSource(Source):
    """The images of another source, with the targets of a task beside them.

    Args:
        images: where the images come from; its labels are not used.
        task: what a target is.
        rows: the cells of each image by column, in the order of the images.
        places: where each row stands, such as "labels.csv, line 7", for messages; the names of the images if left out.
        problems: why rows cannot be used whatever the task, by the numbers of their images.

    An image whose row is no target has a reason in `broken_rows`; reading it raises that as a DataError, so it is
    counted and replaced as a broken image is.
    """

    def __init__(
        self,
        images: Source,
        task: Task,
        rows: Sequence[Mapping[str, Cell]],
        places: Sequence[str] | None = None,
        problems: Mapping[int, str] | None = None,
    ) -> None:
        self._task, self.rows, self.places, self.problems = task, rows, places, problems or {}
        self.classes = task.output_names if task.kind == LABELS else ()
        self.use_images(images)
        self.arrays = task.allocate(len(rows))
        self.broken_rows: dict[int, str] = {}
        """Why rows are no targets, by the numbers of their images."""
        for index, row in enumerate(rows):
            try:
                if index in self.problems:
                    raise DataError(self.problems[index])
                for name, value in task.encode(row).items():
                    self.arrays[name][index] = value
            except DataError as error:
                self.broken_rows[index] = str(error) if places is None else f"{places[index]}: {error}"
        if task.kind == LABELS and self.broken_rows:
            self.arrays[LABEL][list(self.broken_rows)] = -1
        self._strata = task.stratify(self.arrays)

    def use_images(self, images: Source) -> None:
        """Take the images from another source, which has the same."""
        self.images = images
        self.block, self.window, self.reads_in_threads = images.block, images.window, images.reads_in_threads

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def task(self) -> Task:
        return self._task

    def read(self, index: int) -> Sample:
        if index in self.broken_rows:
            raise DataError(self.broken_rows[index])
        content = self.images.read(index).content
        if self._task.kind == LABELS:
            return Sample(content, int(self.arrays[LABEL][index]))
        return Sample(content, -1, {name: values[index] for name, values in self.arrays.items()})

    def name(self, index: int) -> str:
        """Return the name of an image, or the place of a row that names none."""
        if index in self.problems and self.places is not None:
            return self.places[index]
        return self.images.name(index)

    def identity(self, index: int) -> str:
        return self.images.identity(index)

    def cells(self, index: int) -> Mapping[str, Cell]:
        return self.rows[index]

    def labels(self, start: int, stop: int) -> Indices:
        """Return −1 for every sample, unless the task is one label an image: there are no classes."""
        if self._task.kind == LABELS:
            labels: Indices = self.arrays[LABEL][start:stop]
            return labels
        return np.full(len(range(len(self))[start:stop]), -1, np.int64)

    def targets(self, start: int, stop: int) -> Targets:
        return {name: values[start:stop] for name, values in self.arrays.items()}

    def strata(self, start: int, stop: int) -> Indices:
        return self._strata[start:stop]


def find_bad_rows(source: Source) -> frozenset[int]:
    """Return the numbers of the samples whose rows are no targets."""
    if isinstance(source, AnnotatedSource):
        return frozenset(source.broken_rows)
    if isinstance(source, Subset) and (bad := find_bad_rows(source.whole)):
        return frozenset(np.flatnonzero(np.isin(source.indices, list(bad))).tolist())
    return frozenset()


def find_row_place(source: Source, index: int) -> str:
    """Return where the row of a sample stands, such as "labels.csv, line 7"; "" if the source does not know."""
    if isinstance(source, Subset):
        return find_row_place(source.whole, int(source.indices[index]))
    return source.places[index] if isinstance(source, AnnotatedSource) and source.places is not None else ""
