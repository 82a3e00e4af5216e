"""What a whole benchmark tells: rows, comparisons, JSON, figures."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from pictures import picture

from against_peers import compare_with_peers, parse_arguments, run_comparison
from peer_libraries.conclusions import compare_libraries
from peer_libraries.figures import MOST_LINES, draw_report, select_lines
from peers import timm  # noqa: F401  so that torchvision imports beside any torch
from vitrail.benchmark import bench as benching
from vitrail.benchmark import machine
from vitrail.benchmark import measure as measuring
from vitrail.benchmark.bench import WITHOUT_DATA, SpeedOptions, bench
from vitrail.benchmark.report import FED, RESIDENT, BenchmarkReport, Measurements, compare_rows
from vitrail.errors import ConfigError
from vitrail.fast import timing
from vitrail.model.variants import SIZES, Size
from vitrail.system import processor


@pytest.fixture(scope="module")
def report():
    """Of a model by its name, which is made smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))
        patch.setitem(timing.SIDES, "cpu", 32)
        patch.setattr(measuring, "TURN_SECONDS", 0.001)
        find = importlib.util.find_spec
        patch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "vit_pytorch" else find(name, *of))
        options = SpeedOptions(size=32, batch=2, rounds=2, threads=1, device="cpu")
        return compare_with_peers(["Ti/16"], options, peers="timm,vit-pytorch")


