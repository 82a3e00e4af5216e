"""Two nodes under torchrun: one is lost in the middle of a run and replaced, and the run goes on to its end."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
import runs
from nodes import Node, lose, two_nodes

from vitrail.training.resolve import to_toml

STEPS = 4000
PLAIN = {
    "model": {"dropout": 0.0, "stochastic_depth": 0.0},
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"steps": STEPS, "warmup_steps": 10},
}
SELDOM = {"checkpoint_every": 25, "evaluate_every": None, "log_every": 10, "timeout": 60}


def count_writers(folder: Path) -> int:
    """Return how many ranks wrote the newest checkpoint; 0 if there is none, or it is being removed."""
    found = runs.checkpoints(folder)
    return len(list(found[-1].glob("*.safetensors"))) if found else 0


def wait_for_writers(folder: Path, count: int, seconds: float = 120) -> None:
    """Wait until a new checkpoint is of so many ranks."""
    known, ends = {path.name for path in runs.checkpoints(folder)}, time.monotonic() + seconds
    while True:
        found = runs.checkpoints(folder)
        if found and found[-1].name not in known and count_writers(folder) == count:
            return
        assert time.monotonic() < ends, f"no checkpoint of {count} ranks: {[path.name for path in found]}"
        time.sleep(0.05)


def start_agent(node: Node, first: Node, port: int, config: Path, log: Path):
    """Start torchrun on a node; `first` keeps the rendezvous."""
    is_host = str(node.address == first.address and not log.name.startswith("two")).lower()
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"{first.address}:{port}", "--rdzv-id", "run", "--local-addr", node.address]
    options += ["--rdzv-conf", f"is_host={is_host},last_call_timeout=3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "vitrail", "train", str(config)]
    return node.start(*command, log=log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_node_is_lost_and_replaced(tmp_path, parallel):
    folder, log = tmp_path / "run", tmp_path / "two-again.log"
    config = tmp_path / "config.toml"
    config.write_text(to_toml(runs.config(folder, **PLAIN, run={**SELDOM, "parallel": parallel})))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with two_nodes() as (one, two):
        agents = [start_agent(one, one, port, config, tmp_path / "one.log")]
        try:
            agents.append(start_agent(two, one, port, config, tmp_path / "two.log"))
            wait_for_writers(folder, 2)
            lose(agents[1])
            wait_for_writers(folder, 1)
            agents[1] = start_agent(two, one, port, config, log)
            wait_for_writers(folder, 2)
            codes = [agent.wait(300) for agent in agents]
        finally:
            for agent in agents:
                lose(agent)
    told = (tmp_path / "one.log").read_text() + log.read_text()
    assert codes == [0, 0], told[-5000:]
    steps = [entry["step"] for entry in runs.records(folder) if entry["kind"] == "train"]
    assert steps == list(range(10, STEPS + 1, 10))
    assert "Traceback" not in (tmp_path / "one.log").read_text()
