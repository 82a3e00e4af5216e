"""More than a server can do, clients that leave, and the end: nothing that was accepted is lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from running import image, make_model, post, rest, status, with_settings

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


Told = list[tuple[int, float, str]]
"""Status, seconds and Retry-After of each request."""


def asked(server, threads: int, going_on: Callable[[int], bool]) -> Told:
    """By so many at once, each asking again at once, while `going_on(number of requests of its own)`."""
    images = [image(seed) for seed in range(8)]

    def one(first: int) -> Told:
        found: Told = []
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while going_on(len(found)):
                started = time.monotonic()
                answer = client.post("/v1/classify", content=images[(first + len(found)) % 8], headers=PNG)
                after = answer.headers.get("retry-after", "")
                found.append((answer.status_code, time.monotonic() - started, after))
        return found

    with ThreadPoolExecutor(threads) as pool:
        return [answer for answers in pool.map(one, range(threads)) for answer in answers]


def metric(server, name: str) -> float:
    told = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in told.splitlines() if line.startswith(name))


@pytest.mark.slow
def test_overload_is_429_and_the_accepted_are_in_time(folder):
    """Batches of 4 in 100 ms and a deadline of 2 s, with 40 that ask again at once: ten times what is answered."""
    limits = {"batch": 4, "queue": 12, "deadline": 2.0}
    with with_settings(folder, limits, slow=0.1) as server:
        found = asked(server, 40, lambda count: count < 4)
        statuses = {code for code, _, _ in found}
        assert statuses == {200, 429}
        assert all(1 <= int(after) <= 60 for code, _, after in found if code == 429)
        assert max(seconds for code, seconds, _ in found if code == 200) < 2.0
        assert metric(server, 'vitrail_rejections_total{code="busy"}') == sum(code == 429 for code, _, _ in found)
        assert metric(server, "vitrail_queue_length") == 0
        gone_clients_are_not_computed(server)


def gone_clients_are_not_computed(server) -> None:
    before = metric(server, "vitrail_images_total")
    wires = [server.socket() for _ in range(10)]
    for wire in wires:
        wire.sendall(post("/v1/classify", image()))
    time.sleep(0.03)
    for wire in wires:
        wire.close()
    ends = time.monotonic() + 10
    while metric(server, "vitrail_queue_length") and time.monotonic() < ends:
        time.sleep(0.02)
    assert metric(server, "vitrail_images_total") - before <= 8  # two batches may have begun
    with server.socket() as wire:
        wire.sendall(post("/v1/classify", image()))
        assert status(rest(wire)) == 200


@pytest.mark.slow
def test_the_end_loses_nothing_that_was_accepted(folder):
    """SIGTERM while 16 clients ask: what was sent before is answered 200, what comes after 503 or not at all."""
    stop = threading.Event()
    outcomes: list[tuple[float, int]] = []

    def client(server) -> None:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            while not stop.is_set():
                started = time.monotonic()
                try:
                    code = client.post("/v1/classify", content=image(), headers=PNG).status_code
                except httpx.TransportError:
                    code = 0
                outcomes.append((started, code))
                if code != 200:
                    return

    with with_settings(folder, {"batch": 4}, slow=0.05) as server, ThreadPoolExecutor(17) as pool:
        clients = [pool.submit(client, server) for _ in range(16)]
        time.sleep(1)
        with httpx.Client(base_url=server.url) as looking:
            assert looking.get("/readyz").status_code == 200
            told = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            answer = looking.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "closing"
        assert server.process.wait(20) == 0
        stop.set()
        for one in clients:
            one.result()
    assert {code for started, code in outcomes if started < told - 0.05} == {200}
    assert {code for _, code in outcomes} <= {200, 503, 0}
    assert any(started < told < started + 1 and code == 200 for started, code in outcomes)


@pytest.mark.slow
def test_a_body_that_ends_after_the_end_is_refused_and_no_failure(folder):
    with with_settings(folder, least_drain=0.5, limits={"deadline": 0.5}) as server:
        request = post("/v1/classify", image())
        with server.socket() as wire:
            wire.sendall(request[:-10])
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.9)
            wire.sendall(request[-10:])
            answer = rest(wire)
        assert status(answer) == 503, answer
        assert b"shutting_down" in answer
        assert server.process.wait(20) == 0
        assert not [line for line in server.said if "Traceback" in line]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_minute_of_ten_times_too_much(folder):
    """Only 200 and 429, who is accepted is answered within the deadline, and memory stays as it is."""
    with with_settings(folder, {"batch": 4, "queue": 32, "deadline": 2.0}, slow=0.2) as server:

        def resident() -> int:
            with open(f"/proc/{server.process.pid}/statm") as file:  # noqa: PTH123
                return int(file.read().split()[1]) * 4096

        asked(server, 40, lambda count: count < 50)
        before, ends = resident(), time.monotonic() + 60
        found = asked(server, 40, lambda count: time.monotonic() < ends)
        times = sorted(seconds for code, seconds, _ in found if code == 200)
        growth, slowest = resident() - before, times[int(0.99 * len(times))]
        told = f"{len(found)} asked, {len(times)} answered, p99 {slowest:.2f} s, {growth / 1e6:.1f} MB more"
        print(told)
        assert {code for code, _, _ in found} == {200, 429}
        assert len(found) >= 10 * len(times), told
        assert slowest < 4.0, told  # the deadline of 2 s, and what 40 clients on a busy machine add to their own clocks
        assert growth < 50_000_000, told
