"""A training that fits into a time: what is chosen, and that it ends in time."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import runs
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from striped import stripes

import vitrail
from vitrail.errors import ConfigError
from vitrail.training.run_training import run_training
from vitrail.workflows import time_budget
from vitrail.workflows.finetune import finetune
from vitrail.workflows.time_budget import ImageCounts, StepTime, choose_reading, plan_training, time_training

CPU = torch.device("cpu")
QUIET = ["run.trackers=[]", "run.report=false"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    run_training(runs.config(folder, model={"in_channels": 3}, schedule={"steps": 12}))
    return folder


def plan(monkeypatch, seconds, paces, wanted=200, **changes):
    """A plan for 400 images, of which an image takes so long at each image size."""
    monkeypatch.setattr(time_budget, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(time_budget, "time_training", lambda config, *_: paces[config.model.image_size])
    config = runs.config("unused", model={"image_size": 24}, schedule={"steps": wanted, "warmup_steps": 0})
    images = ImageCounts(*changes.pop("images", (400, 0, 0)))
    options = {"images": images, "pixel_bytes": 1, "device": CPU, "fits_head": False, **changes}
    return plan_training(config, [None, (16, 16)], "digits", None, seconds=seconds, **options)


SLOW, FAST = StepTime(0.0, 0.1), StepTime(0.0, 0.01)
"""A batch of 32 takes 3.2 s and 0.32 s."""
PACES = {(24, 24): SLOW, (16, 16): FAST}


def test_the_larger_size_if_there_is_time(monkeypatch):
    chosen = plan(monkeypatch, 400, PACES)
    assert chosen.config.model.image_size == (24, 24)
    assert chosen.config.schedule.steps == pytest.approx(0.8 * 400 / 3.2, abs=1)
    assert chosen.seconds <= 400
    assert chosen.config.run.most_seconds == pytest.approx(400, abs=1)


def test_the_smaller_size_if_the_larger_allows_too_few_steps(monkeypatch):
    chosen = plan(monkeypatch, 40, PACES)
    assert chosen.config.model.image_size == (16, 16)
    assert chosen.config.schedule.steps == pytest.approx(0.8 * 40 / 0.32, abs=1)


def test_no_training_if_there_is_no_time(monkeypatch):
    assert plan(monkeypatch, 5, PACES) is None


def test_no_more_steps_than_wanted(monkeypatch):
    assert plan(monkeypatch, 1e6, PACES, wanted=30).config.schedule.steps == 30


def test_less_than_an_epoch_is_no_training(monkeypatch):
    """20 steps of 32 are 640 images."""
    assert plan(monkeypatch, 40, {(24, 24): SLOW, (16, 16): FAST}, images=(10_000, 0, 0)) is None


def test_evaluations_and_the_head_take_their_time_too(monkeypatch):
    alone = plan(monkeypatch, 400, PACES).config.schedule.steps
    with_more = plan(monkeypatch, 400, PACES, images=(400, 100, 0), fits_head=True).config.schedule.steps
    seconds = ((time_budget.EVALUATIONS + 2) * 100 + 400) * SLOW.evaluating
    assert alone - with_more == pytest.approx(seconds / 3.2, abs=1)


def test_evaluations_do_not_count_twice_and_a_test_is_counted(monkeypatch):
    limit = plan(monkeypatch, 400, PACES, images=(400, 100, 0)).config.run.most_seconds
    assert limit == pytest.approx(400 - 100 * SLOW.evaluating, abs=1), "the loop's own evaluations are inside its time"
    tested = plan(monkeypatch, 400, PACES, images=(400, 100, 1000)).config.run.most_seconds
    assert tested == pytest.approx(400 - 1000 * SLOW.evaluating, abs=1)


def test_what_the_user_gives_stays(monkeypatch):
    chosen = plan(monkeypatch, 400, PACES, given_keys={"in_memory", "most_seconds"})
    assert not chosen.config.data.in_memory
    assert chosen.config.run.most_seconds is None
    assert plan(monkeypatch, 400, PACES).config.data.in_memory


@pytest.mark.parametrize(
    ("pixel_bytes", "reading", "device", "in_memory", "has_reader"),
    [
        (1000, 1.0, "cpu", True, False),
        (1 << 40, 0.01, "cpu", False, False),
        (1 << 40, 1.0, "cpu", False, True),
        (1 << 40, 1.0, "cuda", False, True),
    ],
)
def test_who_reads(monkeypatch, pixel_bytes, reading, device, in_memory, has_reader):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    chosen = choose_reading(pixel_bytes, StepTime(reading, 1.0), torch.device(device))
    assert (chosen["in_memory"], chosen["workers"] > 0) == (in_memory, has_reader)


def test_real_steps_are_measured_and_nothing_is_written(here, pretrained):
    config = runs.config("run")
    measured = time_training(config, "digits", None, CPU)
    assert measured.reading > 0
    assert measured.training > 0
    model = vitrail.load(pretrained)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tree = runs.tree("run", data={"augmentation": {}})
    start = {**tree, "model": {"weights": str(pretrained)}}
    stripes(here / "data", classes=3, images=8)
    start["data"] = {"source": "data", "batch_size": 8}
    time_training(vitrail.training.resolve.resolve(start), "data", model, CPU)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert sorted(path.name for path in here.iterdir()) == ["data"]


def test_a_step_that_something_else_slowed_does_not_count(monkeypatch):
    """Of five steps the second and the fourth take a second more each."""
    pauses = iter([0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    train_step = time_budget.train_step

    def train_slowly(run, state):
        time.sleep(next(pauses))
        train_step(run, state)

    monkeypatch.setattr(time_budget, "train_step", train_slowly)
    config = runs.config("run")
    measured = time_training(config, "digits", None, CPU)
    assert next(pauses, None) is None
    assert measured.training * min(time_budget.TIMED_IMAGES, config.data.batch_size) < 1


def test_slow_steps_are_measured_once(monkeypatch):
    monkeypatch.setattr(time_budget, "TIMED_SECONDS", 0.0)
    steps = []
    train_step = time_budget.train_step
    monkeypatch.setattr(time_budget, "train_step", lambda run, state: (steps.append(1), train_step(run, state)))
    time_training(runs.config("run"), "digits", None, CPU)
    assert len(steps) == 2, "one to warm up, and one that counts"


@pytest.mark.slow
def test_a_training_in_minutes_starts_from_a_fitted_head_and_says_how_long(here, pretrained):
    stripes(here / "photos", classes=3, images=30)
    events = []
    result = finetune("photos", pretrained, minutes=0.5, settings=QUIET, on_event=lambda *event: events.append(event))
    kinds = [kind for kind, _ in events if kind != "progress"]
    assert kinds[:3] == ["data", "choices", "training"]
    choices = dict(events)["choices"]
    assert 0 < choices["seconds"] < 30
    assert choices["step_seconds"] > 0
    assert result.config.model.keep_head
    assert result.config.optimizer.kind == "adamw"
    records = [record for record in runs.records(result.folder) if record["kind"] == "evaluation"]
    assert records[0]["step"] == 0, "the head itself is a candidate"
    assert records[0]["accuracy"] > 0.6, "and already knows the classes"
    assert result.evaluated == 18
    assert result.judged.images == 18
    assert result.folder.name == "photos-from-pretrained"
    again = finetune("photos", pretrained, minutes=0.5, settings=QUIET)
    assert again == result, "what was planned then holds"


def test_too_little_time_gives_a_linear_head(here, pretrained, monkeypatch):
    monkeypatch.setattr(time_budget, "time_training", lambda *_: StepTime(100.0, 100.0))
    stripes(here / "photos", classes=3, images=20)
    messages = []
    result = finetune(
        "photos",
        pretrained,
        minutes=1,
        settings=QUIET,
        on_event=lambda kind, values: messages.append(values["text"]) if kind == "message" else None,
    )
    assert result.config is None
    assert result.folder.name == "photos-quick-from-pretrained"
    assert any("would take longer than 1 min" in text for text in messages)


def test_on_a_cpu_some_minutes_are_the_default(here, pretrained):
    stripes(here / "photos", classes=3, images=8)
    events = {}
    finetune("photos", pretrained, settings=[*QUIET, "run.device=cpu"], on_event=events.__setitem__)
    assert events["choices"]["minutes"] == time_budget.CPU_MINUTES
    finetune("photos", pretrained, settings=[*QUIET, "schedule.steps=3", "folder=mine"], on_event=events.__setitem__)
    assert events["choices"]["minutes"] is None, "a length that was given is not planned"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"minutes": 0}, "above 0"),
        ({"minutes": float("nan")}, "above 0"),
        ({"minutes": 5, "quick": True}, "--quick or --minutes"),
        ({"minutes": 5, "sweep": True}, "--sweep"),
        ({"minutes": 5, "settings": ["schedule.steps=3"]}, "schedule.steps"),
    ],
)
def test_minutes_that_contradict(here, options, words):
    stripes(here / "photos", classes=2, images=4)
    with pytest.raises(ConfigError, match=words):
        finetune("photos", **options)
    assert not (here / "runs").exists()


def test_a_run_is_not_taken_over_by_another_model(here, pretrained, monkeypatch):
    monkeypatch.setattr(time_budget, "time_training", lambda *_: StepTime(1e-3, 1e-3))
    stripes(here / "photos", classes=3, images=8)
    finetune("photos", pretrained, folder="mine", minutes=0.5, settings=[*QUIET, "run.most_seconds=1"])
    other = vitrail.load(pretrained)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(ConfigError, match="another model"):
        finetune("photos", other, folder="mine", minutes=0.5, settings=QUIET)
    with pytest.raises(ConfigError, match="another model"):
        finetune("photos", "scratch", folder="mine", minutes=0.5, settings=QUIET)


def test_a_test_folder_without_classes_does_not_report(here, pretrained):
    """As in many competitions: train/cat, train/dog, and test/*.jpg."""
    stripes(here / "data/train", classes=3, images=12)
    (here / "data/test").mkdir()
    for number, path in enumerate(sorted((here / "data/train").glob("*/0*.png"))[:5]):
        (here / f"data/test/{number}.png").write_bytes(path.read_bytes())
    result = finetune("data", pretrained, settings=[*QUIET, "schedule.steps=4"])
    assert result.config.data.divide_validation == "cross-fit"
    assert not result.flatters


