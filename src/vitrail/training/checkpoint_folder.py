"""Checkpoints that are whole or absent.

checkpoints/step-00001000/
    shard-….safetensors    tensors, each rank's own part; torch.distributed.checkpoint puts them together again
    state.json             everything that is not a tensor
    SHA256SUMS             of all files, in the format of `sha256sum`

A checkpoint is written in a folder of another name, brought to the disk, hashed, and renamed at last. Whatever ends the
process before that leaves a folder that nothing reads, and that the next start removes. There is no pickle in it:
torch's own format for sharded checkpoints would run code from a stranger's file, so tensors are in safetensors.

Writing goes on in a thread while training does: the tensors are copied first.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from vitrail.errors import TrainingError
from vitrail.system.files import flush_to_disk, sha256
from vitrail.system.ranks import Ranks
from vitrail.weights.formats.native import CHECKSUM_FILE

log = logging.getLogger("vitrail")

# One process is meant, not an oversight. A filter around the call would not do: it is not safe among threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

STATE = "state.json"
FINISHED, UNFINISHED, DAMAGED = "step-", ".unfinished-step-", "damaged-"
Record = dict[str, Any]


class CheckpointFolder:
    """Of one run, in its folder. Every rank has one, and calls its methods in the same order."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def open(self) -> None:
        """Make the folder, and remove what an earlier process left unfinished."""
        if self.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)
        self.ranks.wait()

    def find_newest(self) -> Path | None:
        """The newest whole one. What is damaged is named and passed over."""
        found: Path | TrainingError | None = None
        if self.ranks.is_first:
            try:
                found = self._find_newest()
            except TrainingError as error:
                found = error
        found = self.ranks.broadcast_from_first(found)
        if isinstance(found, TrainingError):
            raise found
        return found

    def _find_newest(self) -> Path | None:
        found = self.list_steps()
        for path in reversed(found.values()):
            wrong = damage(path)
            if wrong is None:
                return path
            # Under another name: a later start must not take it up again, past what was done since.
            aside = path.with_name(f"{DAMAGED}{path.name}")
            log.warning("%s is passed over, and is %s now: %s", path, aside.name, wrong)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        if found:
            raise TrainingError(
                f"none of the {len(found)} checkpoints in {self.folder} is whole: mend them, or give another run.folder"
            )
        return None

    def list_steps(self) -> dict[int, Path]:
        """All that are there, by their step, the oldest first."""
        found = {path.name.removeprefix(FINISHED): path for path in self.folder.glob(f"{FINISHED}*")}
        return {int(step): found[step] for step in sorted(filter(str.isdecimal, found), key=int)}

    def save(self, step: int, tensors: dict[str, Tensor], record: Record, best: int | None = None) -> None:
        """Copy everything now and write it in the background. What went wrong with the one before is raised here.

        `best`: the step whose checkpoint stays, whatever its age.
        """
        self.finish()
        draft = self.folder / f"{UNFINISHED}{step:08}"
        self._open(draft)
        writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
        staged = writer.stage(tensors)
        state = json.dumps({**record, "tensors": sorted(tensors)})

        def work() -> None:
            state_dict_saver.save(staged, storage_writer=writer, **self._group(self.ranks.saving))
            if self.ranks.is_first:
                (draft / STATE).write_text(state, encoding="utf-8")
                self._publish(draft, step)
                self._prune(step, best)

        self._thread = threading.Thread(target=self._run, args=(work, draft), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until what is being written is whole, on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        self._check(error)

    def _check(self, error: BaseException | None) -> None:
        """On all ranks: raise what went wrong on any."""
        if self.ranks.any(error is not None):
            raise TrainingError(self._cannot_write(error)) from None

    def load(self, path: Path, tensors: dict[str, Tensor]) -> Record:
        """Read a checkpoint into tensors that are there already, sharded as they are; and what is not tensors."""
        record: Record = json.loads((path / STATE).read_text(encoding="utf-8"))
        if missing := set(record["tensors"]) ^ set(tensors):
            raise TrainingError(
                f"{path} was written by a run of another kind: {min(missing)} is not in both; give another run.folder"
            )
        try:
            reader = HuggingFaceStorageReader(str(path))
            state_dict_loader.load(tensors, storage_reader=reader, **self._group(self.ranks.control))
        except CheckpointException as error:  # a BaseException
            raise TrainingError(f"{path} cannot be read: {_cause(error)}") from None
        return record

    def _group(self, group: Any) -> dict[str, Any]:
        return {"no_dist": True} if self.ranks.size == 1 else {"process_group": group}

    def _open(self, draft: Path) -> None:
        """An empty folder, which all ranks see when this returns."""
        error = None
        if self.ranks.is_first:
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            except OSError as found:
                error = found
        self._check(error)

    def _run(self, work: Callable[[], None], draft: Path) -> None:
        try:
            work()
        except BaseException as error:  # CheckpointException is no Exception; all of them are raised by `finish`
            self._error = error
            if self.ranks.is_first:
                shutil.rmtree(draft, ignore_errors=True)  # the room that it takes is needed for what tells of it

    def _publish(self, draft: Path, step: int) -> None:
        """Hashes, then the disk, then the name."""
        names = sorted(path.name for path in draft.iterdir())
        (draft / CHECKSUM_FILE).write_text(
            "".join(f"{sha256(draft / name)}  {name}\n" for name in names), encoding="utf-8"
        )
        for path in draft.iterdir():
            flush_to_disk(path)
        flush_to_disk(draft)
        final = self.folder / f"{FINISHED}{step:08}"
        if final.exists():  # damaged, or it would not be written again
            shutil.rmtree(final)
        draft.rename(final)
        flush_to_disk(self.folder)

    def _prune(self, newest: int, best: int | None) -> None:
        """What is newer than the newest was passed over at the start: it is damaged, and must not push out others."""
        steps = {step: path for step, path in self.list_steps().items() if step <= newest}
        for step, path in list(steps.items())[: -self.keep]:
            if step != best:
                # Renamed first: half a checkpoint must not bear a whole one's name.
                leaving = self.folder / f"{UNFINISHED}{step:08}-old"
                path.rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)

    def _cannot_write(self, error: BaseException | None) -> str:
        why = "another rank could not write its part" if error is None else _cause(error)
        kept = self.list_steps()
        last = f"the last whole checkpoint is of step {max(kept)}" if kept else "there is no checkpoint yet"
        return (
            f"no checkpoint can be written to {self.folder}: {why}; {last}; mend that, on a full disk by making room, "
            "and start the same command again"
        )


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint by its hashes; None where it is whole."""
    try:
        lines = (path / CHECKSUM_FILE).read_text(encoding="utf-8").splitlines()
        for digest, name in (line.split("  ", 1) for line in lines):
            if os.sep in name or sha256(path / name) != digest:
                return f"{name} is not as it was written"
    except (OSError, ValueError) as error:
        return f"it is not whole ({error})"
    return None if any(line.endswith(f"  {STATE}") for line in lines) else "it is not whole"


def _cause(error: BaseException) -> str:
    """The first reason that torch found, in a line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
