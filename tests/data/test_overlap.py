"""`data check --against`: what another data set has too is named, shown and listed, and a pack leaves it out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import run_here
from natural import CHANGES, natural, save_natural
from PIL import Image

import vitrail
from vitrail.data.check import overlap_page
from vitrail.data.open import open_data
from vitrail.data.packing.pack import pack_data
from vitrail.errors import ConfigError, DataError


def check(data, against, **options):
    return vitrail.check_data(data, against=against, workers=1, on_event=lambda kind, values: None, **options)


def find(data, against, **options) -> dict[str, tuple[str, str]]:
    """The file names of what repeats, with what and how."""
    repeats = check(data, against, **options).overlap.repeats()
    return {Path(each.name).name: (Path(each.other_name).name, each.kind) for each in repeats}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Training images 0 to 11 of two classes, of which a test set has 2, 3, 8 and 9 in other forms."""
    root = tmp_path_factory.mktemp("overlap")
    save_natural(root / "photos/train/ant", range(6))
    save_natural(root / "photos/train/bee", range(6, 12))
    save_natural(root / "photos/val/ant", range(20, 22))
    save_natural(root / "photos/val/bee", range(8, 9))
    save_natural(root / "tests/x", range(50, 55))
    natural(2).save(root / "tests/x/same.bmp")
    CHANGES["all"](natural(3)).save(root / "tests/x/all.jpg")
    CHANGES["cropped"](natural(9)).save(root / "tests/x/cropped.webp", lossless=True)
    natural(8).save(root / "tests/x/again.webp", lossless=True)
    return root / "photos", root / "tests"


@pytest.fixture
def here(capsys, monkeypatch):
    return lambda *arguments: run_here(capsys, monkeypatch, *arguments)


EXPECTED = {
    "002.png": ("same.bmp", "exact"),
    "003.png": ("all.jpg", "mirrored"),
    "008.png": ("again.webp", "exact"),
    "009.png": ("cropped.webp", "near"),
}


def test_what_another_data_set_has_too(photos):
    report = check(*photos)
    assert report.failed
    assert report.counts["repeated"] == len(report.overlap) == 5  # 008 is in both splits
    assert {finding.split for finding in report.findings("repeated")} == {"train", "val"}
    assert find(*photos, split="train") == EXPECTED
    assert report.overlap.counts == {"exact": 3, "near": 1, "mirrored": 1}
    assert (report.overlap.other_images, report.overlap.other_repeated) == (9, 4)
    for repeat in report.overlap.repeats():
        assert (repeat.similarity == 1) == (repeat.kind == "exact")
        assert 0.65 <= repeat.similarity <= 1


def test_nothing_is_repeated_and_nothing_is_said(photos, tmp_path):
    save_natural(tmp_path / "others/x", range(60, 63))
    report = check(photos[0], tmp_path / "others", split="train", names=tmp_path / "names.txt")
    assert (len(report.overlap), report.failed) == (0, False)
    assert (tmp_path / "names.txt").read_text() == ""
    assert report.to_dict()["against"]["repeats"] == []
    assert "against" not in vitrail.check_data(photos[0], workers=1).to_dict()


def test_a_split_against_another_of_the_same_data(photos):
    assert find(photos[0], photos[0], split="train", against_split="val") == {"008.png": ("008.png", "exact")}
    for options in ({}, {"split": "train"}, {"split": "train", "against_split": "train"}):
        with pytest.raises(ConfigError, match="itself"):
            check(photos[0], photos[0], **options)
    with pytest.raises(ConfigError, match="itself"):
        check(photos[0], f"{photos[0]}/../photos")


