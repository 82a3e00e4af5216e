"""From what was asked to cases, and cases that grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benched import CPU, CUDA, Clock, tiny

from vitrail.benchmark import measure as measuring
from vitrail.benchmark.benchmark import measure_growing
from vitrail.benchmark.case import Missing
from vitrail.benchmark.measure import Facts, measure
from vitrail.benchmark.plan import WHATS, check_places, checked_precision, planned
from vitrail.benchmark.report import Measured
from vitrail.errors import ConfigError
from vitrail.system import processor


class TestPlan:
    def plan(self, names=(), what=None, batch=None, size=None, grow=None, device=CPU, data=None):
        cases = planned(names, what, batch, ("fp32", None), size, grow, device, data)
        return [(case.name, case.what, case.size, case.batch) for case in cases]

    def test_all_by_itself(self):
        assert self.plan() == [("B/16", what, "224", 1 if what == "latency" else 8) for what in WHATS]
        assert self.plan(device=CUDA, what="training") == [("B/16", "training", "224", 256)]
        assert [what for _, what, _, _ in self.plan(data="digits")] == [*WHATS, "loader", "end-to-end"]
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
            ({"what": "speed"}, "--what speed: give some of inference, training, latency"),
            ({"what": "trainin"}, "did you mean 'training'"),
            ({"what": ","}, "--what is empty"),
            ({"what": "inference,loader"}, "--what loader needs images: name them by --data"),
            ({"what": "inference", "data": "digits"}, "--data is for --what loader and end-to-end"),
            ({"grow": "batch", "data": "digits"}, "--what inference or --what training"),
            ({"names": ["B16"]}, "unknown model 'B16'"),
            ({"size": 100}, "does not divide into patches of 16"),
            ({"grow": "depth"}, "--grow depth: give one of resolution, batch, model"),
            ({"grow": "batch", "what": "latency"}, "--what inference or --what training"),
            ({"grow": "batch", "names": ["B/16", "S/16"]}, "takes one model, not 2"),
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
        assert checked_precision(None, CPU) == ("fp32", None)
        assert checked_precision(None, CUDA) == ("bf16", None)
        with pytest.raises(ConfigError, match=r"bf16: products do not work .*SIGILL\): use fp32"):
            checked_precision("bf16", CPU)
        monkeypatch.setattr(processor, "probe_bf16", lambda cap: processor.ProbeResult(works=True, detail=""))
        assert checked_precision("bf16", CPU) == ("bf16", None)

    def test_precisions_that_only_some_ways_have(self):
        assert checked_precision("fp8", CUDA) == ("bf16", "fp8")
        assert checked_precision("int8", CPU) == ("fp32", "int8")
        assert checked_precision("auto", CPU) == ("fp32", "auto")
        with pytest.raises(ConfigError, match="fp8: give fp32, bf16, int8 or auto on cpu"):
            checked_precision("fp8", CPU)
        with pytest.raises(ConfigError, match="int8: give fp32, bf16 or fp8 on cuda"):
            checked_precision("int8", CUDA)
        (case,) = planned([], "inference", None, ("bf16", "fp8"), None, None, CUDA)
        assert (case.precision, case.beyond) == ("bf16", "fp8")

    def test_a_figure_needs_matplotlib_before_anything_is_measured(self, monkeypatch, tmp_path):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        check_places(tmp_path / "a.json", None)
        with pytest.raises(ConfigError, match="matplotlib is not installed here; keep the numbers by --out"):
            check_places(None, tmp_path / "a.png")


class TestGrowing:
    cases = tuple(tiny(batch=batch) for batch in (1, 2, 4, 8))

    def grown(self, measured, seconds=1000.0, taken=1.0):
        """`measured`: for each case the ways that fail in it."""
        clock, asked, found = Clock(), [], Measured()
        row = measuring.row(self.cases[0], ("vitrail", "eager"), Facts(7, "fp32", None, 0.0), [[1.0]], 1, 1.0)

        def how(case, peers, without):
            asked.append((case.batch, tuple(peers), set(without)))
            clock.time += taken
            missing = measured.get(case.batch, [])
            rows = [] if ("all", "") in missing else [replace(row, batch=case.batch)]
            return Measured(rows, [Missing(str(case), *key, "out of memory") for key in missing])

        notes = measure_growing(self.cases, ["timm", "torchvision"], how, seconds, found, clock)
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
        assert notes == ["ended at tiny inference, 32 px, batch 4, fp32: nothing could be measured there any more"]

    def test_the_end_of_time(self):
        _, batches, notes = self.grown({}, seconds=25, taken=10)
        assert batches == [1, 2]
        assert notes[0].startswith(
            "ended before tiny inference, 32 px, batch 4, fp32: it would not have fitted into the 25 s"
        )

    def test_what_does_not_fit_into_the_memory_of_a_cpu(self, monkeypatch, tmp_path):
        (tmp_path / "meminfo").write_text("MemTotal: 999999 kB\nMemAvailable:     100 kB\n")
        monkeypatch.setattr(measuring, "MEMORY_INFO", tmp_path / "meminfo")
        assert measuring.free_memory() == 102_400
        found = measure(tiny("training"), [], modes=["eager"], rounds=1)
        assert not found.rows
        (missing,) = found.missing
        assert "it would take about" in missing.reason
        monkeypatch.setattr(measuring, "MEMORY_INFO", tmp_path / "nothing")
        assert measuring.free_memory() is None
        measuring.check_memory(tiny("training"))
