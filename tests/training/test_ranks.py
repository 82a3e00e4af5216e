"""Several ranks compute what one does, and can be stopped, lost and changed in number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch
from annotated import write_table

import vitrail
from vitrail.training.checkpoint_folder import read_weights

pytestmark = pytest.mark.slow  # several processes

HERE = Path(__file__).parent
PLAIN = {"model": {"dropout": 0.0, "stochastic_depth": 0.0}, "schedule": {"steps": 20, "warmup_steps": 4}}
SELDOM = {"checkpoint_every": 100, "evaluate_every": 10, "fewshot_every": 10, "fewshot_shots": 3}
"""Without what is drawn on each rank for itself."""
BALANCED = {"objective": {"balance": "loss"}, "data": {"balance": 0.9, "share": 0.3}}
HALF = 10


def run_jobs(folder: Path, jobs: list[dict]) -> tuple[list[dict], str]:
    given = folder / "jobs.json"
    given.write_text(json.dumps(jobs))
    child = subprocess.run(
        [sys.executable, str(HERE / "ranks.py"), str(given)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), child.stderr


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, Path]:
    """The same run on one rank, and sharded over two."""
    return run_ways(
        tmp_path_factory.mktemp("ranks"),
        {"one": {"size": 1}, "fsdp": {"size": 2, "run": {"parallel": "fsdp"}}},
    )


@pytest.fixture(scope="module")
def more_finished(tmp_path_factory) -> dict[str, Path]:
    """The same run in other ways."""
    ways = {
        "parts": {"size": 1, "optimizer": {"accumulate": 4}},
        "ddp": {"size": 2},
        "ddp twice": {"size": 2, "times": 2},
        "ddp parts": {"size": 2, "optimizer": {"accumulate": 2}},
        "fsdp parts": {"size": 2, "run": {"parallel": "fsdp"}, "optimizer": {"accumulate": 2}},
        "fsdp watched": {"size": 2, "run": {"parallel": "fsdp", "evaluate_every": 1}},
        "hybrid": {"size": 4, "run": {"parallel": "hybrid"}, "per_node": 2},
        "balanced one": {"size": 1, **BALANCED},
        "balanced ddp": {"size": 2, **BALANCED},
        "balanced fsdp": {"size": 2, **BALANCED, "run": {"parallel": "fsdp"}, "optimizer": {"accumulate": 2}},
        "masked one": {"size": 1, "objective": runs.MASKED, "model": {"num_classes": 0}},
        "masked fsdp": {"size": 2, "objective": runs.MASKED, "run": {"parallel": "fsdp"}, "model": {"num_classes": 0}},
        "autoencoded one": {"size": 1, "objective": runs.AUTOENCODED, "model": {"num_classes": 0}},
        "autoencoded fsdp": {
            "size": 2,
            "objective": runs.AUTOENCODED,
            "run": {"parallel": "fsdp"},
            "model": {"num_classes": 0},
        },
        "LeJEPA one": {"size": 1, "objective": runs.JOINT, "model": {"num_classes": 0}},
        "LeJEPA ddp": {"size": 2, "objective": runs.JOINT, "model": {"num_classes": 0}},
        "LeJEPA fsdp": {"size": 2, "objective": runs.JOINT, "run": {"parallel": "fsdp"}, "model": {"num_classes": 0}},
        "DINO one": {"size": 1, "objective": runs.TAUGHT, "model": {"num_classes": 0}},
        "DINO ddp": {"size": 2, "objective": runs.TAUGHT, "model": {"num_classes": 0}},
        "DINO fsdp": {"size": 2, "objective": runs.TAUGHT, "run": {"parallel": "fsdp"}, "model": {"num_classes": 0}},
    }
    tagged = {"source": str(write_table(tmp_path_factory.mktemp("tagged") / "photos", "tags")), "task": "tags"}
    seldom = {"fewshot_every": None, "evaluate_every": 10}
    # As two parts: rounding in another order grows to 3e-4 in 20 steps on these simple images.
    ways["tags one"] = {"size": 1, "data": tagged, "run": seldom, "optimizer": {"accumulate": 2}}
    ways["tags ddp"] = {"size": 2, "data": tagged, "run": seldom}
    ways["tags fsdp"] = {"size": 2, "data": tagged, "run": {**seldom, "parallel": "fsdp"}}
    return run_ways(tmp_path_factory.mktemp("more ranks"), ways)


def run_ways(root: Path, ways: dict[str, dict]) -> dict[str, Path]:
    """Run each of the ways, and return their folders by name."""
    jobs = []
    for name, way in ways.items():
        sections = {key: value for key, value in way.items() if isinstance(value, dict)}
        plain = {**PLAIN, **sections, "model": {**PLAIN["model"], **sections.get("model", {})}}
        plain["run"] = {**SELDOM, **sections.get("run", {})}
        job = {"size": way["size"], "tree": runs.tree(root / name, **plain)}
        jobs.append({**job, **{key: way[key] for key in ("per_node", "times") if key in way}})
    results, stderr = run_jobs(root, jobs)
    for name, result in zip(ways, results, strict=True):
        assert set(result["codes"]) == {0}, (name, stderr)
    return {name: root / name for name in ways}


def test_two_ranks_agree_with_one(finished):
    check_same_losses(finished["one"], finished["fsdp"])


@SLOW
@pytest.mark.parametrize("way", ["parts", "ddp", "ddp twice", "ddp parts", "fsdp parts", "fsdp watched", "hybrid"])
def test_all_ways_agree(finished, more_finished, way):
    check_same_losses(finished["one"], more_finished[way])


@SLOW
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_balanced_runs_agree(more_finished, way):
    one, other = (runs.losses(more_finished[f"balanced {name}"]) for name in ("one", way))
    assert len(one) == 20
    assert other == pytest.approx(one, abs=1e-5)


def check_same_losses(first: Path, second: Path) -> None:
    one, other = runs.losses(first), runs.losses(second)
    assert len(one) == 20
    assert other == pytest.approx(one, abs=1e-5)
    assert one[-1] < one[0] - 0.05


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_tags_agree(more_finished, way):
    check_same_losses(more_finished["tags one"], more_finished[f"tags {way}"])
    one, other = (vitrail.load(more_finished[name]) for name in ("tags one", f"tags {way}"))
    assert one.task == other.task
    assert one.task.kind == "tags"


@SLOW
@pytest.mark.parametrize("kind", ["masked", "autoencoded"])
def test_objectives_without_labels_agree(more_finished, kind):
    masked = more_finished[f"{kind} fsdp"], more_finished[f"{kind} one"]
    assert runs.losses(masked[0]) == pytest.approx(runs.losses(masked[1]), abs=1e-5)


@SLOW
@pytest.mark.parametrize("kind", ["LeJEPA", "DINO"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_joint_embeddings_agree(more_finished, kind, parallel):
    """Their losses look at the whole batch, so ranks exchange statistics in every step."""
    one, two = more_finished[f"{kind} one"], more_finished[f"{kind} {parallel}"]
    assert runs.losses(two) == pytest.approx(runs.losses(one), abs=1e-4)
    ours, theirs = ([e["loss"] for e in runs.records(f) if e["kind"] == "evaluation"] for f in (one, two))
    assert len(ours) == 2
    assert theirs == pytest.approx(ours, abs=1e-4)


def test_evaluations_agree(finished):
    one, two = ([e for e in runs.records(finished[w]) if e["kind"] == "evaluation"] for w in ("one", "fsdp"))
    assert [e["step"] for e in one] == [10, 20]
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["accuracy"] == ours["accuracy"]
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)


def test_few_shot_accuracies_agree(finished):
    check_same_fewshots(finished["one"], finished["fsdp"])


@SLOW
@pytest.mark.parametrize("way", ["ddp", "ddp parts", "fsdp parts", "fsdp watched", "hybrid"])
def test_few_shot_accuracies_agree_in_all_ways(finished, more_finished, way):
    check_same_fewshots(finished["one"], more_finished[way])


@SLOW
def test_few_shot_accuracies_of_masked_patches_agree(more_finished):
    check_same_fewshots(more_finished["masked one"], more_finished["masked fsdp"])


def check_same_fewshots(first: Path, second: Path) -> None:
    """Up to an image or two, whose scores are so close that the last bits of the weights decide."""
    one, two = ([e for e in runs.records(folder) if e["kind"] == "fewshot"] for folder in (first, second))
    assert [e["step"] for e in one] == [e["step"] for e in two] == [10, 20]
    assert [e["accuracy"] for e in two] == pytest.approx([e["accuracy"] for e in one], abs=0.005)


def test_one_process_reads_the_weights_of_all_ranks(finished):
    """The checkpoint of the last step, which two ranks wrote in parts, holds the model that they saved."""
    (*_, newest) = runs.checkpoints(finished["fsdp"])
    assert len(list(newest.glob("*.safetensors"))) == 2
    weights = read_weights(newest)
    for name, tensor in vitrail.load(finished["fsdp"]).state_dict().items():
        assert torch.equal(tensor, weights[f"model.{name}"]), name


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, list[dict], str]:
    """Two ranks, one of which is asked to stop in the middle; and two of which one is killed."""
    root = tmp_path_factory.mktemp("stopped")
    jobs = [
        {"size": 2, "stop_at": HALF, "tree": runs.tree(root / "fsdp", **PLAIN, run={"parallel": "fsdp"})},
        {"size": 2, "stop_at": HALF, "tree": runs.tree(root / "ddp", **PLAIN)},
        {"size": 2, "kill_at": 8, "tree": runs.tree(root / "killed", **PLAIN)},
        {"size": 2, "kill_at": 8, "tree": runs.tree(root / "killed fsdp", **PLAIN, run={"parallel": "fsdp"})},
    ]
    results, stderr = run_jobs(root, jobs)
    return root, results, stderr


@SLOW
def test_one_rank_asked_to_stop_stops_all_with_a_checkpoint(stopped):
    root, results, stderr = stopped
    assert [result["codes"] for result in results[:2]] == [[3, 3], [3, 3]], stderr
    for name in ("fsdp", "ddp"):
        assert runs.checkpoints(root / name)[-1].name == f"step-{HALF:08}"


@SLOW
def test_a_lost_rank_ends_the_job_soon_in_one_line(stopped):
    root, results, stderr = stopped
    for name, result in zip(("killed", "killed fsdp"), results[2:], strict=True):
        assert result["codes"] == [1, -9], stderr
        assert result["seconds"] < 30
        # That of step 6 may not have been whole yet, that of step 3 must have been before step 6 was saved.
        assert runs.checkpoints(root / name)[-1].name in ("step-00000003", "step-00000006")
    told = [line for line in stderr.splitlines() if "another rank was lost" in line]
    assert len(told) == 2
    assert "unexpected" not in stderr


@SLOW
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(stopped, finished):
    root = stopped[0]
    jobs, folders = [], []
    for way in ("fsdp", "ddp"):
        for size in (1, 4):
            folders.append(root / f"{way} {size}")
            shutil.copytree(root / way, folders[-1])
            run = {"parallel": way}
            jobs.append({"size": size, "tree": runs.tree(folders[-1], **PLAIN, run=run)})
    results, stderr = run_jobs(root, jobs)
    assert all(set(result["codes"]) == {0} for result in results), stderr
    for folder in folders:
        assert runs.losses(folder) == pytest.approx(runs.losses(finished["one"]), abs=1e-5)
