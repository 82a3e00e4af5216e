"""Where metrics go besides metrics.jsonl: TensorBoard's event files, Weights & Biases, MLflow.

A tracker is a convenience. If one fails in the middle of a run, because a disk is full or the network is down, there is
one warning, and the run goes on without it. What is wrong before the run starts is an error.
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
"""A file in the run folder with the run's identities in W&B and MLflow, so that it is resumed there as well."""
EVENTS = "events.out.tfevents."
"""Prefix of the files that TensorBoard reads."""
PROJECT = "vitrail"
"""Project of W&B and experiment of MLflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME is set."""
WAITING = 10_000
"""Number of records that may wait for a slow network."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for records that are not sent yet."""
FLUSH_EVERY = 10.0
"""Seconds between two flushes of events to the disk."""
MLFLOW_PARAMETERS, MLFLOW_LETTERS = 100, 500
"""The most parameters that MLflow takes at a time, and the most letters of each."""


class Tracker(ABC):
    """Receives the values of each record."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """Log the values of a record, with names such as "train/loss" and "val/accuracy"."""

    @abstractmethod
    def close(self) -> None:
        """Send or write what is left."""


def name_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by names such as "train/loss", "val/accuracy", "train/images_per_second"."""
    group = record["kind"] if record["kind"] == "train" else record["part"]
    numbers = {**record, **record.get("clock", {})}
    return {
        f"{group}/{name}": float(value)
        for name, value in numbers.items()
        if name != "step" and isinstance(value, (int, float))
    }


def open_trackers(names: Sequence[str], folder: Path, config: dict[str, Any], step: int) -> list[Tracker]:
    """Open the trackers of a run. Only the first rank has any.

    Args:
        names: Keys of OPENERS.
        folder: The run folder.
        config: The configuration, as nested dictionaries of plain values.
        step: The step that the run starts from; 0 for a new run.

    Raises:
        ConfigError: There is no tracker of that name.
        MissingExtraError: A tracker's package is not installed.
        TrainingError: A tracker of a new run cannot be started.
    """
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            if name not in OPENERS:
                near = did_you_mean(name, OPENERS)
                raise ConfigError(f"run.trackers has {name!r}{near or ', known are ' + ', '.join(OPENERS)}")
            if (tracker := _open_tracker(name, folder, config, step)) is not None:
                trackers.append(tracker)
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _open_tracker(name: str, folder: Path, config: dict[str, Any], step: int) -> Tracker | None:
    """Open a tracker. If that fails, a new run is an error; a resumed one, perhaps unattended, goes on without it."""
    try:
        return OPENERS[name](folder, config, step)
    except MissingExtraError:
        raise
    except Exception as error:
        message = f"the tracker {name} cannot be started: {_describe_error(error)}"
        if not step:
            raise TrainingError(f'{message}; fix this, or leave "{name}" out of run.trackers') from error
        log.warning("%s; the run goes on without it", message)
        return None


class TensorBoard(Tracker):
    """Event files in a folder, written directly by tensorboardX's record writer.

    Its SummaryWriter hands events to a thread, and once that thread has died of a full disk, waits for it forever.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. They are numbered, because clocks of machines differ.
        numbers = (path.name.removeprefix(EVENTS) for path in folder.glob(f"{EVENTS}*"))
        number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
        self._file = RecordWriter(str(folder / f"{EVENTS}{number:010d}"))
        self._flushed = time.monotonic()
        # A session's start makes TensorBoard ignore events of earlier files from that step on.
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=0, file_version="brain.Event:2")
        self._write(step=purge_step, session_log=session)
        self._file.flush()

    def log(self, step: int, values: Values) -> None:
        """Write one event with all values."""
        value = self._summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush what is left to the disk."""
        try:
            self._file.flush()
        finally:
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class Wandb(Tracker):
    """A run of Weights & Biases; wandb's own environment variables set the account and the server."""

    def __init__(self, project: str, name: str, folder: Path, config: dict[str, Any], identity: str) -> None:
        self._run = _import_extra("wandb").init(
            project=project, name=name, dir=str(folder), config=config, id=identity, resume="allow"
        )
        # W&B's own steps only increase: it would refuse those that a resumed run repeats. Values may repeat.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        """Log the values, with the step as one more value."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class Mlflow(Tracker):
    """A run of MLflow; MLFLOW_TRACKING_URI sets the server."""

    def __init__(self, experiment: str, name: str, config: dict[str, Any], identity: str | None) -> None:
        mlflow = _import_extra("mlflow")
        self._client, self._metric, parameter = mlflow.MlflowClient(), mlflow.entities.Metric, mlflow.entities.Param
        if identity is not None:
            self.identity = identity
            self._client.update_run(identity, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self.identity = str(self._client.create_run(place, run_name=name).info.run_id)
        parameters = [parameter(key, str(value)[:MLFLOW_LETTERS]) for key, value in _flatten(config).items()]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._client.log_batch(self.identity, params=parameters[start : start + MLFLOW_PARAMETERS])

    def log(self, step: int, values: Values) -> None:
        """Send all values in one request."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self) -> None:
        """Mark the run as ended; resuming marks it as running again."""
        self._client.set_terminated(self.identity)


class GuardedTracker(Tracker):
    """Wraps another tracker: its first failure is a warning, and it is not used again."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def log(self, step: int, values: Values) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        try:
            tracker.log(step, values)
        except Exception as error:
            self._tracker = None
            log.warning("the tracker %s fails: %s; the run goes on without it", self._name, _describe_error(error))
            with suppress(Exception):
                tracker.close()  # it may hold files or connections open

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.close()
        except Exception as error:
            log.warning("the tracker %s does not close: %s", self._name, _describe_error(error))


class BackgroundTracker(Tracker):
    """Runs another tracker in a thread of its own.

    A network request that is retried for minutes must not delay a step: other ranks would give up waiting for it.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._waiting: queue.Queue[tuple[int, Values] | None] = queue.Queue(WAITING)
        self._full = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Values) -> None:
        """Queue the values and return at once. They are dropped if the queue is full."""
        try:
            self._waiting.put_nowait((step, dict(values)))
        except queue.Full:
            if not self._full:
                log.warning("the tracker %s is too slow: some values do not get there", self._name)
            self._full = True

    def close(self) -> None:
        """Wait until the queue is empty, but not longer than PATIENCE."""
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
    _import_extra("wandb")  # before anything is written
    identity = _identity(folder, "wandb")
    if identity is None:
        identity = uuid.uuid4().hex[:16]
        _remember(
            folder, "wandb", identity
        )  # saved before W&B knows it, so that a run that dies in between is found again
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


def _import_extra(name: str) -> Any:
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


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with names such as "optimizer.learning_rate"."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _describe_error(error: Exception) -> str:
    """Return the type and the message of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
