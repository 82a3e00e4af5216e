"""The Vision Transformer's seams, options and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import vitrail
from samples import images, small_vit


def test_patch_projection_is_the_papers_linear_map():
    """Row-major patches, each flattened and multiplied by one matrix; the same as a convolution of stride P."""
    model = small_vit(dtype=torch.float64)
    batch = images(dtype=torch.float64)
    linear = model.patch_embed.projection
    expected = torch.stack(
        [
            batch[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].reshape(2, -1) @ linear.weight.T
            + linear.bias
            for row in range(2)
            for column in range(3)
        ],
        dim=1,
    )
    torch.testing.assert_close(model.tokens(batch), expected, rtol=0, atol=1e-12)
    convolution = F.conv2d(batch, linear.weight.view(32, 3, 8, 8), linear.bias, stride=8).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.tokens(batch), convolution, rtol=0, atol=1e-12)


def test_the_seams_compose_to_the_forward_pass():
    model = small_vit()
    tokens = model.tokens(images())
    encoded = model.encode(tokens)
    y = model.embed(images())
    assert (tokens.shape, encoded.shape, y.shape) == ((2, 6, 32), (2, 7, 32), (2, 32))
    assert torch.equal(encoded, model.forward_features(images()))
    assert torch.equal(y, encoded[:, 0])
    assert torch.equal(model.forward_head(encoded, pre_logits=True), y)
    assert torch.equal(model.forward_head(encoded), model(images()))
    assert torch.equal(model.head(y), model(images()))


def test_encode_at_another_grid_needs_to_be_told_the_grid():
    model = small_vit()
    larger = images(size=(32, 24))
    tokens = model.tokens(larger)
    assert torch.equal(model.encode(tokens, grid=(4, 3)), model.forward_features(larger))
    with pytest.raises(vitrail.InputError, match="2×3"):
        model.encode(tokens)


@pytest.mark.parametrize("pool", ["average", "attention", "class"])
@pytest.mark.parametrize("position", ["none", "relative", "learned-1d", "learned-2d", "sin-cos"])
def test_shuffled_patches_matter_only_with_a_position_embedding(pool, position):
    model = small_vit(position=position, pool=pool, dtype=torch.float64)
    tokens = model.tokens(images(dtype=torch.float64))
    shuffled = tokens[:, torch.tensor([4, 2, 0, 5, 1, 3])]
    y, y_shuffled = model.pool_features(model.encode(tokens)), model.pool_features(model.encode(shuffled))
    difference = ((y - y_shuffled).norm() / y.norm()).item()
    if position == "none":
        assert difference < 1e-12
    else:
        assert difference > 1e-4


@pytest.mark.parametrize("position", ["none", "learned-1d"])
def test_an_image_shifted_around_by_whole_patches(position):
    model = small_vit(position=position, dtype=torch.float64)
    batch = images(dtype=torch.float64)
    y, moved = model.embed(batch), model.embed(batch.roll((8, 16), dims=(2, 3)))
    assert torch.allclose(y, moved, rtol=0, atol=1e-12) == (position == "none")


def test_average_pooling_leaves_prefix_tokens_out():
    model = small_vit(pool="average", class_token=True, registers=2)
    features = model.forward_features(images())
    assert features.shape == (2, 9, 32)
    torch.testing.assert_close(model.embed(images()), features[:, 3:].mean(dim=1))


def test_class_and_average_side_by_side():
    model = small_vit(pool="class+average", registers=1)
    features = model.forward_features(images())
    torch.testing.assert_close(model.embed(images()), torch.cat([features[:, 0], features[:, 2:].mean(dim=1)], dim=1))
    assert model.head.weight.shape == (7, 64)


def test_distilled_heads_are_averaged():
    model = small_vit(pool="distilled", registers=1)
    features = model.forward_features(images())
    expected = (model.head.linear(features[:, 0]) + model.head.distilled(features[:, 1])) / 2
    torch.testing.assert_close(model(images()), expected)
    assert (model.replace_head(3)(images()) == 0).all()


def test_norm_after_pool():
    model = small_vit(pool="average", norm_after_pool=True)
    features = model.forward_features(images())
    assert isinstance(model.encoder.norm, torch.nn.Identity)
    torch.testing.assert_close(model.embed(images()), model.pool_norm(features.mean(dim=1)))


def test_registers_change_the_result_and_stand_after_the_class_token():
    model = small_vit(registers=2, position="none")
    z = model._prepend_prefix(model.tokens(images()))
    assert torch.equal(z[0, 0], model.class_token[0])
    assert torch.equal(z[1, 1:3], model.registers)
    plain = small_vit(position="none")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "registers"})
    assert not torch.allclose(plain.embed(images()), model.embed(images()))


@pytest.mark.parametrize(("owners", "rows"), [("class", 1), ("all", 3), ("none", 0)])
def test_which_prefix_tokens_own_a_position(owners, rows):
    model = small_vit(registers=2, position_prefix=owners)
    table = model.position_embedding[0].table
    assert table.shape == (rows + 6, 32)
    full = model._make_table(model.position_embedding[0], (2, 3))
    assert torch.equal(full[:rows], table[:rows])
    assert (full[rows:3] == 0).all()
    assert torch.equal(full[3:], table[rows:])


def test_layer_scale_of_zero_silences_the_blocks():
    model = small_vit(layer_scale=0.1)
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.scale1.factor.zero_()
            block.scale2.factor.zero_()
    first, last = model.intermediate_layers(images(), [0, -1])
    assert torch.equal(first, last)


def test_axial_block_sees_its_row_first():
    """After the row half of a block, a patch has heard of its own row only; after the column half, of all."""
    model = small_vit(block="axial", pool="average", depth=1, dtype=torch.float64)
    tokens = model.tokens(images(batch=1, dtype=torch.float64)).unflatten(1, (2, 3))
    changed = tokens.clone()
    changed[0, 0, 0] *= -1
    block = model.encoder.blocks[0]
    rows = [block.rows(t)[0] for t in (tokens, changed)]
    moved = (rows[0] - rows[1]).norm(dim=-1) > 1e-6
    assert moved.tolist() == [[True] * 3, [False] * 3]
    assert ((block(tokens) - block(changed)).norm(dim=-1) > 1e-6).all()


def test_stochastic_depth_grows_with_depth_and_acts_only_in_training():
    model = small_vit(depth=5, stochastic_depth=0.4)
    assert [block.drop.rate for block in model.encoder.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert torch.equal(model(images()), model(images()))
    drop = model.encoder.blocks[-1].drop.train()
    torch.manual_seed(0)
    dropped = drop(torch.ones(10_000, 2, 3))
    kept = dropped[:, 0, 0] != 0
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.02)
    assert dropped[kept].unique().item() == pytest.approx(1 / 0.6)


def test_stochastic_depth_of_axial_blocks_drops_whole_images():
    """Not single rows or columns of one."""
    model = small_vit(depth=2, block="axial", pool="average", stochastic_depth=0.5).train()
    block = model.encoder.blocks[-1]
    assert block.rows.drop.rate == block.columns.drop.rate == 0.5
    shares = []  # of values that are zero, for each image: all of them, or none
    for half in (block.rows, block.columns):
        half.drop.register_forward_hook(lambda m, args, out: shares.append((out == 0).flatten(1).float().mean(dim=1)))
    torch.manual_seed(0)
    model(images(batch=64))
    shares = torch.cat(shares)
    assert set(shares.tolist()) == {0.0, 1.0}
    assert 0.3 < shares.mean() < 0.7


def test_dropout_acts_where_the_paper_puts_it():
    """After the positions, after the attention's output, after each dense layer of the MLP; not on qkv."""
    model = small_vit(dropout=0.25).train()
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            assert module.p == 0.25
            module.register_forward_hook(lambda m, args, out, name=name: calls.append(name))
    model(images())
    block = lambda i: [f"encoder.blocks.{i}.dropout"] + [f"encoder.blocks.{i}.mlp.dropout"] * 2  # noqa: E731
    assert calls == ["dropout", *block(0), *block(1)]


