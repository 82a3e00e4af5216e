"""Too many open files: it is told with what to do, and no image is called unreadable for it."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from pictures import make_folder, picture

import vitrail
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.parallel import map_samples
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import read_file
from vitrail.data.sources.table_cache import MappedTable
from vitrail.errors import DataError
from vitrail.system.failures import print_failure
from vitrail.system.files import MANY_FILES
from vitrail.system.worker_start import explain_start

FEW_FILES = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)),) * 2); "


class Full(ListSource):
    """Its images are whole, but from the fifth on no file can be opened."""

    def read(self, index):
        if index < 4:
            return super().read(index)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), f"{index}.png")


def make_full() -> Full:
    return Full([(picture(number), number % 2) for number in range(30)])


@pytest.fixture
def no_handles(monkeypatch):
    """The system opens no more files."""

    def refuse(path, *_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(os, "open", refuse)


def test_reading_says_what_to_do(tmp_path, no_handles, capsys):
    with pytest.raises(OSError, match="ulimit") as caught:
        read_file(tmp_path / "a.png")
    assert not isinstance(caught.value, vitrail.VitrailError), "it would count as a broken image"
    assert print_failure(caught.value) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'a.png'}: {MANY_FILES}\n"


def test_a_cached_table_is_not_called_damaged(tmp_path, monkeypatch):
    np.save(tmp_path / "labels.npy", np.arange(100))

    def refuse(path, **_):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), str(path))

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(OSError, match="Too many open files in system"):
        MappedTable(tmp_path)["labels"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_ends_and_counts_no_broken_image(workers):
    loader = TrainingLoader(make_full(), 10, (16, 16), workers=workers)
    with pytest.raises(DataError, match=rf"\d+\.png: {MANY_FILES}"):
        list(itertools.islice(loader, 3))
    assert loader.broken == {}


def test_an_evaluation_ends():
    loader = EvaluationLoader(make_full(), vitrail.create_model("Ti/4", image_size=16).preprocessing, 10)
    with pytest.raises(DataError, match=MANY_FILES):
        list(loader)
    assert loader.broken == {}


def read_one(source, index):
    return source.read(index).content


def test_processes_that_read_say_so():
    with pytest.raises(DataError, match=rf"4\.png: {MANY_FILES}"):
        list(map_samples(read_one, make_full(), [[0, 1], [2, 3], [4, 5]], workers=1))


def test_processes_that_cannot_start_say_so():
    with pytest.raises(DataError, match=MANY_FILES), explain_start():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize("files", [10, 14])
def test_a_check_of_whole_images_finds_nothing_or_names_the_limit(tmp_path, files):
    """How many files it takes depends on the machine: with one of these limits it may end early, with another not."""
    make_folder(tmp_path / "photos", {"a": 20, "b": 20})
    command = [sys.executable, "-c", f"{FEW_FILES} from vitrail.cli import main; main()", str(files)]
    done = subprocess.run(
        [*command, "data", "check", str(tmp_path / "photos"), "--workers", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "VITRAIL_CACHE": str(tmp_path / "cache")},
        check=False,
    )
    if done.returncode:
        assert done.stderr.startswith("error: ")
        assert MANY_FILES in done.stderr
    else:
        assert "unreadable" not in done.stdout
