"""Trackers: what is logged can be found there, a resumed run goes on in the same place, and no failure ends a run."""

from __future__ import annotations

import json
import logging
import math
import struct
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, masked_crc32c

from vitrail.errors import ConfigError, MissingExtraError, TrainingError
from vitrail.training import trackers
from vitrail.training.trackers import (
    BackgroundTracker,
    GuardedTracker,
    TensorBoard,
    Tracker,
    name_values,
    open_trackers,
)

CONFIG = {"model": {"name": "S/16", "image_size": [32, 32]}, "optimizer": {"learning_rate": 1e-3, "clip_norm": None}}


# Names.


def test_values_of_records():
    train = {"kind": "train", "step": 50, "epoch": 0.5, "loss": 1.25, "skipped": 0, "accuracy": None}
    assert name_values({**train, "clock": {"seconds": 2.0, "images_per_second": 100}}) == {
        "train/epoch": 0.5,
        "train/loss": 1.25,
        "train/skipped": 0.0,
        "train/seconds": 2.0,
        "train/images_per_second": 100.0,
    }
    evaluation = {"kind": "evaluation", "step": 50, "part": "val", "loss": 1.5, "accuracy": 0.5}
    assert name_values(evaluation) == {"val/loss": 1.5, "val/accuracy": 0.5}


# TensorBoard.


def events(path: Path) -> list[Event]:
    """TFRecords: length, checksum of the length, content, checksum of the content."""
    content, found = path.read_bytes(), []
    while content:
        length, checksum = struct.unpack("<QI", content[:12])
        assert checksum == masked_crc32c(content[:8])
        data, (checksum,) = content[12 : 12 + length], struct.unpack("<I", content[12 + length : 16 + length])
        assert checksum == masked_crc32c(data)
        found.append(Event.FromString(data))
        content = content[16 + length :]
    return found


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """As TensorBoard shows a folder: files by name, and what a session's start tells it to forget forgotten."""
    shown: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        first, *others = events(path)
        assert first.file_version == "brain.Event:2"
        for event in others:
            if event.HasField("session_log"):
                assert event.session_log.status == SessionLog.START
                shown = {name: {s: v for s, v in of.items() if s < event.step} for name, of in shown.items()}
            for value in event.summary.value:
                assert event.step not in shown.get(value.tag, {})
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return {name: of for name, of in shown.items() if of}


def test_tensorboard_files_hold_the_scalars(tmp_path):
    (tracker,) = open_trackers(["tensorboard"], tmp_path, CONFIG, 0)
    before = time.time()
    tracker.log(50, {"train/loss": 1.25, "train/learning_rate": 0.5})
    tracker.log(100, {"train/loss": 0.75, "train/learning_rate": math.inf})
    tracker.log(100, {"val/accuracy": 0.5})
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": {50: 1.25, 100: 0.75},
        "train/learning_rate": {50: 0.5, 100: math.inf},
        "val/accuracy": {100: 0.5},
    }
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert "tfevents" in path.name
    assert all(before - 60 < event.wall_time <= time.time() for event in events(path))


@pytest.mark.parametrize(
    ("step", "kept"), [(0, []), (10, [10]), (20, [10, 20]), (25, [10, 20]), (30, [10, 20, 30]), (90, [10, 20, 30])]
)
def test_after_a_resume_events_of_steps_done_again_are_forgotten(tmp_path, step, kept):
    """All starts are within a second, the resolution of the time that event files are usually named by."""
    for start, steps in ((0, [10, 20, 30]), (step, [step + 10, step + 20]), (step + 10, [step + 20])):
        (tracker,) = open_trackers(["tensorboard"], tmp_path, CONFIG, start)
        for at in steps:
            tracker.log(at, {"train/loss": float(at)})
        tracker.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3
    shown = scalars(tmp_path / "tensorboard")["train/loss"]
    assert shown == {at: float(at) for at in [*kept, step + 10, step + 20]}


def test_events_are_on_the_disk_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "FLUSH_EVERY", 0.0)
    tracker = TensorBoard(tmp_path, 0)
    tracker.log(1, {"train/loss": 1.0})
    assert scalars(tmp_path) == {"train/loss": {1: 1.0}}
    tracker.close()


def test_a_full_disk_is_told_once_and_nothing_hangs(tmp_path, monkeypatch, caplog):
    (tracker,) = open_trackers(["tensorboard"], tmp_path, CONFIG, 0)
    tracker.log(1, {"train/loss": 1.0})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr(RecordWriter, "flush", full)
    started = time.monotonic()
    for step in range(2, 100):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    tracker.close()
    assert time.monotonic() - started < 5
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("vitrail", logging.WARNING)
    told = "the tracker tensorboard fails: OSError: [Errno 28] No space left on device; the run goes on without it"
    assert record.getMessage() == told
    assert scalars(tmp_path / "tensorboard") == {"train/loss": {1: 1.0}}  # its file was closed, and is whole


