"""The front doors: every verb of the command line is a function of the package, and says the same when it fails."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail
from vitrail import cli
from vitrail.errors import VitrailError

ROOMS = sorted(path.name for path in Path(vitrail.__file__).parent.iterdir() if (path / "__init__.py").is_file())
VERBS = {
    "bench": (["bench", "B/16x"], lambda: vitrail.bench("B/16x")),
    "check_data": (["data", "check", "absent/"], lambda: vitrail.check_data("absent/")),
    "compare_models": (
        ["evaluate", "--compare", "pane", "--data", "absent/", "--precision", "int7"],
        lambda: vitrail.compare_models(["pane"], "absent/", precision="int7"),
    ),
    "convert": (["convert", "pane", "out", "--to", "tim"], lambda: vitrail.convert("pane", "out", to="tim")),
    "evaluate": (
        ["evaluate", "--model", "pane", "--data", "absent/"],
        lambda: vitrail.evaluate("pane", "absent/"),
    ),
    "export": (["export", "pane", "m.onx", "--to", "onnx"], lambda: vitrail.export("pane", "m.onx", to="onnx")),
    "fewshot": (["fewshot", "--model", "pane", "--data", "absent/"], lambda: vitrail.fewshot("pane", "absent/")),
    "finetune": (["finetune", "--data", "absent/"], lambda: vitrail.finetune("absent/")),
    "inspect": (["inspect", "absent"], lambda: vitrail.inspect("absent")),
    "list_models": (["models", "Q/16"], lambda: vitrail.list_models(["Q/16"])),
    "pack_data": (["data", "pack", "absent/", "out"], lambda: vitrail.pack_data("absent/", "out")),
    "predict": (["predict", "x.jpg", "--model", "absent"], lambda: vitrail.predict(["x.jpg"], "absent")),
    "quickstart": (["quickstart", "--from", "absent"], lambda: vitrail.quickstart(model="absent")),
    "run_suite": (
        ["evaluate", "--suite", "papers", "--model", "pane", "--data", "absent/"],
        lambda: vitrail.run_suite("papers", "pane", "absent/"),
    ),
    "serve": (["serve", "--model", "a=pane", "--model", "a=pane"], lambda: vitrail.serve(["a=pane", "a=pane"])),
    "train": (["train", "cifar11-scratch"], lambda: vitrail.train("cifar11-scratch")),
}
"""For each verb a wrong command, and the same mistake in Python."""
SILENT = {"list_models"}
"""Verbs that are done at once, and so have no events."""


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_has_the_sentence_of_the_command_line(verb, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words, call = VERBS[verb]
    with pytest.raises(VitrailError) as error:
        call()
    monkeypatch.setattr(sys, "argv", ["vitrail", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert f"error: {error.value}" in lines
    assert not list(tmp_path.iterdir()), "a wrong command leaves nothing behind"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_in_the_signature(verb):
    function = getattr(vitrail, verb)
    signature = inspect.signature(function)
    assert not [each for each in signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    assert not [each.name for each in signature.parameters.values() if each.annotation is inspect.Parameter.empty]
    assert signature.return_annotation not in (inspect.Signature.empty, "Any")
    assert ("on_event" in signature.parameters) == (verb not in SILENT)
    for name in signature.parameters:
        assert name in (function.__doc__ or ""), f"the docstring of {verb} does not explain {name}"


def test_models_show_their_options():
    for function in (vitrail.create_model, vitrail.load):
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("rooms_first", [True, False])
def test_rooms_and_verbs_do_not_hide_each_other(rooms_first):
    rooms = f"for room in {ROOMS}: importlib.import_module('vitrail.' + room)"
    verbs = f"for verb in {sorted(VERBS)}: assert callable(getattr(vitrail, verb)), verb"
    first, second = (rooms, verbs) if rooms_first else (verbs, rooms)
    check = f"for room in {ROOMS}: assert type(getattr(vitrail, room)).__name__ == 'module', room"
    code = "\n".join(["import importlib, vitrail", first, second, verbs, check])
    subprocess.run([sys.executable, "-c", code], check=True)
