"""The page of a study, and the page of all: written from the raw results alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from vitrail.studies.charts import draw_dots
from vitrail.studies.results import StudyResults
from vitrail.studies.verdict import Check
from vitrail.system.files import write_whole
from vitrail.system.intervals import Estimate

FIGURE, PAGE = "figure.png", "page.md"
SIGNS = {"holds here": "✓", "does not hold here": "✗", "not decided": "?"}
OUTCOMES = {"holds": "✓ holds", "fails": "✗ fails", "open": "? open"}
MINUTE = 60


def draw_figure(results: StudyResults, path: Path) -> None:
    """Draw the study's figure as PNG and SVG."""
    draw = results.study.draw or draw_dots
    draw(results, path)


def write_page(results: StudyResults, path: Path, figure: str) -> None:
    """Write the study's page as Markdown; `figure` is where the figure is, seen from the page."""
    write_whole(path, make_page(results, figure).encode())


def make_table(results: StudyResults) -> list[list[str]]:
    """Return a row for each arm: its name, the mean, the interval, the value of each seed, and the paper's number."""
    digits, beside = results.study.digits, results.study.beside
    rows = [["arm", results.study.unit, "95% interval", "each seed", *(["the paper"] if beside else [])]]
    for arm in results.arms:
        estimate = results.estimate(arm)
        seeds = ", ".join(format_number(value, digits) for value in results.list_values(arm))
        cells = [arm, format_number(estimate.value, digits), format_interval(estimate, digits), seeds]
        rows.append([*cells, *([beside.get(arm, "")] if beside else [])])
    return rows


def format_interval(estimate: Estimate, digits: int = 1, sign: str = "") -> str:
    """Return an interval as text."""
    if not math.isfinite(estimate.low) or not math.isfinite(estimate.high):
        return "unknown"
    return f"{format_number(estimate.low, digits, sign)} to {format_number(estimate.high, digits, sign)}"


def format_number(value: float, digits: int = 1, sign: str = "") -> str:
    """Return a number as text, with a real minus sign; `sign` "+" gives positive ones a plus."""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


def make_page(results: StudyResults, figure: str) -> str:
    """Return a study's page: claim, verdict, figure, tables, the paper's numbers, limits, and how it was run."""
    study, verdict = results.study, results.verdict()
    parts = [
        f"# {study.title}",
        f"> {study.claim}\n>\n> <small>The paper: {study.where}</small>",
        f"**{SIGNS[verdict]} {verdict[0].upper()}{verdict[1:]}** at the {results.scale} scale, with "
        f"{results.seeds} seeds for each arm.",
        f"**The rule**, written before the runs: {study.rule}",
        f"![{study.unit}]({figure})",
        format_markdown(make_table(results), numbers=1),
        "## How the rule decides",
        format_markdown(make_check_table(results.checks())),
        f"Intervals are Student's, over seeds, {describe_deviation(results)}. They tell how another seed would do, not "
        "how other images would.",
        "## What the paper has",
        format_markdown([["", "the paper"], *([what, how] for what, how in study.paper)]),
        "## What this scale cannot show",
        study.limits,
        "## How it was run",
        describe_runs(results),
    ]
    return "\n\n".join(parts) + "\n"


def describe_deviation(results: StudyResults) -> str:
    """Say which deviation the intervals come from."""
    if results.study.is_equally_noisy:
        return "from the deviation that all arms have in common"
    return "from each arm's own deviation, for some arms vary much less than others"


def make_check_table(checks: Sequence[Check]) -> list[list[str]]:
    """Return a row for each check: what it says, the difference, and the outcome."""
    rows = [["the claim says", "measured", "95% interval", "outcome"]]
    for check in checks:
        digits = 1 if abs(check.difference.value) >= 1 else 2
        value = format_number(check.difference.value, digits, "+")
        limit = (
            f" (within ±{check.high:g})" if math.isfinite(check.high) else f" (by {check.low:g})" if check.low else ""
        )
        interval = format_interval(check.difference, digits, "+")
        rows.append([check.statement + limit, value, interval, OUTCOMES[check.outcome]])
    return rows


def describe_runs(results: StudyResults) -> str:
    """Say how many runs there were, on which device, and how long they took."""
    machines = sorted({str(row["machine"]["device"]) for row in results.rows})
    commits = sorted({str(row["commit"])[:12] for row in results.rows if row.get("commit")})
    seconds = results.gpu_seconds()
    time = f"{seconds / MINUTE:.1f} minutes" if seconds > MINUTE else f"{seconds:.0f} seconds"
    code = f" Commit {', '.join(commits)}." if commits else ""
    return (
        f"```bash\n{make_command(results)}\n```\n\n"
        f"{len(results.rows)} runs on {', '.join(machines)}, {time} of its time in all. A training that several "
        f"studies share counts once, where it was trained.{code}"
    )


def make_command(results: StudyResults) -> str:
    """Return the command that measures the same again."""
    row = results.rows[0]
    sets = [name.removeprefix("transfer ") for name in row.get("data", {}) if name.startswith("transfer ")]
    words = ["vitrail study", results.study.name, f"--scale {results.scale}", f"--seeds {results.seeds}"]
    if results.scale != "tiny":  # which has data of its own
        words += ["--data DATA", *(f"--transfer {name}" for name in sets)]
        words += ["--masks MASKS"] if "masks" in results.study.needs else []
    jobs = int(row["machine"]["jobs"])
    return " ".join([*words, f"--jobs {jobs}"] if jobs > 1 else words)


def format_markdown(rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Return a Markdown table; the second column and as many as `numbers` says are aligned to the right."""
    heading, *body = rows
    rule = ["---:" if 0 < place <= numbers else "---" for place in range(len(heading))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *body))
