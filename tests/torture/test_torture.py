"""A short form of `make torture`; and that its judges see what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
TESTS = HERE.parent
CHECKED = """
import sys
from pathlib import Path
import torch, torture_training as torture

place, change = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torture.STEPS = 30
if change != "no NaN":
    torture.feed_nan(torture.NAN_EVERY)
torture.make_photos(place / "photos", 40)
(place / "disk").mkdir()
tally = torture.Tally()
judged = torture.Round(place, place / "photos", False, "one rank", 0, tally)
for folder in (judged.alone, judged.faulty):
    assert judged._wait(judged._start(folder, faulty=False)) == [0]
print("trained", flush=True)
sys.stdin.readline()
judged.compare()
print(tally.losses)
"""


def start(program: list[str]) -> subprocess.Popen[str]:
    paths = [HERE, TESTS / "serving", TESTS / "data", TESTS]
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *program],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torture(name: str, minutes: float, out: Path) -> dict:
    with start([str(HERE / f"torture_{name}.py"), "--minutes", str(minutes), "--out", str(out)]) as child:
        told = child.communicate(timeout=500)[0]
    assert child.returncode == 0, told
    found = json.loads(out.read_text())
    assert found["losses"] == []
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_under_faults(tmp_path):
    found = torture("training", 1.5, tmp_path / "report.json")
    assert found["faults"] >= 8
    assert len(found["by kind"]) >= 4
    assert found["rounds"]["one rank"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_under_load_and_attack(tmp_path):
    found = torture("serving", 1, tmp_path / "report.json")
    assert found["answers compared"] > 100
    assert len(found["lives"]) >= 2
    assert found["statuses"]["strange"]["400"] > 10


def change_weights(folder: Path) -> None:
    (file,) = (folder / "model").glob("*.safetensors")
    tensors = load_file(file)
    tensors[min(tensors)].view(-1)[0] += 1e-6
    save_file(tensors, file)


def change_log(folder: Path) -> None:
    log = folder / "metrics.jsonl"
    first, *others = log.read_text().splitlines(keepends=True)
    log.write_text(first.replace('"step": 1,', '"step": 1, "more": 1,') + "".join(others))


def forget_a_step(folder: Path) -> None:
    log = folder / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))


EXPECTED = {
    "nothing": "[]",
    "weights": "tensors differ",
    "log": "the logs differ",
    "a step": "every step once",
    "no NaN": "0 steps were skipped",
}
CHANGES = {"weights": change_weights, "log": change_log, "a step": forget_a_step}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["nothing", *CHANGES, "no NaN"])
def test_what_differs_is_seen(tmp_path, change):
    with start(["-c", CHECKED, str(tmp_path), change]) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert any(line == "trained\n" for line in child.stdout)
        if change in CHANGES:
            CHANGES[change](tmp_path / "disk" / "faulty-0")
        told = child.communicate("go on\n", timeout=60)[0]
    assert child.returncode == 0, told
    assert EXPECTED[change] in told.strip().splitlines()[-1], told
