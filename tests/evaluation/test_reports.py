"""Scores are those of a loop over single images, whatever the batches and the ranks."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.data.transforms.preprocess import prepare
from vitrail.errors import ConfigError, DataError, WeightsError
from vitrail.evaluation.evaluate import score_model
from vitrail.evaluation.figures import draw_report
from vitrail.evaluation.labels import LabelMap
from vitrail.evaluation.predictions import _accepted_matrix, _score_batch, predict_all
from vitrail.inference.batches import InferenceOptions

HERE = Path(__file__).parent
SMALL = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}


def tiny(classes: int = 10, channels: int = 1) -> vitrail.VisionTransformer:
    model = vitrail.create_model("Ti/4", in_channels=channels, num_classes=classes, seed=0, **SMALL)
    if classes:
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


@pytest.fixture(scope="module")
def model():
    found = tiny()
    found.labels = [str(number) for number in range(10)]
    return found


@pytest.fixture(scope="module")
def source():
    return open_data("digits", "val")


@pytest.fixture(scope="module")
def one_by_one(model, source):
    """Hits, hits among five and negative log-likelihoods, an image at a time."""
    hits, among_five, losses, sure = 0, 0, [], []
    for index in range(len(source)):
        sample = source.read_checked(index)
        with torch.inference_mode():
            logits = model(prepare(sample.content, model.preprocessing)[None])[0].double()
        order = logits.argsort(descending=True).tolist()
        hits += order[0] == sample.label
        among_five += sample.label in order[:5]
        losses.append(-float(logits.log_softmax(0)[sample.label]))
        sure.append((float(logits.softmax(0).max()), order[0] == sample.label))
    edges = np.linspace(0, 1, 16)
    error = 0.0
    for low, high in itertools.pairwise(edges):
        held = [pair for pair in sure if low < pair[0] <= high]
        error += abs(sum(p for p, _ in held) - sum(right for _, right in held)) / len(sure)
    return {"hits": hits, "among_five": among_five, "likelihood": np.mean(losses), "calibration": error}


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (7, 0), (64, 2), (1000, 0)])
def test_a_report_is_that_of_a_loop_over_single_images(model, source, one_by_one, batch, workers):
    report, _ = score_model(model, source, options=InferenceOptions(batch_size=batch, workers=workers, device="cpu"))
    assert report.images == len(source)
    assert round(report.top1.value * report.images) == one_by_one["hits"]
    assert round(report.top5.value * report.images) == one_by_one["among_five"]
    assert report.likelihood.value == pytest.approx(one_by_one["likelihood"], abs=1e-6)
    assert report.calibration.value == pytest.approx(one_by_one["calibration"], abs=1e-6)
    assert report.confusion.sum() == len(source)
    assert np.trace(report.confusion) == one_by_one["hits"]
    assert sum(score.hits for score in report.classes) == one_by_one["hits"]


@pytest.mark.slow
def test_two_ranks_count_what_one_counts(model, source, tmp_path):
    vitrail.save(model, tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children, outs = [], [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for rank, out in enumerate(outs):
        who = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(HERE / "scoring.py"), str(tmp_path / "model"), str(out), "33"]
        children.append(subprocess.Popen(command, env={**os.environ, **who, **where}))
    assert [child.wait(200) for child in children] == [0, 0]
    first, second = (json.loads(out.read_text()) for out in outs)
    assert (tmp_path / "rank0" / "report.json").exists()
    assert not (tmp_path / "rank1").exists()  # the first rank writes
    del first["about"], second["about"]
    assert first == second
    alone = json.loads(
        json.dumps(score_model(model, source, options=InferenceOptions(batch_size=33, device="cpu"))[0].to_dict())
    )
    for name in ("images", "top1", "top5", "confusion", "classes"):
        assert first[name] == alone[name], name
    for name in ("negative_log_likelihood", "calibration_error"):
        assert first[name]["value"] == pytest.approx(alone[name]["value"], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_places_and_likelihoods_against_a_loop(data):
    """Also with ties, and with several of the model's classes for one of the data's."""
    classes, images = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    few = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    logits = torch.tensor([[data.draw(few) for _ in range(classes)] for _ in range(images)], dtype=torch.float64)
    accepted = tuple(tuple(sorted(data.draw(st.sets(st.integers(0, classes - 1), min_size=1)))) for _ in range(classes))
    labels = torch.tensor([data.draw(st.integers(0, classes - 1)) for _ in range(images)])
    columns = _score_batch(logits, labels, _accepted_matrix(LabelMap(accepted, ""), classes))
    for row in range(images):
        scores, right = logits[row].tolist(), accepted[int(labels[row])]
        order = sorted(range(classes), key=lambda c: (-scores[c], c))
        place = 1 + min(order.index(c) for c in right)
        total = sum(np.exp(score) for score in scores)
        # Among the classes that count as right the earlier ones are not in the way of the later.
        place -= sum(c in right for c in order[: place - 1])
        likelihood = -np.log(sum(np.exp(scores[c]) for c in right) / total)
        assert columns[1][row] == order[0]
        assert columns[2][row] == pytest.approx(np.exp(scores[order[0]]) / total)
        assert columns[3][row] == pytest.approx(likelihood)
        assert columns[4][row] == place
        assert (columns[4][row] == 1) == (order[0] in right)


def test_other_classes_another_order_and_guesses_among_them():
    """Four classes of the model; the data has two of them in another order, and one that the model lacks."""
    model = tiny(4, channels=3)
    model.labels = ["ant", "bee", "cat", "dog"]
    samples = [(picture(number), number % 3) for number in range(12)]
    source = ListSource(samples)
    source.classes = ("dog", "ant", "emu")
    report, scored = score_model(model, source, options=InferenceOptions(device="cpu"))
    assert (report.images, report.left_out, len(scored)) == (8, 4, 8)
    free = {"guess": 0, "among": 0}
    for number, label in ((n, n % 3) for n in range(12) if n % 3 < 2):
        with torch.inference_mode():
            logits = model(prepare(picture(number), model.preprocessing)[None])[0]
        free["guess"] += int(logits.argmax()) == (3, 0)[label]
        free["among"] += bool(logits[(3, 0)[label]] > logits[(0, 3)[label]])
    assert round(report.top1.value * 8) == free["guess"]
    among, _ = score_model(model, source, options=InferenceOptions(device="cpu"), among=True)
    assert round(among.top1.value * 8) == free["among"]
    assert among.confusion[:, -1].sum() == 0
    others = sum(count for _, guess, count in report.confusions if guess in ("bee", "cat"))
    assert others == report.confusion[:, -1].sum() == report.foreign_guesses > 0
    assert sum(count for _, _, count in report.confusions) == 8 - free["guess"]


def test_broken_images_are_counted_not_guessed(model):
    contents = [(open_data("digits").read(index).content, index % 10) for index in range(20)]
    contents[3] = (b"broken", 3)
    source = ListSource(contents)
    source.classes = tuple(str(number) for number in range(10))
    report, _ = score_model(model, source, options=InferenceOptions(batch_size=6, device="cpu"))
    assert (report.images, report.broken) == (19, 1)
    assert dict(report.summary())["left out"] == "0 of unknown classes, 1 that cannot be read"


def test_real_labels_are_scored_beside_the_usual_ones(tmp_path):
    """Hand-worked: the model always says class 7, the labels are [7], [1, 7], [3] and none."""
    model = tiny(1000, channels=3)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.zero_()[7] = 1.0
    folder = tmp_path / "n01440764"
    folder.mkdir()
    for number in range(1, 5):
        (folder / f"ILSVRC2012_val_0000000{number}.JPEG").write_bytes(picture(number))
    (tmp_path / "n01514859").mkdir()
    (tmp_path / "n01514859" / "ILSVRC2012_val_00000005.JPEG").write_bytes(picture(5))
    (tmp_path / "real.json").write_text(json.dumps([[7], [1, 7], [3], [], [2]] + [[0]] * 49_995))
    report, _ = score_model(
        model, open_data(tmp_path), options=InferenceOptions(device="cpu"), real=tmp_path / "real.json"
    )
    assert report.top1.value == 0.0  # the folders are ImageNet's classes 0 and 8
    assert (report.real.images, report.real.without_labels) == (4, 1)
    assert report.real.accuracy.value == 2 / 4


def test_the_surest_mistakes_come_first_and_are_drawn(model, source, tmp_path):
    report, scored = score_model(model, source, options=InferenceOptions(device="cpu"), names=("a", "digits", "val"))
    confidences = [mistake.confidence for mistake in report.mistakes]
    assert confidences == sorted(confidences, reverse=True)
    answers = predict_all(model, source, LabelMap(tuple((n,) for n in range(10)), ""), InferenceOptions(device="cpu"))
    assert confidences[0] == answers.confidences[~answers.hits].max()
    paths = draw_report(report, scored, tmp_path)
    assert [path.name for path in paths] == ["confusion.png", "calibration.png", "mistakes.png"]
    again = {path: path.read_bytes() for path in tmp_path.iterdir()}
    draw_report(report, scored, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == again
    assert {path.suffix for path in again} == {".png", ".svg"}


def test_without_mistakes_there_is_no_contact_sheet(tmp_path):
    model = tiny(2)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1.0, 0.0]))
    source = ListSource([(open_data("digits").read(index).content, 0) for index in range(4)])
    source.classes = ("a", "b")
    model.labels = ("a", "b")
    report, scored = score_model(model, source, options=InferenceOptions(device="cpu"))
    assert report.top1.value == 1.0
    assert report.top5 is None
    assert [path.name for path in draw_report(report, scored, tmp_path)] == ["confusion.png", "calibration.png"]


def test_what_cannot_be_evaluated_is_said(source):
    with pytest.raises(ConfigError, match="vitrail fewshot"):
        score_model(tiny(0), source)
    broken = tiny()
    torch.nn.init.constant_(broken.head.bias, float("nan"))
    with pytest.raises(WeightsError, match="not finite"):
        score_model(broken, source, options=InferenceOptions(device="cpu"))


def test_half_precision_weights_are_evaluated_in_float32(model, source):
    half = tiny().half()
    half.labels = model.labels
    report, _ = score_model(half, source, options=InferenceOptions(device="cpu"))
    whole = tiny().half().float()
    whole.labels = model.labels
    assert report.likelihood == score_model(whole, source, options=InferenceOptions(device="cpu"))[0].likelihood


def test_too_many_broken_images_are_an_error(model):
    """Counted over all ranks, which is why the loader of one does not."""
    source = ListSource([(b"broken", 0)] * 11 + [(open_data("digits").read(index).content, 0) for index in range(10)])
    source.classes = model.labels
    with pytest.raises(DataError, match="11 of 21"):
        score_model(model, source, options=InferenceOptions(batch_size=6, device="cpu"))


def test_among_few_classes_there_is_no_top_5():
    model = tiny(6, channels=3)
    model.labels = ["ant", "bee", "cat", "dog", "emu", "fox"]
    source = ListSource([(picture(number), number % 2) for number in range(6)])
    source.classes = ("dog", "ant")
    assert score_model(model, source, options=InferenceOptions(device="cpu"))[0].top5 is not None
    assert score_model(model, source, options=InferenceOptions(device="cpu"), among=True)[0].top5 is None
