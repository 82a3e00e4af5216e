"""Features are computed once, survive being killed, and are never wrong."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import Source, Subset
from vitrail.errors import DataError
from vitrail.evaluation.features import Features, extract_features, features_folder
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.tasks.tags import Tags
from vitrail.weights.digest import compute_weights_digest

HOW = InferenceOptions(batch_size=16, device="cpu")
IMAGES = 100


def small_model(seed: int = 0, **options):
    sizes = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "in_channels": 1}
    return vitrail.create_model("Ti/4", num_classes=10, seed=seed, **{**sizes, **options})


@functools.cache
def digits() -> Source:
    return open_data("digits")


class Watched(Subset):
    """The first digits, with a note of every image that is read."""

    def __init__(self, count: int = IMAGES) -> None:
        super().__init__(digits(), np.arange(count))
        self.reads: list[int] = []

    def read(self, index):
        self.reads.append(index)
        return super().read(index)


def computed(source: Watched) -> int:
    """How many images were read, without those looked into to tell the data."""
    return len(source.reads) - 64


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def right(model):
    return extract_features(model, Watched(), HOW, cache=None)


def same(one: Features, other: Features) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("values", "labels", "indices"))


def test_they_are_what_the_model_embeds(model, right):
    source = Watched()
    images = torch.stack([vitrail.prepare(source.read(index).content, model.preprocessing) for index in range(IMAGES)])
    with torch.inference_mode():
        expected = model.embed(images)
    torch.testing.assert_close(right.values, expected, rtol=0, atol=1e-5)
    assert right.values.dtype == torch.float32
    assert right.labels.tolist() == source.labels(0, IMAGES).tolist()
    assert right.indices.tolist() == list(range(IMAGES))


def test_the_second_time_nothing_is_computed(model, right, tmp_path):
    told: list[tuple[int, int]] = []
    first, second = Watched(), Watched()
    found = extract_features(model, first, HOW, tmp_path, progress=lambda done, total: told.append((done, total)))
    assert same(found, right)
    assert computed(first) == IMAGES
    assert told[:2] == [(0, IMAGES), (16, IMAGES)]
    assert told[-1] == (IMAGES, IMAGES)
    assert same(extract_features(model, second, HOW, tmp_path), right)
    assert computed(second) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".features"]


def test_they_lie_beside_the_tables(model, monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    extract_features(model, Watched(), HOW)
    assert features_folder() == tmp_path / "features"
    assert len(list(features_folder().glob("*.features"))) == 1


class Relabelled(Watched):
    def labels(self, start, stop):
        found = super().labels(start, stop).copy()
        if start <= 77 < stop:
            found[77 - start] = 3
        return found


class Repainted(Watched):
    def read(self, index):
        sample = super().read(index)
        return sample._replace(content=255 - sample.content) if index == IMAGES - 1 else sample


def test_another_model_data_or_precision_is_another_entry(model, tmp_path):
    def entries(model, source, options=HOW):
        extract_features(model, source, options, tmp_path)
        return len(list(tmp_path.iterdir()))

    assert entries(model, Watched()) == 1
    assert entries(small_model(seed=1), Watched()) == 2
    assert entries(small_model(image_size=20), Watched()) == 3
    assert entries(model, Watched(), InferenceOptions(16, device="cpu", precision="bf16")) == 4
    assert entries(model, Watched(99)) == 5
    assert entries(model, Relabelled()) == 6
    assert entries(model, Repainted()) == 7
    assert entries(model, Watched(), InferenceOptions(50, device="cpu")) == 7, "the same in other batches"
    int8 = InferenceOptions(16, device="cpu", precision="int8")
    assert entries(model, Watched(), int8) == 8
    assert entries(open_model(small_model(), int8), Watched(), int8) == 8, "the same model, loaded again"


def test_the_digest_sees_every_part_of_a_model():
    plain = compute_weights_digest(small_model())
    assert plain == compute_weights_digest(small_model())
    for name in ("class_token", "encoder.blocks.1.mlp.fc2.bias", "head.weight"):
        changed = small_model()
        parameter = changed.get_parameter(name).detach().view(-1)
        parameter[-1] = parameter[-1] + 1e-6
        assert compute_weights_digest(changed) != plain, name
    changed = small_model()
    changed.preprocessing = changed.preprocessing.model_copy(update={"mean": (0.4,)})
    assert compute_weights_digest(changed) != plain
    assert compute_weights_digest(small_model(norm_eps=1e-5)) != plain
    assert compute_weights_digest(small_model().to(torch.bfloat16)) != plain
    assert compute_weights_digest(small_model(mlp="swiglu")) != plain


def test_the_digest_of_a_model_is_that_of_earlier_versions():
    """Unfinished runs note the digest of the weights they began from; this one was computed before the options of
    later encoders existed."""
    model = vitrail.create_model("Ti/16", image_size=32, num_classes=3, seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape).remainder(7) * 0.25 + number)
    before = "2c47a75ab4c0709393a695f8ede6146d"
    assert compute_weights_digest(model) == before
    fields = {**dict(model.architecture), "position_resize": "bicubic"}
    model.architecture = type(model.architecture)(**fields)
    assert compute_weights_digest(model) == before, "at its own size, positions are not resized"
    model.preprocessing = model.preprocessing.model_copy(update={"image_size": (48, 48)})
    other = compute_weights_digest(model)
    model.architecture = type(model.architecture)(**{**fields, "position_resize": "bicubic-antialias"})
    assert compute_weights_digest(model) != other


def test_what_cannot_be_read_is_left_out(caplog, tmp_path):
    samples = [(picture(number), number % 2) for number in range(12)]
    for number in (0, 5, 6, 7, 11):  # also a whole batch
        samples[number] = (b"no image", 0)
    model, options = small_model(in_channels=3), InferenceOptions(2, device="cpu")
    found = extract_features(model, ListSource(samples), options, tmp_path)
    assert found.indices.tolist() == [1, 2, 3, 4, 8, 9, 10]
    assert found.labels.tolist() == [1, 0, 1, 0, 0, 1, 0]
    assert same(extract_features(model, ListSource(samples), options, tmp_path), found)
    with pytest.raises(DataError, match="can be read"):
        extract_features(model, ListSource([(b"no image", 0)] * 3), options, None)


def test_an_entry_of_a_table_knows_all_targets_and_all_bad_rows(model, tmp_path):
    """More rows than the fingerprint samples; a bad row that is mended is no longer left out."""
    count, spots = 2500, {"spot": [digits().read(index).content for index in range(10)]}
    images = ListSource([(spots["spot"][index % 10], 0) for index in range(count)])

    def tagged(bad: set[int], other: int | None = None) -> AnnotatedSource:
        rows = [{"tags": "none known" if index in bad else "a" if index == other else "b"} for index in range(count)]
        return AnnotatedSource(images, Tags(names=("a", "b"), column="tags"), rows)

    options = InferenceOptions(500, device="cpu")
    for number, (bad, other) in enumerate([({3, 1503}, None), (set(), None), ({5}, None), (set(), 1501)], start=1):
        found = extract_features(model, tagged(bad, other), options, tmp_path)
        assert set(range(count)) - set(found.indices.tolist()) == bad
        assert len(list(tmp_path.glob("*.features"))) == number
    extract_features(model, tagged({3, 1503}), options, tmp_path)
    assert len(list(tmp_path.glob("*.features"))) == 4


def test_too_many_broken_images_are_too_many_the_second_time_too(tmp_path):
    samples = [(b"no image" if number < 12 else picture(number), 0) for number in range(40)]
    model, options = small_model(in_channels=3), InferenceOptions(8, device="cpu")
    for _ in range(3):
        with pytest.raises(DataError, match="12 of 40 images cannot be used, more than the 10 allowed"):
            extract_features(model, ListSource(samples), options, tmp_path)
    assert not list(tmp_path.glob("*.features"))


@pytest.fixture(scope="module")
def entry(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("entry")
    extract_features(model, Watched(), HOW, folder)
    (path,) = folder.iterdir()
    return path.name, path.read_bytes()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_torn_file_is_gone_on_with_from_its_last_whole_part(data, model, right, entry, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torn")
    name, content = entry
    cut = data.draw(st.integers(0, len(content)))
    rubbish = data.draw(st.binary(max_size=60))
    (folder / name).with_suffix(".unfinished").write_bytes(content[:cut] + rubbish)
    source = Watched()
    assert same(extract_features(model, source, HOW, folder), right)
    row, head = 2 * 8 + 32 * 4, 3 * 8 + 16
    assert len(content) == IMAGES * row + 7 * head, "six parts of 16 images, one of 4"
    whole = 7 if cut == len(content) else cut // (16 * row + head)
    assert computed(source) == IMAGES - min(16 * whole, IMAGES), "nothing is computed twice"
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_bytes() == content


@given(place=st.integers(0), bit=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_a_damaged_entry_is_made_anew(place, bit, model, right, entry, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    name, content = entry
    changed = bytearray(content)
    changed[place % len(content)] ^= 1 << bit
    (folder / name).write_bytes(changed)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vitrail")
    logger.addHandler(handler)
    try:
        assert same(extract_features(model, Watched(), HOW, folder), right)
    finally:
        logger.removeHandler(handler)
    assert len(messages) == 1
    assert "is damaged: the features are computed anew" in messages[0]
    assert (folder / name).read_bytes() == content


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np, torch
torch.set_num_threads(1)
from test_features import HOW, Watched, small_model
from vitrail.evaluation.features import extract_features

folder, rng, model = Path(sys.argv[1]), random.Random(0), small_model()

class Slow(Watched):
    def read(self, index):
        time.sleep(0.001)
        return super().read(index)

def begun(out=None):
    child = os.fork()
    if child:
        return child
    try:
        found = extract_features(model, Slow(900), HOW, folder)
        if out:
            np.savez(folder.parent / out, **{name: getattr(found, name) for name in ("values", "labels", "indices")})
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)

def size():
    try:
        return sum(path.stat().st_size for path in folder.glob("*.unfinished"))
    except FileNotFoundError:
        return 0

Watched(1)  # so that each fork need not open it
sizes = [0]
for _ in range(6):
    child = begun()
    while size() <= sizes[-1] and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.002)
    if size() <= sizes[-1]:
        break  # a busy machine let it come to its end
    time.sleep(rng.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    sizes.append(size())
both = [begun("one.npz"), begun("other.npz")]
assert [os.waitpid(child, 0)[1] for child in both] == [0, 0]
print(json.dumps(sizes))
"""


