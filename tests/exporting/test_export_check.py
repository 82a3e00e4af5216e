"""The comparison of an export with its model: what passes, what does not, and what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import made

from vitrail.errors import ExportError
from vitrail.exporting.check import compare_with_model
from vitrail.exporting.graphs import build_graph
from vitrail.exporting.images import pick_images
from vitrail.exporting.place import write_atomically
from vitrail.inspection.images import InspectionImages


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("vitrail.exporting.check.TIMED", 1)


def compared(graph, spoil, kind="onnx", picked=None, given=False):
    """The check of an export that gives spoil(inputs, what the graph gives)."""

    @torch.inference_mode()
    def run(inputs):
        return spoil(inputs, graph.module(inputs))

    picked = picked or pick_images(graph, None, 9)
    facts = {"path": Path("model.onnx"), "export_bytes": 1, "model_bytes": 1}
    return compare_with_model(kind, graph, run, picked, given=given, **facts)


def as_it_is(inputs, outputs):
    return outputs


@pytest.mark.parametrize("kind", ["onnx", "onnx-int8"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_is_found_in_any_batch(kind, wrong):
    graph = build_graph(made())
    compared(graph, as_it_is, kind)
    with pytest.raises(ExportError, match="no numbers"):
        compared(graph, lambda inputs, outputs: outputs * wrong if len(inputs) > 1 else outputs, kind)


@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_embeddings_in_int8_are_held_to_their_direction(with_preprocessing):
    graph = build_graph(made(num_classes=0), with_preprocessing)
    checked = compared(graph, lambda inputs, outputs: 1.01 * outputs, "onnx-int8")
    assert checked.cosine == pytest.approx(1)
    assert checked.agreement is None
    for spoil in (lambda inputs, outputs: 0 * outputs, lambda inputs, outputs: outputs.flip(1)):
        with pytest.raises(ExportError, match=r"cosine .*0\.95"):
            compared(graph, spoil, "onnx-int8")


def test_probabilities_of_many_classes_are_small_and_must_still_be_right():
    graph = build_graph(made(num_classes=10_000), with_preprocessing=True)
    checked = compared(graph, as_it_is)
    assert checked.relative
    assert checked.max_difference <= checked.tolerance
    with pytest.raises(ExportError, match=r"0\.02"):
        compared(graph, lambda inputs, outputs: outputs.flip(1))


def test_each_image_is_counted_once():
    """Ten images, of which the first is guessed otherwise wherever it is seen."""
    graph = build_graph(made())
    numbers = [torch.full((3, 16, 16), 20 * number, dtype=torch.uint8) for number in range(10)]

    def spoil(inputs, outputs):
        first = (inputs == -1).flatten(1).all(dim=1, keepdim=True)
        return torch.where(first, -outputs, outputs)

    checked = compared(graph, spoil, "onnx-int8", InspectionImages([], numbers, "", "ten images", ()))
    assert checked.agreement == 0.9
    assert checked.images == 10


def test_images_of_any_size_are_counted_at_several():
    """At one of four sizes every guess is wrong, a quarter of the images: int8 is refused."""
    graph = build_graph(made(), dynamic_size=True)
    with pytest.raises(ExportError, match="guesses otherwise"):
        compared(
            graph,
            lambda inputs, outputs: -outputs if inputs.shape[2] == 20 else outputs,
            "onnx-int8",
            pick_images(graph, None, 32),
        )


@pytest.mark.parametrize(("count", "notes"), [(29, 1), (30, 0)])
def test_few_images_are_said_to_say_little(count, notes):
    graph = build_graph(made())
    picked = InspectionImages([], pick_images(graph, None, 128).measured[:count], "", "some", ())
    checked = compared(graph, as_it_is, "onnx-int8", picked, given=True)
    assert len(checked.notes) == notes
    assert compared(graph, as_it_is, "onnx", picked, given=True).notes == ()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), r"model.onnx cannot be made: No space left on device \(beside it, or"),
        (OSError(28, "No space left on device", "/there/plain.onnx"), r"cannot be made: .* \(/there/plain.onnx\)"),
    ],
)
def test_what_fails_on_the_way_is_not_laid_on_the_target(tmp_path, error, told):
    with pytest.raises(ExportError, match=told), write_atomically(tmp_path / "model.onnx"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExportError, match=r"model.onnx"),
        write_atomically(tmp_path / "file" / "model.onnx"),
    ):
        pass
