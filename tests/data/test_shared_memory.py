"""Too little shared memory, as in a container with 64 MB of it: it is told in a sentence with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from pictures import make_folder

from vitrail.config import Preprocessing
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.errors import DataError

FULL = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
SMALL_MEMORY = 'mount -t tmpfs -o size=100k tmpfs /dev/shm || exit 77; exec "$@"'
SETTINGS = [
    "model.image_size=64",
    "model.depth=1",
    "model.width=32",
    "model.num_heads=2",
    "data.batch_size=64",
    "schedule.warmup_steps=0",
    "data.validate_on=val",
    "run.graphs=false",
]


@pytest.fixture
def photos(tmp_path):
    return make_folder(tmp_path / "photos", {"cat": 40, "dog": 40})


def fail_with(monkeypatch, message: str) -> None:
    def refuse(size: int) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)


@pytest.mark.parametrize("kind", [TrainingLoader, EvaluationLoader])
def test_it_is_told_with_what_to_do(photos, monkeypatch, kind):
    fail_with(monkeypatch, FULL)
    shape = (4, 16) if kind is TrainingLoader else (Preprocessing(image_size=16), 4)
    loader = kind(photos, *shape, workers=1, start_method="fork")
    with pytest.raises(DataError, match=r"no room in shared memory.*--shm-size=2g.*data\.workers=0"):
        next(iter(loader))


def test_other_errors_are_not_called_so(photos, monkeypatch):
    fail_with(monkeypatch, "another error")
    loader = TrainingLoader(photos, 4, 16, workers=1, start_method="fork")
    with pytest.raises(RuntimeError, match="another error"):
        next(iter(loader))


@pytest.mark.slow
def test_a_training_where_there_is_little(photos, tmp_path):
    """In a mount namespace whose /dev/shm holds less than a batch."""
    command = [sys.executable, "-m", "vitrail", "train", "cifar10-scratch", f"data.source={photos}", "data.workers=2"]
    command += [*SETTINGS, "schedule.steps=2", f"run.folder={tmp_path / 'run'}", "run.report=false"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    child = subprocess.run(
        ["unshare", "--mount", "bash", "-c", SMALL_MEMORY, "bash", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    if child.returncode in (1, 77) and ("unshare" in child.stderr or child.returncode == 77):
        pytest.skip(f"no file system may be mounted here: {child.stderr}")
    assert child.returncode == 1, child.stderr
    last = child.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "no room in shared memory (0 MB in all): give a container more of it" in last
    assert "Traceback" not in child.stderr
