"""Lists of images as data: what they hold, what they are called, what is held out of them, and training on them."""

from __future__ import annotations

import io
import json
import pickle

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image

from vitrail.data.check.check import check_data
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import choose_test_split, list_splits, name_data, open_data
from vitrail.data.packing.pack import pack_data
from vitrail.data.sources.source import compute_fingerprint, hold_out
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import ConfigError, DataError
from vitrail.system.events import ignore_event
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training

WORDS = ("dogs", "ants", "bees")


def make_mixed(folder, count=30):
    """Pairs of all kinds of images and the names of their classes."""
    samples = []
    for number in range(count):
        content = picture(number)
        path = folder / f"{number}.png"
        path.write_bytes(content)
        image = Image.open(io.BytesIO(content))
        pixels = decode_image(content)
        forms = [path, str(path), content, image, np.array(image), pixels, pixels.permute(1, 2, 0).numpy()]
        samples.append((forms[number % len(forms)], WORDS[number % 3]))
    return samples


def pixels_of(source, index):
    content = source.read(index).content
    return content if isinstance(content, torch.Tensor) else decode_image(content)


def test_names_become_classes_in_sorted_order(tmp_path):
    samples = make_mixed(tmp_path)
    source = open_data(samples)
    assert source.classes == ("ants", "bees", "dogs")
    assert source.labels(0, 4).tolist() == [2, 0, 1, 2]
    for index in range(30):
        assert torch.equal(pixels_of(source, index), decode_image(picture(index)))
    assert open_data([(b"", np.str_("b")), (b"", "a")]).classes == ("a", "b")


def test_numbers_stay_numbers():
    samples = [(b"", np.int64(4)), (b"", 0), (b"", torch.tensor(2)), (b"", -1)]
    source = open_data(samples)
    assert (source.classes, source.num_classes, source.labels(0, 4).tolist()) == ((), 5, [4, 0, 2, -1])


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([(b"", "cat"), (b"", 3)], "names"),
        ([(b"", 3), (b"", "cat")], "names"),
        ([(b"", 0.5)], "whole number"),
        ([(b"", None)], "whole number"),
        (["ab"], "not a pair"),
        ([(b"", 0, 1)], "not a pair"),
        ([b"\x00\x01"], "not a pair"),
        (((b"", 0),), "a list of"),
        (((image, 0) for image in (b"",)), "a list of"),
        (np.zeros((4, 8, 8, 3), np.uint8), "a list of"),
        (None, "a list of"),
        ({"train": [(b"", "cat")], "val": [(b"", 0)]}, "names"),
        ({"train": ((b"", 0),)}, "a list of"),
        ({"cats": [(b"", 0)]}, "train"),
        ({"train": [(b"", 0)], "cats": [(b"", 0)]}, "cats"),
        ({}, "train"),
    ],
)
def test_what_is_no_list_of_pairs_is_told(samples, told):
    with pytest.raises(DataError, match=told):
        open_data(samples, "train" if isinstance(samples, dict) else None)


def test_a_list_has_no_splits_but_a_part_can_be_held_out(tmp_path):
    samples = make_mixed(tmp_path)
    assert (list_splits(samples), choose_test_split(samples)) == ((), None)
    assert (len(open_data(samples, "train")), len(open_data(samples, "val"))) == (27, 3)
    with pytest.raises(DataError) as raised:
        open_data(samples, "test")
    assert str(raised.value).startswith("a list of 30 images has no split 'test'")


def test_a_dictionary_has_splits_with_the_same_classes(tmp_path):
    samples = make_mixed(tmp_path)
    data = {"train": samples[:20], "validation": [pair for pair in samples[20:] if pair[1] != "ants"]}
    assert (list_splits(data), choose_test_split(data)) == (("train", "val"), "val")
    assert open_data(data, "train").classes == open_data(data, "val").classes == ("ants", "bees", "dogs")
    assert set(open_data(data, "val").labels(0, 9).tolist()) == {1, 2}
    with pytest.raises(DataError, match="a dictionary of 2 lists has several splits"):
        open_data(data)
    with pytest.raises(ConfigError, match="did you mean"):
        open_data(data, "tran")


