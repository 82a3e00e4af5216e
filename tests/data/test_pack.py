"""Packing: the same bytes every time, however often it is stopped; every sample once, nothing lost in silence."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hostile import ORIENTATION, Deadly, encoded, make_hostile, picture, run_here
from PIL import Image, JpegImagePlugin

from vitrail.data.open import list_splits, open_data
from vitrail.data.order import Order
from vitrail.data.packing import pack_journal as unfinished
from vitrail.data.packing.pack import pack_data
from vitrail.data.sources.parquet import ParquetSource
from vitrail.data.sources.shards import RECORD_DTYPE, TarSource, scan_tar
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import ConfigError, DataError

KB = 0.001
"""In megabytes."""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitrail", "data", "pack", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def here(capsys, monkeypatch):
    """The command in this process, where torch is loaded already: its exit code, stdout and stderr."""
    return lambda *arguments: run_here(capsys, monkeypatch, "pack", *arguments)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def samples(source) -> Counter:
    """Content and class of everything in a source."""
    found = (source.read(index) for index in range(len(source)))
    return Counter((sample.content, source.classes[sample.label]) for sample in found)


def make_photos(folder: Path, train: int = 24, val: int = 6) -> Path:
    """Two splits, three classes, four formats."""
    kinds = [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("MPO", "jpg")]
    number = 0
    for split, count in (("train", train), ("val", val)):
        for name in ("ant", "bee", "naïve cat"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count // 3):
                kind, suffix = kinds[number % len(kinds)]
                path = folder / split / name / f"{index:03}.{suffix}"
                path.write_bytes(encoded(picture(number, 40 + number, 50), kind))
                number += 1
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("pack") / "photos")


@pytest.fixture(scope="module")
def packed(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed")
    return {
        form: (out / form, pack_data(photos, out / form, format=form, shard_mb=12 * KB, workers=2).manifest)
        for form in ("tar", "parquet")
    }


# What is written.


def test_the_files_of_a_pack(packed):
    tar, parquet = (sorted(path.name for path in packed[form][0].iterdir()) for form in ("tar", "parquet"))
    shards = [name for name in tar if name.endswith(".tar")]
    assert shards == [f"train-{n:06}.tar" for n in range(len(shards) - 2)] + ["val-000000.tar", "val-000001.tar"]
    assert len(shards) > 5
    beside = {"classes.txt", "dataset.json", "SHA256SUMS"}
    assert set(tar) - set(shards) == beside | {"index-train.npy", "index-val.npy"}
    total = sum(name.startswith("train") for name in parquet)
    assert total > 2
    assert [name for name in parquet if name.startswith("train")] == [
        f"train-{n:05}-of-{total:05}.parquet" for n in range(total)
    ]
    assert {name for name in parquet if not name.endswith(".parquet")} == beside


@pytest.mark.parametrize(("form", "kind"), [("tar", TarSource), ("parquet", ParquetSource)])
def test_every_sample_once_with_its_bytes_and_class(form, kind, photos, packed):
    out = packed[form][0]
    assert list_splits(out) == ("train", "val")
    for split in ("train", "val"):
        before, after = open_data(photos, split), open_data(out, split)
        assert isinstance(after, kind)
        assert after.classes == before.classes == ("ant", "bee", "naïve cat")
        assert samples(after) == samples(before)
        assert max(samples(after).values()) == 1


def test_tar_as_webdataset_has_it(packed):
    out = packed["tar"][0]
    number = 0
    for path in sorted(out.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                key, _, extension = image.name.partition(".")
                assert (key, label.name) == (f"{number:09}", f"{number:09}.cls")
                kind = Image.open(io.BytesIO(tar.extractfile(image).read())).format
                assert {"jpg": ("JPEG", "MPO"), "png": ("PNG",), "webp": ("WEBP",)}[extension].count(kind) == 1
                assert tar.extractfile(label).read() in (b"0", b"1", b"2")
                number += 1
            for member in members:
                facts = (member.mtime, member.uid, member.gid, member.uname, member.gname, member.mode, member.type)
                assert facts == (0, 0, 0, "", "", 0o644, tarfile.REGTYPE)
        assert path.read_bytes()[257:265] == b"ustar\x0000"
    assert number == 24


def test_the_index_is_what_a_look_through_the_shards_finds(packed):
    out, manifest = packed["tar"]
    for split in ("train", "val"):
        index = np.load(out / manifest["splits"][split]["index"], mmap_mode="r")
        assert index.dtype == RECORD_DTYPE
        shards = sorted(out.glob(f"{split}-*.tar"))
        found = [(number, *record) for number, path in enumerate(shards) for record in scan_tar(path, {})]
        assert index.tolist() == found
    assert packed["parquet"][1]["splits"]["train"]["index"] is None


def test_parquet_as_hugging_face_has_it(packed):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    path = next(packed["parquet"][0].glob("train-00000*"))
    schema = pq.read_schema(path)
    assert str(schema.field("image").type) == "struct<bytes: binary, path: string>"
    assert str(schema.field("label").type) == "int64"
    features = datasets.Features.from_arrow_schema(schema)
    assert features == datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["ant", "bee", "naïve cat"])
    )
    row = pq.read_table(path).slice(3, 1).to_pylist()[0]
    assert row["image"]["path"].startswith("000000003.")
    Image.open(io.BytesIO(row["image"]["bytes"])).load()


def test_parquet_comes_in_small_row_groups(tmp_path):
    images = [(encoded(picture(number % 7, 8, 8)), number % 3) for number in range(250)]
    pack_data(images, tmp_path / "out", format="parquet", shuffle=False, workers=1)
    file = pq.ParquetFile(tmp_path / "out/all-00000-of-00001.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [100, 100, 50]
    source = open_data(tmp_path / "out")
    assert [source.read(index)[:2] for index in range(250)] == images
    assert source.classes == ()
    assert not (tmp_path / "out/classes.txt").exists()


def test_what_lies_beside_the_shards(photos, packed):
    for out, returned in packed.values():
        assert (out / "classes.txt").read_text() == "ant\nbee\nnaïve cat\n"
        manifest = json.loads((out / "dataset.json").read_text())
        assert manifest == returned
        assert manifest["source"] == "photos"
        assert manifest["classes"] == ["ant", "bee", "naïve cat"]
        assert {split: part["samples"] for split, part in manifest["splits"].items()} == {"train": 24, "val": 6}
        assert str(photos.parent) not in (out / "dataset.json").read_text()
        sums = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
        assert sums == {name: digest for name, digest in files.items() if name not in ("SHA256SUMS", "dataset.json")}
        for part in manifest["splits"].values():
            for shard in part["shards"]:
                assert shard["bytes"] == (out / shard["name"]).stat().st_size
                assert shard["sha256"] == files[shard["name"]]


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_sha256sum_agrees(packed):
    out = packed["tar"][0]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True, capture_output=True)


def test_shards_are_about_as_large_as_asked(tmp_path):
    images = [(encoded(picture(n, 64, 64), "PNG"), 0) for n in range(60)]
    manifest = pack_data(images, tmp_path / "out", shard_mb=50 * KB, workers=1).manifest
    sizes = [shard["bytes"] for shard in manifest["splits"]["all"]["shards"]]
    assert len(sizes) > 3
    assert all(35_000 < size < 62_000 for size in sizes[:-1])
    one_each = pack_data(images, tmp_path / "one each", shard_mb=0.01 * KB, workers=1).manifest
    assert [shard["samples"] for shard in one_each["splits"]["all"]["shards"]] == [1] * 60


# Order.


def labels_in(out: Path, split: str = "train") -> list[int]:
    source = open_data(out, split)
    return source.labels(0, len(source)).tolist()


def test_samples_are_mixed_by_the_seed(photos, packed, tmp_path):
    source = open_data(photos, "train")
    _, order = Order(24, 0, source.block, source.window)(np.arange(24))
    expected = [source.read(index).content for index in order.tolist()]
    after = open_data(packed["tar"][0], "train")
    assert [after.read(index).content for index in range(24)] == expected
    assert labels_in(packed["tar"][0]) != sorted(labels_in(packed["tar"][0]))
    pack_data(photos, tmp_path / "other", seed=1, shard_mb=12 * KB, workers=1)
    assert labels_in(tmp_path / "other") != labels_in(packed["tar"][0])


def test_the_order_can_be_kept(photos, tmp_path):
    pack_data(photos, tmp_path / "out", shuffle=False, workers=2)
    before, after = open_data(photos, "train"), open_data(tmp_path / "out", "train")
    assert [after.read(index)[:2] for index in range(24)] == [before.read(index)[:2] for index in range(24)]


def test_one_split_and_data_without_splits(photos, tmp_path):
    pack_data(photos, tmp_path / "val", split="val", workers=1)
    assert list_splits(tmp_path / "val") == ("val",)
    pack_data(photos / "train", tmp_path / "all", workers=1)
    assert list_splits(tmp_path / "all") == ()
    assert samples(open_data(tmp_path / "all")) == samples(open_data(photos, "train"))


def test_shards_can_be_packed_again(packed, tmp_path):
    pack_data(packed["parquet"][0], tmp_path / "tar", workers=1)
    pack_data(packed["tar"][0], tmp_path / "parquet", format="parquet", workers=1)
    for split in ("train", "val"):
        expected = samples(open_data(packed["tar"][0], split))
        assert (
            samples(open_data(tmp_path / "tar", split)) == samples(open_data(tmp_path / "parquet", split)) == expected
        )


def test_pixels_become_png_without_loss(tmp_path):
    pack_data("digits", tmp_path / "digits", shuffle=False, workers=2)
    before, after = open_data("digits"), open_data(tmp_path / "digits")
    assert (len(after), after.classes) == (1797, before.classes)
    assert np.array_equal(after.labels(0, 1797), before.labels(0, 1797))
    for index in (0, 100, 1796):
        assert torch.equal(decode_image(after.read(index).content), before.read(index).content.expand(3, -1, -1))
    colours = torch.arange(3 * 40 * 50, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(3, 40, 50)
    pack_data([(colours, 5)], tmp_path / "colours", workers=1)
    sample = open_data(tmp_path / "colours").read(0)
    assert sample.label == 5
    assert torch.equal(decode_image(sample.content), colours)


# The same bytes every time.


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_the_same_bytes_from_anywhere_with_any_number_of_processes(form, photos, packed, tmp_path):
    moved = shutil.copytree(photos, tmp_path / "elsewhere" / "photos")
    pack_data(moved, tmp_path / "out", format=form, shard_mb=12 * KB, workers=1)
    assert tree(tmp_path / "out") == tree(packed[form][0])


def test_resized_bytes_are_the_same_too(photos, tmp_path):
    for workers in (1, 2):
        pack_data(photos, tmp_path / str(workers), resize=30, workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")


def test_a_process_that_is_killed_changes_nothing(tmp_path):
    flags = [tmp_path / "a", tmp_path / "b"]
    for folder in flags:
        folder.mkdir()
    pack_data(Deadly(60, flags[0], once=(5, 41)), tmp_path / "killed", shard_mb=10 * KB, workers=2)
    pack_data(Deadly(60, flags[1]), tmp_path / "calm", shard_mb=10 * KB, workers=1)
    assert tree(tmp_path / "killed") == tree(tmp_path / "calm")


class Stopped(BaseException):
    """Nothing catches it."""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_stopped_anywhere_and_going_on_gives_the_same_bytes(form, tmp_path, monkeypatch):
    """A stop before each time that something would have been on the disk for sure."""
    photos = make_photos(tmp_path / "photos", train=6, val=3)
    (photos / "train/bee/bad.jpg").write_bytes(b"")
    options = {"format": form, "shard_mb": 4 * KB, "skip_broken": True, "workers": 1}
    pack_data(photos, tmp_path / "whole", **options)
    expected, sync = tree(tmp_path / "whole"), os.fsync
    for stop in range(1000):
        calls = 0

        def fsync(handle: int, stop: int = stop) -> None:
            nonlocal calls
            calls += 1
            if calls > stop:
                raise Stopped
            sync(handle)

        out = tmp_path / "stopped"
        monkeypatch.setattr(os, "fsync", fsync)
        try:
            pack_data(photos, out, **options)
        except Stopped:
            found = {name: content for name, content in tree(out).items() if not name.startswith(".unfinished")}
            assert "dataset.json" not in found or found == expected
        else:
            break
        finally:
            monkeypatch.setattr(os, "fsync", sync)
        pack_data(photos, out, **options)
        assert tree(out) == expected
        shutil.rmtree(out)
    assert stop > 20
    assert tree(out) == expected


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_in_the_middle_and_going_on_gives_the_same_bytes(tmp_path):
    folder = tmp_path / "photos/noise"
    folder.mkdir(parents=True)
    for number in range(80):
        pixels = np.random.default_rng(number).integers(0, 256, (500, 500, 3), dtype=np.uint8)
        (folder / f"{number}.jpg").write_bytes(encoded(Image.fromarray(pixels)))
    options = ["--shard-mb", 200 * KB, "--resize", 400, "--workers", 2]
    out, journal = tmp_path / "out", tmp_path / "out/.unfinished/journal.jsonl"
    command = [sys.executable, "-m", "vitrail", "data", "pack", tmp_path / "photos", out, *options]
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        time.sleep(0.002)
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not list(out.glob("*.tar"))
    assert workers
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in workers):  # they end when they notice that nobody is there
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kept = [shard.stat().st_ino for shard in (out / ".unfinished").glob("all-?")]
    assert len(kept) > 3
    again = run(tmp_path / "photos", out, *options)
    assert again.returncode == 0, again.stderr
    assert set(kept) <= {shard.stat().st_ino for shard in out.glob("all-*.tar")}
    assert run(tmp_path / "photos", tmp_path / "whole", *options).returncode == 0
    assert tree(out) == tree(tmp_path / "whole")


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def stop_before_the_end(photos: Path, out: Path, monkeypatch, **options) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(unfinished.PackJournal, "finish", lambda self: (_ for _ in ()).throw(Stopped()))
        with pytest.raises(Stopped):
            pack_data(photos, out, workers=1, **options)


@pytest.mark.parametrize("damage", ["other bytes", "shorter", "gone", "journal cut"])
def test_what_was_spoilt_meanwhile_is_written_again(damage, photos, packed, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stop_before_the_end(photos, out, monkeypatch, shard_mb=12 * KB)
    shard, journal = out / ".unfinished/train-1", out / ".unfinished/journal.jsonl"
    if damage == "other bytes":
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    elif damage == "shorter":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "gone":
        shard.unlink()
    else:
        journal.write_bytes(journal.read_bytes()[:700])
    assert pack_data(photos, out, shard_mb=12 * KB, workers=1).manifest == packed["tar"][1]
    assert tree(out) == tree(packed["tar"][0])


def test_a_finished_pack_is_looked_at_and_left_alone(photos, packed, tmp_path):
    out = shutil.copytree(packed["tar"][0], tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pack_data(photos, out, shard_mb=12 * KB).manifest == packed["tar"][1]
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    spoilt = out / "train-000001.tar"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"train-000001\.tar"):
        pack_data(photos, out, shard_mb=12 * KB)


# What is refused.


def test_files_that_changed_since_are_not_taken_for_packed(tmp_path):
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.png").write_bytes(encoded(picture(number), "PNG"))
    pack_data(tmp_path / "photos", tmp_path / "out", workers=1)
    (folder / "2.png").write_bytes(encoded(picture(9, 60, 60), "PNG"))
    with pytest.raises(ConfigError, match="changed"):
        pack_data(tmp_path / "photos", tmp_path / "out", workers=1)


@pytest.mark.parametrize("finished", [True, False])
def test_another_pack_in_the_same_folder_is_refused(finished, photos, packed, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(packed["tar"][0], out)
    else:
        stop_before_the_end(photos, out, monkeypatch, shard_mb=12 * KB)
    before = tree(out)
    same = {"shard_mb": 12 * KB, "workers": 1}
    for options, words in (
        ({**same, "seed": 1}, "seed = 0 there, 1 here"),
        ({**same, "shuffle": False}, "seed = 0 there, None here"),
        ({**same, "resize": 32}, "resize = None there, 32 here"),
        ({**same, "format": "parquet"}, "format = tar there, parquet here"),
        ({**same, "shard_mb": 1}, r"shard_mb = 0.012 there, 1.0 here"),
        ({**same, "split": "val"}, "other samples or classes"),
    ):
        with pytest.raises(ConfigError, match=words):
            pack_data(photos, out, **options)
    other = shutil.copytree(photos, tmp_path / "photos")
    (other / "val/ant/new.jpg").write_bytes(encoded(picture(999)))
    with pytest.raises(ConfigError, match="samples or classes"):
        pack_data(other, out, **same)
    (other / "val/ant/new.jpg").unlink()
    (other / "val/ant/000.jpg").rename(other / "val/ant/zero.jpg")
    with pytest.raises(ConfigError, match="samples or classes"):
        pack_data(other, out, **same)
    assert tree(out) == before


def test_folders_that_are_not_for_packing_are_refused(photos, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        pack_data(photos, tmp_path / "full")
    with pytest.raises(ConfigError, match="is a file"):
        pack_data(photos, tmp_path / "full/thesis.txt")
    assert (tmp_path / "full/thesis.txt").read_text() == "years of work"
    for out in (photos / "packed", photos, photos / "train/.."):
        with pytest.raises(ConfigError, match="inside"):
            pack_data(photos, out)
    (tmp_path / "foreign").mkdir()
    for text in ("[1, 2]", '{"splits": 3}', "nonsense", "{}"):
        (tmp_path / "foreign/dataset.json").write_text(text)
        with pytest.raises(ConfigError, match="vitrail data pack"):
            pack_data(photos, tmp_path / "foreign")


def test_an_empty_folder_will_do(photos, tmp_path):
    (tmp_path / "out").mkdir()
    assert pack_data(photos, tmp_path / "out", split="val", workers=1).samples == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "tra"}, "format = 'tra', did you mean 'tar'?"),
        ({"shard_mb": 0}, "shard_mb = 0"),
        ({"resize": 0}, "resize = 0"),
        ({"workers": 0}, "workers = 0"),
        ({"split": "tarin"}, "split = 'tarin', did you mean 'train'?"),
    ],
)
def test_wrong_options(options, words, photos, tmp_path):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        pack_data(photos, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_two_at_once_are_refused(photos, tmp_path):
    out = tmp_path / "out"
    seen = []

    def meanwhile(kind: str, values: dict) -> None:
        if not seen:
            seen.append(run(photos, out))

    pack_data(photos, out, workers=1, on_event=meanwhile)
    assert seen[0].returncode == 2
    assert "another process is packing into" in seen[0].stderr


def test_a_full_disk_is_told_and_can_be_mended(photos, packed, tmp_path, monkeypatch):
    writes = []

    def add(self, key, sample):
        writes.append(key)
        if len(writes) > 15:
            raise OSError(28, "No space left on device")
        return real(self, key, sample)

    writer = unfinished.WRITERS["tar"]
    real = writer.add
    with monkeypatch.context() as patch:
        patch.setattr(writer, "add", add)
        with pytest.raises(DataError, match="No space left on device"):
            pack_data(photos, tmp_path / "out", shard_mb=12 * KB, workers=1)
    pack_data(photos, tmp_path / "out", shard_mb=12 * KB, workers=1)
    assert tree(tmp_path / "out") == tree(packed["tar"][0])


def test_splits_with_different_classes_are_refused():
    from vitrail.data.packing.pack import _agree_on_classes
    from vitrail.data.sources.list_source import ListSource

    sources = {"train": ListSource([], ("a", "b")), "val": ListSource([], ("b",))}
    with pytest.raises(DataError, match="different classes"):
        _agree_on_classes(sources)


# What is broken.


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "photos"
    return folder, make_hostile(folder)


def test_broken_samples_stop_it_and_are_all_listed(tmp_path):
    photos = make_photos(tmp_path / "photos")
    for name in ("train/ant/a.jpg", "train/bee/z.jpg", "val/ant/m.jpg"):
        (photos / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"3 samples .*--skip-broken") as told:
        pack_data(photos, tmp_path / "out", shard_mb=8 * KB, workers=2)
    lines = str(told.value).splitlines()[1:]
    assert sorted(lines) == [f"  {name}: empty" for name in ("train/ant/a.jpg", "train/bee/z.jpg", "val/ant/m.jpg")]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".unfinished"]
    # The same folder goes on when they may be left out, and is what it would have been.
    manifest = pack_data(photos, tmp_path / "out", shard_mb=8 * KB, skip_broken=True, workers=1).manifest
    assert tree(tmp_path / "out") == tree_of_new(photos, tmp_path / "new", shard_mb=8 * KB, skip_broken=True)
    assert [broken["name"] for broken in manifest["splits"]["val"]["broken"]] == ["val/ant/m.jpg"]
    assert manifest["splits"]["train"]["samples"] == 24
    assert manifest["samples"]["train"]["number"] == 26
    with pytest.raises(DataError, match="3 samples"):
        pack_data(photos, tmp_path / "out", shard_mb=8 * KB)


def test_what_was_broken_can_be_mended_and_the_same_command_goes_on(tmp_path):
    photos = make_photos(tmp_path / "photos")
    broken = photos / "train/bee/002.webp"
    content = broken.read_bytes()
    broken.write_bytes(content[:50])
    with pytest.raises(DataError, match="1 sample "):
        pack_data(photos, tmp_path / "out", shard_mb=8 * KB, workers=1)
    broken.write_bytes(content)
    pack_data(photos, tmp_path / "out", shard_mb=8 * KB, workers=1)
    assert tree(tmp_path / "out") == tree_of_new(photos, tmp_path / "new", shard_mb=8 * KB)


def tree_of_new(photos: Path, out: Path, **options) -> dict[str, bytes]:
    pack_data(photos, out, workers=2, **options)
    return tree(out)


def test_a_long_list_is_cut(tmp_path):
    with pytest.raises(DataError, match="70 samples") as told:
        pack_data([(b"", 0)] * 70, tmp_path / "out", workers=1)
    assert len(str(told.value).splitlines()) == 52
    assert str(told.value).endswith("and 20 more; `vitrail data check` names all")


def test_nothing_but_broken_samples_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no sample"):
        pack_data([(b"", 0)] * 3, tmp_path / "out", skip_broken=True, workers=1)


def test_the_hostile_folder_without_what_is_broken(hostile, tmp_path, here):
    folder, kinds = hostile
    code, _, told = here(folder, tmp_path / "out", "--skip-broken", "--shard-mb", "0.05")
    assert code == 0, told
    broken = {path for path, kind in kinds.items() if kind in ("unreadable", "truncated")}
    taken = Counter(Path(path).read_bytes() for path, kind in kinds.items() if path not in broken and kind != "ignored")
    source = open_data(tmp_path / "out")
    assert Counter(source.read(index).content for index in range(len(source))) == taken
    manifest = json.loads((tmp_path / "out/dataset.json").read_text())
    assert {f"{folder}/{found['name']}" for found in manifest["splits"]["all"]["broken"]} == broken
    assert told.count("left out: ") == len(broken)
    assert f"all: {len(broken)} of {len(broken) + len(source)} samples left out" in told
    code, printed, told = here(folder, tmp_path / "strict")
    assert (code, printed) == (1, "")
    assert told.startswith(f"error: {len(broken)} samples cannot be packed")


# Smaller images.


def test_resize_makes_the_shorter_side_so_long_and_keeps_the_shape(tmp_path):
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    images = {
        "wide": (encoded(picture(1, 100, 250), quality=100, subsampling=0), (64, 160)),
        "tall": (encoded(picture(2, 401, 133), "PNG"), (193, 64)),
        "turned": (encoded(picture(3, 120, 240), exif=turned), (128, 64)),
        "odd": (encoded(picture(4, 65, 2001), "WEBP"), (64, 1970)),
        "grey": (encoded(picture(5, 80, 80, channels=1)), (64, 64)),
    }
    pack_data([(content, 0) for content, _ in images.values()], tmp_path / "out", resize=64, shuffle=False, workers=1)
    source = open_data(tmp_path / "out")
    for index, (content, size) in enumerate(images.values()):
        sample = source.read(index)
        assert source.name(index).endswith(".jpg")
        image = Image.open(io.BytesIO(sample.content))
        assert image.format == "JPEG"
        assert JpegImagePlugin.get_sampling(image) == 0  # colours at full resolution
        assert image.quantization[0][0] <= 2  # quality 95
        pixels = decode_image(sample.content)
        assert pixels.shape[1:] == size
        reference = torch.nn.functional.interpolate(
            decode_image(content)[None].float(), size=size, mode="bicubic", antialias=True
        )[0]
        assert (pixels.float() - reference).abs().mean() < 2


def test_what_is_small_enough_stays_byte_for_byte(photos, tmp_path):
    pack_data(photos, tmp_path / "out", resize=50, workers=2)
    before, after = samples(open_data(photos, "train")), samples(open_data(tmp_path / "out", "train"))
    kept = {sample: count for sample, count in before.items() if min(decode_image(sample[0]).shape[1:]) <= 50}
    assert after == before
    assert len(kept) == 24
    pack_data(photos, tmp_path / "smaller", resize=45, split="train", workers=2)
    smaller = open_data(tmp_path / "smaller", "train")
    shorter = [min(decode_image(smaller.read(index).content).shape[1:]) for index in range(24)]
    assert max(shorter) == 45
    common = before & samples(smaller)
    assert sum(common.values()) == sum(min(decode_image(content).shape[1:]) <= 45 for content, _ in before)


def test_pixels_are_made_smaller_too_and_strips_stay_possible(tmp_path):
    pixels = torch.from_numpy(np.array(picture(6, 90, 120))).permute(2, 0, 1)
    strip = encoded(picture(7, 4, 70_000), "PNG")
    pack_data([(pixels, 1), (strip, 2)], tmp_path / "out", resize=3, shuffle=False, workers=1)
    source = open_data(tmp_path / "out")
    assert decode_image(source.read(0).content).shape == (3, 3, 4)
    assert source.name(1).endswith(".jpg")
    pack_data([(strip, 2)], tmp_path / "long", resize=4, workers=1)
    assert open_data(tmp_path / "long").read(0).content == strip


# The command.


def test_the_command_lists_the_files(photos, packed, tmp_path):
    child = run(photos, tmp_path / "out", "--shard-mb", "0.012", "--workers", "2")
    assert (child.returncode, child.stderr) == (0, "")
    rows = [line.split("\t") for line in child.stdout.splitlines()]
    assert rows[0] == ["file", "samples", "bytes"]
    shards = [shard for part in packed["tar"][1]["splits"].values() for shard in part["shards"]]
    assert rows[1:] == [
        [str(tmp_path / "out" / shard["name"]), str(shard["samples"]), str(shard["bytes"])] for shard in shards
    ]
    assert tree(tmp_path / "out") == tree(packed["tar"][0])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--format", "zip"], 2, "error: format = 'zip'"),
        (["--split", "test"], 1, "error: "),
        (["--resize", "big"], 2, "--resize"),
    ],
)
def test_wrong_commands(arguments, code, words, photos, tmp_path, here):
    found, printed, told = here(photos, tmp_path / "out", *arguments)
    assert (found, printed) == (code, "")
    assert words in told


def test_progress_counts_everything(photos, tmp_path):
    seen = []
    pack_data(
        photos,
        tmp_path / "out",
        workers=2,
        on_event=lambda kind, values: seen.append((values["done"], values["total"])),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (30, 30)
