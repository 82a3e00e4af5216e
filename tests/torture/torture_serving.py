"""A server under load and attack: is every good answer right, and nothing lost that was accepted?

    PYTHONPATH=tests/serving:tests/data python tests/torture/torture_serving.py --minutes 30 --out FILE.json

A server of `pane` is asked by good clients with photographs in many formats, one or several in a request, while others
send mutated files, lying headers, wrong addresses and endless bodies, keep sockets open, leave before the answer, and
come in bursts of more than it can answer. The first server lives for two thirds of the time, the others for a minute
each; every one is told to stop in the middle of all this. What must hold is in `Clients.judge`, `judge_life` and
`judge_refusals`. The report is written after every life; the exit code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hostile import bomb
from PIL import Image
from running import Running, image, post, rest, status, with_settings
from test_serving_hostile import CUT, KINDS, MOST_BYTES, strange

import vitrail
from vitrail.benchmark.machine import read_commit
from vitrail.data.transforms.preprocess import prepare

MODEL, TOP = "pane", 5
CLIENTS = {"good": 4, "strange": 2, "leaving": 1, "slow": 1}
"""How many of each kind ask at a time, each again and again."""
BURST, BURST_SECONDS, REST_SECONDS = 48, 2.0, 20.0
"""So many good clients more, for so long, and the time between bursts."""
MOST_GROWTH = 1.0
"""Megabytes a minute of resident memory, after the warm-up, in a life of ten minutes or more."""
WARM_UP = 0.3
"""The share of a life whose memory is not looked at: caches and allocators fill."""
MOST_HANDLES = 20
"""How many more handles may be open in the last tenth of a life than after the warm-up, in the median."""
DEADLINE = 5.0
JUST_BEFORE = 0.5
"""Seconds before a server is told to stop in which a request may be sent that it only reads after."""
LEAST_ANSWERED = 0.5
"""The share of good requests outside of bursts that must be answered, while servers live."""
SAME = 1e-5


@dataclass
class Photo:
    """An image file, and its probabilities as the model itself gives them."""

    content: bytes
    kind: str
    probabilities: dict[str, float]


@dataclass
class Tally:
    """What happened so far; threads add to it under the lock."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {kind: Counter() for kind in [*CLIENTS, "burst"]})
    compared: int = 0
    """Answers that were compared with the model's own."""
    largest_difference: float = 0.0
    slowest_answer: float = 0.0
    losses: list[str] = field(default_factory=list)
    lives: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note_loss(self, what: str) -> None:
        with self.lock:
            self.losses.append(what)
        print(what, file=sys.stderr, flush=True)


@dataclass
class Life:
    """A server, from its start until it is told to stop."""

    server: Running
    stop: threading.Event = field(default_factory=threading.Event)
    told: float = float("inf")
    """When it was told to stop."""
    seconds_to_stop: float = float("nan")
    seconds: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    """Megabytes, once a second."""
    handles: list[int] = field(default_factory=list)


