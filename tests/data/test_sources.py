"""Where samples come from: every kind of source gives the same pictures, labels and names."""

from __future__ import annotations

import os
import pickle
import sys

import numpy as np
import pytest
import torch
from pictures import make_folder, make_parquet, make_tar, picture
from PIL import Image

import vitrail
from vitrail.data.open import list_splits, open_data
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import Source, hold_out, make_printable
from vitrail.data.transforms.decode import decode_image

LABELS = [0, 1, 2, 1, 0, 2, 2, 1, 0, 0]
NAMES = ("ant", "bee", "cow")


def as_csv(folder):
    folder.mkdir()
    rows = ["file_name,label"]
    for number, label in enumerate(LABELS):
        (folder / f"{number}.png").write_bytes(picture(number))
        rows.append(f"{number}.png,{NAMES[label]}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def as_tars(folder):
    make_tar(folder / "a.tar", LABELS[:6])
    make_tar(folder / "b.tar", LABELS[6:], first=6)
    (folder / "classes.txt").write_text("\n".join(NAMES))
    return folder


def as_parquet(folder):
    make_parquet(folder / "a.parquet", LABELS[:6], names=NAMES, rows=4)
    make_parquet(folder / "b.parquet", LABELS[6:], first=6, names=NAMES, rows=4)
    return folder


KINDS = {"csv": as_csv, "tar": as_tars, "parquet": as_parquet}


@pytest.fixture(params=[*KINDS, "list"])
def source(request, tmp_path) -> Source:
    if request.param == "list":
        return ListSource([(picture(number), label) for number, label in enumerate(LABELS)], NAMES)
    return open_data(KINDS[request.param](tmp_path / "data"))


def contents(source: Source) -> list[tuple[bytes, int]]:
    return [(sample.content, sample.label) for sample in map(source.read, range(len(source)))]


def test_every_source_gives_the_same_samples(source):
    assert len(source) == 10
    assert source.classes == NAMES
    assert source.num_classes == 3
    assert contents(source) == [(picture(number), label) for number, label in enumerate(LABELS)]
    assert source.labels(0, 10).tolist() == LABELS
    assert source.labels(3, 7).tolist() == LABELS[3:7]
    assert len({source.display_name(index) for index in range(10)}) == 10


def test_every_source_can_be_sent_to_another_process(source):
    source.read(3)  # with files open
    sent = pickle.dumps(source)
    if not isinstance(source, ListSource):
        assert len(sent) < 5000  # and not the table with it
    assert contents(pickle.loads(sent)) == contents(source)


def test_class_folders_in_order_and_nested(tmp_path):
    root = make_folder(tmp_path / "photos", {"dog": 3, "cat": 2})
    (root / "cat" / "deeper").mkdir()
    (root / "cat" / "deeper" / "x.PNG").write_bytes(picture(99))
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden.png").write_bytes(picture(98))
    (root / ".git").mkdir()
    source = open_data(root)
    assert source.classes == ("cat", "dog")
    assert source.labels(0, len(source)).tolist() == [0, 0, 0, 1, 1, 1]
    assert [source.name(i).removeprefix(f"{root}/") for i in range(3)] == [
        "cat/0000.png",
        "cat/0001.png",
        "cat/deeper/x.PNG",
    ]


def test_a_folder_that_changed_is_looked_through_again(tmp_path):
    root = make_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    assert len(open_data(root)) == 4
    (root / "dog" / "new.png").write_bytes(picture(50))
    assert len(open_data(root)) == 5
    (root / "dog" / "new.png").unlink()
    assert len(open_data(root)) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="names there are never bytes")
