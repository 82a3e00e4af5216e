"""A benchmark on tiny models: what is measured, in which order, what the numbers are, and what could not be."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from peers import timm, torchvision, transformers  # so that torchvision imports beside any torch
from vitrail import processor
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.fast import measure as timing
from vitrail.model.cost import cost
from vitrail.model.variants import SIZES, Size, architecture
from vitrail.workflows import bench, bench_peers, bench_ways
from vitrail.workflows.bench import measure, measure_growing, run
from vitrail.workflows.bench_figures import draw
from vitrail.workflows.bench_peers import beyond_plain, importable, in_a_line, parse_peers, peer_model
from vitrail.workflows.bench_plan import WHATS, checked_precision, planned
from vitrail.workflows.bench_report import Measured
from vitrail.workflows.bench_ways import Batch, Built, Case, Missing, Way, ways_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = {"image_size": 32, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 10}
INSTALLED = [library.__name__ for library in (timm, torchvision, transformers)]


def tiny(what: str = "inference", batch: int = 2, **options) -> Case:
    return Case(what, "tiny", architecture("Ti/8", **{**TINY, **options}), batch, "fp32", CPU)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(timing.SIDES, "cpu", 32)
    monkeypatch.setattr(bench, "TURN_SECONDS", 0.001)
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)  # takes longer than the rest, with all those libraries loaded


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


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
        found = measure(case, [], compiles=False, rounds=3)
        assert not found.missing
        assert [(row.library, row.way) for row in found.rows] == [
            ("vitrail", "eager"),
            *([("vitrail", "packed")] if what != "training" and torch.backends.mkldnn.is_available() else []),
        ]
        flops = cost(case.architecture).flops * case.batch * (3 if what == "training" else 1)
        (product,) = found.products
        for row in found.rows:
            assert row.distance < 1e-5
            assert row.parameters == cost(case.architecture).parameters
            assert row.memory_bytes is None
            assert len(row.seconds) == 3
            assert all(len(turn) >= 10 if what == "latency" else len(turn) == 1 for turn in row.seconds)
            assert row.images_per_second == pytest.approx(case.batch / row.median_seconds)
            assert row.flops_per_second == pytest.approx(flops / row.median_seconds)
            assert row.share_of_product == pytest.approx(row.flops_per_second / product["flops_per_second"])
            assert (row.p99_seconds is not None) == (what == "latency")

    def test_distance_tells_a_way_that_computes_something_else(self, monkeypatch):
        monkeypatch.setattr(bench_ways, "pack", lambda model: model.head.weight.data.mul_(1.5) is not None)
        rows = measure(tiny(), [], compiles=False, rounds=1).rows
        assert rows[0].distance < 1e-6
        assert 0.4 < rows[1].distance < 0.6

    def test_a_training_step_trains(self):
        case = tiny("training", batch=4)
        batch, ours = bench_ways.make_batch(case), bench_ways.make_ours(case.architecture)
        (way,) = ways_of("vitrail", ours, case, batch, compiles=False)
        step, _ = way.build()

        def loss() -> float:
            return nn.functional.cross_entropy(step(), batch.labels).item()

        first = loss()
        for _ in range(20):
            last = loss()
        assert last < 0.9 * first
        again, _ = way.build()
        torch.testing.assert_close(again(), ours(batch.images), rtol=1e-5, atol=1e-5)

    def test_compiled_is_another_way(self, monkeypatch):
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or model)
        rows = measure(tiny(), [], compiles=True, rounds=1).rows
        assert [row.way for row in rows] == ["eager", "compiled", "packed"][: len(rows)]
        assert compiled == [{"dynamic": False}]

    @pytest.mark.parametrize(("recorded", "expected"), [(False, 50), (True, 70)])
    def test_memory_is_that_of_a_step_but_of_the_recording_where_there_is_one(self, monkeypatch, recorded, expected):
        peaks, calls = iter([70, 50]), []
        memory = types.SimpleNamespace(restart=lambda: calls.append("restart"), peak=lambda: next(peaks))
        monkeypatch.setattr(bench, "PeakMemory", lambda device: memory)

        def step() -> torch.Tensor:
            calls.append("step")
            return torch.ones(2, 10)

        way = Way("timm", "some", lambda: Built(step, 7), recorded)
        ready = bench.prepare(way, tiny(), torch.ones(2, 10), timing.Stopwatch(CPU))
        assert ready.memory == expected
        assert calls[:3] == ["step", "restart", "step"]

    def test_ways_on_a_gpu(self):
        empty = Batch(torch.empty(0), torch.empty(0))

        def names(what: str, batch: int, compiles: bool) -> list[tuple[str, bool]]:
            case = replace(tiny(what, batch), device=CUDA)
            return [(way.name, way.recorded) for way in ways_of("x", nn.Identity(), case, empty, compiles)]

        eager, compiled = ("eager", False), ("compiled", False)
        graphs = [("CUDA graph", True), ("compiled, CUDA graph", True)]
        assert names("latency", 1, compiles=True) == [eager, compiled, *graphs]
        assert names("latency", 1, compiles=False) == [eager, graphs[0]]
        assert names("inference", 8, compiles=True) == names("training", 1, compiles=True) == [eager, compiled]


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

            return Way(library, way, lambda: Built(step, 7))

        found = [made(name, calls) for name, calls in ways.items()]
        monkeypatch.setattr(bench, "all_ways", lambda *given: iter(found))
        monkeypatch.setattr(bench, "Product", lambda *given: StandIn(self.clock))
        return measure(tiny(), [], compiles=False, rounds=3, clock=self.clock)

    def test_medians_of_turns_that_alternate(self, monkeypatch):
        before = [1.0] * (1 + bench.WARM_UPS + 1)
        found = self.ways(monkeypatch, vitrail_eager=[*before, 2, 4, 12], timm_eager=[*before, 3, 1, 1])
        ours, theirs = found.rows
        assert "".join(name[0] for name in self.order) == "vvvv" + "tttt" + "vt" + "tv" + "vt"
        assert (ours.seconds, ours.median_seconds, ours.images_per_second) == ([[2], [4], [12]], 4, 0.5)
        assert (theirs.seconds, theirs.median_seconds, theirs.images_per_second) == ([[3], [1], [1]], 1, 2)
        assert theirs.distance is None
        assert found.products[0]["flops_per_second"] == 400
        assert ours.share_of_product == pytest.approx(2 * cost(tiny().architecture).flops / 4 / 400)

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
        told = {(each.library, each.way): each.reason for each in found.missing}
        assert told == {
            ("timm", "eager"): "it failed with RuntimeError: no kernel in lib.so",
            ("timm", "compiled"): "out of memory on the GPU",
            ("torchvision", "eager"): "refused: it gives (2, 11) for 2 images and not (2, 10)",
            ("transformers", "eager"): "refused: not all of its logits are finite",
        }
        assert {each.where for each in found.missing} == {"tiny inference, 32 px, batch 2, fp32"}


class TestPeers:
    @pytest.mark.parametrize("what", ["inference", "training"])
    def test_all_that_are_installed(self, what):
        found = measure(tiny(what), INSTALLED, compiles=False, rounds=1)
        assert not found.missing
        assert [row.library for row in found.rows if row.way == "eager"] == ["vitrail", *INSTALLED]
        assert {row.parameters for row in found.rows} == {cost(tiny().architecture).parameters}

    @pytest.mark.parametrize("library", INSTALLED)
    def test_the_shape_is_ours(self, library):
        shape = architecture("Ti/16", image_size=64, in_channels=3, num_classes=5, depth=3, gelu="exact")
        model = peer_model(library, shape).eval()
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
        assert any(isinstance(module, nn.Linear) and module.out_features == 768 for module in model.modules())

    def test_another_shape_is_refused(self, monkeypatch):
        module, make = bench_peers.PEERS["timm"]

        def deeper(timm, shape):
            return make(timm, architecture("Ti/8", **{**TINY, "depth": 3}))

        monkeypatch.setitem(bench_peers.PEERS, "timm", (module, deeper))
        found = measure(tiny(), INSTALLED, compiles=False, rounds=1)
        assert [row.library for row in found.rows if row.way == "eager"] == ["vitrail", "torchvision", "transformers"]
        (missing,) = found.missing
        assert missing.library == "timm"
        assert "refused: its model has" in missing.reason

    @pytest.mark.parametrize(
        ("name", "options", "differs"),
        [
            ("Ti/8", {}, ""),
            ("Ti/8", {"gelu": "exact", "norm_eps": 1e-5}, ""),
            ("Ti/8", {"registers": 4}, "registers = 4"),
            ("Ti/8", {"pool": "average", "dropout": 0.1}, "pool = average, class_token = False, dropout = 0.1"),
            ("R50+Ti/16", {}, "a ResNet"),
        ],
    )
    def test_what_is_not_plain(self, name, options, differs):
        shape = architecture(name, **options)
        assert beyond_plain(shape) == differs
        if differs:
            with pytest.raises(NotApplicableError, match=f"not with {differs}"):
                peer_model("timm", shape)

    def test_a_resnet_has_no_peer(self):
        with pytest.raises(NotApplicableError, match="only plain Vision Transformers"):
            peer_model("timm", architecture("BiT-R50x1"))

    def test_what_a_library_does_not_like(self):
        with pytest.raises(NotApplicableError, match="takes images of 3 channels, not of 1"):
            peer_model("torchvision", architecture("Ti/8", **TINY, in_channels=1))
        with pytest.raises(NotApplicableError, match="takes square images alone"):
            peer_model("torchvision", architecture("Ti/8", **{**TINY, "image_size": (32, 64)}))

    def test_not_installed(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(NotApplicableError, match=r"^not installed: pip install vit-pytorch$"):
            importable("vit-pytorch")

    def test_installed_but_broken(self, monkeypatch, tmp_path):
        (tmp_path / "vit_pytorch.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(NotApplicableError, match=r"cannot be imported: RuntimeError: operator .* of one kind$"):
            importable("vit-pytorch")

    def test_vit_pytorch_by_its_signature(self, monkeypatch):
        """It is not installed here: a stand-in with its arguments, and a few parameters fewer."""
        shape = architecture("Ti/8", **TINY)

        class ViT(nn.Module):
            def __init__(self, *, image_size, patch_size, num_classes, dim, depth, heads, mlp_dim, channels, dim_head):
                super().__init__()
                given = (image_size, patch_size, num_classes, dim, depth, heads, mlp_dim, channels, dim_head)
                assert given == ((32, 32), 8, 10, 32, 2, 2, 64, 3, 16)
                self.all = nn.Parameter(torch.zeros(cost(shape).parameters - 32))

            def forward(self, images):
                return self.all[:20].reshape(2, 10)

        monkeypatch.setitem(sys.modules, "vit_pytorch", types.SimpleNamespace(ViT=ViT))
        found = measure(tiny(), ["vit-pytorch"], compiles=False, rounds=1)
        assert [row.library for row in found.rows][-1] == "vit-pytorch"
        (note,) = bench.unlike(found.rows)
        assert note.startswith("tiny: the model of vit-pytorch has ")

    def test_names(self):
        assert parse_peers("all") == [*INSTALLED, "vit-pytorch"]
        assert parse_peers("none") == []
        assert parse_peers("transformers, timm,timm") == ["transformers", "timm"]
        with pytest.raises(ConfigError, match="unknown 'tim', did you mean 'timm'"):
            parse_peers("tim")

    def test_errors_in_a_line_without_folders(self):
        assert (
            in_a_line(OSError("/a/b.so: cannot open '/home/someone/x.so'\nmore")) == "OSError: b.so: cannot open 'x.so'"
        )
        assert in_a_line(ValueError("3 / 4 images/s")) == "ValueError: 3 / 4 images/s"
        assert in_a_line(KeyError()) == "KeyError"
        wrapped = ImportError("could not import")
        wrapped.__cause__ = ValueError("deep down")
        assert in_a_line(wrapped) == "ValueError: deep down"


class TestPlan:
    def plan(self, names=(), what=None, batch=None, size=None, grow=None, device=CPU):
        cases = planned(names, what, batch, "fp32", size, grow, device)
        return [(case.name, case.what, case.size, case.batch) for case in cases]

    def test_all_by_itself(self):
        assert self.plan() == [("B/16", what, "224", 1 if what == "latency" else 8) for what in WHATS]
        assert self.plan(device=CUDA, what="training") == [("B/16", "training", "224", 256)]

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
        assert checked_precision(None, CPU) == "fp32"
        assert checked_precision(None, CUDA) == "bf16"
        with pytest.raises(ConfigError, match=r"bf16: products do not work .*SIGILL\): use fp32"):
            checked_precision("bf16", CPU)
        with pytest.raises(ConfigError, match="give fp32 or bf16"):
            checked_precision("fp8", CPU)
        monkeypatch.setattr(processor, "probe_bf16", lambda cap: processor.ProbeResult(works=True, detail=""))
        assert checked_precision("bf16", CPU) == "bf16"


class TestGrowing:
    cases = tuple(tiny(batch=batch) for batch in (1, 2, 4, 8))

    def grown(self, measured, seconds=1000.0, taken=1.0):
        """`measured`: for each case the ways that fail in it."""
        clock, asked, found = Clock(), [], Measured()
        row = bench.row(self.cases[0], ("vitrail", "eager"), bench.Ready(None, 1, 7, None, 0.0), [[1.0]], best=1.0)

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
        monkeypatch.setattr(bench, "MEMORY_INFO", tmp_path / "meminfo")
        assert bench.free_memory() == 102_400
        found = measure(tiny("training"), [], compiles=False, rounds=1)
        assert not found.rows
        (missing,) = found.missing
        assert "it would take about" in missing.reason
        monkeypatch.setattr(bench, "MEMORY_INFO", tmp_path / "nothing")
        assert bench.free_memory() is None
        bench.check_memory(tiny("training"))


@pytest.fixture(scope="module")
def report():
    """Of a model by its name, which is made smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))
        patch.setitem(timing.SIDES, "cpu", 32)
        patch.setattr(bench, "TURN_SECONDS", 0.001)
        find = bench_peers.importlib.util.find_spec
        patch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "vit_pytorch" else find(name, *of))
        return run(["Ti/16"], size=32, batch=2, rounds=2, peers="timm,vit-pytorch", threads=1, device="cpu")