def test_a_disk_that_fills_before_the_end_is_told_at_the_end(tmp_path, caplog):
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    tracker = TensorBoard(tmp_path, 0)
    tracker._file.close()
    tracker._file = RecordWriter("/dev/full")
    guarded = GuardedTracker("tensorboard", tracker)
    guarded.log(1, {"train/loss": 1.0})  # still in a buffer
    guarded.close()
    (told,) = caplog.messages
    assert told.startswith("the tracker tensorboard does not close: OSError: [Errno 28] No space left")


# Opening.


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        open_trackers(["wanbd"], tmp_path, CONFIG, 0)
    with pytest.raises(ConfigError, match="'x', known are tensorboard, wandb, mlflow"):
        open_trackers(["x"], tmp_path, CONFIG, 0)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("step", [0, 100])
def test_a_missing_package_is_told_before_anything_is_written(tmp_path, monkeypatch, name, step):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf'the tracker {name} needs an extra: pip install "vitrail\[{name}\]"'):
        open_trackers([name], tmp_path, CONFIG, step)
    assert not list(tmp_path.iterdir())


def test_when_one_cannot_be_opened_those_before_it_are_closed(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(TensorBoard, "close", lambda self: closed.append(self._file.close()))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError):
        open_trackers(["tensorboard", "mlflow"], tmp_path, CONFIG, 0)
    assert closed == [None]


def test_a_tracker_named_twice_is_one(tmp_path):
    found = open_trackers(["tensorboard", "tensorboard"], tmp_path, CONFIG, 0)
    assert len(found) == 1
    found[0].close()


def test_a_tracker_that_cannot_start_stops_a_new_run_but_not_one_that_goes_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(TrainingError, match=r'tensorboard cannot be started: .*leave "tensorboard" out'):
        open_trackers(["tensorboard"], tmp_path, CONFIG, 0)
    assert not caplog.records
    assert open_trackers(["tensorboard"], tmp_path, CONFIG, 50) == []
    assert caplog.messages[0].endswith("; the run goes on without it")


# Weights & Biases.


class WandbRun:
    def __init__(self, **options: object) -> None:
        self.options, self.logged, self.metrics, self.finished = options, [], [], 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in, and the runs that were started with it."""
    runs: list[WandbRun] = []
    module = ModuleType("wandb")
    module.init = lambda **options: runs.append(WandbRun(**options)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def test_wandb(wandb, tmp_path):
    folder = tmp_path / "digits"
    (tracker,) = open_trackers(["wandb"], folder, CONFIG, 0)
    tracker.log(50, {"train/loss": 1.5})
    tracker.log(50, {"val/loss": 2.5})
    tracker.close()
    (run,) = wandb
    identity = json.loads((folder / "tracking.json").read_text())["wandb"]
    assert run.options == {
        "project": "vitrail",
        "name": "digits",
        "dir": str(folder),
        "config": CONFIG,
        "id": identity,
        "resume": "allow",
    }
    assert run.logged == [{"step": 50, "train/loss": 1.5}, {"step": 50, "val/loss": 2.5}]
    assert ("*", "step") in run.metrics
    assert run.finished == 1


def test_wandb_goes_on_with_the_same_run_and_another_folder_is_another(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "elsewhere")
    for folder, step in (("a", 0), ("a", 100), ("b", 0)):
        (tracker,) = open_trackers(["wandb"], tmp_path / folder, CONFIG, step)
        tracker.close()
    first, again, other = [run.options["id"] for run in wandb]
    assert first == again != other
    assert {run.options["project"] for run in wandb} == {"elsewhere"}


# MLflow.


class MlflowServer:
    """What the client of the stand-in talks to."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        return self.experiments.setdefault(name, f"experiment-{len(self.experiments)}")

    def create_run(self, experiment_id, run_name):
        identity = f"run-{len(self.runs)}"
        self.runs[identity] = SimpleNamespace(
            experiment=experiment_id, name=run_name, params={}, metrics=[], states=["RUNNING"]
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=identity))

    def update_run(self, run_id, status):
        self.runs[run_id].states.append(status)

    def set_terminated(self, run_id):
        self.runs[run_id].states.append("FINISHED")

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        run = self.runs[run_id]
        for key, value in params:
            assert run.params.setdefault(key, value) == value  # MLflow refuses to change a parameter
        run.metrics += metrics


