"""A million samples in a thousand shards: how soon the first batch comes, and what a worker needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import make_tar

MEASURE = """
import itertools, json, multiprocessing, pathlib, sys, time

def memory(pid, kind):
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1000

import torch, vitrail.data.loader  # what any program has imported by then
start = time.perf_counter()
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import open_data
source = open_data(sys.argv[1])
batches = iter(TrainingLoader(source, 256, (32, 32), workers=2, start_method=sys.argv[2]))
next(batches)
seconds = time.perf_counter() - start
seen = set()
for batch in itertools.islice(batches, 400):
    seen.update(batch.indices.tolist())
workers = [child.pid for child in multiprocessing.active_children()]
result = {"samples": len(source), "seconds": seconds, "seen": len(seen), "shards": len({i // 1000 for i in seen})}
result["worker_mb"] = max(memory(pid, "Pss:") for pid in workers)
result["worker_rss_mb"] = max(memory(pid, "Rss:") for pid in workers)
print(json.dumps(result))
"""


def measure(folder: Path, method: str) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURE, str(folder), method]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(child.stdout)
    print(method, found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured through /proc")
def test_a_million_samples_in_a_thousand_shards(tmp_path):
    shard = make_tar(tmp_path / "shard", [n % 10 for n in range(1000)]).read_bytes()
    (tmp_path / "data").mkdir()
    for number in range(1000):
        (tmp_path / "data" / f"{number:06}.tar").write_bytes(shard)
    measure(tmp_path / "data", "fork")  # makes the index
    for method in ("fork", "spawn"):
        found = measure(tmp_path / "data", method)
        assert found["samples"] == 1_000_000
        assert found["seen"] == 400 * 256
        assert found["shards"] > 500
        assert found["seconds"] < (2 if method == "fork" else 12)  # spawned workers import torch first
        assert found["worker_rss_mb"] < 300
