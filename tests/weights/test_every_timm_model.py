"""Every model in timm's registry: those of these families are understood as timm builds them, all others refused."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch

from peers import timm
from vitrail.errors import WeightsError
from vitrail.model.create import build_empty_model
from vitrail.weights.files import TensorInfo
from vitrail.weights.formats.base import FolderFiles
from vitrail.weights.load import FORMATS, recognise_format
from vitrail.weights.tensor_rules import check_complete, compute_file_shapes, match_tensors

GELUS = {"GELU": "exact", "GELUTanh": "tanh", "QuickGELU": "quick"}
BLOCKS = ("Block", "LayerScaleBlock", "ResPostBlock", "EvaBlock", "EvaBlockPostNorm")
POOLS = {"token": "class", "avg": "average", "map": "attention"}
FOREIGN = (
    *("resnetv2_", "18x2", "_xp_", "resnet26d", "resnet50d", "_dlittle", "_dwee", "_dpwee", "_pwee", "_mci_"),
    *("sapiens2", "vitamin"),
)
"""Parts of the names of Vision Transformers and ResNets that have something these models do not: other blocks, other
stems, batch norm, keys that heads share. docs/timm.md has the reason for each name."""


def read(name: str, model: torch.nn.Module):
    """What we make of a model's tensors and config, as if they had come from the hub."""
    tensors = {key: TensorInfo(tuple(t.shape), torch.float32) for key, t in model.state_dict().items()}
    pretrained = {key: value for key, value in model.pretrained_cfg.items() if value is not None}
    config = {"architecture": name, "pretrained_cfg": pretrained, "global_pool": getattr(model, "global_pool", None)}
    weight_format = recognise_format(name, tensors)
    checkpoint = weight_format.describe_checkpoint(tensors, FolderFiles(contents={"config.json": config}))
    ours = build_empty_model(checkpoint.architecture).state_dict()
    pairs = match_tensors(ours, weight_format.list_tensor_rules(checkpoint.architecture, checkpoint.dialect))
    check_complete(
        name, tensors, compute_file_shapes(pairs, ours), [*checkpoint.unused_tensors, *checkpoint.ignored_tensors]
    )
    assert weight_format is FORMATS["timm"]
    return checkpoint.architecture


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_timm_model():
    understood, refused = Counter(), {}
    family = timm.models.VisionTransformer | timm.models.ResNetV2 | timm.models.Eva | timm.models.Beit
    for name in timm.list_models():
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = timm.create_model(name)
            except (RuntimeError, NotImplementedError):
                assert not name.startswith(("vit_", "deit", "resnetv2_"))  # some others cannot be built empty
                continue
        try:
            found = read(name, model)
        except WeightsError as error:
            if isinstance(model, family):
                refused[name] = str(error)
            continue
        assert isinstance(model, family), f"{name} is a {type(model).__name__} of timm's, taken for one of ours"
        if hasattr(model, "blocks"):
            block, pool = model.blocks[0], POOLS[model.global_pool]
            assert type(block).__name__ in BLOCKS, name
            gelu = found.gelu if found.mlp == "swiglu" else GELUS[type(block.mlp.act).__name__]
            told = (block.attn.num_heads, block.norm1.eps, gelu)
            assert told == (found.num_heads, found.norm_eps, found.gelu), name
            assert found.pool == ("distilled" if hasattr(model, "head_dist") else pool), name
            assert found.norm_after_pool == (not isinstance(model.fc_norm, torch.nn.Identity)), name
            assert tuple(s // found.stride for s in found.image_size) == model.patch_embed.grid_size, name
        understood[type(model).__name__] += 1
    print(f"\nunderstood {dict(understood)}; of these families refused {len(refused)}:", *refused.items(), sep="\n")
    assert sum(understood.values()) >= 246
    assert understood["ResNetV2"] >= 6
    assert [name for name in refused if not any(part in name for part in FOREIGN)] == []
