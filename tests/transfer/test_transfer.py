"""What the two suites share: overrides, where data is, its parts, tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import stand_ins
from pictures import make_folder, make_parquet, picture

from vitrail.data.open import open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.errors import ConfigError, DataError
from vitrail.recipes import find_recipe
from vitrail.transfer import suite_table, transfer
from vitrail.transfer.suite_data import DataLocation, PickedSamples, RelabelledSource, find_suite_data, open_suite_parts
from vitrail.transfer.suite_plan import TransferTarget, find_deviations, list_rates, make_config, make_plan

KNOWN = ("cifar10", "cifar100", "pets", "dtd")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


# ---- What a person gives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/cars/model", "cars"),
        ("runs/cars/", "cars"),
        ("hf:google/vit-base", "vit-base"),
        ("timm:vit_tiny_patch16_224.augreg_in21k", "vit_tiny_patch16_224.augreg_in21k"),
        ("my weights.npz", "my-weights.npz"),
    ],
)
def test_the_folder_is_named_after_the_suite_and_the_model(model, name):
    assert make_plan("paper", model, None, 3, [], None).folder == Path(f"runs/suite-paper-{name}")


def test_the_folder_can_be_given():
    assert make_plan("paper", "m", Path("a"), 3, [], None).folder == Path("a")
    settled = make_plan("paper", "m", None, 3, ["run.folder=b", "steps=3"], None)
    assert (settled.folder, settled.settings) == (Path("b"), ("steps=3",))


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("run.seed=3", "by runs"),
        ("seed=3", "by runs"),
        ("model.weights=x", "by model"),
        ("data.source=x", "by data"),
        ("validate_on=test", "chooses"),
    ],
)
def test_what_the_suite_decides_cannot_be_given(override, instead):
    with pytest.raises(ConfigError, match=instead):
        make_plan("paper", "m", None, 3, [override], None)


def test_numbers_that_cannot_be():
    with pytest.raises(ConfigError, match="runs = 0"):
        make_plan("paper", "m", None, 0, [], None)
    for wrong in ([], [0.0], [math.inf], [-1.0]):
        with pytest.raises(ConfigError, match="above 0"):
            make_plan("paper", "m", None, 3, [], wrong)
    with pytest.raises(ConfigError, match="one too many"):
        make_plan("paper", "m", None, 3, ["learning_rate=1"], [0.1])


def subject(**changes) -> TransferTarget:
    data = {"source": "digits", "validate_on": "holdout", "holdout": 0.02}
    plain = TransferTarget(
        name="cifar10",
        recipe=find_recipe("finetune-cifar10"),
        changes={},
        choosing=data,
        chosen_on="the held-out 2%",
        training={"source": "digits", "validate_on": "none", "holdout": 0.0},
        images=(980, 1000),
        test=ListSource([]),
    )
    return replace(plain, **changes)


def test_without_overrides_it_is_the_recipe():
    settled = make_plan("paper", "m", None, 3, [], None)
    config = make_config(settled, subject())
    recipe = find_recipe("finetune-cifar10")
    assert config.schedule.steps == recipe.steps == 10_000
    assert config.model.weights == "m"
    assert config.run.folder == Path("runs/suite-paper-m/cifar10")
    assert list_rates(settled, subject(), config) == (0.001, 0.003, 0.01, 0.03)
    assert find_deviations(settled, subject(), config) == {}


def test_what_was_changed_is_told_and_what_changes_nothing_is_not():
    overrides = ["steps=40", "batch_size=8", "workers=0", "device=cpu", "accumulate=2"]
    settled = make_plan("paper", "m", None, 2, overrides, [0.1])
    config = make_config(settled, subject())
    # The warm-up is the same share as in the recipe: 500 of 10,000.
    assert (config.schedule.steps, config.schedule.warmup_steps) == (40, 2)
    assert find_deviations(settled, subject(), config) == {
        "schedule.steps": (10_000, 40),
        "schedule.warmup_steps": (500, 2),
        "data.batch_size": (512, 8),
        "learning rates": ([0.001, 0.003, 0.01, 0.03], [0.1]),
        "runs": (3, 2),
    }


def test_a_length_in_epochs_and_a_warm_up_of_ones_own():
    settled = make_plan("paper", "m", None, 3, ["epochs=8", "batch_size=100"], None)
    assert make_config(settled, subject()).schedule.warmup_steps == 4  # of 80 steps
    settled = make_plan("paper", "m", None, 3, ["steps=40", "warmup_steps=9"], None)
    assert make_config(settled, subject()).schedule.warmup_steps == 9


def test_a_learning_rate_that_is_given_is_the_only_one():
    settled = make_plan("paper", "m", None, 3, ["learning_rate=0.25"], None)
    config = make_config(settled, subject())
    assert list_rates(settled, subject(), config) == (0.25,)
    assert find_deviations(settled, subject(), config) == {"learning rates": ([0.001, 0.003, 0.01, 0.03], [0.25])}


def test_a_batch_larger_than_the_data_is_told_before_anything_is_trained():
    few = subject(images=(500, 510))
    with pytest.raises(ConfigError, match=r"cifar10: data.batch_size = 512 .*=500 "):
        make_config(make_plan("paper", "m", None, 3, [], None), few)
    with pytest.raises(ConfigError, match=" 510 images"):  # there is nothing to choose
        make_config(make_plan("paper", "m", None, 3, [], [0.1]), few)


# ---- Where data is ---------------------------------------------------------------------------------------------------


def test_a_folder_with_an_entry_for_each_set(tmp_path):
    for name in ("cifar10", "cifar-100", "pets", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "dtd.csv").touch()
    (tmp_path / "real.json").touch()
    places = find_suite_data(str(tmp_path), ("cifar10", "cifar100", "dtd"), KNOWN)
    assert places.sets == {
        "cifar10": DataLocation(str(tmp_path / "cifar10")),
        "dtd": DataLocation(str(tmp_path / "dtd.csv")),
    }
    assert places.real == tmp_path / "real.json"
    assert places.remarks == (f"{tmp_path}/cifar-100 is no set, did you mean 'cifar100'?",)


def test_a_folder_that_holds_a_set_twice_or_none(tmp_path):
    (tmp_path / "pet").mkdir()
    with pytest.raises(DataError, match=r"none of the sets pets.*'pets'"):
        find_suite_data(str(tmp_path), ("pets",), KNOWN)
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets.csv").touch()
    with pytest.raises(DataError, match="both pets"):
        find_suite_data(str(tmp_path), ("pets",), KNOWN)
    with pytest.raises(ConfigError, match="'nowhere'"):
        find_suite_data("nowhere", ("pets",), KNOWN)


def test_a_file_that_names_places(tmp_path):
    file = tmp_path / "sets.toml"
    file.write_text(
        'cifar10 = "c10"\nreal = "r.json"\n[tasks.dtd]\ndata = "hf:a/b"\nraw = true\n[tasks.pets]\ndata="/p"'
    )
    places = find_suite_data(str(file), ("cifar10", "dtd"), KNOWN)
    assert places.sets == {"cifar10": DataLocation(str(tmp_path / "c10")), "dtd": DataLocation("hf:a/b", raw=True)}
    assert places.real == tmp_path / "r.json"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('cifar_10 = "x"', "'cifar10'"),
        ('[tasks.cifarr]\ndata = "x"', "'cifarr'"),
        ("cifar10 = 3", 'give cifar10 = "DATA"'),
        ("[tasks.pets]\nraw = true", 'give pets = "DATA"'),
        ('[tasks.pets]\ndata = "x"\nraws = true', "'raws'"),
        ('[tasks.pets]\ndata = "x"\nraw = "yes"', "pets.raw = 'yes'"),
        ('pets = "x"\n[tasks.pets]\ndata = "x"', "twice"),
        ("real = 3", 'give real = "FILE"'),
        ("tasks = 3", "tasks as tables"),
        ("pets", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, told):
    (tmp_path / "sets.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        find_suite_data(str(tmp_path / "sets.toml"), ("pets",), KNOWN)
    assert told in str(raised.value)


def test_parts(tmp_path):
    for part, count in (("train", 4), ("val", 3), ("test", 2)):
        make_folder(tmp_path / "data" / part, {"a": count, "b": count})
    parts = open_suite_parts("pets", str(tmp_path / "data"))
    assert (len(parts.train), len(parts.val), len(parts.test), parts.tested_on) == (8, 6, 4, "test")
    (tmp_path / "data/test").rename(tmp_path / "elsewhere")
    parts = open_suite_parts("pets", str(tmp_path / "data"))
    assert (len(parts.train), parts.val, len(parts.test), parts.tested_on) == (8, None, 6, "val")
    with pytest.raises(DataError, match=r"pets: .*one part of 4 "):
        open_suite_parts("pets", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match=r"pets: .*no data set"):
        open_suite_parts("pets", str(tmp_path / "nowhere"))


def test_a_test_part_without_labels_is_not_tested_on(tmp_path):
    """ImageNet's, on the hub."""
    for part, labels in (("train", [0, 1] * 3), ("validation", [0, 1]), ("test", [-1, -1, -1])):
        make_parquet(tmp_path / f"data/{part}.parquet", labels, names=("a", "b"))
    parts = open_suite_parts("imagenet", str(tmp_path / "data"))
    assert (len(parts.train), parts.val, len(parts.test), parts.tested_on) == (6, None, 2, "val")


