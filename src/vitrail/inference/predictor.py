"""Images in, ranked labels out: a model ready for use, whatever its images come as.

Shapes: B images, K classes, D the size of the representation.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.parallel import worker_count
from vitrail.data.sources.source import image_content, shown
from vitrail.data.transforms.decode import HUSH, MOST_PIXELS_TRAINING, check_size, decode, to_channels
from vitrail.data.transforms.evaluation import fitted, normalise
from vitrail.errors import ConfigError, DataError, InputError, VitrailError
from vitrail.fast.optimize import FastModel, optimize
from vitrail.inference.batches import in_full_precision
from vitrail.inference.class_names import as_word, wnids
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device
from vitrail.weights.load import load

AHEAD = 2
"""Batches that are decoded, or being so, while one is computed."""
MOST_THREADS = 16
"""That decode for one call: each may hold a large image."""
TOP = 5
ALLOWED = (
    "a path, the bytes of a file, a Pillow image, a uint8 NumPy array (height, width[, channels]) or a uint8 tensor "
    "(channels, height, width)"
)

OneImage = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[Any] | Tensor
Guesses = list[tuple[str, float]]
"""Labels and their probabilities, best first."""
Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one image: what was asked for, or an error."""

    index: int
    """Its place among the images."""
    name: str
    """Its path on one line; of other images, what they are."""
    probabilities: Row | None = None
    """(K,)"""
    embedding: Row | None = None
    """(D,)"""
    error: VitrailError | None = None


