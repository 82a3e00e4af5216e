"""Few-shot accuracy of a model that is still training, as `vitrail fewshot` computes it by least squares.

All draws are made once, at the start of a run: only the images that are drawn are ever read, and always the same are
scored.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError
from vitrail.evaluation.fewshot import check_sources, open_train_and_test
from vitrail.evaluation.least_squares import L2, SEEDS, choose_shots, fit_least_squares


class TrainingFewshot:
    """The images of a few-shot measurement, and the accuracy that follows from their features.

    Attributes:
        name: for records and figures, such as "10-shot".
        sources: the images to learn from, those of all draws together; and the images to test on.
    """

    def __init__(
        self, train: Source, test: Source, shots: int, most_images: int, seeds: Sequence[int] = SEEDS, l2: float = L2
    ) -> None:
        """Draw the images.

        Args:
            train: images to draw from.
            test: images to score, with the same classes.
            shots: images of each class; all of a class that has fewer.
            most_images: the most images to score. Out of more, the same are chosen every time.
            seeds: one for each draw.
            l2: regularisation of the least squares.
        """
        self.name, self._classes, self._l2 = f"{shots}-shot", train.num_classes, l2
        labels = torch.from_numpy(np.array(train.labels(0, len(train)), dtype=np.int64))
        known = (labels >= 0).nonzero().flatten()
        draws = [known[choose_shots(labels[known], shots, seed)] for seed in seeds]
        drawn = torch.cat(draws).unique()
        self._is_in_draw = [torch.isin(drawn, draw) for draw in draws]
        self.sources = (Subset(train, drawn.numpy()), _limit(test, most_images))

    def score(self, features: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
        """Return the mean accuracy over the draws and its deviation; NaN for features that are not finite.

        Args:
            features: values, labels and numbers of the images in each of the sources, without unreadable ones.
        """
        (values, labels, indices), (test_values, test_labels, _) = features
        if not (len(labels) and len(test_labels) and values.isfinite().all() and test_values.isfinite().all()):
            return {"accuracy": math.nan, "deviation": math.nan}
        accuracies = []
        for is_in_draw in self._is_in_draw:
            rows = is_in_draw.to(indices.device)[indices]
            classifier = fit_least_squares(values[rows], labels[rows], self._classes, self._l2)
            accuracies.append(classifier.accuracy(test_values, test_labels))
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        return {"accuracy": statistics.fmean(accuracies), "deviation": deviation}


def _limit(source: Source, most: int) -> Source:
    """Return a source with at most so many of its images: of more, a random choice that is always the same."""
    if len(source) <= most:
        return source
    chosen = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:most]
    return Subset(source, chosen.sort().values.numpy())


def open_training_fewshot(
    training: Source, validation: Source | None, *, data: str | None, shots: int, most_images: int
) -> TrainingFewshot:
    """Open the images that few-shot accuracy is measured on while a model trains; `run_training` takes this function.

    Args:
        training: the images that the model trains on.
        validation: images that it does not train on.
        data: other data, divided as `vitrail fewshot` divides it. None: learn from the training images and score the
            validation images.
        shots: images of each class to learn from.
        most_images: the most images to score.

    Raises:
        ConfigError: there are no validation images and no other data.
        DataError: the data cannot be learned from or tested on.
    """
    if data is not None:
        train, test, _ = open_train_and_test(data, None)
    elif validation is not None:
        train, test = training, validation
    else:
        raise ConfigError(
            "run.fewshot_every needs images that are not trained on: set some aside with data.holdout, or give other "
            "data as run.fewshot_data"
        )
    name = f"run.fewshot_data={data}" if data is not None else "few-shot accuracy (run.fewshot_data): the run's data"
    check_sources(name, train, test)
    return TrainingFewshot(train, test, shots, most_images)
