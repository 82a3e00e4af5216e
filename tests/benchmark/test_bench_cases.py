"""One case on tiny models: what is measured, in which order, what the numbers are, and what could not be."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch
from benched import CPU, CUDA, Clock, tiny
from torch import nn

from vitrail.benchmark import candidates
from vitrail.benchmark import measure as measuring
from vitrail.benchmark.candidates import plain_candidates
from vitrail.benchmark.case import BuiltCandidate, Candidate, RandomBatch, make_batch, make_model
from vitrail.benchmark.measure import MeasureOptions, measure_case
from vitrail.fast import timing
from vitrail.fast.optimize import optimize
from vitrail.model.cost import compute_cost


class StandIn:
    """For the product: 100 operations in a quarter of a second."""

    flops = 100

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self) -> None:
        self.clock.time += 0.25


class TestCase:
    @pytest.mark.parametrize("what", ["inference", "training", "latency"])
    def test_our_ways(self, what):
        case = tiny(what, batch=1 if what == "latency" else 3)
        found = measure_case(case, MeasureOptions(["eager"], 3))
        assert not found.missing
        assert [(row.library, row.way) for row in found.rows] == [
            ("vitrail", "eager"),
            *([("vitrail", "fast")] if what != "training" else []),
        ]
        flops = compute_cost(case.architecture).flops * case.batch * (3 if what == "training" else 1)
        (product,) = found.products
        for row in found.rows:
            assert row.distance < 1e-5
            assert row.parameters == compute_cost(case.architecture).parameters
            assert row.memory_bytes is None
            assert len(row.seconds) == 3
            assert all(len(turn) >= 10 if what == "latency" else len(turn) == 1 for turn in row.seconds)
            assert row.images_per_second == pytest.approx(case.batch / row.median_seconds)
            assert row.flops_per_second == pytest.approx(flops / row.median_seconds)
            assert row.share_of_product == pytest.approx(row.flops_per_second / product["flops_per_second"])
            assert (row.p99_seconds is not None) == (what == "latency")

    def test_distance_tells_a_way_that_computes_something_else(self, monkeypatch):
        def wrong(model, *rest, **more):
            fast = optimize(model, *rest, **more)
            fast.head.weight.data.mul_(1.5)
            return fast

        monkeypatch.setattr(candidates, "optimize", wrong)
        rows = measure_case(tiny(), MeasureOptions(["eager"], 1)).rows
        assert rows[0].distance < 1e-6
        assert 0.4 < rows[1].distance < 0.6

    def test_a_training_step_trains(self):
        case = tiny("training", batch=4)
        batch, ours = make_batch(case), make_model(case.architecture)
        (way,) = plain_candidates("vitrail", ours, case, batch, ["eager"])
        step, *_ = way.build()

        def loss() -> float:
            return nn.functional.cross_entropy(step(), batch.labels).item()

        first = loss()
        for _ in range(20):
            last = loss()
        assert last < 0.9 * first
        again, *_ = way.build()
        torch.testing.assert_close(again(), ours(batch.images), rtol=1e-5, atol=1e-5)

    def test_compiled_and_autotuned_are_other_ways(self, monkeypatch):
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or model)
        rows = measure_case(tiny(), MeasureOptions(["eager", "compiled", "autotuned"], 1)).rows
        assert [row.way for row in rows] == ["eager", "compiled", "autotuned", "fast"][: len(rows)]
        assert compiled == [{"dynamic": False, "mode": mode} for mode in (None, "max-autotune-no-cudagraphs")]

    def test_a_way_may_have_a_precision_of_its_own_or_find_one(self, monkeypatch):
        def fast(case, batch, ours):
            yield Candidate(
                "vitrail",
                "fast",
                lambda: BuiltCandidate(lambda: torch.ones(2, 10), 7),
                precision="fp8",
                has_our_weights=True,
            )
            yield Candidate(
                "vitrail", "found", lambda: BuiltCandidate(lambda: torch.ones(2, 10), 7, "int8"), precision="auto"
            )

        monkeypatch.setattr(candidates, "fast_candidates", fast)
        plain, own, found = measure_case(tiny(), MeasureOptions(["eager"], 1)).rows
        assert [row.precision for row in (plain, own, found)] == ["fp32", "fp8", "int8"]
        assert plain.case == own.case == found.case
        assert (own.distance is None, found.distance is None) == (False, True)

    @pytest.mark.parametrize(("recorded", "expected"), [(False, 50), (True, 70)])
    def test_memory_is_that_of_a_step_but_of_the_recording_where_there_is_one(self, monkeypatch, recorded, expected):
        peaks, calls = iter([70, 50]), []
        memory = types.SimpleNamespace(restart=lambda: calls.append("restart"), peak=lambda: next(peaks))
        monkeypatch.setattr(measuring, "PeakMemory", lambda device: memory)

        def step() -> torch.Tensor:
            calls.append("step")
            return torch.ones(2, 10)

        way = Candidate("timm", "some", lambda: BuiltCandidate(step, 7), recorded)
        ready = measuring.prepare_candidate(way, tiny(), torch.ones(2, 10), timing.Stopwatch(CPU))
        assert ready.facts.memory == expected
        assert calls[:3] == ["step", "restart", "step"]

    def test_ways_on_a_gpu(self):
        empty = RandomBatch(torch.empty(0), torch.empty(0))

        def names(what: str, batch: int, *modes: str) -> list[tuple[str, bool]]:
            case = replace(tiny(what, batch), device=CUDA)
            return [(way.name, way.is_recorded) for way in plain_candidates("x", nn.Identity(), case, empty, modes)]

        eager, compiled = ("eager", False), ("compiled", False)
        graphs = [("CUDA graph", True), ("compiled, CUDA graph", True)]
        assert names("latency", 1, "eager", "compiled") == [eager, compiled, *graphs]
        assert names("inference", 8, "eager", "compiled") == [eager, compiled, *graphs]
        assert names("latency", 1, "eager") == [eager, graphs[0]]
        assert names("inference", 2, "autotuned") == [("autotuned", False), ("autotuned, CUDA graph", True)]
        assert names("training", 1, "eager", "compiled") == [eager, compiled]

    def test_long_steps_are_not_recorded_and_that_is_told(self, monkeypatch):
        case, empty = replace(tiny(), device=CUDA), RandomBatch(torch.empty(0), torch.empty(0))
        monkeypatch.setattr(candidates, "GRAPH_FLOPS", case.flops - 1)
        first, missing = candidates.our_candidates(case, empty, nn.Identity(), ["eager"])
        assert first.name == "eager"
        assert missing.library == "every library"
        assert "CUDA graph" in missing.way


class TestTurns:
    """With ways that take as long as we say."""

    def ways(self, monkeypatch, **ways):
        """Each a list of the seconds of its calls, or what it raises, or the logits that it gives."""
        self.clock, self.order = Clock(), []

        def made(name: str, calls):
            library, _, way = name.partition("_")
            calls = iter(calls)

            def step() -> torch.Tensor:
                self.order.append(library)
                call = next(calls)
                if isinstance(call, Exception):
                    raise call
                if isinstance(call, torch.Tensor):
                    return call
                self.clock.time += call
                return torch.ones(2, 10)

            return Candidate(library, way, lambda: BuiltCandidate(step, 7))

        found = [made(name, calls) for name, calls in ways.items()]
        monkeypatch.setattr(measuring, "our_candidates", lambda *given: iter(found))
        monkeypatch.setattr(measuring, "ReferenceProduct", lambda *given: StandIn(self.clock))
        return measure_case(tiny(), MeasureOptions(["eager"], 3, clock=self.clock))

    def test_medians_of_turns_that_alternate(self, monkeypatch):
        before = [1.0] * (1 + measuring.WARM_UPS + 1)
        found = self.ways(monkeypatch, vitrail_eager=[*before, 2, 4, 12], timm_eager=[*before, 3, 1, 1])
        ours, theirs = found.rows
        assert "".join(name[0] for name in self.order) == "vvvv" + "tttt" + "vt" + "tv" + "vt"
        assert (ours.seconds, ours.median_seconds, ours.images_per_second) == ([[2], [4], [12]], 4, 0.5)
        assert (theirs.seconds, theirs.median_seconds, theirs.images_per_second) == ([[3], [1], [1]], 1, 2)
        assert theirs.distance is None
        assert found.products[0]["flops_per_second"] == 400
        assert ours.share_of_product == pytest.approx(2 * compute_cost(tiny().architecture).flops / 4 / 400)

    def test_those_that_fail_are_named_and_the_others_measured(self, monkeypatch):
        fine = [1.0] * 20
        found = self.ways(
            monkeypatch,
            vitrail_eager=fine,
            timm_eager=[RuntimeError("no kernel in /opt/somewhere/lib.so\nand so on")],
            timm_compiled=[*fine[:5], torch.OutOfMemoryError("Tried to allocate")],
            torchvision_eager=[torch.zeros(2, 11)],
            transformers_eager=[torch.full((2, 10), torch.nan)],
            other_eager=fine,
        )
        assert [row.library for row in found.rows] == ["vitrail", "other"]
        assert all(len(row.seconds) == 3 for row in found.rows)
        reasons = {(each.library, each.way): each.reason for each in found.missing}
        assert reasons.keys() == {
            ("timm", "eager"), ("timm", "compiled"), ("torchvision", "eager"), ("transformers", "eager"),
        }  # fmt: skip
        assert reasons["timm", "eager"].endswith("RuntimeError: no kernel in lib.so")
        assert "out of memory" in reasons["timm", "compiled"]
        assert "(2, 11)" in reasons["torchvision", "eager"]
        assert "finite" in reasons["transformers", "eager"]
        assert {each.where for each in found.missing} == {"tiny inference, 32 px, batch 2, fp32"}
