"""Networks of timm's as models: built by name and nothing else, changed as timm changes them, counted as ours are."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers import timm
from vitrail.errors import ConfigError, InputError
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.cost import compute_cost
from vitrail.model.create import build_empty_model
from vitrail.model.timm_model import TimmModel, build_empty_network, find_output_layers, measure_activation_bytes
from vitrail.model.variants import make_architecture
from vitrail.objectives.classification import Classification
from vitrail.reliability.record import Reliability
from vitrail.reliability.unknown import UnknownScore
from vitrail.training.optim import find_kernels, group_parameters

CONVOLUTIONAL, SIZED, BOUND = "test_efficientnet", "test_vit4", "efficientvit_m0"
"""Networks that run at any size, that timm resizes, and that run at one size only and have buffers in no checkpoint."""


def described(name: str, **changed) -> TimmArchitecture:
    own = timm.models.get_pretrained_cfg(name)
    fields = {"name": name, "image_size": own.input_size[1:], "num_classes": own.num_classes, **changed}
    return TimmArchitecture(**fields)


def filled(name: str, **changed) -> TimmModel:
    """With every tensor of the checkpoint random."""
    model = build_empty_model(described(name, **changed))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for key, tensor in model.state_dict().items():
        values = torch.rand(tensor.shape, generator=generator) * 0.1 + (0.9 if tensor.ndim == 1 else -0.05)
        state[key] = values if tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=tensor.dtype)
    model.load_state_dict(state, assign=True)
    return model.eval()


def pictures(model: TimmModel, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, model.in_channels, *model.image_size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def same(model: TimmModel, other: TimmModel) -> bool:
    images = pictures(model)
    return torch.equal(model(images), other(images)) and torch.equal(model.embed(images), other.embed(images))


def rebuilt(model: TimmModel) -> TimmModel:
    """What saving and loading comes to."""
    again = build_empty_model(model.architecture)
    again.load_state_dict(model.state_dict(), assign=True)
    return again.eval()


# Names


@pytest.mark.parametrize(
    "name",
    [
        *(
            "hf-hub:timm/resnet10t",
            "local-dir:/tmp",
            "timm/resnet10t",
            "../resnet10t",
            "C:resnet10t",
            "resnet10t\n",
            "",
        ),
        *("resnet10t.a.b", "resnet10t.", ".a", "resnet10t@main", "ResNet", "resnet10t ", "rèsnet", "a" * 300),
    ],
)
def test_what_is_no_plain_name_is_refused(name):
    with pytest.raises(ConfigError, match="name = "):
        TimmArchitecture(name=name, image_size=32, num_classes=2)


@given(st.text())
def test_no_text_gets_through_that_timm_could_take_for_a_place(text):
    try:
        name = TimmArchitecture(name=text, image_size=32, num_classes=2).name
    except ConfigError:
        return
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789_.")
    assert timm.models.parse_model_name(name) == (None, name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet51", r"timm \S+ has no model 'resnet51', did you mean 'resnet\d+\w*'"),
        ("resnet50.none_such", "cannot build resnet50.none_such .*tag"),
        ("deepseek_vit_412m_enc", "it is no classifier"),
    ],
)
def test_names_that_timm_cannot_build(name, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        build_empty_network(TimmArchitecture(name=name, image_size=224, num_classes=2))
    assert "\n" not in str(caught.value)


def test_options_that_a_network_does_not_have():
    with pytest.raises(ConfigError, match=r"vgg11 .*drop_path_rate"):
        build_empty_network(TimmArchitecture(name="vgg11", image_size=224, num_classes=2, stochastic_depth=0.1))


# Building


def test_building_takes_no_memory_and_draws_nothing():
    before = torch.get_rng_state()
    model = build_empty_model(TimmArchitecture(name="vit_7b_patch16_dinov3", image_size=256, num_classes=0))
    assert sum(p.numel() for p in model.parameters()) > 6e9
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [CONVOLUTIONAL, SIZED, BOUND])
def test_a_filled_network_computes_what_timms_computes(name):
    model, theirs = filled(name), timm.create_model(name).eval()
    theirs.load_state_dict({key.removeprefix("peer."): tensor for key, tensor in model.state_dict().items()})
    images = pictures(model)
    with torch.no_grad():
        assert torch.equal(model(images), theirs(images))
        assert torch.equal(model.forward_head(model.forward_features(images)), theirs(images))
        assert torch.equal(model.embed(images), theirs.forward_head(theirs.forward_features(images), pre_logits=True))
    assert {name: module.training for name, module in model.named_modules() if module.training} == {}


def test_rates_for_training():
    model = build_empty_model(described(CONVOLUTIONAL, dropout=0.25, stochastic_depth=0.5))
    assert model.peer.drop_rate == 0.25
    drops = [part.drop_prob for part in model.modules() if type(part).__name__ == "DropPath"]
    assert 0.2 < max(drops) < 0.5


def test_other_channels():
    model = filled(CONVOLUTIONAL, in_channels=1)
    assert model(pictures(model)).shape == (2, 1000)
    with pytest.raises(InputError, match=r"\(batch, 1, height, width\)"):
        model(torch.zeros(2, 3, 160, 160))


# Changing


@pytest.mark.parametrize("name", [CONVOLUTIONAL, SIZED, "resnetv2_18", "levit_128s"])
def test_a_new_head_starts_at_zero_and_learns(name):
    """Linear layers, a convolution, two heads with norms before them."""
    model = filled(name)
    images = pictures(model)
    with torch.no_grad():
        before = model.forward_features(images)
    probabilities = torch.linspace(0, 1, 100)[:, None].numpy()
    model.reliability = Reliability(images=100, unknown=UnknownScore.fit("softmax", probabilities, None))
    assert model.replace_head(5, list("abcde")) is model
    assert model.reliability is None, "it was fitted to the head before"
    assert (model.num_classes, model.labels) == (5, tuple("abcde"))
    with torch.no_grad():
        assert torch.equal(model(images), torch.zeros(2, 5))
        assert torch.equal(model.forward_features(images), before)
    model.initialise_head(-3.0)
    with torch.no_grad():
        assert torch.allclose(model(images), torch.full((2, 5), -3.0))
    model.train()(images).square().sum().backward()
    last = [part for part in model.head.modules() if isinstance(part, torch.nn.Linear | torch.nn.Conv2d)][-1]
    assert last.weight.grad.abs().max() > 0
    assert model.eval().replace_head(0).labels is None
    assert torch.equal(model(images), model.embed(images))
    assert same(model, rebuilt(model))


def test_which_layers_give_logits():
    def linear(outputs):
        return torch.nn.Linear(4, outputs)

    with_hidden = torch.nn.Sequential(linear(7), torch.nn.ReLU(), torch.nn.LayerNorm(7), linear(7))
    normed = torch.nn.Sequential(torch.nn.BatchNorm1d(4), linear(7))
    distilled = torch.nn.Module()
    distilled.head, distilled.head_dist = normed, with_hidden
    convolution = torch.nn.Conv2d(4, 7, 1)
    alone = linear(7)
    several = torch.nn.ModuleList([alone, convolution, normed])
    for head, expected in [
        (alone, [alone]),
        (convolution, [convolution]),
        (with_hidden, [with_hidden[-1]]),
        (normed, [normed[-1]]),
        (distilled, [normed[-1], with_hidden[-1]]),
        (several, [alone, convolution, normed[-1]]),
        (torch.nn.Identity(), []),
    ]:
        assert find_output_layers(head, 7) == expected


def test_a_change_that_leads_to_another_network_than_timm_builds_is_refused():
    """timm's new head leaves the second one out, which timm builds with a thousand classes."""
    model = build_empty_model(described("iformer_m_distilled")).replace_head(3)
    before = model.architecture
    with pytest.raises(ConfigError, match=r"iformer_m_distilled .*1000 classes"):
        model.replace_head(1000)
    assert model.architecture == before


