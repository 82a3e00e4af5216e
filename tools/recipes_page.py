"""Write the tables of docs/recipes.md from the recipes themselves.

    python tools/recipes_page.py            write the page
    python tools/recipes_page.py --check    fail if the page is not up to date

The introduction of the page is written by hand and ends with `MARKER`; everything after it is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.recipes import DataSet, Recipe
from vitrail.recipes.better_plain import BETTER_PLAIN
from vitrail.recipes.bit import BIT_FINETUNING
from vitrail.recipes.finetuning import FINETUNING
from vitrail.recipes.joint_embedding import JOINT_EMBEDDING
from vitrail.recipes.masked_patches import MASKED_PATCHES
from vitrail.recipes.pretraining import IMAGENET, IMAGENET_21K, JFT, PRETRAINING
from vitrail.recipes.small import SMALL

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
MARKER = "<!-- The tables below are written by tools/recipes_page.py. -->\n"


def format_model(recipe: Recipe) -> str:
    """Return the model's name, or its width, depth and patches if its size has no name."""
    model = recipe.settings["model"]
    if "width" not in model:
        return str(model.get("name", "any"))
    stem = "convolutional stem" if "conv_stem" in model else f"patches of {model['name'].partition('/')[2]}"
    return f"width {model['width']}, depth {model['depth']}, {stem}"


def format_length(recipe: Recipe) -> str:
    schedule = recipe.settings["schedule"]
    return f"{schedule['epochs']} epochs" if "epochs" in schedule else f"{schedule['steps']:,} steps"


def format_learning_rates(recipe: Recipe) -> str:
    """Return the rates of the sweep, with the one used without a sweep in bold."""
    chosen = recipe.settings["optimizer"]["learning_rate"]
    rates = recipe.learning_rates or (chosen,)
    return " ".join(f"**{rate:g}**" if rate == chosen and len(rates) > 1 else f"{rate:g}" for rate in rates)


def format_published_accuracy(recipe: Recipe) -> str:
    """Return "ImageNet / CIFAR-100" as the paper gives them after pre-training and fine-tuning."""
    match = re.match(r"([\d.]+) on ImageNet, ([\d.]+) on CIFAR-100", recipe.expected)
    assert match is not None, recipe.name
    return " / ".join(match.groups())


Columns = dict[str, Callable[[Recipe], Any]]
NAME: Columns = {"name": lambda recipe: f"`{recipe.name}`"}
MODEL: Columns = {"model": format_model}
SIZE: Columns = {"image size": lambda recipe: recipe.settings["model"]["image_size"]}
DATA: Columns = {"data": lambda recipe: recipe.data_set.name}
LENGTH: Columns = {"length": format_length}
RATE: Columns = {"learning rate": format_learning_rates}
WEIGHT_DECAY: Columns = {"weight decay": lambda recipe: f"{recipe.settings['optimizer'].get('weight_decay', 0.0):g}"}
COST: Columns = {"cost": lambda recipe: recipe.cost}
EXPECTED: Columns = {"expected": lambda recipe: recipe.expected}
PUBLISHED: Columns = {"ImageNet / CIFAR-100": format_published_accuracy}

PRETRAINING_COLUMNS = {**NAME, **MODEL, **LENGTH, **RATE, **COST, **PUBLISHED}


class Section(NamedTuple):
    """A heading of the page, the text under it, and the table of its recipes."""

    heading: str
    text: str
    columns: Columns
    recipes: Iterable[Recipe]


def select_pretraining(data_set: DataSet) -> list[Recipe]:
    return [recipe for recipe in PRETRAINING if recipe.data_set is data_set]


