"""Several ranks write the file that one process writes, are killed, and go on in another number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import make_folder, picture

import vitrail
from samples import randomise

pytestmark = pytest.mark.slow  # several processes

HERE = Path(__file__).parent
IMAGES = 50
BROKEN = ["photos/x/0009.png", "photos/x/0040.png"]
CLEAN = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A model and 50 photos, of which two are broken; a part has four, so there are 13."""
    root = tmp_path_factory.mktemp("ranks")
    model = randomise(vitrail.create_model("Ti/4", num_classes=7, image_size=16, width=32, depth=2, num_heads=2))
    vitrail.save(model, root / "model")
    make_folder(root / "photos", {"x": IMAGES - 1})
    (root / "photos" / "comma, new\nline.png").write_bytes(picture(100))
    for name in BROKEN:
        (root / name).write_bytes(b"no image")
    return root


def run_jobs(root: Path, jobs: list[dict]) -> list[dict]:
    options = {"model": "model", "batch_size": 2, "top": 3}
    (root / "jobs.json").write_text(json.dumps([{**job, "options": {**options, **job["options"]}} for job in jobs]))
    child = subprocess.run(
        [sys.executable, str(HERE / "prediction_ranks.py"), "jobs.json"],
        cwd=root,
        capture_output=True,
        text=True,
        env=CLEAN,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.fixture(scope="module")
def whole(root) -> dict[str, bytes]:
    """The files that one process writes."""
    (result,) = run_jobs(root, [{"size": 1, "options": {"out": "one.jsonl", "embed": "one.npz"}}])
    assert result["codes"] == [0], result
    (other,) = run_jobs(root, [{"size": 1, "options": {"out": "one.csv"}}])
    assert other["codes"] == [0], other
    return {path: (root / f"one.{path}").read_bytes() for path in ("jsonl", "csv", "npz")}


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_write_what_one_writes(root, whole, size):
    jobs = [
        {"size": size, "options": {"out": f"{size}.jsonl", "embed": f"{size}.npz"}},
        {"size": size, "options": {"out": f"{size}.csv"}},
    ]
    for result in run_jobs(root, jobs):
        assert result["codes"] == [0] * size, result
        first, *others = result["said"]
        assert (first["predictions"], first["left_out"]) == (IMAGES, BROKEN)
        assert [(each["predictions"], each["events"]) for each in others] == [(0, 0)] * (size - 1)
        assert sum(each["computed"] for each in result["said"]) == IMAGES
        assert all(each["computed"] for each in result["said"]), "each has a share"
    for form, content in whole.items():
        assert (root / f"{size}.{form}").read_bytes() == content
    assert not list(root.glob("*.parts"))


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_killed_ranks_go_on_in_another_number(root, whole, killed, size):
    name = f"killed-{killed}-{size}"
    options = {"out": f"{name}.jsonl", "embed": f"{name}.npz"}
    jobs = [{"size": 2, "kill": killed, "options": options}, {"size": size, "options": options}]
    first, second = run_jobs(root, jobs)
    assert first["codes"][killed] == -9
    assert 0 not in first["codes"]
    assert second["codes"] == [0] * size, second
    computed = sum(each["computed"] for each in second["said"])
    assert computed <= IMAGES - 4, "what was done is not computed again"
    assert second["said"][0]["left_out"] == BROKEN
    assert computed + second["said"][0]["done_before"] in range(IMAGES - 2, IMAGES + 1)
    assert (root / f"{name}.jsonl").read_bytes() == whole["jsonl"]
    assert (root / f"{name}.npz").read_bytes() == whole["npz"]
    assert not (root / f"{name}.jsonl.parts").exists()


def test_ranks_without_a_share_wait_for_the_others(root):
    (result,) = run_jobs(root, [{"size": 3, "images": [["photos/x/0001.png"]] * 3, "options": {"out": "few.csv"}}])
    assert result["codes"] == [0, 0, 0], result
    assert [each["computed"] for each in result["said"]] == [1, 0, 0]
    assert len((root / "few.csv").read_text().splitlines()) == 1 + 3


def test_a_lost_rank_ends_the_others_with_what_to_do(root, whole):
    jobs = [{"size": 2, "lose": 1, "options": {"out": "lost.jsonl"}}, {"size": 1, "options": {"out": "lost.jsonl"}}]
    first, second = run_jobs(root, jobs)
    assert first["codes"] == [1, -9]
    assert "another rank was lost" in first["said"][0]["error"]
    assert first["said"][0]["error"].endswith("the same command goes on with what is not done")
    assert second["codes"] == [0]
    assert (root / "lost.jsonl").read_bytes() == whole["jsonl"]


def test_ranks_that_differ_are_refused(root):
    images = [["photos"], ["photos", "photos/x/0001.png"]]
    (root / "taken.jsonl").write_text("mine")
    jobs = [
        {"size": 2, "images": images, "options": {"out": "differs.jsonl"}, "lose": None},
        {"size": 2, "options": {"out": "taken.jsonl"}, "lose": None},
    ]
    for result, words in zip(run_jobs(root, jobs), ["other images", "exists already"], strict=True):
        assert result["codes"] == [1, 1]
        assert all(said["error"].startswith("ConfigError") and words in said["error"] for said in result["said"])
    assert not (root / "differs.jsonl.parts").exists()


def test_torchrun_shares_the_command(root):
    """As a person types it, with parts of 64."""
    shutil.rmtree(root / "many", ignore_errors=True)
    make_folder(root / "many", {"y": 150}, first=1000)
    (root / "many/y/0100.png").write_bytes(b"")
    words = ["predict", "many", "--model", "model", "--device", "cpu", "--batch-size", "16", "--out"]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    results = [
        subprocess.run(
            [sys.executable, *start, "-m", "vitrail", *words, out],
            cwd=root,
            capture_output=True,
            text=True,
            env={**CLEAN, "MASTER_ADDR": "127.0.0.1"},
            timeout=280,
            check=False,
        )
        for start, out in (([], "alone.csv"), (run, "shared.csv"))
    ]
    for result in results:
        assert result.returncode == 1, result.stderr
        assert result.stdout == ""
        assert result.stderr.count("left out: many/y/0100.png: empty") == 1
        assert result.stderr.count("1 left out, in ") == 1
        assert "Traceback (most recent call last):\n  File" not in result.stderr.partition("torch/distributed")[0]
    assert (root / "shared.csv").read_bytes() == (root / "alone.csv").read_bytes()
    assert len((root / "alone.csv").read_text().splitlines()) == 1 + 5 * 149