def make_photos(count: int = 40) -> list[Photo]:
    """Cut pieces out of two photographs, in all formats and many sizes, and compute the model's own answers."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    model = vitrail.load(MODEL).eval()
    photos = []
    for number in range(count):
        whole = load_sample_images().images[number % 2]
        height, width = (int(rng.integers(24, 400)) for _ in range(2))
        top, left = (
            int(rng.integers(0, have - need)) for have, need in zip(whole.shape, (height, width), strict=False)
        )
        kind, file = KINDS[number % len(KINDS)], io.BytesIO()
        Image.fromarray(whole[top : top + height, left : left + width]).save(file, kind)
        with torch.inference_mode():
            probabilities = model(prepare(file.getvalue(), model.preprocessing)[None]).softmax(dim=1)[0].tolist()
        if len(file.getvalue()) < MOST_BYTES / 3:
            photos.append(Photo(file.getvalue(), kind, dict(zip(model.task.names, probabilities, strict=True))))
    return photos


class Clients:
    """All who ask a server while it lives."""

    def __init__(self, life: Life, photos: list[Photo], tally: Tally, seed: int) -> None:
        self.life, self.photos, self.tally, self.seed = life, photos, tally, seed
        self.originals = {kind: image(2, kind=kind) for kind in KINDS} | {"bomb": bomb()}

    def run(self, seconds: float) -> None:
        """Ask for so long, tell the server to stop, and return when all clients have their answers."""
        life = self.life
        work: list[Callable[[int], None]] = [self.watch, self.burst]
        work += [getattr(self, f"ask_{kind}") for kind, count in CLIENTS.items() for _ in range(count)]
        with ThreadPoolExecutor(len(work)) as pool:
            clients = [pool.submit(each, number) for number, each in enumerate(work)]
            try:
                time.sleep(seconds)
                life.told = time.monotonic()
                life.server.process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    life.server.process.wait(30)
                life.seconds_to_stop = time.monotonic() - life.told
            finally:
                life.stop.set()
            for client in clients:
                if error := client.exception():
                    self.tally.note_loss(f"a client ended with {error!r}")

    def watch(self, number: int) -> None:
        """Note memory and handles of the server once a second."""
        life, folder = self.life, Path(f"/proc/{self.life.server.process.pid}")
        began = time.monotonic()
        while time.monotonic() < life.told and not life.stop.is_set():
            with suppress(OSError):
                pages = int((folder / "statm").read_text().split()[1])
                handles = len(list((folder / "fd").iterdir()))
                life.seconds.append(time.monotonic() - began)
                life.resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
                life.handles.append(handles)
            life.stop.wait(1)

    def ask_good(self, number: int, until: float = float("inf"), kind: str = "good") -> None:
        """Send photographs, one or several in a request, and compare the answers."""
        rng = random.Random(f"{self.seed} {number} {kind}")
        while not self.life.stop.is_set() and time.monotonic() < until:
            chosen = rng.choices(self.photos, k=1 if rng.random() < 0.8 else rng.randint(2, 3))
            if len(chosen) == 1:
                request = post(f"/v1/classify?top={TOP}", chosen[0].content, f"image/{chosen[0].kind.lower()}")
            else:
                parts = b"".join(
                    b'--x\r\nContent-Disposition: form-data; name="f"; filename="f%d"\r\n\r\n' % place
                    + each.content
                    + b"\r\n"
                    for place, each in enumerate(chosen)
                )
                request = post(f"/v1/classify?top={TOP}", parts + b"--x--\r\n", "multipart/form-data; boundary=x")
            began = time.monotonic()
            answer = self.send(request)
            self.judge(kind, began, answer, chosen)
            if status(answer) in (0, 503):
                time.sleep(0.05)  # it stops, or has stopped

    def send(self, request: bytes, timeout: float = 30.0) -> bytes:
        try:
            return self.life.server.told(request, timeout)
        except OSError:
            return b""

    def judge(self, kind: str, began: float, answer: bytes, chosen: list[Photo]) -> None:
        """Check the answer to a good request: right, or a refusal that is allowed at this time."""
        code, seconds, life, tally = status(answer), time.monotonic() - began, self.life, self.tally
        with tally.lock:
            tally.statuses[kind][code] += 1
        if code == 200:
            with tally.lock:
                tally.slowest_answer = max(tally.slowest_answer, seconds)
            try:
                found = json.loads(answer.partition(b"\r\n\r\n")[2])
                for photo, each in zip(chosen, found["images"] if len(chosen) > 1 else [found], strict=True):
                    self.compare(photo, each["labels"])
            except (ValueError, LookupError, TypeError) as error:
                tally.note_loss(f"an answer cannot be read ({error!r}): {answer[-200:]!r}")
        elif code == 503 and (began > life.told - JUST_BEFORE or seconds >= DEADLINE):
            pass  # it stops, or the deadline has passed
        elif code == 429 or (code == 0 and began > life.told):
            pass
        else:
            tally.note_loss(f"a good request was answered {code} after {seconds:.2f} s: {answer[-200:]!r}")

    def compare(self, photo: Photo, labels: list[dict[str, Any]]) -> None:
        differences = [abs(photo.probabilities[each["label"]] - each["probability"]) for each in labels]
        best = sorted(photo.probabilities.values())[-TOP:]
        differences += [abs(one - each["probability"]) for one, each in zip(reversed(best), labels, strict=True)]
        with self.tally.lock:
            self.tally.compared += 1
            self.tally.largest_difference = max(self.tally.largest_difference, *differences)
        if max(differences) > SAME:
            self.tally.note_loss(f"an answer differs by {max(differences):g} from the model's own")

    def burst(self, number: int) -> None:
        """Now and then come with more clients than can be answered."""
        while not self.life.stop.wait(REST_SECONDS) and time.monotonic() < self.life.told:
            until = time.monotonic() + BURST_SECONDS
            with ThreadPoolExecutor(BURST) as pool:
                for each in [pool.submit(self.ask_good, place, until, "burst") for place in range(BURST)]:
                    each.result()

    def ask_strange(self, number: int) -> None:
        """Send what no client should."""
        rng = random.Random(f"{self.seed} {number} strange")
        while not self.life.stop.is_set():
            request, allowed = strange(rng, self.originals)
            began = time.monotonic()
            try:
                answer = self.life.server.told(request, 30, ends=CUT in request)
            except OSError:
                answer = b""
            code, after = status(answer), time.monotonic()
            with self.tally.lock:
                self.tally.statuses["strange"][code] += 1
            if (
                after < self.life.told
                and code not in allowed | {429}
                and not (code == 503 and after - began >= DEADLINE)
            ):
                self.tally.note_loss(f"{code} is not one of {sorted(allowed)}: {request[:120]!r}")
            if code in (0, 503):
                time.sleep(0.05)

    def ask_leaving(self, number: int) -> None:
        """Send a request, or a part of it, and leave before the answer."""
        rng = random.Random(f"{self.seed} {number} leaving")
        while not self.life.stop.is_set():
            request = post("/v1/classify", rng.choice(self.photos).content)
            with suppress(OSError), self.life.server.socket() as wire:
                wire.sendall(request[: rng.choice([len(request), rng.randrange(1, len(request))])])
                time.sleep(rng.uniform(0, 0.05))
                with self.tally.lock:
                    self.tally.statuses["leaving"][0] += 1
            time.sleep(0.02)

    def ask_slow(self, number: int) -> None:
        """Keep sockets open that send a byte now and then, until they are closed."""
        starts = (b"GET /healthz HT", b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        while not self.life.stop.is_set():
            wires = list[socket.socket]()
            for place in range(20):
                with suppress(OSError):
                    wire = self.life.server.socket(5)
                    wires.append(wire)
                    wire.sendall(starts[place % 2])
            self.life.stop.wait(0.5)
            for wire in wires:
                with suppress(OSError):
                    wire.sendall(b"x")
            for wire in wires:
                code = status(rest(wire))
                wire.close()
                with self.tally.lock:
                    self.tally.statuses["slow"][code] += 1
                if code not in (0, 408) and time.monotonic() < self.life.told:
                    self.tally.note_loss(f"a slow client was answered {code}")


def judge_life(life: Life, tally: Tally) -> None:
    """Note the memory and handles of a server's life, and what it should not have said."""
    if life.server.process.poll() != 0:
        tally.note_loss(f"a server ended with {life.server.process.poll()}: {''.join(life.server.said[-20:])}")
    if told := [line for line in life.server.said if "Traceback" in line]:
        tally.note_loss(f"a server wrote {len(told)} tracebacks: {''.join(life.server.said)[-2000:]}")
    start = int(len(life.seconds) * WARM_UP)
    minutes, resident = np.array(life.seconds[start:]) / 60, np.array(life.resident[start:])
    growth = float(np.polyfit(minutes, resident, 1)[0]) if len(minutes) > 2 else float("nan")
    tenth = max(1, len(life.handles) // 10)
    more = float(np.median(life.handles[-tenth:]) - np.median(life.handles[start : start + tenth]))
    found = {
        "minutes": life.seconds[-1] / 60,
        "MB after warm-up": float(resident[0]),
        "MB at the end": float(resident[-1]),
        "most MB": float(resident.max()),
        "MB a minute after warm-up": growth,
        "more handles": more,
        "seconds to stop": life.seconds_to_stop,
    }
    tally.lives.append(found)
    if found["minutes"] >= 10 and growth >= MOST_GROWTH:
        tally.note_loss(f"memory grew by {growth:.2f} MB a minute")
    if more > MOST_HANDLES:
        tally.note_loss(f"{more:.0f} more handles are open at the end")


def judge_refusals(tally: Tally) -> None:
    """Note a loss if too many good requests were refused: a server that refuses everything is no good one."""
    statuses = tally.statuses["good"]
    if statuses[200] < LEAST_ANSWERED * (statuses[200] + statuses[429]):
        tally.note_loss(f"{statuses[429]} good requests were refused outside of bursts, {statuses[200]} answered")


def report(tally: Tally, minutes: float, seed: int, began: float) -> dict[str, Any]:
    totals = {kind: dict(sorted(codes.items())) for kind, codes in tally.statuses.items()}
    return {
        "command": f"make torture MINUTES={minutes:g}",
        "commit": read_commit(),
        "device": "cpu",
        "machine": f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "seed": seed,
        "minutes": (time.monotonic() - began) / 60,
        "requests": sum(sum(codes.values()) for codes in totals.values()),
        "statuses": totals,
        "answers compared": tally.compared,
        "largest difference of a probability": tally.largest_difference,
        "slowest answer in seconds": tally.slowest_answer,
        "lives": tally.lives,
        "losses": tally.losses,
    }


def torture(minutes: float, seed: int = 0, out: Path | None = None) -> dict[str, Any]:
    """Let servers live and stop until the time is over, and return the report."""
    torch.set_num_threads(1)
    tally, photos = Tally(), make_photos()
    began = time.monotonic()
    limits = {"batch": 16, "queue": 32, "deadline": DEADLINE}
    while (left := 60 * minutes - (time.monotonic() - began)) > 0:
        seconds = 40 * minutes if not tally.lives else min(60.0, left)
        try:
            with with_settings(MODEL, limits, most_bytes=MOST_BYTES, body_seconds=1.0, header_seconds=1.0) as server:
                life = Life(server)
                Clients(life, photos, tally, seed + len(tally.lives)).run(seconds)
                judge_life(life, tally)
        except AssertionError as error:  # it did not start or stop well
            tally.note_loss(f"a server: {error}")
        judge_refusals(tally)
        found = report(tally, minutes, seed, began)
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{found['minutes']:.1f} minutes: {found['requests']} requests, {len(tally.losses)} losses", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the report, which is printed too")
    options = parser.parse_args()
    found = torture(options.minutes, options.seed, options.out)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["losses"]))


if __name__ == "__main__":
    main()
