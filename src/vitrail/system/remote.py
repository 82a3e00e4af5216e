"""Folders in a bucket, such as s3://bucket/folder: their objects are listed, downloaded, uploaded and removed.

fsspec speaks to the storage, by s3fs for S3. It is imported when an address is first opened. Names of objects are a
stranger's: they are checked before any of them becomes a path of this machine.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vitrail.errors import ConfigError, MissingExtraError, did_you_mean, escape_unprintable
from vitrail.system.event_display import EventDisplay
from vitrail.system.files import IS_WINDOWS, RESERVED_NAME, describe_reason

T = TypeVar("T")
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "memory": "fsspec",
}
"""The schemes of addresses, and the package that fsspec needs for each."""
THREADS = 16
"""How many objects are on their way at a time."""
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "content_settings_md5", "LastModified", "last_modified", "mtime")
"""What fsspec calls the version of an object, the most exact first. `created` is the memory's."""
_NO_NETWORK = ("ConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ClientConnectorError", "HTTPClientError")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoAuthTokenError")


class RemoteError(OSError):
    """A bucket that cannot be reached, or an object that cannot be read or written; the message is a sentence."""

    def __init__(self, message: str, number: int = errno.EIO) -> None:
        super().__init__(number, escape_unprintable(message))

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True, order=True)
class RemoteObject:
    """An object below an address."""

    name: str
    """With / between folders, such as train/cat/1.jpg."""
    size: int
    """In bytes."""
    version: str
    """Changes whenever the content does: the ETag, or what else the storage gives; empty if it gives nothing."""


def is_address(name: object) -> bool:
    """Return whether a name has a scheme, as s3://bucket/folder has."""
    return isinstance(name, str) and _SCHEME.match(name) is not None