def test_parts_whose_classes_differ(tmp_path):
    make_parquet(tmp_path / "data/train.parquet", [0, 1], names=("a", "b"))
    make_parquet(tmp_path / "data/test.parquet", [0, 1], names=("b", "a"))
    with pytest.raises(DataError, match=r"pets: .*classes of test"):
        open_suite_parts("pets", str(tmp_path / "data"))


def test_labels_made_of_others(tmp_path):
    plain = RelabelledSource(ListSource([(b"", 30), (b"", 4), (b"", 30), (b"", 0)]), 16, lambda x: x // 2)
    assert plain.classes == tuple(map(str, range(16)))
    assert plain.labels(0, 4).tolist() == [15, 2, 15, 0]
    assert plain.labels(1, 3).tolist() == [2, 15]
    assert [plain.read(index).label for index in range(4)] == [15, 2, 15, 0]
    assert plain.labels(2, 2).tolist() == []
    named = open_data(str(make_folder(tmp_path / "x", {"10": 1, "2": 1, "31": 1})))
    # Folders are sorted as words; what counts is what they are called.
    assert RelabelledSource(named, 16, lambda x: x // 2).labels(0, 3).tolist() == [5, 1, 15]
    words = RelabelledSource(ListSource([(b"", 0)], classes=["left"]), 16, lambda x: x)
    with pytest.raises(DataError, match="'left'"):
        words.labels(0, 1)
    assert RelabelledSource(ListSource([(b"", -1)]), 16, lambda x: x // 0).labels(0, 1).tolist() == [-1]


def test_samples_of_two_sources():
    one, other = ListSource([(b"a", 0), (b"b", 1)], ["x", "y"]), ListSource([(b"c", 1)], ["x", "y"])
    both = PickedSamples([(one, 1), (other, 0), (one, 0)])
    assert [both.read(index).content for index in range(3)] == [b"b", b"c", b"a"]
    assert (both.labels(0, 3).tolist(), both.labels(1, 2).tolist(), both.classes) == ([1, 1, 0], [1], ("x", "y"))
    assert both.name(0) == one.name(1)


# ---- Predictions and tables ------------------------------------------------------------------------------------------


def test_predictions_are_kept_with_what_they_are_of(tmp_path, monkeypatch):
    model = Path(stand_ins.tiny_model(tmp_path / "model"))
    data = open_data(str(make_folder(tmp_path / "data", {"a": 3, "b": 2})))
    folder = tmp_path / "cifar10"
    folder.mkdir()
    overrides = ["batch_size=2", "workers=0", f"folder={tmp_path}", "device=cpu"]
    config = make_config(make_plan("paper", "m", None, 3, overrides, None), subject())
    first = transfer.predict_test_images(config, model, data)
    assert (len(first), set(first) <= set(range(5))) == (5, True)
    assert (folder / "predictions.npz").exists()
    marked = [(first + 1) % 5, first]
    np.savez(folder / "predictions.npz", of=np.load(folder / "predictions.npz")["of"], predictions=marked[0])
    assert transfer.predict_test_images(config, model, data).tolist() == marked[0].tolist(), (
        "those that are kept are taken"
    )
    fewer = open_data(str(make_folder(tmp_path / "fewer", {"a": 3, "b": 1})))
    assert len(transfer.predict_test_images(config, model, fewer)) == 4, "those of other images are not"
    (folder / "predictions.npz").write_bytes(b"PK\x03\x04 half a file")
    assert transfer.predict_test_images(config, model, data).tolist() == first.tolist()


def test_images_that_cannot_be_read_are_not_predicted(tmp_path):
    model = Path(stand_ins.tiny_model(tmp_path / "model"))
    make_folder(tmp_path / "data", {"a": 3, "b": 2})
    (tmp_path / "data/a/0001.png").write_bytes(b"no picture")
    (tmp_path / "cifar10").mkdir()
    overrides = ["batch_size=2", "workers=0", f"folder={tmp_path}", "device=cpu"]
    config = make_config(make_plan("paper", "m", None, 3, overrides, None), subject())
    found = transfer.predict_test_images(config, model, open_data(str(tmp_path / "data")))
    assert (found == transfer.NONE).tolist() == [False, True, False, False, False]


def test_mean_and_deviation_by_hand():
    assert suite_table.mean_and_deviation([0.5]) == (0.5, None)
    mean, deviation = suite_table.mean_and_deviation([0.90, 0.91, 0.95])
    assert mean == pytest.approx(0.92)
    # (0.02² + 0.01² + 0.03²) / 2 = 0.0007
    assert deviation == pytest.approx(math.sqrt(0.0007))
    assert suite_table.format_mean([0.90, 0.91, 0.95]) == "92.00 ± 2.65"
    assert suite_table.format_mean([1.0]) == "100.00"


def test_a_table_is_markdown_and_lines_up():
    lines = suite_table.format_table(("set", "top-1"), [("a", "99.10"), ("long name", "5")])
    assert lines == [
        "| set       | top-1 |",
        "|-----------|------:|",
        "| a         | 99.10 |",
        "| long name |     5 |",
    ]


def test_the_papers_numbers():
    """From the paper's table 2, as they stand there."""
    assert all(len(numbers) == len(suite_table.PAPER_MODELS) == 5 for numbers in suite_table.TABLE_2.values())
    column = {title: numbers[2] for title, numbers in suite_table.TABLE_2.items()}
    assert column == {
        "ImageNet": "85.30 ± 0.02",
        "ImageNet ReaL": "88.62",
        "CIFAR-10": "99.15",
        "CIFAR-100": "93.25",
        "Oxford-IIIT Pets": "94.67",
        "Flowers-102": "99.61",
        "VTAB (19 tasks)": "72.72",
        "TPUv3-core-days": "0.23k",
    }
    assert suite_table.TABLE_2["VTAB (19 tasks)"] == ("77.63", "76.28", "72.72", "76.29", "–")


def test_the_classes_of_val_must_be_those_of_train_too(tmp_path):
    for part, names in (("train", ("a", "b")), ("test", ("a", "b")), ("val", ("b", "a"))):
        make_parquet(tmp_path / "set" / f"{part}-0.parquet", [0, 1] * 4, names=names)
    with pytest.raises(DataError, match="classes of val"):
        open_suite_parts("pets", str(tmp_path / "set"))


def test_a_flat_folder_of_test_images_gives_way_to_val(tmp_path):
    """As ImageNet is unpacked by most people."""
    for part in ("train", "val"):
        make_folder(tmp_path / "set" / part, {"a": 3, "b": 3})
    (tmp_path / "set" / "test").mkdir()
    for number in range(3):
        (tmp_path / "set" / "test" / f"{number}.png").write_bytes(picture(number))
    assert open_suite_parts("imagenet", str(tmp_path / "set")).tested_on == "val"
