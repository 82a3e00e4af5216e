"""Every recipe is a valid run with the paper's numbers (typed again here), and docs/recipes.md shows them all."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vitrail.data.open import open_data
from vitrail.errors import ConfigError
from vitrail.model.architecture import VitArchitecture
from vitrail.model.variants import make_architecture
from vitrail.recipes import RECIPES, find_recipe
from vitrail.recipes.better_plain import BETTER_PLAIN
from vitrail.recipes.bit import BIT_FINETUNING
from vitrail.recipes.finetuning import FINETUNING
from vitrail.recipes.joint_embedding import JOINT_EMBEDDING
from vitrail.recipes.masked_patches import MASKED_PATCHES
from vitrail.recipes.pretraining import PRETRAINING
from vitrail.recipes.small import DIGITS, SMALL, TEST_SHARE
from vitrail.training.config import RunConfig

ALL_RECIPES = (
    *(*SMALL, *PRETRAINING, *MASKED_PATCHES, *JOINT_EMBEDDING),
    *(*FINETUNING, *BIT_FINETUNING, *BETTER_PLAIN),
)
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "recipes.md"
sys.path.insert(0, str(ROOT / "tools"))

import recipes_page  # noqa: E402


def run_config(name: str, **overrides: Any) -> RunConfig:
    """Return the configuration that `vitrail train` makes from a recipe, its required keys and other overrides."""
    recipe = find_recipe(name)
    config = recipe.config
    for key, value in {**dict.fromkeys(recipe.needs, "somewhere"), **overrides}.items():
        *sections, last = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return RunConfig(**config)


def build_architecture(name: str):
    recipe = find_recipe(name)
    options = {key: value for key, value in recipe.config["model"].items() if key != "name"}
    return make_architecture(recipe.model, **recipe.typical_options, **options)


# ---- Every recipe ----------------------------------------------------------------------------------------------------


def test_names_are_unique():
    assert [recipe.name for recipe in ALL_RECIPES] == list(dict.fromkeys(recipe.name for recipe in ALL_RECIPES))
    assert {recipe.name for recipe in ALL_RECIPES} == set(RECIPES)
    assert all(name == recipe.name for name, recipe in RECIPES.items())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_run(name):
    recipe = find_recipe(name)
    config = run_config(name)
    assert str(config.run.folder) == f"runs/{name}"
    assert config.schedule.warmup_steps < recipe.steps
    assert config.run.checkpoint_every <= recipe.steps
    assert (config.run.evaluate_every or 1) <= recipe.steps
    assert config.run.evaluate_every or config.data.validate_on == "none"
    assert config.data.batch_size <= recipe.data_set.images * (1 - (recipe.holdout or 0))
    assert re.fullmatch(r"[a-z0-9+-]+", name)
    assert recipe.summary
    assert "\n" not in recipe.summary
    assert recipe.expected
    assert recipe.source


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_needs_is_what_it_cannot_run_without(name):
    recipe = find_recipe(name)
    for key in recipe.needs:
        section, option = key.split(".")
        config = run_config(name).model_dump(exclude_unset=True)
        del config[section][option]
        with pytest.raises(ConfigError, match=option):
            RunConfig(**config)
    assert recipe.command.split()[:3] == ["vitrail", "train", name]
    assert tuple(word.split("=")[0] for word in recipe.command.split()[3:]) == recipe.needs


@pytest.mark.parametrize("name", RECIPES)
def test_its_architecture_can_be_built(name):
    arch = build_architecture(name)
    if isinstance(arch, VitArchitecture) and arch.representation_size is not None:
        assert arch.representation_size == arch.width  # the paper's: one hidden layer of width D


def test_commands():
    assert find_recipe("quickstart").command == "vitrail train quickstart"
    assert find_recipe("quickstart-finetune").command == "vitrail train quickstart-finetune model.weights=MODEL"
    assert find_recipe("jft-b16").command == "vitrail train jft-b16 data.source=DATA"
    assert find_recipe("finetune-pets").command == "vitrail train finetune-pets model.weights=MODEL data.source=DATA"


def test_the_quickstart_sets_the_same_digits_aside_in_both_recipes():
    pretraining, finetuning = (run_config(name).data for name in ("quickstart", "quickstart-finetune"))
    assert pretraining == finetuning
    assert pretraining.holdout == TEST_SHARE
    assert len(open_data("digits", "train", TEST_SHARE, pretraining.holdout_seed)) == DIGITS.images


def test_a_config_is_a_copy():
    changed = find_recipe("jft-b16").config
    changed["data"]["augmentation"]["flip"] = 0.0
    changed["optimizer"]["learning_rate"] = 1.0
    assert find_recipe("jft-b16").config["data"]["augmentation"]["flip"] == 0.5
    assert find_recipe("jft-b32").config["data"]["augmentation"]["flip"] == 0.5
    assert find_recipe("jft-b16").config["optimizer"]["learning_rate"] == 8e-4
    assert "folder" not in find_recipe("jft-b16").settings["run"]


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="'jft-b16'"):
        find_recipe("JFT-B/16")
    with pytest.raises(ConfigError, match="--list"):
        find_recipe("zzz")


def test_listing_loads_nothing_heavy():
    code = "import sys; from vitrail.recipes import RECIPES; [r.command for r in RECIPES.values()]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pydantic", "vitrail.model", "vitrail.data", "vitrail.training"} & set(loaded)


# ---- The paper's table 3, pre-training -------------------------------------------------------------------------------

# name: model, epochs, learning rate, decay, weight decay, dropout (None: a ResNet, which has none), clipping
TABLE_3 = {
    "jft-b16": ("B/16", 7, 0.0008, "linear", 0.1, 0, None),
    "jft-b32": ("B/32", 7, 0.0008, "linear", 0.1, 0, None),
    "jft-l32": ("L/32", 7, 0.0006, "linear", 0.1, 0, None),
    "jft-l16": ("L/16", 7, 0.0004, "linear", 0.1, 0, None),
    "jft-l16-14": ("L/16", 14, 0.0004, "linear", 0.1, 0, None),
    "jft-h14": ("H/14", 14, 0.0003, "linear", 0.1, 0, None),
    "jft-r50x1": ("BiT-R50x1", 7, 0.001, "linear", 0.1, None, None),
    "jft-r50x2": ("BiT-R50x2", 7, 0.001, "linear", 0.1, None, None),
    "jft-r101x1": ("BiT-R101x1", 7, 0.0008, "linear", 0.1, None, None),
    "jft-r152x1": ("BiT-R152x1", 7, 0.0006, "linear", 0.1, None, None),
    "jft-r152x2": ("BiT-R152x2", 7, 0.0006, "linear", 0.1, None, None),
    "jft-r152x2-14": ("BiT-R152x2", 14, 0.0006, "linear", 0.1, None, None),
    "jft-r50+b16": ("R50+B/16", 7, 0.0008, "linear", 0.1, 0, None),
    "jft-r50+b32": ("R50+B/32", 7, 0.0008, "linear", 0.1, 0, None),
    "jft-r50+l32": ("R50+L/32", 7, 0.0002, "linear", 0.1, 0, None),
    "jft-r50+l16": ("R50+L/16", 7, 0.0004, "linear", 0.1, 0, None),
    "jft-r50+l16-14": ("R50+L/16", 14, 0.0004, "linear", 0.1, 0, None),
    "in21k-b16": ("B/16", 90, 0.001, "linear", 0.03, 0.1, None),
    "in21k-b32": ("B/32", 90, 0.001, "linear", 0.03, 0.1, None),
    "in21k-l16": ("L/16", 90, 0.001, "linear", 0.03, 0.1, None),
    "in21k-l16-30": ("L/16", 30, 0.001, "linear", 0.03, 0.1, None),
    "in21k-l32": ("L/32", 90, 0.001, "linear", 0.03, 0.1, None),
    "in21k-l32-30": ("L/32", 30, 0.001, "linear", 0.03, 0.1, None),
    "imagenet-b16": ("B/16", 300, 0.003, "cosine", 0.3, 0.1, 1.0),
    "imagenet-b32": ("B/32", 300, 0.003, "cosine", 0.3, 0.1, 1.0),
    "imagenet-l16": ("L/16", 300, 0.003, "cosine", 0.3, 0.1, 1.0),
    "imagenet-l32": ("L/32", 300, 0.003, "cosine", 0.3, 0.1, 1.0),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_pretraining_is_table_3(name):
    model, epochs, learning_rate, decay, weight_decay, dropout, clip_norm = TABLE_3[name]
    config = run_config(name)
    assert (config.model.name, config.model.image_size) == (model, (224, 224))
    assert config.model.options.get("dropout") == dropout
    assert ("representation_size" in config.model.options) == (not model.startswith("BiT-"))
    assert (config.schedule.epochs, config.schedule.decay, config.schedule.warmup_steps) == (epochs, decay, 10_000)
    assert config.schedule.final_learning_rate == (1e-5 if decay == "linear" else 0)
    optimizer = config.optimizer
    assert (optimizer.kind, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", learning_rate, weight_decay)
    assert (optimizer.betas, optimizer.clip_norm, config.data.batch_size) == ((0.9, 0.999), clip_norm, 4096)
    assert (config.data.augmentation.crop_area, config.data.augmentation.flip) == ((0.05, 1.0), 0.5)
    on_imagenet = name.startswith("imagenet-")
    loss = ("softmax", 0.0) if on_imagenet else ("sigmoid", -10.0)
    assert (config.objective.loss, config.objective.head_bias) == loss
    images = 303e6 if name.startswith("jft-") else 1_281_167 if on_imagenet else 14.2e6
    assert find_recipe(name).steps == -(-epochs * images // 4096)


# ---- Tables 5 and 6, results and costs -------------------------------------------------------------------------------

# name: ImageNet, CIFAR-100 and exaFLOPs of table 6; of table 5, which has no costs, where that is None
RESULTS = {
    "jft-b32": (80.73, 90.49, 55),
    "jft-b16": (84.15, 91.87, 224),
    "jft-l32": (84.37, 92.52, 196),
    "jft-l16": (86.30, 93.46, 783),
    "jft-l16-14": (87.12, 94.04, 1567),
    "jft-h14": (88.08, 94.71, 4262),
    "jft-r50x1": (77.54, 86.07, 50),
    "jft-r50x2": (82.12, 89.20, 199),
    "jft-r101x1": (80.67, 89.17, 96),
    "jft-r152x1": (81.88, 90.22, 141),
    "jft-r152x2": (84.97, 92.05, 563),
    "jft-r152x2-14": (85.56, 91.92, 1126),
    "jft-r50+b32": (84.90, 92.24, 106),
    "jft-r50+b16": (85.58, 92.63, 274),
    "jft-r50+l32": (85.68, 92.93, 246),
    "jft-r50+l16": (86.60, 93.64, 859),
    "jft-r50+l16-14": (87.12, 93.89, 1668),
    "in21k-b16": (83.97, 91.67, None),
    "in21k-b32": (81.28, 91.97, None),
    "in21k-l16": (85.15, 93.44, None),
    "in21k-l16-30": (85.15, 93.44, None),
    "in21k-l32": (80.99, 93.04, None),
    "in21k-l32-30": (80.99, 93.04, None),
    "imagenet-b16": (77.91, 87.13, None),
    "imagenet-b32": (73.38, 86.31, None),
    "imagenet-l16": (76.53, 86.35, None),
    "imagenet-l32": (71.16, 87.07, None),
}


def test_the_tables_here_are_complete():
    assert set(RESULTS) == set(TABLE_3) == {recipe.name for recipe in PRETRAINING}
    assert set(TABLE_4) == {recipe.name for recipe in FINETUNING}


@pytest.mark.parametrize("name", RESULTS)
def test_expected_numbers_are_the_papers(name):
    imagenet, cifar100, exaflops = RESULTS[name]
    recipe = find_recipe(name)
    table = "table 5" if exaflops is None else "table 6"
    assert recipe.expected.startswith(f"{imagenet:.2f} on ImageNet, {cifar100:.2f} on CIFAR-100")
    assert f"({table}" in recipe.expected
    if exaflops is None:
        assert "the paper" not in recipe.cost
    else:
        assert recipe.exaflops == pytest.approx(exaflops, rel=0.05)
        assert recipe.cost.endswith(f"(the paper: {exaflops:,})")


def test_cost_worked_by_hand():
    # B/32 at 224 and 1,000 classes, in multiply-accumulates: 49 patches, 50 tokens, 12 blocks, width 768.
    patches = 49 * 3 * 32 * 32 * 768
    block = 50 * 768 * (3 * 768 + 768 + 2 * 3072) + 2 * 50 * 50 * 768
    heads = 768 * 768 + 768 * 1000
    forward = 2 * (patches + 12 * block + heads)
    steps = 93_836  # 300 · 1,281,167 / 4,096, rounded up
    recipe = find_recipe("imagenet-b32")
    assert recipe.steps == steps
    assert recipe.exaflops * 1e18 == pytest.approx(3 * forward * 4096 * steps, rel=1e-12)
    assert recipe.cost == "10.2 exaFLOPs"


def test_cost_of_weights_is_told_for_a_typical_model():
    assert find_recipe("finetune-imagenet").cost == "3.41 exaFLOPs from B/16"
    assert find_recipe("finetune-pets").cost == "85.2 petaFLOPs from B/16"  # a fortieth of the steps


# ---- Masked patch prediction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps"), [("mpp-b16", 1_000_000), ("mpp-b16-100k", 100_000), ("mpp-imagenet-b16", 1_000_000)]
)
def test_masked_patch_prediction_is_the_papers(name, steps):
    config = run_config(name)
    assert (config.model.name, config.model.image_size, config.model.options) == (
        "B/16",
        (224, 224),
        {"num_classes": 0},
    )
    objective = config.objective
    assert (objective.kind, objective.target) == ("masked-patches", "mean-colour")
    assert (objective.corrupted, objective.masked, objective.swapped) == (0.5, 0.8, 0.1)
    assert (config.optimizer.kind, config.optimizer.learning_rate) == ("adam", 2e-4)
    assert (config.optimizer.weight_decay, config.optimizer.clip_norm, config.data.batch_size) == (0, None, 4096)
    assert (config.schedule.steps, config.schedule.warmup_steps, config.schedule.decay) == (steps, 10_000, "cosine")


@pytest.mark.parametrize(
    "change", [{"objective.target": "colours-4x4"}, {"objective.target": "pixels"}, {"objective.corrupted": 0.15}]
)
def test_variants_of_masked_patch_prediction_are_single_keys(change):
    run_config("mpp-b16", **change)


def test_masked_patch_prediction_on_imagenet():
    assert find_recipe("mpp-imagenet-b16").data_set.name == "ImageNet"
    assert find_recipe("mpp-b16").data_set.name == "JFT-300M"


# ---- BiT's rule ------------------------------------------------------------------------------------------------------

# name: most images; warm-up, the steps after which the rate falls, length; Mixup, image size, and what it is cut from
BIT_RULE = {
    "finetune-bit-small": (20_000, [100, 200, 300, 400, 500], 0.0, 480, 512),
    "finetune-bit-medium": (500_000, [500, 3000, 6000, 9000, 10_000], 0.1, 128, 160),
    "finetune-bit-large": (10**9, [500, 6000, 12_000, 18_000, 20_000], 0.1, 480, 512),
}


@pytest.mark.parametrize("name", BIT_RULE)
def test_bits_rule(name):
    most, supports, mixup, size, precrop = BIT_RULE[name]
    config, recipe = run_config(name), find_recipe(name)
    schedule, optimizer = config.schedule, config.optimizer
    assert [schedule.warmup_steps, *schedule.decay_at, schedule.steps] == supports
    assert (schedule.decay, config.data.mixing.mixup, config.data.mixing.cutmix) == ("staircase", mixup, 0.0)
    assert (optimizer.kind, optimizer.learning_rate, optimizer.momentum) == ("sgd", 0.003, 0.9)
    assert (optimizer.weight_decay, optimizer.clip_norm, config.data.batch_size) == (0, None, 512)
    assert config.model.image_size == (size, size)
    assert config.data.augmentation.crop_area == pytest.approx(((size / precrop) ** 2,) * 2)
    assert recipe.data_set.images < most
    assert recipe.model == "BiT-R50x1"


@pytest.mark.parametrize(
    "wrong", [{"schedule.decay": "cosine"}, {"schedule.decay_at": []}, {"schedule.decay_at": [300, 200]}]
)
def test_a_staircase_and_its_steps_go_together(wrong):
    with pytest.raises(ConfigError, match="decay_at"):
        run_config("finetune-bit-small", **wrong)


# ---- The paper's table 4, fine-tuning --------------------------------------------------------------------------------

WIDE, NARROW = (0.003, 0.01, 0.03, 0.06), (0.001, 0.003, 0.01, 0.03)
# name: steps, warm-up, image size, learning rates, share held out, averaging, a number of table 2 or 5
TABLE_4 = {
    "finetune-imagenet": (20_000, 500, 384, WIDE, 0.01, None, "83.97 from B/16 and 85.15 from L/16"),
    "finetune-imagenet-512": (20_000, 500, 512, WIDE, 0.01, 0.9999, "87.76 ± 0.03 from L/16 of JFT-300M, 85.30"),
    "finetune-imagenet-518": (20_000, 500, 518, WIDE, 0.01, 0.9999, "88.55 ± 0.04 from H/14"),
    "finetune-cifar10": (10_000, 500, 384, NARROW, 0.02, None, "98.95 from B/16 and 99.16 from L/16"),
    "finetune-cifar100": (10_000, 500, 384, NARROW, 0.02, None, "91.67 from B/16 and 93.44 from L/16"),
    "finetune-pets": (500, 100, 384, NARROW, 0.1, None, "94.43 from B/16 and 94.73 from L/16"),
    "finetune-flowers": (500, 100, 384, NARROW, 0.1, None, "99.38 from B/16 and 99.61 from L/16"),
    "finetune-vtab": (2_500, 500, 384, (0.01,), 0.2, None, "72.72"),
}


@pytest.mark.parametrize("name", TABLE_4)
def test_finetuning_is_table_4(name):
    steps, warmup_steps, side, rates, holdout, averaging, number = TABLE_4[name]
    recipe, config = find_recipe(name), run_config(name)
    assert recipe.needs == ("model.weights", "data.source")
    assert (recipe.learning_rates, recipe.holdout, config.data.holdout) == (rates, holdout, holdout)
    assert recipe.expected.startswith(number)
    assert config.model.image_size == (side, side)
    schedule = config.schedule
    assert (schedule.steps, schedule.warmup_steps, schedule.decay) == (steps, warmup_steps, "cosine")
    optimizer = config.optimizer
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 0)
    assert (optimizer.clip_norm, optimizer.averaging, config.data.batch_size) == (1.0, averaging, 512)
    assert optimizer.averaging is None or not optimizer.averaging_ramp
    assert (config.data.augmentation.crop_area, config.data.augmentation.flip) == ((0.05, 1.0), 0.5)
    assert optimizer.learning_rate in rates
    if len(rates) > 1:
        assert min(rates) < optimizer.learning_rate < max(rates)


@pytest.mark.parametrize("name", TABLE_4)
def test_every_learning_rate_and_the_last_run_are_valid(name):
    for rate in find_recipe(name).learning_rates:
        assert run_config(name, **{"optimizer.learning_rate": rate}).optimizer.learning_rate == rate
    last = run_config(name, **{"data.holdout": 0, "data.validate_on": "test"})
    assert (last.data.holdout, last.data.validate_on) == (0, "test")


# ---- Later work ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "epochs", "top1"), [("", 90, "76.5"), ("-150", 150, "78.5"), ("-300", 300, "80.0")])
def test_better_plain_vit(suffix, epochs, top1):
    name = f"better-plain-vit-s16{suffix}"
    config, arch = run_config(name), build_architecture(name)
    assert (arch.pool, arch.position, arch.dropout, arch.class_token) == ("average", "sin-cos", 0.0, False)
    assert (arch.width, arch.patch_size, arch.image_size) == (384, 16, (224, 224))
    assert config.data.batch_size == 1024
    assert config.data.augmentation.rand_augment == (2, 10)
    assert (config.data.mixing.mixup, config.data.mixing.cutmix) == (0.2, 0)
    # Decoupled in JAX it is written 1e-4, the product of the two.
    optimizer = config.optimizer
    assert optimizer.learning_rate * optimizer.weight_decay == pytest.approx(1e-4)
    assert (optimizer.kind, optimizer.learning_rate, optimizer.clip_norm) == ("adamw", 1e-3, 1.0)
    assert (config.schedule.epochs, config.schedule.warmup_steps, config.schedule.decay) == (epochs, 10_000, "cosine")
    assert find_recipe(name).expected.startswith(f"{top1} on ImageNet at 224 px")


# ---- The page --------------------------------------------------------------------------------------------------------


def test_the_page_is_up_to_date():
    text = DOCS.read_text(encoding="utf-8")
    assert recipes_page.write_page(text) == text, "run python tools/recipes_page.py"


def test_the_page_has_every_recipe_once():
    names = re.findall(r"^\| `([a-z0-9+-]+)` \|", recipes_page.write_sections(), flags=re.MULTILINE)
    assert sorted(names) == sorted(RECIPES)


def read_introduction_commands() -> list[list[str]]:
    introduction = DOCS.read_text(encoding="utf-8").split(recipes_page.MARKER)[0]
    lines = re.findall(r"^(?:torchrun .* -m )?vitrail train ([^-#\n][^#\n]*)", introduction, flags=re.MULTILINE)
    return [line.split() for line in lines]


def parse_value(text: str) -> Any:
    """Return the text as TOML reads it, or as a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def test_commands_of_the_introduction_are_valid():
    commands = read_introduction_commands()
    assert len(commands) >= 6
    for name, *overrides in commands:
        given = {
            key: parse_value(value) for key, value in (override.strip("'").split("=", 1) for override in overrides)
        }
        assert set(find_recipe(name).needs) <= set(given)
        run_config(name, **given)


def test_advice_on_lengths_can_be_followed():
    assert find_recipe("jft-b16").steps == 517_823
    assert run_config("in21k-b16", **{"schedule.epochs": "none", "schedule.steps": 517_823}).schedule.epochs is None


def test_advice_on_fine_tuning_can_be_followed():
    assert make_architecture("H/14", image_size=392).grid((392, 392)) == (28, 28)
    whole = {"flip": 0, "crop_area": [1.0, 1.0], "crop_ratio": [0.01, 100]}  # the ratio for images longer than 4:3
    run_config("finetune-vtab", **{f"data.augmentation.{key}": value for key, value in whole.items()})


def test_the_file_of_the_introduction_is_valid():
    (toml,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    config = RunConfig(**tomllib.loads(toml))
    assert (config.model.name, config.schedule.epochs) == ("S/16", 90)
    make_architecture("S/16", image_size=224, **config.model.options)
