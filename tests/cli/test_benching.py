"""`vitrail bench` as a person meets it."""

from __future__ import annotations

import json

import pytest

from vitrail.cli.bench import COLUMNS


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    from vitrail.benchmark import measure as measuring
    from vitrail.fast import timing
    from vitrail.model.variants import SIZES, Size

    monkeypatch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))
    monkeypatch.setitem(timing.SIDES, "cpu", 32)
    monkeypatch.setattr(measuring, "TURN_SECONDS", 0.001)


SMALL = ("Ti/16", "--size", "32", "--batch", "2", "--rounds", "2", "--device", "cpu", "--peers", "none")


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
    assert rest == [
        "not measured: every library compiled: left out, "
        "on a CPU it takes minutes to compile: ask for it with --compile",
        "note: memory is measured on a GPU alone",
        f"written: {out}",
    ]
    assert "Ti/16 inference, 32 px, batch 2, fp32: building" in aside


def test_growing_and_its_figure_drawn_later(run, tmp_path, monkeypatch):
    from vitrail.benchmark import plan

    monkeypatch.setattr(plan, "BATCHES", (1, 2))
    out, plot = tmp_path / "growth.json", tmp_path / "growth.png"
    command = ("bench", "Ti/16", "--size", "32", "--rounds", "1", "--device", "cpu", "--peers", "none", "--no-compile")
    code, told, _ = run(*command, "--grow", "batch", "--out", str(out))
    assert code == 0
    assert {line.split("\t")[6] for line in told.splitlines()[1:] if "\t" in line} == {"1", "2"}
    assert "left out, --no-compile" in told
    code, again, aside = run("bench", "--from", str(out), "--plot", str(plot))
    assert (code, aside) == (0, "")
    assert again.splitlines()[:-1] == told.splitlines()[:-1]
    assert again.splitlines()[-1] == f"written: {plot}"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert plot.with_suffix(".svg").exists()


def test_nothing_measured_is_a_failure(run, tmp_path, monkeypatch):
    from vitrail.benchmark import measure as measuring

    monkeypatch.setattr(measuring, "free_memory", lambda: 1)
    code, told, _ = run("bench", *SMALL, "--what", "training", "--plot", str(tmp_path / "a.png"))
    assert code == 1
    assert "not measured: every library (Ti/16 training, 32 px, batch 2, fp32): it would take about" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("B/17x",), "unknown model 'B/17x'"),
        (("--what", "speed"), "--what speed: give some of inference, training, latency, loader, end-to-end"),
        (("--peers", "keras"), "--peers: unknown 'keras': give some of timm"),
        (("--precision", "int4", "--device", "cpu"), "--precision int4: give fp32, bf16, int8 or auto"),
        (("--what", "loader"), "--what loader needs images: name them by --data DATA"),
        (("--data", "no/such", "--what", "loader", "--device", "cpu"), "there is no data set 'no/such'"),
        (("--from", "no/such.json"), "--from no/such.json: it cannot be read"),
        (("B/16", "--from", "a.json"), "--from shows what was measured and measures nothing: leave NAMES out"),
        (("--grow", "width"), "--grow width: give one of resolution, batch, model"),
        (("--plot", "speed.pdf"), "--plot speed.pdf: a figure is a .png"),
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
