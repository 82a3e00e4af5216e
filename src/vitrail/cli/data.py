"""vitrail data: look at a data set before training on it, and pack it for fast reading."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.completion import LabelsFromOption, LabelsOption, TaskOption
from vitrail.cli.flags import App
from vitrail.cli.printing import print_table

if TYPE_CHECKING:
    from vitrail.data.check.report import DataReport

app = App(
    help="Check a data set, or pack it into shards.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="A folder, a .csv, .parquet or .tar file, s3://bucket/folder, hf:owner/name, or digits."
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one for each core if not given.")]


@app.command()
def check(
    data: Data,
    split: Annotated[str | None, typer.Option(help="train, val or test; all that are there if not given.")] = None,
    labels_from: LabelsFromOption = None,
    task: TaskOption = None,
    labels: LabelsOption = None,
    against: Annotated[
        str | None, typer.Option(metavar="DATA", help="Other data: find the images that it has too, or nearly.")
    ] = None,
    against_split: Annotated[str | None, typer.Option(help="One split of the other data, such as test.")] = None,
    against_labels_from: Annotated[str | None, typer.Option(help="As --labels-from, for the other data.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="With --against: write the pairs, side by side, to this HTML file.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(help="With --against: write the names of images that repeat one, for `data pack --without`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    workers: Workers = None,
) -> None:
    """Decode every image and name those that are broken, doubled, leaked between splits, misnamed, tiny, grey or huge.

    With --against, also name the images that repeat one of other data, such as a test set: the same pixels, or resized,
    recompressed, slightly cropped, brighter, darker or mirrored. --page shows the pairs; `vitrail data pack DATA OUT
    --without NAMES` leaves out what --names wrote.

    The exit code is 1 if an image cannot be read, is in two splits, or repeats one of --against. Into a pipe, every
    finding is a line (kind, path and sentence, separated by tabs), and the summary goes to stderr.
    """
    import json

    from vitrail.data.check.check import check_data
    from vitrail.system.event_display import EventDisplay

    with EventDisplay(plain_lines=True) as display:
        report = check_data(
            data,
            split=split,
            labels_from=labels_from,
            task=task,
            labels=labels,
            against=against,
            against_split=against_split,
            against_labels_from=against_labels_from,
            page=page,
            names=names,
            workers=workers,
            out=out,
            on_event=display,
        )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.failed else 0)


@app.command()
def pack(
    data: Data,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder; or one where this was begun.")],
    split: Annotated[str | None, typer.Option(help="train, val or test; all that are there if not given.")] = None,
    labels_from: LabelsFromOption = None,
    task: TaskOption = None,
    labels: LabelsOption = None,
    form: Annotated[str, typer.Option("--format", help="tar (WebDataset) or parquet (Hugging Face).")] = "tar",
    shard_mb: Annotated[float, typer.Option(help="About so many megabytes in a shard.")] = 100,
    resize: Annotated[int | None, typer.Option(help="Make the shorter side of larger images so many pixels.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order that samples are written in.")] = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Keep the order instead.")] = False,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out what cannot be read.")] = False,
    without: Annotated[
        Path | None, typer.Option(metavar="LIST", help="Leave out the samples that this file names, one per line.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Write a data set as shards that read fast: the same bytes every time. The same command resumes a stopped one.

    Beside the shards lie the names of the classes, checksums and dataset.json, which tells how they were made.
    """
    from vitrail.data.packing.pack import pack_data
    from vitrail.system.event_display import EventDisplay
    from vitrail.system.results import format_count

    with EventDisplay(plain_lines=True) as display:
        result = pack_data(
            data,
            out,
            split=split,
            labels_from=labels_from,
            task=task,
            labels=labels,
            format=form,
            shard_mb=shard_mb,
            resize=resize,
            shuffle=not no_shuffle,
            seed=seed,
            skip_broken=skip_broken,
            without=without,
            workers=workers,
            on_event=display,
        )
    rows = [[str(shard.path), f"{shard.samples:,}", f"{shard.bytes:,}"] for shard in result.shards]
    print_table(f"Written to {out}", ["file", "samples", "bytes"], rows)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if result.without:
        print(f"{format_count(result.without, 'sample')} left out because {without} names them", file=sys.stderr)
    for name, group in groupby(result.left_out, key=lambda sample: sample.split):
        samples = list(group)
        for sample in samples:
            print(f"left out: {sample.name}: {sample.reason}", file=sys.stderr)
        print(
            f"{name}: {len(samples)} of {result.manifest['samples'][name]['number']} samples left out", file=sys.stderr
        )


def _print_report(report: DataReport) -> None:
    """Print tables at a terminal; else lines, with the summary on stderr."""
    from rich.console import Console

    if not Console().is_terminal:
        for finding in report.findings():
            print(f"{finding.kind}\t{finding.name}\t{finding.sentence}")
        for line in report.lines():
            print(line, file=sys.stderr)
        return
    rows = []
    for kind, examples in report.examples().items():
        sentences = [f"{finding.name}: {finding.sentence}" for finding in examples]
        rows.append([kind, "\n".join(sentences), f"{report.counts[kind]:,}"])
    if rows:
        print_table("Findings", ["kind", "for example", "number"], rows, left=2)
    for title, (head, *lines) in report.target_tables().items():
        print_table(title, head, lines)
    for line in report.lines():
        print(line)
