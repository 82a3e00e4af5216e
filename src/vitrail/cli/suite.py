"""vitrail evaluate --suite: transfer a model to the data sets of the paper, and print the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitrail.cli.printing import print_lines
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.transfer.suite import SuiteName


def run_suite_command(
    suite: str, model: str, data: str, out: Path | None, runs: int, settings: list[str], rates: str | None
) -> None:
    """Run a suite, print what happens as it happens, and in the end the table."""
    from vitrail.system.event_display import EventDisplay
    from vitrail.transfer.suite import run_suite

    try:
        learning_rates = None if rates is None else [float(rate) for rate in rates.split(",")]
    except ValueError:
        raise ConfigError(f"--rates {rates}: give numbers with commas between, such as 0.003,0.01") from None
    with EventDisplay(plain_lines=True) as display:

        def on_event(kind: str, values: dict[str, Any]) -> None:
            display(kind, values)
            print_lines(describe_event(kind, values))

        result = run_suite(
            cast("SuiteName", suite),  # it says which there are
            model,
            data,
            folder=out,
            runs=runs,
            rates=learning_rates,
            settings=settings,
            on_event=on_event,
        )
    print_lines(result.lines())


def describe_event(kind: str, values: dict[str, Any]) -> list[str]:
    """Return the lines to print for an event of a suite; none for the events of training, which are a bar."""
    name = values.get("set")
    if kind == "message":
        return [values["text"]]
    if kind == "transfer":
        tried = len(values["rates"])
        choosing = f"{tried} to choose the learning rate and " if tried > 1 else ""
        return [f"{name}: {choosing}{values['runs']} on all images: trainings of {values['steps']:,} steps"]
    if kind == "trial":
        outcome = values.get("failure") or f"{values['accuracy']:.1%} on {values['part']}"
        return [f"{name}: learning rate {values['rate']:.3g}: {outcome}"]
    if kind == "chosen" and values["trials"]:
        return [f"{name}: chosen: {values['rate']:.3g}"]
    if kind == "chosen":
        return [f"{name}: learning rate {values['rate']:.3g}: the only one, so there is nothing to choose"]
    if kind == "scored":
        return [f"{name}: seed {values['seed']}: {values['accuracy']:.2%} of {values['count']:,} test images"]
    return []
