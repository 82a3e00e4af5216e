"""Checkpoints: bit for bit, whole or passed over, and what happens where they cannot be written.

As a script, `python test_checkpoint.py FOLDER`: a run on a small disk mounted there (see the last test).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import runs
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from vitrail.errors import TrainingError
from vitrail.system.ranks import Ranks
from vitrail.training import checkpoint_folder
from vitrail.training.averaging import Average
from vitrail.training.checkpoint import name_tensors
from vitrail.training.checkpoint_folder import CheckpointFolder
from vitrail.training.optim import initialise_state
from vitrail.training.records import read_records
from vitrail.training.run_training import run_training

ALONE = Ranks(0, 1, torch.device("cpu"))
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@pytest.fixture
def kept(tmp_path) -> CheckpointFolder:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", ALONE, keep=2)
    checkpoints.open()
    return checkpoints


def write(checkpoints: CheckpointFolder, *steps: int, best: int | None = None) -> None:
    """Each step's tensor tells its step."""
    for step in steps:
        checkpoints.save(step, {"weight": torch.full((3,), float(step))}, {"step": step}, best)
    checkpoints.finish()


def loaded(checkpoints: CheckpointFolder) -> int | None:
    """The step of the newest, by its tensor and by its record."""
    path = checkpoints.find_newest()
    if path is None:
        return None
    tensors = {"weight": torch.zeros(3)}
    record = checkpoints.load(path, tensors)
    assert tensors["weight"].tolist() == [record["step"]] * 3
    assert path.name == f"step-{record['step']:08}"
    return record["step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- There and back --------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_type_bit_for_bit(kept):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 24), generator=generator, dtype=torch.uint8)
    tensors = {f"a/{kind}": noise.view(kind) for kind in DTYPES if kind != torch.bool}  # any bits, NaNs among them
    tensors |= {"a/bool": noise > 100, "turned": noise.T, "none": torch.empty(0, 3), "one": torch.tensor([-0.0])}
    tensors["number"] = torch.tensor(2.5).view(1)
    record = {"position": 3, "norm": float("nan"), "nested": {"pair": [0.1, 1e-300]}, "best": None}
    kept.save(7, tensors, record)
    kept.finish()
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in found.items()}
    read_back = kept.load(kept.find_newest(), found)
    for name, tensor in tensors.items():
        assert bits(found[name]) == bits(tensor), name
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].data_ptr() == places[name]  # into the tensors that were there
    assert read_back.pop("tensors") == sorted(tensors)
    assert str(read_back) == str(record)


