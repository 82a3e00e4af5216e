"""Commands whose runs have a copy in a bucket: the report is there too, and a lost folder is begun from it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import fsspec
import pytest
import runs
from striped import stripes

import vitrail
from vitrail.errors import Stopped
from vitrail.training import loop

pytestmark = pytest.mark.slow  # whole trainings

ADDRESS = "memory://bucket/runs/name"
SHORT = {"run.trackers": (), "run.deterministic": True, "run.log_every": 1, "run.copy_to": ADDRESS}


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def names(files) -> set[str]:
    return {path.removeprefix("/bucket/runs/name/") for path in files.store}


def check_copy(files, folder: Path) -> None:
    """Everything that the run left behind is in the copy, as it was when the command ended."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != ".lock":
            assert files.cat_file(f"/bucket/runs/name/{name}") == path.read_bytes(), name


def stop_at(step: int, monkeypatch) -> None:
    ordinary = loop.train_step

    def stopped(run, state):
        if state.progress.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", stopped)


def test_the_report_of_a_run_is_copied(store, tmp_path):
    tree = runs.tree(tmp_path / "run", schedule={"steps": 6, "warmup_steps": 0}, run={"copy_to": ADDRESS})
    result = vitrail.train(runs.resolve(tree))
    assert result.report is not None
    assert "report.html" in names(store)
    check_copy(store, tmp_path / "run")


@pytest.mark.parametrize("minutes", [None, 0.5])
def test_finetune_goes_on_from_the_copy(store, tmp_path, monkeypatch, minutes):
    """Also with what was planned, and with the head that was fitted, on the machine that was lost."""
    data = stripes(tmp_path / "stripes", classes=3, images=8)
    model = vitrail.create_model(
        "Ti/4", seed=0, image_size=16, width=32, depth=1, num_heads=2, mlp_dim=64, num_classes=5
    )
    settings = {**SHORT, "run.checkpoint_every": 2, **({"schedule.steps": 8} if minutes is None else {})}

    def finetune(folder: str, **changes):
        given = {**settings, **changes}
        return vitrail.finetune(str(data), model, folder=folder, minutes=minutes, settings=given)

    with monkeypatch.context() as patch:
        stop_at(5, patch)
        with pytest.raises(Stopped):
            finetune("runs/stripes")
    begun = Path("runs/stripes/config.toml").read_text()
    assert "start/model.safetensors" in names(store)
    shutil.rmtree("runs")
    result = finetune("runs/stripes")
    assert Path("runs/stripes/config.toml").read_text() == begun
    steps = [entry["step"] for entry in runs.records(result.folder) if entry["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 5
    check_copy(store, result.folder)
    assert not list(Path("runs").glob(".fetched-*"))