def test_labels_of_another_number_change_nothing():
    model = filled(CONVOLUTIONAL)
    before = model.architecture
    with pytest.raises(ConfigError, match=r"2 labels.* 3 classes"):
        model.replace_head(3, ["a", "b"])
    assert model.architecture == before
    assert model(pictures(model)).shape == (2, 1000)


def test_a_new_head_has_the_type_and_mode_of_the_model():
    model = filled(SIZED).bfloat16().train()
    model.replace_head(3)
    assert {tensor.dtype for tensor in [*model.parameters(), *model.buffers()]} == {torch.bfloat16}
    assert all(part.training for part in model.modules())


def test_resizing_a_convolutional_network():
    model = filled(CONVOLUTIONAL)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.resize((96, 128))
    assert model.image_size == model.preprocessing.image_size == (96, 128)
    assert model(pictures(model)).shape == (2, 1000)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_resizing_as_timm_resizes():
    model, theirs = filled(SIZED), timm.create_model(SIZED).eval()
    theirs.load_state_dict({key.removeprefix("peer."): tensor for key, tensor in model.state_dict().items()})
    theirs.set_input_size(img_size=(96, 128))
    model.set_gradient_checkpointing()
    model.resize((96, 128))
    with torch.no_grad():
        assert torch.equal(model(pictures(model)), theirs(pictures(model)))
    assert model.peer.grad_checkpointing
    assert same(model, rebuilt(model))
    assert same(model.resize(160), rebuilt(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of timm's resizing
def test_a_way_back_that_timm_does_not_know_is_refused_and_changes_nothing():
    """Windows of several sizes become windows of one size."""
    model = filled("swin_s3_tiny_224").resize(256)
    with pytest.raises(ConfigError, match="load it anew"):
        model.resize(224)
    assert model.image_size == (256, 256)
    assert same(model, rebuilt(model))


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        (BOUND, 256, rf"timm's {BOUND} does not run at image size 256 .*its own is 224"),
        (SIZED, 170, "cannot build|does not run at image size 170"),
        (SIZED, 16_000, "160 pixels"),
        (SIZED, 10**6, "at most 16384"),
        (CONVOLUTIONAL, 0, "image_size = 0"),
    ],
)
def test_sizes_that_cannot_be(name, size, sentence):
    model = filled(name)
    before = model.architecture
    with pytest.raises(ConfigError, match=sentence) as caught:
        model.resize(size)
    assert "\n" not in str(caught.value)
    assert model.architecture == before
    assert model.preprocessing.image_size == before.image_size