def test_heads():
    model = small_vit(representation_size=11)
    assert torch.equal(model(images()), model.head.linear(model.head.hidden(model.embed(images())).tanh()))
    bare = small_vit(num_classes=0)
    assert torch.equal(bare(images()), bare.embed(images()))
    model.labels = list("abcdefg")
    model.replace_head(3, labels=("x", "y", "z"))
    assert (model(images()) == 0).all()
    assert (model.num_classes, model.labels, model.architecture.representation_size) == (3, ("x", "y", "z"), None)
    with pytest.raises(vitrail.ConfigError, match=r"2 labels.* 3 classes"):
        model.labels = ["a", "b"]


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), channels=st.integers(1, 5), patch=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_any_size_square_or_not_any_channels(rows, columns, channels, patch):
    size = (rows * patch, columns * patch)
    model = small_vit(f"S/{patch}", image_size=size, in_channels=channels)
    assert model.grid == (rows, columns)
    assert model(images(size=size, channels=channels)).shape == (2, 7)
    assert len(model.preprocessing.mean) == channels


def test_hybrid_grid_and_patches_on_the_feature_map():
    for name, patch, size, grid in [("R50+B/16", 1, (64, 96), (4, 6)), ("R26+S/32", 2, (64, 128), (1, 2))]:
        model = vitrail.create_model(
            name, patch_size=patch, image_size=size, depth=1, width=96, num_heads=3, num_classes=5
        )
        assert model.grid == grid
        assert model.tokens(images(size=size)).shape == (2, grid[0] * grid[1], 96)
        assert model(images(size=size)).shape == (2, 5)
        resized = (size[0], size[1] + model.stride)
        assert model.resize(resized).eval()(images(size=resized)).shape == (2, 5)


def test_conv_stem_as_in_the_paper_on_early_convolutions():
    model = small_vit("S/8", conv_stem=[(8, 3, 2, "batch", "relu"), (16, 3, 2), (32, 3, 2, "group", "gelu")])
    x = images()
    for layer in model.patch_embed.layers:
        x = layer(x)
    assert x.shape == (2, 32, 2, 3)
    expected = model.patch_embed.projection(x).flatten(2).transpose(1, 2)
    assert torch.equal(model.tokens(images()), expected)


