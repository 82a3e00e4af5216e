"""A run with a copy in a bucket goes on from it where its folder is lost, and is the run that was never ended."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import fsspec
import pytest
import runs
import torch
from fsspec.implementations.memory import MemoryFile

import vitrail
from buckets import BUCKET, list_keys, put_folder, read_key, serve_buckets
from vitrail.errors import ConfigError, Stopped, TrainingError
from vitrail.system.ranks import Ranks
from vitrail.system.remote import RemoteError, RemoteFolder
from vitrail.training import loop, run_copy
from vitrail.training.checkpoint_folder import CheckpointFolder, read_weights
from vitrail.training.copy_thread import CopyThread
from vitrail.training.resolve import hide_config_folders
from vitrail.training.run_copy import RunCopy
from vitrail.training.run_training import run_training

ADDRESS = "memory://bucket/runs/name"
ALONE = Ranks(0, 1, torch.device("cpu"))
SHORT = {"schedule": {"steps": 12, "warmup_steps": 2}}
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def store():
    """What is in the bucket: the content of each object below ADDRESS, by name."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def names(files, folder: str = "") -> list[str]:
    root = f"/bucket/runs/name/{folder}"
    return sorted(path.removeprefix(root) for path in files.store if path.startswith(root))


def steps_there(files) -> list[int]:
    return sorted({int(name.split("/")[0][5:]) for name in names(files, "checkpoints/")})


def config(folder: Path, address: str = ADDRESS, **changes):
    run = {"checkpoint_every": 3, "evaluate_every": 6, "copy_to": address, **changes.pop("run", {})}
    return runs.config(folder, **{**SHORT, **changes}, run=run)


def stop_at(step: int, monkeypatch) -> None:
    """Let the next run be stopped by a signal in this step."""
    ordinary = loop.train_step

    def stopped(run, state):
        if state.progress.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", stopped)


def begin(folder: Path, monkeypatch, step: int = 7, **changes) -> None:
    """Begin a run, and stop it."""
    with monkeypatch.context() as patch:
        stop_at(step, patch)
        with pytest.raises(Stopped):
            run_training(config(folder, **changes))


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == ("vitrail", logging.WARNING)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that was never ended, and has no copy."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_training(config(folder, run={"copy_to": None}))
    return folder


# ---- What is there ---------------------------------------------------------------------------------------------------


def test_a_finished_run_is_there_with_all_that_it_leaves_behind(store, tmp_path, whole):
    folder = tmp_path / "run"
    run_training(config(folder))
    runs.assert_same_run(folder, whole)
    there = names(store)
    for name in ("config.toml", ".data", ".weights", "metrics.jsonl", "best.json", "SHA256SUMS", "curves.png"):
        assert name in there
    assert {"model/config.json", "model/model.safetensors", "model/SHA256SUMS"} <= set(there)
    assert not [name for name in there if ".tmp" in name or "unfinished" in name or ".lock" in name]
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            assert store.cat_file(f"/bucket/runs/name/{path.relative_to(folder).as_posix()}") == path.read_bytes()
    store.get(ADDRESS, str(tmp_path / "downloaded"), recursive=True)
    sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "downloaded", check=False)
    assert sums.returncode == 0
    assert vitrail.load(tmp_path / "downloaded").architecture.depth == 2


def test_old_checkpoints_go_and_the_best_stays(store, tmp_path):
    folder = tmp_path / "run"
    run_training(config(folder, run={"keep": 1, "evaluate_every": 3}))
    here = [int(path.name[5:]) for path in runs.checkpoints(folder)]
    assert steps_there(store) == here
    best = json.loads((folder / "best.json").read_text())["step"]
    assert set(here) == {best, 12}


