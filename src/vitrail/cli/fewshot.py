"""vitrail fewshot: what a frozen model is worth on a data set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.printing import interruptible, print_table, progress_bar, tell_of_pane

KEPT = "the features computed so far are kept, and the same command goes on from there"


def fewshot(
    data: Annotated[str, typer.Option(help="A folder, a .csv, .parquet or .tar file, hf:owner/name, or digits.")],
    model: Annotated[
        str | None, typer.Option(help="MODEL: folder, file, run, hf:owner/name, timm:name; pane if not given.")
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="Other DATA to test on, or val or test; what the data has, if not given.")
    ] = None,
    shots: Annotated[str, typer.Option(help="Images of each class, for least squares.")] = "1,5,10,25",
    seeds: Annotated[int, typer.Option(min=1, help="How often shots and clusters are drawn.")] = 3,
    methods: Annotated[str, typer.Option(help="Some of these.")] = "least-squares,linear,knn,clusters",
    l2: Annotated[float, typer.Option(help="Regularisation of least squares.")] = 1024,
    neighbours: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Only print the images most similar to this one.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of them.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images; 0 reads in this one.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; a GPU where there is one, for auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or auto.")] = "fp32",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute features anew, and keep none.")] = False,
) -> None:
    """Few-shot accuracy of a model that is not trained any further, as the paper measures it, and more.

    Least squares learns from a few images of each class; the linear probe and the neighbours (knn) from all, and
    clusters from none. Features are computed once and kept; VITRAIL_CACHE says where.
    """
    from vitrail.errors import ConfigError
    from vitrail.evaluation import fewshot as workflow
    from vitrail.evaluation.neighbours import find_similar_images
    from vitrail.inference.batches import InferenceOptions
    from vitrail.system.precision import PRECISIONS
    from vitrail.weights.source import PANE

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: give the name of a file in a folder that is there")
    if precision not in (*PRECISIONS, "auto"):
        raise ConfigError(f"--precision {precision}: give one of {', '.join(PRECISIONS)} or auto")
    numbers = _numbers(shots)
    if model is None:
        model = PANE
        tell_of_pane("--model MODEL takes another")
    options = InferenceOptions(batch_size, workers, device, precision)
    cache: Any = None if no_cache else "auto"
    if neighbours is not None:
        with interruptible(KEPT), progress_bar("features") as progress:
            found = find_similar_images(model, data, neighbours, top, options=options, cache=cache, progress=progress)
        told = {"image": neighbours, "neighbours": [vars(near) for near in found]}
        if _told_as_json(told, out, as_json):
            return
        rows = [[near.name, near.label, f"{near.similarity:.4f}"] for near in found]
        print_table(f"Most similar to {neighbours}", ["name", "label", "similarity"], rows, left=2)
        return
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    with interruptible(KEPT), progress_bar("features") as progress:
        report = workflow.fewshot(
            model,
            data,
            test,
            shots=numbers,
            seeds=range(seeds),
            methods=chosen,
            l2=l2,
            options=options,
            cache=cache,
            progress=progress,
        )
    if _told_as_json(report.as_dict(), out, as_json):
        return
    rows = [
        [
            summary.method,
            "all" if summary.shots is None else str(summary.shots),
            f"{summary.accuracy:.1%}",
            "" if summary.deviation is None else f"± {summary.deviation:.1%}",
            *(f"{limit:.1%}" for limit in report.interval(summary)),
        ]
        for summary in report.summaries()
    ]
    print_table(f"{model} on {data}", ["method", "shots", "accuracy", "deviation", "95% from", "to"], rows)
    # Beside a table that a program reads, words are for the person.
    words = sys.stdout if sys.stdout.isatty() else sys.stderr
    for line in report.lines():
        print(line, file=words)


def _numbers(text: str) -> list[int]:
    """1,5,10,25 as numbers."""
    from vitrail.errors import ConfigError

    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--shots {text}: give whole numbers with commas between, such as 1,5,10,25") from None


def _told_as_json(content: dict[str, Any], out: Path | None, printed: bool) -> bool:
    """Into the file and onto the screen, where asked; whether it was printed."""
    import json

    from vitrail.errors import ConfigError

    text = json.dumps(content, indent=2)
    if out is not None:
        try:
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}") from None
    if printed:
        print(text)
    return printed
