"""Change the code in small ways, one at a time, and see whether the tests notice.

    python tools/mutants.py --count 200 --seed 0 --jobs 2 --out benchmarks/results/mutants.jsonl

Each mutant differs from the code in one place: a comparison, an operator, a number, a condition, a returned value, a
statement left out. The tests that belong to its file run against a copy of the package with that change, until one
fails. A mutant that no test notices survived: either a test is missing, or the change makes no difference.

The same seed gives the same mutants of the same code. The file gets a line for each mutant as it ends, and the same
command goes on after a stop. The exit code is 1 if fewer than 80% were killed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_KILLED = 0.8
MOST_SECONDS = 300.0
"""A change that makes the tests take longer is noticed too: it made a loop endless."""
FIRST_SECONDS = 900.0
"""For the tests of the unchanged code."""
REPORTS = ("tests/evaluation/test_reports.py", "tests/evaluation/test_task_reports.py", "tests/cli/test_evaluating.py")
RELATED = {
    "src/vitrail/model/positions.py": ("tests/model", "tests/model/test_positions.py"),
    "src/vitrail/training/checkpoint*.py": (
        *("tests/training/test_checkpoint_folder.py", "tests/training/test_loop.py"),
        "tests/training/test_saved_run.py",
    ),
    "src/vitrail/data/order.py": ("tests/data/test_order.py", "tests/data/test_loader.py"),
    "src/vitrail/data/loader.py": ("tests/data", "tests/data/test_loader.py"),
    "src/vitrail/evaluation/report.py": REPORTS,
    "src/vitrail/evaluation/figures.py": REPORTS,
    "src/vitrail/evaluation/predictions.py": REPORTS,
    "src/vitrail/evaluation/task_report.py": REPORTS,
    "src/vitrail/evaluation/score_task.py": (*REPORTS, "tests/evaluation/test_calibrating.py"),
    "src/vitrail/evaluation/training_fewshot.py": ("tests/training/test_training_fewshot.py",),
    "src/vitrail/evaluation/compare.py": (
        *("tests/evaluation/test_from_python.py", "tests/evaluation/test_task_reports.py"),
        "tests/cli/test_evaluating.py",
    ),
    "src/vitrail/evaluation/reliability.py": ("tests/evaluation", "tests/reliability"),
    "src/vitrail/evaluation/*.py": ("tests/evaluation",),
}
"""Files that are changed, and the tests that belong to them: of a folder those that import the file, or else all. The
first pattern that a file matches counts."""

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
COMPARISONS |= {"in": "not in", "not in": "in"}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|", "@": "*"}
WORDS = {"and": "or", "or": "and"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a file."""

    file: str
    line: int
    start: int
    """Where the old text begins, in characters of the file."""
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the change."""
        assert text[self.start : self.start + len(self.old)] == self.old
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


def list_mutants(file: str) -> list[Mutant]:
    """Return all changes of a file, in the order of the text."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def place(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    found = set[Mutant]()
    for start, old, new in _walk(tree, text, span):
        found.add(Mutant(file, text.count("\n", 0, start) + 1, start, old, new))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.old, mutant.new))


def _walk(tree: ast.Module, text: str, span) -> Iterator[tuple[int, str, str]]:  # type: ignore[no-untyped-def]
    """Yield the start, the old and the new text of each change."""
    passive = _find_passive(tree)
    for node in ast.walk(tree):
        if node in passive:
            continue
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from _replace(text, span(left)[1], span(right)[0], COMPARISONS)
        elif isinstance(node, ast.BinOp):
            yield from _replace(text, span(node.left)[1], span(node.right)[0], OPERATORS)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from _replace(text, span(left)[1], span(right)[0], WORDS)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start, end = span(node)
            yield start, text[start:end], f"bool({text[slice(*span(node.operand))]})"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            start, end = span(node)
            number = (
                {True: "False", False: "True"} if isinstance(node.value, bool) else {node.value: f"{node.value + 1}"}
            )
            yield start, text[start:end], number[node.value]
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = span(node.test)
            yield start, text[start:end], f"(not ({text[start:end]}))"
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            start, end = span(node.value)
            yield start, text[start:end], "None"
        elif isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise | ast.Break | ast.Continue):
            start, end = span(node)
            yield start, text[start:end], "pass"