def test_names_that_are_hard_to_print(tmp_path):
    root = make_folder(tmp_path / "photos", {"cat": 1})
    for name in ("new\nline.png", "tab\t.png", "ünï 🐈.png", os.fsdecode(b"bad\xff.png")):
        (root / "cat" / name).write_bytes(picture(7))
    source = open_data(root)
    names = [source.name(index) for index in range(len(source))]
    assert all(name.isprintable() for name in names)
    assert {name.rpartition("/")[2] for name in names} == {
        "0000.png",
        r"new\nline.png",
        r"tab\t.png",
        "ünï 🐈.png",
        r"bad\xff.png",
    }
    assert all(source.read(index).content for index in range(len(source)))


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_in_a_circle_end(tmp_path):
    root = make_folder(tmp_path / "photos", {"cat": 2})
    (root / "cat" / "up").symlink_to(root)
    (root / "cat" / "self").symlink_to("self")
    (root / "cat" / "self.png").symlink_to("self.png")
    os.mkfifo(root / "cat" / "pipe.png")
    source = open_data(root)
    problems = []
    for index in range(len(source)):
        try:
            source.read(index)
        except vitrail.DataError as error:
            problems.append((source.name(index).rpartition("/")[2], str(error)))
    assert ("pipe.png", "not a file") in problems
    assert any(name == "self.png" and "cannot be read" in reason for name, reason in problems)
    assert len(source) < 10


# Splits


def test_parts_by_folder(tmp_path):
    make_folder(tmp_path / "photos" / "train", {"cat": 4, "dog": 4})
    make_folder(tmp_path / "photos" / "validation", {"cat": 1, "dog": 2}, first=100)
    data = tmp_path / "photos"
    assert list_splits(data) == ("train", "val")
    assert (len(open_data(data, "train")), len(open_data(data, "val"))) == (8, 3)
    with pytest.raises(vitrail.DataError, match="'test': it has train, val"):
        open_data(data, "test")
    with pytest.raises(vitrail.DataError, match="name one of train, val"):
        open_data(data)
    with pytest.raises(vitrail.ConfigError, match="'tarin', did you mean 'train'"):
        open_data(data, "tarin")


@pytest.mark.parametrize(
    "layout",
    ["{split}-00000-of-00001.parquet", "data/{split}-0.parquet", "{split}/0.parquet", "{split}-0.tar", "{split}/0.tar"],
)
def test_parts_by_file_name(layout, tmp_path):
    make = make_tar if layout.endswith("tar") else make_parquet
    for first, split in ((0, "train"), (50, "test")):
        make(tmp_path / layout.format(split=split), LABELS, first)
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    assert list_splits(tmp_path) == ("train", "test")
    test = open_data(tmp_path, "test")
    assert test.read(0).content == picture(50)
    assert test.classes == NAMES
    # A part of train is set aside only if asked for.
    assert len(open_data(tmp_path, "train")) == 10
    with pytest.raises(vitrail.DataError, match=r"no split 'val'.*holdout=0.1"):
        open_data(tmp_path, "val")
    val, train = (open_data(tmp_path, split, holdout=0.3) for split in ("val", "train"))
    assert sorted(contents(val) + contents(train)) == sorted((picture(n), label) for n, label in enumerate(LABELS))


