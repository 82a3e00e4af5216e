"""The page of a study, and the page of all: written from the raw results alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from vitrail.studies.catalogue import NAMES
from vitrail.studies.charts import draw_dots
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import TINY
from vitrail.studies.verdict import Check
from vitrail.system.files import write_whole
from vitrail.system.intervals import Estimate
from vitrail.system.results import format_count, format_value

FIGURE, PAGE = "figure.png", "page.md"
SIGNS = {"holds here": "✓", "does not hold here": "✗", "not decided": "?"}
OUTCOMES = {"holds": "✓ holds", "fails": "✗ fails", "open": "? open"}
TINY_NOTE = "the tiny scale shows that a study works, and nothing about the claim"


def draw_figure(results: StudyResults, path: Path) -> None:
    """Draw the study's figure as PNG and SVG."""
    draw = results.study.draw or draw_dots
    draw(results, path)


def write_page(results: StudyResults, path: Path, figure: str) -> None:
    """Write the study's page as Markdown; `figure` is where the figure is, seen from the page."""
    write_whole(path, make_page(results, figure).encode())


def make_table(results: StudyResults) -> list[list[str]]:
    """Return a row for each arm: its name, the mean, the interval, the value of each seed, and the paper's number."""
    study, digits = results.study, results.study.digits
    paper = ["the paper"] if study.paper_numbers else []
    rows = [["arm", study.unit, "95% interval", "each seed", *study.shown_facts.values(), *paper]]
    for arm in results.arms:
        estimate = results.estimate(arm)
        seeds = ", ".join(format_number(value, digits) for value in results.list_values(arm))
        facts = [format_value(results.get_fact(arm, name)) for name in study.shown_facts]
        numbers = [study.paper_numbers.get(arm, "")] if paper else []
        interval = format_interval(estimate, digits)
        rows.append([arm, format_number(estimate.value, digits), interval, seeds, *facts, *numbers])
    return rows


UNKNOWN = "unknown"
"""An interval that one seed cannot give."""


def format_interval(estimate: Estimate, digits: int = 1, sign: str = "") -> str:
    """Return an interval as text."""
    if not math.isfinite(estimate.low) or not math.isfinite(estimate.high):
        return UNKNOWN
    return f"{format_number(estimate.low, digits, sign)} to {format_number(estimate.high, digits, sign)}"


def format_number(value: float, digits: int = 1, sign: str = "") -> str:
    """Return a number as text, with a real minus sign; `sign` "+" gives positive ones a plus."""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


def choose_digits(difference: Estimate) -> int:
    """Return how many decimals a difference is shown with: two if it is smaller than 1."""
    return 1 if abs(difference.value) >= 1 else 2


def make_page(results: StudyResults, figure: str, remark: str = "") -> str:
    """Return a study's page: claim, verdict, figure, tables, the paper's numbers, limits, and how it was run.

    `remark` is what a person has to say about the results.
    """
    study, verdict = results.study, results.decide()
    parts = [
        f"# {study.title}",
        f"> {study.claim}\n>\n> <small>{study.where}</small>",
        f"**{SIGNS[verdict]} {verdict[0].upper()}{verdict[1:]}** at the {results.scale} scale, with "
        f"{format_count(results.seeds, 'seed')} for each arm.",
        *([f"Note: {TINY_NOTE}."] if results.scale == TINY.name else []),
        f"**The rule**, written before the runs: {study.rule}",
        f"![{study.title}]({figure})",
        format_markdown(make_table(results), numbers=1),
        "## How the rule decides",
        format_markdown(make_check_table(results.make_checks())),
        describe_intervals(results),
        *(["## What we see", remark] if remark else []),
        "## What the paper has",
        format_markdown([["", "the paper"], *([what, how] for what, how in study.paper)]),
        "## What the small scale cannot show",
        study.limits,
        "## How it was run",
        describe_runs(results),
    ]
    return "\n\n".join(parts) + "\n"


def describe_intervals(results: StudyResults) -> str:
    """Say which deviation the intervals come from, and what they tell."""
    source = "each arm's own deviation, for some arms vary much less than others"
    if results.study.is_equally_noisy:
        source = "the deviation that all arms have in common"
    note = results.study.interval_note or "They tell how another seed would do, not how other images would."
    return f"Intervals are Student's, over seeds, from {source}. {note}"


def make_check_table(checks: Sequence[Check]) -> list[list[str]]:
    """Return a row for each check: what it says, the difference, and the outcome."""
    rows = [["the claim says", "measured", "95% interval", "outcome"]]
    for check in checks:
        difference = check.difference
        digits = choose_digits(difference)
        value = "unknown" if math.isnan(difference.value) else format_number(difference.value, digits, "+")
        limit = (
            f" (within ±{check.high:g})" if math.isfinite(check.high) else f" (by {check.low:g})" if check.low else ""
        )
        interval = format_interval(difference, digits, "+")
        rows.append([check.statement + limit, value, interval, OUTCOMES[check.outcome]])
    return rows


def describe_runs(results: StudyResults) -> str:
    """Say how many runs there were, on which device, and how long they took."""
    machines = sorted({str(row["machine"]["device"]) for row in results.rows})
    commits = sorted({str(row["commit"])[:12] for row in results.rows if row.get("commit")})
    jobs = max(int(row["machine"]["jobs"]) for row in results.rows)
    device = sum(row["cost"]["seconds"] / row["machine"]["jobs"] for row in results.rows)
    shared = f", up to {jobs} at a time: about {device:,.0f} seconds of the device" if jobs > 1 else ""
    code = f" Commit {', '.join(commits)}." if commits else ""
    return (
        f"```bash\n{make_command(results)}\n```\n\n"
        f"{format_count(len(results.rows), 'run')} on {', '.join(machines)}. The trainings took "
        f"{results.add_seconds():,.0f} seconds together{shared}; one that several studies share counts where it was "
        f"trained.{code}"
    )


def make_command(results: StudyResults) -> str:
    """Return the command that measures the same again."""
    row = results.rows[0]
    sets = [name.rpartition(" ")[2] for name in row["data"] if name.startswith("transfer ")]
    if results.study.name not in NAMES:
        return f'vitrail.study(STUDY, scale="{results.scale}", seeds={results.seeds})'
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