class TestReport:
    def test_all_that_was_asked_for(self, report):
        assert {(row.what, row.library, row.way) for row in report.rows} >= {
            *((what, library, "eager") for what in WITHOUT_DATA for library in ("vitrail", "timm")),
        }
        assert [(each.library, each.way) for each in report.missing] == [
            ("every library", "compiled"),
            ("vit-pytorch", ""),
        ]
        assert "pip install vit-pytorch" in report.missing[1].reason
        assert len(report.notes) == 1
        assert report.machine["threads"] == 1

    def test_comparisons(self, report):
        assert len(report.comparisons) == 3
        fast, slow = (replace(report.rows[0], library=library) for library in ("vitrail", "timm"))
        slow = replace(slow, median_seconds=1.5 * fast.median_seconds, way="compiled")
        slower = replace(slow, median_seconds=9.0, way="eager")
        (line,) = compare_libraries([fast, slower, slow], "fp32")
        assert "vitrail eager is 1.50×" in line
        assert line.endswith("timm compiled")
        assert compare_libraries([fast], "fp32") == []

    def test_the_fast_way_beside_the_plain_one(self, report):
        plain = replace(report.rows[0], median_seconds=1.5)
        fast = replace(plain, way="fast", median_seconds=1.0, distance=2e-7)
        (line,) = compare_rows([plain, fast], "fp32")
        assert "fast (fp32, distance 2.0e-07) is 1.50× as fast as eager" in line
        assert compare_rows([plain], "fp32") == []

    def test_precisions_are_compared_apart(self, report):
        row = replace(report.rows[0], precision="bf16", median_seconds=1.0)
        peer = replace(row, library="timm", median_seconds=1.2, distance=None)
        eighth = replace(row, way="fast, fp8", precision="fp8", median_seconds=0.5, distance=0.021)
        begins = "Ti/16 inference, 32 px, batch 2"
        assert compare_libraries([row, eighth, peer], "bf16") == [
            f"{begins}, bf16: vitrail eager is 1.20× as fast as the best peer, timm eager",
            f"{begins}, any precision: vitrail fast, fp8 (fp8, distance 2.1e-02) is 2.40× as fast as the best peer, "
            "timm eager (bf16)",
        ]
        theirs = replace(eighth, library="openvino", median_seconds=0.4)
        assert compare_libraries([row, theirs], "bf16") == [
            f"{begins}, any precision: vitrail eager (bf16, distance 0.0e+00) is 0.40× as fast as the best peer, "
            "openvino fast, fp8 (fp8, distance 2.1e-02)"
        ]

    @pytest.mark.parametrize(("fed", "told"), [(96.0, "keeps up: 96%"), (61.0, "does not keep up: 61%")])
    def test_how_the_data_path_keeps_up(self, report, fed, told):
        one = replace(report.rows[0], what="end-to-end", images_per_second=100.0, way=RESIDENT)
        other = replace(one, way=f"{FED}, 16 workers", images_per_second=fed)
        (line,) = compare_rows([other, one], "fp32")
        assert f"batch 2, fp32: the data path {told} of the images/s" in line
        assert compare_rows([one], "fp32") == []

    def test_read_again(self, report, tmp_path):
        report.write(tmp_path / "a.json")
        assert BenchmarkReport.read(tmp_path / "a.json") == replace(
            report, machine=json.loads(json.dumps(report.machine))
        )
        assert BenchmarkReport.read(tmp_path / "a.json").comparisons == report.comparisons
        for content in ("{}", "["):
            (tmp_path / "b.json").write_text(content)
            with pytest.raises(ConfigError, match="--from"):
                BenchmarkReport.read(tmp_path / "b.json")
        with pytest.raises(ConfigError, match="No such file"):
            BenchmarkReport.read(tmp_path / "c.json")
        with pytest.raises(ConfigError, match="not a file"):
            BenchmarkReport.read(os.devnull)

    def test_json(self, report, tmp_path, monkeypatch):
        monkeypatch.setattr(
            benching, "measure_case", lambda case, options: Measurements([*report.rows], [], [*report.products])
        )
        again = bench(["Ti/16"], size=32, what="inference", device="cpu", out=tmp_path / "a.json")
        text = (tmp_path / "a.json").read_text()
        written = json.loads(text)
        assert written == json.loads(json.dumps(again.to_dict()))
        assert written["rows"][0]["seconds"] == report.rows[0].seconds
        assert written["comparisons"] == again.comparisons
        assert written["machine"]["versions"]["torch"] == torch.__version__
        for place in (str(Path.home()), str(tmp_path), str(Path(benching.__file__).parent), sys.prefix):
            assert place not in text

    def test_threads_are_put_back(self, monkeypatch):
        before, seen = torch.get_num_threads(), []
        monkeypatch.setattr(benching, "measure_case", lambda *_: seen.append(torch.get_num_threads()) or Measurements())
        bench(["Ti/16"], what="latency", threads=before + 1, device="cpu")
        assert seen == [before + 1]
        assert torch.get_num_threads() == before

    def test_places_are_looked_at_first(self, tmp_path):
        with pytest.raises(ConfigError, match="no folder"):
            bench(out=tmp_path / "nowhere/a.json")
        with pytest.raises(ConfigError, match="is a folder"):
            bench(out=tmp_path)

    def test_the_machine(self, monkeypatch, tmp_path):
        (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Fine Processor\nmodel name\t: again\n")
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
        assert machine.read_processor_name() == "A Fine Processor"
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
        assert machine.read_processor_name()
        monkeypatch.setattr(machine.vitrail, "__file__", str(tmp_path / "a/b/c.py"))
        assert machine.read_commit() is None


def interrupt_nothing(kind, values):
    pass


class TestFromPython:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))

    def test_bench_returns_a_report_and_tells_what_happens(self, tmp_path):
        events = []
        samples = [(picture(number), "ab"[number % 2]) for number in range(8)]
        report = bench(
            "Ti/16",
            what=["inference", "loader"],
            batch=2,
            size=32,
            data=samples,
            workers=0,
            rounds=1,
            threads=1,
            device="cpu",
            out=str(tmp_path / "speed.json"),
            on_event=lambda kind, values: events.append((kind, values)),
        )
        assert {row.what for row in report.rows} == {"inference", "loader"}
        assert {kind for kind, _ in events} == {"message", "progress", "measured"}
        measured = [values for kind, values in events if kind == "measured"]
        assert [row["what"] for each in measured for row in each["rows"]] == [row.what for row in report.rows]
        assert {each["file"] for each in measured} == {str(tmp_path / "speed.json")}
        steps = [values["done"] for kind, values in events if kind == "progress"]
        assert steps == [0, 1, 2]
        assert any("building" in values["text"] for kind, values in events if kind == "message")
        assert BenchmarkReport.read(str(tmp_path / "speed.json")).to_dict() == json.loads(json.dumps(report.to_dict()))
        assert "Ti/16 inference, 32 px, batch 2" in repr(report)
        assert "images/s" in report._repr_html_()

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"models": "B/17x"}, "B/17x"),
            ({"rounds": 0}, "rounds = 0"),
            ({"batch": -1}, "batch = -1"),
            ({"what": ["speed"]}, "latency"),
            ({"what": "loader"}, "DATA"),
        ],
    )
    def test_errors_have_the_sentence_of_the_command(self, options, sentence):
        with pytest.raises(ConfigError, match=sentence):
            bench(**{"device": "cpu", **options})

    def test_an_interrupt_ends_it_and_writes_nothing(self, tmp_path):
        def interrupt(kind, values):
            if kind == "message":
                raise KeyboardInterrupt

        threads = torch.get_num_threads()
        with pytest.raises(KeyboardInterrupt):
            bench("Ti/16", size=32, device="cpu", threads=threads + 1, out=tmp_path / "a.json", on_event=interrupt)
        assert not (tmp_path / "a.json").exists()
        assert torch.get_num_threads() == threads

    def test_what_was_measured_before_an_interrupt_stays(self, tmp_path, monkeypatch):
        def interrupt(kind, values):
            if kind == "measured" and values["number"] == 2:
                raise KeyboardInterrupt

        options = {"size": 32, "batch": 2, "rounds": 1, "device": "cpu", "out": tmp_path / "a.json"}
        monkeypatch.setattr(machine, "read_commit", lambda: "0123abc")
        with pytest.raises(KeyboardInterrupt):
            bench("Ti/16", **options, on_event=interrupt)
        stopped = BenchmarkReport.read(tmp_path / "a.json")
        assert [row.what for row in stopped.rows] == ["inference", "inference", "latency", "latency"]
        assert len(stopped.measured) == 2
        assert "2 of 3" in repr(stopped)
        assert not list(tmp_path.glob("*.tmp"))
        monkeypatch.setattr(machine, "read_commit", lambda: "another")
        anew = bench("Ti/16", **options, on_event=interrupt_nothing)
        assert anew.rows[0].seconds != stopped.rows[0].seconds
        stopped.write(tmp_path / "a.json")
        monkeypatch.setattr(machine, "read_commit", lambda: "0123abc")
        other = bench("Ti/16", **{**options, "rounds": 2}, on_event=interrupt_nothing)
        assert len(other.rows[0].seconds) == 2, "another benchmark is measured anew"
        stopped.write(tmp_path / "a.json")
        whole = bench("Ti/16", **options, on_event=interrupt_nothing)
        assert [row.seconds for row in whole.rows[:4]] == [row.seconds for row in stopped.rows]
        assert [row.what for row in whole.rows[4:]] == ["training"]
        assert whole.measured is None
        assert BenchmarkReport.read(tmp_path / "a.json").measured is None

    def test_without_a_file_it_is_kept_in_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        report = bench("Ti/16", what="latency", size=32, rounds=1, device="cpu", on_event=interrupt_nothing)
        assert BenchmarkReport.read(tmp_path / "vitrail/bench.json").rows == report.rows
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # in which no folder can be made
        assert bench("Ti/16", what="latency", size=32, rounds=1, device="cpu", on_event=interrupt_nothing).rows


