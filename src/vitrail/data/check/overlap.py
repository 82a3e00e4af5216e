"""Which images of a data set repeat images of another: the same pixels, or nearly the same.

The paper removes from the images it pre-trains on what is in the test sets it transfers to (section 4.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.check.near_duplicates import SIDE, find_flat, find_near_duplicates, make_thumbnail
from vitrail.data.sources.source import Source
from vitrail.system.results import format_count

LOOKS = np.dtype([("digest", "V16"), ("thumbnail", "u1", (SIDE * SIDE,)), ("readable", "?")])
"""What is compared of an image: a hash of its pixels, and a thumbnail."""
MATCH_KINDS = ("exact", "near", "mirrored")
"""How two images match: the same pixels; nearly the same; nearly the same after mirroring one."""


MANY = 0.1
"""If more than this share of the images are nearly the same as others, a note asks to look at them."""


class Repeat(NamedTuple):
    """An image of the first data set, and the image of the second that it is nearest to."""

    split: str
    name: str
    other_split: str
    other_name: str
    kind: str
    """One of `MATCH_KINDS`."""
    similarity: float
    """1 for the same pixels; else the correlation of the details, from 0.65 to 1."""

    @property
    def sentence(self) -> str:
        """How the two match, for a person."""
        other = f"{self.other_name} of {self.other_split}"
        if self.kind == "exact":
            return f"the same pixels as {other}"
        mirror = "a mirror image of " if self.kind == "mirrored" else ""
        return f"nearly the same as {mirror}{other}, similarity {self.similarity:.2f}"


@dataclass(frozen=True)
class LookedSplit:
    """A split with what is compared of its images."""

    split: str
    source: Source
    looks: NDArray[Any]
    """`LOOKS` of each sample; zeros if it cannot be read."""


@dataclass(frozen=True)
class Overlap:
    """The images of one data set that repeat images of another."""

    parts: Sequence[tuple[str, Source]]
    """The splits of the first data set."""
    others: Sequence[tuple[str, Source]]
    """The splits of the second."""
    pairs: NDArray[np.int64]
    """(repeats, 5): split, number, other split, other number, place in `MATCH_KINDS`; one row for an image."""
    similarities: NDArray[np.float64]
    """(repeats,)."""
    images: int
    """All images of the first data set."""
    other_repeated: int
    """Images of the second data set that some image of the first repeats."""
    other_images: int
    other_unreadable: int
    flat: int
    """Images of the first data set that are nearly uniform or tiny, and so compared by their exact pixels alone."""

    def __len__(self) -> int:
        return len(self.pairs)

    def repeats(self) -> Iterator[Repeat]:
        """Yield the images that repeat another, in the order of the first data set."""
        yield from map(self.describe, range(len(self.pairs)))

    def describe(self, row: int) -> Repeat:
        """Return one repeat by its number."""
        part, index, other, other_index, kind = self.pairs[row].tolist()
        (split, source), (other_split, other_source) = self.parts[part], self.others[other]
        return Repeat(
            split,
            source.display_name(index),
            other_split,
            other_source.display_name(other_index),
            MATCH_KINDS[kind],
            round(float(self.similarities[row]), 4),
        )

    @property
    def counts(self) -> dict[str, int]:
        """The number of repeats of each kind."""
        numbers = np.bincount(self.pairs[:, 4], minlength=len(MATCH_KINDS)).tolist()
        return dict(zip(MATCH_KINDS, numbers, strict=True))

    def lines(self) -> Iterator[str]:
        """Yield what was found, for a person."""
        if not len(self):
            yield f"against: none of {self.images:,} images repeats one of {self.other_images:,}"
            return
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items() if count)
        yield (
            f"against: {len(self):,} of {self.images:,} images {'repeats' if len(self) == 1 else 'repeat'} "
            f"{self.other_repeated:,} of {self.other_images:,} ({kinds})"
        )

    @property
    def notes(self) -> list[str]:
        """Remarks about images that were not fully compared."""
        notes = []
        if self.flat:
            images = format_count(self.flat, "image")
            notes.append(f"compared by the exact pixels alone, because nearly uniform or below 16 pixels: {images}")
        if self.other_unreadable:
            images = format_count(self.other_unreadable, "image")
            notes.append(f"{images} of the data to compare with cannot be read and could not be compared")
        alike = self.counts["near"] + self.counts["mirrored"]
        if alike > MANY * self.images:
            notes.append("so many nearly the same are rare among photographs: look at them before leaving any out")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return the repeats as JSON values."""
        return {
            "images": self.images,
            "other_images": self.other_images,
            "other_unreadable": self.other_unreadable,
            "other_repeated": self.other_repeated,
            "flat": self.flat,
            "counts": self.counts,
            "repeats": [repeat._asdict() for repeat in self.repeats()],
        }


