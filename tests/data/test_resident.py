"""Images that stay on the device: the order of the ordinary loader, the same bytes after any stop and on any ranks."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from pictures import make_folder, make_tar, picture

from vitrail.config import Preprocessing
from vitrail.data import resident
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.order import derive_seed
from vitrail.data.resident import CachedBatches, ResidentImages, ResidentLoader
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.transforms.augment import Augmentation
from vitrail.data.transforms.batch_augment import augment_batch
from vitrail.data.transforms.decode import decode_image, to_channels
from vitrail.errors import ConfigError, DataError, Stopped
from vitrail.training import loop
from vitrail.training.run_training import run_training

EVERYTHING = Augmentation(three_augment=True, rand_augment=(2, 10.0), color_jitter=0.4, erasing=0.25)
STEPS, BATCH, COUNT = 30, 12, 101
"""Three epochs of a data set that no batch divides."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_tar(folder / "a.tar", [n % 5 for n in range(60)])
    make_tar(folder / "b.tar", [n % 5 for n in range(60, COUNT)], first=60)
    found = open_data(folder)
    found.block, found.window = 8, 40
    return found


@pytest.fixture(scope="module")
def images(source):
    return ResidentImages(source, "cpu")


def make(source, **options):
    return ResidentLoader(source, BATCH, (16, 18), device="cpu", seed=5, augmentation=EVERYTHING, **options)


def digest(batch) -> tuple[bytes, list[int], list[int]]:
    return batch.images.numpy().tobytes(), batch.labels.tolist(), batch.indices.tolist()


@pytest.fixture(scope="module")
def uninterrupted(images):
    return [digest(batch) for batch in itertools.islice(make(images), STEPS)]


def merged(parts) -> tuple[bytes, list[int], list[int]]:
    """What the ranks have of a step, put together."""
    return b"".join(p[0] for p in parts), [n for p in parts for n in p[1]], [n for p in parts for n in p[2]]


def test_order_and_labels_are_those_of_the_ordinary_loader(source, uninterrupted):
    ordinary = TrainingLoader(source, BATCH, 4, seed=5)
    theirs = [digest(batch)[1:] for batch in itertools.islice(ordinary, STEPS)]
    assert [step[1:] for step in uninterrupted] == theirs


def test_batches_are_what_they_are_said_to_be(source, images):
    loader = make(source)
    assert loader.steps_per_epoch == 9
    batch = next(loader)
    assert batch.images.shape == (BATCH, 3, 16, 18)
    assert batch.images.dtype == torch.uint8
    assert batch.mask.all()
    assert (loader.position, loader.epoch, loader.broken) == (BATCH, BATCH / COUNT, {})
    # Pixels and chance by hand: those of the samples, from a generator seeded by the seed and the position.
    pixels = torch.stack([decode_image(source.read(index).content) for index in batch.indices.tolist()])
    generator = torch.Generator().manual_seed(derive_seed(5, 0))
    assert torch.equal(batch.images, augment_batch(pixels, EVERYTHING, generator, (16, 18)))


def test_without_chance_pixels_are_those_of_the_ordinary_loader(source, images):
    plain = {"seed": 1, "augmentation": Augmentation(crop_area=(1, 1), crop_ratio=(1.2, 1.2), flip=0)}
    for channels in (3, 1):
        ours = ResidentLoader(images, BATCH, (10, 30), device="cpu", channels=channels, **plain)
        theirs = TrainingLoader(source, BATCH, (10, 30), channels=channels, **plain)
        for one, other in itertools.islice(zip(ours, theirs, strict=True), 3):
            assert torch.equal(one.images, other.images)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_stops_and_any_ranks_give_the_same_bytes(ranks, images, uninterrupted):
    stops = sorted(random.Random(ranks).sample(range(1, STEPS), 12))
    parts = []
    for rank in range(ranks):
        position, steps = 0, []
        for first, last in itertools.pairwise([0, *stops, STEPS]):
            loader = make(images, rank=rank, ranks=ranks, position=position)
            steps += [digest(batch) for batch in itertools.islice(loader, last - first)]
            position = loader.position
            assert position == last * BATCH
        parts.append(steps)
    assert [merged(step) for step in zip(*parts, strict=True)] == uninterrupted


def test_how_far_ahead_the_order_is_worked_out_changes_nothing(images, uninterrupted, monkeypatch):
    monkeypatch.setattr(resident, "ORDER_CHUNK", 4)
    loader = make(images)
    assert [digest(next(loader)) for _ in range(STEPS)] == uninterrupted
    loader.position = 3 * BATCH  # anyone may go back
    assert digest(next(loader)) == uninterrupted[3]


