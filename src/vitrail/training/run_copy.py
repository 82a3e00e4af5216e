"""The copy of a run's folder in a bucket (`run.copy_to`), from which the run goes on where its folder is lost.

s3://bucket/runs/name/
    config.toml, .data, .weights, .fewshot    which run it is: written before the first step
    start/                                    the weights that it starts from, if no file has them
    checkpoints/step-…/                       SHA256SUMS is written last and removed first: without it nothing is read
    metrics.jsonl                             at least up to the newest checkpoint
    model/, best/, curves.png, report.html …  what the run leaves behind, at its end
    SHA256SUMS                                the hashes of all files outside of checkpoints/, written last

What is fetched is compared with its hashes before it gets a name under which it is read. There is no pickle in it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from vitrail.errors import TrainingError
from vitrail.system.files import flush_to_disk, move_into_place, rename_when_free, sha256
from vitrail.system.remote import FULL, RemoteFolder, RemoteObject, describe_full_disk, show_transfer, transfer_all
from vitrail.training.checkpoint_folder import (
    FINISHED,
    UNFINISHED,
    find_damage,
    list_checkpoints,
    read_state,
)
from vitrail.training.run_folder import CONFIG_FILE, FACT_FILES, LOCK_FILE, START_FOLDER, TRIAL_PREFIX
from vitrail.weights.formats.native import CHECKSUM_FILE

log = logging.getLogger("vitrail")

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
START_PREFIX = f"{START_FOLDER}/"
MOST_FACT_BYTES = 10_000_000
"""Largest file of facts or hashes that is read."""
_STEP = re.compile(rf"{CHECKPOINTS}/{FINISHED}(\d+)/([^/]+)")


class RunCopy:
    """The copy of one run. Only the first rank has an instance.

    Args:
        folder: the folder of the run.
        address: such as s3://bucket/runs/name.

    Every method raises a RemoteError, which is a sentence, if the bucket cannot be read or written.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.checkpoints = folder / CHECKPOINTS
        self._damaged = set[int]()
        """Steps whose checkpoints in the copy are not as their hashes say."""

    @cached_property
    def bucket(self) -> RemoteFolder:
        """The objects of the copy; asking for it raises an error if the package for it is missing."""
        return RemoteFolder(self.address)

    @contextmanager
    def fetch_facts(self) -> Iterator[Path | None]:
        """Yield a folder with the files that tell which run is in the copy, or None if there is none."""
        with tempfile.TemporaryDirectory(prefix="vitrail-") as place:
            found = self.bucket.find_objects(FACT_FILES)
            for each in found:
                self._check_small(each)
                self.bucket.download(each.name, Path(place) / each.name)
            yield Path(place) if any(each.name == CONFIG_FILE for each in found) else None

    def fetch_start(self) -> None:
        """Fetch what tells which run it is, and the weights that it starts from, into a folder that has neither."""
        objects = self.bucket.list_objects()
        start = [each for each in objects if each.name.startswith(START_PREFIX)]
        facts = [each for each in objects if each.name in FACT_FILES]
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=self.folder.parent) as name:
            place = Path(name)
            for each in (*start, *facts):
                (place / each.name).parent.mkdir(parents=True, exist_ok=True)
            self._fetch([(each, place / each.name) for each in (*start, *facts)])
            if start:
                with suppress(OSError):  # another process was faster
                    rename_when_free(place / START_FOLDER, self.folder / START_FOLDER)
            facts.sort(key=lambda each: each.name == CONFIG_FILE)  # last: it makes the folder that of a run
            for each in facts:
                rename_when_free(place / each.name, self.folder / each.name)

    def write_facts(self) -> None:
        """Write the files that tell which run it is, and the weights that it starts from, into the copy."""
        there = {each.name for each in self.bucket.list_objects()}
        for path in [self.folder / name for name in FACT_FILES]:
            if path.exists():
                self.bucket.upload(path, path.name)
        self._upload(name for name in self._list_results() if name.startswith(START_PREFIX) and name not in there)

    def fetch_newest(self, after: int) -> int | None:
        """Fetch the newest whole checkpoint that comes after a step, the best one, and the metrics.

        A damaged one is passed over with a warning.

        Returns:
            The step of the checkpoint; None if there is none.

        Raises:
            TrainingError: the disk is full.
        """
        objects = {each.name: each for each in self.bucket.list_objects()}
        whole = _list_whole(objects)
        for step in sorted((step for step in whole if step > after), reverse=True):
            newest = self._fetch_draft(step, objects)
            if newest is None:
                continue
            best = _read_best_step(newest)
            if best in whole and best not in {step, *list_checkpoints(self.checkpoints)}:
                draft = self._fetch_draft(best, objects)
                if draft is not None:
                    self._publish(draft, best)
            if METRICS in objects:
                metrics = self.folder / f"{METRICS}.tmp"
                self._fetch([(objects[METRICS], metrics)])
                move_into_place(metrics, self.folder / METRICS)
            self._publish(newest, step)  # last: if this ends before it, the next start fetches all of it again
            return step
        return None

    def update(self) -> None:
        """Copy the newest checkpoint and the best one, if they are not there, and remove those that are no longer here.

        The metrics come with each of them.
        """
        here = list_checkpoints(self.checkpoints)
        if not here:
            return
        newest = max(here)
        there = [each.name for each in self.bucket.list_objects()]
        whole = _list_whole(there) - self._damaged
        for step in dict.fromkeys((newest, _read_best_step(here[newest]))):
            if step in here and step not in whole:
                self._upload_step(step, here[step])
        names: dict[int, list[str]] = {}
        for name in there:
            if match := _STEP.fullmatch(name):
                names.setdefault(int(match.group(1)), []).append(name)
        for step, parts in names.items():
            if step not in here and (step < newest or step in self._damaged):
                # Without its hashes it is not read, so they go first.
                self.bucket.remove(sorted(parts, key=lambda name: not name.endswith(f"/{CHECKSUM_FILE}")))

    def finish(self) -> None:
        """Copy what the run leaves behind: all that has changed since it was last copied."""
        self.update()
        before = self._read_sums()
        sums = {name: sha256(self.folder / name) for name in self._list_results()}
        # Metrics and facts are also written by others than this function.
        self._upload(name for name in sums if before.get(name) != sums[name] or name in (METRICS, *FACT_FILES))
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        self.bucket.write(lines.encode("utf-8", "surrogateescape"), CHECKSUM_FILE)

    def _list_results(self) -> list[str]:
        """Return the names of all files of the run that are no checkpoints, and no links, which may lead anywhere."""
        names = list[str]()
        for place, folders, files in os.walk(self.folder):
            above = Path(place).relative_to(self.folder)
            if above == Path():
                folders[:] = [name for name in folders if name != CHECKPOINTS and not name.startswith(TRIAL_PREFIX)]
            names += [
                (above / name).as_posix()
                for name in files
                if name != LOCK_FILE and not name.endswith(".tmp") and not (Path(place) / name).is_symlink()
            ]
        return sorted(names)

    def _read_sums(self) -> dict[str, str]:
        """Return the hashes of the results in the copy."""
        found = self.bucket.find_objects([CHECKSUM_FILE])
        if not found:
            return {}
        self._check_small(found[0])
        lines = self.bucket.read(CHECKSUM_FILE).decode("utf-8", "surrogateescape").splitlines()
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}

    def _upload(self, names: Iterable[str]) -> None:
        def upload(name: str, go_on: Callable[[int], None]) -> None:
            go_on(0)
            self.bucket.upload(self.folder / name, name)

        transfer_all(names, upload)

    def _upload_step(self, step: int, path: Path) -> None:
        pinned = _link_files(path)
        if pinned is None:  # it was removed meanwhile, because there are newer ones
            return
        try:
            inside = f"{CHECKPOINTS}/{_name_step(step)}"
            self.bucket.remove([f"{inside}/{CHECKSUM_FILE}"])  # of a damaged one

            def upload(name: str, go_on: Callable[[int], None]) -> None:
                go_on(0)
                self.bucket.upload(pinned / name, f"{inside}/{name}")

            transfer_all(sorted(each.name for each in pinned.iterdir() if each.name != CHECKSUM_FILE), upload)
            with suppress(FileNotFoundError):
                self.bucket.write((self.folder / METRICS).read_bytes(), METRICS)
            self.bucket.upload(pinned / CHECKSUM_FILE, f"{inside}/{CHECKSUM_FILE}")
            self._damaged.discard(step)
        finally:
            if pinned != path:
                shutil.rmtree(pinned, ignore_errors=True)

    def _fetch_draft(self, step: int, objects: dict[str, RemoteObject]) -> Path | None:
        """Fetch a checkpoint into a folder that is never read as one, and return it; None if it is not whole."""
        inside = f"{CHECKPOINTS}/{_name_step(step)}"
        draft = self.checkpoints / f"{UNFINISHED}{step:08}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            self._check_small(objects[f"{inside}/{CHECKSUM_FILE}"])
            self._fetch([(objects[f"{inside}/{CHECKSUM_FILE}"], draft / CHECKSUM_FILE)])
            names = [line.partition("  ")[2] for line in (draft / CHECKSUM_FILE).read_text("utf-8").splitlines()]
            # Only what has a hash is fetched. A name with a slash is no name of such an object.
            parts = [objects[f"{inside}/{name}"] for name in names if _STEP.fullmatch(f"{inside}/{name}")]
            self._fetch([(each, draft / each.name.rpartition("/")[2]) for each in parts])
            damage = find_damage(draft)
        except (KeyError, UnicodeDecodeError) as error:
            damage = f"it is not whole ({error})"
        if damage is not None:
            log.warning("%s/%s is passed over: %s", self.address, inside, damage)
            self._damaged.add(step)
            shutil.rmtree(draft, ignore_errors=True)
            return None
        return draft

    def _publish(self, draft: Path, step: int) -> None:
        """Give a whole checkpoint the name under which it is read."""
        flush_to_disk(draft)
        rename_when_free(draft, self.checkpoints / _name_step(step))
        flush_to_disk(self.checkpoints)

    def _fetch(self, wanted: list[tuple[RemoteObject, Path]]) -> None:
        needed = sum(each.size for each, _ in wanted)
        full = f"{self.address} cannot be fetched: {describe_full_disk(self.folder, needed, 'give another run.folder')}"
        if needed > shutil.disk_usage(self.folder).free:
            raise TrainingError(full)
        try:
            with show_transfer(f"fetching {self.address}", needed) as add_bytes:

                def fetch(item: tuple[RemoteObject, Path], go_on: Callable[[int], None]) -> None:
                    def count(new: int) -> None:
                        go_on(new)
                        add_bytes(new)

                    self.bucket.download(item[0].name, item[1], count)
                    flush_to_disk(item[1])

                transfer_all(wanted, fetch)
        except OSError as error:
            if error.errno in FULL:
                raise TrainingError(full) from None
            raise

    def _check_small(self, each: RemoteObject) -> None:
        if each.size > MOST_FACT_BYTES:
            raise TrainingError(f"{self.address}/{each.name} has {each.size:,} bytes: it is no file of a run")


