"""The number of pixels that is read from a header is Pillow's, and reading never takes long."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib

import pytest
from lying import LYING, SIDE
from PIL import Image

from vitrail.data.transforms.decode import decode_image
from vitrail.serving.image_header import count_pixels

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "1", "P", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("RGB", "L", "1"),
    "TIFF": ("RGB", "1", "I;16"),
    "PPM": ("RGB", "L", "1"),
}


def write_image(kind: str, mode: str, size: tuple[int, int], **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", MODES)
def test_it_is_pillows(kind):
    for mode in MODES[kind]:
        for size in ((1, 1), (300, 7), (11, 2000)):
            assert count_pixels(write_image(kind, mode, size)) == size[0] * size[1]
    assert count_pixels(LYING[kind]) == SIDE * SIDE


def test_other_layouts():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert count_pixels(write_image("JPEG", "RGB", (30, 20), exif=exif, progressive=True)) == 600
    assert count_pixels(write_image("WEBP", "RGB", (30, 20), lossless=True)) == 600
    assert count_pixels(write_image("WEBP", "RGB", (30, 20), exif=exif)) == 600
    assert count_pixels(write_image("TIFF", "RGB", (30, 20), big_tiff=True)) is None
    assert count_pixels(b"P6 # a comment\n#and one\n30\n20 255\n") is None
    assert count_pixels(b"") == count_pixels(b"no image") == count_pixels(b"\x89PNG") == 0


def test_sizes_that_decoders_find_elsewhere():
    """Found by fuzzing: an image that was counted as smaller than it is would be admitted for too little."""
    whole = write_image("JPEG", "RGB", (40, 30))
    place = whole.index(b"\xff\xdb")
    with_junk = whole[:place] + b"junk" + whole[place:]
    frame = write_image("GIF", "P", (30, 20))
    small_screen = frame[:6] + b"\1\0\1\0" + frame[10:]
    start = whole.index(b"\xff\xc0")
    two_sizes = whole[:start] + b"\xff\xc0\0\x0b\x08\0\1\0\1\1\1\x11\0" + whole[start:]
    for content, pixels in ((with_junk, 1200), (small_screen, 600)):
        assert decode_image(content).shape[1:].numel() == pixels
        assert count_pixels(content) == pixels
    assert count_pixels(two_sizes) == 1200
    comments = frame[:13] + frame[13 : frame.index(b",")] + b"!\xfe\1x\0" * 300 + frame[frame.index(b",") :]
    assert count_pixels(comments) is None
    png = write_image("PNG", "RGB", (40, 30))
    small = write_image("PNG", "RGB", (1, 1))
    text = b"\0\0\0\x04tEXta\0bc" + struct.pack(">I", zlib.crc32(b"tEXta\0bc"))
    for content in (png[:8] + text + png[8:], png[:8] + small[8:33] + png[8:]):
        assert decode_image(content).shape[1:].numel() == count_pixels(content) == 1200
    loop = b"!\xff\x0bNETSCAPE2.0\0"
    assert count_pixels(frame[:13] + frame[13 : frame.index(b",")] + loop + frame[frame.index(b",") :]) is None
    assert count_pixels(b"P6 1#\n000 1#\n000 255\n") is None
    tiff = write_image("TIFF", "RGB", (30, 20))
    (directory,) = struct.unpack_from("<I", tiff, 4)
    for place, changed in ((2, b"\x10\0"), (4, b"\2\0\0\0"), (12, b"\0\1")):  # another type, a count, a tag twice
        start = directory + 2 + place
        assert count_pixels(tiff[:start] + changed + tiff[start + len(changed) :]) is None


def test_any_bytes_are_counted_in_no_time():
    rng = random.Random(0)
    contents = [LYING[kind] for kind in LYING]
    for content in list(contents):
        for _ in range(50):
            changed = bytearray(content[:200])
            changed[rng.randrange(len(changed))] = rng.randrange(256)
            contents.append(bytes(changed) + content[200:])
    contents += [b"\xff\xd8" + b"\xff" * 20_000_000, b"\xff\xd8" + b"\xff\xfe\0\2" * 5_000_000, b"P6 " + b" " * 10**7]
    contents += [b"II*\0\x08\0\0\0\xff\xff" + bytes(1_000_000)]
    started = time.process_time()
    for content in contents:
        count_pixels(content)
    assert time.process_time() - started < 1e-3 * len(contents)