def test_batches_made_aside_are_the_same_and_begun_before_they_are_asked_for(images, uninterrupted, monkeypatch):
    waited, stream = [], SimpleNamespace(wait_stream=lambda other: waited.append(other))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    loader = make(images)
    ordinary, places, asked = loader.make, [], []

    def again(indices):
        """Into the same memory, as a CUDA graph does."""
        asked.append(indices.tolist())
        made = ordinary(indices)
        places[:] = places or [each.clone() for each in made]
        return tuple(place.copy_(each) for place, each in zip(places, made, strict=True))

    loader.make, loader.aside = again, stream
    kept = [next(loader) for _ in range(STEPS)]
    assert [digest(batch) for batch in kept] == uninterrupted
    assert loader.position == STEPS * BATCH
    assert len(asked) == STEPS + 1
    assert len(waited) == 2 * STEPS + 1
    loader.position = 3 * BATCH
    assert digest(next(loader)) == uninterrupted[3]


def test_nothing_depends_on_global_chance(images, uninterrupted):
    torch.manual_seed(123)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = torch.get_rng_state()
    assert [digest(batch) for batch in itertools.islice(make(images), 3)] == uninterrupted[:3]
    assert torch.equal(torch.get_rng_state(), before)


def test_chance_is_another_in_every_row_every_step_and_with_every_seed():
    """Of one image over and over, so that order plays no part."""
    kept = ResidentImages(ListSource([(picture(0), 0)] * 8, "a"), "cpu")
    loaders = [ResidentLoader(kept, 8, 16, device="cpu", seed=seed) for seed in (0, 1)]
    seen = [image for one in loaders for batch in itertools.islice(one, 3) for image in batch.images]
    assert len({image.numpy().tobytes() for image in seen}) == len(seen)


def test_pixels_in_memory_and_grey_ones_are_the_same_to_it(source, images):
    assert torch.equal(ResidentImages(InMemorySource(source), "cpu").pixels, images.pixels)
    digits = open_data("digits")
    kept = ResidentImages(digits, "cpu")
    assert kept.pixels.shape == (len(digits), 3, 8, 8)
    assert torch.equal(kept.pixels[5], to_channels(digits.read(5).content, 3))
    batch = next(ResidentLoader(kept, 32, 16, device="cpu", channels=1, augmentation=EVERYTHING))
    assert batch.images.shape == (32, 1, 16, 16)


# ---- What is broken --------------------------------------------------------------------------------------------------


def test_broken_samples_are_named_once_and_replaced_by_seed_and_number_alone(caplog, monkeypatch):
    monkeypatch.setattr(resident, "DECODE_CHUNK", 7)  # several groups, one of which holds nothing that can be used
    broken = [*range(14, 21), 33]
    samples = [(b"nonsense" if n in broken else picture(n), n % 5) for n in range(40)]
    kept = ResidentImages(ListSource(samples, "abcde"), "cpu")
    assert [record.message for record in caplog.records] == [
        f"sample {n}: not an image of a known kind; another image takes its place" for n in broken
    ]
    loaders = {seed: ResidentLoader(kept, 8, 16, device="cpu", seed=seed) for seed in (0, 1)}
    assert list(loaders[0].broken) == broken
    stand_ins = {seed: kept.choose_replacements(seed) for seed in loaders}
    for seed, loader in loaders.items():
        found = stand_ins[seed]
        assert not set(found.tolist()) & set(broken)
        assert len(set(found[broken].tolist())) > 4  # each broken one has its own
        whole = [n for n in range(40) if n not in broken]
        assert found[whole].tolist() == whole
        batches = list(itertools.islice(loader, 10))
        indices = torch.cat([batch.indices for batch in batches])
        assert sorted(indices[:40].tolist()) == list(range(40))
        assert torch.equal(torch.cat([batch.labels for batch in batches]), found[indices] % 5)
    assert not torch.equal(stand_ins[0], stand_ins[1])
    assert len(caplog.records) == len(broken)


def test_too_many_broken_samples_are_an_error_that_lists_them():
    samples = [(picture(n) if n > 11 else b"", 0) for n in range(40)]
    with pytest.raises(DataError, match=r"12 of 40 .* 10 allowed(?s:.*)sample 0: "):
        ResidentLoader(ListSource(samples, "a"), 4, 8, device="cpu")
    with pytest.raises(DataError, match="3 allowed"):
        ResidentLoader(ListSource(samples[8:], "a"), 4, 8, device="cpu", most_broken=3)
    assert ResidentLoader(ListSource(samples, "a"), 4, 8, device="cpu", most_broken=12).most_broken == 12


def test_where_all_are_broken_there_is_nothing_to_take():
    with pytest.raises(DataError, match="sample 0: empty"):
        ResidentLoader(ListSource([(b"", 0)] * 4, "a"), 4, 8, device="cpu")
    with pytest.raises(DataError, match="empty"):
        ResidentImages(ListSource([]), "cpu")


