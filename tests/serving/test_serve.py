"""`serve` from Python: its events, its models, its end; and that its answers are those of the predictor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from running import expected, free_port, image, make_model, running

import vitrail
from vitrail.errors import ConfigError, WeightsError
from vitrail.exporting.export import export
from vitrail.serving.serve import name_models, open_served_model, serve
from vitrail.serving.served_model import ImageRequest

PROGRAM = """
import json, sys, vitrail
from vitrail.serving.serve import serve

def print_event(kind, values):
    print("serving" if kind == "ready" else "event", json.dumps([kind, values]), flush=True)

model = vitrail.load(sys.argv[1])
weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
serve({"mine": model, "named": sys.argv[1]}, port=int(sys.argv[3]), threads=1, access_log="off", on_event=print_event)
assert all(model.state_dict()[name].equal(tensor) for name, tensor in weights.items())
print("unchanged", "vitrail.training" not in sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def ask(url: str, content: bytes) -> list[tuple[str, float]]:
    request = urllib.request.Request(f"{url}/v1/classify?top=7", content, {"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return [(row["label"], row["probability"]) for row in json.load(answer)["labels"]]


def interrupt_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_this_thread() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.slow
def test_events_and_a_loaded_model(folder):
    with running("-c", PROGRAM, str(folder)) as server:
        rows = ask(server.url, image(1))
        np.testing.assert_allclose([share for _, share in rows], np.sort(expected(folder, image(1)))[::-1], atol=1e-5)
    events = [json.loads(line.split(" ", 1)[1]) for line in server.said[:-1]]
    assert events == [
        ["loading", {"name": "mine", "model": "mine"}],
        ["loading", {"name": "named", "model": str(folder)}],
        [
            "ready",
            {
                "models": ["mine", "named"],
                "classes": {"mine": 7, "named": 7},
                "answers": {"mine": "7 classes", "named": "7 classes"},
                "url": server.url,
                "needs_token": False,
                "limits": {"images": 256, "bytes": 20_000_000, "pixels": 40_000_000, "seconds": 10.0},
            },
        ],
        ["stopped", {}],
    ]
    assert server.said[-1] == "unchanged True\n"


@pytest.mark.parametrize("interrupt", [interrupt_process, interrupt_this_thread])
def test_inside_an_event_loop_as_in_a_notebook(folder, interrupt):
    """A cell runs inside a loop in the main thread. The system may interrupt it in any thread."""
    port, answers = free_port(), []

    def listen(kind, values):
        if kind == "ready":
            threading.Thread(target=visit, args=(values["url"],)).start()

    def visit(url):
        try:
            answers.append(ask(url, image(2)))
        finally:  # or the server would run on
            interrupt()

    async def run_cell():
        serve(folder, port=port, threads=1, on_event=listen)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(run_cell())  # unlike asyncio.run, it leaves SIGINT alone, as a notebook does
    finally:
        loop.close()
        signal.signal(signal.SIGINT, handler)
    np.testing.assert_allclose([share for _, share in answers[0]], np.sort(expected(folder, image(2)))[::-1], atol=1e-5)


def test_an_error_of_the_listener_ends_the_call(folder):
    port = free_port()

    def listen(kind, values):
        if kind == "ready":
            raise LookupError(kind)

    with pytest.raises(LookupError):
        serve(folder, port=port, threads=1, on_event=listen)
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1)
        except urllib.error.URLError:
            return
        time.sleep(0.1)
    pytest.fail("the server still answers")


def test_names_of_models(folder):
    model = vitrail.load(folder)
    assert name_models(model) == {"model": model}
    assert name_models(Path("a/tiny.onnx")) == {"tiny": "a/tiny.onnx"}
    assert name_models([model, "x=pane"]) == {"model": model, "x": "pane"}
    assert name_models({"a": model, "b": "pane"}) == {"a": model, "b": "pane"}
    for wrong in ([model, model], {}, {"a b": model}):
        with pytest.raises(ConfigError):
            name_models(wrong)


def test_errors_come_before_the_server(tmp_path):
    with pytest.raises(WeightsError, match="nowhere"):
        serve(tmp_path / "nowhere", port=free_port(), on_event=lambda kind, values: None)
    with pytest.raises(ConfigError, match="int8"):
        serve("pane", port=free_port(), precision="int7", on_event=lambda kind, values: None)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("torch", "fp32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("torch", "int8"), ("onnx", "fp32"))),
    ],
)
def test_the_server_gives_the_probabilities_of_the_predictor(folder, tmp_path, kind, precision):
    served = folder
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
        served = tmp_path / "tiny.onnx"
        export(vitrail.load(folder), served, "onnx")
    contents = [image(1), image(2, (300, 10)), image(3, (64, 48), "JPEG"), image(4, (33, 57), "GIF")]
    predictor = vitrail.Predictor(served, device="cpu", precision=precision, batch_size=1)
    model = open_served_model("tiny", served, precision=precision)
    assert model.labels == predictor.labels
    for content in contents:
        (rows,) = model.compute([model.decode(ImageRequest("classify", content, 7))])
        found, want = dict(rows), dict(predictor(content, top=7))
        assert found.keys() == want.keys()
        np.testing.assert_allclose([found[label] for label in want], list(want.values()), atol=1e-5)
