"""Every layout of every task through every verb: check, finetune, evaluate, predict, export, serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pictures import picture
from task_tables import LAYOUTS, make_layout, write_csv

import vitrail
from vitrail.serving.app import build_app
from vitrail.serving.serve import open_served_model
from vitrail.serving.service import Service
from vitrail.serving.settings import ServerSettings

COUNT = 24
QUIET = {"run.report": False}
CASES: list[tuple[str, str, str | None]] = [
    *(("tags", layout, "tags" if layout != "csv-columns" else None) for layout in LAYOUTS),
    *(("numbers", layout, "age") for layout in LAYOUTS if layout != "csv-columns"),
    ("levels", "stars", "stars"),
    ("attributes", "two columns", "colour,shape"),
    ("labels", "one column", None),
]


def make_data(folder: Path, layout: str) -> Any:
    """Return images with targets in a layout; see `task_tables` for those of tags and numbers."""
    if layout in LAYOUTS:
        return make_layout(folder, layout)
    splits = ["train" if index < 16 else "val" for index in range(COUNT)]
    cells = {
        "stars": ("stars", [str(1 + index % 3) for index in range(COUNT)]),
        "two columns": (
            "colour,shape",
            [f"{'red' if index % 2 else 'blue'},{'round' if index % 3 else 'square'}" for index in range(COUNT)],
        ),
        "one column": ("label", ["cat" if index % 2 else "dog" for index in range(COUNT)]),
    }
    head, rows = cells[layout]
    lines = [f"{index}.png,{row},{split}" for index, (row, split) in enumerate(zip(rows, splits, strict=True))]
    return write_csv(folder, f"image,{head},split", lines, images=COUNT)


def ask_server(model: vitrail.VisionTransformer, image: bytes) -> dict[str, Any]:
    """Return what POST /v1/predict answers for an image."""

    async def talk() -> httpx.Response:
        service = Service({"model": open_served_model("model", model)}, ServerSettings(threads=1))
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await service.start()
            answer = await client.post("/v1/predict", content=image, headers={"content-type": "image/png"})
            await service.close()
        return answer

    answer = asyncio.run(talk())
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize(("task", "layout", "labels"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_every_layout_goes_through_every_verb(tmp_path, monkeypatch, task, layout, labels):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    data = make_data(tmp_path / "data", layout)
    named = {} if task == "labels" else {"task": task, "labels": labels}
    sizes = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 0}
    start = vitrail.create_model("Ti/8", seed=0, **sizes)

    checked = vitrail.check_data(data, workers=1, **named)
    assert not checked.failed, checked

    result = vitrail.finetune(data, start, quick=True, settings=QUIET, **named)
    assert result.model.task.kind == task

    columns = {"labels": labels} if task != "labels" and labels is not None else {}
    split = None if layout == "list" else "val"
    # a list has the order of its pairs, so the model has learned from these images
    report = vitrail.evaluate(result.model, data, split, **columns)
    assert report.images == (COUNT if layout == "list" else 8)
    assert json.dumps(report.to_dict())

    image = picture(1)
    (predicted,) = vitrail.predict([image], result.model).to_dict()["predictions"]
    exported = vitrail.export(result.model, tmp_path / "model.onnx")
    (by_file,) = vitrail.predict([image], exported.path).to_dict()["predictions"]
    served = ask_server(result.model, image)
    if task == "labels":
        names = [[name for name, _ in each["labels"]] for each in (predicted, by_file)]
        assert names[0] == names[1] == [line["name"] for line in served["lines"]]
        return
    assert predicted["task"] == by_file["task"] == served["task"] == task
    assert flatten(by_file["answer"]) == pytest.approx(flatten(predicted["answer"]), rel=1e-3, abs=1e-4)
    assert flatten(served["answer"]) == pytest.approx(flatten(predicted["answer"]), rel=1e-3, abs=1e-4)


def flatten(answer: Any, name: str = "") -> dict[str, float]:
    """Return the numbers of an answer by their places in it; a word is a place of its own."""
    if isinstance(answer, dict):
        return {key: value for part, each in answer.items() for key, value in flatten(each, f"{name}/{part}").items()}
    if isinstance(answer, list):
        return {
            key: value for part, each in enumerate(answer) for key, value in flatten(each, f"{name}/{part}").items()
        }
    return {name: answer} if isinstance(answer, float) else {f"{name}={answer}": 0.0}
