"""vitrail finetune: a model for a folder or a table of images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.completion import LabelsFromOption
from vitrail.cli.next_step import describe_next_step
from vitrail.cli.printing import announce_pane, interruptible, print_lines, stop_on_sigterm
from vitrail.cli.tasks import describe_task, describe_task_result
from vitrail.cli.train import describe_files, describe_report

if TYPE_CHECKING:
    from vitrail.workflows.finetune_result import FinetuneResult

MOST_CONFUSIONS = 3
"""Pairs of classes on the line about mistakes."""


@stop_on_sigterm()
def finetune(
    data: Annotated[
        str,
        typer.Option(help="A folder with one for each class, CSV, Parquet, shards, s3://bucket/folder, hf:owner/name."),
    ],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="MODEL to start from: folder, file, run, hf:owner/name, timm:name; pane if not given; or scratch.",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="labels, tags, numbers, levels or attributes; by default what the data tells.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Columns of a table to learn, such as colour,shape; by default they are found.")
    ] = None,
    labels_from: LabelsFromOption = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Time for everything; size and steps are chosen to fit. On a CPU 3 if not given."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Choose the learning rate on a held-out part, as the paper does.")
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="Only fit a head to the frozen features: seconds on a CPU; lists doubtful labels.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value …", help="Such as schedule.steps=500 run.folder=runs/mine.")
    ] = None,
) -> None:
    """Train a model for your own images, from one that has seen others.

    It learns what the data tells: one label an image, several tags, numbers, levels in an order, or several attributes.

    Resolution, steps, batch size and learning rate are chosen for the data and the time; you can set any of them:
    steps=500 batch_size=32 learning_rate=0.003 image_size=224 folder=runs/mine. The model goes to runs/DATA, and
    the same command resumes it.
    """
    from vitrail.system.event_display import EventDisplay
    from vitrail.weights.source import PANE
    from vitrail.workflows.finetune import finetune as run
    from vitrail.workflows.finetune_result import TaskResult

    settings, model = overrides or [], PANE if start is None else start
    with EventDisplay(plain_lines=True) as display:
        printer = _Printer(display, announces_pane=start is None)
        options: dict[str, Any] = {"minutes": minutes, "sweep": sweep}
        options |= {"task": task, "labels": labels, "labels_from": labels_from}
        with interruptible("the features computed so far are kept") if quick else nullcontext():
            result = run(data, model, quick=quick, settings=settings, on_event=printer, **options)
        report = printer.seen.get("report", {})
        next_step = describe_next_step(result.folder, data, model, options, settings)
        if isinstance(result, TaskResult):
            print_lines(describe_task_result(result, report, next_step))
        elif result.config is None:
            images = printer.seen["features"]["images"]
            print_lines(_describe_quick_result(result, images, report, next_step))
        else:
            print_lines(_describe_trained_result(result, report))


class _Printer:
    """A listener that prints a line for each event, after the display has shown it."""

    def __init__(self, display: Any, announces_pane: bool) -> None:
        self.display, self.announces_pane = display, announces_pane
        self.seen: dict[str, dict[str, Any]] = {}
        """The values of the last event of each kind."""

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        self.display(kind, values)
        self.seen[kind] = values
        starts_from_pane = kind == "features" or (kind == "choices" and self.seen["data"]["start"] is not None)
        if self.announces_pane and starts_from_pane:
            announce_pane("--from MODEL takes another, --from scratch none")
        print_lines(_describe_event(kind, values, self.seen))


def _describe_event(kind: str, values: dict[str, Any], seen: dict[str, dict[str, Any]]) -> Iterator[str]:
    if kind == "task":
        yield from describe_task(values)
    elif kind == "data" and values["start"] is None:
        yield "training from scratch, which needs many images; `--from MODEL` starts from a trained model"
    elif kind == "choices":
        yield _format_choices(values, seen["data"], seen.get("task"))
        if values["seconds"] is not None:
            yield _format_estimate(values)
    elif kind == "trial":
        accuracy = "" if values["accuracy"] is None else f"accuracy {values['accuracy']:.1%}, "
        outcome = values["failure"] or f"{accuracy}loss {values['loss']:.4f}"
        yield f"learning rate {values['rate']:.3g}: {outcome}"
    elif kind == "chosen":
        merit = f"loss {values['loss']:.4f}" if values["accuracy"] is None else f"{values['accuracy']:.1%}"
        yield f"chosen: {values['rate']:.3g}, with {merit} on the images that choose; now trained again"
    elif kind == "balance":
        yield values["why"]
    elif kind == "message":
        yield values["text"]
    elif kind == "features":
        classes = "" if values["classes"] is None else f" of {values['classes']} classes"
        yield (
            f"{values['images']:,} images{classes} at {_format_size(values['image_size'])} "
            f"pixels: {values['features']} features each, from {values['model']}"
        )
        if unreadable := values["all_images"] - values["images"]:
            counts = f"{unreadable:,} of {values['all_images']:,} images"
            yield f"left out, for they cannot be used: {counts}; `vitrail data check` names them"
    elif kind == "cross_validation" and values["accuracy"] is None:
        yield "every class has one image: how good it is cannot be told"
    elif kind == "cross_validation":
        yield f"accuracy on images that it was fitted without: {_format_accuracy(values)}"
    elif kind == "score" and values["problem"]:
        yield f"{values['split']} is not scored: {values['problem']}"
    elif kind == "score":
        yield f"{values['split']} accuracy: {_format_accuracy(values)}"


def _format_choices(values: dict[str, Any], data: dict[str, Any], task: dict[str, Any] | None) -> str:
    size = _format_size(values["image_size"]) if values["image_size"] else "its own size"
    length = f"{values['steps']} steps" if values["steps"] is not None else f"{values['epochs']:g} epochs"
    flip = "mirrored at random (data.augmentation.flip=0 where left and right matter)"
    what = (
        f"images of {data['classes']} classes"
        if task is None or task["kind"] == "labels"
        else f"images with {task['kind']}"
    )
    return (
        f"{data['images']:,} {what}, about {data['short_side']} pixels: training at "
        f"{size} for {length} of {values['batch_size']}, learning rate {values['learning_rate']:g}; crops "
        f"from {values['crop_area'][0]:.0%} of the area on, {flip if values['flip'] else 'not mirrored'}"
    )


def _format_estimate(values: dict[str, Any]) -> str:
    from vitrail.system.display import format_duration

    return (
        f"a step takes {values['step_seconds']:.2g} s here: everything will take about "
        f"{format_duration(values['seconds'])}, with a limit of {values['minutes']:g} min (--minutes changes it)"
    )


def _format_size(size: list[int]) -> str:
    from vitrail.config import show_size

    return show_size((size[0], size[1]))


def _format_accuracy(values: dict[str, Any]) -> str:
    share = values["accuracy"]
    interval = f"95% interval {share['low']:.1%} to {share['high']:.1%}"
    return f"{share['value']:.1%} of {values['images']:,} ({interval})"


def _describe_trained_result(result: FinetuneResult, report: dict[str, Any]) -> Iterator[str]:
    """Yield the accuracy, what is taken for what, the files and the next commands."""
    if result.accuracy is not None:
        share = {"accuracy": result.accuracy._asdict(), "images": result.evaluated}
        what = "were not trained on, but chose the weights" if result.flatters else "neither trained nor chose anything"
        yield f"accuracy on images that {what}: {_format_accuracy(share)}"
    yield from _describe_classes(result)
    yield from describe_files(result, report)


def _describe_classes(result: FinetuneResult) -> Iterator[str]:
    """Yield lines with the balanced accuracy, the hardest class, and the most frequent mistakes."""
    balanced, accuracy = result.balanced_accuracy, result.accuracy
    if balanced is not None and accuracy is not None and f"{balanced.value:.1%}" != f"{accuracy.value:.1%}":
        interval = f"95% interval {balanced.low:.1%} to {balanced.high:.1%}"
        yield f"balanced accuracy, where rare classes count as much as common ones: {balanced.value:.1%} ({interval})"
    worst = None if result.judged is None else result.judged.worst_class
    if worst is not None and worst.hits < worst.images:
        yield f"hardest class: {worst.name}, {worst.hits:,} of its {worst.images:,} images found"
    confusions = () if result.judged is None else result.judged.confusions[:MOST_CONFUSIONS]
    if confusions:
        each = ", ".join(f"{label} for {guess} ({count:,})" for label, guess, count in confusions)
        yield f"taken for another, most often: {each}"


def _describe_quick_result(
    result: FinetuneResult, images: int, report: dict[str, Any], next_step: str
) -> Iterator[str]:
    """Yield the mistakes, a line for each of the most doubtful labels, the files and the line about the next step."""
    from vitrail.workflows.finetune_result import MISLABELLED_FILE, MOST_LISTED

    yield from _describe_classes(result)
    for name, label, thinks, probability in result.suspects[:MOST_LISTED]:
        yield f"perhaps mislabelled: {name} is labelled {label}, looks like {thinks} ({probability:.0%} sure)"
    if result.suspects:
        path = result.folder / MISLABELLED_FILE
        yield f"perhaps mislabelled, in all: {len(result.suspects):,} of {images:,} images, see {path}"
        if result.has_weak_suspects and result.accuracy is not None:
            right = f"{result.accuracy.value:.0%} right"
            yield f"with {right}, most of these will be its own mistakes: a better model doubts fewer"
    else:
        yield "no image seems to be mislabelled"
    yield from describe_report(report)
    yield f"model: {result.weights}"
    yield next_step
