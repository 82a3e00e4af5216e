"""The share of right answers on the images of each class, and its mean, in which rare classes count as much."""

from __future__ import annotations

import numpy as np

from vitrail.system.intervals import NO_ESTIMATE, Estimate, compute_share_limits, estimate_mean_share
from vitrail.tasks.task import Array


def compute_recalls(truth: Array, hits: Array, count: int) -> Array:
    """Return (count,) shares of the images of each class that are hits; NaN for a class without images.

    Args:
        truth: (N,) numbers of classes.
        hits: (N,) bool.
        count: the number of classes.
    """
    images = np.bincount(truth, minlength=count)
    recalls: Array = np.where(images > 0, np.bincount(truth, hits, count) / np.maximum(images, 1), np.nan)
    return recalls


def estimate_balanced_accuracy(truth: Array, hits: Array, count: int) -> Estimate:
    """Return the mean recall of the classes that have images. Arguments are those of `compute_recalls`."""
    return estimate_mean_share(np.bincount(truth, hits, count), np.bincount(truth, minlength=count))


def estimate_mean_accuracy(hits: Array, is_known: Array) -> Estimate:
    """Return the mean of the accuracies of C columns, for (N, C) hits and which of them count.

    The interval is Wilson's for so many images as would give one share the same variance. An image may be easy in all
    columns or in none, so the variance is that of whole images. For it one image that is right and one that is wrong
    in every column are added: a share without a miss is not certain.
    """
    columns = is_known.any(axis=0)
    hits, is_known = hits[:, columns] & is_known[:, columns], is_known[:, columns]
    if not columns.any():
        return NO_ESTIMATE
    share = float((hits.sum(axis=0) / is_known.sum(axis=0)).mean())
    ends = np.array([[True], [False]]).repeat(hits.shape[1], axis=1)
    hits, is_known = np.concatenate([hits, ends]), np.concatenate([is_known, np.ones_like(ends)])
    images = is_known.sum(axis=0)
    shares = hits.sum(axis=0) / images
    pulls = (np.where(is_known, hits - shares, 0.0) / images).mean(axis=1)
    likely = float(shares.mean())
    return Estimate(share, *compute_share_limits(share, likely * (1 - likely) / float((pulls**2).sum())))
