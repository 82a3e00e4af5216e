"""Predictions on several ranks: python prediction_ranks.py JOBS.json

A job is {"size", "options"}, the options of `vitrail.predict`, and perhaps "images" (the images of each rank), "kill"
(a rank that is killed with all others after it has written a part) and "lose" (the same, but the others go
on). Everything is imported once; each rank is a fork. Prints the exit codes and what the ranks say of each job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import torch

from vitrail.errors import VitrailError
from vitrail.inference import prediction_parts
from vitrail.inference.predict import predict
from vitrail.inference.prediction_parts import PredictionParts


def main() -> None:
    torch.set_num_threads(1)
    prediction_parts.LEAST_IMAGES = 4
    print(json.dumps([run_job(job) for job in json.loads(Path(sys.argv[1]).read_text())]))


def run_job(job: dict) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder) / str(rank) for rank in range(job["size"])]
        children = [fork(job, rank, port, path) for rank, path in enumerate(told)]
        codes: dict[int, int] = {}
        while len(codes) < len(children):
            child, status = os.wait()
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child] and "lose" not in job:  # as torchrun does
                for other in set(children) - set(codes):
                    os.kill(other, signal.SIGKILL)
        said = [json.loads(path.read_text()) if path.exists() else None for path in told]
    return {"codes": [codes[child] for child in children], "said": said}


def fork(job: dict, rank: int, port: int, told: Path) -> int:
    child = os.fork()
    if child:
        return child
    if job["size"] > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["size"]), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if rank in (job.get("kill"), job.get("lose")):
        kill_after_part()
    images = job["images"][rank] if "images" in job else "photos"
    events: list = []
    computed = count_written_images()
    code = 0
    said: dict = {}
    try:
        result = predict(images, device="cpu", on_event=lambda *event: events.append(event), **job["options"])
        said = {"predictions": len(result), "left_out": [each.file for each in result.left_out]}
        said["done_before"] = result.done_before
    except VitrailError as error:
        code, said = 1, {"error": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        code, said = 70, {"error": repr(error)}
    told.write_text(json.dumps({**said, "computed": sum(computed), "events": len(events)}))
    os._exit(code)


def kill_after_part() -> None:
    write = PredictionParts.write

    def write_and_die(self, number, answered):
        write(self, number, answered)
        signal.raise_signal(signal.SIGKILL)

    PredictionParts.write = write_and_die


def count_written_images() -> list[int]:
    """Return a list that gets the number of images of each part that is written."""
    write, counts = PredictionParts.write, []

    def write_and_count(self, number, answered):
        counts.append(len(answered))
        write(self, number, answered)

    PredictionParts.write = write_and_count
    return counts


main()
