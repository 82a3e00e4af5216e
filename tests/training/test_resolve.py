"""From what a person gives to a configuration and back: what is read how, and what a person is told."""

from __future__ import annotations

import copy
import os
import tomllib
from pathlib import Path

import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.transforms.augment import Augmentation
from vitrail.errors import ConfigError
from vitrail.model.variants import make_architecture
from vitrail.recipes import RECIPES
from vitrail.training.config import RunConfig
from vitrail.training.resolve import SECTIONS, build_config, list_keys, name_settings, read_toml, resolve, to_toml

LEAST = {"model": {"name": "S/16"}, "data": {"source": "photos"}, "schedule": {"steps": 10}}


def given_in(*overrides: str) -> RunConfig:
    return resolve(LEAST, overrides)


def told(tree: dict, *overrides: str) -> str:
    """The error, which is one line."""
    with pytest.raises(ConfigError) as caught:
        resolve(tree, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_options_of_a_resnet_are_keys_of_the_model():
    config = given_in("model.name=BiT-R14x1", "model.root=small", "stage_channels=32", "blocks=[1, 2]")
    assert config.model.options == {"root": "small", "stage_channels": 32, "blocks": [1, 2]}
    assert resolve(tomllib.loads(to_toml(config))) == config
    assert make_architecture("BiT-R14x1", **config.model.options).backbone.blocks == (1, 2)
    assert "did you mean 'root'" in told(LEAST, "model.roots=small")


# ---- key=value -------------------------------------------------------------------------------------------------------


def test_values_are_read_as_what_they_are():
    config = given_in(
        "optimizer.learning_rate=3e-4",
        "optimizer.betas=[0.8, 0.95]",
        "optimizer.clip_norm=none",
        "optimizer.averaging=0.99",
        "run.keep=7",
        "run.deterministic=true",
        "run.compile=false",
        "run.folder=runs/a b",
        'run.device="cpu"',
        'run.trackers=["wandb", "mlflow"]',
        "data.source=/tmp/my photos=old",
        "data.mixing.cutmix=1",
        "data.augmentation={flip = 0.25}",
        "model.pool=average",
        "model.image_size=[96, 160]",
        "model.conv_stem=[[24, 3, 2], [48, 3, 8]]",
        "model.representation_size=none",
    )
    optimizer, run = config.optimizer, config.run
    assert (optimizer.learning_rate, optimizer.betas, optimizer.clip_norm) == (3e-4, (0.8, 0.95), None)
    assert (run.keep, run.deterministic, run.compile, run.folder) == (7, True, False, Path("runs/a b"))
    assert (run.device, run.trackers) == ("cpu", ("wandb", "mlflow"))
    assert config.data.source == "/tmp/my photos=old"  # only the first = parts
    assert (config.data.mixing.cutmix, config.data.augmentation) == (1.0, Augmentation(flip=0.25))
    assert config.model.image_size == (96, 160)
    assert config.model.options == {
        "pool": "average",
        "conv_stem": [[24, 3, 2], [48, 3, 8]],
        "representation_size": None,
    }


@pytest.mark.parametrize(
    "text", ["2024", "2024-12-31", "12:30:00", "1e5", "true", "nan", "0x10", "[a]", "[1]", '"2024"']
)
def test_words_may_look_like_numbers_and_dates(text):
    config = given_in(f"run.folder={text}", f"data.source={text}", f"model.name={text}")
    word = text.strip('"')
    assert (config.run.folder, config.data.source, config.model.name) == (Path(word), word, word)


@settings(deadline=None)
@given(st.floats(1e-30, 1e30), st.integers(-(2**63), 2**63 - 1))
def test_numbers_arrive_to_the_last_digit(rate, seed):
    config = given_in(f"learning_rate={rate!r}", f" run.seed = {seed} ")
    assert (config.optimizer.learning_rate, config.run.seed) == (rate, seed)


def test_a_key_of_one_section_may_come_without_it():
    config = given_in("learning_rate=0.5", "folder=here", "objective.kind=masked-patches", "corrupted=0.15")
    assert (config.optimizer.learning_rate, config.run.folder, config.objective.corrupted) == (0.5, Path("here"), 0.15)
    assert given_in("depth=3").model.options == {"depth": 3}
    for section in SECTIONS:
        for key in list_keys(section):
            owners = [other for other in SECTIONS if key in list_keys(other)]
            if len(owners) > 1:
                assert (
                    told(LEAST, f"{key}=1")
                    == f"'{key}' could be {' or '.join(f'{o}.{key}' for o in owners)}: say which"
                )
    assert told(LEAST, "kind=sgd") == "'kind' could be objective.kind or optimizer.kind: say which"


def test_later_ones_win_and_nothing_given_is_changed():
    tree = {**copy.deepcopy(LEAST), "data": {"source": "photos", "augmentation": {"flip": 0.1, "erasing": 0.2}}}
    before = copy.deepcopy(tree)
    config = resolve(tree, ["data.augmentation.flip=0", "steps=20", "schedule.steps=30", "data.source=others"])
    assert config.schedule.steps == 30
    assert config.data.source == "others"
    assert config.data.augmentation == Augmentation(flip=0, erasing=0.2)  # what is beside it stays
    assert tree == before


def test_an_option_of_a_recipe_can_be_taken_back():
    recipe = RECIPES["cifar10-scratch"]
    assert resolve(recipe.config, ["data.source=x"]).data.augmentation.rand_augment == (1, 9.0)
    off = [
        "data.source=x",
        "data.augmentation.rand_augment=none",
        "averaging=none",
        "schedule.epochs=none",
        "steps=9000",
    ]
    config = resolve(recipe.config, off)
    assert config.data.augmentation.rand_augment is None
    assert (config.optimizer.averaging, config.schedule.epochs, config.schedule.steps) == (None, None, 9000)


def test_dictionaries_may_be_nested():
    tree = {**LEAST, "data": {"source": "photos", "augmentation": {"flip": 0.0, "crop_area": (0.35, 1.0)}}}
    given = {"schedule": {"epochs": 2}, "data": {"augmentation.flip": 0.25, "mixing": {}}, "run": {"folder": Path("a")}}
    config = resolve(tree, given)
    assert (config.schedule.epochs, config.schedule.steps, config.run.folder) == (2, None, Path("a"))
    assert config.data.source == "photos"
    assert config.data.augmentation == Augmentation(flip=0.25, crop_area=(0.35, 1.0))
    assert resolve(tree, {"augmentation": {"flip": 0.25}}).data == config.data
    assert name_settings(given) == {"schedule.epochs", "data.augmentation.flip", "run.folder"}


# ---- What a person is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.learnin_rate=1", "unknown option 'optimizer.learnin_rate', did you mean 'learning_rate'?"),
        ("learnin_rate=1", "unknown option 'learnin_rate', did you mean 'learning_rate'?"),
        ("optimiser.learning_rate=1", "unknown section 'optimiser', did you mean 'optimizer'?"),
        ("model.dept=3", "unknown option 'model.dept', did you mean 'depth'?"),
        ("data.augmentation.flop=1", "unknown option 'data.augmentation.flop', did you mean 'flip'?"),
        (
            "data.mixing.zzz=1",
            "unknown option 'data.mixing.zzz'; there are mixup, cutmix, switch, rate",
        ),
        ("zzz=1", "unknown option 'zzz'; there are model, data, objective, optimizer, schedule, run"),
        ("zzz.steps=1", "unknown section 'zzz'; there are model, data, objective, optimizer, schedule, run"),
        ("model=S/16", "model is a section: give model.KEY=value"),
        ("data.augmentation=0", "data.augmentation is a section: give data.augmentation.KEY=value"),
        ("steps", "'steps' is not key=value, such as optimizer.learning_rate=1e-3"),
        ("run.folder=", "'run.folder=' is not key=value, such as optimizer.learning_rate=1e-3"),
        ("run.folder= ", "'run.folder= ' is not key=value, such as optimizer.learning_rate=1e-3"),
    ],
)
def test_a_wrong_key_is_one_sentence(override, sentence):
    assert told(LEAST, override) == sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("clip_norm=0", "clip_norm = 0: input should be greater than 0"),
        ("data.augmentation.flip=2", "flip = 2: input should be less than or equal to 1"),
        ("run.keep=two", "keep = 'two': input should be a valid integer, unable to parse string as an integer"),
        ("learning_rate=[1]", "learning_rate = [1]: input should be a valid number"),
        ("optimizer.eps.x=1", "eps = {'x': 1}: input should be a valid number"),
        ("schedule.decay=cosin", "decay = 'cosin': input should be 'cosine', 'linear', 'staircase' or 'none'"),
        (
            "objective.kind=mask",
            "kind = 'mask': input should be "
            "'classification', 'task', 'masked-patches', 'masked-autoencoding', 'lejepa' or 'dino'",
        ),
        ("warmup_steps=10", "warmup_steps = 10 leaves nothing of 10 steps: give schedule.warmup_steps=1 too"),
    ],
)
def test_a_wrong_value_is_one_sentence(override, sentence):
    assert told(LEAST, override).endswith(sentence)  # the name may come with its section


