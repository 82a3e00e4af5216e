"""vitrail models: names, sizes and costs."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which models, e.g. S/8 R50+B/16; all listed if none.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Side of the image in pixels.")] = 224,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Table of the models: parameters, GFLOPs and tokens at an image size.

    A GFLOP is 10⁹ multiplications or additions of one forward pass of one image (a multiply-accumulate is two, as in
    the paper). Any size can have any patch: Ti, S, b, B, L, H, g, G; hybrids end in /16 or /32. In the full table a
    model whose patches do not divide the size is shown at the next smaller one.
    """
    from vitrail.cli.printing import print_table
    from vitrail.model.catalogue import list_models

    entries = list_models(names or None, image_size=size)
    if as_json:
        print(json.dumps([entry._asdict() for entry in entries], indent=2))
        return
    rows = [
        [
            entry.name,
            f"{entry.parameters:,}",
            f"{entry.gflops:.1f}",
            "–" if entry.tokens is None else str(entry.tokens),
            str(entry.image_size),
        ]
        for entry in entries
    ]
    print_table("Models with 1,000 classes", ["name", "parameters", "GFLOPs", "tokens", "size"], rows)