def make_look(content: bytes | Tensor, image: Image.Image | None) -> tuple[bytes, NDArray[np.uint8], bool]:
    """Return a record of `LOOKS` of a sample.

    Args:
        content: the sample's content.
        image: the decoded image, if the content is a file.
    """
    if image is None:
        assert isinstance(content, Tensor)
        image = pixels_to_image(content)
    pixels = np.asarray(image)
    digest = hashlib.blake2b(repr(pixels.shape).encode() + pixels.tobytes(), digest_size=16).digest()
    return digest, make_thumbnail(image), True


def pixels_to_image(pixels: Tensor) -> Image.Image:
    """Convert (C, height, width) pixels to RGB; of other numbers of channels than 1 and 3, the mean is taken."""
    values = pixels.numpy()
    if len(values) == 3:
        return Image.fromarray(np.ascontiguousarray(values.transpose(1, 2, 0)))
    grey = values[0] if len(values) == 1 else values.mean(axis=0).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(grey)).convert("RGB")


def compare_looks(
    parts: Sequence[LookedSplit], others: Sequence[LookedSplit], progress: Callable[[int, int], None]
) -> Overlap:
    """Find the images of some splits that repeat images of others. `progress` gets done and total images."""
    looks, places = _join(parts)
    other_looks, other_places = _join(others)
    best = np.full(len(looks), -1)  # the place in others
    similarity, kinds = np.zeros(len(looks)), np.zeros(len(looks), np.int64)
    is_repeated = np.zeros(len(other_looks), dtype=bool)
    for first, second in _find_equal(looks["digest"], other_looks["digest"]):
        is_repeated[second] = True
        best[first], similarity[first] = second.min(), 1.0
    done, thumbnails = 0, looks["thumbnail"]
    progress(done, len(looks))
    for number, found in find_near_duplicates(thumbnails, other_looks["thumbnail"]):
        is_repeated[found.second] = True
        order = np.argsort(found.similarity, kind="stable")  # the last assignment stays: the most similar
        order = order[similarity[found.first[order]] < 1]
        first = found.first[order]
        best[first], similarity[first] = found.second[order], np.minimum(found.similarity[order], 0.9999)
        kinds[first] = np.where(found.is_mirrored[order], 2, 1)
        done += number
        progress(done, len(looks))
    rows = np.flatnonzero(best >= 0)
    pairs = np.concatenate([places[rows], other_places[best[rows]], kinds[rows, None]], axis=1)
    return Overlap(
        parts=[(part.split, part.source) for part in parts],
        others=[(other.split, other.source) for other in others],
        pairs=pairs,
        similarities=similarity[rows],
        images=sum(len(part.looks) for part in parts),
        other_repeated=int(is_repeated.sum()),
        other_images=sum(len(other.looks) for other in others),
        other_unreadable=sum(int((~other.looks["readable"]).sum()) for other in others),
        flat=int(find_flat(thumbnails).sum()),
    )


def _join(parts: Sequence[LookedSplit]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the looks of all readable images, and (images, 2) their splits and numbers."""
    readable = [np.flatnonzero(part.looks["readable"]) for part in parts]
    places = [np.stack([np.full(len(rows), number), rows], axis=1) for number, rows in enumerate(readable)]
    looks = [part.looks[rows] for part, rows in zip(parts, readable, strict=True)]
    return np.concatenate(looks), np.concatenate(places).astype(np.int64)


def _find_equal(first: NDArray[Any], second: NDArray[Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the places in both of each hash that both have."""
    groups: dict[bytes, tuple[list[int], list[int]]] = {}
    for place, digest in enumerate(second):
        groups.setdefault(digest.tobytes(), ([], []))[1].append(place)
    for place, digest in enumerate(first):
        if (group := groups.get(digest.tobytes())) is not None:
            group[0].append(place)
    for ones, twos in groups.values():
        if ones:
            yield np.array(ones), np.array(twos)
