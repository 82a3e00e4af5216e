"""Rectangles of JPEGs: the compiled decoder gives libjpeg's pixels, or leaves the file to others."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vitrail
from vitrail.data.transforms import jpeg
from vitrail.data.transforms.decode import decode_crop, decode_image
from vitrail.data.transforms.jpeg import decode_rectangle, load_decoder
from vitrail.errors import NotApplicableError

needs_compiler = pytest.mark.skipif(load_decoder() is None, reason="the decoder cannot be compiled here")
DONE, NOT_SUPPORTED, DAMAGED = range(3)


def photo(width: int, height: int) -> Image.Image:
    from sklearn.datasets import load_sample_images

    return Image.fromarray(load_sample_images().images[0]).resize((width, height))


def encoded(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def decode_whole(content: bytes, scale: int) -> np.ndarray:
    """libjpeg's pixels of the whole image."""
    height, width, *_ = simplejpeg.decode_jpeg_header(content)
    least = {"min_height": -(-height // scale), "min_width": -(-width // scale), "min_factor": scale}
    return simplejpeg.decode_jpeg(content, **(least if scale > 1 else {}))


def decode_compiled(content: bytes, scale: int, box: tuple[int, int, int, int]) -> tuple[int, np.ndarray]:
    """The status and pixels of the compiled decoder alone."""
    pixels = np.zeros((max(box[2], 1), max(box[3], 1), 3), dtype=np.uint8)
    return load_decoder()(content, len(content), scale, *box, pixels.ctypes.data), pixels


KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "own codes": {"subsampling": 2, "optimize": True, "quality": 97},
    "restarts": {"subsampling": 0, "restart_marker_blocks": 3, "quality": 60},
    "grey": {"grey": True},
}
FILES = {
    (kind, size): encoded(photo(*size).convert("L" if options.get("grey") else "RGB"), **options)
    for kind, options in KINDS.items()
    for size in ((160, 120), (83, 61), (9, 70), (1, 1))
}


@needs_compiler
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FILES)), st.sampled_from([1, 2, 4, 8]), st.data())
def test_every_rectangle_has_the_pixels_of_the_whole(file, scale, data):
    content = FILES[file]
    whole = decode_whole(content, scale)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, side)] * 2))) for side in whole.shape[:2]]
    (top, bottom), (left, right) = bounds
    box = min(top, whole.shape[0] - 1), min(left, whole.shape[1] - 1), max(bottom - top, 1), max(right - left, 1)
    expected = whole[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
    assert np.array_equal(decode_rectangle(content, simplejpeg.decode_jpeg_header(content)[:2], scale, box), expected)
    status, pixels = decode_compiled(content, scale, box)
    # Chroma that is enlarged from an eighth, or from one or two columns, is left to others.
    is_odd = (file[0] == "4:2:2" and scale == 8) or file[1][0] < 10
    assert status == DONE or is_odd
    assert status != DONE or np.array_equal(pixels, expected)


@needs_compiler
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_the_whole_and_its_corners(kind, scale):
    content = FILES[kind, (83, 61)]
    whole = decode_whole(content, scale)
    height, width = whole.shape[:2]
    for box in ((0, 0, height, width), (height - 1, width - 1, 1, 1), (0, width - 2, 1, 2), (height - 3, 0, 3, 1)):
        status, pixels = decode_compiled(content, scale, box)
        assert status == (NOT_SUPPORTED if (kind, scale) == ("4:2:2", 8) else DONE)
        if status == DONE:
            assert np.array_equal(pixels, whole[box[0] : box[0] + box[2], box[1] : box[1] + box[3]])


@needs_compiler
@pytest.mark.parametrize(
    "box",
    [(0, 0, 62, 83), (0, 0, 61, 84), (61, 0, 1, 1), (-1, 0, 4, 4), (0, -1, 4, 4), (0, 0, 0, 4), (0, 2**31 - 1, 4, 4)],
)
def test_a_rectangle_outside_is_refused(box):
    assert decode_compiled(FILES["4:4:4", (83, 61)], 1, box)[0] == NOT_SUPPORTED


def other_kinds() -> dict[str, bytes]:
    image = photo(64, 48)
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
    plain = encoded(image, subsampling=0)
    return {
        "progressive": encoded(image, progressive=True),
        "four inks": encoded(image.convert("CMYK")),
        "RGB by its marker": plain[:2] + adobe + plain[20:],
        "RGB by its letters": encoded(image, keep_rgb=True),
        "bytes behind the end": plain + b"\0\0",
    }


@needs_compiler
@pytest.mark.parametrize("kind", sorted(other_kinds()))
def test_other_kinds_are_left_to_others(kind):
    content = other_kinds()[kind]
    assert decode_compiled(content, 1, (0, 0, 48, 64))[0] == NOT_SUPPORTED
    assert torch.equal(decode_crop(content, lambda *_: (8, 9, 20, 30), (20, 30)), decode_image(content)[:, 8:28, 9:39])


@needs_compiler
def test_nothing_below_the_rectangle_is_read():
    content = FILES["4:4:4", (160, 120)]
    middle = len(content) * 2 // 3
    other = content[:middle] + bytes(len(content) - middle - 2) + content[-2:]
    assert decode_compiled(other, 1, (0, 0, 32, 160))[0] == DONE
    assert np.array_equal(decode_compiled(other, 1, (0, 0, 32, 160))[1], decode_whole(content, 1)[:32])


def outcome(content: bytes, box: tuple[int, int, int, int], size: tuple[int, int]) -> torch.Tensor | str:
    try:
        return decode_crop(content, lambda *_: box, size)
    except vitrail.DataError as error:
        return str(error)


@needs_compiler
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cut_short_anywhere_is_the_same_error_or_image(kind, monkeypatch):
    content = FILES[kind, (83, 61)]
    pieces = [content[:length] for length in range(2, len(content), max(len(content) // 40, 1))]
    with_decoder = [outcome(piece, (2, 3, 50, 60), (20, 20)) for piece in pieces]
    monkeypatch.setattr(jpeg, "load_decoder", lambda: None)
    for piece, found in zip(pieces, with_decoder, strict=True):
        expected = outcome(piece, (2, 3, 50, 60), (20, 20))
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


@needs_compiler
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(40, 30), (18, 17)])
def test_a_turned_image_without_the_compiled_decoder_is_the_same(orientation, size, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(photo(83, 61), exif=exif)
    box = (5, 7, 41, 43)
    found = outcome(content, box, size)
    monkeypatch.setattr(jpeg, "load_decoder", lambda: None)
    assert torch.equal(found, outcome(content, box, size))


@needs_compiler
def test_damaged_bytes_are_refused_or_decoded_but_end_no_process():
    rng, counts = random.Random(0), [0, 0, 0]
    for _ in range(3000):
        content = bytearray(FILES[rng.choice(sorted(FILES))])
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(rng.choice((len(content), 700)) % len(content) + 1) % len(content)] = rng.randrange(
                256
            )
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(bytes(content))
        except ValueError:
            continue
        if height * width < 100_000:
            counts[decode_compiled(bytes(content), 1, (0, 0, height, width))[0]] += 1
    assert min(counts) > 50


def test_without_a_compiler_simplejpeg_decodes_and_the_log_says_so(monkeypatch, caplog):
    def refuse(*_):
        raise NotApplicableError("no C++ compiler was found")

    monkeypatch.setattr(jpeg, "load_library", refuse)
    monkeypatch.setattr(jpeg, "load_decoder", load_decoder.__wrapped__)
    content = FILES["4:2:0", (83, 61)]
    with caplog.at_level("INFO", logger="vitrail"):
        found = decode_rectangle(content, (61, 83), 1, (3, 4, 20, 30))
    assert np.array_equal(found, decode_whole(content, 1)[3:23, 4:34])
    assert "simplejpeg" in caplog.text
    assert "compiler" in caplog.text
