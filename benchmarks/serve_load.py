"""Requests a second and how long they take: `vitrail serve` on one core, the load on another; LitServe beside it.

    pip install -c constraints.txt ".[test,serve]"          # and litserve, for --peer
    python benchmarks/serve_load.py --peer --out benchmarks/results/serve_load.json

Each model is served by a process that is pinned to one core, and asked by this one, pinned to another, over as many
connections as given, each of which asks again as soon as it is answered. Offline is what the same pinned core does with
the same bytes in a loop, decoding and all, without a server: plain, as LitServe is given the model, and with its layers
packed, as our server packs them. Weights are fresh: they cost what trained ones cost. The image is a photograph inside
scikit-learn, as a JPEG. All take turns; rates are medians of the rounds, p50 and p99 of the requests of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """What is served and asked."""

    model: str
    image_size: int
    photo: tuple[int, int]
    """Width and height of the JPEG."""
    seconds: dict[int, float]
    """By the number of connections: of a measurement, after 2 that are not counted."""


CASES = {
    "Ti/16 at 64": Case("Ti/16", 64, (96, 64), {1: 6, 32: 10, 64: 10}),
    "B/16 at 224": Case("B/16", 224, (500, 375), {1: 12, 8: 40}),
}
OFFLINE_SECONDS = 12.0
UNLOGGED = "vitrail without access log"
VITRAIL = "import typer; from vitrail.cli.serve import serve; typer.run(serve)"
OFFLINE = """
import json, sys, time, torch, vitrail
from vitrail.data.transforms.decode import decode_image
from vitrail.data.transforms.preprocess import normalise, resize_and_crop
torch.set_num_threads(1)
model, content = vitrail.load(sys.argv[1]).eval(), open(sys.argv[2], "rb").read()
batch, seconds = int(sys.argv[4]), float(sys.argv[3])
if sys.argv[5] == "packed":
    from vitrail.fast.cpu.packed import pack_layers
    pack_layers(model)
how, done = model.preprocessing, -1
with torch.inference_mode():
    while done < 0 or time.perf_counter() - start < seconds:
        pixels = torch.stack([resize_and_crop(decode_image(content), how) for _ in range(batch)])
        model(normalise(pixels, how)).softmax(dim=1)
        if done < 0:  # the first is for warming up
            done, start = 0, time.perf_counter()
        else:
            done += batch
print(json.dumps(done / (time.perf_counter() - start)))
"""
LITSERVE = """
import sys, torch, vitrail, litserve
from vitrail.data.transforms.decode import decode_image
from vitrail.data.transforms.preprocess import normalise, resize_and_crop

class Api(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(1)
        self.model = vitrail.load(sys.argv[1]).eval()
    def decode_request(self, request):
        return resize_and_crop(decode_image(request["image"].file.read()), self.model.preprocessing)
    def batch(self, inputs):
        return normalise(torch.stack(inputs), self.model.preprocessing)
    def predict(self, images):
        with torch.inference_mode():
            return self.model(images).softmax(dim=1).topk(5)
    def unbatch(self, output):
        return list(zip(output.values.tolist(), output.indices.tolist()))
    def encode_response(self, output):
        return {"labels": [{"label": str(n), "probability": p} for p, n in zip(*output)]}

if __name__ == "__main__":  # its workers import this file again
    api = Api(max_batch_size=32, batch_timeout=0.005, api_path="/v1/classify")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[2]), generate_client_file=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peer", action="store_true", help="LitServe too.")
    parser.add_argument("--log", action="store_true", help="Our server without its access log too.")
    parser.add_argument("--out", type=Path, help="A file for the figures, which are printed too.")
    options = parser.parse_args()
    ours, theirs = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {theirs})
    names = ["vitrail", *([UNLOGGED] if options.log else []), *(["litserve"] if options.peer else [])]
    if options.peer and importlib.util.find_spec("litserve") is None:
        sys.exit("litserve is not installed: pip install litserve")
    found: dict[str, Any] = {"machine": machine(), "versions": versions(names), "rounds": options.rounds}
    for title in options.models:
        found[title] = measured(CASES[title], names, options.rounds, ours)
        text = json.dumps(found, indent=1)
        if options.out is not None:
            options.out.write_text(text + "\n")
    print(text)