class TestScript:
    def test_a_figure_from_a_file(self, report, tmp_path):
        report.write(tmp_path / "a.json")
        again = run_comparison(parse_arguments(["--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]))
        assert again.comparisons == report.comparisons
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
        with pytest.raises(ConfigError, match="png"):
            run_comparison(parse_arguments(["--plot", "a.jpg"]))


class TestFigures:
    @pytest.fixture
    def figure(self, monkeypatch, tmp_path):
        """Puts a figure together without painting it."""
        figures = []

        def savefig(self, file, **options):
            figures.append(self)
            file.write(b"painted")

        monkeypatch.setattr(Figure, "savefig", savefig)

        def made(report) -> Figure:
            assert draw_report(report, tmp_path / "a.png") == tmp_path / "a.png"
            assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]
            return figures[-1]

        return made

    def test_bars(self, report, figure):
        axes = figure(report).axes
        assert [each.get_title("left") for each in axes] == [
            f"Ti/16 {what}, 32 px, batch {1 if what == 'latency' else 2}" for what in WITHOUT_DATA
        ]
        for each, what in zip(axes, WITHOUT_DATA, strict=True):
            rows = [row for row in report.rows if row.what == what]
            shown = [row.median_seconds * 1000 if what == "latency" else row.images_per_second for row in rows]
            assert [bar.get_width() for bar in each.patches] == shown
            assert [label.get_text() for label in each.get_yticklabels()] == [
                f"{row.library} {row.way}" for row in rows
            ]

    @pytest.mark.parametrize("remembers", [False, True])
    @pytest.mark.parametrize("axis", ["resolution", "batch", "model"])
    def test_lines(self, report, figure, axis, remembers):
        rows = [
            replace(row, size=str(32 * scale), batch=scale, parameters=10**6 * scale, images_per_second=100 / scale,
                    memory_bytes=scale * 2**30 if remembers else None)
            for row in report.rows[:2]
            for scale in (1, 2, 4)
        ]  # fmt: skip
        made = figure(replace(report, rows=rows, grown=axis))
        assert len(made.axes) == 1 + remembers
        for axes, values in zip(made.axes, ([100, 50, 25], [1, 2, 4]), strict=False):
            assert len(axes.lines) == 2
            for line in axes.lines:
                assert list(line.get_xdata()) == ([32, 64, 128] if axis == "resolution" else [1, 2, 4])
                assert list(line.get_ydata()) == values

    def test_of_many_ways_the_fastest_of_each_library_is_drawn(self, report):
        row = report.rows[0]
        rows = [
            replace(row, library=library, way=str(way), batch=batch, images_per_second=10.0 * way + batch)
            for library in ("vitrail", "timm")
            for way in range(MOST_LINES // 2)
            for batch in (1, 2)
        ]
        assert select_lines(rows) == (rows, False)
        fp8 = replace(row, way="fast", precision="fp8", images_per_second=1.0)
        failed = replace(row, way="early", batch=1, images_per_second=1e9)
        kept, chosen = select_lines([*rows, fp8, failed])
        assert chosen
        last = str(MOST_LINES // 2 - 1)
        assert {(each.library, each.way) for each in kept} == {("vitrail", last), ("timm", last), ("vitrail", "fast")}
