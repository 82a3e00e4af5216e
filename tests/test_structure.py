"""The rooms of the library: imports point one way, and looking in costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail

SOURCE = Path(vitrail.__file__).parent

# A module may import from layers before its own, and from its own package; not from its neighbours in a layer.
LAYERS = [
    ["errors"],
    ["config", "system"],
    ["tasks", "reliability"],
    ["model", "data"],
    ["weights", "objectives", "fast"],
    ["recipes", "inference"],
    ["training"],
    ["evaluation"],
    ["transfer"],
    ["inspection"],
    ["exporting", "serving", "studies", "benchmark"],
    ["workflows"],
    ["cli"],
]
DEPTH = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}
OUTSIDE = {"__init__", "__main__"}


def rooms_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "vitrail":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path}: relative import; write it out from vitrail")
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("vitrail.")}
    return found - {"__version__"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = room_of(path)
    if room in OUTSIDE:
        return
    assert room in DEPTH, f"{room} has no place in the order of rooms"
    for other in rooms_imported(path) - {room}:
        assert DEPTH[other] < DEPTH[room], f"{room} must not import {other}"


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import vitrail", "import vitrail.cli", "import vitrail.model.cost", "import vitrail.inference.find_images"],
)
def test_looking_in_does_not_load_torch(statement):
    assert not {"torch", "sklearn", "numpy", "fsspec"} & modules_after(statement)


PREDICTING = [
    "vitrail.inference.predictor",
    "vitrail.inference.predict",
    "vitrail.serving.serve",
    "vitrail.serving.server",
]


@pytest.mark.slow
@pytest.mark.parametrize("module", PREDICTING)
def test_nothing_that_predicts_loads_training(module):
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not [name for name in loaded if name.startswith("vitrail.training")]


def test_the_architecture_page_shows_the_map_that_the_code_has():
    script = Path(__file__).parents[1] / "tools/architecture_map.py"
    child = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


OPENING = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink", "iterdir", "glob"}
"""Calls that touch files."""


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_the_command_line_only_parses_and_prints(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            assert not {module.split(".")[0] for module in modules} & {"torch", "numpy", "PIL", "sklearn"}
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in OPENING, f"line {node.lineno} of {path.name} touches a file: {name}"


def test_public_names_all_load_and_are_listed():
    for name in vitrail.__all__:
        assert getattr(vitrail, name).__name__ == name
    assert set(vitrail.__all__) <= set(dir(vitrail))
    assert set(vitrail.__all__) == set(vitrail._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        vitrail.nonsense  # noqa: B018