def test_a_test_split_that_chooses_is_divided(here, pretrained):
    stripes(here / "data/train", classes=3, images=12)
    stripes(here / "data/test", classes=3, images=5)
    result = finetune("data", pretrained, settings=[*QUIET, "schedule.steps=4", "data.validate_on=test"])
    assert result.config.data.divide_validation == "cross-fit"
    assert (result.evaluated, result.flatters) == (15, False)
    whole = finetune(
        "data",
        pretrained,
        folder="mine",
        settings=[*QUIET, "schedule.steps=4", "validate_on=test", "divide_validation=no"],
    )
    assert whole.flatters, "and says so"


def test_a_test_split_reports(here, pretrained):
    stripes(here / "data/train", classes=3, images=12)
    stripes(here / "data/test", classes=3, images=5)
    result = finetune("data", pretrained, settings=[*QUIET, "schedule.steps=10"])
    assert result.config.data.divide_validation == "no"
    assert result.evaluated == 15
    assert result.accuracy == vitrail.evaluate(result.model, "data", split="test").accuracy


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("minutes", [1, 3])
def test_it_ends_in_time(tmp_path, minutes):
    """240 crops of two photographs, with pane, as a command: everything from the start of Python on."""
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        (tmp_path / "photos" / name).mkdir(parents=True)
        picture = Image.fromarray(photo)
        for number in range(120):
            left, top = 37 * number % 480, 23 * number % 267
            picture.crop((left, top, left + 160, top + 160)).save(tmp_path / f"photos/{name}/{number:03}.jpg")
    began = time.monotonic()
    command = [sys.executable, "-m", "vitrail", "finetune", "--data", "photos", "--minutes", str(minutes)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    seconds = time.monotonic() - began
    assert (tmp_path / "runs/photos/report.html").exists() or (tmp_path / "runs/photos-quick/report.html").exists()
    assert seconds <= 1.2 * 60 * minutes
