"""vitrail data: look at a data set before training on it, and pack it for fast reading."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.printing import progress_bar

if TYPE_CHECKING:
    from vitrail.data.check.report import DataReport

EXAMPLES = 3
"""Of each kind of finding, at a terminal."""

app = typer.Typer(
    help="Check a data set, or pack it into shards.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Data = Annotated[
    str, typer.Argument(metavar="DATA", help="A folder, a .csv, .parquet or .tar file, hf:owner/name, or digits.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one for each core if not given.")]


@app.command()
def check(
    data: Data,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    workers: Workers = None,
) -> None:
    """Decode every image and name those that are broken, doubled, leaked between splits, misnamed, tiny, grey or huge.

    The exit code is 1 where an image cannot be read or stands in two splits. Behind a pipe there is one finding on a
    line (kind, path and sentence with tabs between), and a summary on stderr.
    """
    import json

    from vitrail.data.check.check import check_data as run
    from vitrail.errors import ConfigError

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: give the name of a file in a folder that is there")
    with progress_bar("checking") as progress:
        report = run(data, workers, progress)
    if as_json or out:
        text = json.dumps(report.as_dict(), indent=2)
        if out:
            out.write_text(text + "\n", encoding="utf-8")
        if as_json:
            print(text)
    if not as_json:
        _print_report(report)
    raise typer.Exit(1 if report.failed else 0)


@app.command()
def pack(
    data: Data,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder; or one where this was begun.")],
    split: Annotated[str | None, typer.Option(help="train, val or test; all that are there if not given.")] = None,
    form: Annotated[str, typer.Option("--format", help="tar (WebDataset) or parquet (Hugging Face).")] = "tar",
    shard_mb: Annotated[float, typer.Option(help="About so many megabytes in a shard.")] = 100,
    resize: Annotated[int | None, typer.Option(help="Make the shorter side of larger images so many pixels.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order that samples are written in.")] = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Keep the order instead.")] = False,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out what cannot be read.")] = False,
    workers: Workers = None,
) -> None:
    """Write a data set as shards that read fast: the same bytes every time, and it goes on where it was stopped.

    Beside the shards lie the names of the classes, checksums and dataset.json, which tells how they were made.
    """
    from vitrail.cli.printing import print_table
    from vitrail.data.open import WHOLE
    from vitrail.data.packing.pack import pack_data as run

    with progress_bar("packing") as progress:
        manifest = run(
            data,
            out,
            split=split,
            format=form,
            shard_mb=shard_mb,
            resize=resize,
            shuffle=not no_shuffle,
            seed=seed,
            skip_broken=skip_broken,
            workers=workers,
            progress=progress,
        )
    shards = [shard for part in manifest["splits"].values() for shard in part["shards"]]
    rows = [[str(out / shard["name"]), f"{shard['samples']:,}", f"{shard['bytes']:,}"] for shard in shards]
    print_table(f"Written to {out}", ["file", "samples", "bytes"], rows)
    if WHOLE in manifest["splits"]:
        print(
            "note: this data has no splits. What is held out of the shards is not what is held out of the original: "
            "use one of the two, or give the data folders train and val first",
            file=sys.stderr,
        )
    for name, part in manifest["splits"].items():
        for broken in part["broken"]:
            print(f"left out: {broken['name']}: {broken['reason']}", file=sys.stderr)
        if part["broken"]:
            print(
                f"{name}: {len(part['broken'])} of {manifest['samples'][name]['number']} samples left out",
                file=sys.stderr,
            )


def _print_report(report: DataReport) -> None:
    """Tables at a terminal; else lines, and the summary on stderr."""
    from itertools import islice

    from rich.console import Console

    from vitrail.cli.printing import print_table
    from vitrail.data.check.report import FINDING_KINDS

    if not Console().is_terminal:
        for finding in report.findings():
            print(f"{finding.kind}\t{finding.name}\t{finding.sentence}")
        for line in report.summary():
            print(line, file=sys.stderr)
        return
    found = [kind for kind in FINDING_KINDS if report.counts[kind]]
    rows = []
    for kind in found:
        examples = [f"{finding.name}: {finding.sentence}" for finding in islice(report.findings(kind), EXAMPLES)]
        rows.append([kind, "\n".join(examples), f"{report.counts[kind]:,}"])
    if rows:
        print_table("Findings", ["kind", "for example", "number"], rows, left=2)
    for line in report.summary():
        print(line)
