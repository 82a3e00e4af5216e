"""A training under faults: does it end as the same training does that is left alone?

    python tests/torture/torture_training.py --minutes 30 --out FILE.json

A round trains a small model on real photographs, some of them damaged, with a batch of NaN now and then; first alone,
and then under faults until it has trained to its end: ranks and workers are killed, frozen and asked to stop, the disk
fills up or is read-only, the newest checkpoint is shortened, changed or incomplete, the clock jumps, the numbers
of workers and ranks change. Every start is a fork of this process, so that the time goes to faults, not to imports.

What must hold is in `LIMITS` and `Round.compare`. The report is written after every round; the exit code is 1 if
anything was lost. Where this process may not mount a small disk (it needs root on Linux), those faults are left out,
and the report says so.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # FSDP would import it in every fork
from PIL import Image
from safetensors.torch import load_file

from vitrail.benchmark.machine import read_commit
from vitrail.cli.printing import stop_on_sigterm
from vitrail.errors import Stopped, VitrailError
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.training import step as step_module
from vitrail.training.checkpoint_folder import STATE, find_damage, list_checkpoints
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training

STEPS, NAN_EVERY = 300, 40
LIMITS = {"seconds until all ranks have ended": 60.0, "seconds until a start makes its first step": 60.0}
TOLERANCE = 0.02
"""How far losses may be apart where the number of ranks changes: sums are then added up in another order, and what that
rounds away grows in 300 steps. A batch that was repeated or left out changes them by 0.1 and more."""
LOG = "metrics.jsonl"
MOST_FAILURES = 3
"""A round is given up after so many starts that failed without a fault."""
DISK_MB = 48
WAYS = {"one rank": (1, 1), "two ranks": (2, 2), "sharded": (2, 2), "one or two ranks": (1, 2)}
"""The fewest and most ranks of a start."""
ORPHANED = ", in _serve\n"
"""In each traceback that a worker writes whose parent was killed while it received file handles."""
ENDS_WELL, STOPPED, FAILED, UNEXPECTED = 0, 3, 1, 70


class Start(NamedTuple):
    """One start of a training: its ranks, and where they write what goes wrong."""

    children: list[int]
    log: Path


@dataclass
class Tally:
    """What happened so far."""

    faults: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    steps: int = 0
    """Steps trained under faults, without those that were lost and repeated."""
    slowest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0.0))
    largest_difference: float = 0.0
    orphans: int = 0
    """Tracebacks of workers whose parent was killed while it received their file handles: written by Python itself."""
    sentences: Counter[str] = field(default_factory=Counter)
    """How starts ended that failed, without numbers and paths."""
    losses: list[str] = field(default_factory=list)
    """What must not happen, and did."""

    def note_time(self, what: str, seconds: float) -> None:
        self.slowest[what] = max(self.slowest[what], seconds)
        if seconds > LIMITS[what]:
            self.losses.append(f"{what}: {seconds:.0f}")


# The data, and the training


def make_photos(folder: Path, count: int = 240) -> None:
    """Write pieces of two photographs as JPEGs, in two classes, and six files that are no whole images."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    for name, photo in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            top, left = (int(rng.integers(0, side - 64)) for side in photo.shape[:2])
            Image.fromarray(photo[top : top + 48, left : left + 64]).save(folder / name / f"{number:03}.jpg")
    whole = (folder / "temple" / "000.jpg").read_bytes()
    pieces = io.BytesIO()
    Image.fromarray(load_sample_images().images[0][:32, :32]).save(pieces, "PNG")
    png = bytearray(pieces.getvalue())
    png[16:24] = (2**30).to_bytes(4, "big") * 2  # its header claims 2^30 × 2^30 pixels
    broken = {
        "short.jpg": whole[: len(whole) // 2],
        "empty.jpg": b"",
        "text.jpg": b"not an image",
        "lying.png": bytes(png),
        "header.jpg": whole[:20],
        "middle.jpg": whole[:200] + bytes(200) + whole[200:300],
    }
    for name, content in broken.items():
        (folder / "flower" / name).write_bytes(content)


def make_config(photos: Path, folder: Path, way: str, seed: int, workers: int) -> Any:
    """Return the configuration of a training. Where ranks change, nothing is drawn by each rank for itself."""
    drawn = 0.0 if way == "one or two ranks" else 0.1
    model = {"name": "Ti/4", "image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
    return resolve(
        {
            "model": {**model, "dropout": drawn, "stochastic_depth": drawn},
            "data": {"source": str(photos), "batch_size": 16, "workers": workers},
            "optimizer": {"learning_rate": 1e-3, "averaging": 0.9, "weight_decay": 0.05},
            "schedule": {"steps": STEPS, "warmup_steps": 10},
            "run": {
                "folder": str(folder),
                "seed": seed,
                "deterministic": True,
                "parallel": "fsdp" if way == "sharded" else "ddp",
                "log_every": 1,
                "evaluate_every": 50,
                "checkpoint_every": 5,
                "keep": 3,
                "timeout": LIMITS["seconds until all ranks have ended"] / 2,
                "trackers": (),
                "report": False,
            },
        }
    )


def feed_nan(every: int) -> None:
    """Make the outputs of one step in `every` NaN, as a batch of NaN would: in all trainings that follow."""
    compute_gradients, hooked = step_module.compute_gradients, list[int]()

    def compute(run: Any, step: int, batch: Any) -> Any:
        model = run.learner.objective.model
        if id(model) not in hooked:
            hooked[:] = [id(model)]
            model.register_forward_hook(lambda module, inputs, output: output * feed_nan.factor)  # type: ignore[attr-defined]
        feed_nan.factor = float("nan") if step % every == every // 2 else 1.0  # type: ignore[attr-defined]
        try:
            return compute_gradients(run, step, batch)
        finally:
            feed_nan.factor = 1.0  # type: ignore[attr-defined]

    step_module.compute_gradients = compute


def start_training(photos: Path, folder: Path, way: str, seed: int, log: Path, rng: random.Random | None) -> Start:
    """Fork the ranks of a start. With `rng` it has another number of workers and ranks, and its clock may jump."""
    fewest, most = WAYS[way]
    size = most if rng is None else rng.randint(fewest, most)
    workers = 0 if rng is None else rng.choice([0, 0, 1, 2])
    jump = 0.0 if rng is None or rng.random() < 0.7 else rng.uniform(-1e8, 1e8)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            if size > 1:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(size))
            try:
                train_and_leave(make_config(photos, folder, way, seed, workers), log, jump)
            finally:
                os._exit(UNEXPECTED)
        children.append(child)
    return Start(children, log)


def train_and_leave(config: Any, log: Path, jump: float) -> None:
    """Train in this process, and end it with the exit code of the command."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
    begin, real = time.monotonic(), time.time
    if jump:
        time.time = lambda: real() + (jump if time.monotonic() - begin > 1 else 0.0)
    code = ENDS_WELL
    try:
        with stop_on_sigterm():
            run_training(config, fewshot=open_training_fewshot)
    except VitrailError as error:
        print(f"told: {error}", file=sys.stderr)
        code = STOPPED if isinstance(error, Stopped) else FAILED
    except BaseException as error:
        print(f"unexpected: {error!r}", file=sys.stderr)
        code = UNEXPECTED
    sys.stderr.flush()
    os._exit(code)


# The disk


@contextmanager
def open_small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk in memory at `folder` while the block runs, and yield whether that is allowed here."""
    folder.mkdir()
    mounted = mount("-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder))
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def fill_disk(filler: Path) -> None:
    """Write zeros until nothing more fits."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


# Checkpoints


def damage_checkpoint(folder: Path, how: str, rng: random.Random) -> bool:
    """Damage the newest checkpoint, and return whether it could be: the one before it must be there to go on from."""
    found = list(list_checkpoints(folder / "checkpoints").values())
    if len(found) < 2:
        return False
    file = rng.choice(sorted(path for path in found[-1].iterdir() if path.stat().st_size))
    if how == "the newest checkpoint is shortened":
        os.truncate(file, rng.randrange(file.stat().st_size))
    elif how == "a file of the newest checkpoint is gone":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        if bytes(content) == file.read_bytes():  # two flips of the same bit
            content[0] ^= 1
        file.write_bytes(content)
    return True


READ_ONLY = "the disk is read-only at the start"
DAMAGES = (
    "the newest checkpoint is shortened",
    "bits of the newest checkpoint are flipped",
    "a file of the newest checkpoint is gone",
)
FAULTS = {
    "a rank is killed (−9)": 3,
    "a rank is asked to stop (−15)": 2,
    "all ranks are killed at once (−9)": 2,
    "a worker is killed (−9)": 2,
    "a worker is asked to stop (−15)": 1,
    "a rank is frozen for a while": 1,
    "the disk is full for a while": 2,
}
"""With their weights. A damage of the newest checkpoint follows a kill."""
CODES: dict[str, set[int]] = {
    "a rank is killed (−9)": {-signal.SIGKILL, FAILED},
    "a rank is asked to stop (−15)": {STOPPED},  # and between steps, among others: see `Round._judge`
    "all ranks are killed at once (−9)": {-signal.SIGKILL},
    "a worker is killed (−9)": {FAILED},
    "a worker is asked to stop (−15)": {FAILED},
    "a rank is frozen for a while": set(),
    "the disk is full for a while": {FAILED},
    READ_ONLY: {FAILED},
}
"""The exit codes that a fault explains, besides that of a training that has come to its end."""


# A round


class Round:
    """The same training twice: alone, and under faults."""

    def __init__(self, place: Path, photos: Path, has_disk: bool, way: str, seed: int, tally: Tally) -> None:
        self.photos, self.has_disk, self.way, self.seed, self.tally = photos, has_disk, way, seed, tally
        self.rng = random.Random(seed)
        self.alone, self.faulty = place / f"alone-{seed}", place / "disk" / f"faulty-{seed}"
        self.filler, self.log = place / "disk" / "filler", place / "log"

    def run(self, deadline: float) -> None:
        """Train to the end twice. After the deadline no faults are made, so that the round ends."""
        begin = time.monotonic()
        codes = self._wait(self._start(self.alone, faulty=False))
        took = time.monotonic() - begin
        if set(codes) != {ENDS_WELL}:
            self._note_loss(f"the training that was left alone ended with {codes}")
            return
        failures = 0
        while failures < MOST_FAILURES:
            is_last = time.monotonic() > deadline
            if not is_last and self.rng.random() < 0.1:
                self._start_on_read_only_disk()
            prefix = read_log_until(self.faulty, find_last_step(self.faulty))
            start = self._start(self.faulty, faulty=not is_last)
            faults = [] if is_last else self._make_faults(start, took)
            codes = self._wait(start)
            self._judge(codes, faults)
            if prefix and not (self.faulty / LOG).read_bytes().startswith(prefix):
                self._note_loss("a start did not go on from the newest whole checkpoint")
            if set(codes) == {ENDS_WELL}:
                break
            failures += not faults
            if self.rng.random() < 0.3:
                how = self.rng.choice(DAMAGES)
                if damage_checkpoint(self.faulty, how, self.rng):
                    self.tally.faults[how] += 1
        else:
            return  # its losses are noted
        self.compare()
        self.tally.rounds[self.way] += 1
        self.tally.steps += STEPS
        for folder in (self.alone, self.faulty):
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, folder: Path, faulty: bool) -> Start:
        self.log.unlink(missing_ok=True)
        self.tally.starts += 1
        return start_training(self.photos, folder, self.way, self.seed, self.log, self.rng if faulty else None)

    def _make_faults(self, start: Start, took: float) -> list[str]:
        """Make faults until one should end this start, and return those that were made."""
        made: list[str] = []
        before, begin = count_lines(self.faulty), time.monotonic()
        while count_lines(self.faulty) <= before and any(map(is_alive, start.children)):
            if time.monotonic() - begin > LIMITS["seconds until a start makes its first step"]:
                break
            time.sleep(0.02)
        self.tally.note_time("seconds until a start makes its first step", time.monotonic() - begin)
        while all(map(is_alive, start.children)):
            time.sleep(self.rng.uniform(0, took / 4))
            (fault,) = self.rng.choices(list(FAULTS), list(FAULTS.values()))
            if all(map(is_alive, start.children)) and self._make(fault, start):
                made.append(fault)
                self.tally.faults[fault] += 1
                if not fault.endswith("for a while"):
                    break
        return made

    def _make(self, fault: str, start: Start) -> bool:
        """Make a fault, and return whether it could be made."""
        rank = self.rng.choice(start.children)
        match fault:
            case "a rank is killed (−9)":
                os.kill(rank, signal.SIGKILL)
            case "a rank is asked to stop (−15)":
                os.kill(rank, signal.SIGTERM)
            case "all ranks are killed at once (−9)":
                for each in start.children:
                    os.kill(each, signal.SIGKILL)
            case "a worker is killed (−9)" | "a worker is asked to stop (−15)":
                workers = [worker for each in start.children for worker in list_children(each)]
                if not workers:
                    return False
                sign = signal.SIGKILL if "−9" in fault else signal.SIGTERM
                with suppress(ProcessLookupError):
                    os.kill(self.rng.choice(workers), sign)
            case "a rank is frozen for a while":
                os.kill(rank, signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.2, 2))
                os.kill(rank, signal.SIGCONT)
            case "the disk is full for a while":
                if not self.has_disk:
                    return False
                fill_disk(self.filler)
                time.sleep(self.rng.uniform(0.2, 2))
                self.filler.unlink()
        return True

    def _start_on_read_only_disk(self) -> None:
        """Start where nothing can be written: every rank must say so and end."""
        disk = str(self.filler.parent)
        if not (self.has_disk and mount("-o", "remount,ro", disk)):
            return
        self.tally.faults[READ_ONLY] += 1
        try:
            codes = self._wait(self._start(self.faulty, faulty=True))
        finally:
            mount("-o", "remount,rw", disk)
        self._judge(codes, [READ_ONLY])
        if set(codes) != {FAILED}:
            self._note_loss(f"on a disk that is read-only it ended with {codes}")

    def _wait(self, start: Start) -> list[int]:
        """Wait until all ranks have ended, and return their exit codes. Those that hang are killed, and told."""
        begin, codes, left = time.monotonic(), {}, set(start.children)
        most = LIMITS["seconds until all ranks have ended"]
        newest, moved = count_lines(self.faulty) + count_lines(self.alone), time.monotonic()
        while left:
            for child in sorted(left):
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    left.discard(child)
            lines = count_lines(self.faulty) + count_lines(self.alone)
            if lines != newest:
                newest, moved = lines, time.monotonic()  # it trains
            if left and time.monotonic() - moved > most:
                self._note_loss(f"{len(left)} ranks hung for {most:.0f} seconds")
                for child in left:
                    os.kill(child, signal.SIGKILL)
                moved = time.monotonic()
            time.sleep(0.02)
        if set(codes.values()) != {ENDS_WELL}:
            self.tally.note_time("seconds until all ranks have ended", time.monotonic() - max(begin, moved))
        return [codes[child] for child in start.children]

    def _judge(self, codes: list[int], faults: list[str]) -> None:
        """Check that a start ended as its faults explain, and said so in a sentence."""
        told = self.log.read_text(errors="replace") if self.log.exists() else ""
        for line in told.splitlines():
            if line.startswith("told: "):
                self.tally.sentences[simplify(line.removeprefix("told: "))] += 1
        orphans = told.count(ORPHANED) if any("killed" in fault for fault in faults) else 0
        self.tally.orphans += orphans
        if UNEXPECTED in codes or told.count("Traceback") > orphans:
            self._note_loss(f"after {faults}: {told[-2000:]}")
        allowed = {ENDS_WELL}.union(*(CODES[fault] for fault in faults))
        if -signal.SIGTERM in codes and STOPPED in allowed and len(codes) > 1:  # while no step was computed
            allowed |= {-signal.SIGTERM, FAILED}
        if wrong := set(codes) - allowed:
            self._note_loss(f"ended with {sorted(wrong)} after {faults}: {told[-500:]}")
        if told.count("told: ") < codes.count(FAILED):
            self._note_loss(f"ended with {codes} and too few sentences")
        if "told: stopped after step" in told and find_last_step(self.faulty) != count_steps(self.faulty):
            self._note_loss("it was asked to stop, and did not save its last step")

    def _note_loss(self, what: str) -> None:
        self.tally.losses.append(f"{self.way}, seed {self.seed}: {what}")
        print(self.tally.losses[-1], file=sys.stderr, flush=True)

    def compare(self) -> None:
        """Check that both trainings have done the same steps, with the same bits where that is promised."""
        ours, theirs = (read_records(folder) for folder in (self.alone, self.faulty))
        steps = [each["step"] for each in theirs if each["kind"] == "train"]
        if steps != list(range(1, STEPS + 1)):
            self._note_loss("the log does not have every step once")
            return
        skipped = ours[-1].get("skipped", next(e["skipped"] for e in reversed(ours) if "skipped" in e))
        if skipped != len(range(NAN_EVERY // 2, STEPS, NAN_EVERY)):
            self._note_loss(f"{skipped} steps were skipped")
        if self.way == "one or two ranks":
            losses = [
                np.array([each.get("loss", math.nan) for each in records if each["kind"] == "train"])
                for records in (ours, theirs)
            ]
            apart = np.abs(losses[0] - losses[1])
            worst = float(apart[~np.isnan(losses).all(axis=0)].max())  # NaN if only one of two is
            self.tally.largest_difference = max(self.tally.largest_difference, worst)
            if not worst <= TOLERANCE:
                self._note_loss(f"losses differ by {worst:g}")
            return
        if json.dumps(ours) != json.dumps(theirs):  # as text, for NaN is not equal to itself
            self._note_loss("the logs differ")
        if read_state(self.alone) != read_state(self.faulty):
            self._note_loss("what is saved besides tensors differs")
        one, two = read_tensors(self.alone), read_tensors(self.faulty)
        differing = [name for name in one if name not in two or not torch.equal(one[name], two[name])]
        if differing or one.keys() != two.keys():
            self._note_loss(f"{len(differing)} of {len(one)} tensors differ, such as {differing[:1]}")


def find_last_step(folder: Path) -> int:
    """Return the step of the newest whole checkpoint, 0 if there is none."""
    found = list_checkpoints(folder / "checkpoints")
    return max((step for step, path in found.items() if find_damage(path) is None), default=0)


def read_log_until(folder: Path, step: int) -> bytes:
    """Return the log up to the record of a training step, with its clock, which no second training repeats."""
    path, prefix = folder / LOG, b""
    if step == 0 or not path.exists():
        return prefix
    for line in path.read_bytes().splitlines(keepends=True):
        record = json.loads(line)
        if record["step"] > step:
            break
        prefix += line if record["kind"] == "train" or record["step"] < step else b""
    return prefix


def count_steps(folder: Path) -> int:
    """Return the last training step in the log."""
    return max((each["step"] for each in read_records(folder) if each["kind"] == "train"), default=0)


def is_alive(pid: int) -> bool:
    """Return whether a child runs, also if it has not been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def list_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def count_lines(folder: Path) -> int:
    try:
        return (folder / LOG).read_bytes().count(b"\n")
    except OSError:
        return 0


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the log of a training without what the clock decides."""
    records = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [{key: value for key, value in each.items() if key != "clock"} for each in records]


def find_last(folder: Path) -> Path:
    return list(list_checkpoints(folder / "checkpoints").values())[-1]


def read_state(folder: Path) -> str:
    state = json.loads((find_last(folder) / STATE).read_text())
    del state["seconds"]
    return json.dumps(state)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, and of the weights saved at the end, by their files."""
    files = [*find_last(folder).glob("*.safetensors"), *(folder / "model").glob("*.safetensors")]
    return {f"{path.name}/{name}": tensor for path in sorted(files) for name, tensor in load_file(path).items()}


def simplify(sentence: str) -> str:
    """Return a message without paths and numbers, so that equal ones are counted together."""
    words = ("…" if "/" in word else word for word in sentence.split())
    return "".join("#" if letter.isdigit() else letter for letter in " ".join(words)).replace("##", "#")[:160]


def report(tally: Tally, minutes: float, seed: int, began: float, has_disk: bool) -> dict[str, Any]:
    return {
        "command": f"make torture MINUTES={minutes:g}",
        "seed": seed,
        "commit": read_commit(),
        "device": "cpu",
        "machine": f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "minutes": (time.monotonic() - began) / 60,
        "rounds": dict(tally.rounds),
        "starts": tally.starts,
        "steps under faults": tally.steps,
        "faults": sum(tally.faults.values()),
        "by kind": dict(sorted(tally.faults.items())),
        "left out": [] if has_disk else [fault for fault in (*FAULTS, READ_ONLY) if "disk" in fault],
        "slowest": tally.slowest,
        "limits": LIMITS,
        "largest difference of a loss where ranks change": tally.largest_difference,
        "tolerance": TOLERANCE,
        "how starts ended that failed": dict(tally.sentences.most_common()),
        "tracebacks of Python in workers whose parent was killed": tally.orphans,
        "losses": tally.losses,
    }


def torture(minutes: float, seed: int = 0, out: Path | None = None) -> dict[str, Any]:
    """Make rounds until the time is over, and return the report. Seeds of rounds count up from `seed`."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    feed_nan(NAN_EVERY)
    began, tally = time.monotonic(), Tally()
    deadline = began + 60 * minutes
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_photos(place / "photos")
        with open_small_disk(place / "disk") as has_disk:
            for number in itertools.count(seed):
                way = list(WAYS)[number % len(WAYS)]
                Round(place, place / "photos", has_disk, way, number, tally).run(deadline)
                found = report(tally, minutes, seed, began, has_disk)
                if out is not None:
                    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
                print(
                    f"{found['minutes']:.1f} minutes: {found['faults']} faults, {len(tally.losses)} losses", flush=True
                )
                if time.monotonic() > deadline:
                    break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--out", type=Path, help="a file for the report, which is printed too")
    options = parser.parse_args()
    found = torture(options.minutes, options.seed, options.out)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    sys.exit(bool(found["losses"]))


if __name__ == "__main__":
    main()
