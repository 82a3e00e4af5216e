"""Data in a bucket: copied once, whole or absent, and read like any folder."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from pictures import make_folder, make_tar, picture
from test_sources import KINDS, LABELS, NAMES, contents

from buckets import BUCKET, forget_storages, put_folder, serve_buckets
from vitrail.data.check.check import check_data
from vitrail.data.open import add_labels_from, list_splits, open_data, propose_data
from vitrail.data.sources import remote_copy
from vitrail.data.sources.remote_copy import open_copy
from vitrail.errors import ConfigError, DataError, MissingExtraError
from vitrail.system import remote
from vitrail.system.remote import RemoteFolder

PREFIX = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def client():
    with serve_buckets() as client:
        yield client


@pytest.fixture(autouse=True)
def new_process(tmp_path, monkeypatch):
    """Each test has an empty cache and has opened nothing yet."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_copy, "_COPIES", {})


@pytest.fixture
def memory():
    """fsspec's storage in the memory of this process, with a folder called bucket."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """The names of objects that are downloaded."""
    names, download = list[str](), RemoteFolder.download

    def noted(self, name, *rest):
        names.append(name)
        download(self, name, *rest)

    monkeypatch.setattr(RemoteFolder, "download", noted)
    return names


def start_anew() -> None:
    remote_copy._COPIES.clear()


def list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ---- What can be read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_same_samples_from_a_bucket(client, tmp_path, kind):
    put_folder(client, KINDS[kind](tmp_path / "data"), f"layouts/{kind}")
    source = open_data(f"{PREFIX}/layouts/{kind}/")
    assert source.classes == NAMES
    assert contents(source) == [(picture(number), label) for number, label in enumerate(LABELS)]


def test_folders_of_classes_with_splits(client, tmp_path, downloads):
    root = tmp_path / "photos"
    make_folder(root / "train", {"cat": 4, "dog": 3})
    make_folder(root / "val", {"cat": 1, "dog": 2}, first=50)
    names = put_folder(client, root, "photos")
    client.put_object(Bucket=BUCKET, Key="photos/", Body=b"")  # consoles of S3 make such objects for folders
    client.put_object(Bucket=BUCKET, Key="photos-of-others/x.png", Body=b"")
    assert list_splits(f"{PREFIX}/photos") == ("train", "val")
    for split in ("train", "val"):
        ours, theirs = open_data(f"{PREFIX}/photos", split), open_data(root, split)
        assert contents(ours) == contents(theirs)
        assert [ours.identity(index) for index in range(len(ours))] == [
            theirs.identity(index) for index in range(len(theirs))
        ]
    assert sorted(downloads) == names  # each of them once


def test_a_table_brings_the_images_beside_it_and_a_shard_only_what_describes_it(client, tmp_path, downloads):
    put_folder(client, KINDS["csv"](tmp_path / "csv"), "beside")
    assert contents(open_data(f"{PREFIX}/beside/labels.csv"))[3] == (picture(3), LABELS[3])
    assert len(downloads) == 11
    downloads.clear()
    put_folder(client, KINDS["tar"](tmp_path / "tar"), "shards")
    source = open_data(f"{PREFIX}/shards/a.tar")
    assert (len(source), source.classes) == (6, NAMES)
    assert sorted(downloads) == ["a.tar", "classes.txt"]


def test_classes_in_file_names_and_a_check(client, tmp_path):
    for number, name in enumerate(["cat_1.png", "cat_2.png", "dog_1.png"]):
        client.put_object(Bucket=BUCKET, Key=f"flat/{name}", Body=picture(number))
    source = open_data(add_labels_from(f"{PREFIX}/flat", "NAME_*"))
    assert source.classes == ("cat", "dog")
    put_folder(client, make_folder(tmp_path / "x", {"a": 3, "b": 3}), "checked")
    client.put_object(Bucket=BUCKET, Key="checked/a/broken.png", Body=b"no image")
    report = check_data(f"{PREFIX}/checked")
    assert sum(len(part.reasons) for part in report.parts) == 1


def test_the_memory_of_fsspec_is_a_storage_like_any_other(memory, tmp_path):
    for path in make_folder(tmp_path / "photos", {"a": 2, "b": 2}).rglob("*.png"):
        memory.pipe_file(f"/bucket/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    assert open_data("memory://bucket/photos").classes == ("a", "b")


# ---- Changes ---------------------------------------------------------------------------------------------------------


def test_what_has_changed_is_fetched_and_what_was_removed_is_gone(client, tmp_path, downloads):
    put_folder(client, make_folder(tmp_path / "photos", {"a": 3, "b": 3}), "changing")
    address = f"{PREFIX}/changing"
    before = open_copy(address)
    first = {name: (before / name).read_bytes() for name in list_files(before)}
    downloads.clear()
    other = picture(77)
    client.put_object(Bucket=BUCKET, Key="changing/a/0000.png", Body=other)
    client.put_object(Bucket=BUCKET, Key="changing/b/new.png", Body=picture(78))
    client.delete_object(Bucket=BUCKET, Key="changing/a/0001.png")
    assert open_copy(address) == before  # a process reads the same data to its end
    start_anew()
    after = open_copy(address)
    assert sorted(downloads) == ["a/0000.png", "b/new.png"]
    assert (after / "a/0000.png").read_bytes() == other
    assert "a/0001.png" not in list_files(after)
    assert (after / "b/0000.png").stat().st_ino == (before / "b/0000.png").stat().st_ino  # it takes no room twice
    assert {name: (before / name).read_bytes() for name in list_files(before)} == first  # for who still reads it
    downloads.clear()
    start_anew()
    assert open_copy(address) == after
    assert downloads == []


def test_copies_that_nobody_opened_for_a_month_are_removed(memory):
    memory.pipe_file("/bucket/a/1.png", b"1")
    before = open_copy("memory://bucket")
    os.utime(before, (time.time() - 40 * 86400,) * 2)
    start_anew()
    memory.pipe_file("/bucket/a/2.png", b"2")
    after = open_copy("memory://bucket")
    assert not before.exists()
    assert sorted(path.name for path in after.parent.iterdir()) == sorted([after.name, f"{after.name}.json", "lock"])


def test_data_that_changes_while_it_is_copied_is_copied_again(memory, monkeypatch):
    memory.pipe_file("/bucket/a/1.png", b"1")
    memory.pipe_file("/bucket/a/2.png", b"2")
    download, changes = RemoteFolder.download, [b"three", b"4"]

    def change(self, name, path, *rest):
        if name == "a/1.png" and changes:
            memory.pipe_file("/bucket/a/1.png", changes.pop())
        download(self, name, path, *rest)

    monkeypatch.setattr(RemoteFolder, "download", change)
    assert (open_copy("memory://bucket") / "a/1.png").read_bytes() == b"three"
    start_anew()
    changes += [bytes([number]) for number in range(9)]
    memory.pipe_file("/bucket/a/1.png", b"other")
    with pytest.raises(DataError, match="changes while it is copied"):
        open_copy("memory://bucket")


# ---- Ended in the middle ---------------------------------------------------------------------------------------------

FETCH_SLOWLY = """
import sys, time
from vitrail.data.sources.remote_copy import open_copy
from vitrail.system.remote import RemoteFolder
download = RemoteFolder.download
def slow(*arguments):
    time.sleep(0.2)
    download(*arguments)
