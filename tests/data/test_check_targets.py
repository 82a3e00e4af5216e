"""What a data check says of tags, numbers and names."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_tables import LAYOUTS, make_layout, write_csv
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app
from vitrail.data.check.near_names import find_misspelt
from vitrail.data.open import add_task
from vitrail.data.task_data import recognise_task
from vitrail.errors import DataError
from vitrail.tasks.tags import Tags


def check(path, **options):
    return vitrail.check_data(path, workers=1, on_event=lambda *event: None, **options)


def find(report, kind):
    return [(finding.name.rpartition("/")[2], finding.sentence) for finding in report.findings(kind)]


def test_tags(tmp_path):
    rows = [f"{i}.png,{'indoor|cat' if i % 2 else 'outdoor|cat'}" for i in range(36)]
    rows += ["36.png,indor|cat", "37.png,", "38.png,OUTDOOR|cat", ",cat", '39.png,"[x"']
    report = check(write_csv(tmp_path, "image,tags", rows, 40))
    assert find(report, "misspelt") == [
        ("rows.csv, line 38", "the tag 'indor' of 1 image is probably 'indoor', as of 18 images"),
        ("rows.csv, line 40", "the tag 'OUTDOOR' of 1 image is probably 'outdoor', as of 18 images"),
    ]
    assert find(report, "empty") == [("rows.csv, line 39", "has no tag")]
    assert [name for name, _ in find(report, "row")] == ["rows.csv, line 41", "39.png"]
    assert report.failed
    assert report.targets.tables["Tags"] == [
        ["tag", "all"],
        *(["OUTDOOR", 1], ["indor", 1], ["indoor", 18], ["outdoor", 18], ["cat", 38]),
    ]
    assert "tags: 5, from OUTDOOR (1), the rarest, to cat (38)" in list(report.lines())


def test_what_only_a_split_to_evaluate_on_has_cannot_be_learned(tmp_path):
    rows = [f"{i}.png,{'cat|sky' if i % 2 else 'cat'},train" for i in range(6)]
    rows += ["6.png,zebra|sky,test", "7.png,zebra|ape,val", "8.png,sky,val"]
    report = check(write_csv(tmp_path, "image,tags,split", rows, 9))
    assert find(report, "untaught") == [
        ("the tag 'ape'", "1 image of val has it, and none of train"),
        ("the tag 'zebra'", "2 images of val and test have it, and none of train"),
    ]
    assert report.counts["untaught"] == 2
    rows = [row.replace("cat|sky", "dog").replace("zebra|", "").replace(",sky,", ",dog,") for row in rows]
    report = check(write_csv(tmp_path, "image,label,split", rows, 9))
    assert find(report, "untaught") == [("the class 'ape'", "1 image of val has it, and none of train")]
    assert not report.failed
    levels = [row.replace("ape", "3 high") for row in rows]
    assert find(check(write_csv(tmp_path, "image,mood,split", levels, 9)), "untaught")


def test_tags_that_a_model_does_not_know(tmp_path):
    path = write_csv(tmp_path, "image,tags", ["0.png,cat", "1.png,dgo"], 2)
    report = check(path, task=Tags(names=("cat", "dog"), column="tags"))
    assert find(report, "row")[0][1].endswith("line 3: 'dgo' is no tag, did you mean 'dog'?")
    assert [finding.name for finding in report.findings("constant")] == ["the tag 'cat'", "the tag 'dog'"]


def test_columns_of_tags(tmp_path):
    rows = [f"{i}.png,1,0,{i % 2}" for i in range(4)]
    report = check(write_csv(tmp_path, "image,sky,fire,sea", rows, 4))
    assert find(report, "constant") == [
        ("the tag 'sky'", "every image has it, so there is nothing to learn"),
        ("the tag 'fire'", "no image has it, so there is nothing to learn"),
    ]
    assert not report.failed


def test_numbers(tmp_path):
    rows = [f"{i}.png,{i + 0.5},{'' if i == 3 else 1}" for i in range(36)]
    rows += ["36.png,9000,1", "37.png,,", "38.png,old,1"]
    report = check(write_csv(tmp_path, "image,age,h", rows, 39), labels="age,h")
    assert find(report, "outlier")[0][0] == "rows.csv, line 38"
    assert find(report, "outlier")[0][1].startswith("age is 9000, ")
    assert find(report, "empty") == [("rows.csv, line 39", "has no number")]
    missing = dict(find(report, "missing"))
    assert missing["age"].startswith("1 of 38 rows have no number there, such as ")
    assert missing["h"].startswith("2 of 38 rows")
    assert find(report, "constant") == [("h", "is always 1, so there is nothing to learn")]
    head, age, h = report.targets.tables["Numbers"]
    assert dict(zip(head, h, strict=True)) == {
        "column": "h",
        **{"images": 36, "missing": 2, "least": 1.0, "median": 1.0, "mean": 1.0, "most": 1.0},
    }
    assert age[:4] == ["age", 37, 1, 0.5]
    assert "age" in json.dumps(report.to_dict()["targets"])


def test_numbers_of_a_wide_range_are_no_outliers(tmp_path):
    rows = [f"{i}.png,{1.5**i}" for i in range(40)]
    report = check(write_csv(tmp_path, "image,size", rows, 40))
    assert report.counts["outlier"] == 0
    assert any("it is that kind" in note for note in report.notes)


def test_attributes(tmp_path):
    rows = [f"{i}.png,{'red' if i % 3 else 'green'},box,{'train' if i < 20 else 'val'}" for i in range(30)]
    rows += ["30.png,grene,box,train", "31.png,,,train"]
    report = check(write_csv(tmp_path, "image,colour,shape,split", rows, 32), labels="colour,shape")
    assert [sentence for _, sentence in find(report, "misspelt")] == [
        "the colour 'grene' of 1 image is probably 'green', as of 10 images"
    ]
    assert find(report, "constant") == [("shape", "is always box, so there is nothing to learn")]
    assert [name for name, _ in find(report, "empty")] == ["rows.csv, line 33"]
    assert report.targets.tables["Values of colour"] == [
        ["colour", "train", "val", "all"],
        *(["grene", 1, 0, 1], ["green", 7, 3, 10], ["red", 13, 7, 20]),
    ]


def test_twice_the_same_image_with_other_tags(tmp_path):
    rows = ["0.png,a|b", "1.png,a", "0.png,b"]
    (sentence,) = [text for _, text in find(check(write_csv(tmp_path, "image,tags", rows, 2)), "duplicate")]
    assert sentence.endswith("rows.csv, line 4 and line 2), and conflicting labels: tags b here, tags a|b there")
    rows = ["0.png,a|b,val", "1.png,a,train", "2.png,b,train", "1.png,b,train"]
    (sentence,) = [text for _, text in find(check(write_csv(tmp_path, "image,tags,split", rows, 3)), "duplicate")]
    assert "rows.csv, line 5 and line 3), and" in sentence  # as the table counts, not the split
    rows = [f"{i}.png,a,train" for i in range(2)]
    report = check(write_csv(tmp_path, "image,label,split", [*rows, "0.png,a,train"]))
    assert find(report, "duplicate")[0][1].endswith("0.png")  # plain labels keep no lines


@pytest.mark.parametrize("column", ["tags", "words"])
@pytest.mark.parametrize("mark", [", ", ";"])
def test_several_tags_in_a_cell_that_are_read_as_one(tmp_path, column, mark):
    rows = [f'{i}.png,"Birman{mark}cat"' for i in range(3)] + ["3.png,dog", '4.png,"[""a, b""]"', "5.png,"]
    path = write_csv(tmp_path, f"image,{column}", rows, 6)
    sentence = (
        f"3 of 5 cells look like several tags separated by ',' or ';', such as 'Birman{mark}cat': write a|b, or a list"
    )
    for options in ({"task": "tags"}, {"task": "tags", "labels": column}, *([{}] if column == "tags" else [])):
        assert find(check(path, **options), "joined") == [(column, sentence)]
    data = add_task(path, "tags")
    if column == "words":
        assert recognise_task(data).names == (f"Birman{mark}cat", "a, b", "dog")
        return
    for each in (path, data):
        with pytest.raises(DataError, match=re.escape(f"rows.csv, column tags: {sentence}")):
            vitrail.finetune(each, "Ti/16", quick=True)
    few = write_csv(tmp_path, "image,tags", ["0.png,a|b", '1.png,"a,b"', '2.png,"[""c, d""]"'], 3)
    assert recognise_task(few).names == ("a", "a,b", "b", "c, d")
    assert find(check(few), "joined")[0][1].startswith("1 of 3 cells look like")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_checked(tmp_path, layout):
    report = check(add_task(make_layout(tmp_path, layout), "tags"))
    assert not report.failed
    head, *rows = report.targets.tables["Tags"]
    assert head[0] == "tag"
    assert [[row[0], row[-1]] for row in rows] == [["cat", 12], ["indoor", 12], ["outdoor", 12]]


def test_class_folders_have_no_targets(tmp_path):
    report = check([(b"no image", "a")])
    assert report.targets is None
    assert "targets" not in report.to_dict()


def test_the_command(tmp_path):
    path, out = write_csv(tmp_path, "image,tags", ["0.png,a|b", "1.png,a,b"], 2), tmp_path / "out.json"
    result = CliRunner().invoke(app, ["data", "check", str(path), "--workers", "1", "--out", str(out)])
    assert result.exit_code == 1
    assert "row\t" in result.stdout
    assert "line 3\tthere are 3 cells" in result.stdout
    assert json.loads(out.read_text())["targets"] == {"Tags": [["tag", "all"], ["a", 1], ["b", 1]]}
    result = CliRunner().invoke(app, ["data", "check", str(path), "--task", "tagz"])
    assert result.exit_code != 0
    packed = tmp_path.with_name(f"{tmp_path.name}-packed")
    arguments = ["data", "pack", str(path), str(packed), "--task", "tags", "--labels", "tags", "--skip-broken"]
    assert CliRunner().invoke(app, [*arguments, "--workers", "1"]).exit_code == 0
    assert check(packed).targets.tables["Tags"][1:] == [["a", 1], ["b", 1]]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"horse": 50, "hrose": 1}, {"hrose": "horse"}),
        ({"Dog": 50, "dgo": 5}, {"dgo": "Dog"}),
        ({"Dog": 50, "dgo": 6}, {}),
        ({"ab": 50, "ba": 1, "dog": 50, "dogs": 1, "do": 1}, {}),
        ({"horse": 50, "horses": 5}, {"horses": "horse"}),
        ({"horse": 50, "horses": 6}, {}),
        ({"living room": 5, "Living_Room": 4}, {"Living_Room": "living room"}),
        ({"room1": 100, "room2": 1}, {}),
        ({"cat": 100, "rat": 1}, {}),
        ({"horse": 100, "mouse": 1}, {}),
        ({"horse": 0, "hors": 0}, {}),
        ({"a": 5, "A": 4}, {"A": "a"}),
        ({"a": 5, "A": 5}, {}),
        ({"-1": 5, "1": 50}, {}),
        ({"1.5": 5, "15": 50, "1250.0": 1, "1250,0": 1}, {}),
        ({"C": 50, "C++": 5, "C#": 4, "C-": 3}, {}),
        ({"grade": 50, "grade+": 5}, {}),
        ({"level 1": 50, "level -1": 5}, {}),
        ({"+": 1, "-": 1}, {}),
        ({"Blue": 1, "blue": 1, "red": 9}, {"blue": "Blue"}),
        ({"blue": 1, "Blue": 1, "BLUE": 1, "red": 9}, {"Blue": "BLUE", "blue": "BLUE"}),
    ],
)
def test_names_that_are_probably_misspelt(counts, expected):
    assert find_misspelt(counts) == expected


@given(st.text("abcdef", min_size=5, max_size=12), st.data())
def test_any_single_mistake_in_a_rare_name_is_found(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("uvw"))
    kinds = [name[:place] + letter + name[place + 1 :], name[:place] + letter + name[place:]]
    for wrong in kinds:
        assert find_misspelt({name: 30, wrong: 2}) == {wrong: name}
