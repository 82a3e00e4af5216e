"""Training on a hostile folder: it replaces and counts, or stops with the list; memory stays flat."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import GOOD, IGNORED, TRUNCATED, UNREADABLE, make_hostile

import vitrail
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.sources.source import make_printable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, links and such names are not on Windows")

MEASURE = """
import itertools, json, pathlib, sys
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import open_data

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))

source = open_data(sys.argv[1])
batches = iter(TrainingLoader(source, 16, (32, 32), most_broken=10**6))
steps = len(source) // 16 + 1
before = peak()
list(itertools.islice(batches, 2 * steps))
after_two = peak()
list(itertools.islice(batches, 6 * steps))
print(json.dumps({"before": before, "two epochs": after_two, "eight epochs": peak()}))
"""


def test_it_stops_with_the_list_where_too_much_is_broken(tmp_path):
    make_hostile(tmp_path / "photos")
    source = open_data(tmp_path / "photos")
    with pytest.raises(vitrail.DataError, match="10 allowed") as caught:
        list(itertools.islice(TrainingLoader(source, 16, (32, 32)), 100))
    assert len(str(caught.value).splitlines()) > 11


@pytest.mark.parametrize("workers", [0, 2])
def test_or_replaces_and_counts_each_of_them(workers, tmp_path):
    facts = make_hostile(tmp_path / "photos")
    broken = {make_printable(path) for path, kind in facts.items() if kind in (UNREADABLE, TRUNCATED)}
    good = {make_printable(path) for path, kind in facts.items() if kind not in (UNREADABLE, TRUNCATED, IGNORED)}
    assert len(broken) > 50
    assert sum(kind == GOOD for kind in facts.values()) > 20
    source = open_data(tmp_path / "photos")
    loader = TrainingLoader(source, 16, (32, 32), most_broken=10**6, workers=workers)
    for batch in itertools.islice(loader, len(source) // 16 + 1):  # an epoch
        assert batch.images.shape == (16, 3, 32, 32)
        assert batch.mask.all()
    named = {entry.name for entry in loader.broken.values()}
    assert named == broken
    assert not named & good


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")
@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    make_hostile(tmp_path / "photos")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "photos")]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(child.stdout)
    assert found["two epochs"] - found["before"] < 150  # one image of everyday size at a time, never a bomb
    assert found["eight epochs"] - found["two epochs"] < 20
