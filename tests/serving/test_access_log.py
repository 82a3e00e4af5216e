"""The access log: its lines, its levels, request ids; and that no state of stderr harms a request."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime

import httpx
import pytest
from running import COMMAND, command_line, free_port, image, make_model

from vitrail.errors import ConfigError
from vitrail.serving import access_log
from vitrail.serving.access_log import (
    GATHER_SECONDS,
    AccessLog,
    AccessRecord,
    choose_level,
    choose_request_id,
    format_json,
    format_plain,
)
from vitrail.serving.settings import ServerSettings

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC).timestamp()
RECORD = AccessRecord(MOMENT, "id-1", "10.0.0.1", "POST", "/v1/classify", 200, 512, 0.01234, "pane", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_plain_line():
    start = "2026-01-02T03:04:05.678Z info 10.0.0.1 POST /v1/classify 200 512 B 12.3 ms"
    assert format_plain(RECORD) == f"{start} model=pane id=id-1"
    refused = RECORD._replace(status=429, model=None, error="busy")
    assert format_plain(refused).endswith("429 512 B 12.3 ms error=busy id=id-1")


def test_a_json_line():
    assert json.loads(format_json(RECORD)) == {
        "time": "2026-01-02T03:04:05.678Z",
        "level": "info",
        "request_id": "id-1",
        "client": "10.0.0.1",
        "method": "POST",
        "path": "/v1/classify",
        "status": 200,
        "bytes": 512,
        "ms": 12.34,
        "model": "pane",
        "error": None,
    }


@pytest.mark.parametrize("path", ["/a\nb", "/a\r\n2026 info fake", "/\x1b[31mred", "/a b", "/\u2028", "/\udcff", "/\0"])
def test_a_path_cannot_break_the_line_or_speak_to_the_terminal(path):
    plain, as_json = format_plain(RECORD._replace(path=path)), format_json(RECORD._replace(path=path))
    for line in (plain, as_json):
        assert line.isascii()
        assert line.isprintable()
    assert len(plain.split(" ")) == len(format_plain(RECORD).split(" "))


def test_a_long_path_is_cut():
    assert len(format_plain(RECORD._replace(path="/" + "x" * 100_000))) < 400


@pytest.mark.parametrize(
    ("path", "status", "error", "level"),
    [
        ("/v1/classify", 200, None, "info"),
        ("/v1/classify", 499, None, "info"),
        ("/v1/classify", 429, "busy", "warning"),
        ("/v1/classify", 500, "failed", "error"),
        ("/", 200, None, "info"),
        ("/page.js", 200, None, "debug"),
        ("/other.js", 404, "not_found", "warning"),
        ("/healthz", 200, None, "debug"),
        ("/readyz", 503, "starting", "debug"),
        ("/healthz", 503, "failed", "error"),
        ("/metrics", 200, None, "debug"),
        ("/metrics", 401, "unauthorized", "warning"),
    ],
)
def test_levels(path, status, error, level):
    assert choose_level(RECORD._replace(path=path, status=status, error=error)) == level


def test_ids_are_taken_over_only_if_they_are_safe():
    def choose(*values: bytes) -> str:
        return choose_request_id([(b"host", b"x"), *((b"x-request-id", value) for value in values)])

    for good in (b"a", b"7b2c8a3e-0f1d-4c55-9a8e-1f2e3d4c5b6a", b"Root=1-67891233-abc", b"x" * 128):
        assert choose(good) == good.decode()
    made = [choose(), choose(b""), choose(b"a b"), choose(b"a\tb"), choose(b"x" * 129), choose(b"\xff"), choose(b'a"b')]
    made += [choose(b"one", b"two")]
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in made)
    assert len(set(made)) == len(made)


def test_settings_name_the_nearest_word():
    with pytest.raises(ConfigError, match="'plain'"):
        ServerSettings(access_log="plane")
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        ServerSettings(log_level="loud")


@pytest.mark.parametrize(
    ("line_format", "level", "expected"),
    [("plain", "info", 2), ("json", "debug", 3), ("plain", "warning", 1), ("plain", "error", 0), ("off", "debug", 0)],
)
def test_what_is_written(monkeypatch, line_format, level, expected):
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())

    async def answer_three() -> None:
        log = AccessLog(line_format, level)
        for record in (RECORD, RECORD._replace(path="/healthz"), RECORD._replace(status=429, error="busy")):
            log.add(record)
        await asyncio.sleep(3 * GATHER_SECONDS)

    asyncio.run(answer_three())
    lines = written.getvalue().splitlines()
    assert len(lines) == expected
    assert all((line[0] == "{") == (line_format == "json") for line in lines)


@pytest.mark.parametrize("line_format", ["plain", "json"])
def test_a_stderr_that_nobody_reads_holds_up_nothing(monkeypatch, line_format):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:  # until it is full
            os.write(writer, b"#" * 65_536)
    os.set_blocking(writer, True)
    monkeypatch.setattr(access_log, "MOST_WAITING", 1000)

    async def answer_many() -> None:
        log = AccessLog(line_format, "info")
        for _ in range(1500):
            log.add(RECORD)
        started = time.monotonic()
        await asyncio.sleep(3 * GATHER_SECONDS)  # the pipe is tried, and is full
        assert time.monotonic() - started < 2
        thread = threading.Thread(target=lambda: received.append(read_all(reader)))
        thread.start()
        await asyncio.sleep(10 * GATHER_SECONDS)
        log.close()
        stream.close()
        thread.join()

    received: list[bytes] = []
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        asyncio.run(answer_many())
    os.close(reader)
    *lines, last = received[0].decode().lstrip("#").splitlines()
    assert lines == [(format_json if line_format == "json" else format_plain)(RECORD)] * 1000
    assert "500 requests are not" in (json.loads(last)["message"] if line_format == "json" else last)


def read_all(reader: int) -> bytes:
    return b"".join(iter(lambda: os.read(reader, 65_536), b""))


@pytest.mark.parametrize("kind", ["closed", "none", "broken"])
def test_a_stderr_that_is_closed_fails_nothing(monkeypatch, kind):
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    os.close(reader)
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stream)

    async def answer_two() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        log = AccessLog("plain", "info")
        for _ in range(2):
            log.add(RECORD)
            await asyncio.sleep(2 * GATHER_SECONDS)
        assert not log._lines  # nothing gathers for ever
        log.close()

    failures: list[object] = []
    asyncio.run(answer_two())
    assert failures == []
    with suppress(OSError):
        stream.close()


@pytest.mark.slow
def test_lines_of_a_real_server(folder):
    options = ["--model", f"tiny={folder}", "--threads", "1", "--access-log", "json"]
    with command_line(*options) as server:
        post = {"content": image(1), "headers": {"content-type": "image/png", "x-request-id": "mine-1"}}
        with httpx.Client(base_url=server.url, timeout=10) as client:
            good = client.post("/v1/classify?top=2", **post)
            wrong = client.post("/v1/classify?password=hush", headers={"x-request-id": "bad id"})
            client.get("/healthz")
    assert (good.headers["x-request-id"], good.status_code) == ("mine-1", 200)
    assert wrong.json()["error"]["request_id"] == wrong.headers["x-request-id"] != "bad id"
    starts = [line for line in server.said if line.startswith("serving ")]
    assert starts == [line for line in server.said if server.url in line]
    assert starts[0].startswith(f"serving tiny (7 classes) at {server.url}: ")
    first, second = (json.loads(line) for line in server.said if line.startswith("{"))
    expected = {"request_id": "mine-1", "path": "/v1/classify", "status": 200, "model": "tiny", "client": "127.0.0.1"}
    assert first.items() >= {**expected, "bytes": len(good.content), "level": "info", "method": "POST"}.items()
    assert 0 < first["ms"] < 10_000
    assert abs(datetime.fromisoformat(first["time"]).timestamp() - time.time()) < 60
    assert second.items() >= {"status": 422, "level": "warning", "error": "unknown_parameter"}.items()
    assert "hush" not in "".join(server.said)


@pytest.mark.slow
def test_a_server_whose_stderr_is_gone_answers_and_ends_well(folder):
    port = free_port()
    command = [sys.executable, "-c", COMMAND, "--model", f"tiny={folder}", "--threads", "1", "--port", str(port)]
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving ")
        os.close(reader)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            for _ in range(3):
                answer = client.post("/v1/classify", content=image(1), headers={"content-type": "image/png"})
                assert answer.status_code == 200
                time.sleep(0.1)  # each line is written by itself
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
