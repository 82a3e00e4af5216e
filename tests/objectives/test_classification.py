"""Classification against loops over classes in float64, in training and in evaluation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import vitrail
from samples import randomise, small_vit
from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing, mix_batch
from vitrail.objectives.build import build_objective
from vitrail.objectives.classification import Classification, sigmoid_losses
from vitrail.objectives.metrics import add_sums, compute_means

CLASSES = 7
OPTIONS = {
    "kind": "classification",
    "loss": "softmax",
    "label_smoothing": 0.0,
    "target": "mean-colour",
    "corrupted": 0.5,
    "masked": 0.8,
    "swapped": 0.1,
    "hidden": 0.75,
    "normalised": True,
    "decoder_width": 32,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "mixing": Mixing(),
    "seed": 0,
}


def batch(count: int = 6, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 16, 24), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return Batch(images, {"label": labels}, torch.arange(count), torch.ones(count, dtype=torch.bool))


def objective(**options) -> Classification:
    """Of a model that does not guess the same for every image."""
    return Classification(randomise(small_vit(), scale=0.3), **options).train()


def logits_of(trained: Classification, images: torch.Tensor) -> list[list[float]]:
    with torch.no_grad():
        return trained.model(images).double().tolist()


def row_loss(loss: str, logits: list[float], target: list[float], smoothing: float = 0.0) -> float:
    """One image, one class after the other."""
    target = [share * (1 - smoothing) + smoothing / len(target) for share in target]
    if loss == "softmax":
        everything = math.log(sum(math.exp(logit) for logit in logits))
        return sum(share * (everything - logit) for share, logit in zip(target, logits, strict=True))
    yes = [1 / (1 + math.exp(-logit)) for logit in logits]
    return -sum(share * math.log(p) + (1 - share) * math.log(1 - p) for share, p in zip(target, yes, strict=True))


def row_of(label: int) -> list[float]:
    return [float(place == label) for place in range(CLASSES)]


def losses_of(
    trained: Classification, images: torch.Tensor, targets: list[list[float]], smoothing: float
) -> list[float]:
    rows = zip(logits_of(trained, images), targets, strict=True)
    return [row_loss(trained.loss, logits, target, smoothing) for logits, target in rows]


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_labels(loss, smoothing):
    trained, given = objective(loss=loss, label_smoothing=smoothing), batch()
    outcome = trained(given, key=1)
    images = (given.images.float() / 255 - 0.5) / 0.5
    expected = losses_of(trained, images, [row_of(label) for label in given.labels.tolist()], smoothing)
    assert outcome.loss.dtype == torch.float32
    assert outcome.loss.item() == pytest.approx(sum(expected) / 6, rel=1e-6)
    assert outcome.sums["loss"].tolist() == pytest.approx([sum(expected), 6], rel=1e-6)
    guesses = [max(range(CLASSES), key=row.__getitem__) for row in logits_of(trained, images)]
    right = sum(guess == label for guess, label in zip(guesses, given.labels.tolist(), strict=True))
    assert 0 < right < 6
    assert outcome.sums["accuracy"].tolist() == [right, 6]
    assert set(outcome.sums) == {"loss", "accuracy"}


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixing", [Mixing(mixup=0.8), Mixing(cutmix=1.0), Mixing(mixup=1.0, rate=0.0)])
def test_loss_of_mixed_targets(loss, smoothing, mixing):
    trained, given, foreign = objective(loss=loss, label_smoothing=smoothing, mixing=mixing), batch(), 0
    given.labels[:4] = torch.tensor(logits_of(trained, trained.images(given))[:4]).argmax(dim=1)  # not all wrong
    for key in range(12):
        outcome = trained(given, key)
        images, targets = mix_batch(trained.images(given), given.labels, CLASSES, mixing, random.Random(key))
        expected = losses_of(trained, images, targets.double().tolist(), smoothing)
        assert outcome.loss.item() == pytest.approx(sum(expected) / 6, rel=1e-6)
        guesses = [row.index(max(row)) for row in logits_of(trained, images)]
        right = sum(guess == row.index(max(row)) for guess, row in zip(guesses, targets.tolist(), strict=True))
        assert outcome.sums["accuracy"].tolist() == [right, 6]
        foreign += right != sum(guess == label for guess, label in zip(guesses, given.labels.tolist(), strict=True))
    assert bool(foreign) == bool(mixing.rate)  # the larger share is another image's at times


def test_the_key_decides_what_is_mixed_and_nothing_else_is_random():
    given = batch()
    mixed, plain = objective(mixing=Mixing(mixup=0.8, cutmix=1.0)), objective()
    assert torch.equal(mixed(given, 3).loss, mixed(given, 3).loss)
    assert len({mixed(given, key).loss.item() for key in range(10)}) == 10
    assert len({plain(given, key).loss.item() for key in range(10)}) == 1


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_gradient_is_the_difference_from_the_target(loss):
    """On the head's bias: the mean over the batch of prediction − target."""
    trained, given = objective(loss=loss, label_smoothing=0.1), batch()
    trained(given, 0).loss.backward()
    logits = torch.tensor(logits_of(trained, trained.images(given)))
    predictions = logits.softmax(dim=1) if loss == "softmax" else logits.sigmoid()
    targets = torch.tensor([row_of(label) for label in given.labels.tolist()]) * 0.9 + 0.1 / CLASSES
    torch.testing.assert_close(trained.model.head.bias.grad, (predictions - targets).mean(dim=0).float())


