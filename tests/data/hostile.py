"""A folder of images as strangers send them: broken, lying, enormous, badly named, in circles; and good ones.

Also a source that kills who reads it, and the commands that have to cope with all this.
"""

from __future__ import annotations

import io
import os
import signal
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import Sample

GOOD = ""
UNREADABLE, TRUNCATED, DUPLICATE, EXTENSION = "unreadable", "truncated", "duplicate", "extension"
TINY, GREYSCALE, IGNORED = "tiny", "greyscale", "ignored"
ORIENTATION = 0x0112


def make_hostile(folder: Path) -> dict[str, str]:
    """Some 200 files in class folders → for each path what is wrong with it: a kind of `vitrail data check`, or GOOD.

    Paths are as the system knows them; where they are not text they hold surrogates. Files that need rights which the
    super-user always has are left out for him.
    """
    found: dict[str, str] = {}
    for kind, files in (
        (GOOD, _good()),
        (TRUNCATED, _truncated()),
        (UNREADABLE, _unreadable()),
        (TINY, _tiny()),
        (GREYSCALE, _greyscale()),
        (EXTENSION, _misnamed()),
        (IGNORED, {"cat/notes.txt": b"mind the dog", "dog/labels": b"", "dog/deeper/photo.heic": bytes(100)}),
    ):
        for name, content in files.items():
            path = os.path.join(os.fspath(folder), name)  # noqa: PTH118 - names that are not text
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            with open(path, "wb") as file:  # noqa: PTH123
                file.write(content)
            found[path] = kind
    found |= _copies(folder) | _links(folder) | _specials(folder)
    return found


