"""Begin from the copy of a run, keep it up to date in the background, and finish it when the run ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import TrainingError
from vitrail.system.files import describe_reason
from vitrail.system.remote import RemoteError
from vitrail.training.checkpoint_folder import CheckpointFolder
from vitrail.training.config import RunConfig
from vitrail.training.run_copy import RunCopy
from vitrail.training.run_folder import CONFIG_FILE, WITHOUT_COPY, check_other_files

log = logging.getLogger("vitrail")


class CopyThread:
    """A thread that copies the newest checkpoint whenever there is another one. Training never waits for it.

    What cannot be copied is told as a warning, and tried again with the next checkpoint. Checkpoints that come while
    one is on its way are passed over, except the newest of them.
    """

    def __init__(self, copy: RunCopy) -> None:
        self.copy = copy
        self._changed = threading.Condition()
        self._has_news = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="copy", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Say that there is a new checkpoint."""
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def close(self) -> None:
        """Wait until the newest checkpoint is copied, or could not be, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news or self._is_closing)
                if not self._has_news:
                    return
                self._has_news = False
            try:
                self.copy.update()
            except Exception as error:  # the training must go on
                reason = describe_reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                log.warning(
                    "the newest checkpoint is not in %s: %s; it is tried again with the next checkpoint",
                    self.copy.address,
                    reason,
                )


def find_begun_run(config: RunConfig) -> bool:
    """Return whether the folder of a run holds one that was begun. If it holds none, the run's copy may have it.

    Then its configuration and the weights that it starts from are fetched; the rest comes when the training begins.

    Raises:
        ConfigError: The folder holds other files.
        TrainingError: The copy cannot be read.
    """
    folder, address = config.run.folder, config.run.copy_to
    if address is not None and not (folder / CONFIG_FILE).is_file():
        check_other_files(folder)
        try:
            RunCopy(folder, address).fetch_start()
        except RemoteError as error:
            raise TrainingError(f"{error}; {WITHOUT_COPY}") from None
    return (folder / CONFIG_FILE).is_file()


@contextmanager
def keep_copy(copy: RunCopy | None, checkpoints: CheckpointFolder) -> Iterator[None]:
    """Copy each checkpoint while the block runs, and at its end what the run leaves behind. None copies nothing.

    If the block ends by an error, such as a stop request, the newest checkpoint is still copied.

    Raises:
        TrainingError: the run has come to its end, and not all of it could be copied.
    """
    if copy is None:
        yield
        return
    thread = CopyThread(copy)
    checkpoints.after_save = thread.notify
    try:
        yield
    finally:
        thread.close()
    _finish(copy)


def copy_results(config: RunConfig) -> None:
    """Bring the copy of a finished run up to date with what was written after the training, such as its report.

    Without `run.copy_to`, and on all ranks but the first, nothing happens.

    Raises:
        TrainingError: not all of it could be copied.
    """
    if config.run.copy_to is not None and os.environ.get("RANK", "0") == "0":
        _finish(RunCopy(Path(config.run.folder), config.run.copy_to))


def _finish(copy: RunCopy) -> None:
    try:
        copy.finish()
    except OSError as error:
        raise TrainingError(
            f"the run in {copy.folder} is finished and whole, but its copy in {copy.address} is not: "
            f"{describe_reason(error)}; fix this and start the same command again, which only copies what is missing, "
            "or leave out run.copy_to"
        ) from None
