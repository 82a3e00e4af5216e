"""Data with a task: every layout gives the same targets, and what is to be learned is recognised."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from pictures import make_folder, make_parquet, picture
from task_tables import AGES, COUNT, LAYOUTS, SPLITS, TAGS, make_layout, write_csv

import vitrail
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.open import add_task, list_splits, open_data
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.sources.source import compute_fingerprint, halve_source, hold_out, take_share
from vitrail.data.task_data import TaskData, recognise_data, recognise_task
from vitrail.errors import ConfigError, DataError
from vitrail.tasks.levels import Levels
from vitrail.tasks.tags import Tags

NAMES = ("cat", "indoor", "outdoor")
TRUTH = np.array([[name in tags for name in NAMES] for tags in TAGS], np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tags_are_the_same_in_every_layout(tmp_path, layout):
    data = add_task(make_layout(tmp_path, layout), "tags")
    assert list_splits(data) == (() if layout == "list" else ("train", "val"))
    task = recognise_task(data)
    assert task.kind == "tags"
    assert task.names == NAMES
    parts = {None: range(COUNT)} if layout == "list" else {"train": range(16), "val": range(16, COUNT)}
    for split, rows in parts.items():
        source = open_data(data, split)
        assert source.task == task
        assert np.array_equal(source.targets(0, len(source))["tags"], TRUTH[list(rows)])
        first = source.read_checked(0)
        assert first.content == picture(rows[0])
        assert np.array_equal(first.targets["tags"], TRUTH[rows[0]])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "csv-columns"])
def test_numbers_are_the_same_in_every_layout(tmp_path, layout):
    data = add_task(make_layout(tmp_path, layout), None, "age")
    task = recognise_task(data)
    assert (task.kind, task.columns) == ("numbers", ("age",))
    source = open_data(data, None if layout == "list" else "train")
    assert source.targets(0, len(source))["numbers"].ravel().tolist() == AGES[: len(source)]


@pytest.mark.parametrize("layout", ["csv", "csv-json", "csv-columns", "jsonl", "json", "list", "dict"])
def test_finetune_finds_the_task_without_being_told(tmp_path, layout):
    if layout in ("list", "dict", "jsonl", "json"):
        rows = make_layout(tmp_path, layout)
        assert recognise_task(rows).kind == "tags"  # the column is called tags
    else:
        assert recognise_task(make_layout(tmp_path, layout)).kind == "tags"


@pytest.mark.parametrize(
    ("head", "rows", "labels", "expected"),
    [
        ("image,label", ["0.png,a", "1.png,b"], None, ("labels", ("label",))),
        ("image,label", ["0.png,3", "1.png,7"], None, ("labels", ("label",))),
        ("image,label", ["0.png,a|b", "1.png,b"], None, ("tags", ("label",))),
        ("image,tags", ["0.png,a", "1.png,", "2.png,b"], None, ("tags", ("tags",))),
        ("image,Keywords", ["0.png,a", "1.png,b"], None, ("tags", ("Keywords",))),
        ("image,label", ["0.png,3.5", "1.png,7"], None, ("numbers", ("label",))),
        ("image,label", [f"{i}.png,{i}" for i in range(30)], None, ("labels", ("label",))),
        ("image,age,name", [f"{i}.png,{i},x" for i in range(30)], "age", ("numbers", ("age",))),
        ("image,stars,name", [f"{i}.png,{i % 5},x" for i in range(30)], "stars", ("labels", ("stars",))),
        ("image,wet,cold", ["0.png,1,0", "1.png,0,1"], None, ("tags", ("wet", "cold"))),
        ("image,width,height", ["0.png,1.5,2", "1.png,3,4"], None, ("numbers", ("width", "height"))),
        (
            "image,colour,shape",
            ["0.png,red,box", "1.png,blue,box"],
            "colour,shape",
            ("attributes", ("colour", "shape")),
        ),
        ("image,label,wet,cold", ["0.png,a,1,0", "1.png,b,0,1"], None, ("labels", ("label",))),
        (",image,age", ["0,0.png,1.5", "1,1.png,2.5"], None, ("numbers", ("age",))),
    ],
)
def test_what_columns_tell(tmp_path, head, rows, labels, expected):
    data = add_task(write_csv(tmp_path, head, rows, 2), None, labels)
    task = recognise_task(data)
    columns = task.columns if task.kind != "labels" or isinstance(data, TaskData) else ("label",)
    assert (task.kind, columns) == expected


def test_levels_only_when_asked_for(tmp_path):
    path = write_csv(tmp_path, "image,label", [f"{i}.png,{i % 5}" for i in range(10)], 1)
    assert recognise_task(path).kind == "labels"
    assert recognise_task(add_task(path, "levels")).names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"task": "tagz"}, "did you mean 'tags'"),
        ({"labels": "colr"}, "did you mean 'colour'"),
        ({"labels": ""}, "name columns"),
        ({"labels": "colour,colour"}, "each once"),
        ({"task": "tags", "labels": "colour,words"}, "columns of 0 and 1"),
        ({"task": "numbers", "labels": "colour"}, "leave it out of labels"),
        ({"task": "labels", "labels": "colour,age"}, "attributes learns several"),
        ({"labels": "colour,words"}, "labels='words' alone"),
        ({"labels": "colour,age"}, "labels='age' alone"),
        ({"labels": "empty"}, "fill it"),
        ({"task": "levels"}, "say which to learn"),
    ],
)
def test_impossible_choices_say_what_to_do_next(tmp_path, options, error):
    rows = [f"{i}.png,{'rb'[i % 2]},a|b,{i / 3},," for i in range(30)]
    path = write_csv(tmp_path, "image,colour,words,age,empty,other", rows, 1)
    with pytest.raises((ConfigError, DataError), match=error):
        open_data(add_task(path, **options))


def test_class_folders_have_no_table(tmp_path):
    folder = make_folder(tmp_path / "photos", {"ant": 4, "bee": 4})
    assert recognise_task(folder).names == ("ant", "bee")
    assert recognise_data(folder) == folder
    assert add_task(folder) == folder
    assert open_data(add_task(folder, "labels")).classes == ("ant", "bee")
    with pytest.raises(DataError, match=r"has no table.*write a CSV"):
        open_data(add_task(folder, "tags"))


@pytest.mark.parametrize("inner", ["", "train"])
def test_records_beside_class_folders_are_no_table(tmp_path, inner):
    make_folder(tmp_path / inner, {"ant": 2, "bee": 2})
    for record in ({"step": 1}, {"file_name": f"{inner or '.'}/ant/0000.png", "tags": ["a caption"]}):
        (tmp_path / "log.jsonl").write_text(json.dumps(record))
        assert recognise_data(tmp_path) == tmp_path
        assert recognise_task(tmp_path).names == ("ant", "bee")


@pytest.mark.parametrize("folder", ["images", "pictures", "train"])
def test_records_beside_a_folder_of_images_are_a_table(tmp_path, folder):
    make_folder(tmp_path, {folder: 2})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": f"{folder}/0000.png", "tags": ["a", "b"]}))
    assert recognise_task(tmp_path).names == ("a", "b")


@pytest.mark.parametrize(("stray", "kind"), [("a|b", "tags"), ('"[""a""]"', "tags"), ("3.5", "numbers")])
def test_a_stray_cell_does_not_make_labels_another_task(tmp_path, stray, kind):
    for count, expected in ((1, "labels"), (2, kind)):
        rows = [f"{i}.png,{stray if i < count else i % 3}" for i in range(20)]
        path = write_csv(tmp_path, "image,label", rows, 1)
        assert recognise_task(path).kind == expected
        assert (recognise_data(path) == path) == (expected == "labels")
        pairs = [(picture(0), row.partition(",")[2].strip('"').replace('""', '"')) for row in rows]
        assert recognise_task(pairs).kind == expected
    write_csv(tmp_path, "image,word", ["0.png,a|b", *[f"{i}.png,a" for i in range(20)]])
    assert recognise_task(path).kind == "tags"  # of a column with another name, a list says enough


def test_a_stray_cell_does_not_end_a_column_of_ones(tmp_path):
    rows = [f"{i}.png,{i % 2},{i % 3 % 2},{'x' if i == 7 else int(i % 5 == 0)}" for i in range(60)]
    source = open_data(recognise_data(write_csv(tmp_path, "image,indoor,cat,dog", rows, 60)))
    assert (source.task.kind, source.task.names) == ("tags", ("indoor", "cat", "dog"))
    assert list(source.broken_rows) == [7]
    assert "rows.csv, line 9" in source.broken_rows[7]
    assert "'x'" in source.broken_rows[7]


def test_numbers_learn_nothing_from_what_measures_them(tmp_path):
    """The mean of a head to start from, and of what losses are scaled by, is that of the images to train on."""
    for high in (10, 1000):
        rows = [f"{i}.png,{i},train" for i in range(10)] + [f"{i}.png,{high},test" for i in range(10, 14)]
        data = add_task(write_csv(tmp_path, "image,age,split", rows, 14), "numbers")
        assert recognise_task(data).means == (4.5,)
        assert open_data(data, "test").targets(0, 4)["numbers"].ravel().tolist() == [high] * 4
    path = write_csv(tmp_path, "image,age,split", [f"{i}.png,{i},test" for i in range(4)])
    assert recognise_task(add_task(path, "numbers")).means == (1.5,)


def test_tags_are_those_of_all_splits(tmp_path):
    rows = ["0.png,cat|dog,train", "1.png,dog,train", "2.png,owl,test"]
    assert recognise_task(write_csv(tmp_path, "image,tags,split", rows, 3)).names == ("cat", "dog", "owl")


@pytest.mark.parametrize("name", ["split", "Split", "SPLIT"])
@pytest.mark.parametrize("column", ["tags", "label"])
def test_the_name_of_the_column_of_splits_may_be_written_in_any_case(tmp_path, name, column):
    path = write_csv(tmp_path, f"image,{column},{name}", ["0.png,a,train", "1.png,b,train", "2.png,a,val"], 3)
    data = recognise_data(path)
    assert list_splits(data) == ("train", "val")
    assert [len(open_data(data, split)) for split in ("train", "val")] == [2, 1]


@pytest.mark.parametrize("cells", [[" b", "a ", "b"], [0.0, 1.0, 0], [10, 9.0, "9 "]])
def test_label_names_are_those_that_rows_are_looked_up_by(cells):
    source = open_data(add_task([(picture(0), {"kind": cell}) for cell in cells], "labels", "kind"))
    assert not source.broken_rows
    assert len(source.classes) == 2
    assert source.classes[0] == min(source.classes, key=lambda name: int(name) if name.isdecimal() else 0) != "b"


def test_labels_from_a_column_of_ones_choice(tmp_path):
    """Ordinary classification of another column, whose classes are those of all splits."""
    rows = [f"{i}.png,{'rgb'[i % 3]},{'train' if i < 6 else 'test'}" for i in range(9)]
    data = add_task(write_csv(tmp_path, "image,colour,split", rows, 9), "labels", "colour")
    train = open_data(data, "train")
    assert train.classes == ("b", "g", "r")
    assert train.labels(0, 3).tolist() == [2, 1, 0]
    sample = train.read_checked(1)
    assert (sample.label, sample.targets) == (1, None)


def test_a_plain_csv_and_its_task_open_the_same(tmp_path):
    path = write_csv(tmp_path, "image,label", [f"{i}.png,{'ab'[i % 2]}" for i in range(8)], 8)
    plain, wrapped = open_data(path), open_data(add_task(path, "labels"))
    assert type(plain) is type(wrapped)
    assert compute_fingerprint(plain) == compute_fingerprint(wrapped)


def test_parquet_of_classes_is_not_read_to_recognise_it(tmp_path, monkeypatch):
    make_parquet(tmp_path / "0.parquet", [0, 1, 0, 1], names=("ant", "bee"))
    from vitrail.data.tables import shard_tables

    monkeypatch.setattr(shard_tables, "_read_row_groups", None)
    assert recognise_task(tmp_path).names == ("ant", "bee")


def test_a_models_task_fits_another_layout(tmp_path):
    listed, columns = tmp_path / "a", tmp_path / "b"
    listed.mkdir()
    columns.mkdir()
    learned = recognise_task(make_layout(listed, "csv"))
    source = open_data(TaskData(make_layout(columns, "csv-columns"), learned), "train")
    assert source.task == learned.model_copy(update={"column": None})
    assert np.array_equal(source.targets(0, 16)["tags"], TRUTH[:16])
    again = open_data(TaskData(listed / "rows.csv", source.task, ("tags",)), "train")
    assert np.array_equal(again.targets(0, 16)["tags"], TRUTH[:16])
    ages = recognise_task(add_task(listed / "rows.csv", None, "age"))
    with pytest.raises(DataError, match="no column 'age'"):
        open_data(TaskData(columns / "rows.csv", ages), "train")


@pytest.mark.parametrize("column", ["species", "names", "words"])
def test_a_model_of_tags_does_not_take_any_column_for_its_tags(tmp_path, column):
    learned = Tags(names=("cat", "dog"), column="tags")
    path = write_csv(tmp_path, f"image,{column},age", ["0.png,cat,1", "1.png,dog,2"], 2)
    error = f"has no column 'tags', which the model learned, but {column}, age: say which holds the tags, as labels="
    with pytest.raises(DataError, match=rf"{error}'NAME' \(--labels NAME\)"):
        open_data(TaskData(path, learned))
    assert open_data(TaskData(path, learned, (column,))).targets(0, 2)["tags"].tolist() == [[1, 0], [0, 1]]
    other = learned.model_copy(update={"column": None})
    with pytest.raises(DataError, match=r"has no column 'cat'.*--labels NAME"):
        open_data(TaskData(path, other))


@pytest.mark.parametrize(
    ("head", "rows", "column"),
    [
        ("image,keywords", ["0.png,cat", "1.png,dog"], "keywords"),
        ("image,species,Labels", ["0.png,Birman,cat", "1.png,Akita,dog"], "Labels"),
        ("image,label", ["0.png,cat|dog", "1.png,dog"], "label"),
    ],
)
def test_a_model_of_tags_takes_a_column_that_surely_holds_tags(tmp_path, head, rows, column):
    source = open_data(TaskData(write_csv(tmp_path, head, rows, 2), Tags(names=("cat", "dog"), column="tags")))
    assert source.task.column == column
    assert not source.broken_rows


def test_a_model_of_levels_takes_a_column_of_labels_and_no_other(tmp_path):
    learned = Levels(names=("1", "2"), column="stars")
    path = write_csv(tmp_path, "image,label,age", ["0.png,1,30", "1.png,2,40"], 2)
    assert open_data(TaskData(path, learned)).task.column == "label"
    path = write_csv(tmp_path, "image,grade", ["0.png,1", "1.png,2"], 2)
    with pytest.raises(DataError, match="no column 'stars', which the model learned, but grade: say which holds the l"):
        open_data(TaskData(path, learned))


SPLIT_ROWS = [f"{i}.png,{'ab'[i % 2]},{('Train', 'test', '')[i % 3]}" for i in range(6)]


@pytest.mark.parametrize("column", ["splt", "set", "part"])
@pytest.mark.parametrize(
    ("target", "options"),
    [("label", {}), ("tags", {}), ("word", {"labels": "word"}), ("word", {"task": "attributes"})],
)
def test_a_column_of_splits_with_another_name_is_an_error(tmp_path, column, target, options):
    path = write_csv(tmp_path, f"image,{target},{column}", SPLIT_ROWS, 6)
    calls = [recognise_data, open_data, list_splits] if target == "label" else [recognise_task, open_data, list_splits]
    for call in calls if options or target == "label" else calls[:1]:
        with pytest.raises(DataError, match=f"column '{column}' holds Train and test: call it split, or leave it out"):
            call(add_task(path, **options))
    with pytest.raises(DataError, match="call it split"):
        open_data(TaskData(path, Tags(names=("a", "b"), column=target)))


@pytest.mark.parametrize(
    ("head", "rows", "options"),
    [
        ("image,label", ["0.png,train", "1.png,test"], {}),
        ("image,vehicle", ["0.png,train", "1.png,test"], {}),
        ("image,vehicle,size", ["0.png,train,1", "1.png,test,2"], {"labels": "vehicle"}),
        ("image,tags,size", ["0.png,train,1", "1.png,test,2"], {}),
        ("image,vehicle,size", ["0.png,train,big", "1.png,test,small"], {"labels": "vehicle,size"}),
        ("image,label,set", ["0.png,a,train", "1.png,b,train"], {}),
        ("image,label,set", ["0.png,a,train", "1.png,b,training"], {}),
        ("image,label,set", ["0.png,a,train", "1.png,b,test", "1.png,b,bus"], {}),
        ("image,label,set,split", ["0.png,a,train,train", "1.png,b,test,train"], {}),
    ],
)
def test_names_of_splits_that_are_no_splits(tmp_path, head, rows, options):
    data = add_task(write_csv(tmp_path, head, rows, 2), **options)
    assert recognise_task(data)
    assert "test" not in list_splits(recognise_data(data))


def test_whatever_wraps_a_source_keeps_its_targets(tmp_path):
    path = make_layout(tmp_path, "csv")
    source = open_data(add_task(path, "tags"), "train")
    rest, held = hold_out(source, 0.25, seed=3)
    assert len(rest) + len(held) == 16
    assert held.targets(0, len(held))["tags"][:, 2].sum() == len(held) / 2  # of each stratum the same share
    memory = InMemorySource(held)
    assert memory.task == source.task
    assert np.array_equal(memory.read(1).targets["tags"], held.targets(1, 2)["tags"][0])
    assert len(take_share(source, 0.5, 0)) == 8
    assert sum(map(len, halve_source(source))) == 16
    assert held.cells(0)["tags"] in ("outdoor", "indoor|cat")
    again = pickle.loads(pickle.dumps(held))
    assert np.array_equal(again.targets(0, len(held))["tags"], held.targets(0, len(held))["tags"])


def test_the_same_images_are_held_out_wherever_the_table_lies(tmp_path):
    names = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        path = write_csv(folder, "image,tags", [f"{i}.png,{'|'.join(TAGS[i])}" for i in range(COUNT)], COUNT)
        held = open_data(add_task(path, "tags"), "val")
        names.append([held.identity(index) for index in range(len(held))])
    assert names[0] == names[1]
    assert len(names[0]) == 2


def test_a_fingerprint_sees_targets_and_names(tmp_path):
    prints = set()
    for words in ("a|b", "a|c", "b|a"):
        path = write_csv(tmp_path, "image,tags", [f"0.png,{words}", "1.png,a"], 2)
        prints.add(compute_fingerprint(open_data(add_task(path, "tags"))))
    assert len(prints) == 2  # the order of tags in a cell does not matter


def test_loaders_give_named_targets(tmp_path):
    data = add_task(make_layout(tmp_path, "jsonl"), None, "age")
    batch = next(TrainingLoader(open_data(data, "train"), 4, 16, seed=1))
    assert batch.targets["numbers"].ravel().tolist() == [AGES[index] for index in batch.indices.tolist()]
    preprocessing = vitrail.config.Preprocessing(image_size=16)
    batch = next(iter(EvaluationLoader(open_data(data, "val"), preprocessing, 8)))
    assert batch.targets["numbers"].ravel().tolist() == AGES[16:]


@pytest.mark.parametrize("form", ["tar", "parquet"])
@pytest.mark.parametrize(
    ("layout", "task", "labels"),
    [
        ("csv", "tags", None),
        ("csv-columns", "tags", None),
        ("csv", "numbers", "age"),
        ("jsonl", "levels", "age"),
        ("dict", "attributes", "age"),
        ("list", "tags", "tags"),
    ],
)
def test_packed_targets_open_with_the_same_task(tmp_path, form, layout, task, labels):
    data = add_task(make_layout(tmp_path, layout), task, labels)
    out = tmp_path.with_name(tmp_path.name + "-packed")
    vitrail.pack_data(data, out, format=form, shuffle=False, workers=1)
    assert list_splits(out) == list_splits(data)
    for split in list_splits(data) or [None]:
        ours, theirs = open_data(data, split), open_data(out, split)
        assert theirs.task == ours.task
        assert recognise_task(out) == ours.task
        for name, values in ours.targets(0, len(ours)).items():
            assert np.array_equal(theirs.targets(0, len(theirs))[name], values)
        assert theirs.read_checked(1).content == ours.read_checked(1).content
    again = vitrail.pack_data(data, out, format=form, shuffle=False, workers=1)  # only checks
    assert again.samples == COUNT
    assert json.loads((out / "dataset.json").read_text())["task"]["kind"] == task


def test_another_task_is_another_pack(tmp_path):
    path, out = make_layout(tmp_path, "csv"), tmp_path.with_name(tmp_path.name + "-out")
    vitrail.pack_data(add_task(path, "tags"), out, workers=1)
    with pytest.raises(ConfigError, match="pack of something else"):
        vitrail.pack_data(add_task(path, None, "age"), out, workers=1)


def test_a_task_for_an_open_source(tmp_path):
    source = open_data(add_task(make_layout(tmp_path, "csv"), "tags"), "train")
    assert add_task(source, "tags") is source
    assert recognise_task(source) == source.task
    with pytest.raises(ConfigError, match="is open already"):
        add_task(source, "numbers")


def test_a_task_that_knows_other_tags(tmp_path):
    """Rows with tags that a model does not know are bad, and no others."""
    path = make_layout(tmp_path, "csv")
    source = open_data(TaskData(path, Tags(names=("cat", "indoor"), column="tags")), "train")
    with pytest.raises(DataError, match="line 2: 'outdoor' is no tag"):
        source.read(0)
    assert source.read(1).targets["tags"].tolist() == [1, 1]
    assert SPLITS.count("train") == len(source)


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    section = page.partition("## Tags, numbers, levels, attributes")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "photos").mkdir()
    make_layout(tmp_path / "photos", "csv").rename(tmp_path / "photos/labels.csv")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "('cat', 'indoor', 'outdoor')" in printed
    assert "tags [[0. 0. 1.]" in printed


def test_hub_columns(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    from vitrail.data.sources import hub

    features = datasets.Features(
        image=datasets.Image(),
        tags=datasets.Sequence(datasets.ClassLabel(names=["x", "y"])),
        age=datasets.Value("float32"),
    )
    rows = {
        split: datasets.Dataset.from_dict(
            {
                "image": [{"bytes": picture(i), "path": None} for i in range(4)],
                "tags": [[0], [0, 1], [1], []],
                "age": [first, 2.5, 3.5, None],
            },
            features=features,
        )
        for split, first in (("train", 1.5), ("test", 9.5))
    }
    monkeypatch.setattr(hub, "list_hub_splits", lambda name: set(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, revision: rows[split])
    source = open_data(add_task("hf:someone/something", "tags"), "test")
    assert source.task.names == ("x", "y")
    assert source.targets(0, 4)["tags"].tolist() == [[1, 0], [1, 1], [0, 1], [0, 0]]
    assert source.read(2).content == picture(2)
    ages = open_data(add_task("hf:someone/something", None, "age"), "test").targets(0, 4)["numbers"].ravel()
    assert ages[:3].tolist() == [9.5, 2.5, 3.5]
    assert np.isnan(ages[3])