class Predictor:
    """A model that takes images as they come. Many threads may call one at once: no call changes anything.

    One image is a path, the bytes of a file, a Pillow image, a uint8 NumPy array (height, width[, channels]) or a uint8
    tensor (channels, height, width). A list, a tuple or any iterator of these is many: they go through `batch_size` at
    a time, and are decoded ahead in threads, a few batches and no more. An iterator must therefore not give the same
    memory twice with other pixels in it.

    Args:
        model: a model, or whatever `vitrail.load` takes. A model that is given is put on the device, into evaluation
            mode, and from half precision to float32.
        device: cpu, cuda, …; a GPU where there is one, for auto.
        batch_size: images at a time.
        precision: fp32, which is exact; or faster: bf16, fp8 (on a GPU), int8 (on a CPU), auto: what is fastest here.
            `predictor.fast.distance` says how far off it is (`vitrail.fast.optimize`).
        most_pixels: of an image that is decoded at all.
        tell: is told in words what comes of another precision than fp32.
    """

    def __init__(
        self,
        model: ImageModel | str | Path,
        *,
        device: str = "auto",
        batch_size: int = 32,
        precision: str = "fp32",
        most_pixels: int = MOST_PIXELS_TRAINING,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size}: give 1 or more")
        if not isinstance(model, ImageModel | str | Path):
            raise ConfigError(f"a {_kind(model)} is no model: give one of vitrail's, or what vitrail.load takes")
        self.device = choose_device(device)
        self.model: ImageModel = model if isinstance(model, ImageModel) else load(model, device=self.device)
        self._dtype = in_full_precision(self.model)
        self.model.to(self.device).eval()
        self.batch_size, self.most_pixels = batch_size, most_pixels
        self.fast: FastModel | None = None
        """What computes, where the precision is not fp32."""
        if precision != "fp32":
            self.fast = optimize(self.model.float(), "throughput", precision, batch=batch_size, tell=tell)
            self._dtype = torch.float32
        self.labels = labels_of(self.model)
        """The names of the classes in words, in the order of the probabilities; none for a model without classes."""

    @overload
    def __call__(self, images: OneImage, top: int = TOP) -> Guesses: ...  # type: ignore[overload-overlap]  # a str

    @overload
    def __call__(self, images: Iterable[OneImage], top: int = TOP) -> list[Guesses]: ...

    def __call__(self, images: OneImage | Iterable[OneImage], top: int = TOP) -> Guesses | list[Guesses]:
        """The `top` labels of an image with their probabilities, best first; for many images a list of these.

        A DataError or an InputError says which image cannot be used, and why.
        """
        check_top(top)
        self._check_classes()
        found = [self.ranked(row.probabilities, top) for row in self._good(images) if row.probabilities is not None]
        return found[0] if is_one_image(images) else found

    def probabilities(self, images: OneImage | Iterable[OneImage]) -> Row:
        """(B, K): each row adds up to 1. One image is a batch of one."""
        self._check_classes()
        rows = [row.probabilities for row in self._good(images) if row.probabilities is not None]
        return np.stack(rows) if rows else np.empty((0, len(self.labels)), np.float32)

    def embed(self, images: OneImage | Iterable[OneImage]) -> Row:
        """(B, D): the representation y of each image. One image is a batch of one."""
        wanted = {"probabilities": False, "embeddings": True}
        rows = [row.embedding for row in self._good(images, **wanted) if row.embedding is not None]
        return np.stack(rows) if rows else np.empty((0, self._representation_size()), np.float32)

    def ranked(self, probabilities: Row, top: int = TOP) -> Guesses:
        """(K,) → the `top` labels, best first; of equal ones the first class comes first."""
        return ranked(probabilities, self.labels, top)

    def stream(
        self, images: Iterable[OneImage], *, probabilities: bool = True, embeddings: bool = False
    ) -> Generator[Outcome, None, None]:
        """What comes of each image, in their order, as soon as its batch is computed; both from one pass.

        An image that cannot be used has an error, and the others go on. Close it (`contextlib.closing`) where it is
        not read to its end: it has threads.
        """
        if probabilities:
            self._check_classes()
        return self._streamed(images, probabilities, embeddings)

    def _streamed(
        self, images: Iterable[OneImage], probabilities: bool, embeddings: bool
    ) -> Generator[Outcome, None, None]:
        coming, done = iter(images), 0
        ahead: deque[tuple[str, Future[Tensor | VitrailError]]] = deque()
        pool = ThreadPoolExecutor(min(worker_count(None), MOST_THREADS), thread_name_prefix="vitrail-decode")
        try:
            while True:
                for image in islice(coming, (1 + AHEAD) * self.batch_size - len(ahead)):
                    ahead.append((_called(image), pool.submit(self._fitted, image)))
                if not ahead:
                    return
                batch = [ahead.popleft() for _ in range(min(self.batch_size, len(ahead)))]
                names, prepared = [name for name, _ in batch], [pixels.result() for _, pixels in batch]
                yield from self._outcomes(done, names, prepared, probabilities, embeddings)
                done += len(batch)
        finally:
            pool.shutdown(cancel_futures=True)

    def _good(
        self, images: OneImage | Iterable[OneImage], *, probabilities: bool = True, embeddings: bool = False
    ) -> Generator[Outcome, None, None]:
        """Of one image or many; the first that cannot be used raises an error with its number and name."""
        if is_one_image(images):
            name, prepared = _called(images), self._fitted(images)  # without threads, which take a while to start
            (outcome,) = self._outcomes(0, [name], [prepared], probabilities, embeddings)
            if outcome.error is not None:
                raise type(outcome.error)(f"{name}: {outcome.error}")
            yield outcome
            return
        if hasattr(images, "read"):  # its lines could be iterated over, and are no images
            raise InputError(f"an open file ({_kind(images)}) is no image: give its path, or what its read() returns")
        if not isinstance(images, Iterable) or isinstance(images, Mapping):
            raise InputError(f"{_kind(images)} is no image: give {ALLOWED}, or a list of these")
        many: Iterable[Any] = images
        with closing(self._streamed(many, probabilities, embeddings)) as outcomes:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise type(outcome.error)(f"images[{outcome.index}], {outcome.name}: {outcome.error}")
                yield outcome

    def _outcomes(
        self,
        first: int,
        names: Sequence[str],
        prepared: Sequence[Tensor | VitrailError],
        probabilities: bool,
        embeddings: bool,
    ) -> list[Outcome]:
        """Of one batch."""
        whole = [pixels for pixels in prepared if isinstance(pixels, Tensor)]
        computed = iter(self._computed(torch.stack(whole), probabilities, embeddings) if whole else ())
        return [
            Outcome(index, name, error=pixels)
            if isinstance(pixels, VitrailError)
            else _checked(Outcome(index, name, *next(computed)))
            for index, (name, pixels) in enumerate(zip(names, prepared, strict=True), start=first)
        ]

    @torch.inference_mode()
    def _computed(
        self, pixels: Tensor, probabilities: bool, embeddings: bool
    ) -> Iterator[tuple[Row | None, Row | None]]:
        """(B, C, height, width) uint8 → for each image its probabilities and its embedding, if they are wanted."""
        model, nothing = self.model, [None] * len(pixels)
        images = normalise(pixels.to(self.device), model.preprocessing, self._dtype)
        logits = y = None
        if self.fast is not None:
            representations, scores = self.fast.both(images)
            logits, y = scores if probabilities else None, representations if embeddings else None
        elif probabilities and embeddings:
            features = model.forward_features(images)
            logits, y = model.forward_head(features), model.pooled(features)
        elif probabilities:
            logits = model(images)
        else:
            y = model.embed(images)
        return zip(
            nothing if logits is None else _array(logits.softmax(dim=1)),
            nothing if y is None else _array(y),
            strict=True,
        )

    def _fitted(self, image: OneImage) -> Tensor | VitrailError:
        """An image → (C, height, width) uint8, resized and cropped; or what is wrong with it."""
        try:
            with HUSH:
                pixels = to_channels(self._pixels(image), self.model.in_channels)
                return fitted(pixels, self.model.preprocessing)
        except (DataError, InputError) as error:
            return error

    def _pixels(self, image: OneImage) -> Tensor:
        """As decoded."""
        if isinstance(image, Image.Image):
            return _of_pillow(image, self.most_pixels)
        if isinstance(image, np.ndarray | Tensor):
            _check_pixels(image, self.model.in_channels)
        elif not is_one_image(image):
            raise InputError(f"a {_kind(image)} is no image: give {ALLOWED}")
        content = image_content(bytes(image) if isinstance(image, bytearray | memoryview) else image)
        return content.cpu() if isinstance(content, Tensor) else decode(content, self.most_pixels)

    def _check_classes(self) -> None:
        if not self.labels:
            raise ConfigError("the model has no classes, so there are no labels to tell: use embed")

    def _representation_size(self) -> int:
        """D, which not every architecture tells."""
        blank = torch.zeros(1, self.model.in_channels, *self.model.preprocessing.image_size, dtype=torch.uint8)
        ((_, y),) = self._computed(blank, probabilities=False, embeddings=True)
        assert y is not None
        return len(y)


