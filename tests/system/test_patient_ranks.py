"""Work that takes longer than ranks wait for each other.

As a script, `python test_patient_ranks.py RANK PORT FAILS`: one of two ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch

from vitrail.errors import DataError, TrainingError
from vitrail.system.ranks import Ranks, join_ranks

TIMEOUT, LONG = 3.0, 7.0
SCRIPT = __file__


def run_rank(rank: int, port: int, fails: bool) -> str:
    """Rank 1 works for longer than rank 0 waits."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def work() -> int:
        time.sleep(LONG if rank else 0)
        if fails and rank:
            raise DataError("there is no such bucket")
        return 10 + rank

    with join_ranks("cpu", 60) as ranks:
        ranks.wait()
        ranks.control._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=TIMEOUT))
        try:
            value = ranks.run_without_timeout(work)
        except (DataError, TrainingError) as error:
            return f"{type(error).__name__}: {error}"
        return f"{value} of {sorted(ranks.gather(value))}"


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_wait_for_long_work_of_one_and_hear_of_its_failure(fails):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(port), "fails" if fails else ""],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [child.communicate(timeout=100) for child in children]
    said = [answer[0].strip() for answer in answers]
    if fails:
        assert said == [
            "TrainingError: rank 0: another rank has failed, and says why",
            "DataError: there is no such bucket",
        ], answers
    else:
        assert said == ["10 of [10, 11]", "11 of [10, 11]"], answers


def test_a_rank_alone_just_works():
    assert Ranks(0, 1, torch.device("cpu")).run_without_timeout(lambda: 3) == 3


if __name__ == "__main__":
    print(run_rank(int(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3])), flush=True)
