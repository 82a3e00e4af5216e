"""The memory of a real server stays within what is promised, whatever the headers of images say."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from lying import LYING, almost_whole
from PIL import Image
from running import image, make_model, post, status, with_settings

MEGABYTE = 1_000_000
PROMISED = 900 * MEGABYTE
"""640 MB for the largest image, as the page about serving says, and what the allocator keeps for the next."""


def most_resident(server) -> int:
    """The largest resident memory of the server so far, in bytes."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
def test_images_that_fail_leave_no_memory_behind(folder):
    """16 of 160 MB each when decoded, in one request: each is freed when it fails, not when the request ends."""
    with with_settings(folder) as server:
        before = most_resident(server)
        answer = httpx.post(f"{server.url}/v1/classify", files=[("file", ("a", almost_whole()))] * 16, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_image")
        assert most_resident(server) - before < 400 * MEGABYTE
        assert not [line for line in server.said if "Traceback" in line]


@pytest.mark.slow
def test_lying_headers_of_every_format(folder):
    """Eight clients at once, as strangers come. Some decoders give what they have: those answers are 200."""
    with with_settings(folder) as server:
        before = most_resident(server)
        contents = [content for kind, content in LYING.items() for _ in range(1 if kind in ("JPEG", "WEBP") else 20)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda content: status(server.told(post("/v1/classify", content), 30)), contents))
        assert set(found) <= {200, 400, 429}
        assert most_resident(server) - before < PROMISED
        assert status(server.told(post("/v1/classify", image()))) == 200


@pytest.mark.slow
def test_a_grey_model_takes_no_more(tmp_path):
    """A TIFF of a kilobyte with 39 million pixels: it was three times over the promise."""
    folder = make_model(tmp_path / "grey", in_channels=1)
    file = io.BytesIO()
    Image.new("1", (65_000, 600)).save(file, "TIFF", compression="group4")
    with with_settings(folder) as server:
        before = most_resident(server)
        assert status(server.told(post("/v1/classify", file.getvalue(), "image/tiff"), 30)) == 200
        assert most_resident(server) - before < PROMISED
