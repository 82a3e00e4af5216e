"""The loader: the same bytes whatever the workers, the ranks and the interruptions; nothing lost, nothing hidden."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import make_folder, make_tar, picture

import vitrail
from vitrail.config import Preprocessing
from vitrail.data import torch_loader
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import Sample
from vitrail.data.transforms.augment import Augmentation
from vitrail.data.transforms.decode import decode_image
from vitrail.data.transforms.preprocess import resize_and_crop

EVERYTHING = Augmentation(rand_augment=(2, 10.0), color_jitter=0.4, erasing=0.25)
STEPS, BATCH, COUNT = 60, 12, 101
"""Seven epochs of a data set that no batch divides."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_tar(folder / "a.tar", [n % 5 for n in range(60)])
    make_tar(folder / "b.tar", [n % 5 for n in range(60, COUNT)], first=60)
    os.environ["VITRAIL_CACHE"] = str(folder / "cache")
    found = open_data(folder)
    found.block, found.window = 8, 40
    return found


def make(source, **options):
    return TrainingLoader(source, BATCH, (16, 16), seed=5, augmentation=EVERYTHING, **options)


def digest(batch) -> tuple[bytes, list[int], list[int]]:
    return batch.images.numpy().tobytes(), batch.labels.tolist(), batch.indices.tolist()


@pytest.fixture(scope="module")
def uninterrupted(source):
    return [digest(batch) for batch in itertools.islice(make(source), STEPS)]


def merged(parts: list) -> tuple[bytes, list[int], list[int]]:
    """What the ranks have of a step, put together."""
    return b"".join(p[0] for p in parts), [n for p in parts for n in p[1]], [n for p in parts for n in p[2]]


def test_nothing_depends_on_chance(uninterrupted, source):
    torch.manual_seed(123)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    assert [digest(batch) for batch in itertools.islice(make(source), 5)] == uninterrupted[:5]


def test_each_epoch_holds_each_sample_once(uninterrupted):
    indices = [index for step in uninterrupted for index in step[2]]
    for epoch in range(STEPS * BATCH // COUNT):
        assert sorted(indices[epoch * COUNT : (epoch + 1) * COUNT]) == list(range(COUNT))
    assert indices[:COUNT] != indices[COUNT : 2 * COUNT]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("workers", "ranks", "changing", "restarts"),
    [
        (2, 2, True, 6),
        *(
            pytest.param(*rest, 50, marks=pytest.mark.slow)
            for rest in itertools.product((1, 2, 3), (1, 2), (False, True))
        ),
    ],
)
def test_a_run_stopped_after_random_steps_is_the_run_never_stopped(
    workers, ranks, changing, restarts, source, uninterrupted
):
    """Each time a new loader goes on from the position alone; `changing`: with another number of workers."""
    stops = sorted(random.Random(workers + 10 * ranks).sample(range(1, STEPS), restarts))
    parts = []
    for rank in range(ranks):
        position, steps = 0, []
        for number, (start, stop) in enumerate(itertools.pairwise([0, *stops, STEPS])):
            count = (workers, 0, 1, 2)[number % 4] if changing else workers
            loader = make(source, workers=count, rank=rank, ranks=ranks, position=position)
            steps += [digest(batch) for batch in itertools.islice(loader, stop - start)]
            position = loader.position
            assert position == stop * BATCH
        parts.append(steps)
    assert [merged(list(step)) for step in zip(*parts, strict=True)] == uninterrupted


def test_the_batch_size_may_change_on_the_way(source, uninterrupted):
    other = TrainingLoader(source, 6, (16, 16), seed=5, augmentation=EVERYTHING, position=10 * BATCH)
    halves = [digest(batch) for batch in itertools.islice(other, 4)]
    assert [merged(halves[:2]), merged(halves[2:])] == uninterrupted[10:12]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_however_they_start(method, source, uninterrupted):
    started = make(source, workers=2, start_method=method)
    assert [digest(batch) for batch in itertools.islice(started, 6)] == uninterrupted[:6]


