"""The registry of VTAB, its labels, and the suite from end to end on small data."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import stand_ins
from pictures import make_folder, make_parquet
from stand_ins import one_by_one, run_lines, shown, table

from vitrail.data.open import open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.data.transforms.augment import draw_crop_box
from vitrail.errors import ConfigError, DataError
from vitrail.training import loop
from vitrail.transfer import paper_suite, vtab_labels, vtab_suite, vtab_tasks
from vitrail.transfer.suite_data import SuiteParts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "transfer.md"
WORDS = ["red", "green", "blue"]
SHORT = [*stand_ins.SHORT, "schedule.steps=2"]
sys.path.insert(0, str(ROOT / "tools"))

import vtab_page  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with stand_ins.quick(tmp_path_factory.mktemp("cache")):
        yield


# ---- Labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "annotation", "expected"),
    [
        (vtab_labels.clevr_count, 3, 0),
        (vtab_labels.clevr_count, 10, 7),
        # Edges at 8, 8.5, 9, 9.5 and 10 belong below them.
        (vtab_labels.clevr_distance, [9.2, 0.1], 0),
        (vtab_labels.clevr_distance, [8.0, 12.0], 0),
        (vtab_labels.clevr_distance, [8.001], 1),
        (vtab_labels.clevr_distance, [11.0, 8.5], 1),
        (vtab_labels.clevr_distance, [8.75], 2),
        (vtab_labels.clevr_distance, [9.0], 2),
        (vtab_labels.clevr_distance, [9.01], 3),
        (vtab_labels.clevr_distance, [9.5], 3),
        (vtab_labels.clevr_distance, [9.75, 30.0], 4),
        (vtab_labels.clevr_distance, [10.0], 4),
        (vtab_labels.clevr_distance, [10.001], 5),
        (vtab_labels.clevr_distance, [100.0], 5),
        (vtab_labels.kitti_distance, [], 3),
        (vtab_labels.kitti_distance, [("Pedestrian", 1.0), ("Tram", 3.0), ("DontCare", -1000.0)], 3),
        (vtab_labels.kitti_distance, [("Car", 1.0)], 0),
        (vtab_labels.kitti_distance, [("Car", -2.0)], 0),
        (vtab_labels.kitti_distance, [("Van", 8.0), ("Car", 50.0)], 0),
        (vtab_labels.kitti_distance, [("Truck", 8.01)], 1),
        (vtab_labels.kitti_distance, [("Cyclist", 2.0), ("Car", 20.0)], 1),
        (vtab_labels.kitti_distance, [("Car", 20.5)], 2),
        (vtab_labels.kitti_distance, [("Car", 999.0)], 2),
        (vtab_labels.dsprites_location, 0, 0),
        (vtab_labels.dsprites_location, 1, 0),
        (vtab_labels.dsprites_location, 2, 1),
        (vtab_labels.dsprites_location, 31, 15),
        # 40 into 16: bins of two and a half, so of three and of two.
        (vtab_labels.dsprites_orientation, 0, 0),
        (vtab_labels.dsprites_orientation, 2, 0),
        (vtab_labels.dsprites_orientation, 3, 1),
        (vtab_labels.dsprites_orientation, 4, 1),
        (vtab_labels.dsprites_orientation, 5, 2),
        (vtab_labels.dsprites_orientation, 37, 14),
        (vtab_labels.dsprites_orientation, 38, 15),
        (vtab_labels.dsprites_orientation, 39, 15),
        (vtab_labels.smallnorb_azimuth, 0, 0),
        (vtab_labels.smallnorb_azimuth, 2, 1),
        (vtab_labels.smallnorb_azimuth, 34, 17),
        (vtab_labels.smallnorb_elevation, 0, 0),
        (vtab_labels.smallnorb_elevation, 8, 8),
        (vtab_labels.svhn_digit, 10, 0),
        (vtab_labels.svhn_digit, 1, 1),
        (vtab_labels.svhn_digit, 9, 9),
        (vtab_labels.flowers_class, 1, 0),
        (vtab_labels.flowers_class, 102, 101),
        (vtab_labels.pets_class, 1, 0),
        (vtab_labels.pets_class, 37, 36),
        (vtab_labels.retinopathy_grade, 4, 4),
    ],
)
def test_labels_by_hand(label, annotation, expected):
    assert label(annotation) == expected


@pytest.mark.parametrize(
    ("label", "annotation"),
    [
        (vtab_labels.clevr_count, 2),
        (vtab_labels.clevr_count, 11),
        (vtab_labels.clevr_distance, []),
        (vtab_labels.clevr_distance, [0.0]),
        (vtab_labels.clevr_distance, [100.1]),
        (vtab_labels.kitti_distance, [("Car", -100.0)]),
        (vtab_labels.kitti_distance, [("Car", 1000.0)]),
        (vtab_labels.dsprites_location, 32),
        (vtab_labels.dsprites_orientation, 40),
        (vtab_labels.smallnorb_azimuth, 3),
        (vtab_labels.smallnorb_azimuth, 36),
        (vtab_labels.smallnorb_elevation, 9),
        (vtab_labels.svhn_digit, 0),
        (vtab_labels.flowers_class, 0),
        (vtab_labels.pets_class, 38),
        (vtab_labels.retinopathy_grade, -1),
    ],
)
def test_annotations_that_cannot_be(label, annotation):
    with pytest.raises(DataError):
        label(annotation)


def test_bins_are_of_even_size():
    orientations = Counter(map(vtab_labels.dsprites_orientation, range(40)))
    assert [orientations[number] for number in range(16)] == [3, 2] * 8
    assert set(Counter(map(vtab_labels.dsprites_location, range(32))).values()) == {2}
    # As a floating-point division by 2.5, which is how it is defined.
    assert all(vtab_labels.dsprites_orientation(number) == int(np.float32(number) // 2.5) for number in range(40))


# ---- The registry ----------------------------------------------------------------------------------------------------


def test_there_are_19_tasks_in_three_groups():
    groups = Counter(task.group for task in vtab_tasks.TASKS.values())
    assert groups == {"natural": 7, "specialised": 4, "structured": 8}
    assert tuple(dict.fromkeys(task.group for task in vtab_tasks.TASKS.values())) == vtab_tasks.GROUPS
    assert len({task.title for task in vtab_tasks.TASKS.values()}) == 19


def test_the_papers_numbers_have_the_means_of_its_table_2():
    for column, mean in enumerate((77.63, 76.28, 72.72)):
        numbers = [task.paper[column] for task in vtab_tasks.TASKS.values()]
        assert np.mean(numbers) == pytest.approx(mean, abs=0.02)  # each is rounded to one digit
    assert vtab_tasks.TASKS["flowers102"].paper == (99.7, 99.7, 99.3)
    assert vtab_tasks.TASKS["kitti_distance"].paper == (84.5, 82.2, 79.9)


@pytest.mark.parametrize("task", vtab_tasks.TASKS.values(), ids=lambda task: task.name)
def test_a_task_agrees_with_itself(task):
    annotations = {
        "clevr_count": range(3, 11),
        "clevr_distance": [[8.0], [8.5], [9.0], [9.5], [10.0], [10.5]],
        "kitti_distance": [[("Car", 8.0)], [("Car", 20.0)], [("Car", 30.0)], []],
        "dsprites_location": range(32),
        "dsprites_orientation": range(40),
        "smallnorb_azimuth": range(0, 36, 2),
        "smallnorb_elevation": range(9),
        "svhn": range(1, 11),
        "flowers102": range(1, 103),
        "pets": range(1, 38),
        "diabetic_retinopathy": range(5),
    }
    assert (task.label is not None) == (task.name in annotations)
    if task.label is not None:
        assert {task.label(annotation) for annotation in annotations[task.name]} == set(range(task.classes))
    assert task.images[0] >= 800
    assert task.images[1] >= 200
    assert task.url.startswith("http")
    assert task.crop == (task.group != "structured")


def test_splits_add_up_to_the_originals():
    """What is known of the originals themselves."""
    totals = {name: sum(task.images) for name, task in vtab_tasks.TASKS.items()}
    assert totals["cifar100"] == 60_000
    assert totals["eurosat"] == 27_000
    assert totals["resisc45"] == 45 * 700
    assert totals["dtd"] == 47 * 120
    assert totals["flowers102"] == 8_189
    assert totals["pets"] == 7_349
    assert totals["svhn"] == 73_257 + 26_032
    assert totals["patch_camelyon"] == 327_680
    assert totals["clevr_count"] == totals["clevr_distance"] == 70_000 + 15_000
    assert totals["dsprites_location"] == totals["dsprites_orientation"] == 3 * 6 * 40 * 32 * 32
    assert totals["smallnorb_azimuth"] == totals["smallnorb_elevation"] == 48_600
    assert totals["kitti_distance"] == 7_481
    assert totals["caltech101"] == 9_144
    assert totals["sun397"] == 108_753
    assert totals["diabetic_retinopathy"] == 35_126 + 53_576
    assert totals["dmlab"] == 110_913


def test_the_documentation_is_the_page():
    text = DOCS.read_text(encoding="utf-8")
    assert vtab_page.write_page(text) == text, "run python tools/vtab_page.py"


def test_the_examples_of_the_documentation():
    (example,) = re.findall(r"^```toml\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    tree = tomllib.loads(example)
    tables = tree.pop("tasks")
    assert set(tree) - {"real"} <= set(paper_suite.SETS)
    assert set(tables) <= set(vtab_tasks.TASKS)
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "vtab_labels" in block]
    space: dict = {}
    exec(code, space)
    calls = re.findall(r"^(\w+\(.*\))  # .*: (\d), ", code, re.MULTILINE)
    assert [(eval(call, space), int(told)) for call, told in calls] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("size", [(375, 1242), (320, 480), (360, 480), (64, 64), (96, 96), (1242, 375)])
def test_what_must_not_be_cropped_is_not(size):
    options = vtab_suite.WHOLE_IMAGE
    boxes = {
        draw_crop_box(*size, random.Random(seed), options["crop_area"], options["crop_ratio"]) for seed in range(200)
    }
    assert boxes == {(0, 0, *size)}


# ---- 1,000 images ----------------------------------------------------------------------------------------------------


class Many(ListSource):
    """Samples without images, by names."""

    def __init__(self, count: int, prefix: str = "") -> None:
        super().__init__([(b"", index % 7) for index in range(count)], list("abcdefg"))
        self.prefix = prefix

    def name(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def identity(self, index: int) -> str:
        return self.name(index)


def parts(train: int, val: int | None = None) -> SuiteParts:
    return SuiteParts(Many(train, "t"), None if val is None else Many(val, "v"), Many(10), "test")


def names(source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def test_800_and_200_of_train_and_val():
    train, val = vtab_suite.split_train_val(parts(5000, 900))
    assert (len(set(names(train))), len(set(names(val)))) == (800, 200)
    assert {name[0] for name in names(train)} == {"t"}
    assert {name[0] for name in names(val)} == {"v"}


def test_1000_of_train_where_there_is_no_val():
    train, val = vtab_suite.split_train_val(parts(5000))
    assert (len(train), len(val), len({*names(train), *names(val)})) == (800, 200, 1000)
    # A draw, not the first: every class and every fifth of the data has about its share.
    numbers = [int(name[1:]) for name in (*names(train), *names(val))]
    assert all(140 < sum(number // 1000 == fifth for number in numbers) < 260 for fifth in range(5))


def test_all_where_there_are_fewer():
    train, val = vtab_suite.split_train_val(parts(500))
    assert (len(train), len(val)) == (400, 100)
    train, val = vtab_suite.split_train_val(parts(30, 9))
    assert (len(train), len(val)) == (30, 9)
    train, val = vtab_suite.split_train_val(parts(3))
    assert (len(train), len(val)) == (2, 1)
    with pytest.raises(DataError, match="only image"):
        vtab_suite.split_train_val(parts(1))


def test_the_draw_goes_by_names():
    source = Many(3000)
    drawn = {source.name(index) for index in vtab_suite.draw_samples(source, 1000)}
    more = Many(3001)  # one more changes at most one
    assert len(drawn - {more.name(index) for index in vtab_suite.draw_samples(more, 1000)}) <= 1
    assert vtab_suite.draw_samples(source, 1000).tolist() != vtab_suite.draw_samples(source, 1000, seed=1).tolist()


# ---- The suite -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stand_ins.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three sets of images that stand in for all: of train and test, with val, and raw numbers."""
    root = tmp_path_factory.mktemp("data")
    stand_ins.in_parts(root / "plain", WORDS, train=8, test=5)
    stand_ins.in_parts(root / "with-val", WORDS, train=6, val=2, test=4)
    stand_ins.in_parts(root / "raw", ["4", "6", "10"], train=8, test=5)
    return root