def test_equal_parts_of_a_batch_average_to_the_whole():
    trained, given = objective(loss="sigmoid"), batch(8)
    cuts = [slice(0, 4), slice(4, 8)]
    parts = [
        replace(given, images=given.images[cut], targets={"label": given.labels[cut]}, mask=given.mask[cut])
        for cut in cuts
    ]
    losses = [trained(part, 0).loss.item() for part in parts]
    assert trained(given, 0).loss.item() == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_is_taken_in_float32_whatever_the_products_are_in(loss):
    trained, given = objective(loss=loss), batch()
    trained.model.head.register_forward_hook(lambda *call: (call[-1] * 5).bfloat16())
    outcome = trained(given, 0)
    assert outcome.loss.dtype == torch.float32
    expected = losses_of(trained, trained.images(given), [row_of(label) for label in given.labels.tolist()], 0)
    assert outcome.loss.item() == pytest.approx(sum(expected) / 6, rel=1e-6)


def test_the_model_is_called_as_a_module():
    """Compiled and sharded models hang on that."""
    trained, calls = objective(), []
    trained.model.register_forward_hook(lambda *call: calls.append(call))
    trained(batch(), 0)
    trained.eval()(batch(), 0)
    assert len(calls) == 2
    assert trained.parts_to_compile() == [trained.model]


# ---- Sigmoid by hand -------------------------------------------------------------------------------------------------


def test_sigmoid_loss_is_summed_over_classes():
    zeros = sigmoid_losses(torch.zeros(2, 4), torch.tensor([1, 3]))
    assert zeros.tolist() == pytest.approx([4 * math.log(2)] * 2, rel=1e-6)
    # The start of the released pre-training: a bias of −10 says "no" to everything, and is wrong once.
    start = sigmoid_losses(torch.full((1, 21_843), -10.0), torch.tensor([7]))
    assert start.item() == pytest.approx(10 + 21_843 * math.log1p(math.exp(-10)), rel=3e-6)
    low = sigmoid_losses(torch.tensor([[12.0, -12.0, -14.0]]), torch.tensor([0]))
    assert low.item() == pytest.approx(2 * math.log1p(math.exp(-12)) + math.log1p(math.exp(-14)), rel=1e-5)


