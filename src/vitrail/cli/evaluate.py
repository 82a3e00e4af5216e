"""vitrail evaluate: how good a model is, on one data set, on the paper's suites, beside others."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.printing import interruptible, print_lines, print_table, progress_bar

if TYPE_CHECKING:
    from vitrail.evaluation.compare import ModelComparison
    from vitrail.evaluation.evaluate import SavedReport
    from vitrail.evaluation.report import EvaluationReport
    from vitrail.inference.batches import InferenceOptions
    from vitrail.system.intervals import Estimate

RUNS = 3
"""Trainings for each data set, as in the paper."""
MOST_PRINTED = 10
"""Largest number of classes and of confusions on the screen; report.json has all."""


def evaluate(
    model: Annotated[
        str | None, typer.Option(help="MODEL: a folder or file of weights, a run, hf:owner/name, timm:name, pane.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder, CSV, Parquet, shards, hf:owner/name, digits; for a suite a folder or a TOML file."
        ),
    ] = None,
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
    device: Annotated[str, typer.Option(help="cpu, cuda, …; a GPU where there is one.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or auto.")] = "fp32",
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL … | key=value …", help="To compare; of a suite: such as schedule.steps=100."),
    ] = None,
) -> None:
    """Measure a model: accuracy, likelihood, calibration, every class, what is taken for what, with intervals.

    vitrail evaluate --model MODEL --data photos/ writes a report and its figures. vitrail evaluate --compare A B
    --data photos/ puts models side by side, with size, speed and what their training cost. With --suite a model is
    fine-tuned on each of the paper's data sets, as the paper does.
    """
    from vitrail.errors import ConfigError
    from vitrail.evaluation.evaluate import evaluate as evaluate_model
    from vitrail.inference.batches import InferenceOptions

    if data is None:
        raise ConfigError("--data is missing: vitrail evaluate --model MODEL --data DATA")
    options = InferenceOptions(batch_size, workers, device, precision)
    if suite is None and (rates is not None or runs != RUNS):
        raise ConfigError("--runs and --rates are for --suite")
    if compare:
        if suite or real or mapping or among or out:
            raise ConfigError("--compare takes --data, --split, --json, how to run, and models only")
        _compare_models([*([model] if model else []), *(others or [])], data, split, options, as_json)
        return
    if model is None:
        raise ConfigError("--model is missing: vitrail evaluate --model MODEL --data DATA")
    if suite is not None:
        if real or mapping or among or split or as_json:
            raise ConfigError("--suite takes --model, --data, --runs, --rates, --out and key=value only")
        if options != InferenceOptions():
            raise ConfigError("a suite trains: give batch_size=… workers=… device=… precision=…, without dashes")
        from vitrail.cli.suite import run_suite_command

        run_suite_command(suite, model, data, out, runs, others or [], rates)
        return
    if others:
        raise ConfigError(f"{others[0]!r}: models are for --compare, key=value for --suite")
    with interruptible(), progress_bar("evaluating") as progress:
        evaluation = evaluate_model(
            model, data, split, real=real, mapping=mapping, among=among, options=options, folder=out, progress=progress
        )
    _print_evaluation(evaluation, as_json)


def _print_evaluation(evaluation: SavedReport, as_json: bool) -> None:
    if not evaluation.is_first:
        return
    if as_json:
        print(json.dumps(evaluation.report.as_dict(), indent=1, ensure_ascii=False))
        return
    _print_report(evaluation.report)
    if evaluation.was_trained_on:
        print_lines(["warning: the model has learned from these very images, so this says nothing about new ones"])
    print_lines(f"written: {path}" for path in evaluation.files)


def _print_report(report: EvaluationReport) -> None:
    from vitrail.inference.class_names import annotate_wnid

    rows = [["top-1 accuracy", *_format_percents(report.top1)]]
    if report.top5 is not None:
        rows.append(["top-5 accuracy", *_format_percents(report.top5)])
    if report.real is not None:
        rows.append([f"ReaL accuracy, {report.real.images:,} images", *_format_percents(report.real.accuracy)])
    rows.append(["negative log-likelihood", *_format_numbers(report.likelihood)])
    rows.append(["calibration error", *_format_numbers(report.calibration)])
    part = f", {report.part}" if report.part else ""
    title = f"{report.model} on {report.data}{part}: {report.images:,} images"
    print_table(title, ["measure", "value", "95% from", "to"], rows)
    print_lines(_make_remarks(report))
    scored = [score for score in report.classes if score.images]
    worst = sorted(scored, key=lambda score: (score.accuracy.value, -score.images))[:MOST_PRINTED]
    rows = [[annotate_wnid(score.name), f"{score.images:,}", *_format_percents(score.accuracy)] for score in worst]
    title = "Classes, the worst first" if len(scored) > MOST_PRINTED else "Classes"
    print_table(title, ["class", "images", "accuracy", "95% from", "to"], rows)
    if report.confusions:
        confusions = report.confusions[:MOST_PRINTED]
        rows = [[annotate_wnid(label), annotate_wnid(guess), f"{count:,}"] for label, guess, count in confusions]
        print_table("What is taken for what", ["label", "guess", "images"], rows, left=2)


def _make_remarks(report: EvaluationReport) -> list[str]:
    remarks = [f"classes: {report.labels}"]
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
        remarks.append(
            "all images were scored, also those that the model may have learned from; --split val scores the tenth "
            "that `vitrail finetune` holds out, though not with --quick or --sweep, which learn from all in the end"
        )
    return remarks


def _compare_models(models: list[str], data: str, split: str | None, options: InferenceOptions, as_json: bool) -> None:
    from vitrail.errors import ConfigError, VitrailError
    from vitrail.evaluation.compare import compare_model

    if not models:
        raise ConfigError("--compare has no models: vitrail evaluate --data DATA --compare MODEL MODEL …")
    rows, failures = [], []
    for name in models:
        try:
            with interruptible(), progress_bar(f"evaluating {name}") as progress:
                rows.append(compare_model(name, data, split, options, progress))
        except VitrailError as error:  # the other models are still compared
            failures.append(f"error: {name}: {error}")
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    elif rows:
        _print_comparison(rows, data)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def _print_comparison(rows: list[ModelComparison], data: str) -> None:
    columns = ["model", "parameters", "GFLOPs", "images/s", "images", "top-1", "95% from", "to"]
    columns += ["training exaFLOPs", "device-hours"]
    cells = [_make_cells(row) for row in rows]
    if sys.stdout.isatty():  # one model in each column: a terminal has no room for ten columns of numbers
        columns, *cells = [list(line) for line in zip(columns, *cells, strict=True)]
    print_table(f"On {data}", columns, cells)
    print_lines(note for row in rows for note in row.notes)


def _make_cells(row: ModelComparison) -> list[str]:
    return [
        row.model,
        f"{row.parameters:,}",
        f"{row.flops / 1e9:,.3g}",
        f"{row.images_per_second:,.0f}" if row.images_per_second >= 10 else f"{row.images_per_second:.2f}",
        f"{row.images:,}",
        *_format_percents(row.top1),
        "–" if row.training is None else f"{row.training.exaflops:.3g}",
        "–" if row.training is None else f"{row.training.device_hours:.3g}",
    ]


def _format_percents(measured: Estimate) -> list[str]:
    return [f"{value:.2%}" if math.isfinite(value) else "–" for value in measured]


def _format_numbers(measured: Estimate) -> list[str]:
    return [f"{value:.4f}" if math.isfinite(value) else "–" for value in measured]
