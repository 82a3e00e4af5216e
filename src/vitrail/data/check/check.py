"""Look at every image of a data set: which cannot be read, which stand there twice, which are not what they seem."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.check.report import FACTS, NO_FILE, DataReport, SplitFacts
from vitrail.data.open import Data, open_splits
from vitrail.data.parallel import map_samples, resolve_worker_count
from vitrail.data.sources.folder import IMAGE_SUFFIXES, FileSource
from vitrail.data.sources.source import Source, make_printable
from vitrail.data.transforms.decode import FORMATS, decode_to_pillow, open_image
from vitrail.errors import DataError

EXTENSIONS = dict(
    zip(FORMATS, (("jpg", "jpeg"), ("png",), ("webp",), ("gif",), ("bmp",), ("tif", "tiff"), ("ppm",)), strict=True)
)
"""What the names of files of each kind end in, the usual ending first."""
AT_ONCE = 32
"""Samples that a process is given together, at least."""
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")

Progress = Callable[[int, int], None]
"""Called with the number of samples that are done, and the number there are."""


def check_data(data: Data, workers: int | None = None, progress: Progress | None = None) -> DataReport:
    """Decode everything, and say what is wrong with it.

    Args:
        data: as `open_data` takes it; every split that is there is looked at.
        workers: processes; one for each core if None.
        progress: told how far it is.
    """
    workers = resolve_worker_count(workers)
    sources = open_splits(data)
    total, done, parts = sum(map(len, sources.values())), 0, []
    for split, source in sources.items():
        part = SplitFacts(split, source, np.zeros(len(source), FACTS), ignored=list(_ignored(data, source)))
        parts.append(part)
        step = max(source.block, AT_ONCE)
        jobs = (range(start, min(start + step, len(source))) for start in range(0, len(source), step))
        crew = min(workers, max(-(-len(source) // step), 1))
        with closing(map_samples(_facts, source, jobs, crew)) as found:
            for job, answers in found:
                for index, answer in zip(job, answers, strict=True):
                    if isinstance(answer, str):
                        part.reasons[index] = answer
                    else:
                        part.facts[index] = answer
                done += len(job)
                if progress:
                    progress(done, total)
    return DataReport(parts)


def file_kind(content: bytes) -> tuple[str, str]:
    """One of `FORMATS`, and Pillow's mode, by a look at the header."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on large images
        image = open_image(content)
    return "JPEG" if image.format == "MPO" else str(image.format), image.mode


def _facts(source: Source, index: int) -> tuple[Any, ...]:
    """A record of `FACTS`."""
    sample = source.read_checked(index)
    content = sample.content
    if isinstance(content, Tensor):
        pixels = content.numpy()
        digest = _digest(repr(pixels.shape).encode() + pixels.tobytes())
        grey = bool((pixels[:1] == pixels).all())
        return digest, sample.label, *pixels.shape[1:], NO_FILE, True, grey, False
    kind, mode = file_kind(content)
    image = decode_to_pillow(content)
    suffix = source.name(index).lower().rpartition(".")[2]
    misnamed = f".{suffix}" in IMAGE_SUFFIXES and suffix not in EXTENSIONS[kind]
    grey = mode.split(";")[0] in _GREY_MODES or _looks_grey(image)
    return _digest(content), sample.label, image.height, image.width, FORMATS.index(kind), True, grey, misnamed


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _looks_grey(image: Image.Image) -> bool:
    """Whether red, green and blue are the same everywhere; a strip at a time, of which the first mostly tells."""
    rows = max((1 << 18) // image.width, 1)
    for top in range(0, image.height, rows):
        strip = np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        if (strip[..., :1] != strip).any():
            return False
    return True


def _ignored(data: Data, source: Source) -> Iterator[tuple[str, str]]:
    """What lies in a folder of class folders and is not among its images, with the reason."""
    if not isinstance(source, FileSource) or Path(str(data)).is_file() or len(list(source.root.glob("*.csv"))) == 1:
        return
    for path in _entries(source.root):
        if path.is_dir():
            yield from _ignored_below(path, (_identity(source.root),))
        elif path.name.lower().endswith(IMAGE_SUFFIXES):
            yield make_printable(path), "lies in no class folder"


def _ignored_below(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    here = _identity(folder)
    if here in above:
        yield make_printable(folder), "a link that leads back to a folder above it"
        return
    for path in _entries(folder):
        if path.is_dir():
            yield from _ignored_below(path, (*above, here))
        elif not path.name.lower().endswith(IMAGE_SUFFIXES):
            yield make_printable(path), f"its name ends in none of {', '.join(IMAGE_SUFFIXES)}"


def _entries(folder: Path) -> list[Path]:
    """What is in a folder and not hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {error.strerror}") from None


def _identity(folder: Path) -> tuple[int, int]:
    stat = folder.stat()
    return stat.st_dev, stat.st_ino