def test_labels_without_meaning_and_huge_images_are_broken():
    kept = ResidentImages(ListSource([(picture(0), 0), (picture(1), 7)], "ab"), "cpu", most_pixels=480)
    assert [broken.reason for broken in kept.broken_log.broken.values()] == ["its label is 7, and there are 2 classes"]
    with pytest.raises(DataError, match=r"24×20.*479"):
        ResidentImages(ListSource([(picture(0), 0)], "ab"), "cpu", most_pixels=479)


# ---- What a person is told -------------------------------------------------------------------------------------------


def test_images_of_several_sizes_are_refused_in_a_sentence(tmp_path):
    make_folder(tmp_path, {"a": 3})
    (tmp_path / "a/0002.png").write_bytes(picture(1, size=(32, 30)))
    with pytest.raises(DataError, match=r"0002\.png .*32×30.*0000\.png .*24×20.*data\.on_device=false"):
        ResidentImages(open_data(tmp_path), "cpu")


def test_pixels_without_room_are_refused_in_a_sentence(source, monkeypatch):
    needed = COUNT * 3 * 24 * 20
    monkeypatch.setattr(resident, "free_memory", lambda device: 2 * needed - 2)
    with pytest.raises(DataError, match=rf"^{needed:,} bytes of pixels are more than half of the .* free on cpu: "):
        ResidentImages(source, "cpu")
    monkeypatch.setattr(resident, "free_memory", lambda device: 2 * needed)
    assert ResidentImages(source, "cpu").pixels.numel() == needed


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"position": -1}, "position = -1: give a number from 0 on"),
        ({"channels": 4}, "channels = 4"),
        ({"ranks": 5}, "multiple"),
    ],
)
def test_impossible_loaders_are_refused_in_a_sentence(wrong, sentence, images):
    with pytest.raises(ConfigError, match=sentence):
        make(images, **wrong)


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_batches_are_prepared_once(source, monkeypatch):
    reads = []
    monkeypatch.setattr(source, "read", lambda index, read=source.read: reads.append(index) or read(index))
    loader = EvaluationLoader(source, Preprocessing(image_size=16), 8)
    expected = [digest(batch) for batch in loader]
    reads.clear()
    kept = CachedBatches(loader, "cpu")
    assert (len(kept), kept.source, kept.broken) == (13, source, {})
    next(iter(kept))  # a pass that is left early keeps nothing
    reads.clear()
    assert [digest(batch) for batch in kept] == expected
    assert len(reads) == COUNT
    assert [digest(batch) for batch in kept] == expected
    assert len(reads) == COUNT


def test_evaluation_batches_without_room_are_prepared_every_time(source, monkeypatch):
    loader = EvaluationLoader(source, Preprocessing(image_size=16), 8)
    size = 13 * 8 * 3 * 16 * 16
    for free, kept in ((2 * size, True), (2 * size - 2, False)):
        monkeypatch.setattr(resident, "free_memory", lambda device, free=free: free)
        batches = CachedBatches(loader, "cpu")
        assert len(list(batches)) == 13
        assert (next(iter(batches)) is next(iter(batches))) == kept


# ---- Training --------------------------------------------------------------------------------------------------------


def test_a_run_stopped_and_started_again_is_the_run_never_stopped(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    augmentation = {"crop_area": (0.6, 1.0), "flip": 0.5, "rand_augment": (2, 9.0)}
    sections = {"data": {"on_device": True, "augmentation": augmentation}, "schedule": {"steps": 12, "warmup_steps": 4}}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_training(runs.config(whole, **sections))
    ordinary = loop.train_step
    decoded = []
    monkeypatch.setattr(ResidentImages, "_add", lambda *a, add=ResidentImages._add: decoded.append(1) or add(*a))

    def step(run, state):
        assert isinstance(run.training_loader, ResidentLoader)
        assert isinstance(run.evaluation_loaders[0], CachedBatches)
        if state.progress.step in (3, 8):
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    for at in (4, 9):
        with pytest.raises(Stopped, match=f"{at} of 12"):
            run_training(runs.config(stopped, **sections))
    run_training(runs.config(stopped, **sections))
    torch.set_num_threads(before)
    runs.assert_same_run(whole, stopped)
    assert len(decoded) == 3 * 2  # more than 1,024 images and fewer than twice as many, once in each start
    sections["data"]["on_device"] = False
    with pytest.raises(ConfigError, match="on_device"):
        run_training(runs.config(whole, **sections))


def test_on_device_takes_the_place_of_in_memory():
    from vitrail.training.build import _keep_in_memory

    source = ListSource([(picture(0), 0)], "a")
    for on_device, in_memory_too, same in ((True, True, True), (False, True, False), (True, False, True)):
        config = SimpleNamespace(on_device=on_device, in_memory=in_memory_too)
        assert (_keep_in_memory(config, source) is source) == same