def test_gradient_checkpointing_changes_no_gradient():
    model = filled("test_resnet").train()
    model.set_gradient_checkpointing(False)
    gradients = []
    for enabled in (False, True):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.set_gradient_checkpointing(enabled)
        model.zero_grad()
        model(pictures(model)).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.load_state_dict(state)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert model.peer.grad_checkpointing
    with pytest.raises(ConfigError, match="checkpointing for vgg11"):
        build_empty_model(described("vgg11")).set_gradient_checkpointing()


# Counting


@pytest.mark.parametrize(("theirs", "ours"), [("vit_tiny_patch16_224", "Ti/16"), ("resnetv2_50x1_bit", "BiT-R50x1")])
def test_cost_is_counted_as_for_our_own(theirs, ours):
    """All of it is matrix products and convolutions in both, so there is nothing to differ in."""
    assert compute_cost(described(theirs, num_classes=1000, image_size=224)) == compute_cost(make_architecture(ours))


def test_cost_of_a_resnet_that_everyone_knows():
    found = compute_cost(described("resnet50"))
    assert found == (25_557_032, 2 * 4_089_184_256)
    assert compute_cost(described("resnet50"), (448, 448)).flops == pytest.approx(4 * found.flops, rel=0.001)


@pytest.mark.parametrize(("name", "maps"), [(CONVOLUTIONAL, 0), ("test_convnext", 0), (SIZED, 1)])
def test_what_a_step_keeps_is_what_autograd_keeps(name, maps):
    """Against a network with memory, where parts of the same memory have the same address."""
    whole = timm.create_model(name).train()
    constant = {t.untyped_storage().data_ptr() for t in [*whole.parameters(), *whole.buffers()]}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in constant:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    arch = described(name)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = whole(torch.randn(2, 3, *arch.image_size))
    counted = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 2
    assert logits.requires_grad
    # Attention maps are counted though fused kernels do not keep them: heads × tokens², before and after the softmax.
    blocks = len(whole.blocks) if maps else 0
    most = counted + blocks * 3 * 4 * 3 * 101**2
    assert counted <= measure_activation_bytes(arch) <= most


# Training


@pytest.mark.parametrize("name", [CONVOLUTIONAL, "test_convnext", SIZED])
def test_layer_decay_is_timms(name):
    model = filled(name)
    expected = {}
    for group in importlib.import_module("timm.optim").param_groups_layer_decay(model.peer, layer_decay=0.5):
        expected |= {id(parameter): group["lr_scale"] for parameter in group["params"]}
    groups = group_parameters(Classification(model), weight_decay=0.1, layer_decay=0.5)
    found = {id(parameter): group["scale"] for group in groups for parameter in group["params"]}
    assert found == expected
    assert found[id(model.head.weight)] == 1.0
    assert min(found.values()) < 0.25


def test_weight_decay_acts_on_kernels():
    model = filled(CONVOLUTIONAL)
    kernels = set(find_kernels(model))
    assert {name for name, parameter in model.named_parameters() if parameter.ndim > 1} == kernels
    (first, *_) = [group for group in group_parameters(Classification(model), 0.1) if group["weight_decay"]]
    assert len(first["params"]) == len(kernels)


def test_batch_norm_over_ranks_keeps_its_activations():
    model = filled(CONVOLUTIONAL)
    names, activations = list(model.state_dict()), acts(model)
    assert any(activations)
    with pytest.raises(ConfigError, match=f"{CONVOLUTIONAL}.* GPUs"):
        model.share_batch_statistics(torch.device("cpu"))
    model.share_batch_statistics(torch.device("cuda"))
    assert list(model.state_dict()) == names
    assert acts(model) == activations
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in model.modules())
    without = filled(SIZED)
    without.share_batch_statistics(torch.device("cpu"))
    assert same(without, filled(SIZED))


def acts(model: TimmModel) -> list[str]:
    return [type(part.act).__name__ for part in model.modules() if "BatchNorm" in type(part).__name__]
