"""A classifier in closed form, against loops in float64; and predictions that no image had a part in."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from vitrail.errors import DataError
from vitrail.evaluation import discriminant
from vitrail.evaluation.discriminant import SHRINKAGES, TEMPERATURES, Shrinkage, cross_fit, fit_discriminant
from vitrail.evaluation.linear_classifier import Standardisation
from vitrail.evaluation.linear_probe import FOLDS, assign_folds


def make_clouds(count: int, width: int, classes: int, spread: float = 1.0, seed: int = 0):
    """Gaussian clouds of unequal sizes with one covariance, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    labels[:classes] = torch.arange(classes)
    means = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64) @ mix
    return means[labels] * 3 + spread * noise, labels


def fit_by_loops(values, labels, classes, shrinkage, standardise):
    """The definition, image by image: class means, the covariance within classes, log-shares."""
    rows = [standardise(value[None])[0] for value in values]
    means, counts = [], []
    for number in range(classes):
        own = [row for row, label in zip(rows, labels, strict=True) if label == number]
        means.append(sum(own) / len(own))
        counts.append(len(own))
    within = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
    for row, label in zip(rows, labels.tolist(), strict=True):
        gap = row - means[label]
        within += torch.outer(gap, gap) / len(rows)
    precision = torch.linalg.inv(within + shrinkage.amount * torch.eye(values.shape[1], dtype=torch.float64))

    def score(value):
        x = standardise(value[None])[0]
        scores = [
            x @ precision @ mean - mean @ precision @ mean / 2 + math.log(count / len(rows))
            for mean, count in zip(means, counts, strict=True)
        ]
        return shrinkage.temperature * torch.stack(scores)

    return score


@pytest.mark.parametrize("shrinkage", [Shrinkage(1.0, 1.0), Shrinkage(0.01, 0.4), Shrinkage(30.0, 1.5)])
@pytest.mark.parametrize(("count", "width"), [(60, 5), (12, 30)], ids=["many", "fewer images than features"])
def test_the_classifier_is_its_definition(count, width, shrinkage):
    values, labels = make_clouds(count, width, classes=3)
    classifier = fit_discriminant(values, labels, 3, shrinkage)
    score = fit_by_loops(values, labels, 3, shrinkage, Standardisation.from_features(values))
    expected = torch.stack([score(value) for value in values])
    # Scores are equal up to a number that is the same for all classes, which changes no probability.
    torch.testing.assert_close(classifier.scores(values).softmax(1), expected.softmax(1), rtol=1e-7, atol=1e-10)


def test_predictions_are_by_classifiers_that_neither_saw_nor_tuned_on_the_image():
    """Nested cross-validation, written out: every fit and every choice without the fold."""
    values, labels = make_clouds(90, 6, classes=3, spread=1.5, seed=3)
    folds = assign_folds(labels)
    standardise = Standardisation.from_features(values)  # knows no labels
    candidates = [Shrinkage(amount, temperature) for amount in SHRINKAGES[::3] for temperature in TEMPERATURES[::3]]
    with pytest.MonkeyPatch.context() as patch:  # fewer candidates: the loops below take long
        patch.setattr(discriminant, "SHRINKAGES", SHRINKAGES[::3])
        patch.setattr(discriminant, "TEMPERATURES", TEMPERATURES[::3])
        found = cross_fit(values, labels, 3)

    def scores(mask, candidate, rows):
        score = fit_by_loops(values[mask], labels[mask], 3, candidate, standardise)
        return torch.stack([score(value) for value in values[rows]])

    def choose(without):
        others = [fold for fold in range(FOLDS) if fold not in without]
        losses = {
            candidate: sum(
                F.cross_entropy(
                    scores(~torch.isin(folds, torch.tensor([*without, fold])), candidate, folds == fold),
                    labels[folds == fold],
                    reduction="sum",
                ).item()
                for fold in others
            )
            for candidate in candidates
        }
        return min(losses, key=losses.__getitem__)

    assert found.shrinkage == choose([])
    fold = 2
    expected = scores(folds != fold, choose([fold]), folds == fold).softmax(1)
    mask = folds == fold
    torch.testing.assert_close(found.confidence[mask], expected.max(1).values, rtol=1e-7, atol=1e-10)
    assert torch.equal(found.guesses[mask], expected.argmax(1))
    own = expected.gather(1, labels[mask][:, None])
    torch.testing.assert_close(found.label_probability[mask], own[:, 0], rtol=1e-6, atol=1e-10)
    assert torch.equal(found.label_rank[mask], (expected > own).sum(1) + 1)


