"""What sharding would compute too coarsely is refused."""

from __future__ import annotations

import pytest
import torch

import vitrail
from vitrail.training.distributed import check_shardable


def make_model(learned):
    rotary = {"coordinates": "index", "layout": "pairs", "learned": learned}
    return vitrail.create_model("Ti/16", image_size=32, width=32, depth=1, num_heads=2, mlp_dim=32, rotary=rotary)


def test_learned_rotary_positions_are_not_rounded():
    with pytest.raises(vitrail.ConfigError, match=r"run.parallel=ddp or run.precision=fp32"):
        check_shardable(make_model(learned=True), torch.bfloat16)
    check_shardable(make_model(learned=True), torch.float32)
    check_shardable(make_model(learned=False), torch.bfloat16)
