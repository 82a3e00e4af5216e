"""Where metrics go besides metrics.jsonl: TensorBoard's event files, Weights & Biases, MLflow.

A tracker is a convenience. Whatever goes wrong with one in the middle of a run, a full disk or a network that is away,
is told once, and the run goes on without it. What can be known before the run starts is an error there.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, MissingExtraError, TrainingError, did_you_mean
from vitrail.system.files import write_whole

log = logging.getLogger("vitrail")

Values = Mapping[str, float]

IDENTITIES = "tracking.json"
"""In the run folder: which run of W&B and of MLflow this is, so that a resumed run goes on there as well."""
EVENTS = "events.out.tfevents."
"""TensorBoard reads files whose names begin like this."""
PROJECT = "vitrail"
"""Of W&B and MLflow, where the environment (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME) names no other."""
WAITING = 10_000
"""Values of so many records may wait for a slow network."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for what is still on its way."""
FLUSH_EVERY = 10.0
"""Seconds from one time that events are brought to the disk to the next."""
MLFLOW_PARAMETERS, MLFLOW_LETTERS = 100, 500
"""MLflow takes so many parameters at a time, and so much of each."""


class Tracker(ABC):
    """What every tracker is to the training loop."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """The values of a record, by names such as "train/loss" and "val/accuracy"."""

    @abstractmethod
    def close(self) -> None:
        """Send or write what is left."""


def name_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record with names for trackers: "train/loss", "val/accuracy", "train/images_per_second"."""
    group = record["kind"] if record["kind"] == "train" else record["part"]
    numbers = {**record, **record.get("clock", {})}
    return {
        f"{group}/{name}": float(value)
        for name, value in numbers.items()
        if name != "step" and isinstance(value, (int, float))
    }


def open_trackers(names: Sequence[str], folder: Path, config: dict[str, Any], step: int) -> list[Tracker]:
    """The trackers of a run, ready; only the first rank has any.

    Args:
        folder: The run's.
        config: What the run is, as nested dictionaries of plain values.
        step: The one that the run goes on from; 0 for a new one.
    """
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            if name not in OPENERS:
                near = did_you_mean(name, OPENERS)
                raise ConfigError(f"run.trackers has {name!r}{near or ', known are ' + ', '.join(OPENERS)}")
            if (tracker := _opened(name, folder, config, step)) is not None:
                trackers.append(tracker)
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _opened(name: str, folder: Path, config: dict[str, Any], step: int) -> Tracker | None:
    """A new run does not start without a tracker that was asked for. One that goes on, perhaps at night and by itself,
    is in its middle: it does."""
    try:
        return OPENERS[name](folder, config, step)
    except MissingExtraError:
        raise
    except Exception as error:
        told = f"the tracker {name} cannot be started: {_reason(error)}"
        if not step:
            raise TrainingError(f'{told}; mend that, or leave "{name}" out of run.trackers') from error
        log.warning("%s; the run goes on without it", told)
        return None


class TensorBoard(Tracker):
    """Event files in a folder.

    Written here and now by tensorboardX's record writer. Its SummaryWriter hands events to a thread, and once the disk
    is full and that thread is dead, waits for it for ever.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. By number, because clocks of machines differ.
        numbers = (path.name.removeprefix(EVENTS) for path in folder.glob(f"{EVENTS}*"))
        number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
        self._file = RecordWriter(str(folder / f"{EVENTS}{number:010d}"))
        self._flushed = time.monotonic()
        # The session's start makes TensorBoard forget events of earlier files from its step on.
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=0, file_version="brain.Event:2")
        self._write(step=purge_step, session_log=session)
        self._file.flush()

    def log(self, step: int, values: Values) -> None:
        """One event with all of them."""
        value = self._summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """What is left, to the disk."""
        try:
            self._file.flush()
        finally:
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class Wandb(Tracker):
    """A run of Weights & Biases; wandb's own environment variables say to whom and where."""

    def __init__(self, project: str, name: str, folder: Path, config: dict[str, Any], identity: str) -> None:
        self._run = _imported("wandb").init(
            project=project, name=name, dir=str(folder), config=config, id=identity, resume="allow"
        )
        # W&B's own steps only go up, and would refuse what a resumed run does again. As a value, a step may come twice.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        """With the step as one more value."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Waits for what is on its way."""
        self._run.finish()


