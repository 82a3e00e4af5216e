"""vitrail fewshot: what a frozen model is worth on a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.completion import LabelsFromOption, WhichOption, complete_device, complete_precision
from vitrail.cli.printing import PRECISION_HELP, announce_pane, interruptible, print_table, show_events

if TYPE_CHECKING:
    from vitrail.evaluation.fewshot import FewshotReport

INTERRUPTED = "the features computed so far are kept, and the same command goes on from there"


def fewshot(
    data: Annotated[
        str, typer.Option(help="A folder, a .csv, .parquet or .tar file, s3://bucket/folder, hf:owner/name, or digits.")
    ],
    model: Annotated[
        str | None, typer.Option(help="MODEL: folder, file, run, hf:owner/name, timm:name; pane if not given.")
    ] = None,
    which: WhichOption = "last",
    labels_from: LabelsFromOption = None,
    test: Annotated[
        str | None, typer.Option(help="Other DATA to test on, or val or test; what the data has, if not given.")
    ] = None,
    shots: Annotated[str, typer.Option(help="Images of each class, for least squares.")] = "1,5,10,25",
    seeds: Annotated[int, typer.Option(min=1, help="How often shots and clusters are drawn.")] = 3,
    methods: Annotated[str, typer.Option(help="Some of these.")] = "least-squares,linear,knn,clusters",
    l2: Annotated[float, typer.Option(help="Regularisation of least squares.")] = 1024,
    features: Annotated[
        str, typer.Option(help="representation (y), or pre-logits: the tanh layer after it, if the model has one.")
    ] = "representation",
    neighbours: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Only print the images most similar to this one.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of them.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images; 0 reads in this one.")] = 0,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one, for auto.")
    ] = "auto",
    precision: Annotated[str, typer.Option(autocompletion=complete_precision, help=PRECISION_HELP)] = "fp32",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute features anew, and keep none.")] = False,
) -> None:
    """Few-shot accuracy of a model that is not trained any further, as the paper measures it, and more.

    Least squares learns from a few images of each class; the linear probe and the neighbours (knn) from all, and
    clusters from none. Features are computed once and cached; VITRAIL_CACHE says where.
    """
    from vitrail.evaluation.fewshot import fewshot as measure_fewshot
    from vitrail.evaluation.neighbours import find_similar
    from vitrail.weights.source import PANE, choose_weights

    shot_counts = _parse_shots(shots)
    if model is None:
        model = PANE
        announce_pane("--model MODEL takes another")
    model = choose_weights(model, which)
    cache: Any = None if no_cache else "auto"
    if neighbours is not None:
        with interruptible(INTERRUPTED), show_events() as on_event:
            similar = find_similar(
                model,
                data,
                neighbours,
                top,
                labels_from=labels_from,
                batch_size=batch_size,
                workers=workers,
                device=device,
                precision=precision,
                cache=cache,
                out=out,
                on_event=on_event,
            )
        if as_json:
            print(json.dumps(similar.to_dict(), indent=2))
            return
        rows = [[image.name, image.label, f"{image.similarity:.4f}"] for image in similar]
        print_table(f"Most similar to {neighbours}", ["name", "label", "similarity"], rows, left=2)
        return
    with interruptible(INTERRUPTED), show_events() as on_event:
        report = measure_fewshot(
            model,
            data,
            test,
            labels_from=labels_from,
            shots=shot_counts,
            seeds=range(seeds),
            methods=[name.strip() for name in methods.split(",") if name.strip()],
            l2=l2,
            features=features,
            batch_size=batch_size,
            workers=workers,
            device=device,
            precision=precision,
            cache=cache,
            out=out,
            on_event=on_event,
        )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report)


def _print_report(report: FewshotReport) -> None:
    title, (columns, *rows) = next(iter(report.tables().items()))
    print_table(title, columns, rows)
    # If a program reads the table, the sentences go to the person, on stderr.
    file = sys.stdout if sys.stdout.isatty() else sys.stderr
    for line in report.lines():
        print(line, file=file)


def _parse_shots(text: str) -> list[int]:
    from vitrail.errors import ConfigError

    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--shots {text}: give whole numbers with commas between, such as 1,5,10,25") from None
