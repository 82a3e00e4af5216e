"""vitrail train: a recipe or a file, and what is to be different."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.completion import complete_recipe
from vitrail.cli.printing import print_lines, print_table, stop_on_sigterm
from vitrail.system.commands import quote_word

if TYPE_CHECKING:
    from vitrail.recipes import Recipe
    from vitrail.training.result import TrainingResult
    from vitrail.workflows.finetune_result import FinetuneResult


@stop_on_sigterm()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(autocompletion=complete_recipe, help="A recipe's name (see --list), or a .toml file."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value …", help="Such as data.source=photos/ run.seed=1.")
    ] = None,
    list_them: Annotated[
        bool, typer.Option("--list", help="List the recipes, what they cost and give, and stop.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration as TOML, and stop.")] = False,
) -> None:
    """Train a model: supervised, by masked patches, or from other weights.

    The same command resumes a run that was stopped. Ctrl-C and SIGTERM save first (exit code 3).
    """
    from vitrail.errors import ConfigError
    from vitrail.recipes import RECIPES, find_recipe

    if list_them:
        _print_recipes(RECIPES.values())
        return
    if recipe is None:
        raise ConfigError("name a recipe (`vitrail train --list` shows them) or a .toml file")
    if not recipe.endswith(".toml"):
        find_recipe(recipe)  # fails with the nearest name before torch is imported
    from vitrail.system.event_display import EventDisplay
    from vitrail.workflows.train import build_config
    from vitrail.workflows.train import train as run

    if show:
        from vitrail.training.resolve import to_toml

        print(to_toml(build_config(recipe, overrides or [])), end="")
        return
    report: dict[str, Any] = {}
    with EventDisplay(plain_lines=True) as display:

        def listen(kind: str, values: dict[str, Any]) -> None:
            display(kind, values)
            if kind == "report":
                report.update(values)

        result = run(recipe, overrides or [], on_event=listen)
    print_lines(describe_training_result(result, report))


def _print_recipes(recipes: Iterable[Recipe]) -> None:
    """Print name, summary, cost and expected number of each recipe; off a terminal as columns, with the command too."""
    if sys.stdout.isatty():  # columns would be too narrow to read; every command is `vitrail train NAME …`
        texts = [(r.name, f"{r.summary}\ncost: {r.cost}\nexpected: {r.expected}") for r in recipes]
        print_table("Recipes", ("name", "what, cost and expected number"), texts, left=2)
        return
    rows = [(r.name, r.summary, r.cost, r.expected, r.command) for r in recipes]
    print_table("Recipes", ("name", "what", "cost", "expected", "command"), rows, left=5)


def describe_training_result(result: TrainingResult | FinetuneResult, report: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the accuracy, the files, the report, and the next commands to type.

    `report` has the values of the `report` event, or nothing if there was none.
    """
    if result.evaluation is not None:
        measurements = ", ".join(format_measurement(name, value) for name, value in result.evaluation.items())
        yield f"validation, on {result.evaluated:,} images: {measurements}"
    yield from describe_files(result, report)


def describe_files(result: TrainingResult | FinetuneResult, report: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the few-shot accuracy, if it was measured, the files, and the next commands to type."""
    if result.fewshot is not None and result.config is not None:
        yield f"few-shot accuracy, {result.config.run.fewshot_shots} images of each class: {result.fewshot:.1%}"
    yield f"curves: {result.folder / 'curves.png'}"
    yield from describe_report(report)
    yield f"model: {result.weights}"
    folder = quote_word(str(result.folder))
    if result.config is not None and result.config.objective.kind in ("classification", "task"):
        commands = f"vitrail predict PHOTO --model {folder}; vitrail evaluate --model {folder} --data DATA measures it"
    else:  # without a head there is nothing to evaluate yet
        commands = (
            f"vitrail finetune --data DATA --from {folder} teaches it classes; "
            f"vitrail fewshot --data DATA --model {folder} measures what it has learned"
        )
    yield f"next: {commands}; in Python, model = vitrail.load({json.dumps(str(result.folder))})"


def describe_report(report: dict[str, Any]) -> Iterator[str]:
    """Yield the line of a `report` event."""
    if not report:
        return
    command = f"vitrail inspect {quote_word(str(Path(report['folder'])))}"
    if report["path"] is not None:
        yield f"report: {report['path']}"
    elif report["problem"] == "stopped":
        yield f"report: stopped; {command} makes it"
    else:
        yield f"report: none could be made ({report['problem']}); {command} tries again"


def format_measurement(name: str, value: float) -> str:
    return f"{name} {value:.1%}" if name in ("accuracy", "top5") else f"{name} {value:.4f}"
