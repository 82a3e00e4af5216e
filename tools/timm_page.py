"""Write docs/timm.md: every name of five files of timm's, and whether it loads into a model of ours.

    python tools/timm_page.py            write the page (a minute)
    python tools/timm_page.py --check    fail if the page is not up to date

Each model is built without memory, with the config.json that timm would write beside its weights. It loads if vitrail
describes a model whose tensors have the names and shapes of timm's. The page is written by hand up to `MARKER`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import ConfigError, WeightsError
from vitrail.model.architecture import Architecture
from vitrail.model.create import build_empty_model
from vitrail.model.timm_model import import_timm
from vitrail.weights.files import TensorInfo
from vitrail.weights.formats.base import FolderFiles
from vitrail.weights.load import FORMATS
from vitrail.weights.tensor_rules import check_complete, compute_file_shapes, match_tensors

PAGE = Path(__file__).parents[1] / "docs" / "timm.md"
MARKER = "<!-- The tables below are written by tools/timm_page.py. -->\n"
FILES = ("vision_transformer", "vision_transformer_hybrid", "deit", "beit", "eva")
COLUMNS = ("name", "loads")


def list_names(file: str) -> list[str]:
    """Return the names of the models of one of timm's files."""
    names: list[str] = import_timm("the survey").list_models(module=file)
    return names


def build_network(name: str) -> Any:
    """Let timm build a model without memory or values."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_timm("the survey").create_model(name)


def make_config(name: str, network: Any) -> dict[str, Any]:
    """Return the config.json that timm writes beside the weights of a network."""
    pretrained = {key: value for key, value in network.pretrained_cfg.items() if value is not None}
    return {"architecture": name, "global_pool": network.global_pool, "pretrained_cfg": pretrained}


def describe_network(network: Any, config: dict[str, Any]) -> Architecture:
    """Return the architecture that vitrail sees; raise a WeightsError if its tensors are not timm's."""
    tensors = {key: TensorInfo(tuple(t.shape), torch.float32) for key, t in network.state_dict().items()}
    weight_format, name = FORMATS["timm"], str(config["architecture"])
    if not weight_format.recognises(tensors):
        raise WeightsError("its blocks have none of the layers that vitrail knows")
    checkpoint = weight_format.describe_checkpoint(tensors, FolderFiles(contents={"config.json": config}))
    ours = build_empty_model(checkpoint.architecture).state_dict()
    matches = match_tensors(ours, weight_format.list_tensor_rules(checkpoint.architecture, checkpoint.dialect))
    others = [*checkpoint.unused_tensors, *checkpoint.ignored_tensors]
    check_complete(name, tensors, compute_file_shapes(matches, ours), others)
    return checkpoint.architecture


def explain_name(name: str) -> str | None:
    """Return why a model does not load, or None if it does."""
    network = build_network(name)
    try:
        describe_network(network, make_config(name, network))
    except (WeightsError, ConfigError) as error:
        return str(error)
    return None


def write_tables() -> str:
    """Return the summary and a table for each file, as Markdown."""
    reasons = {file: {name: explain_name(name) for name in list_names(file)} for file in FILES}
    every = [reason for names in reasons.values() for reason in names.values()]
    version = import_timm("the survey").__version__
    summary = f"**{every.count(None)} of {len(every)} names load** (timm {version}).\n"
    return "\n".join([summary, *(f"## {file}\n\n{write_table(names)}" for file, names in reasons.items())])


def write_table(names: dict[str, str | None]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{name}`", f"no: {r}" if r else "yes") for name, r in names.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_page(text: str) -> str:
    """Return the page with its introduction as it is and its tables written anew."""
    introduction, marker, _ = text.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE.name} has no line {MARKER.strip()!r}")
    return f"{introduction}{MARKER}\n{write_tables()}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = write_page(text)
    if "--check" in sys.argv[1:]:
        sys.exit("docs/timm.md is not up to date: run python tools/timm_page.py" if page != text else 0)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
