"""Small C++ kernels of our own, compiled for this very processor at their first use and kept in the user's cache.

A machine without a compiler, or with a processor that the kernels are not written for, does without them: `library`
says why by an error, and everything that has a kernel has a way in plain torch too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from vitrail.errors import NotApplicableError
from vitrail.processor import CPUINFO, cache_folder

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
SECONDS = 120


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The compiled form of a source file; a NotApplicableError where there can be none."""
    compiler = _compiler()
    key = hashlib.sha256(b"\0".join([source.read_bytes(), *map(str.encode, (compiler, *FLAGS, processor_name()))]))
    name = f"{source.stem}-{key.hexdigest()[:16]}.so"
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            _compile(compiler, source, folder / name)
        return ctypes.CDLL(str(folder / name))
    except OSError as error:
        raise NotApplicableError(f"kernels for this processor cannot be kept or loaded: {error}") from error


def processor_name() -> str:
    """As the system calls it, with its features: what compiled code and measurements hold for."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = hashlib.sha256(told.get("flags", told.get("Features", "")).encode()).hexdigest()[:8]
    return f"{told.get('model name', platform.machine())} {features}"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise NotApplicableError(
        "no C++ compiler was found: install g++, or name one in CXX, for kernels of this processor"
    )


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Written beside and renamed, so that nobody loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            child = subprocess.run(
                [compiler, *FLAGS, "-o", str(made), str(source)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise NotApplicableError(f"{compiler} did not end within {SECONDS} s") from error
        if child.returncode:
            lines = [line for line in child.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise NotApplicableError(f"{compiler} cannot compile {source.name} for this processor: {lines[0]}")
        made.replace(path)