def test_other_seeds_give_other_pixels_and_orders(source, uninterrupted):
    other = next(iter(TrainingLoader(source, BATCH, (16, 16), seed=6, augmentation=EVERYTHING)))
    assert digest(other)[2] != uninterrupted[0][2]


def test_grey_and_other_sizes():
    digits = open_data("digits", "train")
    batch = next(iter(TrainingLoader(digits, 8, (12, 20), channels=1)))
    assert (batch.images.shape, batch.images.dtype) == ((8, 1, 12, 20), torch.uint8)
    assert batch.mask.all()
    assert batch.to("cpu").labels.tolist() == digits.whole.digit_labels[digits.indices[batch.indices]].tolist()


def test_a_loader_that_nobody_wants_ends_with_its_workers(source):
    before = {child.pid for child in multiprocessing.active_children()}
    loader = make(source, workers=2)
    next(loader)
    assert len({child.pid for child in multiprocessing.active_children()} - before) == 2
    del loader
    assert {child.pid for child in multiprocessing.active_children()} <= before


# Workers that die


@pytest.fixture
def quick_to_notice(monkeypatch):
    """torch looks every 5 seconds whether its workers are alive."""
    batches = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(batches._try_get_data, "__defaults__", (0.3,))


class Deadly(ListSource):
    """Kills its own process the first times a certain sample is read."""

    def __init__(self, samples, marks, times):
        super().__init__(samples)
        self.marks, self.times = marks, times

    def read(self, index: int) -> Sample:
        deaths = len(list(self.marks.iterdir()))
        if index == 13 and deaths < self.times:
            (self.marks / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


@pytest.mark.usefixtures("quick_to_notice")
def test_a_worker_that_dies_is_replaced_and_nothing_is_lost(tmp_path, caplog):
    samples = [(picture(n), 0) for n in range(40)]
    expected = [digest(batch) for batch in itertools.islice(make(ListSource(samples)), 10)]
    source = Deadly(samples, tmp_path, times=2)
    found = [digest(batch) for batch in itertools.islice(make(source, workers=2, start_method="fork"), 10)]
    assert found == expected
    assert "new workers go on from there" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("quick_to_notice")
def test_a_worker_that_dies_while_the_program_is_elsewhere(source, uninterrupted, caplog):
    """As the system kills it while a training step runs: nothing is raised there."""
    loader = make(source, workers=2, start_method="fork")
    found = [digest(next(loader)) for _ in range(3)]
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)
    found += [digest(next(loader)) for _ in range(9)]
    assert found == uninterrupted[:12]
    assert "new workers go on from there" in caplog.text


@pytest.mark.usefixtures("quick_to_notice")
def test_an_evaluation_survives_too(tmp_path):
    samples = [(picture(n), n) for n in range(40)]
    source = Deadly(samples, tmp_path, times=2)
    batches = EvaluationLoader(source, Preprocessing(image_size=16), 4, workers=2, start_method="fork")
    assert torch.cat([batch.labels for batch in batches]).tolist() == list(range(40))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("quick_to_notice")
def test_workers_that_keep_dying_are_an_error(tmp_path):
    source = Deadly([(picture(n), 0) for n in range(40)], tmp_path, times=100)
    loader = TrainingLoader(source, 40, 16, workers=1, start_method="fork")  # no batch is without the deadly sample
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed"):
        next(loader)
    assert len(list(tmp_path.iterdir())) == torch_loader.WORKER_DEATHS + 1


