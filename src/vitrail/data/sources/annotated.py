"""Images with the targets of a task: tags, numbers, or whatever the task is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source
from vitrail.errors import DataError
from vitrail.tasks.task import Cell, Targets, Task


class AnnotatedSource(Source):
    """The images of another source, with the targets of a task beside them.

    Args:
        images: where the images come from; its labels are not used.
        task: what a target is.
        rows: the cells of each image by column, in the order of the images.
        places: where each row stands, such as "labels.csv, line 7", for messages; the names of the images if left out.

    An image whose row is no target has a reason in `broken_rows`; reading it raises that as a DataError, so it is
    counted and replaced as a broken image is.
    """

    def __init__(
        self, images: Source, task: Task, rows: Sequence[Mapping[str, Cell]], places: Sequence[str] | None = None
    ) -> None:
        self.images, self._task, self.classes = images, task, ()
        self.block, self.window, self.reads_in_threads = images.block, images.window, images.reads_in_threads
        self.arrays = task.allocate(len(rows))
        self.broken_rows: dict[int, str] = {}
        """Why rows are no targets, by the numbers of their images."""
        for index, row in enumerate(rows):
            try:
                for name, value in task.encode(row).items():
                    self.arrays[name][index] = value
            except DataError as error:
                self.broken_rows[index] = str(error) if places is None else f"{places[index]}: {error}"
        self._strata = task.stratify(self.arrays)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def task(self) -> Task:
        return self._task

    def read(self, index: int) -> Sample:
        if index in self.broken_rows:
            raise DataError(self.broken_rows[index])
        return Sample(
            self.images.read(index).content, -1, {name: values[index] for name, values in self.arrays.items()}
        )

    def name(self, index: int) -> str:
        return self.images.name(index)

    def identity(self, index: int) -> str:
        return self.images.identity(index)

    def labels(self, start: int, stop: int) -> Indices:
        """Return −1 for every sample: there are no classes."""
        return np.full(len(range(len(self))[start:stop]), -1, np.int64)

    def targets(self, start: int, stop: int) -> Targets:
        return {name: values[start:stop] for name, values in self.arrays.items()}

    def strata(self, start: int, stop: int) -> Indices:
        return self._strata[start:stop]
