"""Small grey images whose tags can be seen, a model that sees them partly, and reports made on several ranks.

python tagged.py MODEL OUT.json BATCH writes the report of `score_task`; torchrun's variables say which rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import vitrail
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.list_source import ListSource
from vitrail.tasks.tags import Tags

NAMES = ("bright", "rare", "striped")
SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32}


def tagged_source(count: int = 60, broken: tuple[int, ...] = ()) -> AnnotatedSource:
    """Images of 16 pixels; row k of `broken` has a tag that does not exist."""
    rng = np.random.default_rng(0)
    rows, images = [], []
    for index in range(count):
        has = rng.random(3) < (0.5, 0.15, 0.4)
        pixels = rng.integers(0, 60, (16, 16)) + 120 * has[0]
        pixels[::2] += 70 * has[2]
        pixels[:4, :4] = 255 * has[1]
        tags = "|".join(name for name, it in zip(NAMES, has, strict=True) if it)
        rows.append({"tags": "brihgt" if index in broken else tags})
        images.append((pixels.astype(np.uint8), 0))
    places = [f"labels.csv, line {index + 2}" for index in range(count)]
    return AnnotatedSource(ListSource(images), Tags(names=NAMES, column="tags"), rows, places)


def tag_model(thresholds: tuple[float, ...] = ()) -> vitrail.VisionTransformer:
    """A model with random weights and a head for the tags."""
    model = vitrail.create_model("Ti/4", in_channels=1, num_classes=0, seed=0, **SMALL)
    model.give_task(Tags(names=NAMES, column="tags", thresholds=thresholds))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


if __name__ == "__main__":
    found = vitrail.evaluate(
        sys.argv[1],
        tagged_source(broken=(3, 40)),
        batch_size=int(sys.argv[3]),
        device="cpu",
        folder=Path(sys.argv[2]).with_suffix(""),
    )
    Path(sys.argv[2]).write_text(json.dumps(found.to_dict()))