def test_smoothing_gives_every_class_its_share():
    loss = sigmoid_losses(torch.tensor([[2.0, -1.0]]), torch.tensor([0]), smoothing=0.2)
    yes = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))]
    expected = -(0.9 * math.log(yes[0]) + 0.1 * math.log(1 - yes[0]))
    expected -= 0.1 * math.log(yes[1]) + 0.9 * math.log(1 - yes[1])
    assert loss.item() == pytest.approx(expected, rel=1e-6)


# ---- Evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_evaluation_is_plain_and_counts_what_the_mask_says(loss):
    evaluated = objective(loss=loss, label_smoothing=0.3, mixing=Mixing(mixup=1.0)).eval()
    mask = torch.tensor([True, True, False, True, False, True, True, True])
    given = replace(batch(8), mask=mask)
    given.labels[~mask] = 0
    outcome = evaluated(given, key=3)
    counted = [place for place in range(8) if mask[place]]
    labels = given.labels.tolist()
    rows = logits_of(evaluated, evaluated.images(given))
    expected = [row_loss(loss, rows[place], row_of(labels[place])) for place in counted]
    assert outcome.loss.item() == pytest.approx(sum(expected) / 6, rel=1e-6)
    assert outcome.sums["loss"].tolist() == pytest.approx([sum(expected), 6], rel=1e-6)
    ranks = [sorted(rows[place], reverse=True).index(rows[place][labels[place]]) for place in counted]
    assert 0 in ranks
    assert max(ranks) >= 5
    assert outcome.sums["accuracy"].tolist() == [sum(rank < 1 for rank in ranks), 6]
    assert outcome.sums["top5"].tolist() == [sum(rank < 5 for rank in ranks), 6]


def test_evaluation_is_the_same_in_any_batches():
    evaluated, given = objective().eval(), batch(8)
    total = {}
    for start, stop in ((0, 3), (3, 8)):
        cut = slice(start, stop)
        part = replace(given, images=given.images[cut], targets={"label": given.labels[cut]}, mask=given.mask[cut])
        add_sums(total, evaluated(part, 0).sums)
    assert compute_means(total) == pytest.approx(compute_means(evaluated(given, 0).sums), rel=1e-6)


def test_a_batch_that_only_fills_up_counts_nothing():
    given = replace(batch(), mask=torch.zeros(6, dtype=torch.bool))
    outcome = objective().eval()(given, 0)
    assert outcome.loss.item() == 0
    assert {name: pair.tolist() for name, pair in outcome.sums.items()} == {
        "loss": [0, 0],
        "accuracy": [0, 0],
        "top5": [0, 0],
    }


@pytest.mark.parametrize(("classes", "names"), [(5, {"loss", "accuracy"}), (6, {"loss", "accuracy", "top5"})])
def test_top5_says_something_only_of_more_than_five_classes(classes, names):
    given = batch()
    given.labels.clamp_(max=classes - 1)
    assert set(Classification(small_vit(num_classes=classes)).eval()(given, 0).sums) == names


# ---- Building --------------------------------------------------------------------------------------------------------


def test_built_from_plain_values():
    mixing = Mixing(cutmix=0.5)
    built = build_objective(
        randomise(small_vit(), scale=0.3), **{**OPTIONS, "loss": "sigmoid", "label_smoothing": 0.2, "mixing": mixing}
    ).train()
    given = batch()
    same = objective(loss="sigmoid", label_smoothing=0.2, mixing=mixing)
    assert torch.equal(built(given, 4).loss, same(given, 4).loss)


def test_refusals_say_what_to_do():
    with pytest.raises(vitrail.ConfigError, match="replace_head"):
        Classification(small_vit(num_classes=0))
    with pytest.raises(vitrail.ConfigError, match="hinge"):
        Classification(small_vit(), loss="hinge")
    with pytest.raises(vitrail.ConfigError, match="label_smoothing"):
        Classification(small_vit(), label_smoothing=1.0)
    with pytest.raises(vitrail.ConfigError, match="jigsaw"):
        build_objective(small_vit(), **{**OPTIONS, "kind": "jigsaw"})
