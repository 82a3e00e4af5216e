"""The 19 tasks of VTAB (Zhai and others, arXiv 1910.04867) as data: where they come from, what their labels are.

Classes, parts and thresholds are those of VTAB's released code. It takes images and annotations from TensorFlow
Datasets, hence the column of names there; the originals are named beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitrail.transfer.vtab_labels import (
    clevr_count,
    clevr_distance,
    dsprites_location,
    dsprites_orientation,
    flowers_class,
    kitti_distance,
    pets_class,
    retinopathy_grade,
    smallnorb_azimuth,
    smallnorb_elevation,
    svhn_digit,
)

GROUPS = ("natural", "specialised", "structured")


@dataclass(frozen=True, kw_only=True)
class VtabTask:
    """One of the 19 tasks."""

    name: str
    title: str
    group: str
    classes: int
    origin: str
    """The original data set."""
    url: str
    tfds: str
    """Name in TensorFlow Datasets, with the version that VTAB uses."""
    images: tuple[int, int, int]
    """Number of images in train, val and test."""
    parts: str
    """How VTAB makes these parts."""
    annotation: str = "the class"
    """What the label is computed from."""
    label: Callable[[Any], int] | None = None
    """Computes the label from an annotation; None if the classes are the labels."""
    whole: bool = True
    """Whether an annotation is one whole number, so that data can hold it as a label (`raw = true`)."""
    crop: bool = True
    """Whether a crop keeps the label. This is our choice; VTAB does not say."""
    mirror: bool = True
    """Whether a mirror image keeps the label. Our choice, too."""


CLEVR = "https://cs.stanford.edu/people/jcjohns/clevr/"
DSPRITES = "https://github.com/google-deepmind/dsprites-dataset"
SMALLNORB = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
NINETY = "90% and 10% of train; test"
OFFICIAL = "the original's own"
SIXTY = "60%, 20% and 20% of all"

_TASKS = (
    VtabTask(
        name="caltech101",
        title="Caltech101",
        group="natural",
        classes=102,
        origin="Caltech 101",
        url="https://data.caltech.edu/records/mzrjq-6wc02",
        tfds="caltech101:3.*.*",
        images=(2_754, 306, 6_084),
        parts="90% and 10% of 30 images of each class; all others are test",
        annotation="the class, the background being one",
    ),
    VtabTask(
        name="cifar100",
        title="CIFAR-100",
        group="natural",
        classes=100,
        origin="CIFAR-100",
        url="https://www.cs.toronto.edu/~kriz/cifar.html",
        tfds="cifar100:3.*.*",
        images=(45_000, 5_000, 10_000),
        parts=NINETY,
        annotation="the fine class",
    ),
    VtabTask(
        name="dtd",
        title="DTD",
        group="natural",
        classes=47,
        origin="Describable Textures",
        url="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        tfds="dtd:3.*.*",
        images=(1_880, 1_880, 1_880),
        parts=f"{OFFICIAL}, the first of its ten",
    ),
    VtabTask(
        name="flowers102",
        title="Flowers-102",
        group="natural",
        classes=102,
        origin="Oxford 102 Flowers",
        url="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        tfds="oxford_flowers102:2.*.*",
        images=(1_020, 1_020, 6_149),
        parts=OFFICIAL,
        annotation="the class, from 1 on: less 1",
        label=flowers_class,
    ),
    VtabTask(
        name="pets",
        title="Oxford-IIIT Pets",
        group="natural",
        classes=37,
        origin="Oxford-IIIT Pet",
        url="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        tfds="oxford_iiit_pet:3.*.*",
        images=(2_944, 736, 3_669),
        parts="80% and 20% of trainval; test",
        annotation="the breed, from 1 on: less 1",
        label=pets_class,
    ),
    VtabTask(
        name="sun397",
        title="SUN397",
        group="natural",
        classes=397,
        origin="SUN397",
        url="https://vision.princeton.edu/projects/2010/SUN/",
        tfds="sun397/tfds:4.*.*",
        images=(76_128, 10_875, 21_750),
        parts="those of TFDS, drawn from all images",
    ),
    VtabTask(
        name="svhn",
        title="SVHN",
        group="natural",
        classes=10,
        origin="Street View House Numbers, cropped",
        url="http://ufldl.stanford.edu/housenumbers/",
        tfds="svhn_cropped:3.*.*",
        images=(65_931, 7_326, 26_032),
        parts=f"{NINETY}; nothing of extra",
        annotation="the digit, 10 being 0",
        label=svhn_digit,
        mirror=False,
    ),
    VtabTask(
        name="patch_camelyon",
        title="Patch Camelyon",
        group="specialised",
        classes=2,
        origin="PatchCamelyon",
        url="https://github.com/basveeling/pcam",
        tfds="patch_camelyon:2.*.*",
        images=(262_144, 32_768, 32_768),
        parts=OFFICIAL,
        annotation="whether there is tumour",
    ),
    VtabTask(
        name="eurosat",
        title="EuroSAT",
        group="specialised",
        classes=10,
        origin="EuroSAT, RGB",
        url="https://github.com/phelber/EuroSAT",
        tfds="eurosat/rgb:2.*.*",
        images=(16_200, 5_400, 5_400),
        parts=SIXTY,
    ),
    VtabTask(
        name="resisc45",
        title="Resisc45",
        group="specialised",
        classes=45,
        origin="NWPU-RESISC45",
        url="https://arxiv.org/abs/1703.00121",
        tfds="resisc45:3.*.*",
        images=(18_900, 6_300, 6_300),
        parts=SIXTY,
    ),
    VtabTask(
        name="diabetic_retinopathy",
        title="Diabetic Retinopathy",
        group="specialised",
        classes=5,
        origin="Kaggle Diabetic Retinopathy Detection, as its winner Graham prepared it, 300 px",
        url="https://www.kaggle.com/c/diabetic-retinopathy-detection",
        tfds="diabetic_retinopathy_detection/btgraham-300:3.*.*",
        images=(35_126, 10_906, 42_670),
        parts="the competition's train; its test, in two as TFDS has it",
        annotation="the grade, 0 to 4",
        label=retinopathy_grade,
    ),
    VtabTask(
        name="clevr_count",
        title="CLEVR count",
        group="structured",
        classes=8,
        origin="CLEVR v1.0",
        url=CLEVR,
        tfds="clevr:3.*.*",
        images=(63_000, 7_000, 15_000),
        parts="90% and 10% of train; the original's val is test",
        annotation="the number of objects, 3 to 10: less 3",
        label=clevr_count,
        crop=False,
    ),
    VtabTask(
        name="clevr_distance",
        title="CLEVR distance",
        group="structured",
        classes=6,
        origin="CLEVR v1.0",
        url=CLEVR,
        tfds="clevr:3.*.*",
        images=(63_000, 7_000, 15_000),
        parts="90% and 10% of train; the original's val is test",
        annotation="the depth of the nearest object: up to 8, 8.5, 9, 9.5, 10, and beyond",
        label=clevr_distance,
        whole=False,
        crop=False,
    ),
    VtabTask(
        name="dmlab",
        title="DMLab",
        group="structured",
        classes=6,
        origin="DMLab frames, of VTAB itself",
        url="https://github.com/google-research/task_adaptation",
        tfds="dmlab:2.0.1",
        images=(65_550, 22_628, 22_735),
        parts=OFFICIAL,
        annotation="near, far or very far × positive or negative reward",
        crop=False,
    ),
    VtabTask(
        name="kitti_distance",
        title="KITTI distance",
        group="structured",
        classes=4,
        origin="KITTI, objects in 2D",
        url="https://www.cvlibs.net/datasets/kitti/eval_object.php",
        tfds="kitti:3.1.0",
        images=(6_347, 423, 711),
        parts="those of TFDS, of the original's labelled images",
        annotation="z of the nearest car, van or truck in metres: up to 8, 20, and beyond; or none",
        label=kitti_distance,
        whole=False,
        crop=False,
    ),
    VtabTask(
        name="dsprites_location",
        title="dSprites location",
        group="structured",
        classes=16,
        origin="dSprites",
        url=DSPRITES,
        tfds="dsprites:2.*.*",
        images=(589_824, 73_728, 73_728),
        parts="80%, 10% and 10% of all",
        annotation="the class of x, 0 to 31: halved",
        label=dsprites_location,
        crop=False,
        mirror=False,
    ),
    VtabTask(
        name="dsprites_orientation",
        title="dSprites orientation",
        group="structured",
        classes=16,
        origin="dSprites",
        url=DSPRITES,
        tfds="dsprites:2.*.*",
        images=(589_824, 73_728, 73_728),
        parts="80%, 10% and 10% of all",
        annotation="the class of orientation, 0 to 39: divided by 2.5",
        label=dsprites_orientation,
        crop=False,
        mirror=False,
    ),
    VtabTask(
        name="smallnorb_azimuth",
        title="smallNORB azimuth",
        group="structured",
        classes=18,
        origin="smallNORB",
        url=SMALLNORB,
        tfds="smallnorb:2.*.*",
        images=(24_300, 12_150, 12_150),
        parts="train; the first and the second half of test",
        annotation="the azimuth, 0, 2, … 34: halved",
        label=smallnorb_azimuth,
        crop=False,
        mirror=False,
    ),
    VtabTask(
        name="smallnorb_elevation",
        title="smallNORB elevation",
        group="structured",
        classes=9,
        origin="smallNORB",
        url=SMALLNORB,
        tfds="smallnorb:2.*.*",
        images=(24_300, 12_150, 12_150),
        parts="train; the first and the second half of test",
        annotation="the elevation, 0 to 8",
        label=smallnorb_elevation,
        crop=False,
    ),
)

TASKS: dict[str, VtabTask] = {task.name: task for task in _TASKS}
"""Tasks by name, in the order of the groups."""


def format_registry() -> str:
    """Return the tasks as Markdown tables, one for each group; docs/transfer.md ends with them."""
    return "\n".join(f"### {group.capitalize()}\n\n{_table(group)}" for group in GROUPS)


COLUMNS = ("name", "classes", "from", "in TFDS", "train, val, test", "how VTAB makes them", "label", "trained with")


def _table(group: str) -> str:
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(task) for task in TASKS.values() if task.group == group)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(task: VtabTask) -> tuple[str, ...]:
    changes = [name for name, allowed in (("crops", task.crop), ("mirror images", task.mirror)) if allowed]
    return (
        f"`{task.name}`",
        str(task.classes),
        f"[{task.origin}]({task.url})",
        f"`{task.tfds}`",
        " / ".join(f"{count:,}" for count in task.images),
        task.parts,
        task.annotation + (f" (`{task.label.__name__}`)" if task.label is not None else ""),
        " and ".join(changes) or "neither crops nor mirror images",
    )
