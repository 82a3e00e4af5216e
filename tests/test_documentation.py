"""Tables, commands and code blocks in the documentation are valid and up to date."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail
import vitrail.errors
from vitrail.system import events

ROOT = Path(__file__).parent.parent
SCALE = (ROOT / "docs/scale.md").read_text()
REFERENCE_OF_RESULTS = (ROOT / "docs/reference/results.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_blocks_of_code_are_blocks_on_the_site_too(page):
    """A second word after the fence, and the site takes what follows for code, up to the next fence."""
    assert re.findall(r"^```\w+[^\S\n]+\S.*$", page.read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_pages_calls_what_exists(page):
    """Every block parses, and each `vitrail.name(...)` in it fits the signature of a name that the package has."""
    for code in blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vitrail":
                assert hasattr(vitrail, node.attr), f"vitrail.{node.attr} in\n{code}"
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("vitrail."):
                function = find_object(ast.unparse(node.func))
                names = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                try:
                    inspect.signature(function).bind(*node.args, **names)
                except TypeError as error:
                    pytest.fail(f"{ast.unparse(node)}: {error}")


def test_settings_in_python_on_pages_are_valid():
    """Every `vitrail.train("recipe", {…})` with plain values has a configuration."""
    from vitrail.recipes import RECIPES
    from vitrail.workflows.train import build_config

    checked = 0
    for page in PAGES:
        for code in blocks(page.read_text(), "python"):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "vitrail.train" and len(node.args) == 2:
                    recipe, settings = node.args
                    assert isinstance(recipe, ast.Constant)
                    assert isinstance(settings, ast.Dict)
                    pairs = zip(map(ast.literal_eval, filter(None, settings.keys)), settings.values, strict=True)
                    values = {key: each.value if isinstance(each, ast.Constant) else "MODEL" for key, each in pairs}
                    if recipe.value in RECIPES:
                        build_config(recipe.value, values)
                        checked += 1
    assert checked >= 5


def find_object(path: str) -> object:
    """Return what `vitrail.name.name` stands for."""
    found: object = vitrail
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def test_every_promise_names_tests_that_exist():
    rows = re.findall(
        r"^\| (?!promise |---|\*\*)(.*) \| (.*) \|$", (ROOT / "docs/promises.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 60
    for promise, tests in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", tests)
        assert named, f"no test is named for: {promise}"
        assert [path for path in named if not (ROOT / path).exists()] == [], promise


def test_the_reference_has_every_public_name():
    listed = {name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
    errors = {name for name in vitrail.__all__ if name in vars(vitrail.errors)}  # the page lists their module
    assert "vitrail.errors" in listed
    assert {f"vitrail.{name}" for name in set(vitrail.__all__) - errors} <= listed


def test_the_reference_has_every_event_that_functions_share():
    page = (ROOT / "docs/reference/events.md").read_text()
    table = re.search(r"^    progress .*?^    trained .*?$", events.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert table
    entries = re.split(r"\n    (?=\S)", table[0].strip())
    assert len(entries) >= 8
    for entry in entries:
        kind, text = entry.split(maxsplit=1)
        names = [name.strip() for name in text.split(":")[0].split(",")] if ":" in text else []
        assert {kind, *names} <= set(re.findall(r"`(\w+)`", page)), kind


def test_the_reference_has_every_result():
    names = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", REFERENCE_OF_RESULTS, re.MULTILINE)}
    source = "".join(path.read_text() for path in (ROOT / "src/vitrail").rglob("*.py"))
    assert set(re.findall(r"^class (\w+)\(Result\):", source, re.MULTILINE)) <= names | {"Run"}


def test_the_scale_tables_are_worked_out_from_the_measurements():
    command = [sys.executable, "benchmarks/scale_plan.py", "benchmarks/results/scale_h200.json"]
    page = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert SCALE.endswith(page), "docs/scale.md: put what benchmarks/scale_plan.py prints at its end"


def test_the_transfer_tables_are_made_of_the_raw_results():
    command = [sys.executable, "benchmarks/transfer_table.py", "benchmarks/results"]
    tables = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs/evaluation.md").read_text()
    assert page.endswith(tables), "docs/evaluation.md: put what benchmarks/transfer_table.py prints at its end"


def test_only_trained_positions_have_similar_neighbours():
    measured = json.loads((ROOT / "benchmarks/results/position_neighbours.json").read_text())
    assert measured["trained"]["p_value"] < 0.01
    assert min(table["p_value"] for table in measured["fresh"]) > 0.05


@pytest.mark.parametrize(
    "page",
    [
        "docs/training.md",
        "docs/recipes.md",
        "docs/scale.md",
        "docs/small-data.md",
        "benchmarks/RESULTS.md",
        "README.md",
    ],
)
def test_every_command_has_a_configuration(page):
    """Every `vitrail train …` on the page is valid; placeholders stand for data and weights."""
    from vitrail.recipes import RECIPES
    from vitrail.workflows.train import build_config

    text = (ROOT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"(?:vitrail|-m vitrail) train ([\w.+][\w.+-]*)((?: +'?[\w.]+=\S+)*)", text)
    assert commands
    for recipe, overrides in commands:
        if recipe in RECIPES:
            values = [o.strip("'") for o in overrides.split() if o.split("=", 1)[1] not in ("DATA", "MODEL")]
            names = {o.split("=")[0] for o in values}
            placeholders = [f"{need}=somewhere" for need in RECIPES[recipe].needs if need not in names]
            build_config(recipe, [*values, *placeholders])
        else:
            assert recipe.endswith(".toml") or recipe == "RECIPE", recipe


@pytest.mark.slow
def test_the_python_of_the_training_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *_, code = blocks((ROOT / "docs/training.md").read_text(), "python")  # the others need photos
    space: dict = {}
    exec(code.replace('"epochs": 2', '"steps": 4').replace('"in_channels": 1', '"in_channels": 1, "depth": 1'), space)
    assert 0 <= space["result"].accuracy.value <= 1
    assert json.loads((tmp_path / "runs/in-python/model/config.json").read_text())["format"] == "vitrail"
