"""Other libraries' models, built to the shape of a tiny one of ours, and runtimes that run ours."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from benched import CPU, CUDA, TINY, tiny
from torch import nn

from against_peers import list_peer_candidates
from peer_libraries import models, runtimes
from peer_libraries.conclusions import note_parameters
from peer_libraries.models import build_peer, import_peer, list_special_options, parse_peers
from peer_libraries.runtimes import list_runtime_candidates
from peers import timm, torchvision, transformers  # so that torchvision imports beside any torch
from vitrail.benchmark.measure import MeasureOptions, measure_case, summarize_error
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.model.cost import compute_cost
from vitrail.model.variants import make_architecture

INSTALLED = [library.__name__ for library in (timm, torchvision, transformers)]


def measure(case, libraries, rounds=1):
    extra = partial(list_peer_candidates, peers=libraries, modes=["eager"])
    return measure_case(case, MeasureOptions(rounds=rounds), extra)


class TestPeers:
    @pytest.mark.parametrize("what", ["inference", "training"])
    def test_all_that_are_installed(self, what):
        found = measure(tiny(what), INSTALLED)
        assert not found.missing
        assert [row.library for row in found.rows if row.way == "eager"] == ["vitrail", *INSTALLED]
        assert {row.parameters for row in found.rows} == {compute_cost(tiny().architecture).parameters}

    @pytest.mark.parametrize("library", INSTALLED)
    def test_the_shape_is_ours(self, library):
        shape = make_architecture("Ti/16", image_size=64, in_channels=3, num_classes=5, depth=3, gelu="exact")
        model = build_peer(library, shape).eval()
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
        assert any(isinstance(module, nn.Linear) and module.out_features == 768 for module in model.modules())

    def test_another_shape_is_refused(self, monkeypatch):
        module, make = models.PEERS["timm"]

        def deeper(timm, shape):
            return make(timm, make_architecture("Ti/8", **{**TINY, "depth": 3}))

        monkeypatch.setitem(models.PEERS, "timm", (module, deeper))
        found = measure(tiny(), INSTALLED)
        assert [row.library for row in found.rows if row.way == "eager"] == ["vitrail", "torchvision", "transformers"]
        (missing,) = found.missing
        assert missing.library == "timm"
        assert "parameters" in missing.reason

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
        shape = make_architecture(name, **options)
        assert list_special_options(shape) == differs
        if differs:
            with pytest.raises(NotApplicableError, match=differs):
                build_peer("timm", shape)

    def test_a_resnet_has_no_peer(self):
        with pytest.raises(NotApplicableError, match="plain"):
            build_peer("timm", make_architecture("BiT-R50x1"))

    def test_what_a_library_does_not_like(self):
        with pytest.raises(NotApplicableError, match="3 channels"):
            build_peer("torchvision", make_architecture("Ti/8", **TINY, in_channels=1))
        with pytest.raises(NotApplicableError, match="square"):
            build_peer("torchvision", make_architecture("Ti/8", **{**TINY, "image_size": (32, 64)}))

    def test_not_installed(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(NotApplicableError, match="pip install vit-pytorch"):
            import_peer("vit-pytorch", CPU)
        with pytest.raises(NotApplicableError, match="onnxscript"):
            import_peer("openvino", CPU)
        with pytest.raises(NotApplicableError, match="CPU"):
            import_peer("openvino", CUDA)

    def test_installed_but_broken(self, monkeypatch, tmp_path):
        (tmp_path / "vit_pytorch.py").write_text("raise OSError('no such thing')\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(NotApplicableError, match="OSError"):
            import_peer("vit-pytorch", CPU)

    def test_operators_that_torchvision_misses_are_defined(self, monkeypatch, tmp_path):
        """By a module that wants one that nobody has, as torchvision does beside a torch of another kind."""
        (tmp_path / "vit_pytorch.py").write_text(
            "import torch\n"
            "if not hasattr(torch.ops.torchvision, 'of_a_test'):\n"
            "    raise RuntimeError('operator torchvision::of_a_test does not exist')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(models, "TORCHVISION_OPERATORS", ("nms", "of_a_test"))
        models.define_torchvision_operators.cache_clear()
        monkeypatch.delitem(sys.modules, "vit_pytorch", raising=False)
        import_peer("vit-pytorch", CPU)
        assert hasattr(sys.modules.pop("vit_pytorch").torch.ops.torchvision, "of_a_test")

    def test_vit_pytorch_by_its_signature(self, monkeypatch):
        """It is not installed here: a stand-in with its arguments, and a few parameters fewer."""
        shape = make_architecture("Ti/8", **TINY)

        class ViT(nn.Module):
            def __init__(self, *, image_size, patch_size, num_classes, dim, depth, heads, mlp_dim, channels, dim_head):
                super().__init__()
                given = (image_size, patch_size, num_classes, dim, depth, heads, mlp_dim, channels, dim_head)
                assert given == ((32, 32), 8, 10, 32, 2, 2, 64, 3, 16)
                self.all = nn.Parameter(torch.zeros(compute_cost(shape).parameters - 32))

            def forward(self, images):
                return self.all[:20].reshape(2, 10)

        monkeypatch.setitem(sys.modules, "vit_pytorch", types.SimpleNamespace(ViT=ViT))
        found = measure(tiny(), ["vit-pytorch"])
        assert [row.library for row in found.rows][-1] == "vit-pytorch"
        (note,) = note_parameters(found.rows)
        assert "vit-pytorch" in note

    def test_names(self):
        assert parse_peers("all", CUDA) == [*INSTALLED, "vit-pytorch"]
        assert parse_peers("all", CPU) == [*INSTALLED, "vit-pytorch", "onnxruntime", "openvino"]
        assert parse_peers("none", CPU) == []
        assert parse_peers("transformers, timm,timm,openvino", CUDA) == ["transformers", "timm", "openvino"]
        with pytest.raises(ConfigError, match="'timm'"):
            parse_peers("tim", CPU)

    def test_errors_in_a_line_without_folders(self):
        assert (
            summarize_error(OSError("/a/b.so: cannot open '/home/someone/x.so'\nmore"))
            == "OSError: b.so: cannot open 'x.so'"
        )
        assert summarize_error(ValueError("3 / 4 images/s")) == "ValueError: 3 / 4 images/s"
        assert summarize_error(KeyError()) == "KeyError"
        wrapped = ImportError("could not import")
        wrapped.__cause__ = ValueError("deep down")
        assert summarize_error(wrapped) == "ValueError: deep down"


class TestRuntimes:
    def names(self, library, **changes):
        case = replace(tiny(), **changes)
        return [(way.name, way.precision) for way in list_runtime_candidates(library, case, None, None)]

    @pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
    def test_which(self, library):
        assert self.names(library) == [("graph", "fp32")]
        assert self.names(library, extra_precision="int8") == [("graph", "fp32"), ("graph, int8", "int8")]
        assert not self.names(library, what="training")
        assert not self.names(library, device=CUDA)
        assert not self.names(library, precision="bf16")

    def test_our_weights_by_another_runtime(self, monkeypatch):
        """With a stand-in for the runtime, which is a little off."""
        written = []
        monkeypatch.setattr(runtimes, "write_onnx", lambda graph, path: written.append(graph))
        monkeypatch.setattr(runtimes, "open_onnx", lambda path: lambda images: 1.01 * written[0].model(images).detach())
        found = measure(tiny(), ["onnxruntime"])
        assert not found.missing
        theirs = found.rows[-1]
        assert (theirs.library, theirs.way, theirs.precision) == ("onnxruntime", "graph", "fp32")
        assert theirs.distance == pytest.approx(0.01, rel=1e-3)
        assert theirs.parameters == found.rows[0].parameters

    @pytest.mark.slow
    def test_all_of_them(self):
        pytest.importorskip("nncf", reason="nncf, which quantises for OpenVINO, is not installed")
        case = replace(tiny(), extra_precision="int8")
        found = measure(case, ["onnxruntime", "openvino"])
        assert not found.missing
        far = {(row.library, row.precision): row.distance for row in found.rows if row.library != "vitrail"}
        assert len(far) == 4
        assert all((distance < 1e-5) == (precision == "fp32") for (_, precision), distance in far.items())
        assert max(far.values()) < 0.3