def test_the_nearest_is_named_for_a_letter_left_out_of_any_key():
    for section in SECTIONS:
        for key in list_keys(section):
            if len(key) > 4:
                wrong = key[:2] + key[3:]
                assert (
                    told(LEAST, f"{section}.{wrong}=1") == f"unknown option '{section}.{wrong}', did you mean '{key}'?"
                )


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"modle": {}}, "unknown section 'modle', did you mean 'model'?"),
        ({"model": 3}, "model is a section: give model.KEY=value"),
        ({"model": {"nam": "S/16"}}, "unknown option 'model.nam', did you mean 'name'?"),
        ({"data": {"augmentation": {"flop": 1}}}, "unknown option 'data.augmentation.flop', did you mean 'flip'?"),
        ({"data": {"augmentation": 3}}, "data.augmentation is a section: give data.augmentation.KEY=value"),
        (
            {"optimizer": {"learning_rate.x": 1}},
            "unknown option 'optimizer.learning_rate.x', did you mean 'learning_rate'?",
        ),
        (
            {"model": {"name": "S/16"}, "schedule": {"steps": 1}},
            "there is no data to train on: give data.source=DATA, such as a folder with one for each class",
        ),
        ({"data": {"source": "x"}, "model": {"name": "S/16"}}, "give either schedule.steps or schedule.epochs"),
    ],
)
def test_a_file_is_told_as_well(tree, sentence):
    with pytest.raises(ConfigError) as caught:
        build_config(tree)
    assert str(caught.value) == sentence


