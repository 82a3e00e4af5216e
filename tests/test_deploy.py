"""The files in deploy/ do what pages say: Slurm's with stand-ins for its programs, Kubernetes' by what is in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
import yaml

from vitrail.training.resolve import to_toml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
from pathlib import Path
command = [each for each in sys.argv[1:] if not each.startswith("--")]
count = int(os.environ["SLURM_NTASKS"])
places = [{{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}} for number in range(count)]
tasks = [subprocess.Popen(command, env={{**os.environ, **place}}) for place in places]
Path(os.environ["TASKS"]).write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
"""


def test_the_pages_show_the_files():
    for name, page in {"slurm.sh": "scale", "train.yaml": "scale", "serve.yaml": "serving"}.items():
        text = (ROOT / f"docs/{page}.md").read_text()
        assert (DEPLOY / name).read_text() in text
        assert f"deploy/{name}" in text


@pytest.mark.slow
def test_a_slurm_job_that_is_told_to_stop_queues_itself_and_goes_on(tmp_path):
    """The stand-in for srun starts a task for each rank; Slurm signals the tasks themselves."""
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    config, tasks, requeued = tmp_path / "config.toml", tmp_path / "tasks", tmp_path / "requeued"
    schedule, run = {"steps": 600, "warmup_steps": 10}, {"checkpoint_every": 1000, "evaluate_every": None}
    folder = tmp_path / "run"
    config.write_text(to_toml(runs.config(folder, schedule=schedule, run=run)))
    place = {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**place, "PATH": path, "TASKS": str(tasks), "REQUEUED": str(requeued), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(DEPLOY / "slurm.sh"), str(config), "run.seed=0"]
    job = subprocess.Popen(
        command, env={**os.environ, **variables, "MASTER_PORT": "29871"}, stderr=subprocess.PIPE, text=True
    )
    ends = time.monotonic() + 100
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    for pid in tasks.read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    told = job.communicate(timeout=100)[1]
    assert job.returncode == 3, told
    assert requeued.read_text() == "requeue 17\n"
    stopped = runs.checkpoints(folder)
    assert len(stopped) == 1
    again = subprocess.run(
        command, env={**os.environ, **variables, "MASTER_PORT": "29872"}, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stderr
    assert requeued.read_text() == "requeue 17\n"
    steps = [entry["step"] for entry in runs.records(folder) if entry["kind"] == "train"]
    assert steps == list(range(1, 601))


def test_the_training_job_is_a_valid_command():
    job = yaml.safe_load((DEPLOY / "train.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    timeout = int(container["command"][container["command"].index("--shutdown-timeout") + 1])
    assert timeout < pod["terminationGracePeriodSeconds"]
    recipe = container["command"][container["command"].index("train") + 1]
    from vitrail.workflows.train import build_config

    config = build_config(recipe, container["args"])
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (config.data.source, str(config.run.folder)):
        assert any(path.startswith(f"{each}/") for each in mounted), path
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