def described(path: Path, data: Path, tasks) -> str:
    lines = []
    for number, name in enumerate(tasks):
        raw = (
            vtab_tasks.TASKS[name].label is not None and vtab_tasks.TASKS[name].whole and name != "diabetic_retinopathy"
        )
        where = "raw" if raw else ("plain", "with-val")[number % 2]
        lines.append(f'[tasks.{name}]\ndata = "{data}/{where}"\nraw = {str(raw).lower()}')
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """All 19 tasks, once."""
    root = tmp_path_factory.mktemp("suites")
    tasks = [name for name in vtab_tasks.TASKS if name != "smallnorb_elevation"]
    where = described(root / "tasks.toml", data, tasks)
    with Path(where).open("a") as file:
        file.write(f'\n[tasks.smallnorb_elevation]\ndata = "{data}/plain"')
    return run_lines("vtab", model, where, root / "vtab", 2, SHORT), root / "vtab"


@pytest.mark.slow
def test_all_tasks_and_their_mean(whole, data):
    lines, folder = whole
    found = json.loads((folder / "suite.json").read_text())
    rows = table(lines)
    assert list(found["tasks"]) == list(vtab_tasks.TASKS)
    accuracies = {}
    for name, told in found["tasks"].items():
        task = vtab_tasks.TASKS[name]
        shares = [run["accuracy"] for run in told["runs"]]
        assert all(run["accuracy"] == run["hits"] / run["count"] for run in told["runs"])
        assert rows[task.title][:3] == [task.group, shown(shares), "2"]
        accuracies[name] = shares
    for group in vtab_tasks.GROUPS:
        ours = np.mean([accuracies[name] for name, task in vtab_tasks.TASKS.items() if task.group == group], axis=0)
        size = sum(task.group == group for task in vtab_tasks.TASKS.values())
        assert rows[f"{group} ({size} tasks)"][0] == shown(ours)
    assert rows["VTAB (19 tasks)"] == [
        shown(np.mean(list(accuracies.values()), axis=0)),
        *("77.63", "76.28", "72.72", "76.29", "–"),
    ]
    assert found["means"]["VTAB (19 tasks)"] == pytest.approx(np.mean(list(accuracies.values())))
    assert not found["missing"]
    assert not any("not VTAB" in line for line in lines)
    assert len({tuple(shares) for shares in accuracies.values()}) > 3, "the stand-ins are too easy to tell anything"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dtd", "caltech101", "dsprites_location", "flowers102", "clevr_distance"])
