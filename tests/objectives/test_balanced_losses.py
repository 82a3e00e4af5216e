"""Offsets and weights of classes against the papers' formulas, and the balanced losses against loops, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import recall_score

from samples import randomise, small_vit
from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.objectives.balance import Balance, compute_logit_offsets, compute_loss_weights
from vitrail.objectives.classification import Classification
from vitrail.objectives.metrics import compute_means

COUNTS = [500, 100, 40, 7, 3, 1, 60]
CLASSES = len(COUNTS)
SIZES = st.lists(st.integers(1, 10**7), min_size=2, max_size=20)


def make_batch(count: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 16, 24), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return Batch(images, {"label": labels}, torch.arange(count), torch.ones(count, dtype=torch.bool))


def make_objective(kind: str = "none", strength: float = 1.0, drawn=None, **options) -> Classification:
    """Of a model that does not guess the same for every image."""
    balance = Balance(kind, strength, COUNTS, drawn)
    return Classification(randomise(small_vit(), scale=0.3), balance=balance, **options).train()


def log_softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    total = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - total for logit in logits]


# ---- From counts to numbers ------------------------------------------------------------------------------------------


@given(counts=SIZES, strength=st.floats(0, 3))
@settings(max_examples=100, deadline=None)
def test_offsets_are_the_logarithms_of_the_shares(counts, strength):
    expected = [strength * math.log(count / sum(counts)) for count in counts]
    assert compute_logit_offsets(counts, strength).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(counts=SIZES, strength=st.floats(0, 3))
@settings(max_examples=100, deadline=None)
def test_weights_are_one_over_the_effective_number_and_one_on_average(counts, strength):
    effective = [math.fsum(0.9999**k for k in range(count)) if count < 2000 else None for count in counts]
    effective = [(1 - 0.9999**n) / (1 - 0.9999) if e is None else e for e, n in zip(effective, counts, strict=True)]
    weights = compute_loss_weights(counts, strength)
    ratios = [(effective[0] / each) ** strength for each in effective]
    assert (weights / weights[0]).tolist() == pytest.approx(ratios, rel=1e-9)
    assert np.average(weights, weights=counts) == pytest.approx(1)


def test_equal_classes_and_no_strength_change_nothing():
    for counts, strength in (([30, 30, 30], 1.0), (COUNTS, 0.0)):
        offsets = compute_logit_offsets(counts, strength)
        assert np.ptp(offsets) == pytest.approx(0, abs=1e-12)
        assert compute_loss_weights(counts, strength) == pytest.approx(np.ones(len(counts)))


def test_a_class_without_images_counts_as_one_image():
    assert compute_logit_offsets([5, 0]).tolist() == compute_logit_offsets([5, 1]).tolist()
    assert compute_loss_weights([5, 0]).tolist() == compute_loss_weights([5, 1]).tolist()


# ---- In training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["logits", "loss"])
def test_the_loss_is_that_of_a_loop(kind, strength, smoothing):
    trained, batch = make_objective(kind, strength, label_smoothing=smoothing), make_batch()
    with torch.no_grad():
        logits = trained.model(trained.images(batch)).double().tolist()
    losses = []
    for row, label in zip(logits, batch.labels.tolist(), strict=True):
        offsets = compute_logit_offsets(COUNTS, strength) if kind == "logits" else np.zeros(CLASSES)
        weight = compute_loss_weights(COUNTS, strength)[label] if kind == "loss" else 1.0
        logs = log_softmax([logit + float(offset) for logit, offset in zip(row, offsets, strict=True)])
        spread = smoothing * sum(logs) / CLASSES
        losses.append(-weight * ((1 - smoothing) * logs[label] + spread))
    assert trained(batch, 0).loss.item() == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_of_a_mixed_image_each_part_has_the_weight_of_its_class(loss):
    trained = make_objective("loss", loss=loss, label_smoothing=0.1)
    logits = torch.randn(1, CLASSES, generator=torch.Generator().manual_seed(1))
    alone = [trained.training_losses(logits, torch.tensor([label])).item() for label in (0, 5)]
    target = torch.zeros(1, CLASSES)
    target[0, 0], target[0, 5] = 0.3, 0.7
    assert trained.training_losses(logits, target).item() == pytest.approx(0.3 * alone[0] + 0.7 * alone[1], rel=1e-5)
    weights = compute_loss_weights(COUNTS)
    plain = make_objective(loss=loss, label_smoothing=0.1).training_losses(logits, torch.tensor([5])).item()
    assert alone[1] == pytest.approx(weights[5] * plain, rel=1e-5)


def test_mixing_is_trained_in_every_kind():
    batch = make_batch()
    losses = {
        kind: make_objective(kind, mixing=Mixing(mixup=0.8, cutmix=1.0))(batch, 3).loss.item()
        for kind in ("none", "logits", "loss")
    }
    assert all(math.isfinite(loss) for loss in losses.values())
    assert len(set(losses.values())) == 3


def test_no_balance_is_plain_training_bit_for_bit():
    batch, model = make_batch(), randomise(small_vit(), scale=0.3)
    plain, told = (Classification(model, balance=balance).train() for balance in (None, Balance()))
    assert plain(batch, 0).loss.item() == told(batch, 0).loss.item()
    assert dict(plain.named_buffers()).keys() == dict(told.named_buffers()).keys() == {"mean", "std"}


def test_sampling_leaves_to_the_loss_only_what_is_still_uneven():
    level = make_objective("logits", drawn=[500] * CLASSES)
    batch = make_batch()
    assert level(batch, 0).loss.item() == pytest.approx(make_objective()(batch, 0).loss.item(), rel=1e-6)


def test_it_learns_what_an_image_shows_and_not_how_common_it_is():
    """The best logits without any image: those of plain training are the shares, those of a balanced one are level."""
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(COUNTS))
    for kind, is_level in (("none", False), ("logits", True), ("loss", True)):
        trained = make_objective(kind)
        logits = torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

        def evaluate(trained=trained, logits=logits, optimizer=optimizer):
            optimizer.zero_grad()
            loss = trained.training_losses(logits.expand(len(labels), -1), labels).mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)
        found = logits.detach().softmax(dim=0)
        expected = torch.full((CLASSES,), 1 / CLASSES) if is_level else torch.tensor(COUNTS) / sum(COUNTS)
        # β = 0.9999 does not quite level the largest class: its 500 images count as 488.
        torch.testing.assert_close(found, expected.double(), rtol=0.05, atol=1e-3)


# ---- In evaluation ---------------------------------------------------------------------------------------------------


def test_evaluation_sees_plain_logits_and_also_measures_every_class_alike():
    batch = replace(make_batch(), mask=torch.arange(12) != 4)
    results = {}
    for kind in ("none", "logits", "loss"):
        trained = make_objective(kind).eval()
        results[kind] = compute_means(trained(batch, 0).sums)
    balanced = results["logits"].pop("balanced_accuracy")
    assert results["loss"].pop("balanced_accuracy") == balanced
    assert results["logits"] == results["loss"] == results["none"]
    with torch.no_grad():
        guesses = make_objective().model(trained.images(batch)).argmax(dim=1)
    seen = batch.labels[batch.mask]
    recalls = recall_score(seen, guesses[batch.mask], labels=seen.unique(), average="macro")
    assert balanced == pytest.approx(recalls, rel=1e-9)


def test_a_model_that_only_knows_the_common_class_is_right_about_one_class_of_two():
    """However rare the other was in training: what counts is how many of its images are looked at."""
    objective = Classification(small_vit(num_classes=2), balance=Balance("logits", counts=[1000, 10])).eval()
    with torch.no_grad():
        objective.model.head.bias.copy_(torch.tensor([100.0, 0.0]))
    batch = replace(make_batch(), targets={"label": torch.arange(12) % 2})
    assert compute_means(objective(batch, 0).sums)["balanced_accuracy"] == 0.5


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_a_sentence():
    with pytest.raises(ConfigError, match=r'give balance = "loss", or loss = "softmax"'):
        make_objective("logits", loss="sigmoid")
    with pytest.raises(ConfigError, match="give none, loss or logits"):
        Balance("weights", counts=COUNTS)
    with pytest.raises(ConfigError, match="from 0 on"):
        Balance("loss", -1.0, COUNTS)
    with pytest.raises(ConfigError, match="needs the number of images"):
        Balance("loss")
    with pytest.raises(ConfigError, match="counts of 3 classes"):
        Classification(small_vit(), balance=Balance("loss", counts=[1, 2, 3]))
