"""The paper's transfer suite from end to end, on small data in the place of large."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import stand_ins
from stand_ins import one_by_one, run_lines, shown, table

from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError, Stopped
from vitrail.training import loop
from vitrail.transfer import paper_suite, suite_table

pytestmark = pytest.mark.slow  # many trainings

IDS = ["n01440764", "n01443537", "n01484850"]
"""Of ImageNet's first three classes."""
REAL = {1: [0], 2: [0, 1], 3: [], 4: [2]}
"""Labels of the validation images by number, over and over."""
WORDS = ["red", "green", "blue"]
SHORT = [*stand_ins.SHORT, "schedule.steps=3"]


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with stand_ins.quick(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stand_ins.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    stand_ins.hard(root / "imagenet/train", IDS, 10)
    stand_ins.hard(root / "imagenet/val", IDS, 4, pattern="ILSVRC2012_val_{:08}.png")
    real = {f"ILSVRC2012_val_{number:08}.JPEG": REAL[(number - 1) % 4 + 1] for number in range(1, 13)}
    (root / "real.json").write_text(json.dumps(real))
    stand_ins.in_parts(root / "cifar10", WORDS, train=10, test=6)
    stand_ins.in_parts(root / "cifar100", WORDS, train=8, test=5)
    stand_ins.in_parts(root / "pets", WORDS, train=8, test=4)
    stand_ins.in_parts(root / "flowers102", WORDS, train=8, val=3, test=7)
    return root


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """All of it, once: the lines, and the folder."""
    folder = tmp_path_factory.mktemp("suites") / "paper"
    return run_lines("paper", model, str(data), folder, 2, SHORT), folder


def test_the_table_is_what_the_saved_models_say(whole, data):
    lines, folder = whole
    found = json.loads((folder / "suite.json").read_text())
    rows = table(lines)
    assert list(found["sets"]) == ["imagenet", "cifar10", "cifar100", "pets", "flowers102"]
    for name, told in found["sets"].items():
        test = open_data(str(data / name), "val" if name == "imagenet" else "test")
        labels, shares, real = test.labels(0, len(test)), [], []
        assert [run["seed"] for run in told["runs"]] == [0, 1]
        for run in told["runs"]:
            guesses = one_by_one(run["folder"], test)
            hits = sum(guess == label for guess, label in zip(guesses, labels, strict=True))
            assert (run["hits"], run["count"], run["accuracy"]) == (hits, len(test), hits / len(test))
            assert run["rate"] == told["rate"]
            shares.append(hits / len(test))
            if name == "imagenet":
                accepted = [REAL[index % 4 + 1] for index in range(12)]
                counted = [guess in these for guess, these in zip(guesses, accepted, strict=True) if these]
                assert (run["real_hits"], run["real_count"]) == (sum(counted), 9)
                real.append(sum(counted) / 9)
        assert rows[paper_suite.SETS[name].title][:3] == [shown(shares), "2", f"{told['rate']:g}"]
        assert told["mean"] == pytest.approx(np.mean(shares))
        assert told["deviation"] == pytest.approx(np.std(shares, ddof=1))
        if real:
            assert rows["ImageNet ReaL"][:2] == [shown(real), "2"]
    assert len({told["mean"] for told in found["sets"].values()}) > 2, "the stand-ins are too easy to tell anything"


def test_the_papers_numbers_stand_beside(whole):
    rows = table(whole[0])
    assert rows["top-1, %"][3:] == list(suite_table.PAPER_MODELS)
    assert rows["CIFAR-100"][3:] == ["94.55", "93.90", "93.25", "93.51", "–"]
    assert rows["VTAB (19 tasks)"][:4] == ["–", "–", "–", "77.63"]
    assert rows["TPUv3-core-days"][3:] == ["2.5k", "0.68k", "0.23k", "9.9k", "12.3k"]


def test_the_rate_is_chosen_on_what_is_held_out_of_train(whole, data):
    _, folder = whole
    found = json.loads((folder / "suite.json").read_text())
    for name, told in found["sets"].items():
        assert [trial["rate"] for trial in told["tried"]] == list(
            (0.003, 0.01, 0.03, 0.06) if name == "imagenet" else (0.001, 0.003, 0.01, 0.03)
        )
        chosen = max(told["tried"], key=lambda trial: (trial["accuracy"], -trial["loss"]))
        assert told["rate"] == chosen["rate"]
        config = (Path(chosen["folder"]) / "config.toml").read_text()
        assert 'validate_on = "holdout"' in config
        records = [json.loads(line) for line in (Path(chosen["folder"]) / "metrics.jsonl").read_text().splitlines()]
        assert records[-1]["part"] == "holdout"
        # At least one image of each class is held out, however small the share: here one of each.
        assert all((3 * trial["accuracy"]) in (0, 1, 2, 3) for trial in told["tried"])
    final = (folder / "imagenet/seed-1/config.toml").read_text()
    assert "holdout = 0.0" in final
    assert 'validate_on = "none"' in final
    assert "seed = 1" in final


def test_progress_is_told(whole):
    lines = whole[0]
    assert any(
        line.startswith("cifar10: learning rate 0.003: ") and line.endswith("on the held-out 2%") for line in lines
    )
    assert sum(line.startswith("imagenet: chosen: ") for line in lines) == 1
    assert any(line.startswith("flowers102: seed 1: ") and line.endswith("of 21 test images") for line in lines)


def test_what_is_not_the_papers_is_told(whole):
    lines, folder = whole
    (line,) = [line for line in lines if "not the paper's protocol" in line]
    assert all(key in line for key in ("schedule.steps", "data.batch_size", "model.image_size", "runs"))
    assert "workers" not in line
    assert "- imagenet: there is no part test: scored on val" in lines
    assert any(line.startswith("- flowers102: 24 training images instead of 1,020, 3 classes") for line in lines)
    found = json.loads((folder / "suite.json").read_text())
    assert found["papers_protocol"] is False
    assert found["sets"]["pets"]["deviations"]["schedule.steps"] == [500, 3]


def test_the_files_are_what_was_printed(whole):
    lines, folder = whole
    text = (folder / "suite.md").read_text()
    first = next(number for number, line in enumerate(lines) if line.startswith("| top-1"))
    assert text.splitlines()[2:] == lines[first:]
    assert text.startswith("# The paper's transfer suite: ")


def test_stopped_in_the_middle_it_goes_on_and_finds_the_same(model, data, whole, tmp_path, monkeypatch):
    names = tmp_path / "sets.toml"
    names.write_text(f'imagenet = "{data}/imagenet"\npets = "{data}/pets"\nreal = "{data}/real.json"')
    given = (model, str(names), tmp_path / "suite", 2, SHORT)
    steps, plain = [], loop.train_step

    def step(run, state):
        steps.append(run.config.run.folder)
        if len(steps) == 17:  # the second of the sixth run: seed 1 of the first set
            signal.raise_signal(signal.SIGTERM)
        plain(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(Stopped):
        run_lines("paper", *given)
    assert steps[-1] == tmp_path / "suite/imagenet/seed-1"
    assert not (tmp_path / "suite/suite.json").exists()
    lines = run_lines("paper", *given)
    assert len(steps) == 3 * 12, "what was trained is not trained again"
    once = table(whole[0])
    again = table(lines)
    for title in ("ImageNet", "ImageNet ReaL", "Oxford-IIIT Pets"):
        assert again[title] == once[title]
    monkeypatch.setattr(loop, "train_step", lambda run, state: pytest.fail("all of it is finished"))
    assert run_lines("paper", *given) == lines


def test_sets_without_data_are_listed(model, data, tmp_path):
    (tmp_path / "some").mkdir()
    shutil.copytree(data / "pets", tmp_path / "some/pets")
    shutil.copytree(data / "pets", tmp_path / "some/flowers")
    (tmp_path / "some/pets/test/red/1001.png").write_bytes(b"no picture")
    lines = run_lines("paper", model, str(tmp_path / "some"), tmp_path / "suite", 1, [*SHORT, "learning_rate=0.1"])
    assert lines[0] == f"{tmp_path}/some/flowers is no set, did you mean 'flowers102'?"
    assert "pets: learning rate 0.1: the only one, so there is nothing to choose" in lines
    rows = table(lines)
    assert rows["Oxford-IIIT Pets"][1:3] == ["1", "0.1"]
    assert "±" not in rows["Oxford-IIIT Pets"][0]
    assert rows["CIFAR-10"][:3] == ["–", "–", "–"]
    assert "- cifar10 has no data: it is to be had from https://www.cs.toronto.edu/~kriz/cifar.html" in lines
    assert sum("has no data" in line for line in lines) == 4
    assert "- pets: test images that cannot be read and are not counted: 1" in lines
    (told,) = json.loads((tmp_path / "suite/suite.json").read_text())["sets"]["pets"]["runs"]
    assert (told["count"], told["unreadable"], told["accuracy"]) == (11, 1, told["hits"] / 11)
    assert set(json.loads((tmp_path / "suite/suite.json").read_text())["missing"]) == set(paper_suite.SETS) - {"pets"}


def test_what_is_wrong_is_told_before_anything_is_trained(model, data, tmp_path):
    stand_ins.in_parts(tmp_path / "sets/pets", WORDS, train=8, test=4)
    stand_ins.hard(tmp_path / "sets/flowers102/train", WORDS, 8)

    def told(*overrides: str, data=tmp_path / "sets") -> None:
        run_lines("paper", model, str(data), tmp_path / "suite", 1, [*SHORT, *overrides])

    with pytest.raises(DataError, match=r"flowers102: .* has train"):
        told()
    shutil.rmtree(tmp_path / "sets/flowers102")
    with pytest.raises(ConfigError, match=r"pets: data.batch_size = 99 .* 21 "):
        told("batch_size=99")
    with pytest.raises(ConfigError, match="'learning_rate'"):
        told("learningrate=1")
    (tmp_path / "raw.toml").write_text('[tasks.pets]\ndata = "sets/pets"\nraw = true')
    with pytest.raises(ConfigError, match="pets: raw"):
        told(data=tmp_path / "raw.toml")
    (tmp_path / "real.toml").write_text(f'imagenet = "sets/pets"\nreal = "{data}/real.json"')
    with pytest.raises(DataError, match=r"imagenet: .*ReaL"):
        told(data=tmp_path / "real.toml")
    assert not (tmp_path / "suite").exists()