def test_a_task_is_what_its_saved_models_say(whole, data, name):
    found = json.loads((whole[1] / "suite.json").read_text())["tasks"][name]
    task = vtab_tasks.TASKS[name]
    places = {"dsprites_location": "raw", "flowers102": "raw", "caltech101": "plain"}
    where = places.get(name, "plain" if list(vtab_tasks.TASKS).index(name) % 2 == 0 else "with-val")
    test = open_data(str(data / where), "test")
    labels = test.labels(0, len(test)).tolist()
    if where == "raw":
        labels = [task.label(int(test.classes[label])) for label in labels]
    for run in found["runs"]:
        guesses = one_by_one(run["folder"], test)
        assert run["hits"] == sum(guess == label for guess, label in zip(guesses, labels, strict=True))
        assert run["count"] == len(labels)


@pytest.mark.slow
def test_what_the_runs_were_given(whole):
    _, folder = whole
    config = (folder / "clevr_count/seed-1/config.toml").read_text()
    assert "learning_rate = 0.01" in config
    assert 'validate_on = "none"' in config
    assert "crop_ratio = [\n    0.01,\n    100.0,\n]" in config
    assert "flip = 0.5" in config
    assert "flip = 0.0" in (folder / "dsprites_location/seed-0/config.toml").read_text()
    assert "crop_area = [\n    0.05,\n    1.0,\n]" in (folder / "svhn/seed-0/config.toml").read_text()
    packed = open_data(str(folder / "dsprites_location/images/all"))
    assert (len(packed), packed.classes) == (24, tuple(map(str, range(16))))
    assert Counter(packed.labels(0, 24).tolist()) == {2: 8, 3: 8, 5: 8}
    assert not (folder / "dsprites_location/images/choosing").exists(), "there is nothing to choose"


