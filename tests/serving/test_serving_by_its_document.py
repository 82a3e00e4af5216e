"""Requests drawn from the server's own OpenAPI document, right and wrong ones: every answer is as the document says."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request

import pytest
from running import command_line, expected, image, make_model
from test_serve import ask

from task_models import make_task_model
from vitrail.weights.save import save

UNDOCUMENTED = "positive_data_acceptance"
"""A check that is left out: no document can say which bytes are an image, or how many layers a model has."""


def attack(url: str, folder, requests: int) -> str:
    """Send requests by schemathesis, and return what it printed. An answer that is not documented fails."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color", "--seed", "1"]
    options = ["--max-examples", str(requests), "--exclude-checks", UNDOCUMENTED, "--continue-on-failure"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["labels", "tags", "encoder"])
def test_every_answer_is_documented(tmp_path, kind):
    if kind == "tags":
        model = save(make_task_model(kind), tmp_path / "model")
    else:
        model = make_model(tmp_path / "model", classes=7 if kind == "labels" else 0)
    with command_line("--model", f"tiny={model}") as server:
        printed = attack(server.url, tmp_path, requests=150)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            counters = answer.read().decode()
        if kind == "labels":
            best = expected(model, image(1)).max()
            assert ask(server.url, image(1))[0][1] == pytest.approx(best, abs=1e-5), "it still answers as before"
    (count,) = re.findall(r"(\d+) generated, \1 passed", printed)
    assert int(count) > 500
    statuses = set(re.findall(r'^vitrail_requests_total\{.*status="(\d+)".*\} ', counters, re.MULTILINE))
    assert {"200", "400", "404", "405", "415", "422"} <= statuses
    assert {status for status in statuses if status >= "500"} == set()
