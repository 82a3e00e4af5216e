"""Find the images that are meant by files, folders and standard input. Nothing here needs torch: it is told at once.

Before a model is loaded, which takes seconds, a person with an empty folder or a wrong path should know.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.sources.image_files import IMAGE_SUFFIXES, MOST_BYTES, make_printable, walk_files
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.system.files import describe_reason, is_folder

if TYPE_CHECKING:
    from vitrail.inference.prepare import OneImage

STANDARD_INPUT = "-"
ALLOWED = f"give image files, or folders with images ({', '.join(IMAGE_SUFFIXES)})"


def to_valid_text(name: str) -> str:
    """Return the name of a file as valid text: bytes that are not UTF-8 become \\xff."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class FoundImage:
    """An image and what it is called."""

    name: str
    content: OneImage


def require_images(images: OneImage | Iterable[OneImage | FoundImage]) -> list[FoundImage]:
    """Return the images that the arguments mean, as `find_images` does.

    Raises:
        ConfigError: nothing is given, a name is empty, or "-" is given twice.
        DataError: there are no images; also if only files are named, and none of them exists.
    """
    found = find_images(images)
    if all(_is_missing(image.content) for image in found):
        first = Path(str(found[0].content))
        problem = (
            "there is no file or folder" if len(found) == 1 else f"none of the {len(found):,} files exists, such as"
        )
        near = did_you_mean(first.name, _list_names(first.parent)) or ":"
        raise DataError(f"{problem} {make_printable(first)}{near} {ALLOWED}")
    return found


def find_images(images: OneImage | Iterable[OneImage | FoundImage]) -> list[FoundImage]:
    """Return the images that the arguments mean, in order: those in folders and standard input too.

    Raises:
        ConfigError: nothing is given, a name is empty, "-" is given twice, or under torchrun.
        DataError: there are no images, or a folder or standard input cannot be read.
    """
    given = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in _list_given(images)]
    if not given:
        raise ConfigError("no images were given: vitrail predict photo.jpg")
    names = [each for each in given if isinstance(each, str)]
    if names.count(STANDARD_INPUT) > 1:
        raise ConfigError(f"{STANDARD_INPUT} was given more than once, but there is only one standard input")
    if STANDARD_INPUT in names and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("standard input is for one process, and torchrun starts several: name files or folders")
    if "" in names:
        raise ConfigError("a file name is empty: is a shell variable empty?")
    found = [image for index, each in enumerate(given) for image in _find_images_in(each, index)]
    if not found:
        places = ", ".join("standard input" if name == STANDARD_INPUT else make_printable(name) for name in names)
        raise DataError(f"no images in {places}: {ALLOWED}")
    return found


def _list_given(images: Any) -> Iterable[Any]:
    """Return the arguments as a collection: torch is needed only to know whether another object is an image."""
    if isinstance(images, list | tuple):
        return images
    from vitrail.inference.prepare import describe_image, is_one_image

    if is_one_image(images):
        return [images]
    if not isinstance(images, Iterable) or isinstance(images, Mapping) or hasattr(images, "read"):
        raise ConfigError(f"{describe_image(images)} is no image, and no list of images")
    return images


def _is_missing(image: object) -> bool:
    """Return whether an image is the name of a file that does not exist; not if it is there and cannot be read."""
    if not isinstance(image, str):
        return False
    try:
        Path(image).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _list_names(folder: Path) -> Sequence[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return ()


def _find_images_in(image: OneImage | FoundImage, index: int) -> list[FoundImage]:
    """Return the images of one argument, which is number `index` of all."""
    if isinstance(image, FoundImage):
        return [image]
    if not isinstance(image, str):
        return [FoundImage(f"images[{index}]", image)]
    if image == STANDARD_INPUT:
        return [
            FoundImage(STANDARD_INPUT if isinstance(each, bytes) else to_valid_text(each), each)
            for each in _read_standard_input()
        ]
    if not is_folder(Path(image)):
        return [FoundImage(to_valid_text(image), image)]
    files = sorted(file for file in _list_files(image) if file.lower().endswith(IMAGE_SUFFIXES))
    return [FoundImage(to_valid_text(file), file) for file in files]


def _list_files(folder: str) -> list[str]:
    try:
        return list(walk_files(Path(folder)))
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {describe_reason(error)}") from None


def _read_standard_input() -> list[str | bytes]:
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(f"standard input holds more than the {MOST_BYTES:,} bytes allowed")
    if _is_image(content):
        return [content]
    return [os.fsdecode(line) for line in content.replace(b"\r\n", b"\n").split(b"\n") if line.strip()]


def _is_image(content: bytes) -> bool:
    """Return whether standard input is an image, even a damaged one: no list of file names has a zero byte."""
    if b"\0" in content:
        return True
    from vitrail.data.transforms.decode import open_image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            open_image(content)
    except DataError:
        return False
    return True
