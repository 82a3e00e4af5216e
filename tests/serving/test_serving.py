"""Every route and every refusal of a real server, asked by a client that knows nothing of us."""

from __future__ import annotations

import asyncio
import io
import json
import time

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from running import command_line, expected, image, make_model, post, status

import vitrail
from vitrail.data.transforms.preprocess import prepare
from vitrail.inspection.measure.attention import attention_rollout, rollout_by_layer
from vitrail.model.architecture import Backbone, ResNetArchitecture
from vitrail.model.bit import BitResNet
from vitrail.model.create import build_empty_model
from vitrail.model.initialise import initialise
from vitrail.model.variants import BIT
from vitrail.serving.app import build_app
from vitrail.serving.reference import describe_api
from vitrail.serving.serve import open_served_model, read_token
from vitrail.serving.service import Service
from vitrail.serving.settings import MOST_TOP, ServerSettings
from vitrail.weights.save import save

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "tiny": make_model(root / "tiny"),
        "other": make_model(root / "other", seed=1, classes=3),
        "plain": make_model(root / "plain", classes=0),
        "resnet": save(small_resnet(), root / "resnet"),
    }


@pytest.fixture(scope="module")
def server(folders):
    models = [part for name, folder in folders.items() for part in ("--model", f"{name}={folder}")]
    with command_line(*models, "--threads", "1", "--batch", "4") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def small_resnet() -> BitResNet:
    sizes = ResNetArchitecture(image_size=32, num_classes=3, backbone=Backbone(blocks=(1, 1), **BIT))
    model = build_empty_model(sizes).to_empty(device="cpu")
    initialise(model, torch.Generator().manual_seed(0))
    return model


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    return error["message"]


def test_models_are_listed(client):
    told = client.get("/v1/models").json()
    assert told["default"] == "tiny"
    assert told["models"][0] == {
        "name": "tiny",
        "image_size": [16, 16],
        "task": "labels",
        "answers": "7 classes",
        "lines": 5,
        "classes": 7,
        "layers": 2,
        "attention": True,
        "embedding": 32,
        "coverage": False,
        "unknown": False,
    }
    assert [model["name"] for model in told["models"]] == ["tiny", "other", "plain", "resnet"]
    assert told["models"][3]["layers"] is None
    assert told["models"][3]["attention"] is False


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_classify_is_what_the_model_says(client, folders, kind):
    content = image(3, kind=kind)
    told = client.post("/v1/classify?top=7", content=content, headers={"content-type": "application/octet-stream"})
    assert told.status_code == 200
    found = told.json()
    assert found["model"] == "tiny"
    shares = {row["label"]: row["probability"] for row in found["labels"]}
    want = expected(folders["tiny"], content)
    np.testing.assert_allclose([shares[f"class {number}"] for number in range(7)], want, atol=1e-5)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert set(found["timing"]) == {"decode_ms", "queue_ms", "compute_ms", "total_ms"}
    assert all(value >= 0 for value in found["timing"].values())
    assert found["timing"]["total_ms"] >= found["timing"]["compute_ms"]


def test_top_and_its_bounds(client):
    ask = lambda query: client.post(f"/v1/classify{query}", content=image(), headers=PNG)  # noqa: E731
    assert len(ask("").json()["labels"]) == 5
    assert len(ask("?top=2").json()["labels"]) == 2
    assert len(ask("?model=other&top=100").json()["labels"]) == 3
    for wrong in ("0", "-1", "two", "", "1e3", "9" * 30, "%00", "½"):
        assert "top = " in refused(ask(f"?top={wrong}"), 422)
    assert "did you mean 'top'" in refused(ask("?topp=1"), 422)
    refused(ask("?" + "&".join(["top=1"] * 50)), 422)


