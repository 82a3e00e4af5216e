"""vitrail export as a person types it."""

from __future__ import annotations

import json

import pytest
from exported import made

import vitrail
from commands import runner


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Words of a command → exit code, stdout, stderr; in a folder with a model."""
    monkeypatch.chdir(tmp_path)
    vitrail.save(made(), tmp_path / "model")
    return runner(monkeypatch, capsys, "export")


def test_the_table_and_the_json(run, tmp_path):
    code, out, err = run("model", "out/model.pt2", "--to", "torch", "--size", "20x24")
    assert (code, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == ["what", "model", "export"]
    assert [line[0] for line in lines[1:5]] == [
        "largest difference of logits",
        "same first guess",
        "bytes",
        "milliseconds for one image",
    ]
    assert lines[2][2] == "100.00%"
    assert int(lines[3][2]) == (tmp_path / "out" / "model.pt2").stat().st_size
    assert out.splitlines()[-1] == "written: out/model.pt2"
    code, out, _ = run("model", "out/model.pt2", "--to", "torch", "--json")  # which replaces the first
    assert code == 0
    told = json.loads(out)
    assert (told["kind"], told["written"]) == ("torch", "out/model.pt2")
    assert "7×3×16×16" in told["sizes"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("model", "model.txt", "--to", "onnx"), 2, "error: model.txt: name a file that ends in .onnx"),
        (("model", "model.onnx", "--to", "onix"), 2, "did you mean 'onnx'"),
        (("model", "model.onnx", "--to", "onnx", "--size", "big"), 2, "as in 224x320"),
        (("model", "model.onnx"), 2, "--to"),
        (("nowhere", "model.onnx", "--to", "onnx"), 1, "nowhere"),
        (("model", "model.onnx", "--to", "onnx", "--images", "nowhere"), 1, "does not exist"),
    ],
)
def test_what_cannot_be(run, tmp_path, words, code, told):
    found, out, err = run(*words)
    assert (found, out) == (code, "")
    assert told in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failing_comparison_is_a_failing_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.exporting.check.EXACT", -1.0)
    code, out, err = run("model", "model.pt2", "--to", "torch")
    assert (code, out) == (1, "")
    assert err.startswith("error: the export computes something else than its model, so nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