def test_pixels_in_memory_are_compared_with_files(photos):
    pixels = torch.from_numpy(np.array(natural(2))).permute(2, 0, 1)
    grey = torch.randint(0, 256, (1, 30, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    repeats = list(check([(pixels, 0), (grey, 1), (grey, 1)], photos[1]).overlap.repeats())
    assert [(each.name, each.kind) for each in repeats] == [("sample 0", "exact")]
    image = Image.fromarray(grey[0].numpy())
    assert [each.kind for each in check([(grey, 0)], [(image, 0)]).overlap.repeats()] == ["exact"]


def test_uniform_images_match_by_their_pixels_alone():
    black, white = (np.full((40, 40, 3), value, np.uint8) for value in (0, 255))
    larger = np.zeros((60, 60, 3), np.uint8)
    report = check([(black, 0), (white, 1)], [(black, 0), (larger, 0)])
    assert [(each.name, each.kind) for each in report.overlap.repeats()] == [("sample 0", "exact")]
    assert report.overlap.flat == 2
    assert any("uniform" in note for note in report.notes)


def test_small_digits_look_alike_and_are_compared_by_pixels_alone():
    """Of 8×8 pixels most zeros would be near duplicates of each other."""
    digits = open_data("digits")
    images = [(digits.read(index).content, 0) for index in range(200)]
    assert len(check(images[:100], images[100:]).overlap) == 0
    assert len(check(images[:100], images[50:150]).overlap) == 50


def test_the_other_data_may_be_broken_and_that_is_said(photos, tmp_path):
    save_natural(tmp_path / "others/x", range(2, 4))
    (tmp_path / "others/x/broken.png").write_bytes(b"nothing")
    report = check(photos[0], tmp_path / "others", split="train")
    assert (report.overlap.other_unreadable, len(report.overlap)) == (1, 2)
    assert any("1 image of the data to compare with" in note for note in report.notes)
    assert report.counts["unreadable"] == 0, "they are not the data's own"


def test_progress_is_told_for_all_three_passes(photos):
    told = {}
    vitrail.check_data(
        photos[0], against=photos[1], workers=1, on_event=lambda kind, values: told.update({values["task"]: values})
    )
    assert {task: (values["done"], values["total"]) for task, values in told.items()} == {
        "checking": (15, 15),
        "reading the others": (9, 9),
        "comparing": (15, 15),
    }


# The command, the page and the list.


def test_the_command_from_check_to_pack_and_back(photos, tmp_path, here):
    names, page, out = tmp_path / "names.txt", tmp_path / "pairs.html", tmp_path / "report.json"
    options = ("--against", photos[1], "--workers", 1)
    code, lines, told = here("check", photos[0], *options, "--names", names, "--page", page, "--out", out)
    assert code == 1
    assert sum(line.startswith("repeated\t") for line in lines.splitlines()) == 5
    assert "against: 5 of 15 images repeat 4 of 9 (3 exact, 1 near, 1 mirrored)" in told
    folders = {"002.png": "train/ant", "003.png": "train/ant", "008.png": "train/bee", "009.png": "train/bee"}
    expected = {f"{folder}/{name}" for name, folder in folders.items()} | {"val/bee/008.png"}
    assert set(names.read_text().splitlines()) == expected
    assert len(json.loads(out.read_text())["against"]["repeats"]) == 5
    assert here("check", photos[0], "--names", names)[0] == 2

    with pytest.raises(DataError, match="nothing would be left"):
        pack_data(
            photos[0],
            tmp_path / "none",
            split="val",
            without=_write(tmp_path, "val/ant/020.png\nval/ant/021.png\nval/bee/008.png"),
        )
    code, _, told = here("pack", photos[0], tmp_path / "clean", "--without", names, "--workers", 1)
    assert code == 0
    assert "5 samples left out" in told
    assert len(open_data(tmp_path / "clean", "train")) == 8
    assert here("check", tmp_path / "clean", *options)[0] == 0
    assert find(tmp_path / "clean", photos[1]) == {}


def test_the_page_shows_the_pairs_the_least_similar_first(photos, tmp_path, monkeypatch):
    folder = tmp_path / "a <b>&"
    save_natural(folder / "x", range(2, 4))
    check(folder, photos[1], page=tmp_path / "pairs.html")
    page = (tmp_path / "pairs.html").read_text()
    assert page.count("<figure>") == 2
    assert page.count('src="data:image/') == 4
    assert page.index("003.png") < page.index("002.png")
    assert str(tmp_path) not in page, "where the data lies is nobody's business"
    assert "<b>" not in page
    monkeypatch.setattr(overlap_page, "MOST_SHOWN", 1)
    check(folder, photos[1], page=tmp_path / "one.html")
    assert (tmp_path / "one.html").read_text().count("<figure>") == 1


def test_a_list_of_images_in_memory_is_of_their_hashes(photos, tmp_path):
    data = [(np.array(natural(seed)), seed % 2) for seed in range(6)]
    check(data, photos[1], names=tmp_path / "names.txt")
    assert len((tmp_path / "names.txt").read_text().splitlines()) == 2
    packed = pack_data(data[::-1], tmp_path / "out", without=tmp_path / "names.txt", workers=1)
    assert (packed.samples, packed.without) == (4, 2)
    assert find(tmp_path / "out", photos[1]) == {}


@pytest.mark.parametrize("option", [{"page": "a.html"}, {"names": "a.txt"}, {"against_split": "test"}])
def test_options_that_need_other_data(photos, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="against"):
        vitrail.check_data(photos[0], **option)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_told_before_anything_is_read(photos, tmp_path):
    for option in ("page", "names"):
        with pytest.raises(ConfigError, match=f"--{option} "):
            check(photos[0], photos[1], **{option: tmp_path / "absent/file"})


# Packing without what a list names.


def _write(folder: Path, text: str) -> Path:
    (folder / "list.txt").write_text(text)
    return folder / "list.txt"


def test_a_name_that_the_data_does_not_have_is_an_error_that_names_it(photos, tmp_path):
    listed = _write(tmp_path, "train/ant/001.png\ntrain/ant/nobody.png\n")
    with pytest.raises(ConfigError, match=r"1 name .*train/ant/nobody\.png"):
        pack_data(photos[0], tmp_path / "out", without=listed, workers=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="absent"):
        pack_data(photos[0], tmp_path / "out", without=tmp_path / "absent.txt", workers=1)


def test_names_of_other_splits_and_names_from_messages_are_known(photos, tmp_path):
    listed = _write(tmp_path, f"train/ant/001.png\r\n\n{photos[0] / 'train/ant/002.png'}\nval/bee/008.png\n")
    packed = pack_data(photos[0], tmp_path / "out", split="train", without=listed, workers=1)
    assert (packed.samples, packed.without) == (10, 2)
    assert packed.manifest["without"] == {"train": 2}


def test_another_list_is_another_pack(photos, tmp_path, monkeypatch):
    first = _write(tmp_path, "train/ant/001.png\nval/ant/020.png\n")
    out, options = tmp_path / "out", {"shard_mb": 0.03, "workers": 1}

    def stop(kind, values):
        if values.get("done"):
            raise KeyboardInterrupt

    for _ in range(2):  # begun, and gone on with
        with pytest.raises(KeyboardInterrupt):
            pack_data(photos[0], out, without=first, on_event=stop, **options)
    second = tmp_path / "second.txt"
    second.write_text("train/ant/002.png\nval/ant/020.png\n")
    for other in (second, None):
        with pytest.raises(ConfigError, match="without"):
            pack_data(photos[0], out, without=other, **options)
    first.write_text("val/ant/020.png\ntrain/ant/001.png\n")  # the order does not matter
    packed = pack_data(photos[0], out, without=first, **options)
    assert pack_data(photos[0], out, without=first, **options).manifest == packed.manifest
    for other in (second, None):
        with pytest.raises(ConfigError, match="without"):
            pack_data(photos[0], out, without=other, **options)


def test_a_pack_without_a_list_is_as_before(photos, tmp_path):
    """Also a pack from before there were lists."""
    manifest = pack_data(photos[0], tmp_path / "plain", workers=1).manifest
    assert "without" not in manifest
    assert "without" not in manifest["options"]
    empty = pack_data(photos[0], tmp_path / "empty", without=_write(tmp_path, ""), workers=1)
    assert empty.without == 0
    assert {shard["sha256"] for shard in empty.manifest["splits"]["train"]["shards"]} == {
        shard["sha256"] for shard in manifest["splits"]["train"]["shards"]
    }


def test_other_data_of_which_nothing_can_be_read(photos, tmp_path):
    report = check(photos[0], [(b"nothing", 0)], split="train")
    assert (len(report.overlap), report.overlap.other_unreadable) == (0, 1)


def test_the_other_data_needs_no_labels(tmp_path):
    from pictures import make_parquet, picture

    other = make_parquet(tmp_path / "other.parquet", [-1, 0, 2**40])
    report = check([(picture(0), 0), (picture(2), 1), (picture(5), 1)], other)
    assert [each.name for each in report.overlap.repeats()] == ["sample 0", "sample 1"]
    assert report.overlap.other_unreadable == 0
