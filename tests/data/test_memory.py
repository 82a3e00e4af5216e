"""Pixels kept in memory are the source they came from, sample by sample and batch by batch."""

from __future__ import annotations

import io
import itertools
import logging
import threading
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from pictures import make_folder, make_tar, picture
from PIL import Image

from vitrail.config import Preprocessing
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.sources import memory
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.sources.source import Sample, Source
from vitrail.data.transforms.augment import Augmentation
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import DataError

EVERYTHING = Augmentation(rand_augment=(2, 10.0), color_jitter=0.4, erasing=0.25)


def drawn(mode: str, size: tuple[int, int], number: int) -> bytes:
    """A PNG, whose pixels are the same whichever way it is decoded."""
    channels = {"L": (), "LA": (2,), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], *channels), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WHOLE = [
    drawn("RGB", (24, 20), 0),
    drawn("L", (7, 31), 1),
    drawn("RGBA", (16, 16), 2),
    drawn("LA", (1, 1), 3),
    torch.arange(64, dtype=torch.uint8).view(1, 8, 8),
    torch.arange(60, dtype=torch.uint8).view(4, 5, 3).permute(2, 0, 1),  # of other strides
    torch.arange(240, dtype=torch.uint8).view(3, 8, 10)[:, ::2, 1::3],
]
BROKEN = {b"": "empty", b"no image": "not an image of a known kind", WHOLE[0][:-40]: "damaged: "}


@pytest.fixture(scope="module")
def mixed() -> ListSource:
    """Whole and broken ones in turn."""
    contents = [*WHOLE[:3], *BROKEN, *WHOLE[3:], "/no/such/file.png"]
    return ListSource([(content, number % 3) for number, content in enumerate(contents)], ["a", "b", "c"])


def test_every_sample_is_that_of_the_source(mixed):
    kept = InMemorySource(mixed)
    assert (len(kept), kept.classes, kept.num_classes) == (len(mixed), mixed.classes, 3)
    assert kept.labels(0, len(kept)).tolist() == mixed.labels(0, len(mixed)).tolist()
    assert kept.labels(2, 5).tolist() == [2, 0, 1]
    broken = [index for index in range(len(mixed)) if reason(mixed, index)]
    assert broken == [3, 4, 5, 10]
    for index in range(len(mixed)):
        assert kept.name(index) == mixed.name(index)
        assert kept.identity(index) == mixed.identity(index)
        for _ in range(2):
            assert reason(kept, index) == reason(mixed, index)
        if index not in broken:
            pixels, label, _ = kept.read(index)
            assert label == mixed.read(index).label == kept.read_checked(index).label
            assert pixels.dtype == torch.uint8
            assert torch.equal(pixels, decoded(mixed, index))
            assert pixels.permute(1, 2, 0).is_contiguous()  # the order of a decoded image


def decoded(source: Source, index: int) -> torch.Tensor:
    content = source.read(index).content
    return content if isinstance(content, torch.Tensor) else decode_image(content)


def reason(source: Source, index: int) -> str | None:
    """Why a sample is broken, if it is."""
    try:
        decoded(source, index)
    except DataError as error:
        return str(error)
    return None


def test_reasons_are_kept(mixed):
    kept = InMemorySource(mixed)
    for index, start in zip(range(3, 6), BROKEN.values(), strict=True):
        assert reason(kept, index).startswith(start)


def test_the_source_is_read_once(mixed, monkeypatch):
    kept = InMemorySource(mixed)
    monkeypatch.setattr(mixed, "read", None)
    monkeypatch.setattr(memory, "decode_image", None)
    assert kept.read(0).content.shape == (3, 20, 24)


def test_a_label_without_meaning_is_broken_as_in_the_source():
    source = ListSource([(WHOLE[0], 0), (WHOLE[1], -1), (WHOLE[2], 7)], ["a", "b"])
    kept = InMemorySource(source)
    for index in (1, 2):
        with pytest.raises(DataError) as plain:
            source.read_checked(index)
        with pytest.raises(DataError) as found:
            kept.read_checked(index)
        assert str(found.value) == str(plain.value)