SECTIONS = (
    Section(
        "Small data",
        "Our own recipes. `vitrail quickstart` runs the first two, one after the other. All decay the learning rate "
        "by a cosine. [Results](results.md) has the measurements.",
        {**NAME, **MODEL, **SIZE, **DATA, **LENGTH, **RATE, **WEIGHT_DECAY, **COST, **EXPECTED},
        SMALL,
    ),
    Section(
        "Pre-training on JFT-300M",
        "Table 3 of the paper: AdamW, β 0.9/0.999, weight decay 0.1, batches of 4,096 at 224 px, 10,000 steps of "
        "warm-up, linear decay to 1e-5 (the released code's), no dropout, no clipping. "
        "Two choices are ours: the sigmoid loss with a head bias of "
        "−10, as on ImageNet-21k, and for `jft-r152x2-14` the learning rate of 7 epochs. R200x3 has no recipe "
        "because the paper does not give its learning rate. Costs are counted for 303M images and 18,291 classes; "
        "accuracies are the paper's, after fine-tuning at 384 px (table 6).",
        PRETRAINING_COLUMNS,
        select_pretraining(JFT),
    ),
    Section(
        "Pre-training on ImageNet-21k",
        "Table 3: as above, with weight decay 0.03 and dropout 0.1. The sigmoid loss follows from the released head, "
        "whose bias is −10. Costs are counted for 14.2M images and 21,841 classes; accuracies are from table 5, "
        "which gives one number for both lengths of L/16 and L/32.",
        PRETRAINING_COLUMNS,
        select_pretraining(IMAGENET_21K),
    ),
    Section(
        "Pre-training on ImageNet",
        "Table 3: weight decay 0.3, dropout 0.1, cosine decay, gradients clipped to a norm of 1. The softmax loss is "
        "our choice. Accuracies are from table 5.",
        PRETRAINING_COLUMNS,
        select_pretraining(IMAGENET),
    ),
    Section(
        "Masked patch prediction",
        "Pre-training of B/16 without labels at 224 px: Adam, batches of 4,096, cosine decay. Single "
        "keys give the paper's variants: `objective.target=colours-4x4`, `objective.target=pixels` and "
        "`objective.corrupted=0.15`; the last two are slightly worse.",
        {**NAME, **DATA, **LENGTH, **RATE, **COST, **EXPECTED},
        MASKED_PATCHES,
    ),
    Section(
        "Joint embedding",
        "Pre-training without labels by comparing views of an image: two global ones and six local ones at half the "
        "size, cut and changed on the GPU. The few-shot accuracy is measured while it trains, with the labels of the "
        "data.",
        {**NAME, **MODEL, **DATA, **LENGTH, **RATE, **COST, **EXPECTED},
        JOINT_EMBEDDING,
    ),
    Section(
        "Fine-tuning",
        "Table 4: any model, SGD with momentum 0.9, batches of 512, cosine decay, no weight decay, gradients clipped "
        "to a norm of 1, 500 steps of warm-up (100 in runs of 500 steps). The learning rate in bold is used without "
        "a sweep; 0.06 is for ResNets and hybrids. To choose one, the recipes set aside 1% of ImageNet, 2% of CIFAR, "
        "10% of Pets and Flowers, and 20% of a VTAB task. At 512 and 518 px the weights are averaged "
        "(0.9999 in every step, without our ramp). A "
        "patch of 14 does not divide 384: give such models `model.image_size=392`. Where a crop or a mirror image "
        "changes the label, as in the structured tasks of VTAB, turn both off: `data.augmentation.flip=0 "
        "data.augmentation.crop_area=[1.0,1.0] data.augmentation.crop_ratio=[0.01,100]`.",
        {**NAME, **SIZE, **DATA, **LENGTH, **RATE, **COST, **EXPECTED},
        FINETUNING,
    ),
    Section(
        "Fine-tuning ResNets by BiT's rule",
        "The paper also fine-tuned its ResNets as BiT does, and took the better result. The number of training images "
        "chooses the recipe: fewer than 20,000, fewer than 500,000, or more. SGD with momentum 0.9, batches of 512, no "
        "weight decay, no clipping, a rate that falls to a tenth three times; Mixup 0.1 except for the smallest. The "
        "rule also looks at the size of the images: below 96×96 it trains at 128 px (`model.image_size=128 "
        "data.augmentation.crop_area=[0.64,0.64]`, as the recipe for CIFAR does), else at 480 px "
        "(`model.image_size=480 data.augmentation.crop_area=[0.879,0.879]`).",
        {**NAME, **SIZE, **DATA, **LENGTH, **RATE, **COST, **EXPECTED},
        BIT_FINETUNING,
    ),
    Section(
        "Better plain ViT",
        "S/16 on ImageNet alone, from later work of the same group: average pooling, sine-cosine positions, "
        "RandAugment (2, 10), Mixup 0.2, batches of 1,024, weight decay 0.1, cosine decay, 10,000 steps of warm-up, "
        "gradients clipped to a norm of 1, and a tanh layer before the head. The published numbers are for centre "
        "crops of images resized to 256; evaluations during training resize straight to 224.",
        {**NAME, **LENGTH, **RATE, **COST, **EXPECTED},
        BETTER_PLAIN,
    ),
)


def write_sections() -> str:
    """Return all sections as Markdown."""
    return "\n".join(f"## {section.heading}\n\n{section.text}\n\n{write_table(section)}" for section in SECTIONS)


def write_table(section: Section) -> str:
    rows = [list(section.columns), ["---"] * len(section.columns)]
    rows += [[str(cell(recipe)) for cell in section.columns.values()] for recipe in section.recipes]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_page(text: str) -> str:
    """Return the page with its introduction as it is and its tables written anew."""
    introduction, marker, _ = text.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE.name} has no line {MARKER.strip()!r}")
    return f"{introduction}{MARKER}\n{write_sections()}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = write_page(text)
    if "--check" in sys.argv[1:]:
        sys.exit("docs/recipes.md is not up to date: run python tools/recipes_page.py" if page != text else 0)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