KILLED = """
import gc, multiprocessing, os, signal, sys
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from vitrail.data.loader import TrainingLoader

if __name__ == "__main__":
    loader = TrainingLoader("digits", 8, 16, workers=2, start_method=sys.argv[1])
    next(loader)
    (batches,) = (found for found in gc.get_objects() if type(found) is _MultiProcessingDataLoaderIter)
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    batches._workers_done_event._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.slow
def test_no_worker_outlives_a_killed_program(tmp_path, start_method):
    """Killed while it holds the lock that torch's workers ask for before they look whether it is still there."""
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), start_method]
    with (tmp_path / "workers").open("w+") as told:  # not a pipe: one that outlives would hold it open
        assert subprocess.run(command, stdout=told, stderr=subprocess.DEVNULL, timeout=120).returncode == -9
        told.seek(0)
        workers = [int(word) for word in told.read().split()]
    assert len(workers) == 2
    until = time.monotonic() + 20
    while alive := [pid for pid in workers if _alive(pid)]:
        assert time.monotonic() < until, f"{alive} of {workers} are still there"
        time.sleep(0.2)


def _alive(pid: int) -> bool:
    """A zombie, which nobody in a container may be there to bury, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Broken samples


def with_broken(count: int, broken: set[int]) -> ListSource:
    return ListSource([(b"broken" if n in broken else picture(n), n % 3) for n in range(count)])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_is_named_counted_and_replaced(workers, caplog):
    source = with_broken(50, {3, 17})
    loader = make(source, workers=workers)
    batches = list(itertools.islice(loader, 20))
    assert set(loader.broken) == {3, 17}
    assert loader.broken[3].reason.startswith("not an image of a known kind")
    assert sum("sample 17" in record.message for record in caplog.records) == 1  # once, though it came up often
    assert sum(len(batch.labels) for batch in batches) == 20 * BATCH  # no step shrinks
    assert sum(b.index == 17 for batch in batches for b in batch.broken) >= 4
    again = list(itertools.islice(make(source), 20))
    assert [digest(batch) for batch in batches] == [digest(batch) for batch in again]


def test_what_replaces_it_brings_its_own_label():
    source = ListSource([(b"broken", 0), *[(picture(n), 1) for n in range(20)]])
    for batch in itertools.islice(make(source), 10):
        assert set(batch.labels.tolist()) == {1}


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_stop_the_run_with_the_list(workers):
    source = with_broken(200, set(range(0, 200, 10)))
    with pytest.raises(vitrail.DataError, match=r"1\d of 200 .* 10 allowed") as caught:
        list(itertools.islice(make(source, workers=workers), 100))
    lines = str(caught.value).splitlines()
    assert 12 <= len(lines) < 18
    assert all("sample" in line and "not an image" in line for line in lines[1:])


@pytest.mark.slow
def test_the_limit_is_a_thousandth_and_can_be_set():
    assert make(ListSource([(b"", 0)] * 50_000)).most_broken == 50
    assert make(with_broken(50, set())).most_broken == 10
    with pytest.raises(vitrail.DataError, match="0 allowed"):
        list(itertools.islice(make(with_broken(30, {4}), most_broken=0), 10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_nothing_but_broken_images(workers):
    with pytest.raises(vitrail.DataError, match="every other"):
        next(iter(make(with_broken(30, set(range(30))), workers=workers, most_broken=10**6)))


@pytest.mark.slow
def test_a_strange_error_in_one_sample_is_told_not_raised():
    class Strange(ListSource):
        def read(self, index):
            return super().read(index) if index != 5 else [][1]

    loader = make(Strange([(picture(n), 0) for n in range(30)]))
    list(itertools.islice(loader, 5))
    assert loader.broken[5].reason == "unexpected IndexError: list index out of range"


def test_a_label_beyond_the_classes_is_broken():
    loader = make(ListSource([(picture(n), n % 3) for n in range(30)], ("a", "b")), most_broken=100)
    labels = torch.cat([batch.labels for batch in itertools.islice(loader, 5)])
    assert set(labels.tolist()) == {0, 1}
    assert loader.broken[2].reason == "its label is 2, and there are 2 classes"


def test_a_loader_is_one_sequence_however_often_it_is_asked(source, uninterrupted):
    loader = make(source)
    found = [digest(next(iter(loader))), digest(next(loader)), digest(next(iter(loader)))]
    assert found == uninterrupted[:3]
    assert loader.position == 3 * BATCH
    assert loader.steps_per_epoch == 9


@pytest.mark.parametrize("workers", [0, 1])
def test_the_programs_own_randomness_is_left_alone(workers, source):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(itertools.islice(make(source, workers=workers), 2))
    list(EvaluationLoader(source, Preprocessing(image_size=16), 50, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_people_give(tmp_path):
    make_folder(tmp_path / "photos", {"a": 3, "b": 3})
    batch = next(TrainingLoader(tmp_path / "photos", 4, 32))
    assert batch.images.shape == (4, 3, 32, 32)
    with pytest.raises(vitrail.ConfigError, match=r"model\.preprocessing"):
        EvaluationLoader(tmp_path / "photos", 4, Preprocessing(image_size=32))
    with pytest.raises(vitrail.ConfigError, match="image_size = 0"):
        TrainingLoader(tmp_path / "photos", 4, 0)
    with pytest.raises(vitrail.ConfigError, match="position = -1"):
        TrainingLoader(tmp_path / "photos", 4, 32, position=-1)


def test_impossible_loaders():
    with pytest.raises(vitrail.DataError, match="empty"):
        make(ListSource([]))
    with pytest.raises(vitrail.ConfigError, match=r"batch_size = 12 .*multiple"):
        make(with_broken(5, set()), ranks=5)


# Evaluation


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_counts_every_sample_once_on_any_number_of_ranks(ranks, workers, source):
    preprocessing = Preprocessing(image_size=(18, 16), resize="cover", crop_fraction=0.9)
    seen, lengths = [], set()
    for rank in range(ranks):
        loader = EvaluationLoader(source, preprocessing, BATCH, rank=rank, ranks=ranks, workers=workers)
        batches = list(loader)
        lengths.add(len(batches))
        assert len(batches) == len(loader)
        for batch in batches:
            assert batch.images.shape == (BATCH // ranks, 3, 18, 16)
            for image, label, index in zip(batch.images, batch.labels, batch.indices, strict=True):
                if index >= 0:
                    sample = source.read(int(index))
                    assert torch.equal(image, resize_and_crop(decode_image(sample.content), preprocessing))
                    assert label == sample.label
            assert torch.equal(batch.mask, batch.indices >= 0)
            seen += batch.indices[batch.mask].tolist()
    assert sorted(seen) == list(range(COUNT))
    assert len(lengths) == 1


def test_evaluation_does_not_replace_what_is_broken_but_leaves_it_out_aloud(caplog):
    batches = list(EvaluationLoader(with_broken(10, {4}), Preprocessing(image_size=16), 5))
    assert torch.cat([batch.mask for batch in batches]).tolist() == [n != 4 for n in range(10)]
    assert [b.index for batch in batches for b in batch.broken] == [4]
    assert "sample 4: not an image of a known kind; it is not counted" in caplog.text


def test_an_evaluation_of_broken_images_is_an_error():
    loader = EvaluationLoader(with_broken(40, set(range(20))), Preprocessing(image_size=16), 5)
    with pytest.raises(vitrail.DataError, match="10 allowed"):
        list(loader)
    assert len(loader.broken) > 10
    with pytest.raises(vitrail.DataError, match="empty"):
        EvaluationLoader(ListSource([]), Preprocessing(image_size=16), 5)


class Counted(ListSource):
    """Leaves a mark for each sample that is read."""

    def __init__(self, samples, marks):
        super().__init__(samples)
        self.marks = marks

    def read(self, index: int) -> Sample:
        (self.marks / f"{index} {time.monotonic_ns()}").touch()
        return super().read(index)


def test_workers_read_ahead(tmp_path):
    """While a step computes they read the next ones: two batches each."""
    batches = make(Counted([(picture(n), 0) for n in range(200)], tmp_path), workers=2)
    next(batches)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 5 * BATCH and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 5 * BATCH
