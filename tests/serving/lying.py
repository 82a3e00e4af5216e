"""Images whose headers promise many more pixels than their few bytes hold, in every format."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image

SIDE = 6300
"""Just below the 40 million pixels that are allowed."""


def lie(kind: str, side: int = SIDE) -> bytes:
    """A file of that kind, of some hundred bytes, that says it holds `side` × `side` pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 30, 90)).save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return _LIES[kind](file.getvalue(), side)


def _png(content: bytes, side: int) -> bytes:
    header = b"IHDR" + struct.pack(">II", side, side) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def _jpeg(content: bytes, side: int) -> bytes:
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", side, side) + content[place + 4 :]


def _webp(content: bytes, side: int) -> bytes:
    place = content.index(b"VP8L") + 9
    (bits,) = struct.unpack_from("<I", content, place)
    bits = bits >> 28 << 28 | (side - 1) << 14 | (side - 1)
    return content[:place] + struct.pack("<I", bits) + content[place + 4 :]


def _gif(content: bytes, side: int) -> bytes:
    size = struct.pack("<HH", side, side)
    place = content.index(b"\x2c\0\0\0\0") + 5
    return content[:6] + size + content[10:place] + size + content[place + 4 :]


def _bmp(content: bytes, side: int) -> bytes:
    return content[:18] + struct.pack("<ii", side, side) + content[26:]


def _tiff(content: bytes, side: int) -> bytes:
    found = bytearray(content)
    (directory,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, directory)
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        (tag,) = struct.unpack_from("<H", content, entry)
        if tag in (256, 257, 278):  # width, height, rows of a strip
            struct.pack_into("<HII", found, entry + 2, 4, 1, side)
    return bytes(found)


def _ppm(content: bytes, side: int) -> bytes:
    return content.replace(b"8 8", b"%d %d" % (side, side), 1)


_LIES: dict[str, Callable[[bytes, int], bytes]] = {
    "PNG": _png,
    "JPEG": _jpeg,
    "WEBP": _webp,
    "GIF": _gif,
    "BMP": _bmp,
    "TIFF": _tiff,
    "PPM": _ppm,
}
LYING = {kind: lie(kind) for kind in _LIES}


def almost_whole(side: int = SIDE) -> bytes:
    """A PNG of some ten thousand bytes whose last rows are missing: its memory is written to before it fails."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + 3 * side)) for _ in range(side - 9)) + packer.flush(zlib.Z_SYNC_FLUSH)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)) + chunk(b"IDAT", rows)
    )
