"""A run folder read back, finished or not: its metrics, its checkpoints, its last and its best weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import runs
import torch

import vitrail
from vitrail.errors import ConfigError, Stopped, TrainingError, WeightsError
from vitrail.training import loop
from vitrail.training.run_training import run_training
from vitrail.training.saved_run import Run

ACCURACIES = {8: 0.5, 16: 0.75, 20: 0.25}
"""What evaluations are made to measure: the best is of step 16 of 20."""
WRITTEN_BEFORE = Path(__file__).parent / "written_by_9b16ebf" / "run"


def train(folder: Path, accuracies: dict[int, float] = ACCURACIES, stop_at: int | None = None, **sections) -> Path:
    """Train with planted accuracies; with `stop_at`, ask at that step to stop, which the next step then does."""

    def listen(kind, values) -> None:
        if kind == "step" and values["step"] == stop_at:
            raise KeyboardInterrupt

    def measure(run, state, loader):
        return {"loss": torch.tensor([1.0, 1.0]), "accuracy": torch.tensor([accuracies[state.progress.step], 1.0])}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "measure", measure)
        config = runs.config(folder, **sections)
        if stop_at is None:
            run_training(config, on_event=listen)
        else:
            with pytest.raises(Stopped):
                run_training(config, on_event=listen)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("finished") / "x")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("stopped") / "x", stop_at=17)


def assert_weights(model, checkpoint: Path, kind: str = "average") -> None:
    """The model has the weights that a checkpoint holds."""
    saved = runs.tensors(checkpoint)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[f"{kind}/model.{name}"]), name


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08}"


def test_metrics_are_columns_of_one_length(finished):
    run = Run(finished)
    train_columns, evaluation = run.metrics["train"], run.metrics["evaluation"]
    assert train_columns["step"] == list(range(1, 21))
    assert train_columns["loss"] == runs.losses(finished)
    assert {len(column) for column in train_columns.values()} == {20}
    assert all(rate > 0 for rate in train_columns["images_per_second"])
    assert (evaluation["step"], evaluation["accuracy"]) == ([8, 16, 20], list(ACCURACIES.values()))
    assert evaluation["part"] == ["val"] * 3
    assert "clock" not in train_columns
    assert "kind" not in train_columns


def test_what_a_record_does_not_have_is_nan(tmp_path, finished):
    folder = shutil.copytree(finished, tmp_path / "x")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    del first["gradient_norm"]
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    norms = Run(folder).metrics["train"]["gradient_norm"]
    assert math.isnan(norms[0])
    assert len(norms) == 20


def test_a_finished_run(finished):
    run = Run(str(finished))
    assert run.is_finished
    assert run.folder == finished
    assert run.config.schedule.steps == 20
    assert run.best == (16, "accuracy", 0.75)
    assert run.checkpoints[-1] == (20, checkpoint_of(finished, 20))
    assert json.loads((finished / "best.json").read_text())["step"] == 16
    assert_weights(run.load(), checkpoint_of(finished, 20))
    assert_weights(run.load("best"), checkpoint_of(finished, 16))
    assert run.load("best", dtype=torch.bfloat16).head.weight.dtype == torch.bfloat16


def test_the_best_weights_are_a_model_like_any_other(finished):
    best = vitrail.load(finished, which="best")
    assert_weights(best, checkpoint_of(finished, 16))
    assert_weights(vitrail.load(finished / "best"), checkpoint_of(finished, 16))
    assert_weights(vitrail.load(finished), checkpoint_of(finished, 20))
    last = vitrail.load(finished)
    assert (best.labels, best.preprocessing, best.learned_from) == (last.labels, last.preprocessing, last.learned_from)
    assert 0 < best.training_cost.flops < last.training_cost.flops
    assert "step 16" in (finished / "best" / "README.md").read_text()


def test_when_the_last_weights_are_the_best_there_is_one_folder(tmp_path):
    folder = train(tmp_path / "x", {8: 0.5, 16: 0.6, 20: 0.7})
    assert not (folder / "best").exists()
    assert_weights(vitrail.load(folder, which="best"), checkpoint_of(folder, 20))
    assert_weights(Run(folder).load("best"), checkpoint_of(folder, 20))


def test_without_an_average_the_weights_themselves_are_the_best(tmp_path):
    folder = train(tmp_path / "x", optimizer={"averaging": None})
    assert_weights(Run(folder).load("best"), checkpoint_of(folder, 16), "objective")


def test_a_stem_with_running_statistics_is_read_from_a_checkpoint(tmp_path):
    """Its counters have no dimensions, which a checkpoint cannot hold."""
    stem = {"conv_stem": [(8, 3, 2), (8, 3, 2)]}
    folder = train(tmp_path / "x", stop_at=17, model={**runs.TREE["model"], **stem})
    model = Run(folder).load("best")
    assert model.training is False
    assert [b.item() for name, b in model.named_buffers() if name.endswith("num_batches_tracked")] == [16, 16]


def test_an_unfinished_run(stopped):
    run = Run(stopped)
    assert not run.is_finished
    assert run.best == (16, "accuracy", 0.75)
    last = run.load()
    assert_weights(last, checkpoint_of(stopped, 18))
    assert_weights(run.load("best"), checkpoint_of(stopped, 16))
    assert (last.num_classes, last.labels, last.training) == (10, tuple("0123456789"), False)
    assert last.learned_from
    with torch.inference_mode():
        assert last(torch.zeros(1, 1, 16, 16)).shape == (1, 10)


def test_evaluations_after_the_newest_checkpoint_do_not_count(tmp_path, stopped):
    folder = shutil.copytree(stopped, tmp_path / "x")
    shutil.rmtree(checkpoint_of(folder, 18))
    checkpoint_of(folder, 16).rename(checkpoint_of(folder, 10))
    assert Run(folder).best is not None
    assert Run(folder).best.step == 8


def test_a_damaged_checkpoint_is_passed_over(tmp_path, stopped):
    folder = shutil.copytree(stopped, tmp_path / "x")
    (checkpoint_of(folder, 18) / "state.json").write_text("{}")
    assert_weights(Run(folder).load(), checkpoint_of(folder, 16))
    (checkpoint_of(folder, 16) / "state.json").write_text("{}")
    with pytest.raises(TrainingError, match="step 16"):
        Run(folder).load("best")
    assert sorted(path.name for path in folder.glob("checkpoints/*"))[-1] == "step-00000018"  # nothing was renamed


def test_a_resumed_run_writes_its_best(tmp_path, stopped):
    folder = shutil.copytree(stopped, tmp_path / "x")
    train(folder)
    assert_weights(vitrail.load(folder, which="best"), checkpoint_of(folder, 16))
    train(folder)  # finished already: it is written again, and nothing else happens
    assert_weights(vitrail.load(folder, which="best"), checkpoint_of(folder, 16))


def test_a_finished_run_of_an_earlier_vitrail_has_its_best_in_a_checkpoint(tmp_path, finished):
    folder = shutil.copytree(finished, tmp_path / "x")
    shutil.rmtree(folder / "best")
    (folder / "best.json").unlink()
    with pytest.raises(WeightsError, match=r"vitrail\.Run"):
        vitrail.load(folder, which="best")
    assert_weights(Run(folder).load("best"), checkpoint_of(folder, 16))
    train(folder)
    assert_weights(vitrail.load(folder, which="best"), checkpoint_of(folder, 16))


def test_an_old_checkpoint_says_nothing_about_its_model():
    run = Run(WRITTEN_BEFORE)
    assert not run.is_finished
    assert run.metrics["train"]["step"][-1] == 10
    with pytest.raises(TrainingError, match="earlier vitrail"):
        run.load()


def test_a_run_without_evaluations_has_no_best(tmp_path):
    folder = train(tmp_path / "x", data={"validate_on": "none", **runs.TREE["data"]}, run={"evaluate_every": None})
    run = Run(folder)
    assert run.best is None
    assert run.metrics["evaluation"] == {"step": []}
    assert not (folder / "best.json").exists()
    with pytest.raises(ConfigError, match="evaluated"):
        run.load("best")
    with pytest.raises(WeightsError, match="evaluated"):
        vitrail.load(folder, which="best")


def test_wrong_sources_of_best_weights(tmp_path, stopped, finished):
    with pytest.raises(WeightsError, match=r"not finished.*vitrail\.Run"):
        vitrail.load(stopped, which="best")
    for source in ("pane", finished / "model", tmp_path, "hf:owner/name", "timm:name"):
        with pytest.raises(ConfigError, match="no run"):
            vitrail.load(source, which="best")
    with pytest.raises(ConfigError, match="did you mean 'best'"):
        vitrail.load(finished, which="bset")
    with pytest.raises(ConfigError, match="did you mean 'last'"):
        Run(stopped).load("lats")
    (changed := shutil.copytree(finished, tmp_path / "x") / "best.json").write_text('{"folder": "../../elsewhere"}')
    with pytest.raises(WeightsError, match=r"best\.json"):
        vitrail.load(changed.parent, which="best")


def test_a_folder_that_is_no_run(tmp_path, finished):
    for wrong in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"no run.*runs/NAME"):
            Run(wrong)
    with pytest.raises(ConfigError, match="did you mean"):
        Run(finished / "model")


def test_it_reads_well(tmp_path, finished, stopped):
    assert "accuracy 0.75 at step 16" in repr(Run(finished))
    assert "not finished" in repr(Run(stopped))
    page = Run(finished)._repr_html_()
    assert "data:image/png" in page  # the curves
    assert "Evaluations" in page
    strange = shutil.copytree(stopped, tmp_path / "<b>x")
    assert "<b>x" not in Run(strange)._repr_html_()
    plain = json.loads(json.dumps(Run(finished).to_dict()))
    assert plain["best"] == {"step": 16, "metric": "accuracy", "value": 0.75}
    assert plain["metrics"]["evaluation"]["step"] == [8, 16, 20]
    assert plain["config"]["schedule"]["steps"] == 20
