"""vitrail convert: a model from one format to another, verified."""

from __future__ import annotations

from typing import Annotated

import typer


def convert(
    model: Annotated[str, typer.Argument(help="A folder or file of weights, hf:owner/name[@revision] or timm:name.")],
    target: Annotated[str, typer.Argument(help="A new folder.")],
    to: Annotated[str, typer.Option(help="native, timm, torchvision, huggingface or google.")],
    push: Annotated[str | None, typer.Option(help="Then upload the folder to hf:owner/name.")] = None,
) -> None:
    """Convert weights from one library's format to another's.

    The result is loaded back and run beside the source; what was measured stands in its model card.
    """
    from vitrail.weights.convert import convert as run
    from vitrail.weights.convert import push as upload

    certificate = run(model, target, to)
    for note in certificate.notes:
        print(f"note: {note}")
    agreement = "matches" if certificate.preprocessing_matches else f"differs in {certificate.preprocessing_note}"
    print(
        f"largest difference: {certificate.max_difference:.3g} ({certificate.relative:.3g} of the outputs' deviation)"
    )
    print(f"preprocessing: {agreement}")
    print(f"written: {target} (its README.md says how to load it)")
    if push is not None:
        print(f"uploaded: {upload(target, push)}")
