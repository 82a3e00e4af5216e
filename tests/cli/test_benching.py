"""`vitrail bench` as a person meets it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from vitrail.cli.bench import COLUMNS


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # where reports without a file go
    from vitrail.benchmark import measure as measuring
    from vitrail.fast import timing
    from vitrail.model.variants import SIZES, Size

    monkeypatch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))
    monkeypatch.setitem(timing.SIDES, "cpu", 32)
    monkeypatch.setattr(measuring, "TURN_SECONDS", 0.001)


SMALL = ("Ti/16", "--size", "32", "--batch", "2", "--rounds", "2", "--device", "cpu")


def test_the_table_and_the_json_tell_the_same(run, tmp_path):
    out = tmp_path / "speed.json"
    code, told, aside = run("bench", *SMALL, "--what", "inference,latency", "--out", str(out))
    assert code == 0
    heading, *lines = told.splitlines()
    assert tuple(heading.split("\t")) == COLUMNS
    table = [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines if "\t" in line]
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in table] == [row["what"] for row in rows]
    assert {row["what"] for row in rows} == {"inference", "latency"}
    for shown, row in zip(table, rows, strict=True):
        assert (shown["library"], shown["way"]) == (row["library"], row["way"])
        assert float(shown["images/s"]) == pytest.approx(row["images_per_second"], rel=0.01)
        assert float(shown["ms"]) == pytest.approx(1000 * row["median_seconds"], rel=0.01)
        assert float(shown["distance"]) == pytest.approx(row["distance"], rel=0.1)
        assert shown["GiB"] == "–"
        assert (shown["p99 ms"] == "–") == (row["what"] == "inference")
    rest = [line for line in lines if "\t" not in line]
    assert sum("as fast as eager" in line for line in rest) == 2
    assert any("--compile" in line for line in rest)
    assert rest[-1] == f"written: {out}"
    assert "Ti/16 inference, 32 px, batch 2, fp32: building vitrail eager" in aside


@pytest.mark.slow
def test_a_stop_loses_only_the_case_that_is_measured(run, tmp_path, monkeypatch):
    from vitrail.benchmark import bench as benching

    plain, stops = benching.measure_case, [True]

    def measure(case, options):
        if case.what == "latency" and stops:
            raise KeyboardInterrupt
        return plain(case, options)

    monkeypatch.setattr(benching, "measure_case", measure)
    monkeypatch.setattr("vitrail.benchmark.machine.read_commit", lambda: None)  # a changed checkout measures all anew
    out = tmp_path / "speed here.json"
    for words in (["--out", str(out)], []):
        stops[:] = [True]
        code, told, aside = run("bench", *SMALL, *words)
        assert code == 130
        rows = [line.split("\t") for line in told.splitlines()]
        assert {row[1] for row in rows[1:]} == {"inference"}
        command = shlex.split(aside.splitlines()[-1].split("; ")[-1].removesuffix(" shows them"))
        assert command[:3] == ["vitrail", "bench", "--from"]
        code, shown, _ = run(*command[1:])
        assert code == 0
        assert shown.splitlines()[: len(rows)] == told.splitlines()
        assert "1 of 3 cases" in shown.splitlines()[-1]
        stops.clear()
        code, again, _ = run("bench", *SMALL, *words)
        assert code == 0
        assert again.splitlines()[: len(rows)] == told.splitlines(), "it is not measured again"
        assert {line.split("\t")[1] for line in again.splitlines() if "\t" in line} >= {"latency", "training"}


def test_rows_are_printed_when_they_are_measured(run, monkeypatch, capsys):
    from vitrail.benchmark import bench as benching

    plain, seen = benching.measure_case, []

    def measure(case, options):
        seen.append(capsys.readouterr().out)
        return plain(case, options)

    monkeypatch.setattr(benching, "measure_case", measure)
    run("bench", *SMALL)
    assert seen[0] == ""
    assert "\tinference\t" in seen[1]
    assert "\tlatency\t" in seen[2]


def test_a_file_is_shown_again(run):
    """Of another machine, with other libraries: what benchmarks/against_peers.py wrote."""
    file = Path(__file__).parents[2] / "benchmarks/results/bench_b16_h200.json"
    code, told, aside = run("bench", "--from", str(file))
    assert (code, aside) == (0, "")
    content = json.loads(file.read_text())
    assert sum("\t" in line for line in told.splitlines()) == 1 + len(content["rows"])
    assert content["comparisons"][0] in told


def test_nothing_measured_is_a_failure(run, tmp_path, monkeypatch):
    from vitrail.benchmark import measure as measuring

    monkeypatch.setattr(measuring, "read_free_memory", lambda: 1)
    code, told, _ = run("bench", *SMALL, "--what", "training", "--out", str(tmp_path / "a.json"))
    assert code == 1
    assert "not measured: every library (Ti/16 training, 32 px, batch 2, fp32)" in told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("B/17x",), "B/17x"),
        (("--what", "speed"), "training, loader, end-to-end"),
        (("--precision", "int4", "--device", "cpu"), "fp32, bf16, int8 or auto"),
        (("--what", "loader"), "--data DATA"),
        (("--data", "no/such", "--what", "loader", "--device", "cpu"), "no data set"),
        (("--from", "no/such.json"), "--from no/such.json"),
        (("B/16", "--from", "a.json"), "leave NAMES out"),
        (("--out", "no/such/file.json"), "there is no folder"),
        (("--device", "tpu0"), "device = 'tpu0'"),
    ],
)
def test_errors_are_a_sentence(run, words, sentence):
    code, told, aside = run("bench", *words)
    assert code == (1 if "no data set" in sentence else 2)
    assert not told
    assert aside.startswith("error: ")
    assert sentence in aside
    assert len(aside.splitlines()) == 1
