"""Short names of models and data, for folders; regular files only."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from vitrail.system.files import open_regular_file, read_regular_file, short_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("runs/x", "x"),
        ("runs/x/model", "x"),
        ("runs/x/best", "x-best"),
        ("best", "best"),
        ("hf:owner/name", "name"),
        ("timm:vit_tiny", "vit_tiny"),
        ("my photos/", "my-photos"),
        ("/", "data"),
    ],
)
def test_short_names(text, name):
    assert short_name(text) == name


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "link").symlink_to("/dev/zero")
        for path in (tmp_path, tmp_path / "pipe", tmp_path / "socket", tmp_path / "link", Path("/dev/zero")):
            with pytest.raises(OSError, match="not a file"):
                open_regular_file(path)
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "nothing")


def test_no_handle_stays_open_after_a_refusal():
    first = os.open(os.devnull, os.O_RDONLY)
    os.close(first)
    for _ in range(20):
        with pytest.raises(OSError, match="not a file"):
            open_regular_file(Path("/dev/null"))
    again = os.open(os.devnull, os.O_RDONLY)
    os.close(again)
    assert again == first


def test_at_most_the_limit_is_read(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"12345")
    assert read_regular_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than the 4 allowed"):
        read_regular_file(path, 4)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    with pytest.raises(OSError, match="more than the 100 allowed"):
        read_regular_file(tmp_path / "sparse", 100)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has files that do not tell their size")
def test_a_file_that_does_not_tell_its_size_is_read_to_its_end():
    assert read_regular_file(Path("/proc/self/status"), 100_000).endswith(b"\n")
    with pytest.raises(OSError, match="more than the 50 allowed"):
        read_regular_file(Path("/proc/self/status"), 50)
