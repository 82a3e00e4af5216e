"""Show rare classes more often: a source whose list of samples repeats theirs.

It is a list and no random draw, so the order of samples stays a function of seed and position: a resumed run, and one
on any number of ranks or workers, sees the same. Every repetition is augmented in its own way.
"""

from __future__ import annotations

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Source, Subset, order_within_strata
from vitrail.errors import ConfigError


def balance_source(source: Source, share: float) -> Source:
    """Return a source that shows every sample at least once, and those of rare classes more often.

    A class with n samples is shown n + share · (most − n) times, where the largest class has `most`. For a task other
    than labels, classes are the strata of the source. Samples of which nothing is known are not repeated. The
    repetitions of a sample are spread evenly, so that every part of the list is as balanced as the whole: over all of
    it, or, for a source of which neighbours should be read together, over the window of its neighbours.

    Args:
        source: the samples.
        share: from 0, which changes nothing, to 1, which shows every class equally often.

    Raises:
        ConfigError: `share` is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"balance = {share}: give a share from 0 (as it is) to 1 (every class equally often)")
    if share == 0 or not len(source):
        return source
    times = count_repetitions(source, share)
    return Subset(source, _spread(times, source.window if source.block > 1 else len(source)))


def count_repetitions(source: Source, share: float) -> Indices:
    """Return how often each sample is shown. Which samples of a class are shown once more depends on their names."""
    order, starts, sizes = order_within_strata(source, seed=0, purpose="balance")
    strata = source.strata(0, len(source))[order[starts]]
    known = strata >= 0
    most = int(sizes[known].max(initial=0))
    wanted = np.where(known, sizes + np.round(share * (most - sizes)).astype(np.int64), sizes)
    whole, more = np.divmod(wanted, sizes)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    times = np.empty(len(order), np.int64)
    times[order] = np.repeat(whole, sizes) + (rank < np.repeat(more, sizes))
    return times


def _spread(times: Indices, window: int) -> Indices:
    """Return each sample number as often as it is shown; in each window, its places are evenly spaced, in a circle."""
    count = len(times)
    samples = np.repeat(np.arange(count), times)
    number = np.arange(len(samples)) - np.repeat(np.cumsum(times) - times, times)  # 0, 1, … of each sample
    starts = samples // window * window
    sizes = np.minimum(starts + window, count) - starts
    places = starts + (samples - starts + number * sizes / times[samples]) % sizes
    return samples[np.lexsort((samples, places))]


def count_classes(source: Source) -> list[int]:
    """Return the number of samples of each class; those without a label are not counted."""
    labels = source.labels(0, len(source))
    counts: list[int] = np.bincount(labels[labels >= 0], minlength=source.num_classes).tolist()
    return counts
