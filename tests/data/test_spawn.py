"""Worker processes that are started by spawn, as on Windows and macOS: the same batches, and sentences for scripts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from striped import stripes

import vitrail
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.sources.source import hold_out
from vitrail.data.transforms.augment import Augmentation
from vitrail.errors import DataError
from vitrail.training.checkpoint_folder import list_checkpoints

SETTINGS = {"schedule.steps": 2, "schedule.warmup_steps": 1, "data.workers": 1, "run.trackers": [], "run.report": False}
SOURCE = str(Path(vitrail.__file__).parents[1])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return stripes(tmp_path_factory.mktemp("data") / "photos", classes=2, images=8)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def spawn():
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def run_script(text: str, folder: Path, *, from_stdin: bool = False, seconds: int = 150):
    """Run a Python script in a process of its own, in which processes are started by spawn."""
    start = "import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n"
    script = start + textwrap.dedent(text)
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "VITRAIL_CACHE": str(folder / "cache")}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": seconds}
    if from_stdin:
        return subprocess.run([sys.executable, "-"], input=script, **options)
    (folder / "script.py").write_text(script)
    return subprocess.run([sys.executable, "script.py"], **options)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.slow
def test_batches_are_those_of_fork_bit_for_bit(photos, method):
    options = {"seed": 3, "augmentation": Augmentation(rand_augment=(2, 9), erasing=0.5), "workers": 2}
    forked, started = (TrainingLoader(photos, 4, 16, start_method=name, **options) for name in ("fork", method))
    for _ in range(6):
        one, other = next(forked), next(started)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.indices, other.indices)


@pytest.mark.slow
def test_evaluation_batches_are_those_of_fork(photos):
    preprocessing = vitrail.load("pane").preprocessing
    forked, spawned = (
        list(EvaluationLoader(photos, preprocessing, 8, workers=1, start_method=method)) for method in ("fork", "spawn")
    )
    for one, other in zip(forked, spawned, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.mask, other.mask)


def test_every_source_can_be_sent(photos, here):
    vitrail.pack_data(photos, "tar", workers=1)
    vitrail.pack_data(photos, "parquet", format="parquet", workers=1)
    (here / "list.csv").write_text(
        "image,label\n" + "".join(f"{path},{path.parent.name}\n" for path in sorted(photos.rglob("*.png")))
    )
    rest, held = hold_out(open_data(photos), 0.25, 0)
    pairs = [(path, path.parent.name) for path in sorted(photos.rglob("*.png"))]
    sources = [
        *(open_data(data) for data in (photos, "tar", "parquet", "list.csv", "digits", pairs)),
        InMemorySource(open_data(photos)),
        rest,
        held,
    ]
    for source in sources:
        expected = source.read(1)  # opens files, which must not be sent
        copy = pickle.loads(pickle.dumps(source))
        assert len(copy) == len(source)
        assert copy.classes == source.classes
        sent = copy.read(1)
        assert sent.label == expected.label
        same = torch.equal if isinstance(sent.content, torch.Tensor) else bytes.__eq__
        assert same(sent.content, expected.content)
        assert np.array_equal(copy.labels(0, len(copy)), source.labels(0, len(source)))


@pytest.mark.slow
def test_pack_and_check_with_workers(photos, here, spawn):
    vitrail.pack_data(photos, "packed", workers=2)
    packed = open_data("packed")
    assert sorted(packed.labels(0, len(packed)).tolist()) == [0] * 8 + [1] * 8
    assert vitrail.check_data(photos, workers=2).to_dict() == vitrail.check_data(photos, workers=1).to_dict()


def test_a_class_that_cannot_be_sent_is_named(photos, spawn):
    class Local(type(open_data(photos))):
        pass

    source = open_data(photos)
    local = Local(source.root, source.table, source.classes)
    with pytest.raises(DataError, match="Local"):
        next(TrainingLoader(local, 4, 16, workers=1))


@pytest.mark.slow
def test_a_script_with_a_guard_trains(photos, here):
    done = run_script(
        f"""
        import vitrail
        if __name__ == "__main__":
            result = vitrail.finetune({str(photos)!r}, "pane", folder="run", settings={SETTINGS!r})
            report = vitrail.evaluate("run", {str(photos)!r}, workers=1)
            print("accuracy", result.accuracy.value, report.accuracy.value)
        """,
        here,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") == 1


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["finetune", "check"])
def test_a_script_without_a_guard_gets_a_sentence(photos, here, verb):
    call = (
        f'vitrail.finetune({str(photos)!r}, "pane", folder="run", settings={SETTINGS!r})'
        if verb == "finetune"
        else f"vitrail.check_data({str(photos)!r}, workers=2)"
    )
    done = run_script(f"import vitrail\n{call}\nprint('after')\n", here, seconds=100)
    assert done.returncode == 1
    assert "after" not in done.stdout
    assert 'if __name__ == "__main__":' in done.stderr
    assert "bootstrapping" not in done.stderr
    assert done.stderr.count("Traceback") == 1  # the parent's own


@pytest.mark.slow
def test_a_script_from_standard_input_needs_no_guard(photos, here):
    done = run_script(
        f"""
        import vitrail
        result = vitrail.finetune({str(photos)!r}, "pane", folder="run", settings={SETTINGS!r})
        print("accuracy", result.accuracy.value)
        """,
        here,
        from_stdin=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") == 1


@pytest.mark.slow
def test_a_source_of_a_notebook_is_explained(here):
    done = run_script(
        """
        import numpy as np, torch, vitrail
        from vitrail.data.sources.source import Sample, Source

        class Mine(Source):
            classes = ("a", "b")
            def __len__(self): return 8
            def read(self, index): return Sample(torch.zeros(3, 8, 8, dtype=torch.uint8), index % 2)
            def labels(self, start, stop): return np.arange(start, stop) % 2
            def name(self, index): return str(index)

        next(vitrail.TrainingLoader(Mine(), 4, 8, workers=1))
        """,
        here,
        from_stdin=True,
    )
    assert done.returncode == 1
    assert "DataError" in done.stderr
    assert "workers=0" in done.stderr


@pytest.mark.slow
def test_a_killed_training_goes_on_and_its_workers_end(here):
    tree = runs.tree("parts", data={**runs.TREE["data"], "workers": 2}, run={**runs.TREE["run"], "checkpoint_every": 2})
    (here / "script.py").write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from vitrail.training.resolve import resolve
            from vitrail.training.run_training import run_training
            if __name__ == "__main__":
                multiprocessing.set_start_method("spawn", force=True)
                run_training(resolve({tree!r}))
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "script.py"], cwd=here, env=environment, start_new_session=True)
    until = time.monotonic() + 120
    while not list_checkpoints(here / "parts" / "checkpoints") and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 30
    while _count_session(process.pid) and time.monotonic() < until:
        time.sleep(0.2)
    assert _count_session(process.pid) == 0
    subprocess.run([sys.executable, "script.py"], cwd=here, env=environment, check=True, timeout=200)
    from vitrail.training.run_training import run_training

    run_training(runs.config(here / "whole", run={**runs.TREE["run"], "checkpoint_every": 2, "threads": 1}))
    runs.assert_same_run(here / "whole", here / "parts")


def _count_session(number: int) -> int:
    """Return how many processes of a session are alive."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        count += int(fields[3]) == number and fields[0] != "Z"
    return count
