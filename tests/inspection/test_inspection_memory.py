"""A large model at a high resolution, inspected on 32 photographs, needs less than 2 GB."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

INSPECTED = """
import sys
from pathlib import Path
import vitrail
from vitrail.inspection.inspect import inspect
vitrail.save(vitrail.create_model("B/16", image_size=384, seed=0), "b16")
inspect("b16", images="photos", out="report.html")
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of memory is read from /proc")
def test_b16_at_384_pixels_on_32_images_within_two_gigabytes(tmp_path):
    (tmp_path / "photos").mkdir()
    numbers = np.random.default_rng(0)
    for index in range(32):  # of a camera's size, which is more than the model sees
        small = Image.fromarray(numbers.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        small.resize((2000, 1500)).save(tmp_path / "photos" / f"{index:03}.jpg")
    child = subprocess.run([sys.executable, "-c", INSPECTED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", child.stdout)[1]) * 1024
    print(f"\npeak {peak / 1e9:.2f} GB")
    assert peak < 2e9
    assert (tmp_path / "report.html").stat().st_size > 100_000
