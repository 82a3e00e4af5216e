"""metrics.jsonl: what is written is what is read, and a file cut anywhere is mended without losing a record."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.training.records import Records, read_records


def train(step: int, **more: object) -> dict:
    record = {"kind": "train", "step": step, "epoch": step / 7, "loss": 2.5 / step, "accuracy": 0.5, "skipped": 0}
    return {**record, "clock": {"seconds": 0.1 * step, "images_per_second": 1e3}, **more}


def evaluation(step: int, part: str = "val") -> dict:
    return {"kind": "evaluation", "step": step, "part": part, "loss": 1.25, "clock": {"seconds": 1.0}}


SEVERAL = [evaluation(0), train(10), train(20), evaluation(20), train(30, loss=math.inf), evaluation(30, "nan")]


def written(path, several=SEVERAL) -> bytes:
    file = Records(path)
    for record in several:
        file.append(record)
    return path.read_bytes()


def test_one_object_a_line(tmp_path):
    content = written(tmp_path / "metrics.jsonl")
    assert content.endswith(b"\n")
    assert [json.loads(line)["step"] for line in content.splitlines()] == [0, 10, 20, 20, 30, 30]
    assert read_records(tmp_path / "metrics.jsonl") == SEVERAL


def test_what_is_no_number_is_valid_json_and_comes_back(tmp_path):
    file = Records(tmp_path / "metrics.jsonl")
    clock = {"flops_per_second": -math.inf}
    file.append({"kind": "train", "step": 1, "loss": math.nan, "gradient_norm": math.inf, "clock": clock})

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    line = json.loads(file.path.read_text(), parse_constant=refuse)
    assert (line["loss"], line["gradient_norm"], line["clock"]) == ("nan", "inf", {"flops_per_second": "-inf"})
    (record,) = read_records(file.path)
    assert math.isnan(record["loss"])
    assert (record["gradient_norm"], record["clock"]) == (math.inf, clock)


numbers = st.floats() | st.integers() | st.none() | st.booleans()
names = st.text(max_size=8).filter(lambda name: name not in ("kind", "part", "step"))
bodies = st.dictionaries(names, numbers | st.dictionaries(names, numbers, max_size=3), max_size=5)


@given(bodies, st.text(max_size=8), st.integers(min_value=0))
def test_any_record_comes_back(tmp_path_factory, body, part, step):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.unlink(missing_ok=True)
    record = {"kind": "evaluation", "step": step, "part": part, **body}
    Records(path).append(record)
    assert path.read_bytes().count(b"\n") == 1
    assert repr(read_records(path)) == repr([record])  # repr: nan is not equal to itself, 1 and True are not the same


@pytest.mark.parametrize("step", [-1, 20, 100])
def test_a_file_cut_at_any_byte_becomes_a_prefix_of_whole_records(tmp_path, step, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of times, it takes long
    path = tmp_path / "metrics.jsonl"
    content = written(path)
    lines = content.splitlines(keepends=True)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = content[:length].count(b"\n")
        assert read_records(path) == SEVERAL[:whole]
        Records(path).keep_until(step)
        kept = [line for line, record in zip(lines[:whole], SEVERAL, strict=False) if record["step"] <= step]
        assert path.read_bytes() == b"".join(kept)
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_after_a_resume_the_file_is_that_of_a_run_never_stopped(tmp_path):
    content = written(tmp_path / "metrics.jsonl")
    stopped = Records(tmp_path / "stopped.jsonl")
    stopped.path.write_bytes(content[:-30])
    stopped.keep_until(10)
    for record in SEVERAL[2:]:
        stopped.append(record)
    assert stopped.path.read_bytes() == content


def test_nothing_to_drop_touches_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Records(path).keep_until(5)
    assert not path.exists()
    path.write_bytes(b'{"step":3 , "kind":"train"}\n')  # not as we would write it
    before = path.stat()
    Records(path).keep_until(3)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_to_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    file = Records(tmp_path / "metrics.jsonl")
    file.bring_to_disk()
    assert not synced
    file.append(train(1))
    file.bring_to_disk()
    assert synced == [file.path.stat().st_ino]


def test_a_machine_that_stops_before_the_new_file_is_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    content = written(tmp_path / "metrics.jsonl")

    def stop(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(OSError, match="Input/output error"):
        Records(tmp_path / "metrics.jsonl").keep_until(10)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense", "Expecting value"),
        (b"", "Expecting value"),
        (b'{"kind": "train", "step": 1', "delimiter"),
        (b'{"kind": "train", "step": 1}{"kind": "train", "step": 2}', "Extra data"),
        (b'{"kind": "train", "loss": 1}', 'whole "step"'),
        (b'{"kind": "train", "step": 1.5}', 'whole "step"'),
        (b'{"kind": "train", "step": true}', 'whole "step"'),
        (b'{"kind": 3, "step": 1}', 'a "kind"'),
        (b"[1]", "no object"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_a_broken_line_that_is_not_the_last_is_named(tmp_path, line, words):
    path = tmp_path / "metrics.jsonl"
    first, *others = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([first, line + b"\n", *others]))
    before = path.read_bytes()
    for broken in (lambda: read_records(path), lambda: Records(path).keep_until(0)):
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 2") as told:
            broken()
        assert words in str(told.value)
    assert path.read_bytes() == before


def test_a_record_that_json_cannot_hold_writes_nothing(tmp_path):
    content = written(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError, match="not JSON serializable"):
        Records(tmp_path / "metrics.jsonl").append({"kind": "train", "step": 1, "loss": object()})
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_the_file_as_it_was(tmp_path):
    """With a real limit on the size of a file, which the system enforces in the middle of a write."""
    resource = pytest.importorskip("resource")
    import signal

    path = tmp_path / "metrics.jsonl"
    content = written(path)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Records(path).append(train(40))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == content
    Records(path).append(train(40))
    assert read_records(path) == [*SEVERAL, train(40)]


def test_an_evaluation_that_is_owed_is_not_there_twice(tmp_path):
    records = Records(tmp_path / "metrics.jsonl")
    for kind, step in (("train", 1), ("evaluation", 1), ("train", 2), ("evaluation", 2), ("train", 3)):
        records.append({"kind": kind, "step": step})
    records.keep_until(2, owed=["evaluation"])
    left = [(record["kind"], record["step"]) for record in read_records(records.path)]
    assert left == [("train", 1), ("evaluation", 1), ("train", 2)]
