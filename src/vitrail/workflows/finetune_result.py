"""What `finetune` returns, whether it trains the whole model or fits a head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.evaluation.report import EvaluationReport
from vitrail.inspection.page.scores import TRUSTED_ACCURACY
from vitrail.model.base import ImageModel
from vitrail.system.intervals import Estimate
from vitrail.system.results import Result, Rows, format_count, format_value, to_plain
from vitrail.training.config import RunConfig
from vitrail.training.result import CURVES_FILE, describe_accuracy
from vitrail.training.sweep import Trial
from vitrail.workflows.suspects import Suspect
from vitrail.workflows.task_measures import TaskJudgement, describe_estimate

MISLABELLED_FILE = "mislabelled.csv"
"""The file, in the folder of a quick head, that lists all suspects."""
REPORT_FILE = "report.html"
MOST_LISTED = 5
"""Largest number of suspects that are listed; the file has all."""


@dataclass(frozen=True, repr=False)
class FinetuneResult(Result):
    """A classifier for some images, and how good it is."""

    model: ImageModel = field(compare=False)
    """The classifier on the CPU, ready to evaluate."""
    folder: Path
    weights: Path
    """The folder with the classifier, which `vitrail.load` reads."""
    config: RunConfig | None
    """The whole configuration of the training; None for a quick head, for which nothing is trained."""
    accuracy: Estimate | None
    """On images that neither trained nor chose anything, and for a quick head by cross-fitting; None if it was not
    measured."""
    evaluated: int
    """The number of images behind the accuracy."""
    evaluation: dict[str, float] | None = None
    """All measurements of the model's evaluation on the validation images, if there was one."""
    fewshot: float | None = None
    """The few-shot accuracy of the model, if it was measured at its step."""
    judged: EvaluationReport | None = field(default=None, compare=False)
    """Classes, confusions and mistakes, on the images behind the accuracy; None if it was not measured."""
    flatters: bool = False
    """Whether the images behind the accuracy also chose the weights, because there were no others."""
    report: Path | None = None
    """The page about the model; None if none was made."""
    trials: tuple[Trial, ...] = ()
    """One for each learning rate that a sweep tried."""
    scores: dict[str, Estimate] = field(default_factory=dict)
    """The accuracy of a quick head on the splits "val" and "test", if the data has them."""
    suspects: tuple[Suspect, ...] = ()
    """Images that a quick head doubts the label of, the most doubtful first."""

    @property
    def balanced_accuracy(self) -> Estimate | None:
        """The mean of the classes' recalls: a rare class counts as much as a common one. None if not measured."""
        return None if self.judged is None or math.isnan(self.judged.balanced.value) else self.judged.balanced

    @property
    def has_weak_suspects(self) -> bool:
        """Whether most suspects are probably the model's own mistakes."""
        return bool(self.suspects) and self.accuracy is not None and self.accuracy.value < TRUSTED_ACCURACY

    def summary(self) -> Rows:
        """Return the accuracy and the files."""
        rows = [("accuracy", describe_accuracy(self.accuracy, self.evaluated))]
        if self.balanced_accuracy is not None:
            rows.append(("balanced accuracy", f"{self.balanced_accuracy.value:.1%}"))
        rows += [(f"{split} accuracy", f"{accuracy.value:.1%}") for split, accuracy in self.scores.items()]
        if self.config is not None and self.trials:
            rows.append(("learning rate", f"{self.config.optimizer.learning_rate:.3g}, of {len(self.trials)} tried"))
        if self.suspects:
            remark = ", but most of these will be the model's own mistakes" if self.has_weak_suspects else ""
            rows.append(("perhaps mislabelled", f"{format_count(len(self.suspects), 'image')}{remark}"))
        if (reliability := self.model.reliability) is not None:
            how = "predict --coverage 0.95 --unknown"
            rows.append(("calibrated", f"on {format_count(reliability.images, 'image')} that chose nothing: {how}"))
        rows.append(("weights", str(self.weights)))
        return rows if self.report is None else [*rows, ("report", str(self.report))]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the trials of a sweep and the first suspects."""
        tables: dict[str, Sequence[Sequence[str]]] = {}
        if self.trials:
            rows = [(f"{t.rate:.3g}", t.failure or format_accuracy(t.accuracy), f"{t.loss:.4f}") for t in self.trials]
            tables["learning rates"] = [("learning rate", "accuracy", "loss"), *rows]
        if self.suspects:
            listed = [(*each[:3], f"{each.probability:.0%}") for each in self.suspects[:MOST_LISTED]]
            tables["perhaps mislabelled"] = [("image", "label", "looks like", "probability"), *listed]
        return tables

    def figures(self) -> Sequence[Path]:
        """Return the learning curves; a quick head has none."""
        return (self.folder / CURVES_FILE,)


def format_accuracy(accuracy: float) -> str:
    """Return the accuracy of a trial as text; "–" for a task that has none."""
    return "–" if math.isnan(accuracy) else f"{accuracy:.1%}"


@dataclass(frozen=True, repr=False)
class TaskResult(FinetuneResult):
    """A model for another task than labels, and how good it is. It has measures in place of an accuracy."""

    judgement: TaskJudgement | None = field(default=None, compare=False)
    """The measures with their intervals, the images behind them, and the task as it was tuned; None if there were no
    images to measure."""

    @property
    def measures(self) -> Mapping[str, Estimate]:
        """The measures by their names, the most important first."""
        return {} if self.judgement is None else {m.name: m.estimate for m in self.judgement.measures.measures}

    def summary(self) -> Rows:
        """Return the task, the measures and the files."""
        rows = [("task", self.model.task.kind)]
        if self.judgement is None:
            rows.append(("measures", "not measured"))
        else:
            rows += [(each.name, describe_estimate(each)) for each in self.judgement.measures.measures]
            rows.append(("images", self.judgement.remark))
        return [*rows, *(row for row in super().summary() if row[0] != "accuracy")]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the tables of the task, such as one with a row for each tag, and the trials of a sweep."""
        tables = dict(super().tables())
        if self.judgement is not None:
            for title, rows in self.judgement.measures.tables.items():
                tables[title] = [[_format_cell(cell) for cell in row] for row in rows]
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that JSON can hold, with the measures and their tables."""
        plain = {name: value for name, value in super().to_dict().items() if name not in ("judgement", "accuracy")}
        judged = self.judgement
        return {
            **plain,
            "task": self.model.task.kind,
            "measures": [] if judged is None else judged.list_measures(),
            "tables": {} if judged is None else to_plain(judged.measures.tables),
        }


def _format_cell(cell: Any) -> str:
    """Return a cell of a task's table as text; "–" for what is not known."""
    return "–" if isinstance(cell, float) and math.isnan(cell) else format_value(cell)
