"""The loop itself: golden curves, the guard, what is written, what a person is told."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
import torch

import vitrail
from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError, Stopped, TrainingError
from vitrail.objectives.base import Outcome
from vitrail.objectives.classification import Classification
from vitrail.objectives.masked_patches import compute_mean_colour
from vitrail.system.ranks import Ranks
from vitrail.training import loop
from vitrail.training.build import can_skip_on_device
from vitrail.training.optim import build_optimizer
from vitrail.training.resolve import resolve, to_toml
from vitrail.training.run_folder import find_differences
from vitrail.training.run_training import run_training

GOLDEN = {
    "softmax": {},
    "sigmoid": {"objective": {"loss": "sigmoid", "head_bias": -4.0}},
    "mixed": {"data": {"mixing": {"mixup": 0.5, "cutmix": 1.0}}, "objective": {"label_smoothing": 0.1}},
    "mean-colour": {"objective": runs.MASKED},
    "colours-4x4": {"objective": {**runs.MASKED, "target": "colours-4x4"}},
    "pixels": {"objective": {**runs.MASKED, "target": "pixels"}},
    "sgd": {"optimizer": {"kind": "sgd", "learning_rate": 0.1}},
    "muon": {"optimizer": {"kind": "muon", "momentum": 0.95, "weight_decay": 0.05}},
}
"""Their losses over twenty steps are in golden_losses.json; `python tests/training/test_loop.py` writes it anew."""
GOLDEN_FILE = runs.HERE / "golden_losses.json"
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(name: str) -> dict:
    sections = GOLDEN[name]
    return {key: {**runs.TREE.get(key, {}), **value} for key, value in sections.items()}


@pytest.mark.parametrize("name", ["softmax", *(pytest.param(n, marks=SLOW) for n in GOLDEN if n != "softmax")])
def test_golden_losses(tmp_path, name):
    run_training(runs.config(tmp_path, **changed(name)))
    golden = json.loads(GOLDEN_FILE.read_text())[name]
    assert runs.losses(tmp_path) == pytest.approx(golden, rel=1e-4)
    assert len(set(golden)) == 20


@SLOW
def test_masked_patches_learn_more_than_the_histogram_of_colours(tmp_path):
    """On real digits: a guess that knows only how common each colour is has the entropy of the histogram as loss."""
    run_training(
        runs.config(
            tmp_path,
            model={"name": "Ti/2", "image_size": 8, "width": 64, "dropout": 0.0, "stochastic_depth": 0.0},
            data={"batch_size": 128, "augmentation": {"crop_area": (1, 1), "crop_ratio": (1, 1), "flip": 0.0}},
            objective=runs.MASKED,
            optimizer={"learning_rate": 3e-3, "clip_norm": None},
            schedule={"steps": 60, "warmup_steps": 10},
            run={"log_every": 10, "checkpoint_every": 60},
        )
    )
    source = open_data("digits", "val")
    images = torch.stack([source.read(index).content for index in range(len(source))])
    counts = np.bincount(compute_mean_colour(images, 2).flatten().numpy())
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    (evaluation,) = [entry for entry in runs.records(tmp_path) if entry["kind"] == "evaluation" and entry["step"] == 60]
    assert evaluation["loss"] < entropy - 0.2
    assert entropy < math.log(len(counts))
    assert vitrail.load(tmp_path).num_classes == 0


@SLOW
def test_masked_autoencoding_predicts_more_than_the_mean_of_a_patch(tmp_path):
    """On real digits: a guess of the mean of a patch has a loss of almost 1, the variance of its normalised pixels."""
    run_training(
        runs.config(
            tmp_path,
            model={"name": "Ti/4", "image_size": 16, "width": 64, "dropout": 0.0, "stochastic_depth": 0.0},
            data={"batch_size": 128, "augmentation": {"crop_area": (1, 1), "crop_ratio": (1, 1), "flip": 0.0}},
            objective={**runs.AUTOENCODED, "hidden": 0.5},
            optimizer={"learning_rate": 3e-3, "clip_norm": None},
            schedule={"steps": 100, "warmup_steps": 10},
            run={"log_every": 10, "checkpoint_every": 100},
        )
    )
    evaluations = [entry["loss"] for entry in runs.records(tmp_path) if entry["kind"] == "evaluation"]
    assert evaluations[-1] < 0.75
    assert vitrail.load(tmp_path).num_classes == 0


class Broken(Classification):
    """Gives no number at some steps."""

    at: tuple[int, ...] = ()
    calls = 0

    def learn(self, *inputs) -> Outcome:
        outcome = super().learn(*inputs)
        type(self).calls += 1
        return outcome._replace(loss=outcome.loss * math.nan) if type(self).calls in self.at else outcome


def broken(monkeypatch, steps: range) -> None:
    monkeypatch.setattr(Broken, "at", tuple(steps))
    monkeypatch.setattr(Broken, "calls", 0)
    monkeypatch.setattr("vitrail.training.build.build_objective", lambda model, **_: Broken(model))


def fuse_optimizers(monkeypatch) -> None:
    """As they are on a GPU: one that is fused can leave out a step by itself, on a CPU too."""

    def build(*given):
        optimizer = build_optimizer(*given)
        for group in optimizer.param_groups:
            group["fused"] = True
        return optimizer

    monkeypatch.setattr("vitrail.training.build.build_optimizer", build)


@pytest.fixture(params=[False, True], ids=["waiting", "deferred"])
def deferred(request, monkeypatch):
    """Whether the optimiser itself leaves out a step."""
    if request.param:
        fuse_optimizers(monkeypatch)
        monkeypatch.setattr("vitrail.training.build.can_skip_on_device", lambda *_: True)


def test_when_a_step_may_be_left_to_the_optimiser(tmp_path):
    """On a GPU by a fused optimiser; the reasons against it, one by one."""
    ranks, plain, normed = Ranks(0, 1, torch.device("cuda")), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    config = runs.config(tmp_path, optimizer={"averaging": None})
    averaging = runs.config(tmp_path, optimizer={"averaging": 0.9})
    fused, loops = (torch.optim.AdamW(plain.parameters(), fused=fused) for fused in (True, False))
    half, whole = torch.bfloat16, torch.float32
    for given, expected in [
        ((plain, fused, config, half, ranks), True),
        ((plain, fused, averaging, whole, ranks), True),
        ((plain, loops, config, half, ranks), False),
        ((plain, fused, config, torch.float16, ranks), False),
        ((plain, fused, config, half, Ranks(0, 1, torch.device("cpu"))), False),
        ((plain, fused, config, half, Ranks(0, 2, torch.device("cuda"))), True),
        ((plain, fused, runs.config(tmp_path, run={"parallel": "fsdp"}), half, Ranks(0, 2, ranks.device)), False),
        ((normed, fused, config, half, ranks), True),
        ((normed, fused, averaging, half, ranks), False),
    ]:
        assert can_skip_on_device(*given) is expected, given


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_counted(tmp_path, monkeypatch, deferred):
    broken(monkeypatch, range(5, 8))
    run = {"most_skipped": 4, "checkpoint_every": 1, "keep": 20}
    run_training(runs.config(tmp_path, run=run))
    four, seven, eight = (runs.tensors(runs.checkpoints(tmp_path)[step - 1]) for step in (4, 7, 8))
    assert all(torch.equal(four[name], seven[name]) for name in four)
    assert not all(torch.equal(four[name], eight[name]) for name in four)
    told = {entry["step"]: entry["skipped"] for entry in runs.records(tmp_path) if entry["kind"] == "train"}
    assert [told[step] for step in (4, 5, 7, 20)] == [0, 1, 3, 3]


@pytest.mark.parametrize(
    ("optimizer", "broken_at", "log_every"),
    [
        ({"kind": "adamw", "averaging": 0.9}, range(5, 8), 6),
        pytest.param({"kind": "sgd", "momentum": 0.9}, range(1, 3), 1, marks=SLOW),
        pytest.param({"kind": "muon", "weight_decay": 0.1}, range(5, 8), 6, marks=SLOW),
    ],
    ids=["AdamW, an average, rare records", "SGD, the first steps left out, frequent records", "Muon, with decay"],
)
def test_not_waiting_for_the_norm_changes_nothing(tmp_path, monkeypatch, optimizer, broken_at, log_every):
    """Average, sums and counts follow a step later, and are the same bit for bit."""
    fuse_optimizers(monkeypatch)
    ends, told = [], []
    for name, defer in (("waiting", False), ("deferred", True)):
        with monkeypatch.context() as patch:
            broken(patch, broken_at)
            patch.setattr("vitrail.training.build.can_skip_on_device", lambda *_, defer=defer: defer)
            run = {"log_every": log_every, "checkpoint_every": 7, "evaluate_every": 9}
            run_training(runs.config(tmp_path / name, optimizer=optimizer, run=run))
        ends.append(runs.tensors(runs.checkpoints(tmp_path / name)[-1]))
        told.append([{**entry, "clock": None} for entry in runs.records(tmp_path / name)])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert told[0] == told[1]
    assert (told[0][-1]["step"], told[0][-2]["skipped"]) == (20, len(broken_at))


@pytest.mark.parametrize(
    ("optimizer", "broken_at"),
    [
        pytest.param({"kind": "muon", "averaging": 0.9, "eps": 1e-4}, range(1, 3), marks=SLOW),
        pytest.param({"kind": "sgd", "momentum": 0.9, "averaging": None}, range(19, 21), marks=SLOW),
    ],
    ids=["Muon and AdamW, the first steps left out", "SGD without an average, the last steps left out"],
)
def test_steps_that_are_recorded_make_the_same_run(tmp_path, monkeypatch, optimizer, broken_at):
    """All but the graphs, in whose place the functions are called; and going on after a stop."""
    fuse_optimizers(monkeypatch)
    monkeypatch.setattr("vitrail.training.build.check_graphs", lambda *_: None)
    monkeypatch.setattr("vitrail.training.graph_step.CudaGraph", lambda function, kept: function)
    run, ordinary = {"log_every": 3, "checkpoint_every": 7, "evaluate_every": 9}, loop.train_step

    def stops_once(run, state):
        if state.progress.step == 10 and not state.progress.skipped_in_a_row:
            monkeypatch.setattr(loop, "train_step", ordinary)
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    for name, graphs in (("plain", False), ("recorded", True), ("stopped", True)):
        broken(monkeypatch, broken_at)
        given = runs.config(tmp_path / name, optimizer=optimizer, run={**run, "graphs": graphs})
        if name == "stopped":
            monkeypatch.setattr(loop, "train_step", stops_once)
            with pytest.raises(Stopped, match="after step 11 of 20"):
                run_training(given)
        run_training(given)
    plain, recorded = (runs.records(tmp_path / name) for name in ("plain", "recorded"))
    for one, other in zip(plain, recorded, strict=True):
        for name, value in one.items():
            told = value if isinstance(value, str) else pytest.approx(value, rel=1e-3, nan_ok=True)
            assert other[name] == told, (one["step"], name)
    assert recorded[-2]["skipped"] == len(broken_at)
    one, other, again = (runs.tensors(runs.checkpoints(tmp_path / n)[-1]) for n in ("plain", "recorded", "stopped"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
        assert torch.equal(other[name], again[name]), name


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch, deferred):
    broken(monkeypatch, range(8, 100))
    with pytest.raises(TrainingError, match=r"step 12.*checkpoint of step 9"):
        run_training(runs.config(tmp_path, run={"most_skipped": 5}))
    kept = runs.tensors(runs.checkpoints(tmp_path)[-1])
    assert all(torch.isfinite(tensor).all() for tensor in kept.values())
    monkeypatch.undo()
    assert run_training(runs.config(tmp_path)).steps == 20  # goes on from there, with what made it fail mended


def test_signals_save_and_stop(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run_training(runs.config(whole))
    ordinary = loop.train_step

    def step(run, state):
        if state.progress.step in (6, 12):
            signal.raise_signal(signal.SIGTERM if state.progress.step == 6 else signal.SIGINT)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    stopped = tmp_path / "stopped"
    before = signal.getsignal(signal.SIGINT)
    for at in (7, 13):
        with pytest.raises(Stopped, match=f"step {at} of 20"):
            run_training(runs.config(stopped))
        assert runs.checkpoints(stopped)[-1].name == f"step-{at:08}"
    assert signal.getsignal(signal.SIGINT) is before
    run_training(runs.config(stopped))
    runs.assert_same_run(whole, stopped)


@pytest.mark.slow
def test_the_command_stopped_by_a_signal_says_so_with_exit_code_3(tmp_path):
    file = tmp_path / "long.toml"
    file.write_text(to_toml(runs.config(tmp_path / "run", schedule={"steps": 100_000, "warmup_steps": 4})))
    command = [sys.executable, "-m", "vitrail", "train", str(file)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    limit = time.monotonic() + 60
    while not (tmp_path / "run/metrics.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 3, stderr
    last = stderr.splitlines()[-1]
    step = int(re.search(r"step (\d+) of 100000", last).group(1))
    assert runs.checkpoints(tmp_path / "run")[-1].name == f"step-{step:08}"


def test_a_finished_run_started_again_is_finished_at_once(tmp_path):
    first = run_training(runs.config(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert run_training(runs.config(tmp_path)) == first
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_what_is_in_the_run_folder(tmp_path):
    result = run_training(runs.config(tmp_path, run={"trackers": ("tensorboard",)}))
    names = {path.name for path in tmp_path.iterdir()} - {".lock", ".data", ".weights", "best"}
    files = {"config.toml", "metrics.jsonl", "best.json", "curves.png", "curves.svg"}
    assert names == {*files, "tensorboard", "checkpoints", "model"}
    last = runs.records(tmp_path)[-1]
    assert result.evaluation == {name: last[name] for name in ("loss", "accuracy", "top5")}
    model = vitrail.load(tmp_path)
    assert model.labels == tuple("0123456789")
    kept = runs.tensors(runs.checkpoints(tmp_path)[-1])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[f"average/model.{name}"]), name
    entry = runs.records(tmp_path, clock=True)[0]
    assert entry["clock"].keys() == {"seconds", "images_per_second", "flops_per_second"}
    assert entry["step"] == 1
    card = (tmp_path / "model/README.md").read_text()
    assert "## Training" in card
    assert 'kind = "classification"' in card


def test_the_best_checkpoint_stays(tmp_path):
    run_training(runs.config(tmp_path, run={"evaluate_every": 1, "keep": 1, "checkpoint_every": 20}))
    evaluations = [entry for entry in runs.records(tmp_path) if entry["kind"] == "evaluation"]
    accuracies = [entry["accuracy"] for entry in evaluations]
    best = evaluations[accuracies.index(max(accuracies))]["step"]
    kept = {int(path.name[5:]) for path in runs.checkpoints(tmp_path)}
    assert kept == {best, 20}


def test_an_evaluation_that_a_signal_interrupts_is_made_up_for(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run_training(runs.config(whole))
    ordinary, calls = loop.measure, []

    def measure(run, state, loader):
        calls.append(state.progress.step)
        if len(calls) == 2:  # while it measures after step 16
            signal.raise_signal(signal.SIGTERM)
        return ordinary(run, state, loader)

    monkeypatch.setattr(loop, "measure", measure)
    stopped = tmp_path / "stopped"
    with pytest.raises(Stopped, match="step 16 of 20"):
        run_training(runs.config(stopped))
    assert [entry["step"] for entry in runs.records(stopped) if entry["kind"] == "evaluation"] == [8]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", lambda run, state: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_training(runs.config(stopped))  # it is made up for, and the process dies before it is in a checkpoint
    assert [entry["step"] for entry in runs.records(stopped) if entry["kind"] == "evaluation"] == [8, 16]
    run_training(runs.config(stopped))
    runs.assert_same_run(whole, stopped)


@pytest.mark.slow
def test_a_record_may_begin_before_a_stop_and_end_after_it(tmp_path, monkeypatch):
    """What is summed since the last record is a part of a checkpoint."""
    run = {"log_every": 5, "checkpoint_every": 100}
    run_training(runs.config(tmp_path / "whole", run=run))
    ordinary = loop.train_step

    def step(run, state):
        if state.progress.step in (6, 12):
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    for _ in range(2):
        with pytest.raises(Stopped):
            run_training(runs.config(tmp_path / "stopped", run=run))
    run_training(runs.config(tmp_path / "stopped", run=run))
    runs.assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    speeds = [e["clock"].get("images_per_second") for e in runs.records(tmp_path / "stopped", clock=True)]
    assert all(speed > 50 for speed in speeds if speed is not None)


@SLOW
def test_the_scale_of_fp16_is_a_part_of_a_checkpoint(tmp_path, monkeypatch):
    """People use it on GPUs alone; torch computes it on a CPU as well, so it can be shown here."""
    monkeypatch.setattr("vitrail.training.build.choose_precision", lambda name, ranks: torch.float16)
    run_training(runs.config(tmp_path / "whole"))
    scale = runs.state(runs.checkpoints(tmp_path / "whole")[-1])["scaler"]
    assert scale["scale"] >= 1
    assert runs.losses(tmp_path / "whole") == pytest.approx(json.loads(GOLDEN_FILE.read_text())["softmax"], abs=0.06)
    ordinary = loop.train_step

    def step(run, state):
        if state.progress.step == 6:
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(Stopped):
        run_training(runs.config(tmp_path / "stopped"))
    run_training(runs.config(tmp_path / "stopped"))
    runs.assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_other_images_are_another_run(tmp_path, monkeypatch):
    """Also where only their names differ, and the command is the same."""
    from pictures import make_folder

    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "photos", {"cat": 20, "dog": 20})
    tiny = {"model": {"in_channels": 3}, "data": {"source": "photos", "batch_size": 8}}
    run_training(runs.config("run", **tiny))
    (tmp_path / "photos").rename(tmp_path / "moved")
    run_training(runs.config("run", model={"in_channels": 3}, data={"source": "moved", "batch_size": 8}))
    make_folder(tmp_path / "photos", {"oak": 20, "elm": 20})
    with pytest.raises(ConfigError, match=r"images.*photos"):
        run_training(runs.config("run", **tiny))


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("fp8", True)])
def test_what_changes_the_numbers_is_another_run(tmp_path, key, value):
    one = runs.config(tmp_path)
    other = one.model_copy(update={"run": one.run.model_copy(update={key: value})})
    assert list(find_differences(one, other)) == [(f"run.{key}", getattr(one.run, key), value)]
    assert not list(find_differences(one, runs.config(tmp_path, run={"keep": 7, "threads": 1})))


def test_other_weights_are_another_run(tmp_path):
    """Also where they lie in the same place."""
    small = {name: value for name, value in runs.MODEL.items() if name != "name"}
    for seed in (0, 1):
        vitrail.save(vitrail.create_model("Ti/4", seed=seed, num_classes=3, **small), tmp_path / "weights")
        tree = runs.tree(tmp_path / "run", schedule={"steps": 2, "warmup_steps": 0})
        tree["model"] = {"weights": str(tmp_path / "weights")}
        if not seed:
            run_training(runs.resolve(tree))
            run_training(runs.resolve(tree))  # which is finished
            continue
        with pytest.raises(ConfigError, match="other weights"):
            run_training(runs.resolve(tree))


def test_a_share_to_hold_out_of_data_that_has_its_own_val_is_not_dropped_in_silence(tmp_path, monkeypatch):
    from pictures import make_folder

    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, {"cat": 10, "dog": 10})

    def unused(**data) -> float | None:
        events = {}
        config = runs.config(
            tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
            model={"in_channels": 3},
            data={"source": "photos", "batch_size": 8, **data},
            schedule={"steps": 1, "warmup_steps": 0},
        )
        run_training(config, on_event=lambda kind, values: events.setdefault(kind, values))
        return events["training"]["unused_holdout"]

    assert unused(holdout=0.25) == 0.25
    assert unused(holdout=0.25, validate_on="none") == 0.25
    assert unused(holdout=0.25, validate_on="holdout") is None
    assert unused(holdout=0.0) is None
    assert unused() is None


def test_labels_that_training_has_not_are_refused_before_it_starts(tmp_path):
    from pictures import make_tar

    make_tar(tmp_path / "data/train-0.tar", [0, 1] * 20)
    make_tar(tmp_path / "data/val-0.tar", [0, 1, 2] * 4)
    with pytest.raises(DataError, match="classes of val"):
        run_training(runs.config(tmp_path / "run", model={"in_channels": 3}, data={"source": str(tmp_path / "data")}))
    assert not (tmp_path / "run").exists()


def test_weights_of_lower_precision_are_trained_in_full(tmp_path):
    model = vitrail.create_model(**runs.MODEL, num_classes=3, seed=0).to(torch.bfloat16)
    vitrail.save(model, tmp_path / "half")
    sections = {name: dict(values) for name, values in runs.tree(tmp_path / "run").items()}
    sections["model"] = {"weights": str(tmp_path / "half")}
    run_training(resolve(sections))
    assert {tensor.dtype for tensor in vitrail.load(tmp_path / "run").state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(
    "run", [{"gradient_checkpointing": True}, pytest.param({"precision": "bf16"}, marks=SLOW)], ids=str
)
def test_ways_to_compute_change_little(tmp_path, run):
    run_training(runs.config(tmp_path, run=run))
    golden = json.loads(GOLDEN_FILE.read_text())["softmax"]
    assert runs.losses(tmp_path) == pytest.approx(golden, abs=0.06 if "precision" in run else 1e-4)


def test_an_evaluation_that_is_no_number_is_never_the_best(tmp_path, monkeypatch):
    ordinary = loop.measure

    def measure(run, state, loader):
        found = ordinary(run, state, loader)
        return {**found, "accuracy": torch.tensor([math.nan, 1.0])} if state.progress.step == 8 else found

    monkeypatch.setattr(loop, "measure", measure)
    run_training(runs.config(tmp_path))
    assert runs.state(runs.checkpoints(tmp_path)[-1])["best"][0] in (16, 20)


@pytest.mark.parametrize(("size", "allowed"), [(32, False), (16, True)])
def test_attention_by_cudnn_is_left_where_it_is_not_sound(tmp_path, monkeypatch, size, allowed):
    """64 tokens without a class token; 16."""
    found = []
    ordinary = loop.train_step

    def step(run, state):
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    run_training(
        runs.config(
            tmp_path,
            model={"image_size": size, "pool": "average"},
            schedule={"steps": 1, "warmup_steps": 0},
            run={"evaluate_every": None},
        )
    )
    assert found == [allowed and before]
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    torch.set_num_threads(1)
    found = {}
    for golden_name in GOLDEN:
        with tempfile.TemporaryDirectory() as golden_folder:
            run_training(runs.config(golden_folder, **changed(golden_name)))
            found[golden_name] = runs.losses(Path(golden_folder))
    GOLDEN_FILE.write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 20])
def test_a_keyboard_interrupt_from_the_listener_saves_and_stops(tmp_path, step):
    def interrupt(kind, values):
        if kind == "step" and values["step"] == step:
            raise KeyboardInterrupt

    run_training(runs.config(tmp_path / "whole"))
    with pytest.raises(Stopped, match="the same command"):
        run_training(runs.config(tmp_path / "stopped"), on_event=interrupt)
    assert not (tmp_path / "stopped/model").exists()
    result = run_training(runs.config(tmp_path / "stopped"))
    assert result.steps == 20
    weights = "model/model.safetensors"
    assert (tmp_path / "stopped" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


def test_events_of_a_training_in_order(tmp_path):
    events = []
    run_training(
        runs.config(tmp_path, run={"evaluate_every": 10, "log_every": 10, "checkpoint_every": 10}),
        on_event=lambda kind, values: events.append((kind, values)),
    )
    kinds = [kind for kind, _ in events if kind != "progress"]
    assert kinds[0] == "training"
    assert kinds[-1] == "trained"
    assert events[-1][1]["why_early"] is None
    evaluating = [values["done"] / values["total"] for kind, values in events if kind == "progress"]
    assert evaluating[0] == 0
    assert evaluating.count(1) == 2
    assert [values["step"] for kind, values in events if kind == "step"] == list(range(1, 21))
    assert [values["step"] for kind, values in events if kind == "evaluation"] == [10, 20]
    after = kinds.index("step") + 9
    assert kinds[after : after + 4] == ["step", "train", "evaluation", "checkpoint"]
    assert "NVIDIA" in events[0][1]["computed_by"]
    json.dumps([values for _, values in events])  # plain data