def test_what_is_held_out_does_not_depend_on_the_order():
    samples = [(decode_image(picture(number)), number % 2) for number in range(40)]

    def held(pairs):
        _, out = hold_out(open_data(pairs), 0.2, seed=3)
        return {pixels_of(out, index).numpy().tobytes() for index in range(len(out))}

    assert len(held(samples)) == 8
    assert held(samples) == held(samples[::-1])
    as_arrays = [(image.permute(1, 2, 0).numpy(), label) for image, label in samples]
    assert held(as_arrays) == held(samples), "the same pixels in another form"


def test_other_pixels_are_other_data(tmp_path):
    first = [(decode_image(picture(number)), "ab"[number % 2]) for number in range(6)]
    other = [*first[:5], (first[5][0].flip(1), "b")]
    assert compute_fingerprint(open_data(first)) == compute_fingerprint(open_data(list(first)))
    assert compute_fingerprint(open_data(first)) != compute_fingerprint(open_data(other))
    tall = [(first[0][0].reshape(3, 24, 20), "a"), *first[1:]]
    assert compute_fingerprint(open_data(first)) != compute_fingerprint(open_data(tall)), "the same bytes, turned"
    assert open_data([("x/a.png", 0)]).identity(0) == "x/a.png"
    assert open_data([({}, 0)]).identity(0) == "sample 0"


def test_a_list_is_sent_without_the_tensor_that_its_images_are_a_part_of():
    images = torch.zeros(1000, 3, 8, 8, dtype=torch.uint8)
    source = open_data([(images[index], index % 2) for index in range(4)])
    sent = pickle.dumps(source)
    assert len(sent) < 10_000
    assert torch.equal(pixels_of(pickle.loads(sent), 2), images[2])


def test_a_list_arrives_in_a_process_that_is_spawned(tmp_path):
    loader = TrainingLoader(open_data(make_mixed(tmp_path)), 6, 16, workers=1, start_method="spawn")
    here = TrainingLoader(open_data(make_mixed(tmp_path)), 6, 16)
    assert torch.equal(next(iter(loader)).images, next(iter(here)).images)


def test_short_names_of_data(tmp_path):
    assert name_data("photos/") == "photos/"
    assert name_data(tmp_path) == str(tmp_path)
    assert name_data([(b"x" * 1000, 0)]) == "a list of 1 image"
    assert name_data(open_data([(b"", 0)] * 1200)) == "a list of 1,200 images"
    assert name_data({"train": [], "val": []}) == "a dictionary of 2 lists"
    assert name_data(open_data("digits")) == "a source of 1,797 images"


def test_lists_are_checked():
    samples = [(picture(0), "a"), (picture(0), "b"), (b"no image", "a"), (np.zeros((40, 40, 3), np.uint8), "b")]
    report = check_data(samples, workers=1)
    assert (report.counts["duplicate"], report.counts["unreadable"]) == (1, 1)
    (finding,) = report.findings("duplicate")
    assert "a there" in finding.sentence
    splits = check_data({"train": samples[:1], "val": samples[1:2]}, workers=1)
    assert splits.counts["leak"] == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_is_trained_on_a_list(tmp_path, workers):
    samples = make_mixed(tmp_path)
    tree = {
        "model": {"name": "Ti/16", "image_size": 16, "width": 16, "depth": 1, "num_heads": 1, "mlp_dim": 16},
        "data": {"source": "a list", "batch_size": 8, "workers": workers, "validate_on": "holdout", "holdout": 0.2},
        "schedule": {"steps": 3, "warmup_steps": 0},
        "run": {"folder": str(tmp_path / "run"), "trackers": [], "device": "cpu"},
    }
    config = resolve(tree)
    result = run_training(config, source=open_data(samples), on_event=ignore_event)
    assert result.model.labels == ("ants", "bees", "dogs")
    assert result.evaluated == 6
    again = run_training(config, source=open_data(samples), on_event=ignore_event)
    assert again.evaluation == result.evaluation, "it is finished already"
    others = [(image.transpose(Image.Transpose.ROTATE_180) if isinstance(image, Image.Image) else image, label)
              for image, label in samples]  # fmt: skip
    splits = {"train": samples[:20], "val": samples[20:]}
    resolved = resolve(tree, {"run.folder": tmp_path / "splits", "data.validate_on": "val", "data.holdout": 0.0})
    assert run_training(resolved, source=splits, on_event=ignore_event).evaluated == 10
    with pytest.raises(ConfigError, match="other images"):
        run_training(config, source=open_data(others), on_event=ignore_event)


