"""Reports of tasks: the numbers of a loop over single images, whatever the batches and the ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score
from tagged import NAMES, SMALL, tag_model, tagged_source

import vitrail
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.list_source import ListSource
from vitrail.data.transforms.preprocess import prepare
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.answered_images import answer_all
from vitrail.evaluation.report import compute_macro_f1, estimate_macro_f1
from vitrail.evaluation.score_task import score_task
from vitrail.inference.batches import InferenceOptions, open_model, single_rank
from vitrail.system.intervals import estimate_mean_share, wilson_interval
from vitrail.tasks.attributes import Attributes
from vitrail.tasks.levels import Levels
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import TAGS, Tags
from vitrail.tasks.task import Task

HERE = Path(__file__).parent
CPU = InferenceOptions(device="cpu")


@pytest.fixture(scope="module")
def model():
    return tag_model()


@pytest.fixture(scope="module")
def one_by_one(model):
    """(N, K) probabilities and tags, an image at a time."""
    source = tagged_source()
    with torch.inference_mode():
        images = (prepare(source.read(index).content, model.preprocessing)[None] for index in range(len(source)))
        rows = [model(image)[0].double().sigmoid().numpy() for image in images]
    return np.array(rows), source.targets(0, len(source))[TAGS] > 0


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (7, 0), pytest.param(64, 2, marks=pytest.mark.slow)])
def test_a_report_is_that_of_a_loop(model, one_by_one, batch, workers):
    values, truth = one_by_one
    report, answered = score_task(
        model, tagged_source(), options=InferenceOptions(batch_size=batch, workers=workers, device="cpu")
    )
    np.testing.assert_allclose(answered.values, values, atol=1e-6)
    each = [average_precision_score(truth[:, k], values[:, k]) for k in range(3)]
    assert report["mAP"].value == pytest.approx(np.mean(each), abs=1e-9)
    assert report["mAP"].low < report["mAP"].value < report["mAP"].high
    assert report["macro F1"].value == pytest.approx(f1_score(truth, values >= 0.5, average="macro"))
    assert (report.kind, report.images, report.broken) == ("tags", 60, 0)
    expected = torch.nn.functional.binary_cross_entropy(
        torch.tensor(values), torch.tensor(truth).double(), reduction="none"
    ).mean(1)
    np.testing.assert_allclose(answered.losses, expected, rtol=1e-4)


def test_the_worst_images_are_those_with_the_surest_wrong_tag(model, one_by_one):
    values, truth = one_by_one
    report, _ = score_task(model, tagged_source(), options=CPU)
    errors = np.where((values >= 0.5) != truth, np.abs(values - truth), 0).max(axis=1)
    assert len(report.worst) == np.count_nonzero(errors)
    assert [each.error for each in report.worst] == pytest.approx(sorted(errors[errors > 0])[::-1], abs=1e-6)
    first = report.worst[0]
    assert first.index == int(errors.argmax())
    assert first.truth == (
        ", ".join(name for name, has in zip(NAMES, truth[first.index], strict=True) if has) or "no tag"
    )
    assert set(first.answer["tags"]) == {name for name, p in zip(NAMES, values[first.index], strict=True) if p >= 0.5}


def test_the_thresholds_of_the_model_count_not_those_of_the_data():
    strict, _ = score_task(tag_model(thresholds=(0.99,) * 3), tagged_source(), options=CPU)
    plain, _ = score_task(tag_model(), tagged_source(), options=CPU)
    assert strict["mAP"] == plain["mAP"]
    assert strict["micro F1"].value != plain["micro F1"].value


def test_rows_that_are_no_targets_are_named_and_left_out(model, one_by_one):
    report = vitrail.evaluate(model, tagged_source(broken=(3, 40)), device="cpu")
    assert (report.images, report.broken) == (58, 2)
    assert [each.index for each in report.left_out] == [3, 40]
    assert "labels.csv, line 5" in report.left_out[0].reason
    assert "'brihgt' is no tag, did you mean 'bright'?" in report.left_out[0].reason
    assert "labels.csv, line 42" in repr(report)
    values, truth = (np.delete(rows, [3, 40], axis=0) for rows in one_by_one)
    each = [average_precision_score(truth[:, k], values[:, k]) for k in range(3)]
    assert report["mAP"].value == pytest.approx(np.mean(each), abs=1e-9)


def test_more_broken_rows_than_allowed_are_an_error(model):
    with pytest.raises(DataError, match="12 of 60 images cannot be used"):
        score_task(model, tagged_source(broken=tuple(range(12))), options=CPU)


def test_a_report_is_written_with_its_figures_and_reads_well(model, tmp_path):
    report = vitrail.evaluate(model, tagged_source(), device="cpu", folder=tmp_path / "out")
    assert {path.name for path in report.files} == {"report.json", "tags.png", "worst.png"}
    assert all(path.is_file() for path in report.files)
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert stored["task"] == "tags"
    assert stored["measures"][0]["name"] == "mAP"
    assert stored["measures"][0]["value"] == report["mAP"].value
    assert "mAP" in repr(report)
    assert "95% interval" in repr(report)
    html = report._repr_html_()
    assert html.count("<img") == 2
    assert "the images with the surest wrong tag" in html
    with pytest.raises(ConfigError, match="did you mean 'mAP'"):
        report["map"]


def test_targets_of_another_task_are_refused(model):
    labelled = ListSource([(np.zeros((16, 16), np.uint8), "cat")] * 3)
    with pytest.raises(DataError, match="the model answers with tags, and the data has labels"):
        vitrail.evaluate(model, labelled, device="cpu")
    classifier = vitrail.create_model("Ti/4", in_channels=1, num_classes=3, seed=0, **SMALL)
    with pytest.raises(DataError, match="the model answers with labels, and the data has tags"):
        vitrail.evaluate(classifier, tagged_source(), device="cpu")
    other = tag_model()
    other.give_task(Tags(names=("b", "c", "d"), column="tags"))
    with pytest.raises(DataError, match="the model's tags are b, c, d, and the data's are bright, rare, striped"):
        vitrail.evaluate(other, tagged_source(), device="cpu")
    with pytest.raises(ConfigError, match="among is for models that answer with one label"):
        vitrail.evaluate(model, tagged_source(), device="cpu", among=True)


@pytest.mark.slow
def test_three_ranks_report_what_one_does(model, tmp_path):
    vitrail.save(model, tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children, outs = [], [tmp_path / f"rank{rank}.json" for rank in range(3)]
    for rank, out in enumerate(outs):
        who = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(HERE / "tagged.py"), str(tmp_path / "model"), str(out), "16"]
        children.append(subprocess.Popen(command, env={**os.environ, **who, **where}))
    assert [child.wait(200) for child in children] == [0, 0, 0]
    ranks = [json.loads(out.read_text()) for out in outs]
    assert (tmp_path / "rank0" / "tags.png").exists()
    assert not (tmp_path / "rank1").exists()  # the first rank writes
    for report in ranks:
        del report["about"]
    assert ranks[0] == ranks[1] == ranks[2]
    alone = vitrail.evaluate(model, tagged_source(broken=(3, 40)), device="cpu").to_dict()
    alone = json.loads(json.dumps(alone))
    for name in ("images", "broken", "left_out"):
        assert ranks[0][name] == alone[name], name
    assert [each["index"] for each in ranks[0]["worst_images"]] == [each["index"] for each in alone["worst_images"]]
    for one, other in zip(ranks[0]["measures"], alone["measures"], strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_a_rank_without_images_answers_nothing(model):
    """The parts of all ranks are put together in the order of the source."""
    engine = open_model(model, CPU)
    answered = answer_all(engine, tagged_source(count=2), CPU, single_rank(CPU))
    assert answered.indices.tolist() == [0, 1]
    assert answered.targets[TAGS].shape == (2, 3)


def test_macro_measures_are_those_of_sklearn():
    rng = np.random.default_rng(2)
    labels = np.r_[np.zeros(50, int), np.ones(20, int), np.full(5, 2), [3, 3]]
    guesses = np.where(rng.random(len(labels)) < 0.6, labels, rng.integers(0, 5, len(labels)))
    confusion = np.zeros((5, 6), np.int64)  # the fifth class is guessed, but no image's label
    np.add.at(confusion, (labels, guesses), 1)
    assert compute_macro_f1(confusion) == pytest.approx(f1_score(labels, guesses, average="macro"))
    hits, counts = np.diagonal(confusion), confusion.sum(axis=1)
    balanced = estimate_mean_share(hits, counts)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert balanced.value == pytest.approx(balanced_accuracy_score(labels, guesses))
    assert balanced.low < balanced.value < balanced.high
    f1 = estimate_macro_f1(confusion)
    draws = [rng.integers(len(labels), size=len(labels)) for _ in range(2000)]
    drawn = [f1_score(labels[rows], guesses[rows], average="macro") for rows in draws[:400]]
    assert (f1.low, f1.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.04)


def test_a_mean_of_one_share_has_the_interval_of_that_share():
    for hits, count in ((0, 5), (3, 5), (5, 5), (98, 100)):
        found = estimate_mean_share(np.array([hits, 0]), np.array([count, 0]))
        assert found == pytest.approx((hits / count, *wilson_interval(hits, count)))


@pytest.mark.parametrize(
    ("counts", "shares"), [((5, 5, 5), (0.9, 0.5, 0.99)), ((50, 10, 3), (0.9, 0.6, 0.3)), ((20,) * 10, (0.98,) * 10)]
)
def test_the_interval_of_a_mean_share_holds_its_value_about_95_times_in_100(counts, shares):
    rng, truth = np.random.default_rng(0), np.mean(shares)
    found = [estimate_mean_share(rng.binomial(counts, shares), np.array(counts)) for _ in range(1000)]
    assert np.mean([low <= truth <= high for _, low, high in found]) > 0.9


def test_a_classifier_is_told_how_it_does_on_rare_classes():
    """90 dark images that are right, and 10 bright ones of which one is."""
    model = vitrail.create_model("Ti/4", in_channels=1, num_classes=2, seed=0, **SMALL)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1.0, 0.0]))
    model.labels = ["common", "rare"]
    images = [(np.zeros((16, 16), np.uint8), "common")] * 90 + [(np.zeros((16, 16), np.uint8), "rare")] * 10
    report = vitrail.evaluate(model, images, device="cpu")
    assert report.top1.value == 0.9
    assert report.balanced.value == 0.5
    assert report.macro_f1.value == pytest.approx((2 * 90 / 190) / 2)
    assert (report.worst_class.name, report.worst_class.accuracy.value) == ("rare", 0)
    assert "recall of the worst class, rare" in repr(report)
    stored = report.to_dict()
    assert stored["balanced_accuracy"]["value"] == 0.5
    assert stored["worst_class"]["name"] == "rare"
    assert stored["macro_f1"]["value"] == report.macro_f1.value


def measured_source(kind: str) -> AnnotatedSource:
    """Twelve grey images, and what is true of them for any other task than tags. One row is not known."""
    tasks: dict[str, Task] = {
        "numbers": Numbers(names=("age", "height"), means=(30.0, 1.7), deviations=(10.0, 0.1)),
        "levels": Levels(names=("low", "middle", "high"), column="grade"),
        "attributes": Attributes(names=("colour", "shape"), values=(("blue", "red"), ("disc", "square"))),
    }
    rng = np.random.default_rng(3)
    images = [(rng.integers(0, 255, (16, 16), np.uint8), 0) for _ in range(12)]
    rows: list[dict[str, str]] = []
    for k in range(12):
        age, height = str(20 + 2 * k), str(1.5 + 0.03 * k)
        colour, shape = ("red", "blue")[k % 2], ("disc", "square")[k // 6]
        rows.append(
            {"age": age, "height": height, "grade": ("low", "middle", "high")[k // 4], "colour": colour, "shape": shape}
        )
    rows[5] = dict.fromkeys(rows[5], "")
    return AnnotatedSource(ListSource(images), tasks[kind], rows)


def model_of(task: Task) -> vitrail.VisionTransformer:
    model = vitrail.create_model("Ti/4", in_channels=1, num_classes=0, seed=0, **SMALL).give_task(task)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "figures", "truth"),
    [
        ("numbers", {"numbers.png"}, "age 20.0, height 1.500"),
        ("levels", {"confusion.png"}, "low"),
        ("attributes", {"confusion-1.png", "confusion-2.png"}, "colour: red, shape: disc"),
    ],
)
def test_every_task_has_a_report_with_figures(kind, figures, truth, tmp_path):
    source = measured_source(kind)
    report = vitrail.evaluate(model_of(source.task), source, device="cpu", folder=tmp_path)
    assert {path.name for path in report.files} == {"report.json", "worst.png", *figures}
    assert all(path.stat().st_size > 1000 for path in report.files if path.suffix == ".png")
    assert (report.kind, report.images) == (kind, 12)
    assert report.first == source.task.measure(*values_of(source)).measures[0]
    assert 5 not in {each.index for each in report.worst}  # nothing is known of it
    errors = [each.error for each in report.worst]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0
    assert source.task.describe_target({name: each[0] for name, each in source.targets(0, 1).items()}) == truth
    assert source.task.describe_target({name: each[5] for name, each in source.targets(0, 12).items()}) == "not known"
    assert "NaN" not in json.dumps(report.to_dict())


def values_of(source: AnnotatedSource) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    _, answered = score_task(model_of(source.task), source, options=CPU)
    return answered.values, answered.targets


def test_the_largest_errors_of_numbers_come_first_in_standard_deviations():
    task = Numbers(names=("age", "height"), means=(30.0, 1.7), deviations=(10.0, 0.1))
    targets = {"numbers": np.array([[30, 1.7], [30, np.nan], [np.nan, np.nan], [30, 1.7]], np.float32)}
    values = np.array([[50, 1.7], [45, 0], [0, 0], [30, 2.0]])
    errors = task.rank_errors(values, targets, np.zeros(4))
    assert errors == pytest.approx([2, 1.5, 0, 3], abs=1e-4)


def test_levels_that_are_far_off_come_first_and_right_ones_do_not():
    task = Levels(names=("low", "middle", "high"))
    values = np.array([[0.9, 0.1, 0], [0.1, 0.1, 0.8], [0.6, 0.4, 0.0], [0.9, 0.1, 0], [0.9, 0.1, 0]])
    errors = task.rank_errors(values, {"level": np.array([0, 0, 1, 1, -1])}, np.zeros(5))
    assert np.argsort(-errors, kind="stable")[:3].tolist() == [1, 3, 2]
    assert errors[[0, 4]].tolist() == [0, 0]


def test_the_surest_wrong_value_of_an_attribute_counts():
    task = Attributes(names=("colour", "shape"), values=(("blue", "red"), ("disc", "ring", "square")))
    values = np.array([[0.9, 0.1, 0.2, 0.2, 0.6], [0.9, 0.1, 0.2, 0.2, 0.6], [0.9, 0.1, 0.2, 0.2, 0.6]])
    truth = {"attributes": np.array([[1, 0], [0, 0], [-1, 2]])}
    assert task.rank_errors(values, truth, np.zeros(3)).tolist() == [0.9, 0.6, 0]


def test_a_report_warns_of_images_that_the_model_knows(model):
    report = vitrail.evaluate(model, tagged_source(), device="cpu")
    assert "warning" not in dict(report.summary())
    for name, words in (("was_trained_on", "has learned from these"), ("chose_weights", "chose the weights")):
        changed = replace(report, **{name: True})
        assert words in dict(changed.summary())["warning"]
        assert changed.to_dict()[name]


def test_models_of_a_task_are_compared_by_its_first_measure(model):
    strict = tag_model(thresholds=(0.99,) * 3)
    classifier = vitrail.create_model("Ti/4", in_channels=1, num_classes=3, seed=0, **SMALL)
    source = tagged_source(broken=(3,))
    result = vitrail.compare_models([model, strict, classifier], source, batch_size=8, device="cpu")
    alone = vitrail.evaluate(model, source, device="cpu")
    first, second = result.rows
    assert first.measure.estimate == pytest.approx(alone["mAP"], abs=1e-6)
    assert (first.measure.name, first.top1, first.images, first.left_out) == ("mAP", None, 59, 1)
    assert second.measure.estimate == pytest.approx(first.measure.estimate)
    assert result.failures[0][1].startswith("it answers with labels, and VisionTransformer with tags")
    assert [name for name, _ in result.summary()] == ["data", *["VisionTransformer"] * 3]
    assert result.summary()[1][1].startswith(f"mAP {alone['mAP']:.2%} (95% interval ")
    assert result.summary()[-1][1].startswith("failed: it answers with labels")
    (head, *rows), *_ = result.tables().values()
    assert head[5:8] == ("mAP", "95% from", "to")
    assert len(rows[0]) == len(head)
    assert "VisionTransformer: scored without 1 of the images" in result.notes[0]
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["rows"][0]["measure"]["name"] == "mAP"
    assert stored["rows"][0]["top1"] is None
    with pytest.raises(DataError, match="the model answers with labels, and the data has tags"):
        vitrail.compare_models([classifier], source, device="cpu")