@pytest.fixture
def mlflow(monkeypatch):
    server, module = MlflowServer(), ModuleType("mlflow")
    module.MlflowClient = lambda: server
    module.entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: (key, value, timestamp, step), Param=lambda key, value: (key, value)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return server


def test_mlflow_goes_on_with_the_same_run(mlflow, tmp_path):
    for step, config in ((0, CONFIG), (100, {"model": {"name": "changed"}})):
        (tracker,) = open_trackers(["mlflow"], tmp_path / "digits", config, step)
        tracker.log(step + 50, {"train/loss": 1.5})
        tracker.close()
    assert json.loads((tmp_path / "digits/tracking.json").read_text()) == {"mlflow": "run-0"}
    (run,) = mlflow.runs.values()
    assert (run.experiment, run.name) == (mlflow.experiments["vitrail"], "digits")
    assert run.params == {
        "model.name": "S/16",
        "model.image_size": "[32, 32]",
        "optimizer.learning_rate": "0.001",
        "optimizer.clip_norm": "None",
    }
    assert [(key, value, step) for key, value, _, step in run.metrics] == [
        ("train/loss", 1.5, 50),
        ("train/loss", 1.5, 150),
    ]
    assert all(abs(stamp / 1000 - time.time()) < 60 for _, _, stamp, _ in run.metrics)
    assert run.states == ["RUNNING", "FINISHED", "RUNNING", "FINISHED"]


def test_mlflow_takes_long_configurations_in_parts(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "flowers")
    mlflow.create_experiment("flowers")
    config = {"a": {str(number): "x" * number for number in range(510)}}
    (tracker,) = open_trackers(["mlflow"], tmp_path / "digits", config, 0)
    tracker.close()
    (run,) = mlflow.runs.values()
    assert len(run.params) == 510
    assert max(map(len, run.params.values())) == 500
    assert list(mlflow.experiments) == ["flowers"]


def test_identities_live_beside_each_other(wandb, mlflow, tmp_path):
    for tracker in open_trackers(["mlflow", "wandb"], tmp_path, CONFIG, 0):
        tracker.close()
    kept = json.loads((tmp_path / "tracking.json").read_text())
    assert kept == {"mlflow": "run-0", "wandb": wandb[0].options["id"]}
    assert [path.name for path in tmp_path.iterdir()] == ["tracking.json"]


# Failures.


def test_a_network_that_goes_away_is_told_once(wandb, mlflow, tmp_path, caplog):
    several = open_trackers(["wandb", "mlflow"], tmp_path, CONFIG, 0)

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("the network\nis away")

    wandb[0].log = mlflow.log_batch = away
    for step in range(10):
        for tracker in several:
            tracker.log(step, {"train/loss": 1.0})
    for tracker in several:
        tracker.close()
    assert sorted(caplog.messages) == [
        f"the tracker {name} fails: ConnectionError: the network is away; the run goes on without it"
        for name in ("mlflow", "wandb")
    ]
    assert wandb[0].finished == 1


class Stuck(Tracker):
    """Takes one record and does not come back until it is let go."""

    def __init__(self) -> None:
        self.go, self.taken, self.closed = threading.Event(), [], False

    def log(self, step, values):
        self.taken.append((step, values))
        self.go.wait(60)

    def close(self):
        self.closed = True


def test_a_tracker_that_hangs_holds_up_nobody(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "WAITING", 5)
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    stuck = Stuck()
    tracker = BackgroundTracker("slow", stuck)
    started = time.monotonic()
    for step in range(20):
        tracker.log(step, {"train/loss": 1.0})
    assert time.monotonic() - started < 0.3
    tracker.close()
    assert time.monotonic() - started < 5
    assert caplog.messages == [
        "the tracker slow is too slow: some values do not get there",
        "the tracker slow does not come to an end: the last values may not have got there",
    ]
    stuck.go.set()


def test_what_waits_gets_there_in_order_and_as_it_was():
    stuck = Stuck()
    tracker = BackgroundTracker("slow", stuck)
    values = {"train/loss": 0.0}
    for step in range(50):
        values["train/loss"] = float(step)  # the caller's own, and used again
        tracker.log(step, values)
    stuck.go.set()
    tracker.close()
    assert stuck.taken == [(step, {"train/loss": float(step)}) for step in range(50)]
    assert stuck.closed
    assert not tracker._thread.is_alive()


def test_interruptions_are_not_failures():
    class Interrupted(Stuck):
        def log(self, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedTracker("x", Interrupted()).log(1, {})
