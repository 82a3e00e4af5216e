"""Read from the first bytes of an image file how many pixels it has, in little and bounded time.

The event loop asks before a request is admitted, so this must not parse whole files as Pillow does.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

MOST_JPEG_SEGMENTS = 200
MOST_PNG_CHUNKS = 200
MOST_TIFF_ENTRIES = 200
MOST_GIF_BLOCKS = 200
EXTENSION, FRAME = 0x21, 0x2C
"""First bytes of the parts of a GIF that come before its pixels."""
PPM = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")
JPEG_SIZES = {*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC}
"""Markers of the segments that hold the size."""
WIDTH_AND_HEIGHT, TIFF_NUMBERS = (256, 257), {3: "H", 4: "I"}
"""Tags of a TIFF, and how its numbers of 16 and 32 bits are read."""
START_OF_SCAN = 0xDA
WITHOUT_LENGTH = {0, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
"""Markers that no length follows."""


def count_pixels(content: bytes) -> int | None:
    """Return height × width as the header says.

    0 if the file is of no known format or too short; None if it would take long to find out, or decoders may see
    another size than this.
    """
    for start, read in READERS.items():
        if content.startswith(start):
            try:
                return read(content)
            except (struct.error, IndexError):  # too short
                return 0
    return 0


def _count_png(content: bytes) -> int | None:
    place, most = 8, 0
    for _ in range(MOST_PNG_CHUNKS):
        length, kind = struct.unpack_from(">I4s", content, place)
        if kind == b"IHDR":  # decoders take the last one
            width, height = struct.unpack_from(">II", content, place + 8)
            most = max(most, int(width * height))
        if kind in (b"IDAT", b"IEND"):
            return most
        place += 12 + length
    return None


def _count_jpeg(content: bytes) -> int | None:
    place, most = 2, 0
    for _ in range(MOST_JPEG_SEGMENTS):
        place = content.find(b"\xff", place)  # decoders skip other bytes between segments
        if place < 0:
            return most
        marker = content[place + 1]
        if marker == START_OF_SCAN:
            return most
        if marker in JPEG_SIZES:  # a file may hold several sizes
            height, width = struct.unpack_from(">HH", content, place + 5)
            most = max(most, int(height * width))
        if marker == 0xFF:  # padding
            place += 1
        elif marker in WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + max(2, struct.unpack_from(">H", content, place + 2)[0])
    return None


def _count_gif(content: bytes) -> int | None:
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    place = 13 + ((6 << (flags & 7)) if flags & 128 else 0)
    for _ in range(MOST_GIF_BLOCKS):
        if content[place] == EXTENSION and content[place + 2] > 0:
            if content.startswith(b"NETSCAPE2.0\0", place + 3):  # without its data, decoders go on reading elsewhere
                return None
            place += 2
            for _ in range(MOST_GIF_BLOCKS):
                place += 1 + content[place]
                if content[place] == 0:
                    break
            else:
                return None
            place += 1
        elif content[place] == FRAME:  # it may be larger than the screen
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", content, place + 1)
            return int(max(width, left + frame_width) * max(height, top + frame_height))
        else:
            return None
    return None


def _count_bmp(content: bytes) -> int:
    is_old = content[14] == 12
    width, height = struct.unpack_from("<HH" if is_old else "<ii", content, 18)
    return int(abs(width * height))


def _count_webp(content: bytes) -> int:
    kind = content[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(content[place : place + 3], "little") + 1 for place in (24, 27))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", content, 26))
    return width * height


def _count_tiff(content: bytes) -> int | None:
    order = "<" if content[0] == ord("I") else ">"
    version, directory = struct.unpack_from(f"{order}HI", content, 2)
    if version != 42:  # large files have another layout
        return None
    (count,) = struct.unpack_from(f"{order}H", content, directory)
    sides: dict[int, int] = {}
    for entry in range(min(count, MOST_TIFF_ENTRIES + 1)):
        place = directory + 2 + 12 * entry
        tag, kind, values = struct.unpack_from(f"{order}HHI", content, place)
        if tag in WIDTH_AND_HEIGHT:
            if tag in sides or kind not in TIFF_NUMBERS or values != 1:
                return None
            (sides[tag],) = struct.unpack_from(f"{order}{TIFF_NUMBERS[kind]}", content, place + 8)
    return int(sides[256] * sides[257]) if len(sides) == 2 and count <= MOST_TIFF_ENTRIES else None


def _count_ppm(content: bytes) -> int | None:
    match = PPM.match(content[:1000])
    return None if match is None or b"#" in match[0] else int(match[1]) * int(match[2])


READERS: dict[bytes, Callable[[bytes], int | None]] = {
    b"\xff\xd8": _count_jpeg,
    b"\x89PNG": _count_png,
    b"RIFF": _count_webp,
    b"GIF8": _count_gif,
    b"BM": _count_bmp,
    b"II": _count_tiff,
    b"MM": _count_tiff,
    b"P": _count_ppm,
}
"""Functions by the first bytes of a format, the most common first."""