class TestReport:
    def test_all_that_was_asked_for(self, report):
        assert {(row.what, row.library, row.way) for row in report.rows} >= {
            *((what, library, "eager") for what in WHATS for library in ("vitrail", "timm")),
        }
        told = [str(each) for each in report.missing]
        assert told[0].startswith("every library compiled: left out, on a CPU it takes minutes")
        assert told[1:] == ["vit-pytorch: not installed: pip install vit-pytorch"]
        assert report.notes == ["memory is measured on a GPU alone"]
        assert report.machine["threads"] == 1

    def test_comparisons(self, report):
        assert len(report.comparisons) == 3
        fast, slow = (replace(report.rows[0], library=library) for library in ("vitrail", "timm"))
        slow = replace(slow, median_seconds=1.5 * fast.median_seconds, way="compiled")
        slower = replace(slow, median_seconds=9.0, way="eager")
        (line,) = replace(report, rows=[fast, slower, slow]).comparisons
        assert line.endswith("vitrail eager is 1.50× as fast as the best peer, timm compiled")
        assert replace(report, rows=[fast]).comparisons == []

    def test_json(self, report, tmp_path, monkeypatch):
        monkeypatch.setattr(bench, "measure", lambda case, peers, **how: Measured(report.rows, [], report.products))
        again = run(["Ti/16"], size=32, what="inference", peers="none", device="cpu", out=tmp_path / "a.json")
        text = (tmp_path / "a.json").read_text()
        written = json.loads(text)
        assert written == json.loads(json.dumps(again.as_dict()))
        assert written["rows"][0]["seconds"] == report.rows[0].seconds
        assert written["comparisons"] == report.comparisons
        assert written["machine"]["versions"]["torch"] == torch.__version__
        for place in (str(Path.home()), str(tmp_path), str(Path(bench.__file__).parent), sys.prefix):
            assert place not in text

    def test_threads_are_put_back(self, monkeypatch):
        before, seen = torch.get_num_threads(), []
        monkeypatch.setattr(bench, "measure", lambda *case, **how: seen.append(torch.get_num_threads()) or Measured())
        run(["Ti/16"], what="latency", peers="none", threads=before + 1, device="cpu")
        assert seen == [before + 1]
        assert torch.get_num_threads() == before

    def test_places_are_looked_at_first(self, tmp_path):
        with pytest.raises(ConfigError, match=r"a figure is a \.png"):
            run(plot=tmp_path / "a.jpg")
        with pytest.raises(ConfigError, match="there is no folder"):
            run(out=tmp_path / "nowhere/a.json")
        with pytest.raises(ConfigError, match="it is a folder"):
            run(out=tmp_path)

    def test_the_machine(self, monkeypatch, tmp_path):
        from vitrail.workflows import bench_report

        (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Fine Processor\nmodel name\t: again\n")
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
        assert bench_report.processor_name() == "A Fine Processor"
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
        assert bench_report.processor_name()
        monkeypatch.setattr(bench_report.vitrail, "__file__", str(tmp_path / "a/b/c.py"))
        assert bench_report.commit() is None


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
            assert draw(report, tmp_path / "a.png") == tmp_path / "a.png"
            assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]
            return figures[-1]

        return made

    def test_bars(self, report, figure):
        axes = figure(report).axes
        assert [each.get_title("left") for each in axes] == [
            f"Ti/16 {what}, 32 px, batch {1 if what == 'latency' else 2}" for what in WHATS
        ]
        for each, what in zip(axes, WHATS, strict=True):
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
