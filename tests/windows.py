"""A stand-in for Windows: what it refuses, refused here, and what it does not have, taken away.

    with windows():
        vitrail.finetune(...)

Folders cannot be opened or flushed. A file can be flushed only through a handle that may write. What any program has
open, or mapped, cannot be renamed, replaced or removed; nor can a folder with such a file in it. Some names are not
allowed. There is no fcntl, and processes are started by spawn. What it cannot show: paths with backslashes and drives,
its consoles, its process handles, and torch's own build for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl as real_fcntl
import multiprocessing
import os
import re
import shutil
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from vitrail.system import files

RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
FORBIDDEN = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$')
NOT_THERE = (
    (os, ("getuid", "geteuid", "fork", "sched_getaffinity", "O_NONBLOCK", "preadv", "mkfifo", "statvfs")),
    (signal, ("SIGKILL", "SIGHUP", "SIGCHLD", "pause", "alarm", "SIGUSR1")),
)


def list_open_files() -> set[str]:
    """Return the files that this process has open or mapped."""
    held = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(str(link.readlink()))
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            held.add(fields[5])
    return held


def _check_free(path: Any) -> None:
    real = os.path.realpath(path)
    for held in list_open_files():
        if held == real or held.startswith(f"{real}/"):
            raise PermissionError(errno.EACCES, "the process cannot access the file: it is being used", str(path))


def _check_name(path: Any) -> None:
    if isinstance(path, int):
        return
    name = os.fsdecode(path).rstrip("/").rpartition("/")[2]
    if name not in (".", "..", "") and (RESERVED.fullmatch(name) or FORBIDDEN.search(name)):
        raise OSError(errno.EINVAL, "the filename, directory name, or volume label syntax is incorrect", str(path))


def _make_msvcrt() -> types.ModuleType:
    """Return a module with the one function that locks files, by a lock that belongs to the open file."""
    module: Any = types.ModuleType("msvcrt")
    module.LK_NBLCK, module.LK_UNLCK = 2, 0

    def locking(descriptor: int, mode: int, size: int) -> None:
        try:
            real_fcntl.flock(descriptor, real_fcntl.LOCK_EX | real_fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.locking = locking
    return module


@contextlib.contextmanager
def windows() -> Iterator[None]:
    """Let this process live on Windows, as far as its files are concerned."""
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")}

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            _check_name(path)
        if not isinstance(path, int) and Path(os.fsdecode(path)).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real["open"](path, flags, *args, **options)

    def fsync(handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        if real_fcntl.fcntl(number, real_fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real["fsync"](handle)

    def replace(source: Any, target: Any, **options: Any) -> None:
        _check_name(target)
        _check_free(source)
        if Path(os.fsdecode(target)).is_dir():
            raise PermissionError(errno.EACCES, "Access is denied", str(source))
        if Path(os.fsdecode(target)).exists():
            _check_free(target)
        real["replace"](source, target, **options)

    def rename(source: Any, target: Any, **options: Any) -> None:
        if Path(os.fsdecode(target)).exists():
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
        replace(source, target, **options)

    def unlink(path: Any, **options: Any) -> None:
        _check_free(path)
        real["unlink"](path, **options)

    def rmdir(path: Any, **options: Any) -> None:
        _check_free(path)
        real["rmdir"](path, **options)

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        _check_name(path)
        real["mkdir"](path, *args, **options)

    with contextlib.ExitStack() as stack:
        for name, function in {
            "open": open_file,
            "fsync": fsync,
            "replace": replace,
            "rename": rename,
            "unlink": unlink,
            "remove": unlink,
            "rmdir": rmdir,
            "mkdir": mkdir,
        }.items():
            stack.enter_context(mock.patch.object(os, name, function))
        stack.enter_context(mock.patch.object(shutil, "_use_fd_functions", False))
        stack.enter_context(mock.patch.object(files, "IS_WINDOWS", True))
        stack.enter_context(mock.patch.dict(sys.modules, {"fcntl": None, "resource": None, "msvcrt": _make_msvcrt()}))
        for module, names in NOT_THERE:
            for name in names:
                if hasattr(module, name):
                    kept = getattr(module, name)
                    delattr(module, name)
                    stack.callback(setattr, module, name, kept)
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("spawn", force=True)
        stack.callback(multiprocessing.set_start_method, before, force=True)
        yield
