"""The C++ decoder of JPEGs reads strangers' files: damaged ones, under AddressSanitizer and UBSan."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail

KERNELS = Path(vitrail.__file__).parent / "data/jpeg_kernels"
PROGRAM = Path(__file__).parent / "damaged_jpegs.cpp"
SHAPES = [(97, 130), (64, 64), (33, 17), (8, 8), (3, 3), (1, 1), (2, 40), (120, 90), (5, 300), (300, 5)]
OPTIONS = [
    {"subsampling": 0},
    {"subsampling": 1, "optimize": True},
    {"subsampling": 2, "restart_marker_blocks": 3},
    {"subsampling": 2, "quality": 30},
]


def write_jpegs(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for number, (height, width) in enumerate(SHAPES):
        smooth = generator.integers(0, 256, (1 + height // 8, 1 + width // 8, 3), dtype=np.uint8)
        image = Image.fromarray(smooth).resize((width, height), Image.Resampling.BICUBIC)
        for kind, options in enumerate(OPTIONS):
            image.save(folder / f"{number}-{kind}.jpg", **options)
        image.convert("L").save(folder / f"{number}-grey.jpg")


def build_program(folder: Path) -> Path:
    compiler, program = shutil.which("g++"), folder / "damaged_jpegs"
    if compiler is None:
        pytest.skip("there is no g++ to build the program with")
    command = [compiler, "-std=c++17", "-O1", "-g", "-march=native", "-fsanitize=address,undefined"]
    command += ["-fno-sanitize-recover=undefined", str(PROGRAM), str(KERNELS / "decode.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "sanitize" in built.stderr or "libasan" in built.stderr:
        pytest.skip("this compiler has no AddressSanitizer")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.slow
def test_damaged_files_touch_no_memory_but_their_own(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    write_jpegs(photos)
    program = build_program(tmp_path)
    ran = subprocess.run([program, photos, "200000", "0"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    results = dict(map(int, line.split()) for line in ran.stdout.splitlines())
    assert sorted(results) == [0, 1, 2]  # decoded, not supported, damaged
    assert min(results.values()) > 2000
