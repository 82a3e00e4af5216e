"""The examples on the page about serving, and the container file, are of the server that there is."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

import yaml

from vitrail.cli.serve import _describe_server
from vitrail.data.transforms.decode import LARGE_IMAGE
from vitrail.serving.access_log import LEVELS, MOST_WAITING, AccessRecord, format_json, format_plain
from vitrail.serving.app import OPEN_PATHS, PATHS
from vitrail.serving.metrics import ServerMetrics
from vitrail.serving.reference import SCRIPT_PATHS
from vitrail.serving.settings import ServerSettings

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/serving.md").read_text()


def test_the_kubernetes_example_is_yaml_and_fits_together():
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    deployment, service, scaler = yaml.safe_load_all(text)
    template = deployment["spec"]["template"]
    assert (
        deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"] == service["spec"]["selector"]
    )
    (container,) = template["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert template["spec"]["terminationGracePeriodSeconds"] > sleep + ServerSettings().drain_seconds
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_every_route_and_metric_stands_on_the_page():
    for route in PATHS - {"/page.css", *SCRIPT_PATHS, "/docs.css"}:
        assert route in PAGE
    text = ServerMetrics().render().decode()
    metrics = set(re.findall(r"^# TYPE (vitrail_\w+) (?!gauge\b.*created)", text, re.MULTILINE))
    assert set(re.findall(r"vitrail_[a-z_]+", PAGE)) == {name for name in metrics if not name.endswith("_created")}


def test_the_limits_are_the_ones_told():
    settings = ServerSettings()
    assert f"| bytes of a body | {settings.most_bytes // 10**6} MB |" in PAGE
    assert f"| seconds for a body | {settings.body_seconds:g} |" in PAGE
    assert f"| seconds for headers | {settings.header_seconds:g} |" in PAGE
    assert f"| images inside | `--queue` {settings.limits.queue} |" in PAGE
    assert f"| seconds to the answer | `--deadline` {settings.limits.deadline:g} |" in PAGE
    assert f"| images in one request | {settings.most_images}," in PAGE
    assert f"({settings.drain_seconds:g} s at most, or `--deadline`" in PAGE
    assert f"above {LARGE_IMAGE // 10**6} million pixels" in PAGE


def test_the_line_at_the_start_is_the_one_told():
    values = {"answers": {"pane": "200 classes"}, "url": "http://127.0.0.1:8000", "needs_token": False}
    assert f"\n{_describe_server({**values, 'limits': ServerSettings().summarise_limits()})}\n" in PAGE


def test_the_log_is_the_one_told():
    lines = re.findall(r"^\d{4}-.*$", PAGE, re.MULTILINE)
    record = AccessRecord(0, "7c1f0a52b9e84d36", "10.0.0.7", "POST", "/v1/classify", 200, 425, 0.0123, "pane", None)
    busy = record._replace(request_id="order-4711", status=429, size=112, seconds=0.0004, error="busy")
    for line, expected in zip(lines, (record, busy), strict=True):
        moment = datetime.fromisoformat(line.split(" ")[0]).timestamp()
        assert line == format_plain(expected._replace(time=moment))
    assert all(f"`{key}`" in PAGE for key in json.loads(format_json(record)))
    assert all(f"`{level}`" in PAGE for level in LEVELS)
    assert f"once {MOST_WAITING:,} lines wait" in PAGE


def test_the_container_file():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith(("#", " "))]
    assert words[0] == "FROM"
    assert {"USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"} <= set(words)
    assert lines[-1] == 'ENTRYPOINT ["vitrail", "serve", "--host", "0.0.0.0"]'
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