def _replace(text: str, start: int, end: int, words: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Yield the change of the operator between two operands, between which there may also be brackets and line ends."""
    between = text[start:end]
    old = between.strip(" \n\t()\\")
    if old in words:
        yield start + between.index(old), old, words[old]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _find_passive(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes that no test can notice or should: docstrings, types, imports, and messages of errors."""
    passive = set[ast.AST]()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(node)
        if isinstance(node, ast.FunctionDef):
            parts += [
                node.returns,
                *(argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)),
            ]
        if isinstance(node, ast.AnnAssign):
            parts.append(node.annotation)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts.append(node)
        if isinstance(node, ast.JoinedStr):
            parts.append(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar"):
            parts.append(node)
        for part in parts:
            passive |= set(ast.walk(part)) if part is not None else set()
    return passive


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """Return so many mutants, drawn from all of them without repetition."""
    files = sorted({path for pattern in RELATED for path in ROOT.glob(pattern)})
    every = [mutant for path in files for mutant in list_mutants(path.relative_to(ROOT).as_posix())]
    return random.Random(seed).sample(every, min(count, len(every)))


def choose_tests(file: str) -> list[str]:
    """Return the test files that belong to a file, the one with its name first."""
    places = [ROOT / place for place in next(tests for pattern, tests in RELATED.items() if Path(file).match(pattern))]
    module = Path(file).with_suffix("").as_posix().removeprefix("src/").replace("/", ".")
    paths = {path for path in places if path.is_file()}
    inside = {path for place in places for path in place.glob("test_*.py")}
    paths |= {path for path in inside if f"{module} import" in path.read_text(encoding="utf-8")}
    named = {f"test_{Path(file).stem}", f"test_{Path(file).stem}s"}
    return [str(path) for path in sorted(paths or inside, key=lambda path: (path.stem not in named, path))]


def run_tests(package: Path, tests: Sequence[str], most_seconds: float) -> tuple[str, float]:
    """Run tests against a copy of the package, in a fork of this process; return how they ended, and the seconds."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        _test_in_fork(package, tests)
    while time.monotonic() - began < most_seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return (
                "survived" if code == 0 else "killed" if code == 1 else f"killed ({code})"
            ), time.monotonic() - began
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed (time)", most_seconds


def _test_in_fork(package: Path, tests: Sequence[str]) -> None:
    """Run the tests and end this process with pytest's exit code."""
    code = 70
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(package)
        sys.path.insert(0, str(package))
        import pytest

        with tempfile.TemporaryDirectory() as folder:
            options = ["-x", "-q", "-n", "0", "-p", "no:randomly", f"--basetemp={folder}/tests", f"--rootdir={ROOT}"]
            code = int(pytest.main([*options, *tests]))
            if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them take minutes
                code = int(pytest.main([*options, "-m", "slow", *tests]))
    finally:
        os._exit(code)


def test_mutant(mutant: Mutant | None, tests: Sequence[str], most_seconds: float) -> tuple[str, float]:
    """Return how the tests end against the package with the change, or without any, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "src"
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = Path(folder) / mutant.file
            path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
        return run_tests(package, tests, most_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    mutants = draw_mutants(given.count, given.seed)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(row["file"], row["start"], row["old"], row["new"]) for row in done}
    left = [each for each in mutants if (each.file, each.start, each.old, each.new) not in known]
    # A fork that need not import them starts in no time. Imported before any change, they are nobody's copy.
    import numpy  # noqa: F401
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    torch.set_num_threads(1)
    suites = {file: choose_tests(file) for file in sorted({mutant.file for mutant in left})}
    with ThreadPoolExecutor(given.jobs) as pool:
        distinct = {tuple(sorted(tests)): tests for tests in suites.values()}
        for tests, (end, seconds) in zip(
            distinct.values(),
            pool.map(lambda tests: test_mutant(None, tests, FIRST_SECONDS), distinct.values()),
            strict=True,
        ):
            print(
                f"unchanged: {end} in {seconds:.0f} s, {len(tests)} files beginning with {Path(tests[0]).name}",
                flush=True,
            )
            if end != "survived":
                print("the tests fail without a change: mend them first", file=sys.stderr)
                return 2
        ends = pool.map(lambda mutant: test_mutant(mutant, suites[mutant.file], MOST_SECONDS), left)
        with given.out.open("a", encoding="utf-8") as out:
            for number, (mutant, (end, seconds)) in enumerate(zip(left, ends, strict=True), start=1):
                row = {**asdict(mutant), "end": end, "seconds": round(seconds, 1)}
                print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
                done.append(row)
                print(
                    f"{number}/{len(left)} {end} {mutant.file}:{mutant.line} {mutant.old!r} → {mutant.new!r}",
                    flush=True,
                )
    killed = sum(row["end"] != "survived" for row in done)
    print(f"{killed} of {len(done)} mutants were killed, {killed / max(len(done), 1):.0%}")
    return int(killed < LEAST_KILLED * len(done))


if __name__ == "__main__":
    sys.exit(main())
