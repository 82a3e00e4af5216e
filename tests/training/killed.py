"""A run left alone, and the same run killed again and again: python killed.py WHOLE.json BROKEN.json KILLS SEED

A fifth argument, "soon", kills shortly after each start has written its first checkpoint: so that few kills show much.

Everything is imported once; each start is a fork that trains until kill −9 ends it, at a moment anywhere in the first
tenth of the time that the whole run took; sooner where the starts before got so far that too little would be left for
those to come. Where a start got nowhere, as on a busy machine, the next one is killed after its first checkpoint. The
last start is left alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from vitrail.data.open import open_data
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training


def main() -> None:
    whole, broken = (resolve(json.loads(Path(path).read_text())) for path in sys.argv[1:3])
    kills, rng = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    torch.set_num_threads(1)
    # What these import would otherwise be imported in every fork.
    torch.use_deterministic_algorithms(True)
    open_data("digits")
    begin = time.monotonic()
    finished(begun(whole))
    took = time.monotonic() - begin
    alive, steps, in_vain = 0, [0], 0
    for number in range(kills):
        left = (1 - steps[-1] / broken.schedule.steps) / (kills - number)  # of the run, for each start
        child = begun(broken)
        if sys.argv[5:] == ["soon"] or in_vain:
            while newest_step(broken) == steps[-1] < broken.schedule.steps:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, took * 0.05))
        else:
            time.sleep(rng.uniform(0, took * min(0.1, 2 * left)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        alive += os.WIFSIGNALED(status)
        steps.append(newest_step(broken))
        in_vain = in_vain + 1 if steps[-1] == steps[-2] else 0
    finished(begun(broken))
    print(json.dumps({"killed": alive, "steps": steps[1:]}))


def newest_step(config: RunConfig) -> int:
    steps = [int(path.name[5:]) for path in config.run.folder.glob("checkpoints/step-*")]
    return max(steps, default=0)


def begun(config: RunConfig) -> int:
    child = os.fork()
    if child:
        return child
    try:
        run_training(config, fewshot=open_training_fewshot)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def finished(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert status == 0, status


main()
