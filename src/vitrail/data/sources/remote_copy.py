"""Data in a bucket, such as s3://bucket/folder, is copied into the cache once and read there like any folder.

CACHE/remote/NAME-HASH/         what was copied from one address
    lock                        held by the process that copies
    LISTING.json                names, sizes and versions of the objects of a copy
    LISTING.part/               a copy that is not whole yet; LISTING.new/ holds what is on its way
    LISTING/                    a whole copy, which never changes

LISTING is a hash of what LISTING.json says. Where an object of the bucket has changed, another copy is made beside the
first one, which a training may be reading: what is the same is linked, and only the rest is fetched. Copies that were
not opened for a month are removed when a new one is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vitrail.data.sources.table_cache import MAX_AGE_SECONDS, find_cache_folder
from vitrail.errors import DataError
from vitrail.system.files import describe_reason, move_into_place, rename_when_free, short_name, write_whole
from vitrail.system.locks import lock_file
from vitrail.system.remote import (
    FULL,
    RemoteError,
    RemoteFolder,
    RemoteObject,
    describe_full_disk,
    show_transfer,
    transfer_all,
)

TABLES = (".csv", ".json", ".jsonl")
"""Suffixes of objects whose images lie in the folder around them, which is copied with them."""
SHARDS = (".parquet", ".tar")
BESIDE_SHARDS = ("classes.txt", "labels.txt", "dataset.json")
"""What says more about a shard and lies beside it."""
MOST_LISTINGS = 3
"""How often a copy is begun again because the bucket changed meanwhile."""
PAUSE = 0.2
"""Seconds between two looks at whether another process has finished a copy."""
REMEDY = "set VITRAIL_CACHE to a folder on a larger one"

_COPIES: dict[tuple[str, Path], Path] = {}
"""The copies that this process has opened: the bucket is asked once, so that all parts of a run read the same."""
_COPYING = threading.Lock()


def open_copy(address: str) -> Path:
    """Return the path of the local copy of an address. It is made, or brought up to date, once in each process.

    One process of a machine copies at a time, others wait for it. What a process has copied before it was ended is not
    fetched again.

    Raises:
        ConfigError: it is no address, or a package is missing.
        DataError: there is nothing at the address, it cannot be read, or the disk is full.
    """
    key = address, find_cache_folder().parent / "remote"
    with _COPYING:
        if key not in _COPIES:
            try:
                _COPIES[key] = _open_copy(*key)
            except RemoteError as error:
                raise DataError(str(error)) from None
            except OSError as error:
                raise DataError(f"{address} cannot be copied to {key[1]}: {describe_reason(error)}; {REMEDY}") from None
        return _COPIES[key]


def name_copies(text: str) -> str:
    """Return a text with the addresses that this process has opened in place of the paths of their copies."""
    for (address, _), path in _COPIES.items():
        text = text.replace(str(path), address.rstrip("/"))
    return text


def _open_copy(address: str, cache: Path) -> Path:
    folder, file, list_wanted = _choose_objects(address)
    place = cache / f"{short_name(folder.address)}-{_hash(address if file and not _is_table(file) else folder.address)}"
    place.mkdir(parents=True, exist_ok=True)
    wanted = list_wanted()
    if not wanted:
        raise RemoteError(f"{address} holds no objects: look at the name, such as s3://bucket/folder")
    copy = place / _hash_listing(wanted)
    if not copy.is_dir():
        with _hold_lock(place / "lock"):
            copy = _make_copy(folder, wanted, list_wanted, place)
    with contextlib.suppress(OSError):
        os.utime(copy)  # it was needed now
    return copy / file if file else copy


def _choose_objects(address: str) -> tuple[RemoteFolder, str, Callable[[], list[RemoteObject]]]:
    """Return the folder to copy from, the file in it that the address names or "", and what lists the objects."""
    folder = RemoteFolder(address)
    above, _, name = folder.address.rpartition("/")
    if name.lower().endswith((*TABLES, *SHARDS)) and not above.endswith("/"):
        parent = RemoteFolder(above)
        if _is_table(name) and parent.find_objects([name]):
            return parent, name, parent.list_objects
        names = [name, *BESIDE_SHARDS]
        if not _is_table(name) and any(each.name == name for each in parent.find_objects(names)):
            return parent, name, lambda: parent.find_objects(names)
    return folder, "", folder.list_objects


def _is_table(name: str) -> bool:
    return name.lower().endswith(TABLES)


def _make_copy(
    folder: RemoteFolder, wanted: list[RemoteObject], list_again: Callable[[], list[RemoteObject]], place: Path
) -> Path:
    """Make a copy of objects, and return its folder once it is whole."""
    for _ in range(MOST_LISTINGS):
        name = _hash_listing(wanted)
        copy, part = place / name, place / f"{name}.part"
        if copy.is_dir():  # another process was faster
            return copy
        part.mkdir(exist_ok=True)
        write_whole(place / f"{name}.json", json.dumps([vars(each) for each in wanted]).encode())
        is_fetched = _fill(part, folder, wanted, place)
        again = list_again() if is_fetched else wanted
        if again == wanted and all(_has(part / each.name, each) for each in wanted):
            rename_when_free(part, copy)
            _remove_old(copy)
            return copy
        wanted = again
    raise RemoteError(f"{folder.address} changes while it is copied: wait until all of it is there, and try again")


def _fill(part: Path, folder: RemoteFolder, wanted: Sequence[RemoteObject], place: Path) -> bool:
    """Put all objects into a folder, and return whether any of them had to be fetched."""
    earlier = _list_earlier(place)
    missing = [each for each in wanted if not _has(part / each.name, each) and not _link_earlier(each, part, earlier)]
    needed = sum(each.size for each in missing)
    if needed > shutil.disk_usage(place).free:
        raise RemoteError(f"{folder.address} cannot be copied: {describe_full_disk(place, needed, REMEDY)}")
    drafts = part.with_suffix(".new")
    shutil.rmtree(drafts, ignore_errors=True)
    drafts.mkdir()
    numbers = {each.name: number for number, each in enumerate(missing)}
    with show_transfer(f"copying {folder.address}", needed) as add_bytes:

        def fetch(each: RemoteObject, go_on: Callable[[int], None]) -> None:
            def count(new: int) -> None:
                go_on(new)
                add_bytes(new)

            draft, target = drafts / str(numbers[each.name]), part / each.name
            folder.download(each.name, draft, count)
            if draft.stat().st_size == each.size:  # else it has changed since it was listed
                target.parent.mkdir(parents=True, exist_ok=True)
                move_into_place(draft, target)

        try:
            transfer_all(missing, fetch)
        except OSError as error:
            if error.errno in FULL:
                why = describe_full_disk(place, needed, REMEDY)
                raise RemoteError(f"{folder.address} cannot be copied: {why}") from None
            raise
    shutil.rmtree(drafts, ignore_errors=True)
    return bool(missing)


def _has(path: Path, each: RemoteObject) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size == each.size
    return False


def _list_earlier(place: Path) -> dict[RemoteObject, Path]:
    """Return the folder with each object that an earlier copy has, whole or not."""
    found: dict[RemoteObject, Path] = {}
    for listing in place.glob("*.json"):
        folders = [path for path in (listing.with_suffix(""), listing.with_suffix(".part")) if path.is_dir()]
        with contextlib.suppress(OSError, ValueError, TypeError):  # one that cannot be read has nothing to give
            for values in json.loads(listing.read_bytes()) if folders else []:
                found[RemoteObject(**values)] = folders[0]
    return found


def _link_earlier(each: RemoteObject, part: Path, earlier: dict[RemoteObject, Path]) -> bool:
    """Link an object from an earlier copy, and return whether there was one. Without a version it may be another."""
    folder = earlier.get(each)
    if folder is None or not each.version or folder == part or not _has(folder / each.name, each):
        return False
    target = part / each.name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(folder / each.name, target)
    except OSError:  # a file system without links
        shutil.copyfile(folder / each.name, target)
    return True


def _remove_old(copy: Path) -> None:
    """Remove unfinished copies beside a whole one, and copies that were not opened for a month."""
    for other in copy.parent.iterdir():
        is_unfinished = other.suffix in (".part", ".new")
        is_old = not other.suffix and time.time() - other.stat().st_mtime > MAX_AGE_SECONDS
        if other.is_dir() and other != copy and (is_unfinished or is_old):
            shutil.rmtree(other, ignore_errors=True)
    for listing in copy.parent.glob("*.json"):
        if not listing.with_suffix("").is_dir():
            listing.unlink(missing_ok=True)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock while the block runs, and wait for the process that holds it before."""
    while True:
        try:
            lock = lock_file(path)
            break
        except BlockingIOError:
            time.sleep(PAUSE)
    with lock:
        yield


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _hash_listing(objects: Sequence[RemoteObject]) -> str:
    return _hash(json.dumps([vars(each) for each in objects]))
