"""vitrail convert: a model from one format to another, verified."""

from __future__ import annotations

from typing import Annotated

import typer


def convert(
    model: Annotated[
        str, typer.Argument(help="A folder or file of weights, hf:owner/name[@revision], timm:name or pane.")
    ],
    target: Annotated[str, typer.Argument(help="A new folder.")],
    to: Annotated[str, typer.Option(help="native, timm, torchvision, huggingface or google.")],
    num_heads: Annotated[int | None, typer.Option(help="Attention heads, where the file does not say.")] = None,
    gelu: Annotated[str | None, typer.Option(help="tanh, exact or quick, where the file does not say.")] = None,
    push: Annotated[str | None, typer.Option(help="Then upload the folder to hf:owner/name.")] = None,
) -> None:
    """Convert weights from one library's format to another's.

    The result is loaded back and compared with the source; the measured differences stand in its model card.
    """
    from vitrail.weights.convert import convert as convert_weights
    from vitrail.weights.convert import parse_destination, push_to_hub

    if push is not None:
        parse_destination(push)  # before the work
    architecture = {"num_heads": num_heads, "gelu": gelu}
    given = {name: value for name, value in architecture.items() if value is not None}
    certificate = convert_weights(model, target, to, **given)
    for note in certificate.notes:
        print(f"note: {note}")
    relative = f"{certificate.relative_difference:.3g} of an output's deviation"
    print(f"largest difference: {certificate.max_difference:.3g} ({relative})")
    print("preprocessing: " + (certificate.preprocessing_note or "matches"))
    print(f"written: {target} (its README.md says how to load it)")
    if push is not None:
        print(f"uploaded: {push_to_hub(target, push)}")