def test_trains_in_fp32_and_in_bf16_autocast():
    for autocast in (False, True):
        model = vitrail.create_model(
            "S/8", seed=0, width=32, depth=2, mlp_dim=48, num_heads=4, image_size=16, num_classes=3
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batch, labels = images(size=(16, 16), batch=12), torch.arange(12) % 3
        losses = []
        for _ in range(60):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(batch).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(torch.tensor(3.0).log().item(), abs=1e-3)  # the head starts at zero
        assert losses[-1] < 0.05
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "name", ["S/8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("R26+S/32", "BiT-R50x1"))]
)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    size = (16, 24) if name == "S/8" else (64, 64)
    options = {} if name == "BiT-R50x1" else {"width": 32, "num_heads": 4, "mlp_dim": 48, "depth": 6}
    model = vitrail.create_model(name, image_size=size, seed=0, **options).train()
    torch.nn.init.normal_(model.head.weight)
    saved = []
    gradients = []
    for enabled in (False, True):
        model.set_gradient_checkpointing(enabled)
        model.zero_grad()
        kept = 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(images(size=size)).square().sum()
        loss.backward()
        saved.append(kept)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-4, atol=1e-5)
    assert saved[1] < 0.5 * saved[0]


AT_MANY_SIZES = {"pool": "class"}
COMPILED = [
    {},
    AT_MANY_SIZES,
    {"position": "relative"},
    {"position": "learned-2d", "position_at": "shared"},
    {"position": "sin-cos", "pool": "attention", "registers": 2},
    {"pool": "average", "block": "axial", "layer_scale": 0.1},
    {"conv_stem": [(8, 3, 4), (16, 3, 2)]},
]


@pytest.fixture
def fresh_compiler():
    """Compilations are counted over the whole process, and after a few of one function torch gives up."""
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "options", [COMPILED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in COMPILED[1:])]
)
def test_compiles_without_a_graph_break(options):
    model = small_vit(**options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()))
    compiled(images()).sum().backward()
    if not options:
        return  # every further compilation takes seconds: the slow cases do them
    with torch.autocast("cpu", torch.bfloat16):
        compiled(images())
    if options.get("position") != "relative":
        for size in [(32, 24), (24, 40), (40, 16)] if options == AT_MANY_SIZES else [(32, 24)]:
            torch.testing.assert_close(compiled(images(size=size)), model(images(size=size)))
            compiled(images(size=size)).sum().backward()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["R26+S/32", "BiT-R50x1"])
def test_convolutional_models_compile_without_a_graph_break(name):
    model = vitrail.create_model(name, image_size=64).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images(size=(64, 64))), model(images(size=(64, 64))))


@pytest.mark.usefixtures("fresh_compiler")
def test_training_compiles_with_checkpointing():
    model = small_vit().train()
    model.set_gradient_checkpointing()
    torch.compile(model, backend="aot_eager", fullgraph=True)(images()).sum().backward()
    assert model.class_token.grad is not None


def test_meta_device_costs_no_memory_and_dtype_is_kept():
    with torch.device("meta"):
        model = vitrail.create_model("G/14")
    assert all(p.is_meta for p in model.parameters())
    assert vitrail.create_model("Ti/16", device="meta", depth=1)(torch.empty(1, 3, 224, 224, device="meta")).is_meta
    half = vitrail.create_model("Ti/16", dtype=torch.bfloat16, depth=1)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(images(size=(224, 224), dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (torch.zeros(2, 3, 17, 24), "17×24 .*16×24 and 24"),
        (torch.zeros(2, 3, 5, 5), "nearest size .*8"),
        (torch.zeros(2, 4, 16, 24), r"must have shape \(batch, 3, height, width\), not \(2, 4, 16, 24\)$"),
        (torch.zeros(2, 16, 24, 3), r"images.permute\(0, 3, 1, 2\) would fit"),
        (torch.zeros(3, 16, 24), r"must be a batch of shape \(batch, 3, height, width\), not \(3, 16, 24\)"),
        (torch.zeros(2, 3, 16, 24, dtype=torch.uint8), "torch.uint8 .*torch.float32"),
        (torch.zeros(2, 3, 16, 24, dtype=torch.float64), r"give images.to\(torch.float32\)"),
    ],
)
def test_bad_images_get_one_clear_sentence(batch, sentence):
    with pytest.raises(vitrail.InputError, match=sentence) as caught:
        small_vit()(batch)
    assert "\n" not in str(caught.value)


def test_what_is_no_tensor_is_named():
    with pytest.raises(vitrail.InputError, match=r"tensor.*numpy\.ndarray"):
        small_vit()(images().numpy())


def test_uint8_is_refused_under_autocast_too():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(vitrail.InputError, match="uint8"):
        small_vit()(torch.zeros(2, 3, 16, 24, dtype=torch.uint8))
