"""Whether a trained model's position embeddings know which patches touch, and those of fresh ones do not.

    python benchmarks/position_neighbours.py MODEL [--fresh 20] > benchmarks/results/position_neighbours.json

4-neighbours against all other pairs, cosine similarity, 9,999 permutations of the patches' places.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch

import vitrail
from vitrail.inspection import neighbour_test, position_similarity
from vitrail.model.create import build_empty_model
from vitrail.model.initialise import initialise


def tested(model: torch.nn.Module) -> dict[str, float]:
    found = neighbour_test(position_similarity(model))
    assert found is not None
    return dataclasses.asdict(found)


def fresh(like: vitrail.VisionTransformer, seed: int) -> vitrail.VisionTransformer:
    torch.manual_seed(seed)
    model = build_empty_model(like.architecture).to_empty(device="cpu")
    initialise(model)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--fresh", type=int, default=20)
    given = parser.parse_args()
    trained = vitrail.load(given.model)
    cost = trained.training_cost
    print(
        json.dumps(
            {
                "architecture": json.loads(trained.architecture.model_dump_json(exclude_defaults=True)),
                "training": None if cost is None else json.loads(cost.model_dump_json()),
                "trained": tested(trained),
                "fresh": [{"seed": seed, **tested(fresh(trained, seed))} for seed in range(given.fresh)],
            },
            indent=1,
        )
    )
