"""Atomic file writes, and reads of regular files only.

After a crash a file has either its old content or all of the new. A pipe or a device in the place of a file is refused:
reading it might never end.

Windows differs: it flushes no folders, flushes files that are open for writing only, and renames nothing that any
program has open, such as a virus scanner that looks at what was just written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from vitrail.errors import ConfigError

IS_WINDOWS = os.name == "nt"
RESERVED_NAME = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""Names that no file can have on Windows."""
MANY_FILES = "too many files are open: allow more, such as by `ulimit -n 4096`, or take fewer workers"
"""What to do when the system gives this process, or all of them together, no more open files."""
RENAMING_SECONDS, RENAMING_PAUSE = 5.0, 0.05
"""How long a rename on Windows waits for other programs, and how often it is tried."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old content or all of the new one."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(content)
    move_into_place(draft, path)


def move_into_place(draft: Path, path: Path) -> None:
    """Rename a finished draft to its final path, once its bytes are on the disk."""
    flush_to_disk(draft)
    rename_when_free(draft, path)
    flush_to_disk(path.parent)


def rename_when_free(path: Path, target: Path) -> None:
    """Rename a file, which replaces another, or a folder. On Windows, wait until no other program has it open.

    Raises:
        OSError: it cannot be renamed; on Windows, a program has it open for more than 5 seconds.
    """
    give_up = time.monotonic() + RENAMING_SECONDS
    while True:
        try:
            path.replace(target)
            return
        except PermissionError:
            if not IS_WINDOWS or target.is_dir() or time.monotonic() > give_up:
                raise
            time.sleep(RENAMING_PAUSE)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder is on the disk; on Windows, which has no way to flush a folder, only a file."""
    if IS_WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if IS_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; `buffering` is that of the built-in `open`.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    # Opened without waiting for a pipe's writer, and looked at afterwards: nothing can take its place in between.
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, "not a file", str(path)) from None
        if is_out_of_handles(error):
            raise OSError(error.errno, MANY_FILES, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(handle, "rb", buffering)


def is_out_of_handles(error: BaseException) -> bool:
    """Return whether an error says that no more files can be opened: it says nothing about the file itself."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def describe_reason(error: OSError) -> str:
    """Return why the system refused, on one line; for too many open files also what to do."""
    reason = MANY_FILES if is_out_of_handles(error) else error.strerror or str(error).strip().partition("\n")[0]
    return reason or type(error).__name__


def describe_os_error(error: OSError) -> str:
    """Return the file, if one is known, and why the system refused."""
    reason = describe_reason(error)
    return f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file, or of a link to one; at most `most_bytes` + 1 bytes are read.

    Raises:
        OSError: it cannot be read, is larger, or is a folder, a pipe, a socket or a device.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most_bytes) + 1)
        if len(content) > size:  # it has grown, or does not tell its size, as in /proc
            content += file.read(most_bytes + 1 - len(content))
    if len(content) > most_bytes:
        raise OSError(
            errno.EFBIG, f"{max(size, len(content)):,} bytes, more than the {most_bytes:,} allowed", str(path)
        )
    return content


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; False also for names that no file can have."""
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or its folder cannot be read
        return False


def check_out_file(out: Path | None, option: str = "--out") -> None:
    """Raise a ConfigError if a file to write is a folder, or would lie in a folder that does not exist."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"{option} {out}: give the name of a file in a folder that is there")


def write_out_file(out: Path, content: dict[str, Any]) -> None:
    """Write a result as JSON to a file that `check_out_file` has allowed."""
    write_out_text(out, json.dumps(content, indent=2) + "\n")


def write_out_text(out: Path, text: str, option: str = "--out") -> None:
    """Write a text to a file that `check_out_file` has allowed."""
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise ConfigError(f"{option} {out} cannot be written: {describe_reason(error)}") from None


def sha256(path: Path) -> str:
    """Return the hash of a file as `sha256sum` prints it."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def hide_folders(name: str) -> str:
    """Return the name of a model or a data set without the folders that lead to it, which are nobody else's business.

    Names such as hf:owner/name stay as they are. For the `model` folder inside a run folder, the name of the run is
    returned; for its `best` folder, "NAME-best".
    """
    if name.startswith(("hf:", "timm:")):
        return name
    *above, last = [part for part in re.split(r"[\\/]", name) if part not in ("", ".", "..", "~")] or [""]
    if last in ("model", "best") and above:
        last = above[-1] if last == "model" else f"{above[-1]}-best"
    return last or "data"


def short_name(text: str) -> str:
    """Return the last part of a model's or a data set's name, with only characters that a folder name may have.

    For the `model` folder inside a run folder, return the name of the run; for its `best` folder, "NAME-best".
    """
    path = Path(text.removeprefix("hf:").removeprefix("timm:"))
    if path.name == "model" and path.parent.name:
        path = path.parent
    elif path.name == "best" and path.parent.name:
        path = path.with_name(f"{path.parent.name}-best")
    name = re.sub(r"[^\w.+-]+", "-", path.name).strip("-.") or "data"
    return f"_{name}" if RESERVED_NAME.fullmatch(name) else name
