"""The recipes as tables in Markdown: docs/recipes.md is an introduction and this, and a test compares them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from vitrail.recipes.better_plain import BETTER_PLAIN
from vitrail.recipes.finetuning import FINETUNING
from vitrail.recipes.masked_patches import MASKED_PATCHES
from vitrail.recipes.pretraining import IMAGENET, IMAGENET_21K, JFT, PRETRAINING
from vitrail.recipes.recipe import DataSet, Recipe
from vitrail.recipes.small import SMALL

COLUMNS = (
    *("name", "model", "data", "length", "learning rate", "decay", "weight decay", "dropout"),
    *("cost", "expected", "command"),
)


class Group(NamedTuple):
    """A heading, what is to be said of all its recipes, and those."""

    heading: str
    words: str
    recipes: tuple[Recipe, ...]


def _on(data_set: DataSet) -> tuple[Recipe, ...]:
    return tuple(recipe for recipe in PRETRAINING if recipe.data_set is data_set)


GROUPS = (
    Group(
        "Small, and our own",
        "No other data than what is named. `vitrail quickstart` runs the first two, one after the other.",
        SMALL,
    ),
    Group(
        "Pre-training on JFT-300M",
        "Table 3 of the paper: AdamW, β 0.9/0.999, batches of 4,096 at 224 px, 10,000 steps of warm-up, no clipping. "
        "Our choices where it is silent: a sigmoid loss from a head bias of −10, as on ImageNet-21k; and for R152x2, "
        "whose 14 epochs are known from table 6 alone, the learning rate of its 7. R200x3 is in table 6 too, but its "
        "learning rate is not told, so it has no recipe. Costs are counted for 303M images and 18,291 classes.",
        _on(JFT),
    ),
    Group(
        "Pre-training on ImageNet-21k",
        "Table 3: as above, with dropout. The released head starts from a bias of −10, which belongs to a sigmoid "
        "loss, and that is what these have. Costs are counted for 14.2M images and 21,841 classes. Table 5 also has "
        "H/14, for which table 3 has no row.",
        _on(IMAGENET_21K),
    ),
    Group(
        "Pre-training on ImageNet",
        "Table 3: as above, with dropout, much weight decay, and gradients clipped to a norm of 1. The softmax loss is "
        "our choice. Costs are counted for 1.281M images.",
        _on(IMAGENET),
    ),
    Group(
        "Masked patch prediction",
        "Pre-training without labels, by Adam, batches of 4,096. The paper's variants are single keys: "
        "`objective.target=colours-4x4`, `objective.target=pixels` (slightly worse) and `objective.corrupted=0.15` "
        "(slightly worse). A million steps are 13.5 epochs of JFT-300M; the cost leaves out what predicts the colours.",
        MASKED_PATCHES,
    ),
    Group(
        "Fine-tuning",
        "Table 4: SGD with momentum 0.9, batches of 512, gradients clipped to a norm of 1; a warm-up of 500 steps as "
        "in the released configuration, of 100 (our choice) where there are 500 in all. In bold the learning rate that "
        "is taken without a sweep; the others are those that the paper tried, 0.06 for ResNets and hybrids. Set aside "
        "to choose it: 1% of ImageNet, 2% of CIFAR, 10% of Pets and Flowers, 20% of a VTAB task. The two best "
        "resolutions on ImageNet average the weights (0.9999). A patch of 14 does not divide 384: give such models "
        "`model.image_size=392`. Where a crop or a mirror image changes the answer, as in the structured tasks of "
        "VTAB, turn both off: `data.augmentation.flip=0 data.augmentation.crop_area=[1.0,1.0] "
        "data.augmentation.crop_ratio=[0.01,100]`.",
        FINETUNING,
    ),
    Group(
        "The better plain ViT",
        "Later work of the same group, on ImageNet alone: average pooling, sine-cosine positions, RandAugment (2, 10), "
        "Mixup 0.2, batches of 1,024, 10,000 steps of warm-up, gradients clipped to a norm of 1. The published numbers "
        "are with the tanh layer before the head, as here, and on centre crops of images resized to 256; evaluations "
        "during training squash to 224.",
        BETTER_PLAIN,
    ),
)


def page() -> str:
    """All recipes, a table for each group."""
    return "\n".join(f"## {heading}\n\n{words}\n\n{_table(recipes)}" for heading, words, recipes in GROUPS)


def _table(recipes: Iterable[Recipe]) -> str:
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(recipe) for recipe in recipes)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(recipe: Recipe) -> tuple[str, ...]:
    model, optimizer, schedule = (recipe.settings[section] for section in ("model", "optimizer", "schedule"))
    return (
        recipe.name,
        f"{_model(model)}, {model['image_size']} px",
        recipe.data_set.name,
        f"{schedule['epochs']} epochs" if "epochs" in schedule else f"{schedule['steps']:,} steps",
        _learning_rates(recipe),
        schedule["decay"],
        f"{optimizer.get('weight_decay', 0.0):g}",
        f"{model.get('dropout', 0.0):g}" if "name" in model else "as saved",
        recipe.cost,
        recipe.expected,
        f"`{recipe.command}`",
    )


def _model(model: dict[str, Any]) -> str:
    """By its name, and where its size is not that name's, by that."""
    if "name" not in model:
        return "any"
    if "width" not in model:
        return str(model["name"])
    stem = "a convolutional stem" if "conv_stem" in model else f"patches of {model['name'].partition('/')[2]}"
    return f"width {model['width']}, depth {model['depth']}, {stem}"


def _learning_rates(recipe: Recipe) -> str:
    taken = recipe.settings["optimizer"]["learning_rate"]
    rates = recipe.learning_rates or (taken,)
    return " ".join(f"**{rate:g}**" if rate == taken and len(rates) > 1 else f"{rate:g}" for rate in rates)
