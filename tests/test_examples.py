"""The examples run from end to end on a small folder of images, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vitrail

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "classify_photos.py", EXAMPLES / "classify_photos.ipynb"
RUN = "runs/photos"
CLASSES = ("zero", "one", "two")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with photos/ in it: 45 images of three handwritten digits, a folder for each class."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:150], digits.target[:150], strict=True)):
        if label < len(CLASSES):
            place = tmp_path / "photos" / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15.9).astype("uint8")).resize((48, 48)).save(place / f"{number:03}.png")
    return tmp_path


@pytest.mark.slow
def test_the_script_makes_a_classifier(folder):
    command = [sys.executable, SCRIPT, "photos/", "schedule.steps=6", "data.workers=0", "run.report=false"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    check_files(folder)
    quick, *_ = re.findall(r"([\d.]+)% of \d+ images", done.stdout)
    assert float(quick) > 80
    assert done.stdout.splitlines()[-1].split()[-2] in CLASSES


@pytest.fixture
def executed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """The notebook after all its cells have run beside photos/, with fewer training steps."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('"schedule.steps": 300', '"steps": 6, "workers": 0, "report": False')
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.mark.slow
def test_the_notebook_tells_the_same_story(folder, executed):
    check_files(folder)
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.output_type == "stream"], "the bar is no terminal's"
    pages = "".join(output.data.get("text/html", "") for output in outputs if "data" in output)
    for title in ("DataReport", "FinetuneResult", "EvaluationReport", "InspectionResult"):
        assert f"<strong>{title}</strong>" in pages
    assert "<img src=" in pages
    assert "\x1b[" not in pages
    assert "<progress" in pages


def test_the_notebook_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


def check_files(folder: Path) -> None:
    """The examples leave a run with its report, and an exported model that answers as the run's model does."""
    assert (folder / RUN / "report.html").is_file()
    assert (folder / "runs/photos.onnx").is_file()
    assert vitrail.Run(folder / RUN).is_finished
    images = sorted((folder / "photos").glob("*/*.png"))[::9]
    model, exported = (vitrail.Predictor(each) for each in (folder / RUN, folder / "runs/photos.onnx"))
    assert abs(model.probabilities(images) - exported.probabilities(images)).max() < 1e-4