class Mlflow(Tracker):
    """A run of MLflow; MLFLOW_TRACKING_URI says where."""

    def __init__(self, experiment: str, name: str, config: dict[str, Any], identity: str | None) -> None:
        mlflow = _imported("mlflow")
        self._client, self._metric, parameter = mlflow.MlflowClient(), mlflow.entities.Metric, mlflow.entities.Param
        if identity is not None:
            self.identity = identity
            self._client.update_run(identity, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self.identity = str(self._client.create_run(place, run_name=name).info.run_id)
        parameters = [parameter(key, str(value)[:MLFLOW_LETTERS]) for key, value in _flat(config).items()]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._client.log_batch(self.identity, params=parameters[start : start + MLFLOW_PARAMETERS])

    def log(self, step: int, values: Values) -> None:
        """All in one request."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self) -> None:
        """Mark it as ended; going on with it marks it as running again."""
        self._client.set_terminated(self.identity)


class GuardedTracker(Tracker):
    """Another tracker, whose first failure is told, and is the last that is heard of it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def log(self, step: int, values: Values) -> None:
        """If it still works."""
        tracker = self._tracker
        if tracker is None:
            return
        try:
            tracker.log(step, values)
        except Exception as error:
            self._tracker = None
            log.warning("the tracker %s fails: %s; the run goes on without it", self._name, _reason(error))
            with suppress(Exception):
                tracker.close()  # what it holds open

    def close(self) -> None:
        """If it still works."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.close()
        except Exception as error:
            log.warning("the tracker %s does not close: %s", self._name, _reason(error))


class BackgroundTracker(Tracker):
    """Another tracker on a thread of its own: a network that keeps trying for minutes must not hold up a step, or
    other ranks give up waiting for this one."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._waiting: queue.Queue[tuple[int, Values] | None] = queue.Queue(WAITING)
        self._full = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Values) -> None:
        """At once; what there is no room for is dropped."""
        try:
            self._waiting.put_nowait((step, dict(values)))
        except queue.Full:
            if not self._full:
                log.warning("the tracker %s is too slow: some values do not get there", self._name)
            self._full = True

    def close(self) -> None:
        """Waits for what is on its way, but not for ever."""
        deadline = time.monotonic() + PATIENCE
        with suppress(queue.Full):
            self._waiting.put(None, timeout=PATIENCE)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the tracker %s does not come to an end: the last values may not have got there", self._name)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._tracker.log(*item)
        self._tracker.close()


def _open_tensorboard(folder: Path, config: dict[str, Any], step: int) -> Tracker:
    return GuardedTracker("tensorboard", TensorBoard(folder / "tensorboard", purge_step=step + 1 if step else 0))


def _open_wandb(folder: Path, config: dict[str, Any], step: int) -> Tracker:
    _imported("wandb")  # before anything is written
    identity = _identity(folder, "wandb")
    if identity is None:
        identity = uuid.uuid4().hex[:16]
        _remember(folder, "wandb", identity)  # before W&B knows it: a run that dies in between is found again
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    return BackgroundTracker(
        "wandb", GuardedTracker("wandb", Wandb(project, folder.resolve().name, folder, config, identity))
    )


def _open_mlflow(folder: Path, config: dict[str, Any], step: int) -> Tracker:
    identity = _identity(folder, "mlflow")
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    tracker = Mlflow(experiment, folder.resolve().name, config, identity)
    if identity is None:
        _remember(folder, "mlflow", tracker.identity)
    return BackgroundTracker("mlflow", GuardedTracker("mlflow", tracker))


OPENERS: dict[str, Callable[[Path, dict[str, Any], int], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"the tracker {name}", name) from error


def _identity(folder: Path, name: str) -> str | None:
    path = folder / IDENTITIES
    return json.loads(path.read_bytes()).get(name) if path.exists() else None


def _remember(folder: Path, name: str, identity: str) -> None:
    path = folder / IDENTITIES
    known = json.loads(path.read_bytes()) if path.exists() else {}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**known, name: identity}, indent=2).encode() + b"\n")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with names such as "optimizer.learning_rate"."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _reason(error: Exception) -> str:
    """On one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