def test_parts_in_a_csv(tmp_path):
    folder = as_csv(tmp_path / "data")
    lines = (folder / "labels.csv").read_text().splitlines()
    splits = ["split"] + ["train"] * 7 + ["val"] * 3
    (folder / "labels.csv").write_text("\n".join(f"{line},{split}" for line, split in zip(lines, splits, strict=True)))
    train, val = (open_data(folder / "labels.csv", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert train.classes == val.classes == NAMES


def as_released(root):
    """In Tiny-ImageNet's layout."""
    for name in ("n1", "n2"):
        (root / "train" / name / "images").mkdir(parents=True, exist_ok=True)
        (root / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t62\n")
        (root / "train" / name / "images" / f"{name}_0.JPEG").write_bytes(picture(1))
    for part in ("val", "test"):
        (root / part / "images").mkdir(parents=True)
        for number in range(3):
            (root / part / "images" / f"{part}_{number}.JPEG").write_bytes(picture(number))
    table = root / "val/val_annotations.txt"
    table.write_text("".join(f"val_{n}.JPEG\t{name}\t0\t32\t44\t62\n" for n, name in enumerate(["n2", "n1", "n2"])))
    return table


def test_tiny_imagenet_as_it_was_released(tmp_path):
    table = as_released(tmp_path)
    assert set(list_splits(tmp_path)) == {"train", "val"}
    training, validation = (open_data(tmp_path, split=part) for part in ("train", "val"))
    assert training.classes == validation.classes == ("n1", "n2")
    assert [sample.label for sample in map(validation.read, range(3))] == [1, 0, 1]
    assert contents(validation)[2][0] == picture(2)
    assert validation.identity(0) == "images/val_0.JPEG"
    for wrong, sentence in (
        ("val_0.JPEG\tn3\n", "'n3' has no folder"),
        ("val_0.JPEG\tn1\n../../passwd\tn1\n", r"line 2: '\.\./\.\./passwd' is not the name of a file in images"),
        ("nothing at all\n", "line 1: the class '' has no folder"),
    ):
        table.write_text(wrong)
        with pytest.raises(vitrail.DataError, match=sentence):
            open_data(tmp_path, split="val")


def test_what_is_set_aside_depends_on_names_not_on_where_or_how_many(tmp_path):
    """One image more does not send what was set aside into training."""
    for place in ("a", "b"):
        make_folder(tmp_path / place, {"cat": 100, "dog": 100})
    (tmp_path / "b" / "cat" / "0000a.png").write_bytes(picture(999))
    first, second = (open_data(tmp_path / place, "val") for place in ("a", "b"))
    names = [{source.identity(i) for i in range(len(source))} for source in (first, second)]
    assert len(names[0] ^ names[1]) <= 2
    assert len(names[0]) == 20


def test_what_is_set_aside_is_a_share_of_every_class_and_depends_on_the_seed(tmp_path):
    root = make_folder(tmp_path / "photos", {"cat": 100, "dog": 20, "emu": 2, "fox": 1})
    train, val = (open_data(root, split) for split in ("train", "val"))
    assert np.bincount(val.labels(0, len(val)), minlength=4).tolist() == [10, 2, 1, 0]
    names = [{source.name(i) for i in range(len(source))} for source in (train, val)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 123
    again = open_data(root, "val")
    assert {again.name(i) for i in range(len(again))} == names[1]
    other = open_data(root, "val", seed=1)
    assert {other.name(i) for i in range(len(other))} != names[1]
    with pytest.raises(vitrail.ConfigError, match=r"holdout = 1\.5"):
        hold_out(train, 1.5, 0)


# What is broken


def test_a_tar_that_is_not_whole_is_an_error_not_a_smaller_data_set(tmp_path):
    path = make_tar(tmp_path / "a.tar", LABELS)
    content = path.read_bytes()
    for length in (len(content) // 2, len(content) // 2 + 300, 100, 512 * 4):
        path.write_bytes(content[:length])
        with pytest.raises(vitrail.DataError, match=r"cut short|not a whole tar|damaged"):
            open_data(path)
    path.write_bytes(b"")
    with pytest.raises(vitrail.DataError, match="not a whole tar"):
        open_data(path)
    header = content.index(b"000005.png")
    for damaged in (
        content[:header] + b"\xff" * 300 + content[header + 300 :],
        content[:header] + bytes(512) + content[header + 512 :],
        content + content,
    ):
        path.write_bytes(damaged)
        with pytest.raises(vitrail.DataError, match="damaged"):
            open_data(path)


def test_a_sample_without_label_stays_in_the_count(tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.png", "1.png", "1.cls", "2.json", "2.png", "3.png", "3.cls"):
            (tmp_path / name).write_bytes(
                {"png": picture(int(name[0])), "cls": b"1" if name[0] == "1" else b"what", "son": b'{"label": 2}'}[
                    name[-3:]
                ]
            )
            tar.add(tmp_path / name, name)
    source = open_data(tmp_path / "a.tar")
    assert source.labels(0, 4).tolist() == [-1, 1, 2, -1]
    with pytest.raises(vitrail.DataError, match="has no label"):
        source.read(0)


def test_parquet_that_is_none_and_images_that_are_only_paths(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(vitrail.DataError, match="is not a Parquet file"):
        open_data(tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(vitrail.DataError, match=r"columns x:.*image"):
        open_data(tmp_path / "b.parquet")
    images = pa.array(
        [{"bytes": None, "path": "/etc/passwd"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    pq.write_table(pa.table({"image": images, "label": [0]}), tmp_path / "c.parquet")
    with pytest.raises(vitrail.DataError, match="path"):
        open_data(tmp_path / "c.parquet").read(0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a,b\n1,2\n", "has the columns a, b: it needs one of image"),
        ("", "has the columns none"),
        ("image,label\n", "lists no images"),
    ],
)
def test_a_csv_that_says_nothing(content, sentence, tmp_path):
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(vitrail.DataError, match=sentence):
        open_data(tmp_path / "x.csv")


def test_nothing_there(tmp_path):
    for data, sentence in [(tmp_path / "none", "there is no data set"), (tmp_path, "holds no images")]:
        with pytest.raises(vitrail.DataError, match=sentence):
            open_data(data)
    (tmp_path / "x.zip").touch()
    with pytest.raises(vitrail.DataError, match="is no data set"):
        open_data(tmp_path / "x.zip")


# The rest


def test_the_digits_are_always_there():
    digits = open_data("digits")
    assert (len(digits), digits.classes) == (1797, tuple("0123456789"))
    sample = digits.read(0)
    assert (sample.content.shape, sample.content.dtype, sample.label) == ((1, 8, 8), torch.uint8, 0)
    assert sample.content.max() <= 255
    assert max(int(digits.read(i).content.max()) for i in range(100)) == 255
    assert (len(open_data("digits", "train")), len(open_data("digits", "val"))) == (1618, 179)


def test_lists_take_what_people_have(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(1))
    pixels = decode_image(picture(1))
    image = Image.open(tmp_path / "a.png")
    forms = [tmp_path / "a.png", str(tmp_path / "a.png"), picture(1), image, np.array(image), pixels]
    source = open_data([(form, 4) for form in forms])
    assert source.num_classes == 5
    for index in range(len(forms)):
        content = source.read(index).content
        assert torch.equal(content if isinstance(content, torch.Tensor) else decode_image(content), pixels)
    for wrong, sentence in [
        (torch.zeros(3, 4, 4), "must be uint8"),
        (torch.zeros(3, 0, 4, dtype=torch.uint8), "must be uint8"),
        (np.zeros((1, 2, 3, 4), np.uint8), "must be uint8"),
        ({}, "a dict is no image"),
    ]:
        with pytest.raises(vitrail.DataError, match=sentence):
            open_data([(wrong, 0)]).read(0)
    for label in (3.7, None, 1 << 70):
        with pytest.raises(vitrail.DataError, match="whole number"):
            open_data([(picture(0), label)]).read(0)
    with pytest.raises(vitrail.DataError, match="not a pair"):
        open_data(["a.jpg"]).read(0)


def test_a_data_set_of_the_library_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    from vitrail.data.sources.hub import HubSource

    make_parquet(tmp_path / "a.parquet", LABELS, names=NAMES)
    rows = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "a.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    source = HubSource(rows, "hf:someone/animals/train")
    assert contents(source) == [(picture(number), label) for number, label in enumerate(LABELS)]
    assert (source.classes, source.labels(2, 5).tolist()) == (NAMES, LABELS[2:5])
    assert source.name(3) == "hf:someone/animals/train:3"


def test_missing_extras_are_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(vitrail.MissingExtraError, match=r"vitrail\[datasets\]"):
        open_data("hf:someone/animals", "train")
    make_parquet(tmp_path / "a.parquet", LABELS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(vitrail.MissingExtraError, match=r"vitrail\[parquet\]"):
        open_data(tmp_path / "a.parquet")


def test_shown():
    assert make_printable("a/b c.jpg") == "a/b c.jpg"
    assert make_printable("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    assert isinstance(open_data([]), ListSource)
    assert FileSource.block == 1


def test_shards_that_were_packed_bring_their_index(tmp_path, monkeypatch):
    from vitrail.data.packing.pack import pack_data
    from vitrail.data.sources import shards

    make_folder(tmp_path / "photos" / "train", {"cat": 6, "dog": 5})
    make_folder(tmp_path / "photos" / "val", {"cat": 2, "dog": 1}, first=50)
    pack_data(tmp_path / "photos", tmp_path / "out", shard_mb=0.01, workers=1)
    looked_through = sorted(contents(shards.TarSource(sorted((tmp_path / "out").glob("train*.tar")), ())))
    with monkeypatch.context() as patch:
        patch.setattr(shards, "scan_tar", lambda *_: pytest.fail("it was looked through"))
        train, val = (open_data(tmp_path / "out", split) for split in ("train", "val"))
    assert (len(train), len(val), train.classes) == (11, 3, ("cat", "dog"))
    assert len(train.paths) > 1
    assert sorted(contents(train)) == looked_through
    assert contents(pickle.loads(pickle.dumps(train))) == contents(train)
    # An index that is not about these files is not used; one that lies is found out.
    index = np.load(tmp_path / "out" / "index-train.npy")
    index["shard"] = 1000
    np.save(tmp_path / "out" / "index-train.npy", index)
    with pytest.raises(vitrail.DataError, match=r"index .*damaged"):
        open_data(tmp_path / "out", "train").read(0)
    np.save(tmp_path / "out" / "index-train.npy", np.zeros(11))
    assert sorted(contents(open_data(tmp_path / "out", "train"))) == looked_through
    (tmp_path / "out" / "dataset.json").write_text("[]")
    assert sorted(contents(open_data(tmp_path / "out", "train"))) == looked_through


# Found by people who tried


def test_splits_with_different_classes_agree_about_labels(tmp_path):
    make_folder(tmp_path / "train", {"a": 2, "b": 2, "c": 2})
    make_folder(tmp_path / "test", {"b": 2, "d": 1}, first=50)
    train, test = (open_data(tmp_path, split) for split in ("train", "test"))
    assert train.classes == test.classes == ("a", "b", "c", "d")
    assert train.labels(0, 6).tolist() == [0, 0, 1, 1, 2, 2]
    assert test.labels(0, 3).tolist() == [1, 1, 3]


def test_names_of_classes_that_changed_are_read_again(tmp_path):
    import tarfile

    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "0.cls").write_text("cow")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.png", "0.cls"):
            tar.add(tmp_path / name, name)
    for names, label in ((("ant", "cow"), 1), (("cow", "ant"), 0), (("ant",), -1)):
        (tmp_path / "classes.txt").write_text("\n".join(names) + "\n")
        source = open_data(tmp_path / "a.tar")
        assert (source.classes, source.labels(0, 1).tolist()) == (names, [label])


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_class_that_leads_back_to_the_root_counts_nothing_twice(tmp_path):
    root = make_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    (root / "all").symlink_to(".")
    assert len(open_data(root)) == 4


def test_a_folder_with_one_csv_is_that_csv_splits_and_all(tmp_path):
    folder = as_csv(tmp_path / "data")
    text = (folder / "labels.csv").read_text().splitlines()
    (folder / "labels.csv").write_text("\n".join([text[0] + ",split", *(f"{line},train" for line in text[1:])]))
    assert list_splits(folder) == ("train",)
    assert len(open_data(folder, "train")) == 10


def test_a_class_called_train_is_a_class(tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 2, "bus": 1})
    assert list_splits(root) == ()
    assert open_data(root).classes == ("bus", "train")


def test_what_lies_beside_splits_is_not_left_out_in_silence(tmp_path):
    make_folder(tmp_path / "a" / "train", {"cat": 1})
    make_folder(tmp_path / "a" / "extra", {"cat": 1})
    make_tar(tmp_path / "b" / "train-0.tar", LABELS)
    make_tar(tmp_path / "b" / "more.tar", LABELS)
    folder = as_csv(tmp_path / "c")
    text = (folder / "labels.csv").read_text().splitlines()
    rows = [text[0] + ",split", text[1] + ",train", text[2] + ",unknown"]
    (folder / "labels.csv").write_text("\n".join(rows))
    for name, sentence in (
        ("a", "'extra'"),
        ("b", "more.tar"),
        ("c", "'unknown'"),
    ):
        with pytest.raises(vitrail.DataError, match=sentence):
            open_data(tmp_path / name, "train")


def test_splits_anywhere_in_a_name_and_by_other_words(tmp_path):
    make_tar(tmp_path / "imagenet1k-train-0000.tar", LABELS)
    make_tar(tmp_path / "imagenet1k-validation-00.tar", LABELS[:4], first=50)
    assert list_splits(tmp_path) == ("train", "val")
    assert len(open_data(tmp_path, "validation")) == 4
    make_tar(tmp_path / "train-test.tar", LABELS)
    with pytest.raises(vitrail.DataError, match="train or test"):
        open_data(tmp_path, "train")


def test_a_mask_beside_an_image_is_not_the_image(tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, name in enumerate(("0.seg.png", "0.png", "0.alt.png", "0.cls")):
            (tmp_path / name).write_bytes(b"1" if name.endswith("cls") else picture(number))
            tar.add(tmp_path / name, name)
    (sample,) = contents(open_data(tmp_path / "a.tar"))
    assert sample == (picture(1), 1)


def test_images_in_no_class_folder(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(0))
    with pytest.raises(vitrail.DataError, match=r"1 image .*folder for each class"):
        open_data(tmp_path)


def test_parquet_groups_are_read_about_once_an_epoch(tmp_path, monkeypatch):
    """Though blocks and groups do not line up, and though few groups are kept."""
    from vitrail.data.order import Order
    from vitrail.data.sources import parquet

    monkeypatch.setattr(parquet, "MOST_CACHED", 200_000)
    for number in range(6):
        make_parquet(tmp_path / f"{number}.parquet", [0] * 45, first=45 * number, rows=10)
    source = open_data(tmp_path)
    assert 4 <= source.cached_groups < 25  # of 30 groups
    part, _ = hold_out(source, 0.1, 0)
    reads = []
    plain = source._read_columns
    monkeypatch.setattr(source, "_read_columns", lambda group, names: reads.append(group) or plain(group, names))
    for index in Order(len(part), 0, part.block, part.window)(np.arange(len(part)))[1]:
        part.read(int(index))
    assert len(reads) <= 2 * len(source.row_groups)


def test_more_parquet_files_than_may_be_open(tmp_path, monkeypatch):
    from vitrail.data.sources import parquet

    monkeypatch.setattr(parquet, "MOST_OPEN", 2)
    for number in range(5):
        make_parquet(tmp_path / f"{number}.parquet", [number], first=number)
    source = open_data(tmp_path)
    assert contents(source) == [(picture(n), n) for n in range(5)]
    assert len(source._files) == 2


def test_two_folders_for_one_split(tmp_path):
    for name in ("train", "val", "validation"):
        make_folder(tmp_path / name, {"cat": 1})
    with pytest.raises(vitrail.DataError, match="'val' and 'validation'"):
        open_data(tmp_path, "train")


def test_a_split_that_cannot_be_made(tmp_path):
    make_folder(tmp_path / "test", {"cat": 1})
    for split in ("train", "val"):
        with pytest.raises(vitrail.DataError, match=f"'{split}': it has test"):
            open_data(tmp_path, split, holdout=0.5)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"image,label\na.png\n", "line 2: there is no label"),
        (b"image,label\n,cat\n", "line 2: there is no image"),
        (
            b"image,label,split\n\xff\xfe,cat,train\n",
            "line 2 cannot be read, for it is not UTF-8: save it as CSV U",
        ),
        (b"image;label\na.png;cat\n", "x.csv, line 1: the cells are separated by ';': save it with commas"),
    ],
)
def test_a_csv_with_holes(content, sentence, tmp_path):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(vitrail.DataError, match=sentence):
        open_data(tmp_path / "x.csv")


def test_a_path_that_no_system_takes():
    with pytest.raises(vitrail.DataError, match="cannot be read"):
        ListSource([("a\0b.png", 0)]).read(0)


@pytest.mark.parametrize("label", [10**15, 2**64 - 1, 10**7])
def test_labels_that_are_too_large_to_be_labels(label, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"image": [picture(0), picture(1)], "label": pa.array([0, label], pa.uint64())})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_data(tmp_path / "a.parquet")
    with pytest.raises(vitrail.DataError, match="labels of 10,000,000 and more"):
        _ = source.num_classes
    with pytest.raises(vitrail.DataError, match=str(label)):
        source.read_checked(1)


def test_an_image_column_of_numbers(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": [1, 2], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(vitrail.DataError, match="the column image holds int64"):
        open_data(tmp_path / "a.parquet")


def test_parquet_with_labels_that_are_words_and_without_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = {"bytes": picture(0), "path": None}
    pq.write_table(pa.table({"image": [image], "label": ["cat"]}), tmp_path / "a.parquet")
    source = open_data(tmp_path / "a.parquet")
    assert source.labels(0, 1).tolist() == [-1]
    with pytest.raises(vitrail.DataError, match="label is 'cat'"):
        source.read(0)
    table = pa.table({"image": [image], "label": [1]})
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    assert len(open_data(tmp_path / "b.parquet")) == 0
    assert open_data(tmp_path / "b.parquet").labels(0, 0).tolist() == []
    pq.write_table(table, tmp_path / "c.parquet")
    content = bytearray((tmp_path / "c.parquet").read_bytes())
    content[4:60] = bytes(56)
    (tmp_path / "c.parquet").write_bytes(content)
    with pytest.raises(vitrail.DataError, match="cannot be read"):
        open_data(tmp_path / "c.parquet").read(0)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_tar_that_is_a_link_to_nothing(tmp_path):
    make_tar(tmp_path / "a.tar", LABELS)
    (tmp_path / "b.tar").symlink_to("nothing")
    with pytest.raises(vitrail.DataError, match="No such file"):
        open_data(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes in folders there")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.csv", "split/a.tar", "class/a.png"])
def test_pipes_and_devices_are_refused_in_every_source(name, kind, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    for data in (tmp_path, path):
        with pytest.raises(vitrail.DataError, match=r"not a file|neither a file|is no data set|holds no images"):
            open_data(data).read(0)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_images_and_tables_of_a_data_folder_may_be_links(tmp_path):
    real = as_csv(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for file in real.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    assert contents(open_data(tmp_path / "linked")) == contents(open_data(real))


def test_names_of_classes_that_are_no_text(tmp_path):
    as_tars(tmp_path / "data")
    (tmp_path / "data" / "classes.txt").write_bytes(b"a\xff\xfe")
    with pytest.raises(vitrail.DataError, match="no UTF-8 text"):
        open_data(tmp_path / "data")


def test_a_name_that_cannot_be_read_is_a_number(tmp_path):
    source = open_data(make_tar(tmp_path / "a.tar", LABELS))
    (tmp_path / "a.tar").unlink()
    assert source.display_name(3) == "sample 3"


def test_images_beside_the_class_folders_are_told(tmp_path, caplog):
    make_folder(tmp_path, {"a": 2, "b": 2})
    assert "are not used" not in caplog.text
    (tmp_path / "loose.png").write_bytes(picture(0))
    assert len(open_data(tmp_path)) == 4
    assert "1 images lie beside the folders of the classes, and are not used" in caplog.text
