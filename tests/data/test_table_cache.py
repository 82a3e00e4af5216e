"""Where tables about samples are cached when the user's own folder cannot be written, and whose folder that is."""

from __future__ import annotations

import os
import tempfile

import pytest

from vitrail.data.sources.table_cache import find_cache_folder
from vitrail.errors import DataError


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, and a cache folder that cannot be made: a file is in its place."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp" / f"vitrail-{os.getuid()}"


def test_a_temporary_folder_is_for_its_user_alone(temporary):
    assert find_cache_folder() == temporary / "index"
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert find_cache_folder() == temporary / "index"


def test_a_folder_that_others_write_to_is_refused(temporary):
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(DataError, match="set VITRAIL_CACHE to a folder that only you can write to"):
        find_cache_folder()


def test_a_folder_of_another_user_is_refused(temporary, monkeypatch):
    temporary.mkdir(mode=0o700)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    temporary.rename(temporary.with_name(f"vitrail-{theirs}"))
    with pytest.raises(DataError, match="belongs to another user"):
        find_cache_folder()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_in_its_place_is_refused(temporary, tmp_path, kind):
    if kind == "link":
        (tmp_path / "own").mkdir(mode=0o700)
        temporary.symlink_to(tmp_path / "own")
    else:
        temporary.touch(mode=0o600)
    with pytest.raises(DataError, match=str(temporary)):
        find_cache_folder()
