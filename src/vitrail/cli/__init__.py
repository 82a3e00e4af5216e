"""The command line: one file for each verb, which only parses and prints.

Nothing heavy is imported before a verb runs, so `vitrail --help` answers at once.
"""

from __future__ import annotations

import sys

import typer

from vitrail.cli import (
    bench,
    calibrate,
    convert,
    data,
    doctor,
    evaluate,
    export,
    fewshot,
    finetune,
    inspect,
    models,
    predict,
    quickstart,
    serve,
    study,
    train,
)
from vitrail.cli.flags import App
from vitrail.cli.proposals import print_proposal
from vitrail.cli.usage import is_usage_error, print_usage_error
from vitrail.system.failures import flush_output, print_failure
from vitrail.system.standard_streams import check_streams

app = App(
    name="vitrail",
    help="The Vision Transformer paper as software: the whole model family, from patches to figures.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quickstart.quickstart)
app.command()(train.train)
app.command()(finetune.finetune)
app.command()(evaluate.evaluate)
app.command()(calibrate.calibrate)
app.command()(fewshot.fewshot)
app.command()(predict.predict)
app.command()(inspect.inspect)
app.command()(models.models)
app.command()(convert.convert)
app.command()(export.export)
app.command(context_settings={"allow_extra_args": True})(serve.serve)
app.command()(study.study)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.add_typer(data.app, name="data")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from vitrail import __version__

        typer.echo(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Take the options that come before a verb."""


def main() -> None:
    """Run the command line. What is typed wrongly, and what vitrail or the system refuses, has no traceback."""
    closed = check_streams()
    if closed is not None:
        sys.exit(print_failure(OSError(closed)))
    code: int | str | None = 0
    try:
        code = app(prog_name="vitrail", standalone_mode=False) or 0
    except SystemExit as end:
        code = end.code
    except typer.Abort:
        code = "Aborted!"
    except Exception as error:
        code = print_usage_error(error) if is_usage_error(error) else print_failure(error)
        if code is None:
            raise
        print_proposal(error, sys.argv[1:])
    sys.exit(flush_output() or code)