def test_without_a_model():
    assert told({"data": {"source": "x"}, "schedule": {"steps": 1}}).startswith("give either model.name, such as")


def test_parts_may_be_given_built():
    tree = {**LEAST, "data": {"source": "x", "augmentation": Augmentation(flip=0)}}
    assert resolve(tree).data.augmentation.flip == 0


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_files_that_are_none(tmp_path):
    for name, content, why in [
        ("missing.toml", None, "cannot be read: No such file or directory"),
        ("folder.toml", "folder", "cannot be read: not a file"),
        ("pipe.toml", "pipe", "cannot be read: not a file"),
        ("words.toml", b"steps: 10\n", "is not TOML: "),
        ("bytes.toml", b"\xff\xfe", "is not TOML: "),
        ("twice.toml", b"[run]\nkeep = 1\n[run]\nkeep = 2\n", "is not TOML: "),
    ]:
        path = tmp_path / name
        if content == "folder":
            path.mkdir()
        elif content == "pipe":
            os.mkfifo(path)
        elif content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            read_toml(path)
        assert str(caught.value).startswith(f"{path} {why}")
        assert "\n" not in str(caught.value)


def test_key_and_value_win_over_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[model]\nname = "S/16"\n[data]\nsource = "größe"\n[schedule]\nsteps = 10\ndecay = "none"\n', "utf-8"
    )
    config = resolve(read_toml(file), ["steps=20"])
    assert (config.schedule.steps, config.schedule.decay, config.data.source) == (20, "none", "größe")


