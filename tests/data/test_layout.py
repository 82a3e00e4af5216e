"""What is recognised of a folder that was not meant to be opened as it is, and what is proposed instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import make_folder, picture
from test_flat_folders import number_images, write_images

import vitrail
from vitrail.data.open import open_data, propose_data
from vitrail.errors import DataError, LayoutError


def refuse(data: Path) -> LayoutError:
    with pytest.raises(LayoutError) as error:
        open_data(data)
    return error.value


@pytest.mark.parametrize(
    ("form", "labels_from"),
    [
        ("{}_{:03}.jpg", "NAME_*"),
        ("{}-{}.jpg", "NAME-*"),
        ("{} ({}).jpg", "NAME (*)"),
        ("{}.{}.jpg", "NAME.*"),
        ("{} {}.jpg", "NAME *"),
        ("{}{}.jpg", r"^(.*\D)\d+\."),
    ],
)
def test_common_forms_are_proposed(form, labels_from, tmp_path):
    folder = write_images(tmp_path / "flat", number_images(form, ("cat", "great-dane")))
    error = refuse(folder)
    assert (error.data, error.labels_from) == (str(folder), labels_from)
    assert "2 classes, such as cat (6)" in str(error)
    assert open_data(error.data, labels_from=error.labels_from).classes == ("cat", "great-dane")


@pytest.mark.parametrize(
    "names",
    [
        number_images("{}_{:04}.jpg", ("IMG", "DSC")),
        number_images("{}_{}.jpg", ("IMG_20200101", "IMG_20200102")),
        number_images("{}-{:02}.jpg", ("2020-01", "2020-02")),
        number_images("{}_{}.jpg", ("cat",)),
        number_images("{}_{}.jpg", ("cat", "dog"), 1),
        ["cat.jpg", "dog.jpg", "emu.jpg"],
        [*number_images("{}_{}.jpg"), *(f"other {letter}.jpg" for letter in "abc")],
    ],
    ids=["cameras", "dates of a camera", "dates", "one class", "one image of each", "no numbers", "a fifth is other"],
)
def test_names_that_tell_no_classes_are_no_proposal(names, tmp_path):
    with pytest.raises(DataError, match="labels_from") as error:
        open_data(write_images(tmp_path / "flat", names))
    assert not isinstance(error.value, LayoutError)


def test_the_wrong_level_of_pets(tmp_path):
    """images/ and annotations/ are not two classes; the images there have the classes in their names."""
    write_images(tmp_path / "images", number_images("{}_{}.jpg"))
    write_images(tmp_path / "annotations" / "trimaps", number_images("{}_{}.png", count=9))
    error = refuse(tmp_path)
    assert (error.data, error.labels_from) == (str(tmp_path / "images"), "NAME_*")


@pytest.mark.parametrize("beside", ["annotations", "labels", "masks", "Annotations"])
def test_the_classes_lie_below_images(beside, tmp_path):
    make_folder(tmp_path / "images", {"cat": 2, "dog": 2})
    (tmp_path / beside).mkdir()
    error = refuse(tmp_path)
    assert (error.data, error.labels_from) == (str(tmp_path / "images"), None)
    assert open_data(error.data).classes == ("cat", "dog")


def test_splits_below_images_are_proposed_whole(tmp_path):
    for split in ("train", "val"):
        make_folder(tmp_path / "images" / split, {"cat": 2, "dog": 2})
    (tmp_path / "annotations").mkdir()
    assert refuse(tmp_path).data == str(tmp_path / "images")


def test_splits_by_other_names(tmp_path):
    make_folder(tmp_path / "training_set", {"cat": 4, "dog": 4})
    make_folder(tmp_path / "test_set", {"cat": 2, "dog": 2})
    error = refuse(tmp_path)
    assert error.data == str(tmp_path / "training_set")
    assert "rename" in str(error)


def test_flat_splits_are_proposed_together(tmp_path):
    write_images(tmp_path / "train", number_images("{}.{}.jpg"))
    write_images(tmp_path / "test", ["1.jpg", "2.jpg"])
    error = refuse(tmp_path)
    assert (error.data, error.labels_from) == (str(tmp_path), "NAME.*")
    assert len(open_data(error.data, "train", labels_from=error.labels_from)) == 12


def test_parts_without_any_classes(tmp_path):
    write_images(tmp_path / "train2017", ["000001.jpg", "000002.jpg"])
    write_images(tmp_path / "val2017", ["000001.jpg"])
    (tmp_path / "annotations").mkdir()
    assert refuse(tmp_path).data is None


@pytest.mark.parametrize("classes", [("train", "car"), ("mask", "no_mask"), ("images", "cat"), ("0", "1"), ("cat",)])
def test_classes_that_may_be_meant_are_opened(classes, tmp_path, caplog):
    make_folder(tmp_path / "photos", dict.fromkeys(classes, 2))
    assert open_data(tmp_path / "photos").classes == tuple(sorted(classes))
    assert not caplog.text


def test_one_class_that_holds_the_classes(tmp_path, caplog):
    make_folder(tmp_path / "photos" / "stuff", {"cat": 3, "dog": 3})
    (tmp_path / "photos" / "papers").mkdir()  # a class folder without any image
    open_data(tmp_path / "photos")
    assert str(tmp_path / "photos" / "stuff") in caplog.text
    proposed = propose_data(tmp_path / "photos")
    assert proposed is not None
    assert proposed.data == str(tmp_path / "photos" / "stuff")
    for train in (
        lambda: vitrail.finetune(tmp_path / "photos", quick=True, on_event=print),
        lambda: vitrail.finetune(tmp_path / "photos" / "stuff" / "..", on_event=print),
    ):
        with pytest.raises(LayoutError):
            train()
    assert propose_data(tmp_path / "photos" / "stuff") is None


def test_classes_that_hold_the_same_folders(tmp_path, caplog):
    for name in ("indoors", "outdoors"):
        make_folder(tmp_path / "photos" / name, {"cat": 2, "dog": 2})
    assert open_data(tmp_path / "photos").classes == ("indoors", "outdoors")  # perhaps they are
    assert str(tmp_path / "photos" / "indoors") in caplog.text
    open_data(tmp_path / "photos")
    assert caplog.text.count("the same folders") == 1


def test_a_link_in_a_circle_ends(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "up").symlink_to(tmp_path)
    (tmp_path / "images" / "a.png").write_bytes(picture(0))
    assert refuse(tmp_path).data is None


def test_a_folder_with_several_tables_names_them(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(picture(0))
    for name in "fedcbag":
        (tmp_path / f"{name}.csv").write_text("image,tags\nimages/0.png,x|y\n")
    with pytest.raises(DataError) as caught:
        vitrail.check_data(tmp_path)
    assert "give the table that tells what to learn: " + ", ".join(f"{tmp_path}/{n}.csv" for n in "abcde") in str(
        caught.value
    )
    assert str(caught.value).endswith("(or one of 2 more)")