@pytest.mark.slow
def test_what_is_not_vtab_is_told(whole):
    lines = whole[0]
    assert "caltech101: learning rate 0.01: the only one, so there is nothing to choose" in lines
    assert any("not the paper's protocol" in line for line in lines)
    counts = ("24 images to train on instead of 1,000", "3 classes instead of 102", "15 test images instead of 6,084")
    assert f"- caltech101: {', '.join(counts)}" in lines


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    return tmp_path_factory.mktemp("some")


def test_tasks_without_data_are_listed_and_the_mean_is_not_called_vtab(model, data, some):
    where = described(some / "tasks.toml", data, ["dtd", "dmlab", "smallnorb_azimuth"])
    lines = run_lines("vtab", model, where, some / "vtab", 1, SHORT, rates=[0.001, 0.3])
    rows = table(lines)
    assert not any(title.startswith("VTAB") for title in rows)
    assert {"natural (1 of 7 tasks)", "structured (2 of 8 tasks)"} <= set(rows)
    assert "mean over the 3 tasks that ran (not VTAB)" in rows
    assert rows["DMLab"][-3:] == ["53.1", "49.7", "41.9"]
    assert sum("has no data" in line for line in lines) == 16
    assert (
        "- dsprites_location has no data: dSprites, https://github.com/google-deepmind/dsprites-dataset, in "
        in "\n".join(lines)
    )
    found = json.loads((some / "vtab/suite.json").read_text())
    assert len(found["missing"]) == 16
    assert found["tasks"]["dtd"]["paper"] == {"ViT-H/14 JFT": 75.2, "ViT-L/16 JFT": 74.3, "ViT-L/16 I21k": 74.1}
    for name, told in found["tasks"].items():
        chosen = max(told["tried"], key=lambda trial: (trial["accuracy"], -trial["loss"]))
        assert told["rate"] == told["runs"][0]["rate"] == chosen["rate"], name
    assert any(
        line.startswith("dtd: learning rate 0.3: ") and line.endswith("on the 4 images that choose") for line in lines
    )