def check_address(address: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        ConfigError: its scheme is none that is read, or it names no bucket.
    """
    match = _SCHEME.match(address)
    scheme = match.group(1) if match else ""
    if scheme not in PACKAGES:
        allowed = ", ".join(f"{name}://" for name in PACKAGES if name != "memory")
        hint = did_you_mean(scheme, PACKAGES) or f"; there are {allowed}"
        raise ConfigError(f"{address!r} is no address that can be used{hint}")
    stripped = address.rstrip("/")
    if stripped.count("://") != 1 or stripped.endswith(":") or "::" in address:
        raise ConfigError(f"{address!r} names no folder in a bucket: give an address such as {scheme}://bucket/folder")
    return stripped


class RemoteFolder:
    """The objects below an address.

    Args:
        address: such as s3://bucket/folder. Nothing is read yet.

    Raises:
        ConfigError: it is no address, or the package for it is not installed.
        MissingExtraError: s3fs is not installed.
    """

    def __init__(self, address: str) -> None:
        self.address = check_address(address)
        self._files, self._root = _open_storage(self.address)

    def list_objects(self) -> list[RemoteObject]:
        """Return all objects below the address, by name. Empty objects that stand for folders are left out.

        Raises:
            RemoteError: there is no such bucket, it cannot be read, or a name can be no file below a folder.
        """
        self._files.invalidate_cache()
        try:
            found = self._call("read", lambda: self._files.find(self._root, detail=True))
        finally:
            self._files.invalidate_cache()  # the names of a million objects are not needed twice
        if self._root in found and len(found) == 1:
            raise RemoteError(f"{self.address} is an object, and no folder of objects")
        objects = [
            self._describe(path.removeprefix(f"{self._root}/"), info)
            for path, info in found.items()
            if path.startswith(f"{self._root}/") and not path.endswith("/")
        ]
        _check_names(self.address, objects)
        return sorted(objects)

    def find_objects(self, names: Iterable[str]) -> list[RemoteObject]:
        """Return those of the objects with these names that are there.

        Raises:
            RemoteError: they cannot be read.
        """
        self._files.invalidate_cache()
        found = []
        for name in names:
            try:
                info = self._call("read", partial(self._files.info, self._join(name)))
            except RemoteError as error:
                if error.errno == errno.ENOENT:
                    continue
                raise
            if info.get("type") == "file":
                found.append(self._describe(name, info))
        return sorted(found)

    def download(self, name: str, path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """Write an object to a file. If this fails, a part of it may be there.

        Args:
            name: of the object.
            path: of the file, whose folder is there.
            on_bytes: called with each number of bytes that have come; an exception from it ends the download.

        Raises:
            RemoteError: the object cannot be read.
            OSError: the file cannot be written.
        """
        callback = _count_bytes(on_bytes)
        self._call("read", lambda: self._files.get_file(self._join(name), str(path), callback=callback), name, path)

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            RemoteError: it is not there or cannot be read.
        """
        content: bytes = self._call("read", lambda: self._files.cat_file(self._join(name)), name)
        return content

    def upload(self, path: Path, name: str) -> None:
        """Write a file to an object, which is whole or absent.

        Raises:
            RemoteError: the object cannot be written.
            OSError: the file cannot be read.
        """
        self._call("written", lambda: self._files.put_file(str(path), self._join(name)), name, path)

    def write(self, content: bytes, name: str) -> None:
        """Write an object.

        Raises:
            RemoteError: it cannot be written.
        """
        self._call("written", lambda: self._files.pipe_file(self._join(name), content), name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after the other, in this order. Those that are not there are left out.

        Raises:
            RemoteError: one cannot be removed.
        """
        for name in names:
            try:
                self._call("removed", partial(self._files.rm_file, self._join(name)), name)
            except RemoteError as error:
                if error.errno != errno.ENOENT:
                    raise

    def _join(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _describe(self, name: str, info: dict[str, Any]) -> RemoteObject:
        version = next((str(info[key]) for key in (*_VERSIONS, "created") if info.get(key)), "")
        return RemoteObject(name, int(info.get("size") or 0), version)

    def _call(self, verb: str, work: Callable[[], T], name: str = "", path: Path | None = None) -> T:
        """Return what the storage answers; turn any error into a RemoteError, except errors of a local file."""
        try:
            return work()
        except Exception as error:  # each storage has its own
            if isinstance(error, StopTransferError):
                raise
            if isinstance(error, OSError) and (error.errno in FULL or (path and error.filename == str(path))):
                raise
            place = f"{self.address}/{name}" if name else self.address
            raise _explain(error, self.address, place, verb) from None


class StopTransferError(Exception):
    """Another transfer has failed, so this one ends too."""


def transfer_all(items: Iterable[T], transfer: Callable[[T, Callable[[int], None]], None]) -> None:
    """Call `transfer` with each item, several at a time. The first error ends them all and is raised.

    Args:
        items: what is transferred.
        transfer: is called in a thread with an item, and with a function to call for each number of bytes: this
            raises a StopTransferError once another transfer has failed.
    """
    stopped = False

    def go_on(count: int) -> None:
        if stopped:
            raise StopTransferError

    with ThreadPoolExecutor(THREADS, thread_name_prefix="transfer") as pool:
        running: set[Future[None]] = set()
        try:
            for item in items:
                if len(running) >= 2 * THREADS:  # a million tasks need not wait in memory
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                running.add(pool.submit(transfer, item, go_on))
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
        except BaseException:
            stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def show_transfer(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far a transfer is, in MB, while the block runs: as a bar on a terminal, elsewhere as lines on stderr.

    Args:
        task: what is done, such as "copying s3://bucket/folder".
        total: all bytes.

    Yields:
        A function to call with each number of bytes that have come, from any thread.
    """
    done, counting = 0, threading.Lock()

    def add_bytes(count: int) -> None:
        nonlocal done
        with counting:
            done += count
            display("progress", {"task": f"{task}, MB", "done": done // 10**6, "total": total // 10**6 + 1})

    with EventDisplay(plain_lines=True) as display:
        yield add_bytes


def describe_full_disk(folder: Path, needed: int, remedy: str) -> str:
    """Return the sentence about a disk that has no room for so many bytes, with what to do."""
    return f"the disk of {folder} has no room for {needed / 1e9:,.2f} GB more: free some space, or {remedy}"


def _open_storage(address: str) -> tuple[Any, str]:
    scheme = address.partition("://")[0]
    import fsspec

    try:
        # Several objects are on their way at a time. Several parts of each would be too much for the memory.
        options = {"max_concurrency": 1} if PACKAGES[scheme] == "s3fs" else {}
        files, root = fsspec.core.url_to_fs(address, **options)
    except ImportError:
        if PACKAGES[scheme] == "s3fs":
            raise MissingExtraError(f"opening {address}", "s3") from None
        raise ConfigError(f"opening {address} needs a package: pip install {PACKAGES[scheme]}") from None
    except Exception as error:  # each storage has its own
        raise _explain(error, address, address, "read") from None
    return files, str(root).rstrip("/")


def _check_names(address: str, objects: Iterable[RemoteObject]) -> None:
    """Raise a RemoteError if a name could lead out of a folder, or names a file and a folder at once."""
    files, folders = set[str](), set[str]()
    for each in objects:
        parts = each.name.split("/")
        if problem := _find_problem(each.name, parts):
            raise RemoteError(f"the object {each.name!r} in {address} {problem}: rename or remove it")
        files.add(each.name)
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    if both := files & folders:
        raise RemoteError(f"{min(both)!r} in {address} is an object and a folder at once: rename or remove one")


def _find_problem(name: str, parts: list[str]) -> str:
    """Return what is wrong with the name of an object that is to become a file; empty if nothing is."""
    if any(part in ("", ".", "..") for part in parts):
        return "has a part that is empty, or that leads to another folder"
    if "\\" in name or any(ord(character) < 32 or ord(character) == 127 for character in name):
        return "has a backslash or a control character"
    if IS_WINDOWS and any(RESERVED_NAME.fullmatch(part) or re.search(r'[<>:"|?*]|[. ]$', part) for part in parts):
        return "is no name of a file on Windows"
    if "?versionId=" in name:
        return "has ?versionId= in it, which s3fs takes for a version of another object"
    if any(len(os.fsencode(part)) > 255 for part in parts):
        return "has a part of more than 255 bytes"
    return ""


def _count_bytes(on_bytes: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class ByteCounter(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            on_bytes(inc)

    return ByteCounter()


def _explain(error: Exception, address: str, place: str, verb: str) -> RemoteError:
    """Return an error of a storage as a sentence that says what to do."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    reason = describe_reason(error) if isinstance(error, OSError) else str(error).strip().partition("\n")[0]
    reason = (reason or type(error).__name__).rstrip(".")
    if isinstance(error, FileNotFoundError):
        bucket = "/".join(address.split("/")[:3])
        return RemoteError(f"{place} is not there ({reason}): look at the name, and whether {bucket} is", errno.ENOENT)
    if isinstance(error, PermissionError):
        return RemoteError(
            f"{place} may not be {verb} ({reason}): give credentials that allow it{_name_credentials(address)}",
            errno.EACCES,
        )
    if kinds & set(_NO_CREDENTIALS):
        public = ", or FSSPEC_S3='{\"anon\": true}' for a bucket that everybody may read" if "s3" in address[:3] else ""
        return RemoteError(
            f"{address} needs credentials ({reason}): set them{_name_credentials(address)}{public}", errno.EACCES
        )
    if isinstance(error, ConnectionError | TimeoutError) or kinds & set(_NO_NETWORK):
        endpoint = ", and AWS_ENDPOINT_URL if it is set" if address.startswith("s3") else ""
        return RemoteError(f"{address} cannot be reached ({reason}): look at the network{endpoint}, and try again")
    return RemoteError(f"{place} cannot be {verb}: {reason}")


def _name_credentials(address: str) -> str:
    """Return where credentials are looked for."""
    return ", as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" if address.startswith("s3") else ""