# ---- To a file and back ----------------------------------------------------------------------------------------------


def assert_survives(config: RunConfig) -> None:
    text = to_toml(config)
    again = build_config(tomllib.loads(text))
    assert again == config
    assert again.model_dump() == config.model_dump()
    assert to_toml(again) == text


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_file(name):
    recipe = RECIPES[name]
    config = resolve(recipe.config, [f"{key}=PLACEHOLDER" for key in recipe.needs])
    assert config.run.folder == Path("runs") / name
    assert_survives(config)


def test_what_stands_in_a_file(tmp_path):
    config = resolve(runs.tree(tmp_path), ["clip_norm=none", "model.layer_scale=none", "data.holdout=none"])
    tree = tomllib.loads(to_toml(config))
    assert tree["optimizer"]["clip_norm"] == "none"  # by choice: the default is another
    assert "holdout" not in tree["data"]  # by default
    assert "layer_decay" not in tree["optimizer"]
    assert tree["model"]["layer_scale"] == "none"
    assert tree["optimizer"]["eps"] == 1e-8  # defaults too, for a day when they change
    assert tree["data"]["augmentation"]["crop_area"] == [0.6, 1.0]
    assert_survives(config)


def test_tuples_of_python_are_lists_of_a_file():
    """Or a run begun from Python would not be the one that its own file tells of."""
    stem = ((24, 3, 2, "batch", "relu"), (48, 3, 8, "none", "gelu"))
    config = resolve({**LEAST, "model": {"name": "S/16", "conv_stem": stem}})
    assert_survives(config)
    assert config.model.options["conv_stem"] == [list(layer) for layer in stem]


words = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
rates = st.floats(0, 1)
positive = st.floats(1e-300, 1e300)
shares = st.floats(0, 1, exclude_max=True)


def table(required: dict | None = None, **optional: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(required or {}, optional=optional)


MODELS = st.one_of(
    table({"name": st.sampled_from(["S/16", "R50+B/16"])}, image_size=st.integers(1, 999), dropout=shares),
    table({"weights": words.filter(lambda w: w != "none")}, stochastic_depth=shares, layer_scale=st.none() | positive),
)
TREES = st.fixed_dictionaries(
    {
        "model": MODELS,
        "data": table(
            {"source": words},
            holdout=st.none() | shares,
            in_memory=st.booleans(),
            batch_size=st.integers(1, 10**9),
            augmentation=table(flip=rates, rand_augment=st.none() | st.tuples(st.integers(1, 9), positive)),
            mixing=table(mixup=positive, switch=rates),
        ),
        "schedule": st.one_of(
            table({"steps": st.integers(10, 10**12)}, warmup_steps=st.integers(0, 9)), table({"epochs": positive})
        ),
    },
    optional={
        "objective": table(label_smoothing=shares, head_bias=st.floats(allow_nan=False, allow_infinity=False)),
        "optimizer": table(
            kind=st.sampled_from(["sgd", "adam", "adamw", "muon"]),
            learning_rate=positive,
            clip_norm=st.none() | positive,
            betas=st.tuples(shares, shares),
            layer_decay=st.none() | st.floats(0.01, 1),
        ),
        "run": table(
            folder=words,
            seed=st.integers(-(2**63), 2**63 - 1),
            compile=st.none() | st.booleans(),
            device=words,
            trackers=st.lists(st.sampled_from(["wandb", "mlflow"])),
        ),
    },
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_configuration_survives_a_file(tree):
    assert_survives(resolve(tree))