def test_those_that_choose_are_trained_on_in_the_end(some, data):
    images = some / "vtab/dmlab/images"  # of data with a part val
    parts = {name: open_data(str(images / "choosing"), name) for name in ("train", "val")}
    assert (len(parts["train"]), len(parts["val"])) == (18, 6)
    together = open_data(str(images / "all"))
    assert together.classes == parts["train"].classes == tuple(sorted(WORDS))
    contents = {name: {source.read(index).content for index in range(len(source))} for name, source in parts.items()}
    everything = {together.read(index).content for index in range(len(together))}
    assert contents["train"] | contents["val"] == everything
    assert not contents["train"] & contents["val"]
    originals = {path.read_bytes() for part in ("train", "val") for path in (data / "with-val" / part).rglob("*.png")}
    assert everything == originals, "byte for byte"


def test_again_it_trains_nothing_and_finds_the_same(model, data, some, monkeypatch):
    where = described(some / "tasks.toml", data, ["dtd", "dmlab", "smallnorb_azimuth"])
    before = (some / "vtab/suite.md").read_text()
    shutil.rmtree(some / "vtab/dmlab/seed-0")  # as if it had been stopped before that one
    steps, plain = [], loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda run, state: (steps.append(run.config.run.folder), plain(run, state)))
    run_lines("vtab", model, where, some / "vtab", 1, SHORT, rates=[0.001, 0.3])
    assert steps == [some / "vtab/dmlab/seed-0"] * 2
    assert (some / "vtab/suite.md").read_text() == before


