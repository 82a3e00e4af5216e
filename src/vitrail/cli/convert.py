"""vitrail convert: a model from one format to another, verified."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vitrail.cli.completion import WhichOption, complete_format


def convert(
    model: Annotated[
        str, typer.Argument(help="A folder or file of weights, hf:owner/name[@revision], timm:name or pane.")
    ],
    target: Annotated[str, typer.Argument(help="A new folder.")],
    to: Annotated[
        str,
        typer.Option(
            autocompletion=complete_format, help="native, timm, torchvision, huggingface, google, openclip or meta."
        ),
    ],
    which: WhichOption = "last",
    num_heads: Annotated[int | None, typer.Option(help="Attention heads, where the file does not say.")] = None,
    gelu: Annotated[str | None, typer.Option(help="tanh, exact or quick, where the file does not say.")] = None,
    known: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another fact that the file does not say, such as grid=12x42."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="The part of a larger file that is the model, such as encoder.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="Then upload the folder to hf:owner/name.")] = None,
) -> None:
    """Convert weights from one library's format to another's.

    The result is loaded back and compared with the source; the measured differences stand in its model card.
    """
    from vitrail.weights.convert import convert as convert_weights
    from vitrail.weights.known import parse_known

    options: dict[str, Any] = {
        "which": which,
        "num_heads": num_heads,
        "gelu": gelu,
        "known": parse_known(known or ()),
        "part": part,
    }
    result = convert_weights(model, target, to, **options, push=push, on_event=_print_conversion)
    if result.url is not None:
        print(f"uploaded: {result.url}")


def _print_conversion(kind: str, values: dict[str, Any]) -> None:
    """Print what a conversion measured, before its upload."""
    if kind != "converted":
        return
    for note in values["notes"]:
        print(f"note: {note}")
    relative = f"{values['relative_difference']:.3g} of an output's deviation"
    print(f"largest difference: {values['max_difference']:.3g} ({relative})")
    print("preprocessing: " + (values["preprocessing_note"] or "matches"))
    print(f"written: {values['folder']} (its README.md says how to load it)")
