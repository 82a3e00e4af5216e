"""The average of weights against its recurrence, and the exchange of the two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.model.create import create_model
from vitrail.training.averaging import Average

STEM = [(8, 3, 2, "batch", "relu"), (8, 3, 2, "batch", "relu")]


class Numbers(nn.Module):
    """A parameter, a buffer of each kind, and one that is not saved."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    @torch.no_grad()
    def move(self, generator: torch.Generator) -> None:
        for tensor in (self.weight, self.mean):
            tensor += torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        self.count += 3


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in module.state_dict().items()}


@settings(max_examples=25, deadline=None)
@given(
    decay=st.floats(0.01, 0.99999),
    has_ramp=st.booleans(),
    first=st.integers(0, 200),
    count=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_the_recurrence_in_float64(decay, has_ramp, first, count, seed):
    module, generator = Numbers(), torch.Generator().manual_seed(seed)
    average = Average(module, decay, has_ramp)
    weight, mean = module.weight.detach().numpy().copy(), module.mean.numpy().copy()
    for step in range(first, first + count):
        module.move(generator)
        average.update(step)
        kept = min(decay, (1 + step) / (10 + step)) if has_ramp else decay
        weight = kept * weight + (1 - kept) * module.weight.detach().numpy()
        mean = kept * mean + (1 - kept) * module.mean.numpy()
        np.testing.assert_allclose(average.tensors["weight"].numpy(), weight, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(average.tensors["mean"].numpy(), mean, rtol=1e-12, atol=1e-12)
        assert average.tensors["count"] == module.count
    assert average.tensors.keys() == {"weight", "mean", "count"}


def test_the_early_decay_worked_by_hand():
    module = Numbers()
    average = Average(module, 0.5)
    with torch.no_grad():
        module.weight.fill_(10.0)
    average.update(0)  # keeps 1/10 of itself
    assert average.tensors["weight"].tolist() == pytest.approx([9.1, 8.8, 9.3])
    average.update(3)  # 4/13
    assert average.tensors["weight"].tolist() == pytest.approx(
        [10 - 0.9 * 4 / 13, 10 - 1.2 * 4 / 13, 10 - 0.7 * 4 / 13]
    )
    before = average.tensors["weight"].clone()
    average.update(8)  # 9/18 is the decay itself; from here on it stays
    average.update(1_000_000)
    assert average.tensors["weight"].tolist() == pytest.approx((10 - (10 - before) / 4).tolist())


def test_without_the_ramp_20_000_steps_at_0_9999_are_at_0_9999():
    """The paper's best results on ImageNet; with the ramp the share was 0.99955 after the last step."""
    average = Average(Numbers(), 0.9999, has_ramp=False)
    assert [1 - average.blend_weight(step) for step in (0, 19_999)] == pytest.approx([0.9999, 0.9999], abs=1e-12)
    assert 1 - Average(Numbers(), 0.9999).blend_weight(19_999) == pytest.approx(0.99955, abs=1e-5)


def test_nothing_is_shared_with_the_module():
    module = Numbers()
    average = Average(module, 0.9)
    module.move(torch.Generator().manual_seed(0))
    assert average.tensors["weight"].tolist() == [1, -2, 3]
    assert average.tensors["count"] == 0
    assert not average.tensors["weight"].requires_grad


def moved(steps: int = 3) -> tuple[Numbers, Average]:
    module, generator = Numbers(torch.float32), torch.Generator().manual_seed(7)
    average = Average(module, 0.9)
    for step in range(steps):
        module.move(generator)
        average.update(step)
    module.move(generator)
    return module, average


def test_in_place_swaps_and_swaps_back_bit_for_bit():
    module, average = moved()
    own, averaged = bits(module), {name: tensor.numpy().tobytes() for name, tensor in average.tensors.items()}
    place, parameter = module.weight.data_ptr(), module.weight
    with average.use_in_module():
        assert bits(module) == averaged
        assert module.count == 9
        assert average.tensors["weight"].numpy().tobytes() == own["weight"]
    assert bits(module) == own
    assert module.count == 12
    assert {name: tensor.numpy().tobytes() for name, tensor in average.tensors.items()} == averaged
    assert module.weight is parameter  # the optimiser's own
    assert module.weight.data_ptr() == place


def test_an_exception_swaps_back_too():
    module, average = moved()
    own, averaged = bits(module), average.tensors["weight"].clone()
    with pytest.raises(KeyboardInterrupt), average.use_in_module():
        raise KeyboardInterrupt
    assert bits(module) == own
    assert torch.equal(average.tensors["weight"], averaged)


def test_a_convolutional_stem_with_batch_norm():
    """Running statistics are averaged, the count of batches is copied; the average computes as a model of its own."""
    options = {"image_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16, "num_classes": 3}
    model = create_model("Ti/4", seed=0, conv_stem=STEM, **options)
    average = Average(model, 0.7)
    expected = {name: tensor.double() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        logits = model(torch.randn(4, 3, 8, 8, generator=generator))
        nn.functional.cross_entropy(logits, torch.arange(4) % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
        kept = min(0.7, (1 + step) / (10 + step))
        for name, tensor in model.state_dict().items():
            expected[name] = kept * expected[name] + (1 - kept) * tensor.double()
    counts = [name for name in expected if name.endswith("num_batches_tracked")]
    assert len(counts) == 2
    for name in counts:
        assert average.tensors[name].dtype == torch.int64
        assert average.tensors[name] == 8
        del expected[name]
    for name, tensor in expected.items():
        torch.testing.assert_close(average.tensors[name].double(), tensor, rtol=1e-5, atol=1e-6)
    images = torch.randn(2, 3, 8, 8, generator=generator)
    other = create_model("Ti/4", seed=1, conv_stem=STEM, **options)
    other.load_state_dict(average.tensors)
    model.eval()
    with average.use_in_module():
        inside = model(images)
    assert torch.equal(inside, other.eval()(images))
    assert not torch.equal(inside, model(images))
