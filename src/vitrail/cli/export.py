"""vitrail export: a model for other runtimes, executed and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.completion import WhichOption, complete_kind
from vitrail.cli.printing import announce_pane, interruptible, print_lines, print_table
from vitrail.system.commands import quote_word
from vitrail.system.event_display import EventDisplay

if TYPE_CHECKING:
    from vitrail.exporting.result import ExportResult


def export(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] TARGET",
            help="A folder or file of weights, a run, hf:owner/name or timm:name, pane if not given; and the file to "
            "write: .onnx, .pt2 (torch, aoti) or .xml (openvino).",
        ),
    ],
    to: Annotated[str, typer.Option(autocompletion=complete_kind, help="onnx, onnx-int8, torch, aoti or openvino.")],
    which: WhichOption = "last",
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

    The export is executed and compared with the model before it is written; if it differs, the command fails.
    """
    from vitrail.errors import ConfigError
    from vitrail.exporting.export import export as export_model
    from vitrail.exporting.export import find_kind
    from vitrail.weights.source import PANE, choose_weights

    if len(words) > 2:
        raise ConfigError(f"{words[2]!r} is one word too many: vitrail export MODEL TARGET --to {to}")
    model, target = (PANE if len(words) == 1 else words[0]), Path(words[-1])
    if len(words) == 1:
        suffix, *_ = find_kind(to)
        if target.suffix != suffix:
            with_suffix = quote_word(str(target.with_suffix(suffix)))
            as_model = f"{quote_word(str(target))} model{suffix}"
            raise ConfigError(
                f"{target} is no {suffix} file to write: `vitrail export {with_suffix} --to {to}` exports {PANE}, "
                f"`vitrail export {as_model} --to {to}` the model {target}"
            )
        announce_pane("vitrail export MODEL TARGET takes another")
    with interruptible(), EventDisplay(plain_lines=True) as display:
        result = export_model(
            choose_weights(model, which),
            target,
            to,
            dynamic_size=dynamic_size,
            with_preprocessing=with_preprocessing,
            images=images,
            size=size,
            on_event=display,
        )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
        return
    print_table(f"{result.kind}, beside its model", ("what", "model", "export"), _make_rows(result))
    print_lines(f"note: {note}" for note in result.notes)
    print_lines([f"compared on: {result.images_from}", f"written: {target}"])


def _make_rows(result: ExportResult) -> list[tuple[str, str, str]]:
    remark = f", as a share of {result.relative_to}" if result.relative else ""
    if result.agreement is None:
        agreement = ("least cosine similarity", "–", f"{result.cosine:.4f}")
    else:
        agreement = (result.agreement_name, "–", f"{result.agreement:.2%}")
    return [
        (f"largest difference of {result.output}{remark}", "–", f"{result.max_difference:.2g}"),
        agreement,
        ("bytes", f"{result.model_bytes:,}", f"{result.export_bytes:,}"),
        ("milliseconds for one image", f"{result.model_milliseconds:.2f}", f"{result.export_milliseconds:.2f}"),
    ]
