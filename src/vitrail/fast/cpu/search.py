"""Which precision is fastest on this CPU for a model and a batch: tried out once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import vitrail
from vitrail.fast.cpu.candidates import CPU_PRECISIONS, cpu_embedder
from vitrail.fast.cpu.compiler import processor_key
from vitrail.fast.measure import Stopwatch, relative_distance, take_turns
from vitrail.model.base import ImageModel
from vitrail.system.processor import cache_folder

MOST_DISTANCE = 0.05
"""‖Δy‖/‖y‖ from the plain model, on random images: what is further off is not chosen, however fast."""
ROUNDS = 5
SECONDS = 0.3
"""Of one turn."""
MOST_SECONDS = 30.0
"""That all rounds take, about; there is always one."""
FILE = "cpu_precision.json"


@dataclass(frozen=True)
class Choice:
    """What a search found."""

    precision: str
    seconds: dict[str, float]
    """Of one batch, by precision; those that could not be tried are missing."""
    distances: dict[str, float]
    """From the plain model, by precision."""


def best_on_cpu(model: ImageModel, batch: int, tell: Callable[[str], None] = lambda line: None) -> Choice:
    """The fastest precision that is near enough to the plain model, as measured here, now or earlier.

    Kept by processor, number of threads, versions, architecture, weights and batch.
    """
    key = _key(model, batch)
    found = _remembered(key)
    if found is None:
        found = _searched(model, batch, tell)
        _remember(key, found)
    return found


@torch.no_grad()
def _searched(model: ImageModel, batch: int, tell: Callable[[str], None]) -> Choice:
    images = torch.randn(batch, model.in_channels, *model.image_size, generator=torch.Generator().manual_seed(0))
    was_training = model.training
    reference = model.eval().embed(images)
    model.train(was_training)
    candidates: dict[str, nn.Module] = {}
    distances: dict[str, float] = {}
    began = time.perf_counter()
    for precision in CPU_PRECISIONS:
        try:
            candidate = cpu_embedder(model, precision)
            distances[precision] = relative_distance(candidate(images), reference)
            candidates[precision] = candidate
        except Exception as error:  # an operator that a torch or a processor lacks says so in many ways
            tell(f"{precision}: left out, because {error}")
    rounds = max(1, min(ROUNDS, int(MOST_SECONDS / max(time.perf_counter() - began, 1e-9))))
    turns = {name: partial(_turn, candidate, images) for name, candidate in candidates.items()}
    taken = take_turns(turns, rounds, lambda name, error: tell(f"{name}: failed, because {error}"))
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in seconds.items():
        tell(f"{name}: {1e3 * value:.1f} ms for a batch of {batch}, distance {distances[name]:.1e}")
    return Choice(_fastest(seconds, distances), seconds, {name: distances[name] for name in seconds})


def _fastest(seconds: dict[str, float], distances: dict[str, float]) -> str:
    near = [name for name in seconds if distances[name] <= MOST_DISTANCE]
    return min(near, key=seconds.__getitem__, default="fp32")


def _turn(candidate: nn.Module, images: Tensor) -> float:
    """Seconds of a call; the first of a turn only fills caches."""
    watch = Stopwatch(images.device)
    return watch.together(lambda: candidate(images), watch.calls_in(lambda: candidate(images), SECONDS))


def _key(model: ImageModel, batch: int) -> str:
    parts = (
        processor_key(),
        f"{torch.get_num_threads()} threads",
        f"torch {torch.__version__}",
        f"vitrail {vitrail.__version__}",
        f"{model.architecture.model_dump_json()} {_digest(model)}",
        f"batch {batch}",
    )
    return " | ".join(parts)


def _digest(model: ImageModel) -> str:
    """Of some numbers of every tensor: enough to tell one set of weights from another."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        flat = tensor.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _kept() -> dict[str, object]:
    try:
        found = json.loads((cache_folder() / FILE).read_text())
    except (OSError, ValueError, RuntimeError):  # RecursionError is one of the last; so is not knowing where home is
        return {}
    return found if isinstance(found, dict) else {}


def _remembered(key: str) -> Choice | None:
    record = _kept().get(key)
    try:
        found = Choice(**record)  # type: ignore[arg-type]
        usable = found.precision in CPU_PRECISIONS and all(float(value) > 0 for value in found.seconds.values())
    except (TypeError, ValueError, AttributeError):
        return None
    return found if usable else None


def _remember(key: str, choice: Choice) -> None:
    """Written beside and renamed: a reader never sees half a file. A read-only home costs a search each time."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump({**_kept(), key: asdict(choice)}, file, indent=1)
        Path(file.name).replace(folder / FILE)
    except (OSError, RuntimeError):
        return