@pytest.mark.slow
def test_killed_again_and_again_then_two_at_once(model, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    here = os.path.dirname(__file__)  # noqa: PTH120
    paths = os.pathsep.join([here, os.path.join(here, "../data")])  # noqa: PTH118
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert child.returncode == 0, child.stderr
    sizes = json.loads(child.stdout)
    assert len(sizes) > 2, "it was killed in the middle"
    whole = extract_features(model, Watched(900), HOW, None)
    for name in ("one.npz", "other.npz"):
        with np.load(tmp_path / name) as found:
            assert all(np.array_equal(found[key], getattr(whole, key)) for key in ("values", "labels", "indices"))
    again = Watched(900)
    assert same(extract_features(model, again, HOW, folder), whole)
    assert computed(again) == 0
    assert [path.suffix for path in folder.iterdir()] == [".features"]


def test_who_comes_second_waits_and_computes_nothing(model, right, tmp_path):
    class Slow(Watched):
        def read(self, index):
            time.sleep(0.001)
            return super().read(index)

    sources = [Slow(), Slow(), Slow()]
    found: list[Features] = []
    threads = [
        threading.Thread(target=lambda source=source: found.append(extract_features(model, source, HOW, tmp_path)))
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(same(features, right) for features in found)
    assert sorted(map(computed, sources)) == [0, 0, IMAGES]
    assert [path.suffix for path in tmp_path.iterdir()] == [".features"]


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(model, right, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert same(extract_features(model, Watched(), HOW, tmp_path / "file" / "cache"), right)
    assert "the features are not kept in" in caplog.text


def test_a_disk_that_fills_up_is_no_reason_to_stop(model, right, tmp_path, caplog, monkeypatch):
    written = vitrail.evaluation.features._pack_batch
    count = iter(range(100))

    def full(part):
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return written(part)

    monkeypatch.setattr("vitrail.evaluation.features._pack_batch", full)
    assert same(extract_features(model, Watched(), HOW, tmp_path), right)
    assert caplog.text.count("No space left on device") == 1
    assert not list(tmp_path.iterdir())


def test_entries_that_nobody_uses_are_forgotten(model, tmp_path):
    old = time.time() - 40 * 24 * 3600
    extract_features(model, Watched(50), HOW, tmp_path)
    (used,) = tmp_path.iterdir()
    (tmp_path / "unused.features").write_bytes(b"")
    (tmp_path / "left.unfinished").write_bytes(b"")
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    extract_features(model, Watched(50), HOW, tmp_path)
    extract_features(model, Watched(60), HOW, tmp_path)
    assert used.exists(), "it was used just now"
    assert len(list(tmp_path.iterdir())) == 2


def test_workers_do_not_change_a_bit(model, right, tmp_path):
    assert same(extract_features(model, Watched(), InferenceOptions(16, workers=2, device="cpu"), tmp_path), right)


def test_an_empty_source(model):
    class Nothing(Source):
        classes = ()

        def __len__(self):
            return 0

        def read(self, index):
            raise IndexError

        def name(self, index):
            raise IndexError

        def labels(self, start, stop):
            return np.empty(0, np.int64)

    with pytest.raises(DataError, match="empty"):
        extract_features(model, Nothing(), HOW, None)