def measured(case: Case, names: list[str], rounds: int, core: int) -> dict[str, Any]:
    """What came of all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        model, photo = prepared(Path(folder), case.model, case.image_size, case.photo)
        alone: dict[str, list[float]] = {"plain": [], "packed": []}
        loads: dict[str, dict[int, list[Load]]] = {name: {count: [] for count in case.seconds} for name in names}
        for number in range(rounds):
            for how, found in alone.items():
                found.append(offline(model, photo, max(case.seconds), how, core))
            for name in names:
                request = asked(photo.read_bytes(), form=name == "litserve")
                with server(name, model, core) as port:
                    for count, seconds in case.seconds.items():
                        asyncio.run(load(port, request, count, 2.0))
                        loads[name][count].append(asyncio.run(load(port, request, count, seconds)))
            print(f"{case.model}: round {number + 1} of {rounds}", file=sys.stderr)
    summed = {name: {count: summary(told) for count, told in by_count.items()} for name, by_count in loads.items()}
    return {
        "case": case._asdict(),
        "offline": {how: statistics.median(found) for how, found in alone.items()},
        **summed,
    }


def summary(rounds: list[Load]) -> dict[str, Any]:
    """Of one server at one number of connections."""
    times = [seconds for one in rounds for seconds in one.times]
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    rates = [len(one.times) / one.seconds for one in rounds]
    statuses = Counter(status for one in rounds for status in one.statuses.elements())
    return {
        "per_second": round(statistics.median(rates), 2),
        "p50_ms": round(cuts[49] * 1000, 1),
        "p99_ms": round(cuts[98] * 1000, 1),
        "requests": len(times),
        "statuses": dict(statuses),
        "per_second_of_rounds": [round(rate, 2) for rate in rates],
    }


def machine() -> str:
    """Its processor by name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def versions(names: list[str]) -> dict[str, str]:
    """Of what takes part."""
    packages = ["torch", "granian", "pillow", *(name for name in names if name == "litserve")]
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def prepared(folder: Path, name: str, size: int, photo_size: tuple[int, int]) -> tuple[Path, Path]:
    """A model and a photograph on the disk."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    import vitrail
    from vitrail.weights.save import save

    file = io.BytesIO()
    Image.fromarray(load_sample_images().images[0]).resize(photo_size).save(file, "JPEG", quality=90)
    (folder / "photo.jpg").write_bytes(file.getvalue())
    return save(vitrail.create_model(name, image_size=size, seed=0), folder / "model"), folder / "photo.jpg"


def pinned(core: int, *command: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ("taskset", "-c", str(core), sys.executable, *command)
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)


def offline(model: Path, photo: Path, batch: int, how: str, core: int) -> float:
    given = (str(model), str(photo), str(OFFLINE_SECONDS), str(min(batch, 32)), how)
    process = pinned(core, "-c", OFFLINE, *given, stdout=subprocess.PIPE)
    return float(json.loads(process.communicate()[0]))


@contextmanager
def server(name: str, model: Path, core: int) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = ["-c", VITRAIL, "--model", f"model={model}", "--port", str(port), "--threads", "1"]
    command += ["--deadline", "60"]  # nothing is refused here: what is measured is all that was asked
    command += ["--access-log", "off"] if name == UNLOGGED else []
    if name == "litserve":
        script = model.parent / "behind_litserve.py"
        script.write_text(LITSERVE)
        command = [str(script), str(model), str(port)]
    with (model.parent / "log").open("w") as log:
        process = pinned(core, *command, stdout=subprocess.DEVNULL, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/{'health' if name == 'litserve' else 'readyz'}", timeout=1
                )
                break
            except OSError:
                assert process.poll() is None, f"{name} ended"
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()
        with suppress(ProcessLookupError):  # LitServe leaves processes behind, which would share the core from then on
            os.killpg(process.pid, signal.SIGKILL)


def asked(photo: bytes, form: bool) -> bytes:
    """A request: the image itself, or a form that holds it, for LitServe reads JSON and forms alone."""
    kind, body = "image/jpeg", photo
    if form:
        kind = "multipart/form-data; boundary=edge"
        place = b'Content-Disposition: form-data; name="image"; filename="photo.jpg"'
        head = b"--edge\r\n" + place + b"\r\nContent-Type: image/jpeg\r\n\r\n"
        body = head + photo + b"\r\n--edge--\r\n"
    return (
        f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


class Load(NamedTuple):
    """Requests over some time."""

    times: list[float]
    """Seconds of each that was answered 200."""
    statuses: Counter[str]
    seconds: float


async def load(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """As many questions as are answered in that time."""
    times, statuses = list[float](), Counter[str]()
    start = time.perf_counter()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) - start < seconds:
            writer.write(request)
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(headers.split(b"content-length: ")[1].split(b"\r\n")[0]))
            status = headers[9:12].decode()
            statuses[status] += 1
            if status == "200":
                times.append(time.perf_counter() - sent)
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
    return Load(times, statuses, time.perf_counter() - start)


if __name__ == "__main__":
    main()
