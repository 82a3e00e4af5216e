"""What strangers send: every answer is the right 4xx, the server lives, and a good client between them is served."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter

import numpy as np
import pytest
from hostile import bomb, encoded, picture, png
from running import expected, image, make_model, post, rest, status, with_settings

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MOST_BYTES = 300_000
CUT = b"Content-Length: 0009"
"""Before the true length: more is said to come than does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with with_settings(folder, most_bytes=MOST_BYTES, body_seconds=1.0, header_seconds=1.0) as server:
        yield server
        assert not [line for line in server.said if "Traceback" in line], server.said


@pytest.fixture(scope="module")
def good(folder):
    content = image(1)
    return content, np.sort(expected(folder, content))[::-1]


def check_good(server, good) -> None:
    answer = server.told(post("/v1/classify?top=7", good[0]))
    assert status(answer) == 200, answer
    labels = json.loads(answer.partition(b"\r\n\r\n")[2])["labels"]
    np.testing.assert_allclose([row["probability"] for row in labels], good[1], atol=1e-5)


def code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Bytes changed, cut out, doubled or cut off."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        place = rng.randrange(len(found))
        what = rng.randrange(5)
        if what == 0:
            found[place] = rng.randrange(256)
        elif what == 1:
            found[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
        elif what == 2:
            del found[place : place + rng.randrange(1, 32)]
        elif what == 3:
            found[place:place] = found[place : place + 64]
        else:
            found = found[: max(place, 1)]
        found = found or bytearray(b"\0")
    return bytes(found[:MOST_BYTES])


def strange(rng: random.Random, originals: dict[str, bytes]) -> tuple[bytes, set[int]]:
    """A request, and what may be answered to it; 0 where the server may close instead."""
    kind = rng.choice(KINDS)
    body = mutated(rng, originals[kind])
    choice = rng.random()
    if choice < 0.6:  # a mutated image may still be one
        route = rng.choice(["/v1/classify", "/v1/embed", "/v1/attention"])
        return post(route, body, f"image/{kind.lower()}"), {200, 400, 413}
    if choice < 0.68:
        wrong = rng.choice(["text/plain", "application/json", "video/mp4", "image", "multipart/mixed", "\x80\xff"])
        return post("/v1/classify", body, wrong), {415}
    if choice < 0.76:
        form = b'--x\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n' + body + b"\r\n--x--\r\n"
        return post("/v1/classify", mutated(rng, form), "multipart/form-data; boundary=x"), {200, 400, 413}
    if choice < 0.8:
        query = "".join(chr(rng.randrange(33, 127)) for _ in range(20)).replace("#", "")
        return post(f"/v1/classify?{query}", originals["PNG"]), {400, 422}  # some of these no address may hold
    if choice < 0.84:
        path = "".join(rng.choice("abc/%.~2eF") for _ in range(12))
        return post(f"/{path}", body), {400, 404, 405}
    if choice < 0.88:
        return post("/v1/classify", originals["bomb"]), {413}
    if choice < 0.92:
        return post("/v1/classify", body, strange="x" * rng.randrange(150_000, 300_000)), {431}
    if choice < 0.96:  # the connection ends before the body does
        return post("/v1/classify", body).replace(b"Content-Length: ", CUT), {0, 400, 413}
    start = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return start + (b"1000\r\n" + bytes(4096) + b"\r\n") * (MOST_BYTES // 4096 + rng.randrange(2, 20)), {0, 413}


def send_strange(server, good, count: int, seed: int) -> dict[int, int]:
    rng = random.Random(seed)
    originals = {kind: image(2, kind=kind) for kind in KINDS} | {"bomb": bomb()}
    seen: dict[int, int] = {}
    for number in range(count):
        request, allowed = strange(rng, originals)
        answer = server.told(request, ends=CUT in request)
        assert status(answer) in allowed, (status(answer), allowed, request[:300])
        seen[status(answer)] = seen.get(status(answer), 0) + 1
        if number % 50 == 0:
            check_good(server, good)
    return seen


def test_hundreds_of_strange_requests(server, good):
    seen = send_strange(server, good, 200, seed=0)
    assert set(seen) >= {200, 400, 404, 415, 422}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_strange_requests(server, good):
    seen = Counter[int]()
    for seed in range(1, 11):
        seen.update(send_strange(server, good, 1000, seed))
    print(dict(seen))
    assert seen.total() == 10_000
    assert not any(code >= 500 for code in seen)


def test_bombs_of_pixels(server, good):
    started = time.monotonic()
    for content in (
        bomb(),
        png(8000, 6000, 1, 0, (bytes(1000) for _ in range(6000))),
        encoded(picture(1, 1, 1), "PNG"),
    ):
        answer = server.told(post("/v1/classify", content))
        if len(content) > 100:
            assert (status(answer), code(answer)) == (413, "too_many_pixels")
        else:
            assert status(answer) == 200
    lying = bytearray(image())
    lying[16:24] = b"\0\1\0\0\0\1\0\0"
    assert status(server.told(post("/v1/classify", bytes(lying)))) in (400, 413)
    assert time.monotonic() - started < 5
    check_good(server, good)


def test_long_thin_images(server):
    for height, width in ((1, 20_000), (20_000, 1)):
        assert status(server.told(post("/v1/classify", encoded(picture(1, height, width), "PNG")))) == 200


def test_too_many_bytes_said_or_not(server, good):
    said = server.told(f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: {MOST_BYTES + 1}\r\n\r\n".encode())
    assert (status(said), code(said)) == (413, "too_many_bytes")
    assert status(server.told(post("/v1/classify", bytes(MOST_BYTES)))) == 400
    with server.socket() as wire:
        wire.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(10_000):
                wire.sendall(b"1000\r\n" + bytes(4096) + b"\r\n")
        except OSError:
            pass  # closed, as it should be
        else:
            pytest.fail("40 MB were taken")
    check_good(server, good)


def test_chunked_bodies_are_read(server, good):
    content = good[0]
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (content[:50], content[50:]))
    start = (
        b"POST /v1/classify?top=7 HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert status(server.told(start + chunks + b"0\r\n\r\n")) == 200
    for wrong in (b"zz\r\n", b"-5\r\n", b"ffffffffffffffffff\r\n"):
        assert status(server.told(start + wrong)) in (0, 400)
    endless = server.told(start + b"5\r\nhello\r\n", timeout=5)
    assert status(endless) == 408


def test_truncated_bodies(server, good):
    for half in (True, False):
        with server.socket() as wire:
            wire.sendall(post("/v1/classify", good[0])[:-20])
            if half:
                wire.shutdown(socket.SHUT_WR)
                assert status(rest(wire)) in (0, 400)
    check_good(server, good)


def test_huge_and_broken_headers(server, good):
    start = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    for request in (
        start + b"A: " + b"x" * 1_000_000 + b"\r\n\r\n",
        start + b"".join(b"A%d: x\r\n" % number for number in range(5000)) + b"\r\n",
        b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"\0\1\2\3" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        start + b"A b: c\r\n\r\n",
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # a TLS greeting
    ):
        assert status(server.told(request)) in (0, 400, 413, 414, 431, 505), request[:80]
    check_good(server, good)


def test_slow_sockets_do_not_keep_others_out(server, good):
    """200 that send a byte now and then, in their headers or in their bodies: they are closed, others are served."""
    wires = [server.socket(timeout=5) for _ in range(200)]
    starts = (b"GET /healthz HT", b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
    for number, wire in enumerate(wires):
        wire.sendall(starts[number % 2])
    started = time.monotonic()
    for _ in range(10):
        check_good(server, good)
    assert time.monotonic() - started < 5
    answers = [status(rest(wire)) for wire in wires]
    assert time.monotonic() - started < 10
    assert set(answers[::2]) <= {0, 408}
    assert set(answers[1::2]) == {408}
    for wire in wires:
        wire.close()
    check_good(server, good)
    metrics = server.told(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").decode()
    assert 'status="5' not in metrics