class Small(nn.Module):
    """With a buffer that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_what_is_loaded_goes_on_bit_for_bit(kept, kind):
    def begun(seed: int):
        torch.manual_seed(seed)
        module = Small()
        if kind == "sgd":
            optimizer = torch.optim.SGD(module.parameters(), 0.001, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(module.parameters(), 0.01)
        initialise_state(optimizer)
        return module, optimizer, Average(module, 0.9)

    def trained(parts, steps: range) -> dict[str, torch.Tensor]:
        module, optimizer, average = parts
        for step in steps:
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            module(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(step)
        return name_tensors(*parts)

    with torch.random.fork_rng():
        one, other = begun(0), begun(1)
    halfway = trained(one, range(3))
    kept.save(3, halfway, {})
    expected = {name: tensor.clone() for name, tensor in trained(one, range(3, 6)).items()}
    kept.finish()
    kept.load(kept.find_newest(), name_tensors(*other))
    assert other[0].layers[1].num_batches_tracked == 3
    found = trained(other, range(3, 6))
    assert {name.split("/")[0] for name in found} == {"objective", "optimizer", "average"}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.isfinite(tensor).all()
        assert torch.equal(found[name], tensor), name


def test_what_changes_after_save_is_not_in_it(kept, monkeypatch):
    ordinary, go = state_dict_saver.save, threading.Event()

    def late(*arguments, **options):
        assert go.wait(20)
        return ordinary(*arguments, **options)

    monkeypatch.setattr(state_dict_saver, "save", late)
    tensors, record = {"weight": torch.full((3,), 5.0)}, {"step": 5, "window": {"loss": [1.0]}}
    kept.save(5, tensors, record)
    tensors["weight"].fill_(-1)
    tensors["other"] = torch.zeros(1)
    record["step"] = 6
    record["window"]["loss"][0] = 2.0
    go.set()
    kept.finish()
    assert loaded(kept) == 5
    assert json.loads((kept.find_newest() / "state.json").read_text())["window"] == {"loss": [1.0]}


# ---- What is in the folder -------------------------------------------------------------------------------------------


def test_there_is_no_pickle_and_every_file_has_its_hash(kept):
    write(kept, 1)
    (folder,) = kept.folder.iterdir()
    shard = "shard-00001-model-00001-of-00001.safetensors"
    assert names(folder) == ["SHA256SUMS", shard, "state.json"]
    content = (folder / shard).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["weight"]["dtype"] == "F32"
    with safe_open(folder / shard, "pt") as file:
        assert list(file.keys()) == ["weight"]
    assert json.loads((folder / "state.json").read_text()) == {"step": 1, "tensors": ["weight"]}
    hashes = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in (shard, "state.json")]
    assert (folder / "SHA256SUMS").read_text().splitlines() == hashes
    for path in folder.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK"))  # pickle, and torch's archive of pickles


def test_the_newest_stay_and_the_best(kept):
    write(kept, 2, 4, best=2)
    assert list(kept.list_steps()) == [2, 4]
    write(kept, 6, 8, 10, best=2)
    assert list(kept.list_steps()) == [2, 8, 10]
    write(kept, 12, best=12)  # another is the best
    assert list(kept.list_steps()) == [10, 12]
    assert names(kept.folder) == ["step-00000010", "step-00000012"]
    assert loaded(kept) == 12


def test_steps_are_numbers_however_long(kept):
    kept.keep = 9
    write(kept, 99_999_999, 100_000_000, 5)
    assert list(kept.list_steps()) == [5, 99_999_999, 100_000_000]
    assert loaded(kept) == 100_000_000


def test_folders_of_a_person_are_left_alone(kept):
    write(kept, 1)
    for name in ("step-00000001 (copy)", "step-old", "step-", "mine"):
        (kept.folder / name).mkdir()
    kept.open()
    write(kept, 2, 3)
    assert list(kept.list_steps()) == [2, 3]
    assert loaded(kept) == 3
    assert set(names(kept.folder)) >= {"step-00000001 (copy)", "step-old", "step-", "mine"}


def test_what_is_unfinished_is_never_read_and_removed_at_the_start(kept):
    write(kept, 1, 2)
    whole = kept.folder / "step-00000002"
    whole.rename(kept.folder / ".unfinished-step-00000002")  # all but the last moment
    (kept.folder / ".unfinished-step-00000001-old").mkdir()
    assert loaded(kept) == 1
    again = CheckpointFolder(kept.folder, ALONE, keep=2)
    again.open()
    assert names(kept.folder) == ["step-00000001"]
    assert loaded(again) == 1


def test_a_new_folder_is_made_and_empty(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "far" / "away", ALONE, keep=1)
    checkpoints.open()
    assert checkpoints.folder.is_dir()
    assert checkpoints.find_newest() is None
    checkpoints.finish()  # nothing to wait for


# ---- Damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def shard(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


DAMAGES = {
    "a bit of a tensor": lambda folder: flip(shard(folder), -1),
    "a bit of the header": lambda folder: flip(shard(folder), 12),
    "a bit of the state": lambda folder: flip(folder / "state.json", 10),
    "a bit of the hashes": lambda folder: flip(folder / "SHA256SUMS", 3),
    "a shard cut off": lambda folder: os.truncate(shard(folder), shard(folder).stat().st_size - 1),
    "an empty shard": lambda folder: shard(folder).write_bytes(b""),
    "no shard": lambda folder: shard(folder).unlink(),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "no hashes": lambda folder: (folder / "SHA256SUMS").unlink(),
    "empty hashes": lambda folder: (folder / "SHA256SUMS").write_bytes(b""),
    "hashes cut off": lambda folder: os.truncate(folder / "SHA256SUMS", 100),
    "hashes that are none": lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff\n\n"),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


def warnings(caplog) -> list[str]:
    """Ours: torch logs every step that it takes."""
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == ("vitrail", logging.WARNING)]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_passed_over_for_the_one_before(kept, kind, caplog):
    write(kept, 1, 2)
    assert loaded(kept) == 2
    assert not warnings(caplog)
    DAMAGES[kind](kept.folder / "step-00000002")
    assert loaded(kept) == 1
    (warning,) = warnings(caplog)
    assert "damaged-step-00000002" in warning
    assert "\n" not in warning
    assert list(kept.list_steps()) == [1], "a later start does not take it up again"
    DAMAGES[kind](kept.folder / "step-00000001")
    for _ in range(3):  # a later start does not begin from step 0 either
        with pytest.raises(TrainingError, match="none of the 2 checkpoints"):
            kept.find_newest()
    for name in ("damaged-step-00000001", "damaged-step-00000002"):
        path = kept.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert kept.find_newest() is None, "a person has decided to begin again"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (lambda state: {name: value for name, value in state.items() if name != "position"}, "position"),
        (lambda state: {name: value for name, value in state.items() if name != "scaler"}, "scaler"),
        (lambda state: {name: value for name, value in state.items() if name != "tensors"}, "tensors"),
        (lambda state: [], "tensors"),
        (lambda state: "{", "JSON"),
    ],
    ids=["no position", "no scaler", "no tensors", "a list", "no JSON"],
)
def test_a_state_that_lacks_something_is_one_sentence(tmp_path, content, named):
    """Its hash is right: somebody has written it so."""
    config = runs.config(tmp_path / "run", schedule={"steps": 6, "warmup_steps": 0}, run={"checkpoint_every": 6})
    run_training(config)
    (folder,) = runs.checkpoints(tmp_path / "run")
    path, sums = folder / "state.json", folder / "SHA256SUMS"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    changed = content(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(path.read_bytes()).hexdigest()))
    with pytest.raises(TrainingError, match=named) as caught:
        run_training(config)
    assert "state.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_one_does_not_push_out_what_is_written_after_it(kept, caplog):
    """Gone on from step 3 with another interval: 4 is newer than 3, and older than what was passed over."""
    write(kept, 3, 6)
    flip(shard(kept.folder / "step-00000006"), -1)
    again = CheckpointFolder(kept.folder, ALONE, keep=1)
    again.open()
    assert loaded(again) == 3
    write(again, 4)
    assert loaded(again) == 4
    write(again, 6)  # written anew in the place of the damaged one
    assert loaded(again) == 6
    assert list(again.list_steps()) == [6]


# ---- What cannot be --------------------------------------------------------------------------------------------------


def test_another_runs_checkpoint_is_refused(kept):
    write(kept, 1)
    path = kept.find_newest()
    for tensors, name in [
        ({"weight": torch.zeros(3), "bias": torch.zeros(1)}, "bias"),
        ({}, "weight"),
        ({"other": torch.zeros(3)}, "other"),
    ]:
        with pytest.raises(TrainingError) as caught:
            kept.load(path, tensors)
        assert str(path) in str(caught.value)
        assert f" {name} " in str(caught.value)
    with pytest.raises(TrainingError, match=r"Size mismatch .* for weight$"):
        kept.load(path, {"weight": torch.zeros(4)})


FULL = OSError(errno.ENOSPC, "No space left on device")
ERRORS = {
    "full": (FULL, "No space left on device"),
    "many lines": (RuntimeError("first\nsecond"), "first"),
    "none": (RuntimeError(), "RuntimeError"),
    "torch's": (CheckpointException("write", {0: (FULL, None)}), "No space left on device"),
}


@pytest.mark.parametrize("then", ["save", "finish"])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_in_the_background_is_told_at_the_next_occasion(kept, monkeypatch, kind, then):
    error, why = ERRORS[kind]
    write(kept, 1, 2)

    def fail(staged, storage_writer, **options):
        (Path(storage_writer.path) / "half.safetensors").write_bytes(bytes(1000))
        raise error

    monkeypatch.setattr(state_dict_saver, "save", fail)
    tensors = {"weight": torch.zeros(3)}
    kept.save(3, tensors, {})  # goes on meanwhile
    with pytest.raises(TrainingError) as caught:
        kept.finish() if then == "finish" else kept.save(4, tensors, {})
    assert f"{kept.folder}: {why}; " in str(caught.value)
    assert "step 2;" in str(caught.value)
    assert names(kept.folder) == ["step-00000001", "step-00000002"]  # half a one takes no room
    assert loaded(kept) == 2
    monkeypatch.undo()
    write(kept, 5)  # it is told once
    assert loaded(kept) == 5


def test_an_error_while_hashing_leaves_no_name(kept, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_folder, "sha256", fail)
    kept.save(1, {"weight": torch.zeros(3)}, {})
    with pytest.raises(TrainingError, match=r"Input/output error; .*no checkpoint"):
        kept.finish()
    assert names(kept.folder) == []


def test_a_folder_that_cannot_be_written(kept):
    write(kept, 1)
    shutil.rmtree(kept.folder)
    kept.folder.write_text("a file in its place")
    with pytest.raises(TrainingError, match=r"Not a directory|File exists"):
        kept.save(2, {"weight": torch.zeros(3)}, {})


# ---- A full disk -----------------------------------------------------------------------------------------------------

IN_ITS_OWN = ["unshare", "--map-root-user", "--mount"]
"""A namespace in which anyone may mount."""


def may_mount() -> bool:
    if not shutil.which("unshare"):
        return False
    tried = subprocess.run([*IN_ITS_OWN, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs unshare, and leave to mount a file system of its own")
def test_a_full_disk_ends_the_run_in_one_line_and_with_room_it_goes_on(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=2m none "{disk}" && exec "{sys.executable}" "{__file__}" "{disk}"'
    child = subprocess.run(
        [*IN_ITS_OWN, "sh", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    told = found["told"]
    assert "\n" not in told
    if "metrics.jsonl" not in told:  # what comes first on a full disk is a matter of moments
        assert f"{disk}/run/checkpoints: No space left on device; " in told
        assert f"step {found['newest']};" in told
    assert "No space left on device" in told
    assert 1 <= found["newest"] <= 15
    # Not torn, and nothing of what the checkpoint knows is missing.
    assert found["steps"] == list(range(1, len(found["steps"]) + 1))
    assert len(found["steps"]) >= found["newest"]
    assert found["whole"] is True


def on_a_small_disk(disk: Path) -> None:
    """A run until the disk is full; then more room, and the same command again; beside it a run that had room."""
    every = {"checkpoint_every": 1, "keep": 100}
    config = runs.config(disk / "run", run=every)
    try:
        run_training(config)
        raise AssertionError("the disk is not full")
    except TrainingError as error:
        told = str(error)
    content = (disk / "run/metrics.jsonl").read_bytes()
    assert content.endswith(b"\n")
    steps = [record["step"] for record in read_records(disk / "run/metrics.jsonl") if record["kind"] == "train"]
    newest = CheckpointFolder(disk / "run/checkpoints", ALONE, keep=100).find_newest()
    assert newest is not None
    kept = runs.tensors(newest)
    assert all(torch.isfinite(tensor).all() for tensor in kept.values())
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    run_training(config)
    run_training(runs.config(disk / "other", run=every))
    runs.assert_same_run(disk / "run", disk / "other")
    print(json.dumps({"told": told, "newest": int(newest.name[5:]), "steps": steps, "whole": True}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_a_small_disk(Path(sys.argv[1]))