def _name_step(step: int) -> str:
    return f"{FINISHED}{step:08}"


def _list_whole(names: Iterable[str]) -> set[int]:
    """Return the steps of the checkpoints that have hashes."""
    matches = filter(None, map(_STEP.fullmatch, names))
    return {
        int(match.group(1))
        for match in matches
        if match.group(2) == CHECKSUM_FILE and f"{FINISHED}{match.group(1)}" == _name_step(int(match.group(1)))
    }


def _read_best_step(checkpoint: Path) -> int | None:
    """Return the step of the best evaluation as of a checkpoint; None if there is none, or it cannot be read."""
    with suppress(TrainingError):
        best = read_state(checkpoint).get("best")
        if isinstance(best, list) and best and isinstance(best[0], int):
            return best[0]
    return None


def _link_files(path: Path) -> Path | None:
    """Return a folder with links to the files of a checkpoint, which stay if it is removed; None if it is gone.

    Where the file system has no links, return the checkpoint itself.
    """
    pinned = path.with_name(f"{UNFINISHED}{path.name.removeprefix(FINISHED)}-copied")
    shutil.rmtree(pinned, ignore_errors=True)
    pinned.mkdir()
    try:
        for each in path.iterdir():
            os.link(each, pinned / each.name)
    except FileNotFoundError:
        shutil.rmtree(pinned, ignore_errors=True)
        return None
    except OSError:
        shutil.rmtree(pinned, ignore_errors=True)
        return path
    return pinned
