"""Rows of tables: what is wrong with one is named with its file and line, and loses nothing else."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import picture
from task_tables import write_csv

from vitrail.data.open import add_task, list_splits, open_data
from vitrail.data.tables import row_table, text_tables
from vitrail.data.tables.listed_rows import to_cell
from vitrail.data.tables.recognise import inspect_column
from vitrail.data.tables.text_tables import read_text_table
from vitrail.data.task_data import open_annotated, recognise_data, recognise_task
from vitrail.errors import DataError
from vitrail.tasks.cells import read_number, split_tags

ANY_FOLDER = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
PLAIN_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def read_bad_rows(path: Path, **options) -> dict[int, str]:
    source, _ = open_annotated(add_task(path, **options))
    return {index: reason.removeprefix(f"{path.parent}{os.sep}") for index, reason in source.broken_rows.items()}


def test_bad_rows_of_a_csv_of_tags(tmp_path):
    rows = ["0.png,a|b", "1.png,a,b", "2.png", ",a", '3.png,"[""a"', '4.png,"[""b""]"', "5.png,", '"6\n.png",b']
    path = write_csv(tmp_path, "image,tags", rows, 6)
    assert read_bad_rows(path, task="tags") == {
        1: "rows.csv, line 3: there are 3 cells, and 2 columns; a cell with a comma in it needs quotes",
        2: "rows.csv, line 4: there are 1 cells, and 2 columns",
        3: "rows.csv, line 5: there is no image",
        4: 'rows.csv, line 6: \'["a\' is no list in JSON: write ["a", "b"], or a|b',
    }
    source = open_data(add_task(path, "tags"))
    assert source.task.names == ("a", "b")
    assert source.targets(0, 8)["tags"][[0, 5, 6, 7]].tolist() == [[1, 1], [0, 1], [0, 0], [0, 1]]
    assert source.read(0).content == picture(0)
    assert source.name(3).endswith("rows.csv, line 5")


def test_bad_rows_of_numbers_and_levels(tmp_path):
    rows = ["0.png,1.5", "1.png,many", "2.png,", "3.png,inf", "4.png,1e99", "5.png,-2", "6.png,3"]
    path = write_csv(tmp_path, "image,age", rows)
    bad = read_bad_rows(path, task="numbers")
    assert list(bad) == [1, 3, 4]
    assert bad[1] == "rows.csv, line 3: age is 'many', which is no number"
    numbers = open_data(add_task(path, "numbers")).targets(0, 7)["numbers"].ravel()
    assert numbers[[0, 5]].tolist() == [1.5, -2]
    assert np.isnan(numbers[2])


def test_bad_records(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        '{"image": "0.png", "tags": ["a"]}',
        "{",
        "[1]",
        "",
        '{"tags": ["b"]}',
        '{"image": 7, "tags": []}',
        '{"image": "a\\u0000b", "tags": []}',
        '{"image": "\\ud800.png", "tags": ["\\ud800"]}',
        '{"image": "1.png", "tags": {"a": 1}}',
        '{"image": "2.png", "tags": [["a"]]}',
        "[" * 5000 + "]" * 5000,
        '{"image": "3.png", "tags": "a|c", "new": 1}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    bad = read_bad_rows(path, task="tags")
    assert list(bad) == [1, 2, 3, 4, 5, 7, 8, 9]
    assert [bad[index].split(": ")[0] for index in (1, 3, 9)] == [f"rows.jsonl, line {line}" for line in (2, 5, 11)]
    assert open_data(add_task(path, "tags")).task.names == ("?", "a", "c")


def test_long_lines_and_large_files(tmp_path, monkeypatch):
    monkeypatch.setattr(text_tables, "MOST_LINE_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    record = json.dumps({"image": "0.png", "tags": ["a"]})
    path.write_text("\n".join([record, json.dumps({"image": "1.png", "tags": ["a" * 300]}), record]))
    assert list(read_bad_rows(path, task="tags").items()) == [
        (1, "rows.jsonl, line 2: the line is longer than 100 bytes")
    ]
    monkeypatch.setattr(row_table, "MOST_CELLS", 5)
    wide = write_csv(tmp_path, "image,a,b", ["0.png,1,2"] * 3)
    with pytest.raises(DataError, match="more than 5 cells: name the columns"):
        recognise_task(wide)
    assert recognise_task(add_task(wide, "labels", "a")).names == ("1",)
    monkeypatch.setattr(row_table, "MOST_COLUMNS", 1)
    with pytest.raises(DataError, match="more than 1 columns"):
        recognise_task(wide)
    monkeypatch.setattr(text_tables, "MOST_JSON_BYTES", 10)
    (tmp_path / "rows.json").write_text(f"[{record}]")
    with pytest.raises(DataError, match="more than the 10 allowed"):
        recognise_task(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", b"", "it needs one of image"),
        ("a.csv", b"image,tags\n", "lists no images"),
        ("a.csv", b"name,tags\nx,y\n", "it needs one of image"),
        ("a.csv", b"image,tags,tags\nx,y,z\n", "two columns 'tags'"),
        ("a.csv", b"image,tags\nx,\xff\n", "a.csv, line 2 cannot be read, for it is not UTF-8: save it as CSV UTF-8"),
        ("a.csv", "image,tags\nx,a\n".encode("utf-16"), "line 1 cannot be read, for it is not UTF-8"),
        ("a.csv", b"image;tags\nx;a\n", "a.csv, line 1: the cells are separated by ';': save it with commas"),
        ("a.csv", b'"image";"tags"\n"x";"a"\n', "line 1: the cells are separated by ';'"),
        ("a.csv", b"image\ttags\nx\ta\n", "line 1: the cells are separated by tabs: save it with commas"),
        ("a.csv", b"image,tags\nx," + b"y" * 200_000, "line 2: field larger"),
        ("a.csv", b"image\nx\n", "no column beside the images"),
        ("a.csv", b"image,tags\n,\n,\n", "no row can be used; line 2: there is no image"),
        ("a.json", b"{}", "no list of records"),
        ("a.json", b"[", "is no JSON"),
        ("a.json", b"[" * 100_000, "is no JSON"),
        ("a.json", b'[{"x": 1}]', "no record with one of image"),
        ("a.jsonl", b'{"x": 1}\n', "no record with one of image"),
        ("a.jsonl", b"", "lists no images"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=error):
        open_data(add_task(tmp_path / name, "tags"))


@pytest.mark.parametrize("options", [{"task": "numbers"}, {"labels": "age"}])
def test_numbers_with_commas_say_how_to_write_them(tmp_path, options):
    path = write_csv(tmp_path, "image,age", ["0.png,7", '1.png,"12,5"', '2.png,"1,234"'], 3)
    with pytest.raises(DataError, match=r"rows\.csv, line 3: age is '12,5': write 12\.5$"):
        recognise_task(add_task(path, **options))
    with pytest.raises(DataError, match=r"line 3: age is '12,5': write 12\.5$"):
        recognise_task(path)
    rows = [f"{i}.png,{i}.5" for i in range(3, 30)]
    path = write_csv(tmp_path, "image,age", ['0.png,"12,5"', '1.png,"1,234"', '2.png,"1,2,3"', *rows])
    assert list(read_bad_rows(path, **options).values()) == [
        "rows.csv, line 2: age is '12,5': write 12.5",
        "rows.csv, line 3: age is '1,234': write 1.234 or 1234",
        "rows.csv, line 4: age is '1,2,3', which is no number",
    ]
    path = write_csv(tmp_path, "image,label", ['0.png,"1,2"', '1.png,"2,3"'])
    assert recognise_task(path).names == ("1,2", "2,3")  # perhaps two classes


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_no_table(tmp_path):
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(DataError):
        open_data(add_task(tmp_path / "rows.csv", "tags"))


def test_splits_of_rows(tmp_path):
    rows = ["0.png,a,train", "1.png,b,valid", "2.png,a", "3.png,b,train"]
    path = write_csv(tmp_path, "image,tags,split", rows)
    data = add_task(path, "tags")
    assert list_splits(data) == ("train", "val")
    assert [len(open_data(data, split)) for split in ("train", "val")] == [3, 1]  # the broken row is of the first
    path = write_csv(tmp_path, "image,label,split", ["0.png,a,train", "1.png,b,other"])
    with pytest.raises(DataError, match="'other', of no split"):
        list_splits(path)


def test_paths_are_relative_to_the_table(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    (tmp_path / "0.png").write_bytes(picture(0))
    path = write_csv(tmp_path / "tables", "image,tags", ["../0.png,a", f"{tmp_path / '0.png'},b"])
    source = open_data(add_task(path, "tags"))
    assert source.read(0).content == source.read(1).content == picture(0)
    monkeypatch.chdir(tmp_path)
    path = write_csv(tmp_path / "tables", "image,tags", ["0.png,a"])
    with pytest.raises(DataError, match="relative to the folder of the CSV"):
        open_data(add_task(path, "tags"))


def test_a_changed_table_is_read_again(tmp_path):
    path = write_csv(tmp_path, "image,tags", ["0.png,a"])
    assert recognise_task(path).names == ("a",)
    path = write_csv(tmp_path, "image,tags", ["0.png,a|b"])
    assert recognise_task(path).names == ("a", "b")


def test_targets_of_a_program_become_plain_values():
    cell = to_cell({"a": np.float32(1.5), "b": np.array([1, 2]), "c": {"y", "x"}, 4: (np.str_("z"), None)})
    assert json.dumps(cell) == '{"a": 1.5, "b": [1, 2], "c": ["x", "y"], "4": ["z", null]}'


def test_spaces_around_names_of_columns_and_splits(tmp_path):
    path = write_csv(tmp_path, " image, label , split", ["0.png,a,train ", "1.png,b, val"], 2)
    data = recognise_data(path)
    assert data.task.names == ("a", "b")
    assert list_splits(data) == ("train", "val")
    write_csv(tmp_path, "image,tags, tags", ["0.png,a,b"])
    with pytest.raises(DataError, match="two columns 'tags'"):
        recognise_task(path)


def test_rows_without_a_split_are_bad(tmp_path):
    rows = ["0.png,a,train", "1.png,b,", "2.png,c,extra", "3.png,a|d,val"]
    path = write_csv(tmp_path, "image,tags,split", rows, 4)
    assert read_bad_rows(path, task="tags") == {
        1: "rows.csv, line 3: there is no split, and other rows have one: write train or val or test",
        2: "rows.csv, line 4: the split is 'extra': write train or val or test",
    }
    data = add_task(path, "tags")
    assert recognise_task(data).names == ("a", "d")
    assert [len(open_data(data, split)) for split in list_splits(data)] == [3, 1]
    write_csv(tmp_path, "image,tags,split", ["0.png,a|b,one", "1.png,b,two"])
    assert list_splits(data) == ()


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (['1.png,"a', "2.png,b", "3.png,c"], "line 3: a quote that begins here is not closed"),
        (['1.png,"a', "2.png,b", '3.png,"c"'], "line 3: a quote that begins here is not closed"),
        (['1.png,"a', *["2.png,b"] * 100, '3.png,c"'], "line 3: a quote that begins here goes on for more than 100"),
        (['1.png,"a', *["2.png," + "b" * 1000] * 200], "line 3: a quote that begins here is not closed"),
        (['1.png,"a"b'], "line 3: "),
    ],
)
def test_a_stray_quote_swallows_no_rows(tmp_path, rows, error):
    path = write_csv(tmp_path, "image,tags", ["0.png,a|b", *rows])
    with pytest.raises(DataError, match=rf"rows\.csv, {error}"):
        recognise_task(path)


@pytest.mark.parametrize("cell", [math.nan, None, " ", [], [" ", math.nan], "|"])
def test_nothing_is_no_tag(cell):
    assert split_tags(cell) == []


def test_numbers_have_no_underscores():
    assert read_number("x", "1000") == 1000
    with pytest.raises(DataError, match="'1_000', which is no number"):
        read_number("x", "1_000")


@ANY_FOLDER
@given(st.lists(st.tuples(PLAIN_TEXT.filter(str.strip), PLAIN_TEXT), min_size=1, max_size=8))
def test_a_csv_gives_back_what_was_written(tmp_path, rows):
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "word"), *rows])
    table = read_text_table(tmp_path / "rows.csv")
    images = table.open_images()
    assert table.columns == {"word": [word for _, word in rows]}
    assert [images.stored_name(index) for index in range(len(table))] == [name for name, _ in rows]
    assert not table.problems


@ANY_FOLDER
@given(st.lists(JSON_VALUES, min_size=1, max_size=6))
def test_any_json_is_a_row_or_a_reason(tmp_path, cells):
    """Nothing but a DataError comes out, and good rows stay whatever lies beside them."""
    records = [{"image": "good.png", "tags": ["good"]}, *({"image": "x.png", "tags": cell} for cell in cells)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, *cells]))
    source = open_data(add_task(path, "tags"))
    assert len(source) == len(records) + len(cells)
    assert 0 not in source.broken_rows
    assert source.targets(0, 1)["tags"][0].tolist() == [float(name == "good") for name in source.task.names]
    for kind in ("labels", "numbers", "levels", "attributes"):
        try:
            open_data(add_task(path, kind, "tags"))
        except Exception as error:
            assert type(error).__name__ in ("DataError", "ConfigError"), error  # noqa: PT017


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20))
def test_columns_of_numbers_are_recognised_as_text_too(numbers):
    as_text, as_numbers = (inspect_column("x", cells) for cells in ([str(n) for n in numbers], numbers))
    assert as_text == as_numbers
    assert as_text.filled == len(numbers)
    assert as_text.has_fractions == any(n != round(n) for n in numbers if abs(n) <= 1e30)


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c d"]), max_size=3), min_size=1, max_size=10))
def test_lists_are_tags_however_they_are_written(cells):
    forms = [cells, [json.dumps(cell) for cell in cells]]
    assert all(inspect_column("x", form).is_tags for form in forms)


def test_a_tag_with_the_sign_between_tags_in_it_is_a_bad_row(tmp_path):
    cells = ['["a|b", "c"]', '["c"]', '["a"]']
    lines = [json.dumps({"image": f"{n}.png", "tags": json.loads(cell)}) for n, cell in enumerate(cells)]
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = open_data(recognise_data(tmp_path / "rows.jsonl"))
    assert source.task.names == ("a", "c")
    assert list(source.broken_rows) == [0]
    assert "rows.jsonl, line 1: the tag 'a|b' holds |, which stands between tags" in source.broken_rows[0]