def test_nothing_and_only_broken_ones():
    assert len(InMemorySource(ListSource([]))) == 0
    with pytest.raises(DataError, match="empty"):
        TrainingLoader(InMemorySource(ListSource([])), 4, 16)
    kept = InMemorySource(ListSource([(b"", 0)], ["a"]))
    with pytest.raises(DataError, match="empty"):
        kept.read(0)


def digest(batch) -> tuple:
    tensors = (batch.images, batch.labels, batch.indices, batch.mask)
    return *(tensor.numpy().tobytes() for tensor in tensors), batch.broken


def training(source, **options) -> list[tuple]:
    loader = TrainingLoader(source, 6, (16, 12), seed=3, augmentation=EVERYTHING, **options)
    return [digest(batch) for batch in itertools.islice(loader, 8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_source(mixed, workers, caplog):
    caplog.set_level(logging.ERROR)
    expected = training(mixed)
    assert any(step[-1] for step in expected)  # with the broken ones, by name and reason
    assert training(InMemorySource(mixed), workers=workers) == expected
    preprocessing = Preprocessing(image_size=(16, 12))
    plain, kept = (
        [digest(batch) for batch in EvaluationLoader(source, preprocessing, 4, workers=count)]
        for source, count in ((mixed, 0), (InMemorySource(mixed), workers))
    )
    assert kept == plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data") / "classes", {"a": 20, "b": 20})


@pytest.mark.slow
def test_workers_that_are_spawned_see_the_same(folder):
    source = open_data(folder)
    options = {"workers": 1, "start_method": "spawn"}
    spawned = TrainingLoader(InMemorySource(source), 10, 16, seed=1, **options)
    assert digest(next(spawned)) == digest(next(TrainingLoader(source, 10, 16, seed=1)))


def test_to_send_it_to_a_worker_sends_no_pixels(folder):
    source = open_data(folder)
    kept = InMemorySource(source)
    assert kept.pixels.is_shared()
    assert kept.pixels.numel() == 40 * 24 * 20 * 3
    sent = len(ForkingPickler.dumps(kept))
    assert sent - len(ForkingPickler.dumps(source)) < 4000 < kept.pixels.numel() / 10


def test_the_order_of_shards_stays(tmp_path):
    """It depends on how a source is best read; a run that goes on with data.in_memory changed must not see others."""
    make_tar(tmp_path / "a.tar", [n % 2 for n in range(40)])
    source = open_data(tmp_path)
    source.block, source.window = 8, 16
    assert training(InMemorySource(source)) == training(source)


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "MOST_BYTES", 3000)
    source = ListSource([(picture(n), 0) for n in range(3)], ["a"])  # of 1,440 bytes each
    with pytest.raises(DataError, match=r"data\.in_memory"):
        InMemorySource(source)
    assert len(InMemorySource(ListSource(source.samples[:2], ["a"]))) == 2


def test_too_little_shared_memory_is_told(mixed, monkeypatch):
    def refuse(tensor):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    with pytest.raises(DataError, match=r"shared memory.*in_memory=false"):
        InMemorySource(mixed)


class _Watched(Source):
    """Notes which threads read it."""

    def __init__(self, reads_in_threads):
        self.classes, self.reads_in_threads, self.readers = ("a",), reads_in_threads, set()

    def __len__(self):
        return 64

    def read(self, index):
        self.readers.add(threading.get_ident())
        time.sleep(0.002)
        return Sample(torch.full((3, 2, 2), index, dtype=torch.uint8), 0)

    def name(self, index):
        return str(index)

    def labels(self, start, stop):
        return np.zeros(stop - start, dtype=np.int64)


@pytest.mark.parametrize("reads_in_threads", [False, True])
def test_only_sources_that_allow_it_are_read_in_threads(reads_in_threads):
    source = _Watched(reads_in_threads)
    kept = InMemorySource(source)
    assert source.readers.isdisjoint({threading.get_ident()}) == reads_in_threads
    assert reads_in_threads or len(source.readers) == 1
    assert [int(kept.read(index).content[0, 0, 0]) for index in range(64)] == list(range(64))


def test_pixels_can_be_changed_while_they_are_decoded():
    kept = InMemorySource(_Watched(False), change=lambda pixels: pixels[:1, :1] + 1)
    assert kept.read(5).content.shape == (1, 1, 2)
    assert int(kept.read(5).content[0, 0, 0]) == 6
