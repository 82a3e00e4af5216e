"""Checkpoints that are whole or absent.

checkpoints/step-00001000/
    shard-….safetensors    tensors, each rank's own part; torch.distributed.checkpoint puts them together again
    state.json             everything that is not a tensor
    SHA256SUMS             the hashes of all files, in the format of `sha256sum`

A checkpoint is written to a folder of another name, hashed, flushed to the disk, and renamed last. If the process ends
before that, the folder is never read, and the next start removes it. There is no pickle in it: torch's own format for
sharded checkpoints could run code from a stranger's file, so tensors are stored as safetensors.

A thread writes the files while training goes on, from a copy of the tensors.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.errors import TrainingError
from vitrail.system.files import flush_to_disk, rename_when_free, sha256
from vitrail.system.ranks import Ranks
from vitrail.weights.formats.native import CHECKSUM_FILE

log = logging.getLogger("vitrail")

# One process is intended here. A filter around the call would not do: such filters are not safe among threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

STATE = "state.json"
FINISHED, UNFINISHED, DAMAGED = "step-", ".unfinished-step-", "damaged-"
REPAIR = "remove this checkpoint to go on from the one before it, or give another run.folder"
Record = dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one run. Every rank has an instance, and must call its methods in the same order."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self.after_save: Callable[[], None] = lambda: None
        """Called on the first rank, in the thread that writes, when another checkpoint is whole."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def open(self) -> None:
        """Create the folder, and remove checkpoints that an earlier process left unfinished."""
        if self.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)
        self.ranks.wait()

    def find_newest(self) -> Path | None:
        """Return the newest whole checkpoint, or None if there is none. Damaged ones are skipped with a warning.

        Raises:
            TrainingError: There are checkpoints, but all of them are damaged, found so now or by an earlier start.
        """
        newest: Path | TrainingError | None = None
        if self.ranks.is_first:
            try:
                newest = self.find_newest_here()
            except TrainingError as error:
                newest = error
        newest = self.ranks.broadcast_from_first(newest)
        if isinstance(newest, TrainingError):
            raise newest
        return newest

    def find_newest_here(self) -> Path | None:
        """As `find_newest`, for one rank alone, which tells nobody."""
        for path in reversed(self.list_steps().values()):
            damage = find_damage(path)
            if damage is None:
                return path
            # Renamed, so that a later start does not resume from it, after training has gone on from an older one.
            aside = path.with_name(f"{DAMAGED}{path.name}")
            log.warning("%s is passed over, and is %s now: %s", path, aside.name, damage)
            shutil.rmtree(aside, ignore_errors=True)
            rename_when_free(path, aside)
        # Training from step 0 here would look like going on.
        if damaged := sorted(path.name for path in self.folder.glob(f"{DAMAGED}{FINISHED}*")):
            raise TrainingError(
                f"none of the {len(damaged)} checkpoints in {self.folder} is whole: put a whole copy there as "
                f"{damaged[-1].removeprefix(DAMAGED)}, give another run.folder, or remove {damaged[-1]} and the like "
                "to begin again from step 0"
            )
        return None

    def list_steps(self) -> dict[int, Path]:
        """Return the paths of all checkpoints by their step, the oldest first."""
        return list_checkpoints(self.folder)

    def save(self, step: int, tensors: dict[str, Tensor], record: Record, best: int | None = None) -> None:
        """Copy the tensors now, and write the checkpoint in the background.

        Args:
            step: Steps done.
            tensors: Everything to save, by name; on each rank its own shards.
            record: Everything else, as JSON.
            best: The step of a checkpoint that is kept however old it is.

        Raises:
            TrainingError: The previous checkpoint could not be written.
        """
        # Importing it takes half a second, which commands that save no checkpoint need not wait for.
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        self.finish()
        draft = self.folder / f"{UNFINISHED}{step:08}"
        self._open(draft)
        writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
        staged = writer.stage(tensors)
        state = json.dumps({**record, "tensors": sorted(tensors)})

        def work() -> None:
            state_dict_saver.save(staged, storage_writer=writer, **self._group(self.ranks.saving))
            if self.ranks.is_first:
                (draft / STATE).write_text(state, encoding="utf-8", newline="\n")
                self._publish(draft, step)
                self._prune(step, best)
                self.after_save()

        self._thread = threading.Thread(target=self._run, args=(work, draft), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint in the background is written on all ranks, and raise its error if there was one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        self._check(error)

    def _check(self, error: BaseException | None) -> None:
        """Raise a TrainingError on all ranks if there was an error on any."""
        if self.ranks.any(error is not None):
            raise TrainingError(self._cannot_write(error)) from None

    def load(self, path: Path, tensors: dict[str, Tensor]) -> Record:
        """Read a checkpoint into existing tensors, sharded in any way, and return everything else that was saved.

        Raises:
            TrainingError: The checkpoint has other tensors, or cannot be read.
        """
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        record = read_state(path)
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
        """Create an empty folder, which all ranks see when this returns."""
        error = None
        if self.ranks.is_first:
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            except OSError as os_error:
                error = os_error
        self._check(error)

    def _run(self, work: Callable[[], None], draft: Path) -> None:
        try:
            work()
        except BaseException as error:  # CheckpointException is no Exception; all of them are raised by `finish`
            self._error = error
            if self.ranks.is_first:
                shutil.rmtree(draft, ignore_errors=True)  # the disk may be full, and the error is still to be recorded

    def _publish(self, draft: Path, step: int) -> None:
        """Write the hashes, flush everything to the disk, and only then give the folder its final name."""
        names = sorted(path.name for path in draft.iterdir())
        (draft / CHECKSUM_FILE).write_text(
            "".join(f"{sha256(draft / name)}  {name}\n" for name in names), encoding="utf-8", newline="\n"
        )
        for path in draft.iterdir():
            flush_to_disk(path)
        flush_to_disk(draft)
        final = self.folder / f"{FINISHED}{step:08}"
        if final.exists():  # it is damaged; otherwise it would not be written again
            shutil.rmtree(final)
        rename_when_free(draft, final)
        flush_to_disk(self.folder)

    def _prune(self, newest: int, best: int | None) -> None:
        """Remove old checkpoints. Those after `newest` are damaged and do not count."""
        steps = {step: path for step, path in self.list_steps().items() if step <= newest}
        for step, path in list(steps.items())[: -self.keep]:
            if step != best:
                # Renamed first: a half-deleted checkpoint must not look like a whole one.
                leaving = self.folder / f"{UNFINISHED}{step:08}-old"
                rename_when_free(path, leaving)
                shutil.rmtree(leaving, ignore_errors=True)

    def _cannot_write(self, error: BaseException | None) -> str:
        why = "another rank could not write its part" if error is None else _cause(error)
        saved = self.list_steps()
        last = f"the last whole checkpoint is of step {max(saved)}" if saved else "there is no checkpoint yet"
        return (
            f"no checkpoint can be written to {self.folder}: {why}; {last}; fix this (if the disk is full, free space) "
            "and start the same command again"
        )


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the paths of all checkpoints in a folder by their step, the oldest first."""
    paths = {path.name.removeprefix(FINISHED): path for path in folder.glob(f"{FINISHED}*")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int)}


def read_step(path: Path) -> int:
    """Return the step of a checkpoint, which its name tells."""
    return int(path.name.removeprefix(FINISHED))


def read_state(path: Path) -> Record:
    """Return everything in a checkpoint that is not a tensor.

    Raises:
        TrainingError: It is no record of a checkpoint.
    """
    try:
        record = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path / STATE} is no JSON that can be read: {_cause(error)}; {REPAIR}") from None
    check_state(path, record, ["tensors"])
    return cast(Record, record)


def check_state(path: Path, record: object, names: Iterable[str]) -> None:
    """Raise a TrainingError if the state of a checkpoint lacks any of these names."""
    missing = set(names) - (record.keys() if isinstance(record, dict) else set())
    if missing:
        raise TrainingError(f"{path / STATE} has no {min(missing)!r}: {REPAIR}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the objective's weights in a checkpoint, averaged if there is an average, whole and on the CPU.

    Tensors without dimensions have one here. One process reads the parts of all ranks.

    Raises:
        TrainingError: The checkpoint cannot be read.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        reader = HuggingFaceStorageReader(str(path))
        stored = reader.read_metadata().state_dict_metadata
        prefix = "average/" if any(name.startswith("average/") for name in stored) else "objective/"
        tensors: dict[str, Tensor] = {}
        for name, info in stored.items():
            if name.startswith(prefix) and isinstance(info, TensorStorageMetadata):
                tensors[name] = torch.empty(info.size, dtype=info.properties.dtype)
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise TrainingError(f"{path} cannot be read: {_cause(error)}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint according to its hashes, or None if it is whole."""
    try:
        lines = (path / CHECKSUM_FILE).read_text(encoding="utf-8").splitlines()
        for digest, name in (line.split("  ", 1) for line in lines):
            if "/" in name or "\\" in name or sha256(path / name) != digest:
                return f"{name} is not as it was written"
    except (OSError, ValueError) as error:
        return f"it is not whole ({error})"
    return None if any(line.endswith(f"  {STATE}") for line in lines) else "it is not whole"


def _cause(error: BaseException) -> str:
    """Return the first cause of an error, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
