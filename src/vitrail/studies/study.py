"""What a study is: a claim of the paper, arms that differ in one thing, a measurement, and a rule that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from vitrail.studies.results import StudyResults
    from vitrail.studies.scales import Scale
    from vitrail.studies.verdict import Check
    from vitrail.studies.workbench import Workbench

Measured = dict[str, float]
"""What one run measured, by name."""


@dataclass(frozen=True)
class Arm:
    """One of the things that a study compares."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training that make this arm, such as {"model.position": "none"}."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the study's measurement and figure need to know about it."""
    weight: float = 1.0
    """Roughly how long it takes, compared with the others: long runs are started first."""


@dataclass(frozen=True)
class Study:
    """A claim, and all that is needed to test it."""

    name: str
    """What people type: lower-case words with hyphens."""
    title: str
    claim: str
    """The claim in a sentence."""
    where: str
    """Where the paper makes it."""
    list_arms: Callable[[Scale], Sequence[Arm]]
    measure: Callable[[Workbench, Arm], Measured]
    """Trains and measures one arm with the workbench's seed."""
    metric: str
    """The name of the measured number that the table shows."""
    unit: str
    """What that number is, such as "few-shot accuracy, %"."""
    rule: str
    """The rule in words, written before the runs."""
    list_checks: Callable[[StudyResults], Sequence[Check]]
    """The same rule as checks of the results."""
    limits: str
    """What a small scale cannot show."""
    paper: Sequence[tuple[str, str]] = ()
    """The paper's own numbers: what, and how much."""
    paper_numbers: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers that stand beside those of the arms."""
    shown_facts: Mapping[str, str] = field(default_factory=dict)
    """Facts about the arms that the table shows: their names, and the headings of their columns."""
    is_equally_noisy: bool = True
    """Whether the arms have one deviation over seeds in common, which the table then uses."""
    interval_note: str = ""
    """Sentences about the intervals of the checks, if they do not come from the deviation of the arms over seeds."""
    digits: int = 1
    """Digits after the point in the table."""
    draw: Callable[[StudyResults, Path], None] | None = None
    """Draws the figure to a path; bars of the metric if None."""
    needs: Sequence[str] = ("data", "transfer")
    """The data it uses: data, transfer, masks."""