def test_two_models_by_name(client, folders):
    content = image(5)
    for name, classes in (("tiny", 7), ("other", 3)):
        told = client.post(f"/v1/classify?model={name}&top=7", content=content, headers=PNG).json()
        want = expected(folders[name], content)
        assert told["model"] == name
        assert len(want) == classes
        np.testing.assert_allclose([row["probability"] for row in told["labels"]], np.sort(want)[::-1], atol=1e-5)
    assert "did you mean 'other'" in refused(client.post("/v1/classify?model=othr", content=content), 404)
    refused(client.post("/v1/classify?model=/etc/passwd", content=content), 404)
    refused(client.post("/v1/classify?model=hf:google/vit-base-patch16-224", content=content), 404)


def test_several_at_once_and_a_bad_one_among_them(client, folders):
    contents = [image(seed) for seed in range(6)]
    files = [("files", (f"{seed}.png", content)) for seed, content in enumerate(contents)]
    files[3] = ("files", ("broken “3”.png", contents[3][:60]))
    told = client.post("/v1/classify?top=7", files=files)
    assert told.status_code == 200
    rows = told.json()["images"]
    assert [row["name"] for row in rows] == ["0.png", "1.png", "2.png", "broken “3”.png", "4.png", "5.png"]
    assert "cannot be read" in rows[3]["error"]
    for seed in (0, 1, 2, 4, 5):
        shares = [row["probability"] for row in rows[seed]["labels"]]
        np.testing.assert_allclose(shares, np.sort(expected(folders["tiny"], contents[seed]))[::-1], atol=1e-5)
    assert set(told.json()["timing"]) == {"decode_ms", "queue_ms", "compute_ms", "total_ms"}


def test_multipart_of_countless_parts_is_given_up_early(client):
    kind = {"content-type": "multipart/form-data; boundary=b"}
    started = time.monotonic()
    refused(client.post("/v1/classify", content=b"--b\r\n\r\n\r\n" * 500_000, headers=kind), 413)
    assert time.monotonic() - started < 1  # all of it would take seconds


def test_multipart_that_has_no_good_image(client):
    bad = [("files", ("a.png", b"nothing")), ("files", ("b.png", b""))]
    assert "none of the images" in refused(client.post("/v1/classify", files=bad), 400)
    kind = "multipart/form-data; boundary=x"
    no_file = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n'
    for body in (no_file, b"", b"--x\r\n", b"--x--\r\n", b"--y\r\n\r\n\r\n--y--", b"\0" * 100):
        refused(client.post("/v1/classify", content=body, headers={"content-type": kind}), 400)
    refused(client.post("/v1/classify", content=b"--x--", headers={"content-type": "multipart/form-data"}), 400)
    many = [("files", (f"{number}.png", image())) for number in range(65)]
    assert "64" in refused(client.post("/v1/classify", files=many), 413)


def test_embed_is_what_the_model_says(client, folders):
    content = image(7)
    for name in ("tiny", "plain", "resnet"):
        model = vitrail.load(folders[name])
        want = model.embed(prepare(content, model.preprocessing)[None])[0].detach().numpy()
        told = client.post(f"/v1/embed?model={name}", content=content, headers=PNG).json()
        np.testing.assert_allclose(told["embedding"], want, atol=1e-4)
    several = client.post("/v1/embed", files=[("a", ("a.png", content)), ("b", ("b.png", image(8)))]).json()
    assert [len(row["embedding"]) for row in several["images"]] == [32, 32]
    assert "/v1/embed" in refused(client.post("/v1/classify?model=plain", content=content, headers=PNG), 422)


