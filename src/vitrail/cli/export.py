"""vitrail export: a model for other runtimes, executed and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.printing import interruptible, print_lines, print_table, tell_of_pane

if TYPE_CHECKING:
    from vitrail.exporting.check import Checked


def export(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] TARGET",
            help="A folder or file of weights, a run, hf:owner/name or timm:name, pane if not given; and the file to "
            "write: .onnx, .pt2 (torch, aoti) or .xml (openvino).",
        ),
    ],
    to: Annotated[str, typer.Option(help="onnx, onnx-int8, torch, aoti or openvino.")],
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Take images of any size; positions are interpolated in the graph.")
    ] = False,
    with_preprocessing: Annotated[
        bool,
        typer.Option("--with-preprocessing", help="Take decoded pixels of any size, give probabilities."),
    ] = False,
    images: Annotated[
        str | None,
        typer.Option(help="A folder of images, or a data set: compare on these, and calibrate int8 on them."),
    ] = None,
    size: Annotated[str | None, typer.Option(help="Resize the model first: 384, or 224x320.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Export a model to ONNX, int8, torch.export, AOTInductor or OpenVINO, with its labels and preprocessing.

    The export is executed beside the model before it is in its place: one that computes something else fails.
    """
    from vitrail.errors import ConfigError
    from vitrail.exporting.export import kind_of, run
    from vitrail.weights.source import PANE

    if len(words) > 2:
        raise ConfigError(f"{words[2]!r} is one word too many: vitrail export MODEL TARGET --to {to}")
    model, target = (PANE if len(words) == 1 else words[0]), Path(words[-1])
    if len(words) == 1:
        suffix, *_ = kind_of(to)
        if target.suffix != suffix:
            ours, theirs = target.with_suffix(suffix), f"{target} model{suffix}"
            raise ConfigError(
                f"{target} is no {suffix} file to write: `vitrail export {ours} --to {to}` exports {PANE}, "
                f"`vitrail export {theirs} --to {to}` the model {target}"
            )
        tell_of_pane("vitrail export MODEL TARGET takes another")
    with interruptible():
        checked = run(
            model,
            target,
            to,
            dynamic_size=dynamic_size,
            with_preprocessing=with_preprocessing,
            images=images,
            size=size,
        )
    if as_json:
        print(json.dumps({**checked.as_dict(), "written": str(target)}, indent=2, ensure_ascii=False))
        return
    print_table(f"{checked.kind}, beside its model", ("what", "model", "export"), _rows(checked))
    print_lines(f"note: {note}" for note in checked.notes)
    print_lines([f"compared on: {checked.images_from}", f"written: {target}"])


def _rows(checked: Checked) -> list[tuple[str, str, str]]:
    share = ", as a share of the image's largest" if checked.relative else ""
    if checked.agreement is None:
        same = ("least cosine similarity", "–", f"{checked.cosine:.4f}")
    else:
        same = ("same first guess", "–", f"{checked.agreement:.2%}")
    return [
        (f"largest difference of {checked.output}{share}", "–", f"{checked.max_difference:.2g}"),
        same,
        ("bytes", f"{checked.model_bytes:,}", f"{checked.export_bytes:,}"),
        ("milliseconds for one image", f"{checked.model_milliseconds:.2f}", f"{checked.export_milliseconds:.2f}"),
    ]
