"""vitrail fewshot: what a frozen model is worth on a data set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.printing import announce_pane, check_out_file, interruptible, print_table, progress_bar

if TYPE_CHECKING:
    from vitrail.evaluation.fewshot import FewshotReport

INTERRUPTED = "the features computed so far are kept, and the same command goes on from there"


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
    clusters from none. Features are computed once and cached; VITRAIL_CACHE says where.
    """
    from vitrail.errors import ConfigError
    from vitrail.evaluation.fewshot import fewshot as measure_fewshot
    from vitrail.evaluation.neighbours import find_similar_images
    from vitrail.inference.batches import InferenceOptions
    from vitrail.system.precision import PRECISIONS
    from vitrail.weights.source import PANE

    check_out_file(out)
    if precision not in (*PRECISIONS, "auto"):
        raise ConfigError(f"--precision {precision}: give one of {', '.join(PRECISIONS)} or auto")
    shot_counts = _parse_shots(shots)
    if model is None:
        model = PANE
        announce_pane("--model MODEL takes another")
    options = InferenceOptions(batch_size, workers, device, precision)
    cache: Any = None if no_cache else "auto"
    if neighbours is not None:
        with interruptible(INTERRUPTED), progress_bar("features") as progress:
            similar = find_similar_images(model, data, neighbours, top, options=options, cache=cache, progress=progress)
        content = {"image": neighbours, "neighbours": [vars(image) for image in similar]}
        if _write_json(content, out, as_json):
            return
        rows = [[image.name, image.label, f"{image.similarity:.4f}"] for image in similar]
        print_table(f"Most similar to {neighbours}", ["name", "label", "similarity"], rows, left=2)
        return
    with interruptible(INTERRUPTED), progress_bar("features") as progress:
        report = measure_fewshot(
            model,
            data,
            test,
            shots=shot_counts,
            seeds=range(seeds),
            methods=[name.strip() for name in methods.split(",") if name.strip()],
            l2=l2,
            options=options,
            cache=cache,
            progress=progress,
        )
    if not _write_json(report.as_dict(), out, as_json):
        _print_report(report, f"{model} on {data}")


def _print_report(report: FewshotReport, title: str) -> None:
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
    print_table(title, ["method", "shots", "accuracy", "deviation", "95% from", "to"], rows)
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


def _write_json(content: dict[str, Any], out: Path | None, as_json: bool) -> bool:
    """Write the content to `out`, if given, and print it if `as_json`. Return `as_json`."""
    import json

    from vitrail.errors import ConfigError

    text = json.dumps(content, indent=2)
    if out is not None:
        try:
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}") from None
    if as_json:
        print(text)
    return as_json