def test_hashes_are_written_last_and_removed_first(store, tmp_path, monkeypatch):
    written, removed = list[str](), list[str]()
    upload, remove = RemoteFolder.upload, RemoteFolder.remove

    def noted_upload(self, path, name):
        upload(self, path, name)
        written.append(name)

    def noted_remove(self, gone):
        gone = list(gone)
        removed.extend(gone)
        remove(self, gone)

    monkeypatch.setattr(RemoteFolder, "upload", noted_upload)
    monkeypatch.setattr(RemoteFolder, "remove", noted_remove)
    run_training(config(tmp_path / "run", run={"keep": 1}))
    for step in {name.split("/")[1] for name in written if name.startswith("checkpoints/")}:
        inside = [name for name in written if name.startswith(f"checkpoints/{step}/")]
        assert inside[-1].endswith("/SHA256SUMS")
        assert len(inside) == 3
    pruned = [name for name in removed if "state.json" in name]
    assert pruned
    for name in pruned:
        assert removed.index(name.replace("state.json", "SHA256SUMS")) < removed.index(name)


# ---- Going on --------------------------------------------------------------------------------------------------------


def test_a_run_whose_folder_is_lost_goes_on_from_the_copy(store, tmp_path, monkeypatch, whole, caplog):
    folder = tmp_path / "run"
    begin(folder, monkeypatch)
    assert 7 in steps_there(store)  # what a stop request saves is there before the process ends
    assert "model/config.json" not in names(store)
    shutil.rmtree(folder)
    other = tmp_path / "elsewhere"
    run_training(config(other))
    assert any("step 7 comes from the copy" in each for each in warnings(caplog))
    runs.assert_same_run(other, whole)
    assert json.loads((other / "best.json").read_text()) == json.loads((whole / "best.json").read_text())