# Checking and packing from Python.


def test_a_check_returns_a_report_and_writes_it(tmp_path):
    folder = tmp_path / "<b>photos"
    for split in ("train", "val"):
        (folder / split / "cat").mkdir(parents=True)
        (folder / split / "cat" / "0.png").write_bytes(picture(0, size=(40, 40)))
    (folder / "train" / "cat" / "1.png").write_bytes(b"no image")
    events = []
    report = check_data(
        folder,
        workers=1,
        out=tmp_path / "report.json",
        on_event=lambda kind, values: events.append((kind, values["task"], values["done"], values["total"])),
    )
    assert report.failed
    assert events == [("progress", "checking", done, 3) for done in (0, 2, 3)]
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    assert list(report.examples()) == ["unreadable", "leak"]
    text = repr(report)
    assert "2 images, 1 readable" in text
    assert "1 unreadable, 1 leak" in text
    html = report._repr_html_()
    assert "&lt;b&gt;photos" in html
    assert "<b>" not in html
    with pytest.raises(ConfigError, match="--out"):
        check_data(folder, out=tmp_path / "nowhere" / "report.json")
    with pytest.raises(DataError, match="'absent'"):
        check_data("absent")


def test_packing_returns_what_it_wrote(tmp_path):
    samples = [*make_mixed(tmp_path), (b"no image", "ants")]
    events = []
    result = pack_data(
        samples,
        tmp_path / "packed",
        shard_mb=0.01,
        skip_broken=True,
        workers=1,
        on_event=lambda kind, values: events.append((kind, values)),
    )
    assert (result.folder, result.samples, len(result.left_out)) == (tmp_path / "packed", 30, 1)
    assert (result.left_out[0].name, result.left_out[0].split) == ("sample 30", "all")
    assert all(shard.path.stat().st_size == shard.bytes for shard in result.shards)
    assert len(result.shards) > 2
    assert result.manifest == json.loads((tmp_path / "packed" / "dataset.json").read_text())
    assert result.manifest["source"] == "a list of 31 images"
    assert any("splits" in note for note in result.notes)
    assert events[-1] == ("progress", {"task": "packing", "done": 31, "total": 31})
    assert open_data(tmp_path / "packed").classes == ("ants", "bees", "dogs")
    assert "30" in repr(result)
    assert "sample 30" in result._repr_html_()
    assert result.to_dict()["left_out"][0]["reason"]
    json.dumps(result.to_dict())
    with pytest.raises(DataError, match="skip_broken"):
        pack_data(samples, tmp_path / "other", workers=1)


def test_packing_goes_on_where_it_was_interrupted(tmp_path):
    samples = [(decode_image(picture(number)), number % 3) for number in range(60)]
    whole = pack_data(samples, tmp_path / "whole", shard_mb=0.01, workers=1, on_event=ignore_event)
    done = []

    def interrupt(kind, values):
        done.append(values["done"])
        if len(done) == 3:  # the first says that nothing is done yet
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_data(samples, tmp_path / "stopped", shard_mb=0.01, workers=1, on_event=interrupt)
    assert not (tmp_path / "stopped" / "dataset.json").exists()
    flipped = [(image.flip(2), label) for image, label in samples]
    with pytest.raises(ConfigError):
        pack_data(flipped, tmp_path / "stopped", shard_mb=0.01, workers=1)
    seen = []
    result = pack_data(
        samples,
        tmp_path / "stopped",
        shard_mb=0.01,
        workers=1,
        on_event=lambda kind, values: seen.append(values["done"]),
    )
    assert 0 < len(list(filter(None, seen))) < 4, "what was packed is not packed again"
    assert result.manifest == whole.manifest
    assert [shard.path.read_bytes() for shard in result.shards] == [shard.path.read_bytes() for shard in whole.shards]
