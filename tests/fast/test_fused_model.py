"""Whole models by fused kernels, in Triton's interpreter: representations in bf16, gradients against float64."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import vitrail
from vitrail.errors import InputError, NotApplicableError
from vitrail.fast.timing import relative_distance

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
if torch.cuda.is_available():
    pytest.skip("here is a GPU: benchmarks/kernel_check.py checks the kernels there", allow_module_level=True)

from vitrail.fast.gpu import fused_block, fused_embedder, fused_layers, merged_block
from vitrail.fast.gpu.fused_embedder import FusedEmbedder, check_fusible
from vitrail.fast.gpu.fused_layers import FusedAttention, FusedHead, FusedLinear
from vitrail.fast.gpu.kernels.norm import NormedTokens
from vitrail.fast.gpu.kernels.product import Tiling, name_tilings
from vitrail.fast.gpu.merged_block import NORM_TILINGS, RESIDUAL_TILINGS, BlockTilings
from vitrail.fast.gpu.training import FusedTraining, check_trainable

SMALL = {"image_size": 8, "width": 32, "depth": 3, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}
STEM = [[8, 3, 2], [16, 3, 2]]


def slow(options):
    return pytest.param(options, marks=pytest.mark.slow)


def small(**options):
    model = vitrail.create_model("Ti/4", **{**SMALL, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases, norms and heads begin at 0 or 1: stirred
            if parameter.ndim == 1 or "head" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"pool": "average"}),
        slow({"gelu": "exact", "registers": 2, "pool": "class+average"}),
        {"layer_scale": 0.1, "pool": "distilled", "registers": 1},
        slow({"norm": "rms", "gelu": "quick"}),
        {"depth": 1},
        slow({"conv_stem": STEM, "norm_after_pool": True, "pool": "average"}),
        slow({"conv_stem": STEM}),
        slow({"norm_after_pool": True}),
    ],
    ids=str,
)
def test_representations(options):
    model = small(**options).eval()
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        assert relative_distance(FusedEmbedder(model)(images), model.embed(images)) < 1.5e-2


@pytest.mark.parametrize("options", [slow({}), {"layer_scale": 0.5}, slow({"pool": "average", "norm": "rms"})], ids=str)
@pytest.mark.parametrize(("wanted", "least"), [("1, 1, 2)", 4), ("few rows", 3), ("ours", 2)])
def test_every_way_computes_the_same(options, wanted, least, monkeypatch):
    """Sums that are split, with or without a layer scale; the kernel for a few rows; attention: of a whole model."""
    taken = []

    def choose(key, ways, *inputs, cold_cache=False):
        found = next((name for name in ways if name.startswith(wanted) or name.endswith(wanted)), None)
        taken.extend([found] if found else [])
        return ways[found or next(iter(ways))]

    for module in (fused_embedder, fused_layers):
        monkeypatch.setattr(module, "choose_fastest", choose)
    monkeypatch.setattr(fused_embedder, "find_fastest", lambda key, ways, *inputs: next(iter(ways)))
    for module in (fused_block, fused_embedder, fused_layers):
        monkeypatch.setattr(module, "HALF", torch.float16)  # the interpreter cuts bf16 off instead of rounding it
    monkeypatch.setattr(
        fused_layers, "NARROW", name_tilings(Tiling(16, 16, 16, 4, 2), Tiling(16, 16, 16, 4, 16, splits=2))
    )
    model, images = small(**options).eval(), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        found = FusedEmbedder(model)(images)
        assert relative_distance(found, model.embed(images)) < 5e-3
    assert len(taken) >= least


def joined_alone(monkeypatch):
    """Of passes the joined one is chosen, and of all else the first; what was to be chosen is noted."""
    noted = []

    def choose(key, ways, *inputs, cold_cache=False):
        noted.append(key[0])
        return ways.get("joined") or ways[next(iter(ways))]

    joining, norming = (Tiling(16, 16, 16, 4, 2),), (Tiling(16, 32, 16, 4, 2),)
    small = {"fc2": joining, "fc1": norming, "qkv": norming, "out": joining}
    for module in (fused_embedder, fused_layers):
        monkeypatch.setattr(module, "choose_fastest", choose)
    monkeypatch.setattr(fused_embedder, "find_fastest", lambda key, ways, *inputs: next(iter(ways)))
    for module in (fused_block, fused_embedder, fused_layers):
        monkeypatch.setattr(module, "HALF", torch.float16)  # the interpreter cuts bf16 off instead of rounding it
    monkeypatch.setattr(fused_embedder, "TILING_CANDIDATES", small)
    return noted


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"depth": 2, "width": 40, "pool": "distilled", "registers": 1}),
        slow({"depth": 1, "pool": "average"}),
        slow({"depth": 2, "pool": "class+average", "gelu": "exact"}),
        slow({"layer_scale": 0.5}),
        slow({"norm": "rms"}),
        {"norm": "rms", "pool": "average", "layer_scale": 0.1, "gelu": "quick"},
        slow({"conv_stem": STEM, "norm_after_pool": True}),
    ],
    ids=str,
)
def test_sums_and_norms_inside_the_products_compute_the_same(options, monkeypatch):
    noted = joined_alone(monkeypatch)
    torch.manual_seed(0)
    model, images = small(**options).eval(), torch.randn(3, 3, 8, 8)
    embedder = FusedEmbedder(model, tries_merging=True)
    with torch.no_grad():
        exact = model.embed(images)
    found = embedder(images)
    assert noted.count("pass") == 1
    assert embedder.merged_blocks is not None
    assert len(embedder.merged_blocks) == len(embedder.blocks)
    assert relative_distance(found, exact) < 5e-3
    embedder.passes = dict.fromkeys(embedder.passes, embedder.run_separate)
    assert relative_distance(found, exact) < 2 * relative_distance(embedder(images), exact)


def test_one_block_for_the_class_token_has_nothing_to_join(monkeypatch):
    noted = joined_alone(monkeypatch)
    FusedEmbedder(small(depth=1), tries_merging=True)(torch.randn(1, 3, 8, 8))
    assert "pass" not in noted


@pytest.mark.parametrize("why", ["rows that the copy engine cannot take", "many tokens", "FP8", "not for least time"])
def test_what_cannot_be_joined_is_not_tried(why, monkeypatch):
    noted = joined_alone(monkeypatch)
    monkeypatch.setattr(fused_embedder, "MOST_ROWS", 8 if why == "many tokens" else 64)
    model = small(**({"mlp_dim": 60} if why.startswith("rows") else {}))
    embedder = FusedEmbedder(model, fp8=why == "FP8", tries_merging=why != "not for least time")
    normed = NormedTokens(torch.zeros(15, 32), torch.zeros(15, 32), None, None)
    assert embedder._choose_pass(normed) == embedder.run_separate
    assert "pass" not in noted


@pytest.mark.slow
def test_weights_of_a_pass_that_was_not_chosen_are_let_go(monkeypatch):
    def choose(key, ways, *inputs, cold_cache=False):
        for name in ways if key[0] == "pass" else ():
            ways[name](*inputs)
        return ways[next(iter(ways))]

    joined_alone(monkeypatch)
    for module in (fused_embedder, fused_layers):
        monkeypatch.setattr(module, "choose_fastest", choose)
    embedder = FusedEmbedder(small(), tries_merging=True)
    embedder(torch.randn(1, 3, 8, 8))
    assert embedder.merged_blocks is None
    embedder.passes[1024] = partial(embedder.run_merged, tilings=BlockTilings())  # which another number of images takes
    embedder(torch.randn(4, 3, 8, 8))
    assert embedder.merged_blocks is not None


def test_products_are_cut_up_as_is_fastest_in_the_pass_one_after_the_other(monkeypatch):
    tried = {}

    def fastest(key, ways, *inputs):
        tried[key[-1]] = [way.keywords["tilings"] for way in ways.values()]
        return list(ways)[-1]

    monkeypatch.setattr(fused_embedder, "find_fastest", fastest)
    embedder = FusedEmbedder(small())
    found = embedder.list_passes(NormedTokens(torch.zeros(15, 32), torch.zeros(15, 32), None, None))["joined"].keywords[
        "tilings"
    ]
    assert found == BlockTilings(
        qkv=NORM_TILINGS[-1], out=RESIDUAL_TILINGS[-1], fc1=NORM_TILINGS[-1], fc2=RESIDUAL_TILINGS[-1]
    )
    assert tried["fc2"] == [BlockTilings(fc2=each) for each in RESIDUAL_TILINGS]
    assert tried["fc1"] == [BlockTilings(fc2=found.fc2, fc1=each) for each in NORM_TILINGS]


def test_every_product_is_cut_up_as_was_found_for_it(monkeypatch):
    taken = []

    def noting(product):
        def noted(*inputs, **options):
            taken.extend(each for each in inputs if isinstance(each, Tiling))
            return product(*inputs, **options)

        return noted

    monkeypatch.setattr(merged_block, "multiply_and_add", noting(merged_block.multiply_and_add))
    monkeypatch.setattr(merged_block, "normalise_and_multiply", noting(merged_block.normalise_and_multiply))
    tilings = BlockTilings(*(Tiling(16, columns, 16, 4, 2) for columns in (16, 32, 64, 128)))
    FusedEmbedder(small()).run_merged(torch.zeros(15, 32).half(), torch.zeros(15, 32).bfloat16(), tilings=tilings)
    assert taken == 2 * [tilings.out, tilings.fc1, tilings.fc2, tilings.qkv]  # and a third block, for one token


@pytest.mark.parametrize("error", [NotApplicableError, torch.OutOfMemoryError])
def test_where_no_kernel_fits_the_chip_nothing_is_joined(monkeypatch, error):
    def fastest(key, ways, *inputs):
        raise error("none of the kernels runs here")

    monkeypatch.setattr(fused_embedder, "find_fastest", fastest)
    embedder = FusedEmbedder(small())
    assert embedder.list_passes(NormedTokens(torch.zeros(15, 32), torch.zeros(15, 32), None, None)) == {
        "apart": embedder.run_separate
    }


@pytest.mark.parametrize("count", [1, 4, 5])
def test_logits_by_either_way(count):
    head, y = torch.nn.Linear(40, 7).requires_grad_(False), torch.randn(count, 80)[:, ::2]
    logits = FusedHead(head)
    assert torch.equal(logits(y), head(y))
    if count <= 4:
        assert torch.allclose(logits.run_kernel(y), head(y), atol=1e-5)


@pytest.mark.slow
def test_a_hybrid():
    model = vitrail.create_model("R26+Ti/32", **{**SMALL, "image_size": 64, "depth": 1}).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert relative_distance(FusedEmbedder(model)(images), model.embed(images)) < 3e-2


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 3, 10, 10),
        torch.zeros(2, 3, 16, 16),
        torch.zeros(1, 1, 8, 8),
        torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
    ],
)
def test_images_of_another_kind_are_refused(images):
    with pytest.raises(InputError, match="3, 8, 8"):
        FusedEmbedder(small())(images)


def test_the_model_is_left_as_it_was():
    model = small()
    before = copy.deepcopy(model.state_dict())
    FusedEmbedder(model)(torch.randn(1, 3, 8, 8))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [{}, slow({"gelu": "exact", "registers": 2, "pool": "class+average"}), slow({"conv_stem": STEM, "depth": 1})],
    ids=str,
)
def test_gradients(options):
    model = small(**options)
    exact = copy.deepcopy(model).double()
    images, labels = torch.randn(3, 3, 8, 8), torch.tensor([0, 3, 1])
    expected = exact.train()(images.double())
    F.cross_entropy(expected, labels).backward()
    found = FusedTraining(model.train(), dtype=torch.float32)(images)
    F.cross_entropy(found, labels).backward()
    assert relative_distance(found.detach(), expected.detach()) < 1e-5
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert relative_distance(parameter.grad, reference.grad) < 1e-5, name


@pytest.mark.parametrize("stream", [slow(torch.float32), torch.float16])
def test_gradients_in_half_precision_are_as_near_as_autocast_is(stream):
    """In fp16: the interpreter cuts bf16 off instead of rounding it."""
    torch.manual_seed(0)
    model = small().train()
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 3])

    def gradients(logits):
        found = torch.autograd.grad(F.cross_entropy(logits.float(), labels), list(model.parameters()))
        return torch.cat([each.flatten() for each in found])

    exact = gradients(model(images))
    with torch.autocast("cpu", torch.float16):
        plain = relative_distance(gradients(model(images)), exact)
    fused = relative_distance(gradients(FusedTraining(model, dtype=torch.float16, stream=stream)(images)), exact)
    assert 0 < fused < 1.5 * plain


@pytest.mark.slow
def test_stochastic_depth_drops_whole_branches():
    model = small(stochastic_depth=0.5, depth=2).train()
    torch.manual_seed(0)
    images = torch.randn(1, 3, 8, 8).expand(12, -1, -1, -1).contiguous()
    logits = FusedTraining(model, dtype=torch.float32)(images)
    kinds = {tuple(row) for row in logits.detach().mul(1e4).round().tolist()}
    assert 1 < len(kinds) <= 4  # of the last block: both branches, either, or none
    logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_evaluation_is_the_plain_model():
    model = small().eval()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(FusedTraining(model)(images), model(images))


@pytest.mark.slow
def test_images_of_another_size_learn_too():
    model = small().train()
    images = torch.randn(2, 3, 12, 8)
    assert relative_distance(FusedTraining(model, dtype=torch.float32)(images).detach(), model(images).detach()) < 1e-5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"position": "relative"}, "relative positions"),
        ({"position_at": "every-layer"}, "positions in every layer"),
        ({"block": "axial", "pool": "average"}, "axial"),
    ],
)
def test_what_there_are_no_kernels_for_is_named(options, told):
    with pytest.raises(NotApplicableError, match=told):
        check_fusible(small(**options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"attention_dropout": 0.1}, "dropout of attention weights"),
        ({"norm": "rms"}, "LayerNorm"),
        ({"gelu": "quick"}, "quick"),
        ({"pool": "average", "norm_after_pool": True}, "norm after a pool"),
        ({"image_size": (48, 64), "pool": "average"}, "192 tokens"),
        ({"width": 264, "num_heads": 2}, "heads as wide as 132"),
    ],
)
def test_what_cannot_be_trained_so_is_named(options, told):
    with pytest.raises(NotApplicableError, match=told):
        check_trainable(small(**options))


def test_a_baseline_has_no_fused_kernels():
    with pytest.raises(NotApplicableError, match="Vision Transformers"):
        check_fusible(vitrail.create_model("BiT-R50x1", num_classes=2, device="meta"))


def test_rows_that_the_copy_engine_cannot_take_are_left_to_the_library():
    assert FusedLinear(torch.nn.Linear(588, 64)).list_tilings(8192) == {}
    assert FusedLinear(torch.nn.Linear(592, 64)).list_tilings(8192) != {}


def test_heads_of_any_width_have_a_way_at_any_size():
    of = FusedAttention(2).list_implementations
    assert "MATH" in of(256, 64, 197)
    assert "MATH" not in of(8192, 64, 197)  # its results would fill the memory
    assert "MATH" in of(8192, 384, 197)  # which the others do not take