def test_attention_is_the_rollout(client, folders):
    content = image(9)
    model = vitrail.load(folders["tiny"])
    images = prepare(content, model.preprocessing)[None]
    last = attention_rollout(model, images)[0]
    first = rollout_by_layer(model, images)[0, 0, 1:].reshape(4, 4)
    for query, want, layer in (("", last, "2"), ("?layer=2", last, "2"), ("?layer=1", first, "1")):
        answer = client.post(f"/v1/attention{query}", content=content, headers=PNG)
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-vitrail-box"] == "0,0,1,1"
        assert answer.headers["x-vitrail-layer"] == layer
        assert float(answer.headers["x-vitrail-peak"]) == pytest.approx(want.max(), rel=1e-4)
        picture = Image.open(io.BytesIO(answer.content))
        assert picture.mode == "L"
        np.testing.assert_allclose(np.asarray(picture), want / want.max() * 255, atol=0.51)
    for layer in ("0", "3", "x"):
        assert "layer" in refused(client.post(f"/v1/attention?layer={layer}", content=content, headers=PNG), 422)
    said = refused(client.post("/v1/attention?model=resnet", content=content, headers=PNG), 422)
    assert "has no attention" in said
    refused(client.post("/v1/attention", files=[("a", ("a.png", content))]), 415)


def test_wrong_images_and_kinds(client):
    for content in (b"", b"hello", image()[:50], image(kind="JPEG")[:400]):
        refused(client.post("/v1/classify", content=content, headers=PNG), 400)
    for kind in ("text/html", "application/json", "application/x-www-form-urlencoded", "video/mp4", "nonsense", "é"):
        assert "Content-Type" in refused(
            client.post("/v1/classify", content=image(), headers={"content-type": kind.encode()}), 415
        )
    assert client.post("/v1/classify", content=image()).status_code == 200
    long = refused(client.post("/v1/classify", content=image(), headers={"content-type": "x" * 5000}), 415)
    assert len(long) < 500


def test_wrong_paths_and_methods(client):
    for path in ("/nothing", "/v1/classify/", "/v1", "/page.js/../../models.py", "/static/x", "/%2e%2e/etc/passwd"):
        refused(client.get(path), 404)
    for path in ("/v1/classify", "/v1/predict", "/v1/embed", "/v1/attention"):
        answer = client.get(path)
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"
    refused(client.post("/healthz"), 405)
    refused(client.delete("/v1/models"), 405)


def test_state_and_metrics(client):
    assert client.get("/healthz").json() == {"state": "alive"}
    assert client.get("/readyz").json() == {"state": "ready"}
    client.post("/v1/classify", content=image(), headers=PNG)
    refused(client.post("/v1/classify", content=b"", headers=PNG), 400)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    rows = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(rows['vitrail_requests_total{route="/v1/classify",status="200"}']) >= 1
    assert float(rows['vitrail_requests_total{route="/v1/classify",status="400"}']) >= 1
    assert float(rows['vitrail_images_total{model="tiny"}']) >= 1
    assert float(rows['vitrail_batch_size_count{model="tiny"}']) >= 1
    assert float(rows['vitrail_queue_length{model="tiny"}']) == 0
    assert float(rows['vitrail_compute_seconds_count{model="tiny"}']) >= 1
    assert float(rows['vitrail_wait_seconds_count{model="tiny"}']) >= 1
    assert float(rows['vitrail_rejections_total{code="bad_image"}']) >= 1


def test_a_model_that_computes_no_longer_is_noticed(folders):
    async def test() -> None:
        service = Service({"tiny": open_served_model("tiny", str(folders["tiny"]))}, ServerSettings(threads=1))
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await service.start()
            assert (await client.get("/healthz")).status_code == 200
            await service.batchers["tiny"].close()
            refused(await client.get("/healthz"), 503)
            refused(await client.get("/readyz"), 503)
            await service.close()

    asyncio.run(test())


def test_a_failure_that_nobody_thought_of_is_told_as_one(folders, monkeypatch, caplog):
    async def test() -> None:
        service = Service({"tiny": open_served_model("tiny", str(folders["tiny"]))}, ServerSettings(threads=1))
        monkeypatch.setattr(service, "find_model", lambda name: 1 / 0)
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await service.start()
            refused(await client.post("/v1/classify", content=image(), headers=PNG), 500)
            await service.close()

    asyncio.run(test())
    assert "ZeroDivisionError" in caplog.text


