"""Small C++ kernels of our own, compiled for this very processor at their first use and kept in the user's cache.

A machine without a compiler, or with a processor that the kernels are not written for, does without them: `library`
says why by an error, and everything that has a kernel has a way in plain torch too.
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
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
SECONDS = 120


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The compiled form of a source file, or of all in a folder; a NotApplicableError where there can be none."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    compiler = _compiler()
    parts = [*(file.read_bytes() for file in files), *map(str.encode, (*compiler, *FLAGS, processor_key()))]
    name = f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(folder)
        path = folder / name
        if path.exists():
            _check_ours(path)
            with contextlib.suppress(OSError):  # damaged: made anew
                return ctypes.CDLL(str(path))
        _compile(compiler, [file for file in files if file.suffix == ".cpp"], path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:  # the latter where nobody knows where home is
        raise NotApplicableError(f"kernels for this processor cannot be kept or loaded: {error}") from error


def _check_ours(path: Path) -> None:
    """Whatever is loaded runs: it must be this user's, and nobody else may have written it."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotApplicableError(f"{path} is another user's, or others may write it: kernels are not loaded from there")


def processor_key() -> str:
    """As the system calls it, with its features: what compiled code and measurements hold for."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = hashlib.sha256(told.get("flags", told.get("Features", "")).encode()).hexdigest()[:8]
    return f"{told.get('model name', platform.machine())} {features}"


def _compiler() -> list[str]:
    for command in (os.environ.get("CXX", ""), *COMPILERS):
        name, *options = shlex.split(command) or [""]
        if name and (found := shutil.which(name)):
            return [found, *options]
    raise NotApplicableError(
        "no C++ compiler was found: install g++, or name one in CXX, for kernels of this processor"
    )


def _compile(compiler: list[str], sources: list[Path], path: Path) -> None:
    """Written beside and renamed, so that nobody loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            child = subprocess.run(
                [*compiler, *FLAGS, "-o", str(made), *map(str, sources)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise NotApplicableError(f"{compiler[0]} did not end within {SECONDS} s") from error
        if child.returncode:
            lines = [line for line in child.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise NotApplicableError(
                f"{compiler[0]} cannot compile {path.stem.partition('-')[0]} for this processor: {lines[0]}"
            )
        made.replace(path)