RemoteFolder.download = slow
open_copy(sys.argv[1])
"""


def test_a_fetch_that_was_killed_goes_on_where_it_was(client, tmp_path, downloads):
    names = put_folder(client, make_folder(tmp_path / "photos", {"a": 40, "b": 40}), "killed")
    address, cache = f"{PREFIX}/killed", tmp_path / "cache" / "remote"
    child = subprocess.Popen([sys.executable, "-c", FETCH_SLOWLY, address])
    while len(list(cache.glob("*/*.part/*/*"))) < 10:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (part,) = cache.glob("*/*.part")
    done = list_files(part)
    assert 10 <= len(done) < 80
    for name in done:
        assert (part / name).read_bytes() == (tmp_path / "photos" / name).read_bytes()  # whole or absent
    copy = open_copy(address)
    assert sorted([*downloads, *done]) == names
    assert list_files(copy) == names
    assert not list(cache.glob("*/*.part"))
    assert not list(cache.glob("*/*.new"))


def test_an_error_ends_the_other_transfers_and_what_came_stays(memory, monkeypatch, downloads):
    for number in range(30):
        memory.pipe_file(f"/bucket/a/{number:02}.png", bytes(1000))
    noted = RemoteFolder.download

    def fail(self, name, path, *rest):
        if name == "a/20.png":
            raise PermissionError(errno.EACCES, "Access Denied")
        noted(self, name, path, *rest)

    monkeypatch.setattr(RemoteFolder, "download", fail)
    with pytest.raises(DataError, match="Access Denied"):
        open_copy("memory://bucket")
    came = len(downloads)
    assert 0 < came < 30
    monkeypatch.setattr(RemoteFolder, "download", noted)
    assert len(list_files(open_copy("memory://bucket"))) == 30
    assert len(downloads) <= 30 + remote.THREADS


def test_one_process_copies_and_the_others_wait(client, tmp_path):
    names = put_folder(client, make_folder(tmp_path / "photos", {"a": 20, "b": 20}), "together")
    count = (
        "import sys\nfrom vitrail.data.sources.remote_copy import open_copy\n"
        "from vitrail.system.remote import RemoteFolder\ndownload, names = RemoteFolder.download, []\n"
        "def noted(self, name, *rest):\n    names.append(name); download(self, name, *rest)\n"
        "RemoteFolder.download = noted\nprint(open_copy(sys.argv[1]), len(names))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", count, f"{PREFIX}/together"], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [child.communicate(timeout=60)[0].split() for child in children]
    assert len({path for path, _ in answers}) == 1
    assert sorted(int(number) for _, number in answers) == [0, 0, len(names)]


def test_threads_of_a_process_copy_once(memory, downloads):
    for number in range(20):
        memory.pipe_file(f"/bucket/{number}.png", b"x")
    threads = [threading.Thread(target=open_copy, args=("memory://bucket",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 20


# ---- Hostile names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../outside.png",
        "a/../../outside.png",
        "a/./b.png",
        "/etc/x.png",
        "a//b.png",
        "a\\b.png",
        "a/\x7f.png",
        "x" * 300,
        "a/b.png?versionId=3",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(client, tmp_path, name):
    prefix = f"hostile-{abs(hash(name))}"
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a/good.png", Body=picture(0))
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=picture(1))
    with pytest.raises(DataError, match="rename or remove it") as caught:
        open_data(f"{PREFIX}/{prefix}")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache").rglob("*.png")] == []
    assert not (tmp_path / "outside.png").exists()


def test_a_name_that_is_an_object_and_a_folder_is_refused(client):
    for name in ("twice/a", "twice/a/b.png"):
        client.put_object(Bucket=BUCKET, Key=name, Body=b"x")
    with pytest.raises(DataError, match="an object and a folder at once"):
        open_copy(f"{PREFIX}/twice")


def test_names_with_spaces_and_letters_of_any_language_are_names(client, tmp_path):
    root = make_folder(tmp_path / "photos", {"großer Hund": 2, "猫 & co? #1 100%25 [a]*": 2})
    put_folder(client, root, "odd names")
    source = open_data(f"{PREFIX}/odd names")
    assert source.classes == ("großer Hund", "猫 & co? #1 100%25 [a]*")
    assert contents(source) == contents(open_data(root))


# ---- What cannot be --------------------------------------------------------------------------------------------------


def refuse(address: str) -> str:
    with pytest.raises(DataError) as caught:
        open_data(address)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_there_is_one_sentence(client):
    missing = refuse("s3://no-such-bucket/photos")
    assert "does not exist" in missing
    assert "look at the name, and whether s3://no-such-bucket is" in missing
    assert "holds no objects: look at the name" in refuse(f"{PREFIX}/nothing-here")
    client.put_object(Bucket=BUCKET, Key="zip/photos.zip", Body=b"PK")
    assert "is an object, and no folder" in refuse(f"{PREFIX}/zip/photos.zip")
    assert "holds no objects" in refuse(f"{PREFIX}/zip/photos.tar")


def test_a_deeper_folder_is_proposed_by_its_address(client, tmp_path):
    put_folder(client, make_folder(tmp_path / "outer" / "photos", {"a": 3, "b": 3}), "outer/photos")
    proposed = propose_data(f"{PREFIX}/outer")
    assert proposed is not None
    assert (proposed.given, proposed.data) == (f"{PREFIX}/outer", f"{PREFIX}/outer/photos")
    assert str(tmp_path) not in str(proposed)
    for number in range(3):
        client.put_object(Bucket=BUCKET, Key=f"loose/cat_{number}.png", Body=picture(number))
    assert f"3 images lie in {PREFIX}/loose itself" in refuse(f"{PREFIX}/loose")


def test_addresses_that_are_none():
    for address, words in {
        "s33://bucket/folder": "did you mean 's3'",
        "https://example.com/photos": "there are s3://",
        "s3://": "such as s3://bucket/folder",
        "s3://a::file:///etc": "such as s3://bucket/folder",
    }.items():
        with pytest.raises(ConfigError, match=words):
            open_data(address)


def test_without_credentials_or_network_it_says_what_to_do(client, monkeypatch):
    forget_storages()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    told = refuse(f"{PREFIX}/photos")
    assert "needs credentials" in told
    assert "AWS_PROFILE" in told
    assert "FSSPEC_S3" in told
    forget_storages()


@pytest.mark.slow  # the library tries five times
def test_a_server_that_cannot_be_reached_is_one_sentence(client, monkeypatch):
    forget_storages()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "cannot be reached" in refuse(f"{PREFIX}/photos")
    forget_storages()


@pytest.mark.slow  # 130 MB
def test_large_objects_go_in_parts_and_come_whole(client, tmp_path):
    """An upload of many parts, and a download that does not hold the object in memory."""
    content = np.random.default_rng(0).integers(0, 256, 130_000_000, np.uint8).tobytes()
    (tmp_path / "large").write_bytes(content)
    folder, counts = RemoteFolder(f"{PREFIX}/large"), list[int]()
    folder.upload(tmp_path / "large", "object")
    (found,) = folder.list_objects()
    assert (found.name, found.size) == ("object", len(content))
    assert "-" in found.version  # the ETag of an upload in parts
    folder.download("object", tmp_path / "again", counts.append)
    assert (tmp_path / "again").read_bytes() == content
    assert sum(counts) == len(content)
    assert max(counts) < 10_000_000


def test_denied_access_is_one_sentence(memory, monkeypatch):
    def deny(*arguments, **options):
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(type(memory), "find", deny)
    assert "give credentials that allow it" in refuse("memory://bucket")


def test_without_s3fs_the_command_to_install_it(monkeypatch):
    forget_storages()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(MissingExtraError, match=r'pip install "vitrail\[s3\]"'):
        open_data(f"{PREFIX}/photos")
    with pytest.raises(ConfigError, match="pip install adlfs"):
        open_data("az://container/photos")


def test_a_full_disk_is_told_before_and_while_it_fills(memory, monkeypatch):
    memory.pipe_file("/bucket/a/1.png", bytes(5000))
    usage = shutil.disk_usage("/")._replace(free=4999)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        assert "no room for" in refuse("memory://bucket")

    def fill(self, name, path, *rest):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(RemoteFolder, "download", fill)
    assert "set VITRAIL_CACHE to a folder on a larger one" in refuse("memory://bucket")


def test_objects_without_a_version_are_not_taken_from_an_earlier_copy(memory, monkeypatch, downloads):
    describe = RemoteFolder._describe
    monkeypatch.setattr(RemoteFolder, "_describe", lambda *given: replace(describe(*given), version=""))
    memory.pipe_file("/bucket/a/1.png", b"1")
    open_copy("memory://bucket")
    memory.pipe_file("/bucket/a/2.png", b"2")
    start_anew()
    open_copy("memory://bucket")
    assert sorted(downloads) == ["a/1.png", "a/1.png", "a/2.png"]


def test_it_says_how_far_it_is(memory, monkeypatch, capsys, caplog):
    memory.pipe_file("/bucket/a/1.png", np.zeros(3_000_000, np.uint8).tobytes())
    monkeypatch.setattr("vitrail.system.event_display.FIRST_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        open_copy("memory://bucket")
    assert "copying memory://bucket, MB: " in capsys.readouterr().err


def test_a_shard_is_indexed_once_for_each_copy(client, tmp_path):
    path = make_tar(tmp_path / "train" / "a.tar", [0, 1, 0])
    client.put_object(Bucket=BUCKET, Key="growing/train/a.tar", Body=path.read_bytes())
    assert len(open_data(f"{PREFIX}/growing", "train")) == 3
    path = make_tar(tmp_path / "train" / "a.tar", [0, 1, 0, 1])
    client.put_object(Bucket=BUCKET, Key="growing/train/a.tar", Body=path.read_bytes())
    start_anew()
    assert len(open_data(f"{PREFIX}/growing", "train")) == 4