def test_the_page_and_its_headers(client):
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
            assert part in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    answer = client.get("/v1/models", headers={"origin": "http://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_the_reference_is_there_and_asks_nobody_else(client):
    told = client.get("/openapi.json").json()
    assert set(told["paths"]) >= {"/v1/classify", "/v1/embed", "/v1/attention", "/v1/models", "/healthz", "/readyz"}
    assert set(told["paths"]["/v1/classify"]["post"]["responses"]) >= {"200", "400", "413", "415", "422", "429", "503"}
    assert {option["name"] for option in told["paths"]["/v1/attention"]["post"]["parameters"]} == {"model", "layer"}
    page = client.get("/docs")
    assert "POST /v1/classify" in page.text
    assert "//" not in page.text.replace("https://", "//").replace("http://", "//")
    assert "<script" not in page.text
    assert json.dumps(told)  # as it stands


def test_the_token(folders, tmp_path):
    (tmp_path / "token").write_text("open sesame\n")
    settings = ServerSettings(token=read_token(tmp_path / "token"), threads=1)
    model = open_served_model("tiny", str(folders["tiny"]))

    async def test() -> None:
        service = Service({"tiny": model}, settings)
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            refused(await client.get("/readyz"), 503)
            await service.start()
            for path in ("/healthz", "/readyz", "/", "/page.css", "/page.js", "/docs"):
                assert (await client.get(path)).status_code == 200
            for path in ("/metrics", "/v1/models", "/elsewhere"):
                refused(await client.get(path), 401)
            for shown in ("", "Bearer", "Bearer open", "Bearer open sesame!", "Basic open sesame", "open sesame"):
                answer = await client.post("/v1/classify", content=image(), headers={"authorization": shown})
                refused(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
            right = {"authorization": "Bearer open sesame"}
            for shown in ("Bearer open sesame", "bearer open sesame"):  # the scheme's letters may be of any size
                answer = await client.post("/v1/classify", content=image(), headers={"authorization": shown})
                assert answer.status_code == 200
            assert (await client.get("/metrics", headers=right)).status_code == 200
            await service.close()
            refused(await client.get("/readyz"), 503)
            refused(await client.post("/v1/classify", content=image(), headers=right), 503)

    asyncio.run(test())


def test_the_reference_says_where_the_token_is_needed():
    document = describe_api(ServerSettings(token="secret"))
    assert "security" not in document  # it would hold for the health paths too
    for path, methods in document["paths"].items():
        (operation,) = methods.values()
        is_open = path in ("/healthz", "/readyz")
        assert ("401" in operation["responses"], "security" in operation) == (not is_open, not is_open), path
    without = describe_api(ServerSettings())
    assert "401" not in without["paths"]["/v1/classify"]["post"]["responses"]
    (top,) = [each for each in without["paths"]["/v1/classify"]["post"]["parameters"] if each["name"] == "top"]
    assert top["schema"]["maximum"] == MOST_TOP


def test_top_has_the_maximum_that_the_reference_says(client):
    for top, wanted in ((MOST_TOP, 200), (MOST_TOP + 1, 422)):
        answer = client.post(f"/v1/classify?top={top}", content=image(), headers={"content-type": "image/png"})
        assert answer.status_code == wanted


def test_health_takes_head_and_two_hosts_are_refused(server):
    for path in ("/healthz", "/readyz"):
        answer = server.told(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert status(answer) == 200
        assert answer.endswith(b"\r\n\r\n")  # no body
    for path in ("/healthz", "/v1/models"):
        assert status(server.told(f"GET {path} HTTP/1.1\r\nHost: x\r\nhost: y\r\n\r\n".encode())) == 400
    assert status(server.told(post("/v1/classify", image(), Host="y"))) == 400
