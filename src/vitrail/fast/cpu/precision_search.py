"""Find the fastest precision on this CPU for a model and a batch size: measured once, then cached for the user."""

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
from vitrail.fast.cpu.embedders import CPU_PRECISIONS, create_cpu_embedder
from vitrail.fast.timing import Stopwatch, relative_distance, take_turns
from vitrail.model.base import ImageModel
from vitrail.system.compiler import processor_key
from vitrail.system.processor import cache_folder

MOST_DISTANCE = 0.05
"""Largest ‖Δy‖/‖y‖ from the plain model, on random images, of a precision that may be chosen."""
ROUNDS = 5
SECONDS = 0.3
"""Length of one turn."""
MOST_SECONDS = 30.0
"""About the longest time for all rounds; there is always at least one round."""
FILE = "cpu_precision.json"


@dataclass(frozen=True)
class PrecisionChoice:
    """The result of a search."""

    precision: str
    seconds: dict[str, float]
    """Median seconds of a batch, by precision. Precisions that do not run here are absent."""
    distances: dict[str, float]
    """‖Δy‖/‖y‖ from the plain model, by precision."""


def find_fastest_precision(
    model: ImageModel, batch: int, on_message: Callable[[str], None] = lambda line: None
) -> PrecisionChoice:
    """Return the fastest precision whose representations are close enough to the plain model's.

    The result is cached by processor, number of threads, versions, architecture, weights and batch size.

    Args:
        model: A float32 model on the CPU.
        batch: Number of images to measure with.
        on_message: Gets a line of text about every precision that is tried.
    """
    key = _cache_key(model, batch)
    choice = _load_choice(key)
    if choice is None:
        choice = _search_precisions(model, batch, on_message)
        _store_choice(key, choice)
    return choice


@torch.no_grad()
def _search_precisions(model: ImageModel, batch: int, on_message: Callable[[str], None]) -> PrecisionChoice:
    images = torch.randn(batch, model.in_channels, *model.image_size, generator=torch.Generator().manual_seed(0))
    was_training = model.training
    reference = model.eval().embed(images)
    model.train(was_training)
    candidates: dict[str, nn.Module] = {}
    distances: dict[str, float] = {}
    began = time.perf_counter()
    for precision in CPU_PRECISIONS:
        try:
            candidate = create_cpu_embedder(model, precision)
            distances[precision] = relative_distance(candidate(images), reference)
            candidates[precision] = candidate
        except Exception as error:  # a missing operator is reported in many ways
            on_message(f"{precision}: left out, because {error}")
    rounds = max(1, min(ROUNDS, int(MOST_SECONDS / max(time.perf_counter() - began, 1e-9))))
    turns = {name: partial(_time_turn, candidate, images) for name, candidate in candidates.items()}
    times = take_turns(turns, rounds, lambda name, error: on_message(f"{name}: failed, because {error}"))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    for name, value in seconds.items():
        on_message(f"{name}: {1e3 * value:.1f} ms for a batch of {batch}, distance {distances[name]:.1e}")
    return PrecisionChoice(_pick_fastest(seconds, distances), seconds, {name: distances[name] for name in seconds})


def _pick_fastest(seconds: dict[str, float], distances: dict[str, float]) -> str:
    close = [name for name in seconds if distances[name] <= MOST_DISTANCE]
    return min(close, key=seconds.__getitem__, default="fp32")


def _time_turn(candidate: nn.Module, images: Tensor) -> float:
    """Return the mean seconds of a call. The first call of a turn, which fills the caches, is not counted."""
    watch = Stopwatch(images.device)
    return watch.time_calls(lambda: candidate(images), watch.count_calls(lambda: candidate(images), SECONDS))


def _cache_key(model: ImageModel, batch: int) -> str:
    parts = (
        processor_key(),
        f"{torch.get_num_threads()} threads",
        f"torch {torch.__version__}",
        f"vitrail {vitrail.__version__}",
        f"{model.architecture.model_dump_json()} {_hash_weights(model)}",
        f"batch {batch}",
    )
    return " | ".join(parts)


def _hash_weights(model: ImageModel) -> str:
    """Return a hash of some numbers of every tensor: enough to tell two sets of weights apart."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        flat = tensor.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _read_cache() -> dict[str, object]:
    try:
        content = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: nested too deeply, or the home folder is unknown
        return {}
    return content if isinstance(content, dict) else {}


def _load_choice(key: str) -> PrecisionChoice | None:
    record = _read_cache().get(key)
    try:
        choice = PrecisionChoice(**record)  # type: ignore[arg-type]
        is_valid = choice.precision in CPU_PRECISIONS and all(float(value) > 0 for value in choice.seconds.values())
    except (TypeError, ValueError, AttributeError):
        return None
    return choice if is_valid else None


def _store_choice(key: str, choice: PrecisionChoice) -> None:
    """Write the cache and rename it, so that no reader sees half a file. A read-only home means a search each time."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump({**_read_cache(), key: asdict(choice)}, file, indent=1)
        Path(file.name).replace(folder / FILE)
    except (OSError, RuntimeError):
        return
