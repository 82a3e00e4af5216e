"""What a machine without a GPU can see of the scripts in benchmarks/: functions return what they say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))


def list_own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Return the nodes of a function without those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def find_silent(source: str) -> list[str]:
    """Return the names of functions that say they return something, and do not."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    speaking = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)
    return [
        function.name
        for function in functions
        if function.returns is not None
        and ast.unparse(function.returns) not in ("None", "NoReturn")
        and not any(isinstance(node, speaking) for node in list_own_nodes(function))
    ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_functions_return_what_they_say(path):
    assert find_silent(path.read_text()) == []


def test_a_forgotten_return_is_found():
    assert find_silent("def f() -> int:\n    def g() -> int:\n        return 1\n    g()\n") == ["f"]