def labels_of(model: ImageModel) -> tuple[str, ...]:
    """The names of a model's classes in words."""
    return words_of(model.labels, model.num_classes)


def words_of(names: Sequence[str] | None, classes: int) -> tuple[str, ...]:
    """The names of so many classes in words; "class 7" where nothing tells them.

    WordNet ids of ImageNet's are told by their usual words, and with the id too where a word stands for several
    classes: "crane (n02012849)". A thousand classes without names are ImageNet's.
    """
    if names is None:
        names = wnids() if classes == len(wnids()) else [f"class {number}" for number in range(classes)]
    words = [as_word(name) for name in names]
    count = Counter(words)
    pairs = zip(words, names, strict=True)
    return tuple(word if word == name or count[word] == 1 else f"{word} ({name})" for word, name in pairs)


def ranked(probabilities: Row, labels: Sequence[str], top: int) -> Guesses:
    """(K,) → the `top` labels, best first; of equal ones the first class comes first."""
    best = np.argsort(-probabilities, kind="stable")[:top]
    return [(labels[number], float(probabilities[number])) for number in best]


def check_top(top: int) -> None:
    """Refuse less than one guess."""
    if top < 1:
        raise ConfigError(f"top = {top}: give 1 or more")


def is_one_image(images: object) -> TypeGuard[OneImage]:
    """Whether it is of a kind that a single image comes as."""
    kinds = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray, Tensor)
    return isinstance(images, kinds)


def _check_pixels(image: NDArray[Any] | Tensor, channels: int) -> None:
    """Of an array or a tensor: what it must be, before anything is computed with it."""
    is_tensor = isinstance(image, Tensor)
    shape = tuple(image.shape)
    if image.dtype != (torch.uint8 if is_tensor else np.uint8) or len(shape) not in (2, 3) or 0 in shape:
        several = "; several images go in a list" if len(shape) == 4 else ""
        raise InputError(f"{image.dtype} of shape {shape} is no image: give {ALLOWED}{several}")
    found = 1 if len(shape) == 2 else shape[0 if is_tensor else 2]
    if found not in (1, 3, channels) or (found == 3 and channels not in (1, 3)):
        place = "first in a tensor" if is_tensor else "last in a NumPy array"
        raise InputError(f"shape {shape} has {found} channels, which come {place}, and the model takes {channels}")


_LOADING = [threading.Lock() for _ in range(64)]
"""Pillow reads a file when its pixels are first asked for, and two threads must not ask at once."""


def _of_pillow(image: Image.Image, most_pixels: int) -> Tensor:
    check_size(image.height, image.width, most_pixels)
    try:
        with _LOADING[id(image) // 16 % len(_LOADING)]:
            image.load()
        content = image_content(image)
    except VitrailError:
        raise
    except Exception as error:  # a damaged file fails in Pillow in many ways
        raise DataError(f"damaged: {(str(error).strip().splitlines() or [_kind(error)])[0]}") from None
    assert isinstance(content, Tensor)
    return content


def _checked(outcome: Outcome) -> Outcome:
    """An error in place of what is not a number."""
    if all(row is None or np.isfinite(row).all() for row in (outcome.probabilities, outcome.embedding)):
        return outcome
    wrong = InputError("what the model computes of it is not a number: its weights may be damaged")
    return Outcome(outcome.index, outcome.name, error=wrong)


def _array(rows: Tensor) -> Row:
    found: Row = rows.float().cpu().numpy()
    return found


def _called(image: object) -> str:
    if isinstance(image, str | os.PathLike):
        return shown(image)
    kinds = {np.ndarray: "a NumPy array", Tensor: "a tensor", Image.Image: "a Pillow image"}
    return next((name for kind, name in kinds.items() if isinstance(image, kind)), f"a {_kind(image)}")


def _kind(value: object) -> str:
    return type(value).__name__