def test_the_best_checkpoint_comes_with_the_newest(store, tmp_path, monkeypatch, whole):
    begin(tmp_path / "run", monkeypatch, step=11, run={"keep": 1, "evaluate_every": 3})
    state = json.loads((runs.checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    best = state["best"][0]
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        stop_at(12, patch)
        patch.setattr(loop, "save_checkpoint", lambda run, state: None)
        with pytest.raises(Stopped):
            run_training(config(other, run={"keep": 1, "evaluate_every": 3}))
    assert [int(path.name[5:]) for path in runs.checkpoints(other)] == sorted({best, 11})


def test_the_newer_of_folder_and_copy_is_taken(store, tmp_path, monkeypatch, whole, caplog):
    folder, saved = tmp_path / "run", tmp_path / "saved"
    begin(folder, monkeypatch, step=4)
    shutil.copytree(folder, saved)
    begin(folder, monkeypatch, step=9)
    caplog.clear()
    begin(folder, monkeypatch, step=10)  # the folder is as new as the copy
    assert warnings(caplog) == []
    run_training(config(saved))  # the copy is newer
    assert any("step 10 comes from the copy" in each for each in warnings(caplog))
    runs.assert_same_run(saved, whole)


def test_a_copy_can_be_asked_for_later(store, tmp_path, monkeypatch, whole):
    folder = tmp_path / "run"
    begin(folder, monkeypatch, run={"copy_to": None})
    assert names(store) == []
    run_training(config(folder))
    assert steps_there(store)[-1] == 12
    run_training(config(folder, ADDRESS + "-again"))  # it is finished: all is copied to another place
    assert any(path.endswith("name-again/checkpoints/step-00000012/SHA256SUMS") for path in store.store)
    runs.assert_same_run(folder, whole)


def test_damaged_checkpoints_in_the_folder_are_replaced_by_the_copy(store, tmp_path, monkeypatch, whole):
    folder = tmp_path / "run"
    begin(folder, monkeypatch)
    for path in runs.checkpoints(folder):
        (path / "state.json").write_text("{}")
    run_training(config(folder))
    runs.assert_same_run(folder, whole)


def flip(store, name: str) -> None:
    path = f"/bucket/runs/name/{name}"
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "damage",
    [
        *("torn", "a bit"),
        *(pytest.param(kind, marks=SLOW) for kind in ("no state", "a name outside", "another name", "odd hashes")),
    ],
)
def test_what_is_torn_or_damaged_in_the_copy_is_never_used(store, tmp_path, monkeypatch, whole, damage, caplog):
    begin(tmp_path / "run", monkeypatch)
    assert steps_there(store)[-2:] == [6, 7]
    inside = "checkpoints/step-00000007"
    root = f"/bucket/runs/name/{inside}"
    sums = store.cat_file(f"{root}/SHA256SUMS")
    if damage == "torn":
        store.rm_file(f"{root}/SHA256SUMS")
    elif damage == "a bit":
        flip(store, f"{inside}/state.json")
    elif damage == "no state":
        store.rm_file(f"{root}/state.json")
    elif damage == "a name outside":
        store.pipe_file(f"{root}/SHA256SUMS", sums.replace(b"state.json", b"../state.json"))
    elif damage == "another name":
        store.pipe_file(f"{root}/SHA256SUMS", sums.replace(b"state.json", b"states.json"))
    else:
        store.pipe_file(f"{root}/SHA256SUMS", b"\xff\xfe\n")
    other = tmp_path / "other"
    run_training(config(other))
    assert any("step 6 comes from the copy" in each for each in warnings(caplog))
    assert any("step-00000007 is passed over" in each for each in warnings(caplog)) == (damage != "torn")
    runs.assert_same_run(other, whole)
    shutil.rmtree(other)
    run_training(config(other))  # and in the end the copy is whole
    runs.assert_same_run(other, whole)


def test_a_fetch_that_was_ended_at_any_moment_is_repeated(store, tmp_path, monkeypatch, whole):
    begin(tmp_path / "run", monkeypatch, step=8, run={"evaluate_every": 3, "keep": 1})
    other, publish = tmp_path / "other", RunCopy._publish
    assert len(steps_there(store)) == 2  # the best and the newest
    for name, number in [("best", 1), ("metrics", 1), ("newest", 2)]:
        calls = []

        def end(*given, number=number, calls=calls):
            calls.append(given)
            if len(calls) == number:
                raise KeyboardInterrupt
            return publish(*given)

        with monkeypatch.context() as patch:
            if name == "metrics":
                patch.setattr(run_copy, "move_into_place", end)
            else:
                patch.setattr(RunCopy, "_publish", end)
            with pytest.raises(KeyboardInterrupt):
                run_training(config(other, run={"evaluate_every": 3, "keep": 1}))
        assert len(calls) == number
        assert not (other / "checkpoints/step-00000008").exists()
        shutil.rmtree(other / "checkpoints")
    run_training(config(other, run={"evaluate_every": 3, "keep": 1}))
    assert runs.losses(other) == runs.losses(whole)
    assert (other / "best.json").exists()


def test_what_has_no_hash_is_not_fetched(store, tmp_path, monkeypatch):
    begin(tmp_path / "run", monkeypatch)
    store.pipe_file("/bucket/runs/name/checkpoints/step-00000007/more.safetensors", b"from a stranger")
    other = tmp_path / "other"
    begin(other, monkeypatch, step=8)
    assert not list(other.rglob("more.safetensors"))


@pytest.mark.parametrize("name", ["checkpoints/step-00000009/../../../../evil", "start/..//evil", "a\\b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(store, tmp_path, name):
    store.store[f"/bucket/runs/name/{name}"] = MemoryFile(None, name, b"x")
    with pytest.raises(TrainingError, match="rename or remove it") as caught:
        run_training(config(tmp_path / "inner" / "run"))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*evil*"))


def test_hashes_and_facts_are_small_or_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr(run_copy, "MOST_FACT_BYTES", 1000)
    store.pipe_file("/bucket/runs/name/.data", bytes(1001))
    with pytest.raises(TrainingError, match="1,001 bytes: it is no file of a run"):
        run_training(config(tmp_path / "run"))


# ---- Another run -----------------------------------------------------------------------------------------------------


def test_a_copy_of_another_run_is_refused_and_leaves_the_folder_as_it_was(store, tmp_path, monkeypatch):
    begin(tmp_path / "run", monkeypatch)
    before = {name: store.cat_file(f"/bucket/runs/name/{name}") for name in names(store)}
    other = tmp_path / "other"
    for changes, words in [
        ({"optimizer": {"learning_rate": 1e-3}}, "optimizer.learning_rate = 0.003, not 0.001"),
        ({"data": {"holdout": 0.3}}, "data.holdout"),
        ({"run": {"seed": 5}}, "run.seed = 0, not 5"),
    ]:
        with pytest.raises(ConfigError, match=r"give another run\.copy_to") as caught:
            run_training(config(other, **changes))
        assert words in str(caught.value)
        assert ADDRESS in str(caught.value)
    store.pipe_file("/bucket/runs/name/.data", b"other images \xff")
    with pytest.raises(ConfigError, match=r"begun with other images than digits has now: give another run\.copy_to"):
        run_training(config(other))
    store.pipe_file("/bucket/runs/name/.data", before[".data"])
    assert [path.name for path in other.iterdir()] == [".lock"]
    assert {name: store.cat_file(f"/bucket/runs/name/{name}") for name in names(store)} == before


@pytest.mark.parametrize("content", [b"\xff", b"[section", b"[run]\nunknown = 1\n"])
def test_a_configuration_that_is_none_is_one_sentence(store, tmp_path, content):
    store.pipe_file("/bucket/runs/name/config.toml", content)
    with pytest.raises(ConfigError) as caught:
        run_training(config(tmp_path / "run"))
    assert "\n" not in str(caught.value)
    assert tempfile.gettempdir() not in str(caught.value)


def test_the_address_is_checked_before_anything_happens(tmp_path, monkeypatch):
    for wrong in ("runs/copy", "ftp://host/folder", "s3://"):
        with pytest.raises(ConfigError, match=r"run\.copy_to"):
            config(tmp_path / "run", wrong)
    assert config(tmp_path / "run", "none").run.copy_to is None
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(ConfigError, match="pip install adlfs"):
        run_training(config(tmp_path / "run", "az://container/name"))


def test_a_model_card_does_not_tell_where_the_copy_is(tmp_path):
    assert hide_config_folders(config(tmp_path / "run")).run.copy_to is None


# ---- What cannot be --------------------------------------------------------------------------------------------------


def fail_uploads(monkeypatch, words: str = "checkpoints/", error: Exception | None = None) -> None:
    upload = RemoteFolder.upload

    def fail(self, path, name):
        if words in name:
            raise error or RemoteError("the bucket is gone")
        upload(self, path, name)

    monkeypatch.setattr(RemoteFolder, "upload", fail)


def test_an_upload_that_fails_is_told_and_tried_again(store, tmp_path, monkeypatch, whole, caplog):
    folder, ordinary = tmp_path / "run", RemoteFolder.upload
    failures = []

    def fail_twice(self, path, name):
        if name.startswith("checkpoints/") and len(failures) < 2:
            failures.append(name)
            raise RemoteError("the bucket is gone")
        ordinary(self, path, name)

    monkeypatch.setattr(RemoteFolder, "upload", fail_twice)
    run_training(config(folder))
    told = [each for each in warnings(caplog) if "the bucket is gone" in each]
    assert told
    assert all("tried again with the next checkpoint" in each and "\n" not in each for each in told)
    assert steps_there(store)[-1] == 12
    runs.assert_same_run(folder, whole)


def test_a_copy_that_cannot_be_finished_is_an_error_and_the_same_command_makes_up_for_it(
    store, tmp_path, monkeypatch, whole, caplog
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        fail_uploads(patch)
        with pytest.raises(TrainingError, match="finished and whole, but its copy") as caught:
            run_training(config(folder))
    assert "the bucket is gone; fix this and start the same command again" in str(caught.value)
    runs.assert_same_run(folder, whole)
    assert vitrail.load(folder) is not None
    run_training(config(folder))
    assert steps_there(store)[-1] == 12
    assert "SHA256SUMS" in names(store)


def test_a_stop_request_stays_one_if_the_copy_fails(store, tmp_path, monkeypatch, caplog):
    fail_uploads(monkeypatch, error=TimeoutError(errno.ETIMEDOUT, "timed out"))
    begin(tmp_path / "run", monkeypatch)
    assert any("timed out" in each for each in warnings(caplog))
    assert runs.checkpoints(tmp_path / "run")[-1].name == "step-00000007"


def test_a_bucket_that_cannot_be_written_is_an_error_before_the_first_step(store, tmp_path, monkeypatch):
    fail_uploads(monkeypatch, "config.toml")
    with pytest.raises(TrainingError, match=r"the bucket is gone; the run can also go on without run\.copy_to"):
        run_training(config(tmp_path / "run"))
    assert not list((tmp_path / "run").rglob("step-*"))


def test_a_full_disk_is_told_while_a_checkpoint_is_fetched(store, tmp_path, monkeypatch):
    begin(tmp_path / "run", monkeypatch)
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage)
        with pytest.raises(TrainingError, match="has no room for"):
            run_training(config(other))
    download = RemoteFolder.download

    def fill(self, name, path, *rest):
        if name.endswith(".safetensors"):
            raise FULL
        download(self, name, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "download", fill)
        with pytest.raises(TrainingError, match="has no room for"):
            run_training(config(other))
    assert not list(other.rglob("step-0*"))


class Usage:
    free = 0


# ---- The thread ------------------------------------------------------------------------------------------------------


def write(checkpoints: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, {"weight": torch.full((3,), float(step))}, {"step": step, "best": None}, None)
    checkpoints.finish()


def test_training_does_not_wait_for_the_copy_and_what_is_removed_meanwhile_is_copied_whole(
    store, tmp_path, monkeypatch
):
    folder, upload = tmp_path / "run", RemoteFolder.upload
    checkpoints = CheckpointFolder(folder / "checkpoints", ALONE, keep=1)
    checkpoints.open()
    started, go = threading.Event(), threading.Event()

    def slow(self, path, name):
        started.set()
        assert go.wait(20)
        upload(self, path, name)

    monkeypatch.setattr(RemoteFolder, "upload", slow)
    copied: list[int] = []
    upload_step = RunCopy._upload_step
    monkeypatch.setattr(
        RunCopy, "_upload_step", lambda self, step, path: (copied.append(step), upload_step(self, step, path))
    )
    copy = RunCopy(folder, ADDRESS)
    thread = CopyThread(copy)
    checkpoints.after_save = thread.notify
    write(checkpoints, 1)
    assert started.wait(20)
    write(checkpoints, 2, 3, 4)  # while the first is on its way
    assert list(checkpoints.list_steps()) == [4]
    go.set()
    thread.close()
    assert copied == [1, 4]
    assert steps_there(store) == [4]
    assert not list(folder.rglob("*-copied"))


def test_without_links_checkpoints_are_copied_from_where_they_are(store, tmp_path, monkeypatch):
    def refuse(*names):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(run_copy.os, "link", refuse)
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints", ALONE, keep=1)
    checkpoints.open()
    write(checkpoints, 1, 2)
    RunCopy(tmp_path / "run", ADDRESS).update()
    assert steps_there(store) == [2]
    assert checkpoints.find_newest() is not None


def test_an_error_that_nobody_expects_does_not_end_the_thread(store, tmp_path, caplog):
    copy = RunCopy(tmp_path, ADDRESS)
    copy.update = lambda: 1 / 0
    thread = CopyThread(copy)
    thread.notify()
    thread.close()
    assert "ZeroDivisionError" in warnings(caplog)[0]


# ---- Through a server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    with serve_buckets() as client:
        yield client


def test_data_and_copy_in_a_bucket(client, tmp_path, monkeypatch):
    """The data comes from s3://, the run is stopped, its folder and the cache are lost, and it goes on elsewhere."""
    from pictures import make_folder

    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitrail.data.sources.remote_copy._COPIES", {})
    put_folder(client, make_folder(tmp_path / "photos", {"a": 24, "b": 24}), "photos")
    address, model = f"s3://{BUCKET}/runs/photos", {"in_channels": 3}
    data = {"source": f"s3://{BUCKET}/photos", "batch_size": 8, "holdout": 0.25}
    run_training(config(tmp_path / "whole", data=data, model=model, run={"copy_to": None}))
    begin(tmp_path / "one", monkeypatch, address=address, data=data, model=model)
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr("vitrail.data.sources.remote_copy._COPIES", {})
    run_training(config(tmp_path / "other", address, data=data, model=model))
    runs.assert_same_run(tmp_path / "whole", tmp_path / "other")
    there = list_keys(client, "runs/photos")
    assert {"config.toml", "metrics.jsonl", "model/model.safetensors", "SHA256SUMS"} <= set(there)
    assert read_key(client, "runs/photos/metrics.jsonl") == (tmp_path / "other/metrics.jsonl").read_bytes()


TRAIN = """
import json, sys
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training
run_training(resolve(json.load(open(sys.argv[1]))))
"""


@pytest.mark.slow  # three processes that import torch
def test_a_run_killed_twice_each_time_on_another_machine(client, tmp_path):
    """kill -9 in the middle of training and copying; each start has an empty folder."""
    changes = {"schedule": {"steps": 60, "warmup_steps": 4}}
    address = f"s3://{BUCKET}/runs/killed"
    run_training(runs.config(tmp_path / "whole", **changes))
    for number in range(3):
        folder = tmp_path / f"machine-{number}"
        given = tmp_path / "config.json"
        given.write_text(json.dumps(runs.tree(folder, **changes, run={"copy_to": address})))
        child = subprocess.Popen([sys.executable, "-c", TRAIN, str(given)], stderr=subprocess.PIPE, text=True)
        if number < 2:
            before = newest_whole(client)
            while newest_whole(client) < before + 6:
                assert child.poll() is None, child.stderr.read()
                time.sleep(0.02)
            child.kill()
        errors = child.communicate()[1]
    assert child.returncode == 0, errors
    assert "comes from the copy" in errors
    runs.assert_same_run(tmp_path / "whole", folder)


@pytest.mark.slow  # several processes
def test_two_ranks_go_on_from_the_copy_of_another_machine(client, tmp_path):
    """Both ranks copy the data, one of them at a time; the first one copies and fetches the run."""
    from pictures import make_folder

    put_folder(client, make_folder(tmp_path / "photos", {"a": 24, "b": 24}), "photos-for-two")
    data = {"source": f"s3://{BUCKET}/photos-for-two", "batch_size": 8, "holdout": 0.25}
    changes = {"data": data, "model": {"in_channels": 3}, **SHORT}
    address, given = f"s3://{BUCKET}/runs/two", tmp_path / "jobs.json"

    def tree(name: str, **run) -> dict:
        return runs.tree(tmp_path / name, **changes, run={"evaluate_every": 6, **run})

    jobs = [
        {"tree": tree("whole"), "size": 2},
        {"tree": tree("one", copy_to=address), "size": 2, "stop_at": 8},
        {"tree": tree("other", copy_to=address), "size": 2},
    ]
    given.write_text(json.dumps(jobs))
    script = str(Path(__file__).with_name("ranks.py"))
    child = subprocess.run(
        [sys.executable, script, str(given)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VITRAIL_CACHE": str(tmp_path / "cache")},
        timeout=200,
    )
    assert child.returncode == 0, child.stderr
    assert [job["codes"] for job in json.loads(child.stdout)] == [[0, 0], [3, 3], [0, 0]], child.stderr
    assert "comes from the copy" in child.stderr
    assert runs.records(tmp_path / "other") == runs.records(tmp_path / "whole")
    ours, theirs = (read_weights(runs.checkpoints(tmp_path / name)[-1]) for name in ("other", "whole"))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def newest_whole(client) -> int:
    keys = list_keys(client, "runs/killed/checkpoints")
    return max((int(key[5:13]) for key in keys if key.endswith("/SHA256SUMS")), default=0)


def test_a_bucket_that_is_not_there_is_an_error_before_the_first_step(client, tmp_path):
    with pytest.raises(TrainingError, match="does not exist") as caught:
        run_training(config(tmp_path / "run", "s3://no-such-bucket/name"))
    assert "\n" not in str(caught.value)
