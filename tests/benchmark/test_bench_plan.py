"""From what was asked to cases, and cases that grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benched import CPU, CUDA, Clock, tiny

from against_peers import check_plot
from peer_libraries.growth import measure_growth, plan_growth
from vitrail.benchmark import measure as measuring
from vitrail.benchmark.bench import WITHOUT_DATA, choose_precisions, make_case, parse_what
from vitrail.benchmark.case import NotMeasured
from vitrail.benchmark.measure import CandidateFacts, MeasureOptions, measure_case
from vitrail.benchmark.report import Measurements
from vitrail.errors import ConfigError
from vitrail.system import processor


class TestPlan:
    def plan(self, names=(), what=None, batch=None, size=None, grow=None, device=CPU, data=None):
        precisions = "fp32", None
        whats = parse_what(what, data, ["inference"] if grow else WITHOUT_DATA)
        if grow:
            cases = plan_growth(grow, names, whats, batch, precisions, size, device)
        else:
            cases = [
                make_case(what, name, batch, precisions, size, device) for name in names or ["B/16"] for what in whats
            ]
        return [(case.name, case.what, case.size, case.batch) for case in cases]

    def test_all_by_itself(self):
        assert self.plan() == [("B/16", what, "224", 1 if what == "latency" else 8) for what in WITHOUT_DATA]
        assert self.plan(device=CUDA, what="training") == [("B/16", "training", "224", 256)]
        assert [what for _, what, _, _ in self.plan(data="digits")] == ["loader", "end-to-end", *WITHOUT_DATA]
        assert self.plan(data="digits", what="end-to-end") == [("B/16", "end-to-end", "224", 8)]

    def test_as_asked(self):
        asked = self.plan(["S/16", "Ti/8"], "latency,inference", 4, 64)
        assert asked == [
            (name, *rest) for name in ("S/16", "Ti/8") for rest in (("latency", "64", 1), ("inference", "64", 4))
        ]

    def test_growing(self):
        assert [size for _, _, size, _ in self.plan(["H/14"], grow="resolution")] == [
            "224",
            "378",
            "504",
            "756",
            "1022",
        ]
        assert [size for _, _, size, _ in self.plan(grow="resolution")] == ["224", "384", "512", "768", "1024"]
        assert [batch for *_, batch in self.plan(["S/16"], grow="batch")] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
        assert [name for name, *_ in self.plan(grow="model", batch=1)] == ["Ti/16", "S/16", "B/16", "L/16", "H/14"]
        assert self.plan(["Ti/16", "S/16"], "training", grow="model")[1] == ("S/16", "training", "224", 8)

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ({"what": "speed"}, "--what speed"),
            ({"what": "trainin"}, "did you mean 'training'"),
            ({"what": ","}, "--what is empty"),
            ({"what": "inference,loader"}, "--data"),
            ({"what": "inference", "data": "digits"}, "--what loader"),
            ({"grow": "batch", "data": "digits"}, "--grow"),
            ({"names": ["B16"]}, "unknown model 'B16'"),
            ({"size": 100}, "patches of 16"),
            ({"grow": "depth"}, "resolution, batch, model"),
            ({"grow": "batch", "what": "latency"}, "--grow"),
            ({"grow": "batch", "names": ["B/16", "S/16"]}, "not 2"),
            ({"grow": "batch", "batch": 3}, "leave --batch out"),
            ({"grow": "resolution", "size": 224}, "leave --size out"),
        ],
    )
    def test_what_cannot_be(self, asked, told):
        with pytest.raises(ConfigError, match=told):
            self.plan(**asked)

    def test_precision(self, monkeypatch):
        dies = processor.ProbeResult(works=False, detail="the process was killed by SIGILL")
        monkeypatch.setattr(processor, "probe_bf16", lambda cap: dies)
        assert choose_precisions(None, CPU) == ("fp32", None)
        assert choose_precisions(None, CUDA) == ("bf16", None)
        with pytest.raises(ConfigError, match="SIGILL"):
            choose_precisions("bf16", CPU)
        monkeypatch.setattr(processor, "probe_bf16", lambda cap: processor.ProbeResult(works=True, detail=""))
        assert choose_precisions("bf16", CPU) == ("bf16", None)

    def test_precisions_that_only_some_ways_have(self):
        assert choose_precisions("fp8", CUDA) == ("bf16", "fp8")
        assert choose_precisions("int8", CPU) == ("fp32", "int8")
        assert choose_precisions("auto", CPU) == ("fp32", "auto")
        with pytest.raises(ConfigError, match="int8 or auto"):
            choose_precisions("fp8", CPU)
        with pytest.raises(ConfigError, match="bf16 or fp8"):
            choose_precisions("int8", CUDA)
        case = make_case("inference", "B/16", None, ("bf16", "fp8"), None, CUDA)
        assert (case.precision, case.extra_precision) == ("bf16", "fp8")

    def test_a_figure_needs_matplotlib_before_anything_is_measured(self, monkeypatch, tmp_path):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="matplotlib"):
            check_plot(tmp_path / "a.png")


class TestGrowing:
    cases = tuple(tiny(batch=batch) for batch in (1, 2, 4, 8))

    def grown(self, measured, seconds=1000.0, taken=1.0):
        """`measured`: for each case the ways that fail in it."""
        clock, asked, found = Clock(), [], Measurements()
        row = measuring.make_row(
            self.cases[0], ("vitrail", "eager"), CandidateFacts(7, "fp32", None, 0.0), [[1.0]], 1, 1.0
        )

        def how(case, peers, without):
            asked.append((case.batch, tuple(peers), set(without)))
            clock.time += taken
            missing = measured.get(case.batch, [])
            rows = [] if ("all", "") in missing else [replace(row, batch=case.batch)]
            return Measurements(rows, [NotMeasured(str(case), *key, "out of memory") for key in missing])

        notes = measure_growth(self.cases, ["timm", "torchvision"], how, seconds, found, clock)
        return asked, [row.batch for row in found.rows], notes

    def test_to_the_end(self):
        asked, batches, notes = self.grown({})
        assert batches == [1, 2, 4, 8]
        assert not notes
        assert all(peers == ("timm", "torchvision") and not without for _, peers, without in asked)

    def test_what_failed_is_not_tried_at_more(self):
        asked, batches, _ = self.grown({2: [("vitrail", "eager"), ("timm", "")]})
        assert batches == [1, 2, 4, 8]
        assert asked[1][1:] == (("timm", "torchvision"), set())
        assert asked[2][1] == ("torchvision",)
        assert ("vitrail", "eager") in asked[3][2]

    def test_the_end_of_memory(self):
        _, batches, notes = self.grown({4: [("all", "")]})
        assert batches == [1, 2]
        (note,) = notes
        assert "batch 4" in note

    def test_the_end_of_time(self):
        _, batches, notes = self.grown({}, seconds=25, taken=10)
        assert batches == [1, 2]
        assert "batch 4" in notes[0]
        assert "25 s" in notes[0]

    def test_what_does_not_fit_into_the_memory_of_a_cpu(self, monkeypatch, tmp_path):
        (tmp_path / "meminfo").write_text("MemTotal: 999999 kB\nMemAvailable:     100 kB\n")
        monkeypatch.setattr(measuring, "MEMORY_INFO", tmp_path / "meminfo")
        assert measuring.read_free_memory() == 102_400
        found = measure_case(tiny("training"), MeasureOptions(rounds=1))
        assert not found.rows
        (missing,) = found.missing
        assert "GiB" in missing.reason
        monkeypatch.setattr(measuring, "MEMORY_INFO", tmp_path / "nothing")
        assert measuring.read_free_memory() is None
        measuring.check_memory(tiny("training"))