def test_what_is_wrong_is_told_before_anything_is_trained(model, data, tmp_path):
    def told(text: str, *overrides: str) -> None:
        (tmp_path / "tasks.toml").write_text(text.replace("DATA", str(data)))
        run_lines("vtab", model, str(tmp_path / "tasks.toml"), tmp_path / "suite", 1, [*SHORT, *overrides])

    with pytest.raises(ConfigError, match=r"dtd: data.batch_size = 64 .* 24 "):
        told('dtd = "DATA/plain"', "batch_size=64")
    with pytest.raises(ConfigError, match=r"dtd: raw = true"):
        told('[tasks.dtd]\ndata = "DATA/raw"\nraw = true')
    with pytest.raises(ConfigError, match=r"vtab_labels\.kitti_distance"):
        told('[tasks.kitti_distance]\ndata = "DATA/raw"\nraw = true')
    with pytest.raises(DataError, match=r"smallnorb_azimuth: .* .blue.: "):
        told('[tasks.smallnorb_azimuth]\ndata = "DATA/plain"\nraw = true')
    with pytest.raises(DataError, match=r"retinopathy: .* 10 .* 0 to 4"):
        told('[tasks.diabetic_retinopathy]\ndata = "DATA/raw"\nraw = true')
    make_parquet(tmp_path / "numbers/train.parquet", [0, 31, 5, 8] * 6)
    make_parquet(tmp_path / "numbers/test.parquet", [0, 31])
    with pytest.raises(DataError, match=r"31.* 16 classes"):
        told(f'dsprites_location = "{tmp_path}/numbers"')
    make_folder(tmp_path / "alone/train", {"a": 3})
    with pytest.raises(DataError, match=r"dtd: .* has train"):
        told(f'dtd = "{tmp_path}/alone"')
    assert not (tmp_path / "suite").exists()


def test_labels_without_names_have_the_tasks_classes(model, tmp_path):
    """Though 24 images show few of them."""
    make_parquet(tmp_path / "numbers/train.parquet", [0, 1, 2, 3] * 6)
    make_parquet(tmp_path / "numbers/test.parquet", [0, 15])
    (tmp_path / "tasks.toml").write_text('dsprites_location = "numbers"')
    lines = run_lines("vtab", model, str(tmp_path / "tasks.toml"), tmp_path / "suite", 1, SHORT)
    assert "- dsprites_location: 24 images to train on instead of 1,000, 2 test images instead of 73,728" in lines
    config = json.loads((tmp_path / "suite/dsprites_location/seed-0/model/config.json").read_text())
    assert config["architecture"]["num_classes"] == 16
