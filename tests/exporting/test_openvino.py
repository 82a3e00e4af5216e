"""OpenVINO's form of a model, run by OpenVINO where it is installed; it is an extra that the tests do not ask for."""

from __future__ import annotations

import json

import pytest
from exported import difference, images, made, resnet

from vitrail.errors import ExportError
from vitrail.exporting.export import export
from vitrail.exporting.openvino import open_openvino

openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'vitrail[openvino]'")


def test_what_is_written_and_what_it_carries(tmp_path):
    model = made()
    model.labels = ("a", "b", "c", "d", "e")
    checked = export(model, tmp_path / "model.xml", "openvino")
    assert {path.name for path in tmp_path.iterdir()} == {"model.xml", "model.bin"}
    assert checked.export_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert difference(open_openvino(tmp_path / "model.xml"), model, images(5, 3, 16, 16)) <= 1e-4
    file = openvino.Core().read_model(tmp_path / "model.xml")
    assert [value.any_name for value in (*file.inputs, *file.outputs)] == ["images", "logits"]
    assert json.loads(file.get_rt_info(["vitrail", "labels"]).value) == list(model.labels)
    assert json.loads(file.get_rt_info(["vitrail", "preprocessing"]).value)["image_size"] == [16, 16]


def test_what_cannot_run_is_told_in_a_sentence(tmp_path):
    (tmp_path / "model.xml").write_text("<net/>")
    with pytest.raises(ExportError, match=r"OpenVINO cannot open the export: (?!Exception from)"):
        open_openvino(tmp_path / "model.xml")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"dynamic_size": True}, {"with_preprocessing": True}])
@pytest.mark.parametrize("kind", ["vit", "hybrid", "bit"])
def test_other_sizes_and_models(tmp_path, kind, asked):
    """Compared while they are exported."""
    model = made() if kind == "vit" else resnet(kind)
    checked = export(model, tmp_path / "model.xml", "openvino", **asked)
    assert checked.max_difference <= checked.tolerance
