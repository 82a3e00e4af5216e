"""Compile our C++ kernels for this processor at first use, and cache them in the user's folder.

The kernels are optional: on a machine without a compiler, or with a processor that they do not support, `load_library`
raises an error with the reason, and the caller does the same without them (int8_operations.py, transforms/jpeg.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from vitrail.errors import NotApplicableError
from vitrail.system.processor import CPUINFO, cache_folder

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
SECONDS = 120


@functools.cache
def load_library(source: Path, *options: str) -> ctypes.CDLL:
    """Compile a C++ source file, or all files of a folder, or take the result from the cache, and load it.

    Args:
        source: the file or folder.
        options: more options for the compiler.

    Raises:
        NotApplicableError: There is no compiler, it fails, or the library cannot be cached or loaded.
    """
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    compiler = _find_compiler()
    parts = [*(file.read_bytes() for file in files), *map(str.encode, (*compiler, *FLAGS, *options, processor_key()))]
    name = f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(folder)
        path = folder / name
        if path.exists():
            _check_ours(path)
            with contextlib.suppress(OSError):  # damaged: compile it again
                return ctypes.CDLL(str(path))
        _compile([*compiler, *FLAGS, *options], [file for file in files if file.suffix == ".cpp"], path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        raise NotApplicableError(f"kernels for this processor cannot be cached or loaded: {error}") from error


def _check_ours(path: Path) -> None:
    """Refuse a file that another user could have written: loading a library runs its code."""
    if not hasattr(os, "getuid"):
        raise NotApplicableError("kernels are not compiled on Windows: give another precision")
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotApplicableError(
            f"{path} belongs to another user, or others may write to it: kernels are not loaded from there"
        )


def processor_key() -> str:
    """Return the processor's name and a hash of its features: compiled code and measurements are valid for these."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = hashlib.sha256(info.get("flags", info.get("Features", "")).encode()).hexdigest()[:8]
    return f"{info.get('model name', platform.machine())} {features}"


def _find_compiler() -> list[str]:
    for command in (os.environ.get("CXX", ""), *COMPILERS):
        name, *options = shlex.split(command) or [""]
        if name and (path := shutil.which(name)):
            return [path, *options]
    raise NotApplicableError(
        "no C++ compiler was found: install g++, or name one in the variable CXX, to compile kernels"
    )


def _compile(command: list[str], sources: list[Path], path: Path) -> None:
    """Compile into a temporary folder and rename, so that no process loads an incomplete library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        try:
            child = subprocess.run(
                [*command, "-o", str(library), *map(str, sources)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise NotApplicableError(f"{command[0]} did not end within {SECONDS} s") from error
        if child.returncode:
            lines = [line for line in child.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise NotApplicableError(
                f"{command[0]} cannot compile {path.stem.partition('-')[0]} for this processor: {lines[0]}"
            )
        library.replace(path)
