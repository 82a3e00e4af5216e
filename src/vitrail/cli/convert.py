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

    The result is loaded back and run beside the source; what was measured stands in its model card.
    """
    from vitrail.weights.convert import check_destination
    from vitrail.weights.convert import convert as run
    from vitrail.weights.convert import push as upload

    if push is not None:
        check_destination(push)
    told = {"num_heads": num_heads, "gelu": gelu}
    certificate = run(model, target, to, **{name: value for name, value in told.items() if value is not None})
    for note in certificate.notes:
        print(f"note: {note}")
    relative = f"{certificate.relative_difference:.3g} of an output's deviation"
    print(f"largest difference: {certificate.max_difference:.3g} ({relative})")
    print("preprocessing: " + (certificate.preprocessing_note or "matches"))
    print(f"written: {target} (its README.md says how to load it)")
    if push is not None:
        print(f"uploaded: {upload(target, push)}")
