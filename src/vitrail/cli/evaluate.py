"""vitrail evaluate: how good a model is, on one data set, on the paper's suites, beside others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.completion import LabelsFromOption, WhichOption, complete_device, complete_precision
from vitrail.cli.printing import PRECISION_HELP, interruptible, print_lines, print_table, show_events

if TYPE_CHECKING:
    from vitrail.evaluation.compare import ComparisonResult
    from vitrail.evaluation.report import EvaluationReport
    from vitrail.evaluation.task_report import TaskReport

ALL_SCORED = (
    "all images were scored, also those that the model may have learned from; --split val scores those that "
    "`vitrail finetune` held out, though not with --quick or --sweep, which learn from all in the end"
)
RUNS = 3
"""Trainings for each data set, as in the paper."""


def evaluate(
    model: Annotated[
        str | None,
        typer.Option(help="MODEL: folder, file, run, hf:owner/name, timm:name, pane; or an export: model.onnx."),
    ] = None,
    which: WhichOption = "last",
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder, CSV, Parquet, shards, s3://bucket/folder, hf:owner/name, digits; for a suite a folder or a "
            "TOML file."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(metavar="COLUMNS", help="The data's columns that hold what is true: colour,shape."),
    ] = None,
    labels_from: LabelsFromOption = None,
    split: Annotated[
        str | None, typer.Option(help="train, val or test; test if there is one, else val, if not given.")
    ] = None,
    real: Annotated[Path | None, typer.Option(help="real.json: score ImageNet against its ReaL labels too.")] = None,
    mapping: Annotated[
        Path | None, typer.Option("--map", help="CSV or JSON: the data's classes and the model's that are right.")
    ] = None,
    among: Annotated[
        bool, typer.Option("--among-data-classes", help="Take guesses among the classes that the data has.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="One table of the models that follow: size, speed, accuracy, cost.")
    ] = False,
    suite: Annotated[str | None, typer.Option(help="paper or vtab: fine-tune and score on each of its sets.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Of a suite: trainings for each set.")] = RUNS,
    rates: Annotated[
        str | None, typer.Option(help="Of a suite: learning rates to choose from, such as 0.003,0.01.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json and the figures; in ./runs if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one.")
    ] = "auto",
    precision: Annotated[str, typer.Option(autocompletion=complete_precision, help=PRECISION_HELP)] = "fp32",
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL … | key=value …", help="To compare; of a suite: such as schedule.steps=100."),
    ] = None,
) -> None:
    """Measure a model: accuracy, likelihood, calibration, every class, what is taken for what, with intervals.

    A model with another task has that task's measures: of tags mAP and F1, of numbers the errors in their units.

    vitrail evaluate --model MODEL --data photos/ writes a report and its figures. vitrail evaluate --compare A B
    --data photos/ puts models side by side, with size, speed and what their training cost. With --suite a model is
    fine-tuned on each of the paper's data sets, as the paper does.
    """
    from vitrail.errors import ConfigError
    from vitrail.evaluation.compare import compare_models
    from vitrail.evaluation.evaluate import evaluate as evaluate_model
    from vitrail.inference.batches import InferenceOptions
    from vitrail.weights.source import choose_weights

    if data is None:
        raise ConfigError("--data is missing: vitrail evaluate --model MODEL --data DATA")
    options = InferenceOptions(batch_size, workers, device, precision)
    if suite is None and (rates is not None or runs != RUNS):
        raise ConfigError("--runs and --rates are for --suite")
    if compare:
        if suite or real or mapping or among or out:
            raise ConfigError("--compare takes --data, --split, --labels, --json, how to run, and models only")
        models = [choose_weights(each, which) for each in [*([model] if model else []), *(others or [])]]
        if not models:
            raise ConfigError("--compare has no models: vitrail evaluate --data DATA --compare MODEL MODEL …")
        with interruptible(), show_events() as on_event:
            comparison = compare_models(
                models,
                data,
                split,
                labels=labels,
                labels_from=labels_from,
                batch_size=batch_size,
                workers=workers,
                device=device,
                precision=precision,
                on_event=on_event,
            )
        _print_comparison(comparison, as_json)
        return
    if model is None:
        raise ConfigError("--model is missing: vitrail evaluate --model MODEL --data DATA")
    model = choose_weights(model, which)
    if suite is not None:
        if real or mapping or among or split or labels or labels_from or as_json:
            raise ConfigError("--suite takes --model, --data, --runs, --rates, --out and key=value only")
        if options != InferenceOptions():
            raise ConfigError("a suite trains: give batch_size=… workers=… device=… precision=…, without dashes")
        from vitrail.cli.suite import run_suite_command

        run_suite_command(suite, model, data, out, runs, others or [], rates)
        return
    if others:
        raise ConfigError(f"{others[0]!r}: models are for --compare, key=value for --suite")
    with interruptible(), show_events() as on_event:
        report = evaluate_model(
            model,
            data,
            split,
            labels=labels,
            labels_from=labels_from,
            real=real,
            mapping=mapping,
            among=among,
            batch_size=batch_size,
            workers=workers,
            device=device,
            precision=precision,
            folder=out or "auto",
            on_event=on_event,
        )
    if as_json:
        print_lines([json.dumps(report.to_dict(), indent=1, ensure_ascii=False)])
    else:
        _print_report(report)


def _print_report(report: EvaluationReport | TaskReport) -> None:
    from vitrail.evaluation.report import format_estimate

    part = f", {report.part}" if report.part else ""
    title = f"{report.model} on {report.data}{part}: {report.images:,} images"
    measures = [[name, *format_estimate(measured, is_share)] for name, measured, is_share in report.measures()]
    print_table(title, ["measure", "value", "95% from", "to"], measures)
    print_lines(_make_remarks(report))
    for name, (columns, *rows) in report.tables().items():
        print_table(name, columns, rows, left=columns.index("images") if "images" in columns else len(columns))
    if report.was_trained_on:
        print_lines(["warning: the model has learned from these very images, so this says nothing about new ones"])
    if report.chose_weights:
        print_lines(["warning: these images chose the weights, so on new ones the model will do a little worse"])
    print_lines(f"written: {path}" for path in report.files)


def _make_remarks(report: EvaluationReport | TaskReport) -> list[str]:
    from vitrail.evaluation.report import EvaluationReport, describe_engine

    remarks = [f"classes: {report.labels}"] if isinstance(report, EvaluationReport) else []
    if report.about["precision"] != "fp32":
        remarks.append(f"computed {describe_engine(report.about)}")
    if not isinstance(report, EvaluationReport):
        remarks += [f"left out: {line}" for line in report.describe_left_out()]
        return remarks if report.part else [*remarks, ALL_SCORED]
    if report.foreign_guesses:
        remarks.append(
            f"{report.foreign_guesses:,} guesses are of classes that the data does not have: --among-data-classes "
            "takes them among those that it has"
        )
    if report.left_out:
        remarks.append(f"left out: {report.left_out:,} images of classes that the model does not know")
    if report.broken:
        remarks.append(f"left out: {report.broken:,} images that cannot be read; `vitrail data check` names them")
    if report.part is None:
        remarks.append(ALL_SCORED)
    return remarks


def _print_comparison(comparison: ComparisonResult, as_json: bool) -> None:
    if as_json:
        print(json.dumps([row.to_dict() for row in comparison.rows], indent=1))
    elif comparison.rows:
        title, table = next(iter(comparison.tables().items()))
        if sys.stdout.isatty():  # one model in each column: a terminal has no room for ten columns of numbers
            table = list(zip(*table, strict=True))
        columns, *rows = table
        print_table(title, columns, rows)
        print_lines(comparison.notes)
    for model, reason in comparison.failures:
        print(f"error: {model}: {reason}", file=sys.stderr)
    if comparison.failures:
        raise typer.Exit(1)
