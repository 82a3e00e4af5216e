"""Compute the labels of VTAB's tasks from the original annotations, with the thresholds of VTAB's released code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vitrail.errors import DataError

CLEVR_OBJECTS = range(3, 11)
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)
CLEVR_FARTHEST = 100.0
KITTI_DISTANCES = (-100.0, 8.0, 20.0)
KITTI_FARTHEST = 999.0
KITTI_VEHICLES = ("Car", "Van", "Truck")
DSPRITES_BINS = 16
DSPRITES_PLACES, DSPRITES_ORIENTATIONS = 32, 40


def clevr_count(objects: int) -> int:
    """Return the number of objects in a scene, less 3."""
    return _among(objects, CLEVR_OBJECTS, "a number of objects in CLEVR") - CLEVR_OBJECTS.start


def clevr_distance(depths: Iterable[float]) -> int:
    """Return the bin of the nearest object; depths are the third of `pixel_coords`, edges belong to the bin below."""
    nearest = min(depths, default=float("nan"))
    if not CLEVR_DISTANCES[0] < nearest <= CLEVR_FARTHEST:
        raise DataError(
            f"{nearest} is no distance in CLEVR: above 0, at most {CLEVR_FARTHEST:g}, of one object or more"
        )
    return _bin(nearest, CLEVR_DISTANCES)


def kitti_distance(objects: Iterable[tuple[str, float]]) -> int:
    """Return the bin of the nearest car, van or truck, from the type and z in metres of each object; the last for none.

    An edge belongs to the bin below it.
    """
    nearest = min((depth for kind, depth in objects if kind in KITTI_VEHICLES), default=None)
    if nearest is None:
        return len(KITTI_DISTANCES)
    if not KITTI_DISTANCES[0] < nearest <= KITTI_FARTHEST:
        raise DataError(f"{nearest} m is no distance of a vehicle in KITTI: above −100, at most {KITTI_FARTHEST:g}")
    return _bin(nearest, KITTI_DISTANCES)


def dsprites_location(x: int) -> int:
    """The 32 places from left to right, two to a bin."""
    return _among(x, range(DSPRITES_PLACES), "a class of x in dSprites") * DSPRITES_BINS // DSPRITES_PLACES


def dsprites_orientation(orientation: int) -> int:
    """The 40 orientations, two and a half to a bin: 0, 1 and 2 are the first, 3 and 4 the second."""
    known = _among(orientation, range(DSPRITES_ORIENTATIONS), "a class of orientation in dSprites")
    return known * DSPRITES_BINS // DSPRITES_ORIENTATIONS


def smallnorb_azimuth(azimuth: int) -> int:
    """As the original's info files have it: 0, 2, … 34, each ten degrees."""
    return _among(azimuth, range(0, 36, 2), "an azimuth in smallNORB") // 2


def smallnorb_elevation(elevation: int) -> int:
    """As the original's info files have it: 0 to 8, from 30 to 70 degrees."""
    return _among(elevation, range(9), "an elevation in smallNORB")


def svhn_digit(label: int) -> int:
    """Return the digit; the original labels the digit 0 as 10."""
    return _among(label, range(1, 11), "a label in SVHN") % 10


def flowers_class(label: int) -> int:
    """Return the class from 0; the original counts from 1."""
    return _among(label, range(1, 103), "a label in Flowers-102") - 1


def pets_class(label: int) -> int:
    """Return the class from 0; the original counts from 1."""
    return _among(label, range(1, 38), "a class of Oxford-IIIT Pets") - 1


def retinopathy_grade(grade: int) -> int:
    """From 0, healthy, to 4, proliferative: as it is."""
    return _among(grade, range(5), "a grade of retinopathy")


def _among(value: int, known: range, what: str) -> int:
    if value not in known:
        between = f", in steps of {known.step}" if known.step > 1 else ""
        raise DataError(f"{value} is not {what}: those are {known.start} to {known[-1]}{between}")
    return value


def _bin(value: float, edges: Sequence[float]) -> int:
    """Return the number of the bin of a value; each bin begins above its edge."""
    return sum(edge < value for edge in edges) - 1
