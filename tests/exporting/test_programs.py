"""torch.export's programs and AOTInductor's packages: loaded without vitrail, and refused when they differ."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from exported import difference, images, made

from vitrail.errors import ExportError
from vitrail.exporting.export import export
from vitrail.exporting.program import open_package, open_program

FRESH = """
import json, sys, torch
extra = {"labels": "", "preprocessing": ""}
program = torch.export.load(sys.argv[1], extra_files=extra)
inputs = torch.load(sys.argv[2], weights_only=True)
assert not [name for name in sys.modules if name.split(".")[0] == "vitrail"]
told = {name: json.loads(extra[name]) for name in ("labels", "preprocessing")}
print(json.dumps({"outputs": program.module()(inputs).tolist(), **told}))
"""


@pytest.mark.slow
def test_a_program_of_any_size_runs_in_a_process_that_has_no_vitrail(tmp_path):
    model = made()
    model.labels = ("a", "b", "c", "d", "e")
    checked = export(model, tmp_path / "model.pt2", "torch", dynamic_size=True)
    assert checked.max_difference <= 1e-4
    run = open_program(tmp_path / "model.pt2")
    for size in ((16, 16), (8, 28)):
        assert difference(run, model, images(2, 3, *size)) <= 1e-4
    inputs = images(3, 3, 16, 16)
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-W", "ignore", "-c", FRESH, str(tmp_path / "model.pt2"), str(tmp_path / "inputs.pt")]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with torch.inference_mode():
        assert (torch.tensor(told["outputs"]) - model(inputs)).abs().max() <= 1e-4
    assert told["labels"] == ["a", "b", "c", "d", "e"]
    assert told["preprocessing"]["image_size"] == [16, 16]


def test_what_is_no_program_is_refused(tmp_path):
    (tmp_path / "model.pt2").write_bytes(b"nothing")
    with pytest.raises(ExportError, match="cannot load"):
        open_program(tmp_path / "model.pt2")


def test_a_compiler_is_asked_for(tmp_path, monkeypatch):
    from torch._inductor import cpp_builder, exc

    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ExportError, match=r"needs a C\+\+ compiler"):
        export(made(), tmp_path / "model.pt2", "aoti")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{}, {"dynamic_size": True}, {"with_preprocessing": True}])
def test_a_package_is_compiled_ahead_of_time(tmp_path, asked):
    from torch._inductor import aoti_load_package

    model = made()
    model.labels = ("a", "b", "c", "d", "e")
    export(model, tmp_path / "model.pt2", "aoti", **asked)
    if "with_preprocessing" not in asked:
        assert difference(open_package(tmp_path / "model.pt2"), model, images(5, 3, 16, 16)) <= 1e-4
    carried = aoti_load_package(str(tmp_path / "model.pt2")).get_metadata()
    assert json.loads(carried["labels"]) == list(model.labels)