def test_the_accuracy_without_signal_is_chance():
    """Features that know nothing of the labels: tuning on what is reported would give more than chance."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(20):
        values = torch.randn(80, 40, generator=generator)
        labels = torch.arange(80) % 2  # in equal numbers: otherwise the larger class is a good guess
        found = cross_fit(values, labels, 2)
        shares.append((found.guesses == labels)[found.known].double().mean().item())
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.04)


def test_classes_of_one_image_and_of_none_in_a_fit():
    values, labels = make_clouds(40, 4, classes=3)
    values = torch.cat([values, values[:1] + 50])
    labels = torch.cat([labels, torch.tensor([3])])
    found = cross_fit(values, labels, 4)
    assert found.known.tolist() == [True] * 40 + [False]
    assert torch.isfinite(found.confidence[found.known]).all()
    with pytest.raises(DataError, match="two images"):
        cross_fit(values[:3], torch.arange(3), 3)


def test_constant_features_and_two_images_of_each_class():
    values = torch.tensor([[0.0, 1.0, 7.0], [0.1, 1.0, 7.0], [5.0, 1.0, 7.0], [5.1, 1.0, 7.0]])
    found = cross_fit(values, torch.tensor([0, 0, 1, 1]), 2)
    classifier = fit_discriminant(values, torch.tensor([0, 0, 1, 1]), 2, found.shrinkage)
    assert classifier.predict(values).tolist() == [0, 0, 1, 1]
    assert torch.isfinite(classifier.weight).all()


def test_more_features_than_axes(monkeypatch):
    monkeypatch.setattr(discriminant, "MOST_AXES", 8)
    values, labels = make_clouds(200, 30, classes=3, spread=0.2)
    found = cross_fit(values, labels, 3)
    assert (found.guesses == labels).double().mean() > 0.9
    assert fit_discriminant(values, labels, 3, found.shrinkage).weight.shape == (3, 30)


def test_a_part_of_many_images_chooses(monkeypatch):
    """Of images that are sorted by class, as in folders."""
    values, labels = make_clouds(300, 5, classes=3)
    order = labels.argsort(stable=True)
    values, labels = values[order], labels[order]
    sizes = []
    measure = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda s, t, **o: sizes.append(len(t.unique())) or measure(s, t, **o))
    whole = cross_fit(values, labels, 3)
    monkeypatch.setattr(discriminant, "MOST_SCORES", 300)
    part = cross_fit(values, labels, 3)
    assert part.known.all()
    assert min(sizes) == 3, "all classes have a say"
    assert (part.guesses == whole.guesses).double().mean() > 0.95
    assert len(list(itertools.product(SHRINKAGES, TEMPERATURES))) == 64


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_balance_takes_the_shares_out_of_the_biases_alone(balance):
    values, labels = make_clouds(60, 5, classes=3)
    shrinkage, counts = Shrinkage(1.0, 0.7), torch.bincount(labels).double()
    plain = fit_discriminant(values, labels, 3, shrinkage)
    balanced = fit_discriminant(values, labels, 3, shrinkage, balance)
    torch.testing.assert_close(balanced.weight, plain.weight)
    expected = plain.bias - 0.7 * balance * (counts / counts.sum()).log()
    torch.testing.assert_close(balanced.bias, expected)


def test_balanced_predictions_find_more_of_a_rare_class():
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 400 + [1] * 10)
    values = torch.randn(410, 4, generator=generator, dtype=torch.float64) + labels[:, None]
    found = {}
    for balance in (0.0, 1.0):
        predicted = cross_fit(values, labels, 2, balance=balance)
        found[balance] = [(predicted.guesses[labels == label] == label).double().mean().item() for label in (0, 1)]
    assert found[1.0][1] >= found[0.0][1] + 0.3
    assert found[1.0][0] >= 0.75


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_what_chooses_weighs_classes_as_the_balance_says(balance):
    """The losses of a candidate are those of a loop over images, each weighed by the size of its class."""
    values, labels = make_clouds(90, 4, classes=3)
    labels[labels == 2] = 1
    labels[:1] = 2  # a class with one image
    folds = torch.arange(90) % FOLDS
    problem = discriminant._FoldedProblem(values, labels, folds, 3, balance)
    counts = torch.bincount(labels).tolist()
    fitted = problem.fit_without([0])
    found = problem.score_candidates([0], 0)
    for amount, temperature in itertools.product(SHRINKAGES[::3], TEMPERATURES[::3]):
        weight, bias = fitted.solve(amount)
        expected = 0.0
        for value, label in zip(values[folds == 0], labels[folds == 0].tolist(), strict=True):
            scores = temperature * (weight @ value + bias)
            expected += (sum(counts) / 3 / counts[label]) ** balance * float(scores.logsumexp(0) - scores[label])
        assert found[Shrinkage(amount, temperature)] == pytest.approx(expected, rel=1e-9)
