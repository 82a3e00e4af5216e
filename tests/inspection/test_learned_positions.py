"""What a table of positions learns from real images, and does not know before: which patches touch."""

from __future__ import annotations

import pytest
import runs

import vitrail
from vitrail.inspection import neighbour_test, position_similarity
from vitrail.training.run_training import run_training


@pytest.mark.slow
def test_training_on_real_images_makes_neighbours_alike(tmp_path):
    """Handwritten digits on 8×8 patches; docs/inspection.md tells the same of Tiny-ImageNet."""
    config = runs.config(
        tmp_path / "run",
        model={"name": "Ti/2", "dropout": 0.0, "stochastic_depth": 0.0},
        data={"batch_size": 64},
        schedule={"steps": 100, "warmup_steps": 10},
        run={"evaluate_every": 1000, "checkpoint_every": 1000, "threads": 1},
    )
    run_training(config)
    trained = vitrail.load(tmp_path / "run")
    assert trained.architecture.position == "learned-1d"
    found = neighbour_test(position_similarity(trained))
    assert found.p_value < 0.01
    assert found.near > found.far + 0.1
    options = {"width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "in_channels": 1, "image_size": 16}
    fresh = [vitrail.create_model("Ti/2", **options, seed=seed) for seed in range(20)]
    values = [neighbour_test(position_similarity(model), permutations=2999).p_value for model in fresh]
    assert min(values) > 0.01 / len(values), "as chance would have it"
    assert sum(value < 0.05 for value in values) <= 4
