"""Runs on several ranks: python ranks.py JOBS.json

A job is {"tree", "size"} and perhaps "stop_at" (rank 1 is sent SIGTERM in that step), "kill_at" (rank 1 is killed
after it), "per_node", "times" (one process starts it again and again) and "fused" (by vitrail's kernels).
Everything is imported once; each rank is a fork. Prints the exit codes and seconds of each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import runs
import torch
import torch._dynamo  # FSDP would import it in every fork

from vitrail.data.open import open_data
from vitrail.errors import Stopped, VitrailError
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.training import loop
from vitrail.training.resolve import resolve
from vitrail.training.run import RunState, TrainingRun
from vitrail.training.run_training import run_training


def main() -> None:
    torch.set_num_threads(1)
    # What these import would otherwise be imported in every fork.
    torch.use_deterministic_algorithms(True)
    open_data("digits")
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        begin = time.monotonic()
        if job.get("fused"):
            runs.force_kernels()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = [forked(job, rank, port) for rank in range(job["size"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        results.append({"codes": codes, "seconds": time.monotonic() - begin})
    print(json.dumps(results))


def forked(job: dict, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    if job["size"] > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["size"]), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ["LOCAL_WORLD_SIZE"] = str(job.get("per_node", job["size"]))
    if rank == 1 or job["size"] == 1:
        interrupt(job)
    code = 0
    try:
        for _ in range(job.get("times", 1)):
            run_training(resolve(job["tree"]), fewshot=open_training_fewshot)
    except VitrailError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        code = 3 if isinstance(error, Stopped) else 1
    except BaseException as error:
        print(f"rank {rank}: unexpected {error!r}", file=sys.stderr)
        code = 70
    sys.stderr.flush()
    os._exit(code)


def interrupt(job: dict) -> None:
    """Signals to ourselves, after a step."""
    whole_step = loop.train_step

    def step(run: TrainingRun, state: RunState) -> None:
        if state.progress.step + 1 == job.get("stop_at"):
            signal.raise_signal(signal.SIGTERM)  # in the middle of it
        whole_step(run, state)
        if state.progress.step == job.get("kill_at"):
            signal.raise_signal(signal.SIGKILL)

    loop.train_step = step


main()
