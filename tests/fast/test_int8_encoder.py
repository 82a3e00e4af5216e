"""int8 on a CPU: each step against the same written out in float64, the kernels against torch, whole models."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import vitrail
from vitrail.errors import NotApplicableError
from vitrail.fast.cpu import int8
from vitrail.fast.cpu.int8 import Int8Embedder, create_int8_embedder, quantise_weight
from vitrail.fast.cpu.int8_operations import (
    LEAST,
    CompiledOperations,
    Int8Weight,
    NormWeights,
    QuantisedRows,
    TorchOperations,
    choose_operations,
    quantise_rows,
)
from vitrail.fast.timing import relative_distance
from vitrail.system import compiler

try:
    int8.check_int8_product()
except NotApplicableError as reason:
    pytest.skip(str(reason), allow_module_level=True)

SMALL = {"image_size": 32, "width": 64, "depth": 3, "num_heads": 2, "mlp_dim": 128, "num_classes": 10, "seed": 0}


def kernels():
    try:
        return CompiledOperations()
    except NotApplicableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=["torch", "compiled"])
def operations(request):
    return TorchOperations() if request.param == "torch" else kernels()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values(found: QuantisedRows):
    return found.values.double() * found.scale.double()[:, None] + found.least.double()[:, None]


def within_half_a_step(found: QuantisedRows, exact, slack=0.02):
    difference = (values(found) - exact).abs() / found.scale.double()[:, None]
    assert difference.max() <= 0.5 + slack


def test_rows_in_bytes_are_within_half_a_step_and_do_not_see_each_other():
    x = randn(5, 48) * torch.tensor([1.0, 1e-4, 1e4, 0.0, 1.0])[:, None]
    found = quantise_rows(x)
    within_half_a_step(found, x.double())
    assert torch.equal(values(found)[3], x[3].double())
    assert torch.equal(quantise_rows(x[:1]).values, found.values[:1])


def test_weights_are_rounded_at_least_as_well_as_by_their_largest():
    weight, factor = randn(32, 3072), randn(32, seed=2)
    found = quantise_weight(weight, None, factor=factor)
    scaled = weight.double() * factor.double()[:, None]
    dequantised = found.kernel.double() * found.scale.double()[:, None]
    step = scaled.abs().amax(dim=1, keepdim=True) / 127
    plain = ((scaled / step).round() * step - scaled).square().sum(dim=1)
    error = (dequantised - scaled).square().sum(dim=1)
    assert (error <= plain * (1 + 1e-5)).all()
    assert (error < 0.999 * plain).any()
    assert (found.sums.double() - dequantised.sum(dim=1)).abs().max() < 1e-5 * scaled.abs().sum(dim=1).max()


def test_a_product_is_exact_for_the_bytes_it_is_given(operations):
    weight, bias, factor = randn(32, 48), randn(32, seed=1), randn(32, seed=2)
    quantised = quantise_weight(weight, bias, factor=factor)
    rows, z = quantise_rows(randn(7, 48, seed=3)), randn(7, 32, seed=4)
    rounded = quantised.kernel.double() * quantised.scale.double()[:, None]
    exact = values(rows) @ rounded.T + bias.double() * factor.double()
    found = operations.prepare_product(quantised, torch.float32)(rows)
    assert (found.double() - exact).abs().max() < 1e-5 * exact.abs().max()
    total = z.clone()
    operations.prepare_addition(quantised)(rows, total)
    assert (total.double() - z.double() - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 13, 385])
@pytest.mark.parametrize(("depth", "width"), [(16, 16), (48, 32), (64, 48), (32, 64), (16, 144)])
def test_whole_numbers_are_multiplied_exactly(rows, depth, width):
    operations, generator = kernels(), torch.Generator().manual_seed(rows + depth)
    x = QuantisedRows(
        torch.randint(0, 256, (rows, depth), generator=generator, dtype=torch.uint8),
        2.0 ** torch.randint(-2, 3, (rows,), generator=generator),
        randn(rows).mul(9).round(),
    )
    kernel = torch.randint(-127, 128, (width, depth), generator=generator, dtype=torch.int8)
    scale = 2.0 ** torch.randint(-3, 3, (width,), generator=generator)
    weight = Int8Weight(kernel, scale, kernel.sum(dim=1) * scale, randn(width).round())
    exact = values(x) @ (kernel.double() * scale.double()[:, None]).T + weight.bias.double()
    assert torch.equal(operations.prepare_product(weight, torch.float32)(x).double(), exact)
    assert torch.equal(operations.prepare_product(weight, torch.bfloat16)(x), exact.bfloat16())
    z = randn(rows, width).round()
    before = z.double()
    operations.prepare_addition(weight)(x, z)
    assert torch.equal(z.double(), before + exact)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("width", [16, 64, 144])
def test_norm(operations, centred, width):
    z, gain, offset = 3 * randn(5, width) + 2, randn(width, seed=2), randn(width, seed=3) if centred else None
    exact = z.double()
    middle = exact.mean(dim=1, keepdim=True) if centred else 0
    deviation = ((exact - middle).square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    normed = (exact - middle) / deviation * gain.double() + (0 if offset is None else offset.double())
    within_half_a_step(operations.norm(z, NormWeights(gain, offset, 1e-6)), normed)


@pytest.mark.parametrize("form", ["tanh", "none", "quick"])
@pytest.mark.parametrize("width", [16, 128, 144])
def test_gelu(operations, form, width):
    given = randn(6, width).to(operations.dtype)
    given[0] = torch.linspace(-40, 40, width).to(operations.dtype)
    given[1] = -torch.linspace(0.5, 300, width).to(operations.dtype)
    given[2] = torch.linspace(-2, 0, width).to(operations.dtype)  # the least values of all forms
    x = given.double()
    if form == "tanh":
        exact = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    elif form == "none":
        exact = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    else:
        exact = x / (1 + torch.exp(-1.702 * x))
    assert exact.min() > LEAST
    # Bytes of rows that are nearly zero have steps of 7e-4, which are finer than the kernels' GELU is exact (2e-5).
    within_half_a_step(operations.gelu(given, form), exact, slack=0.04)


@pytest.mark.parametrize(
    ("tokens", "read_count", "size"),
    [(1, 1, 16), (2, 2, 48), (17, 17, 64), (50, 1, 32), (65, 7, 112), (197, 2, 80), (90, 90, 64)],
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_attention_against_a_loop(operations, tokens, read_count, size, spread):
    images, heads = 2, 3
    width = heads * size
    everything = randn(images * tokens, 3 * width)
    everything[:, : 2 * width] *= spread  # flat and sharp weights
    everything[:, width:] += 4 * randn(2 * width, seed=1)  # what all keys and all values share
    everything = everything.to(operations.dtype)
    queries = everything[:, :width]
    if read_count < tokens:
        queries = queries.unflatten(0, (images, tokens))[:, :read_count].flatten(0, 1).contiguous()
    mixed = operations.attention(queries, everything[:, width:], images, heads)
    found = values(mixed).view(images, read_count, width)
    q, k, v = everything.double().view(images, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)
    for image in range(images):
        for head in range(heads):
            weights = (q[image, head, :read_count] @ k[image, head].T / math.sqrt(size)).softmax(dim=1)
            exact = weights @ v[image, head]
            difference = found[image, :, head * size : (head + 1) * size] - exact
            assert difference.norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(threads):
    operations, before = kernels(), torch.get_num_threads()
    weight, z, qkv = quantise_weight(randn(144, 80), None), randn(395, 80), randn(3 * 21, 3 * 80).bfloat16()

    def compute():
        x = operations.norm(z, NormWeights(torch.ones(80), torch.zeros(80), 1e-6))
        hidden = operations.prepare_product(weight, torch.bfloat16)(x)
        attended = operations.attention(qkv[:, :80], qkv[:, 80:], images=3, heads=5)
        return x.values, hidden, operations.gelu(hidden, "tanh").values, attended.values, attended.scale

    try:
        torch.set_num_threads(1)
        alone = compute()
        torch.set_num_threads(threads)
        assert all(torch.equal(one, other) for one, other in zip(alone, compute(), strict=True))
    finally:
        torch.set_num_threads(before)


OPTIONS = [
    {},
    {"pool": "average", "class_token": False, "gelu": "exact"},
    {"pool": "class+average", "registers": 2},
    {"pool": "attention"},
    {"pool": "distilled", "registers": 1, "position_at": "every-layer"},
    {"layer_scale": 0.3, "norm": "rms", "qkv_bias": False, "gelu": "quick", "position_at": "shared"},
    {"input_norm": True, "norm_after_pool": True, "position": "sin-cos"},
    {"num_heads": 8},  # heads of 8 channels, which the kernels do not take
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_models(options):
    model = vitrail.create_model("Ti/8", **{**SMALL, **options}).eval()
    for block in model.encoder.blocks:  # fresh biases are zeros, and would hide what is left out
        for layer in (block.attention.qkv, block.attention.out, block.mlp.fc1, block.mlp.fc2):
            if layer.bias is not None:
                nn.init.normal_(layer.bias, std=0.1, generator=torch.Generator().manual_seed(1))
    before = copy.deepcopy(model.state_dict())
    images = randn(3, 3, 32, 32, seed=2)
    with torch.no_grad():
        exact = model.embed(images)
    for embedder in (create_int8_embedder(model), Int8Embedder(model, TorchOperations())):
        found = embedder(images)
        assert found.dtype == torch.float32
        assert relative_distance(found, exact) < 0.02
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_other_sizes_and_stems():
    stem = [{"channels": 16}, {"channels": 32}, {"channels": 32}]
    for name, options in (("Ti/8", {}), ("Ti/8", {"conv_stem": stem})):
        model = vitrail.create_model(name, **{**SMALL, **options}).eval()
        images = randn(2, 3, 48, 32)
        with torch.no_grad():
            assert relative_distance(create_int8_embedder(model)(images), model.embed(images)) < 0.02


def test_an_image_does_not_depend_on_its_neighbours(monkeypatch):
    model = vitrail.create_model("Ti/8", **SMALL).eval()
    embedder = create_int8_embedder(model)
    images = randn(5, 3, 32, 32)
    together = embedder(images)
    monkeypatch.setattr(int8, "ROWS", 17)
    assert torch.equal(together, embedder(images))
    assert torch.equal(together[3:4], embedder(images[3:4]))


def test_what_cannot_be():
    for name, options in (
        ("BiT-R50x1", {"num_classes": 4, "device": "meta"}),
        ("Ti/8", {**SMALL, "position": "relative"}),
    ):
        with pytest.raises(NotApplicableError, match="fp32"):
            create_int8_embedder(vitrail.create_model(name, **options))
    with pytest.raises(NotApplicableError, match="float32"):
        create_int8_embedder(vitrail.create_model("Ti/8", **SMALL).double())


def test_products_that_are_wrong_are_refused(monkeypatch):
    real = TorchOperations.prepare_product
    monkeypatch.setattr(TorchOperations, "prepare_product", lambda *given: lambda x: real(*given)(x).clamp(max=2**12))
    with pytest.raises(NotApplicableError, match="not exact"):
        int8.check_int8_product.__wrapped__()


def test_a_processor_without_vnni_falls_back_to_torch(monkeypatch, tmp_path):
    kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{compiler._find_compiler()[0]} -mno-avx512vnni")
    compiler.load_library.cache_clear()
    assert isinstance(choose_operations(64, 128, 4), TorchOperations)
    with pytest.raises(NotApplicableError, match="processor"):
        CompiledOperations()
    compiler.load_library.cache_clear()


def test_without_a_compiler_torch_does_it(monkeypatch, tmp_path):
    compiler.load_library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert isinstance(choose_operations(64, 128, 4), TorchOperations)
    with pytest.raises(NotApplicableError, match="g\\+\\+"):
        CompiledOperations()


def test_a_source_that_does_not_compile_is_named(monkeypatch, tmp_path):
    kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wrong.cpp"
    source.write_text('#error "not on this processor"')
    with pytest.raises(NotApplicableError, match="processor"):
        compiler.load_library(source)
    assert not list((tmp_path / "vitrail" / "kernels").iterdir())


@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(monkeypatch, tmp_path, which):
    kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "fine.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    assert compiler.load_library(source).seven() == 7
    folder = tmp_path / "vitrail" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder if which == "folder" else next(folder.iterdir())).chmod(0o777)
    compiler.load_library.cache_clear()
    with pytest.raises(NotApplicableError, match="others may write"):
        compiler.load_library(source)


def test_a_damaged_library_is_made_anew(monkeypatch, tmp_path):
    kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    source_library = compiler.load_library.__wrapped__
    folder = tmp_path / "vitrail" / "kernels"
    folder.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda path: Path(path))
    place = source_library(source)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place.write_bytes(b"not a library")
    assert source_library(source).seven() == 7


def test_without_a_home_nothing_is_kept(monkeypatch):
    kernels()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(NotApplicableError, match="no home"):
        compiler.load_library.__wrapped__(compiler.Path(int8.__file__).parent / "int8_kernels")
