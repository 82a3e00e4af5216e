"""The words that a shell offers for arguments and options. Nothing heavy is imported: a shell waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer


def offer(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that gives the words which begin with what a person has typed."""
    offered = tuple(words)

    def complete(incomplete: str) -> list[str]:
        return [word for word in offered if word.startswith(incomplete)]

    return complete


complete_which = offer(["last", "best"])
complete_format = offer(["native", "meta", "timm", "torchvision", "huggingface", "google", "openclip"])
complete_kind = offer(["onnx", "onnx-int8", "torch", "aoti", "openvino"])
complete_precision = offer(["fp32", "bf16", "fp16", "fp8", "int8", "auto"])
complete_device = offer(["auto", "cpu", "cuda", "mps"])
complete_task = offer(["labels", "tags", "numbers", "levels", "attributes"])

WhichOption = Annotated[
    str, typer.Option(autocompletion=complete_which, help="Of a run: its last or its best weights.")
]
"""The option of every verb that takes MODEL."""
LabelsFromOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Of a folder of images: where in their names the class stands: 'NAME_*' for cat_1.jpg, or a regular "
        r"expression with one group, '^(.+)_\d+'.",
    ),
]
"""The option of every verb that takes DATA."""
TaskOption = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete_task,
        metavar="KIND",
        help="What is learned of a table: labels, tags, numbers, levels or attributes; recognised if not given.",
    ),
]
LabelsOption = Annotated[
    str | None,
    typer.Option(metavar="COLUMNS", help="The columns of a table to learn, such as colour,shape; found if not given."),
]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the names of recipes that begin with what a person has typed; files are offered by the shell."""
    from vitrail.recipes import RECIPES

    return offer(RECIPES)(incomplete)


def complete_study(incomplete: str) -> list[str]:
    """Return the names of studies that begin with what a person has typed, and "all"."""
    from vitrail.studies.catalogue import NAMES

    return offer([*NAMES, "all"])(incomplete)