def picture(seed: int = 0, height: int = 48, width: int = 40, channels: int = 3) -> Image.Image:
    """A colourful image that is no other's twin."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 5, channels), dtype=np.uint8)
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    small = Image.fromarray(coarse[..., 0] if channels == 1 else coarse, modes[channels])
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colours: int, rows: Any) -> bytes:
    """A PNG from its packed rows; for what Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packer = zlib.compressobj(9)
    data = b"".join([*(packer.compress(b"\0" + row) for row in rows), packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bomb(side: int = 30_000) -> bytes:
    """900 million black pixels in some hundred kilobytes."""
    return png(side, side, 1, 0, (bytes(side // 8) for _ in range(side)))


class Deadly(ListSource):
    """Some of its samples kill who reads them: the first time, or always."""

    def __init__(self, count: int, flags: Path, always: tuple[int, ...] = (), once: tuple[int, ...] = ()) -> None:
        super().__init__([(encoded(picture(number)), 0) for number in range(count)])
        self.flags, self.always, self.once = flags, always, once

    def read(self, index: int) -> Sample:
        flag = self.flags / str(index)
        if index in self.always or (index in self.once and not flag.exists()):
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


def run_here(capsys: Any, monkeypatch: Any, *arguments: object) -> tuple[int, str, str]:
    """`vitrail data …` in this process → exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["vitrail", "data", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def _good() -> dict[str, bytes]:
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    frames = [picture(900 + number) for number in range(3)]
    animated = {"save_all": True, "append_images": frames[1:]}
    cmyk = encoded(picture(20).convert("CMYK"))
    adobe = cmyk.index(b"Adobe")
    deep = np.random.default_rng(21).integers(0, 65536, (48, 40, 3)).astype(">u2")
    palette = picture(22).convert("P", palette=Image.Palette.ADAPTIVE)
    files = {
        "cat/cmyk.jpg": cmyk,
        "cat/ycck.jpg": cmyk[: adobe + 11] + b"\2" + cmyk[adobe + 12 :],  # the Adobe mark says how colours are told
        "cat/progressive.jpg": encoded(picture(23), progressive=True),
        "cat/turned.jpg": encoded(picture(24), exif=turned),
        "cat/sixteen-bits.png": png(40, 48, 16, 2, (row.tobytes() for row in deep)),
        "cat/palette.png": encoded(palette, "PNG", transparency=0),
        "cat/see-through.png": encoded(picture(25, channels=4), "PNG"),
        "cat/moving.gif": encoded(frames[0], "GIF", **animated),
        "cat/moving.webp": encoded(frames[0], "WEBP", **animated),
        "cat/two-cameras.jpg": encoded(frames[0], "MPO", **animated),
        "dog/UPPER.JPEG": encoded(picture(26)),
        "dog/wide.tiff": encoded(picture(27), "TIFF"),
        "dog/plain.bmp": encoded(picture(28), "BMP"),
        "dog/plain.ppm": encoded(picture(29), "PPM"),
        "dog/after the end.jpg": encoded(picture(30)) + b"and something else",
        "dog/日本語 ü 🐕.jpg": encoded(picture(31)),
        "dog/two\nlines.jpg": encoded(picture(32)),
        "dog/bell\a tab\t escape\x1b[31m.jpg": encoded(picture(33)),
        "dog/[bold]markup[/bold].jpg": encoded(picture(34)),
        "dog/--help.jpg": encoded(picture(35)),
        os.fsdecode(b"dog/not \xff text.jpg"): encoded(picture(36)),
        "dog/deeper/and deeper/still there.jpg": encoded(picture(37)),
    }
    for number in range(100):
        files[f"{('cat', 'dog', 'naïve bird')[number % 3]}/{number:03}.jpg"] = encoded(picture(100 + number))
    return files


def _truncated() -> dict[str, bytes]:
    """Beyond its header a file is known, so that what is missing can be told."""
    whole, slow = encoded(picture(1)), encoded(picture(2), progressive=True)
    cuts = np.linspace(650, len(whole) - 1, 20).astype(int)
    files = {f"cut/plain-{cut}.jpg": whole[:cut] for cut in cuts}
    files |= {f"cut/progressive-{cut}.jpg": slow[:cut] for cut in np.linspace(300, len(slow) - 1, 10).astype(int)}
    for form, suffix in (("PNG", "png"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif"), ("PPM", "ppm")):
        content = encoded(picture(3), form)
        files |= {f"cut/half.{suffix}": content[: len(content) // 2], f"cut/most.{suffix}": content[:-64]}
    return files


def _unreadable() -> dict[str, bytes]:
    """Neither an image nor a part of one that would be recognised."""
    whole = encoded(picture(4))
    webp = encoded(picture(5), "WEBP")
    files = {f"cut/nothing-{cut}.jpg": whole[:cut] for cut in (1, 2, 3)}
    return files | {
        "cut/half.webp": webp[: len(webp) // 2],
        "bad/empty.jpg": b"",
        "bad/empty.png": b"",
        "bad/text.jpg": b"This is not an image.\n" * 50,
        "bad/page.png": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "bad/zeros.jpg": bytes(4096),
        "bad/noise.jpg": np.random.default_rng(6).bytes(4096),
        "bad/bomb.png": bomb(),
        "bad/drawing.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        "bad/vector.png": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "bad/archive.jpg": b"PK\3\4" + bytes(100),
    }


def _tiny() -> dict[str, bytes]:
    dot = picture(7, 1, 1)
    return {
        "cat/dot.png": encoded(dot, "PNG"),
        "cat/dot.gif": encoded(dot, "GIF"),
        "cat/dot.jpg": encoded(dot, subsampling=0, quality=100),
        "cat/strip.png": encoded(picture(8, 10, 20_000), "PNG"),
        "cat/tower.jpg": encoded(picture(9, 20_000, 10)),
    }


def _greyscale() -> dict[str, bytes]:
    grey = picture(10, channels=1)
    deep = Image.fromarray(np.random.default_rng(11).integers(0, 65536, (48, 40)).astype(np.uint16))
    return {
        "dog/grey.jpg": encoded(grey),
        "dog/grey-deep.png": encoded(deep, "PNG"),
        "dog/grey-in-colour.png": encoded(grey.convert("RGB"), "PNG"),
        "dog/black-and-white.png": encoded(grey.convert("1"), "PNG"),
    }


def _misnamed() -> dict[str, bytes]:
    return {
        "dog/really-png.jpg": encoded(picture(12), "PNG"),
        "dog/really-jpeg.png": encoded(picture(13)),
        "dog/really-gif.webp": encoded(picture(14), "GIF"),
        "dog/really-webp.tif": encoded(picture(15), "WEBP"),
    }


def _copies(folder: Path) -> dict[str, str]:
    """Twice in a class, and once more in another; and through a link."""
    content = encoded(picture(16))
    paths = {
        folder / "cat/a-first.jpg": GOOD,
        folder / "cat/b-again.jpg": DUPLICATE,
        folder / "dog/copy.jpg": DUPLICATE,
    }
    for path in paths:
        path.write_bytes(content)
    link = folder / "dog/linked.jpg"
    link.symlink_to(folder / "cat/a-first.jpg")
    return {str(path): kind for path, kind in (paths | {link: DUPLICATE}).items()}


def _links(folder: Path) -> dict[str, str]:
    """To themselves, to a folder above, and to nothing."""
    links = {
        folder / "bad/itself.jpg": ("itself.jpg", UNREADABLE),
        folder / "bad/one.jpg": ("other.jpg", UNREADABLE),
        folder / "bad/other.jpg": ("one.jpg", UNREADABLE),
        folder / "bad/dangling.png": ("nowhere.png", UNREADABLE),
        folder / "bad/zero.jpg": ("/dev/zero", UNREADABLE),
        folder / "dog/deeper/up": ("..", IGNORED),
    }
    for path, (target, _) in links.items():
        path.symlink_to(target)
    return {str(path): kind for path, (_, kind) in links.items()}


def _specials(folder: Path) -> dict[str, str]:
    found = {str(folder / "bad/pipe.jpg"): UNREADABLE}
    os.mkfifo(folder / "bad/pipe.jpg")
    if os.geteuid() != 0:
        locked = folder / "bad/locked.jpg"
        locked.write_bytes(encoded(picture(17)))
        locked.chmod(0)
        found[str(locked)] = UNREADABLE
    return found
